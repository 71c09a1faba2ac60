"""A deep equilibrium model learns where points of two moons belong.

The layer is repeated until nothing changes; its weight is kept below norm one, so that there is
always a fixed point to find.
"""

import math

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import cumulant as cm

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(d, d))

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(0.9 * self.inner(z) + x)


def moons(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle, label = math.pi * torch.rand(n), torch.randint(2, (n,))
    sign = 1.0 - 2 * label
    x = torch.stack([sign * angle.cos() + label, sign * angle.sin() + 0.5 * label], -1)
    return x + 0.1 * torch.randn(n, 2), label


deep = cm.nn.Equilibrium(Layer(16))
model = nn.Sequential(nn.Linear(2, 16), deep, nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for step in range(121):
    x, label = moons(256)
    loss = nn.functional.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        rounds = float(deep.solution.steps.double().mean())
        print(f"step {step:3d}: loss {loss.item():.3f}, {rounds:.1f} rounds to equilibrium")
model.eval()
x, label = moons(2000)
accuracy = (model(x).argmax(-1) == label).double().mean()
print(f"accuracy on new points {accuracy.item():.3f}")
