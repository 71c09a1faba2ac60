"""How many clusters self-attention leaves on a sphere, against temperature and time."""

import torch

import cumulant as cm

D = cm.dynamics

betas = [1.0, 4.0, 16.0, 64.0]
times = [0.0, 1.0, 3.0, 10.0, 30.0]
seeded = torch.Generator().manual_seed(0)
x = D.initial_cloud("sphere", 64, 3, dtype=torch.float64, generator=seeded)
clouds = x.expand(len(betas), *x.shape)  # the same start at four temperatures, in one batch
beta = torch.tensor(betas, dtype=torch.float64)[:, None, None]
run = D.flow(clouds, times, beta=beta, contraction=D.Sphere(), rtol=1e-6)
count = D.clusters(run.states).count

print("clusters of 64 points on a sphere")
print("     t " + "".join(f"  beta={b:<4g}" for b in betas))
for t, row in zip(times, count.tolist(), strict=True):
    print(f"{t:6g} " + "".join(f"{k:>9d} " for k in row))
