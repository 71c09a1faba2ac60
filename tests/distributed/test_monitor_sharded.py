"""`Monitor` under DDP and FSDP2: every rank trains as without it, and rank 0 alone writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cumulant as cm

STEPS, LENGTH, WORDS = 5, 6, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.inner(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.outer(F.dropout(mixed.transpose(1, 2).flatten(2), 0.2, self.training))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.T


def wrapped(kind, group, size):
    torch.manual_seed(3)
    model = Model()
    if kind.startswith("ddp"):
        called = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh("cpu", list(range(size)))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        called = fully_shard(model, mesh=mesh)
    if kind.endswith("compiled"):
        torch._dynamo.reset()
        called = torch.compile(called, backend="eager")
    return model, called


def trained(kind, group, rank, size, folder=None):
    model, called = wrapped(kind, group, size)
    monitor = None if folder is None else cm.lens.Monitor(called, every=2, folder=folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + rank)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, WORDS, (3, LENGTH))
        loss = F.cross_entropy(called(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(loss)
    if monitor is not None:
        monitor.close()
    weights = [getattr(p, "to_local", p.detach)().detach().clone() for p in model.parameters()]
    return losses, weights, monitor


def compare(group, rank, size, kind, folder):
    losses, weights, _ = trained(kind, group, rank, size)
    same, equal, monitor = trained(kind, group, rank, size, folder)
    table = monitor.table()
    return {
        "losses": losses == same,
        "weights": all(map(torch.equal, weights, equal)),
        "steps": table.groupby("step").size().to_dict(),
        "modules": len(set(table["module"])),
        "entropy": table["entropy"].tolist(),
        "writes": monitor.log.folder is not None,
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "ddp compiled", "fsdp compiled"])
def test_ranks_train_as_without_a_monitor(crew, tmp_path, kind):
    one, two = crew.run(compare, 2, kind, str(tmp_path / "log"))
    for found in (one, two):
        assert found["losses"]
        assert found["weights"]
        assert found["steps"] == {0: 4, 2: 4, 4: 4}
        assert found["modules"] == 2
    assert one["entropy"] != two["entropy"]  # each watches its own batch
    assert (one["writes"], two["writes"]) == (True, False)
    log = cm.lens.MonitorLog.load(Path(tmp_path, "log"))
    assert log.table()["entropy"].tolist() == one["entropy"]
