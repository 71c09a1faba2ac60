"""SimCLR on scikit-learn's digits, one batch spread over processes: every view meets all others.

Each process encodes its share of the batch, and `nt_xent(..., group=...)` is the loss of the whole
one: the lines printed are the same, but for rounding, however many processes share the work.
Run it: python examples/sharded_contrastive.py (needs scikit-learn; some seconds on one core)
    or: torchrun --standalone --nproc-per-node 3 examples/sharded_contrastive.py
"""

import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cumulant as cm

STEPS, BATCH, TEMPERATURE = 60, 240, 0.2


def views(x: Tensor, random: torch.Generator) -> Tensor:
    """Pictures, some of their pixels hidden and with noise."""
    seen = torch.rand(x.shape, generator=random) < 0.75
    return x * seen + 0.1 * torch.randn(x.shape, generator=random)


def train(rank: int, size: int) -> None:
    """The same start and the same batches on every rank, each with its part of them."""
    together = dist.is_initialized()
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    x = torch.from_numpy(load_digits().data).float() / 16
    encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model = DistributedDataParallel(encoder) if together else encoder
    group = dist.group.WORLD if together else None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        rows = torch.randint(0, len(x), (BATCH,), generator=random)
        both = [views(x[rows], random).tensor_split(size)[rank] for _ in range(2)]
        first, second = model(torch.cat(both)).chunk(2)
        loss = cm.contrastive.nt_xent(first, second, TEMPERATURE, group=group)
        optimizer.zero_grad()
        (size * loss).backward()  # DDP takes the mean over ranks; the gradient is their sum
        optimizer.step()
        if rank == 0 and step % 15 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


def main() -> None:
    if "WORLD_SIZE" not in os.environ:
        train(0, 1)
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # "nccl" on GPUs
    train(dist.get_rank(), dist.get_world_size())
    gc.collect()  # DDP is gone before its group: gloo's threads must not outlive the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
