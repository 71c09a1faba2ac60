"""Single precision over ranks, where the scores of a query share a large part."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm
from cumulant.distributed import ShardedKeys
from oracle import FIELDS, dense

DOUBLE = torch.float64


def inputs(offset, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, n, 16, generator=generator) for n in (24, 60))
    return q, k + offset, torch.randn(2, 60, 8, generator=generator)


def error(found, truth):
    return float((found.double() - truth).abs().max() / truth.abs().max())


def errors_on_a_rank(group, rank, size, way, offset):
    """Errors of each field, ours over ranks and dense float32's, medians over draws."""
    out = {name: [] for name in FIELDS}
    for seed in range(5):
        q, k, v = inputs(offset, seed)
        truth, plain = dense(*(x.to(DOUBLE) for x in (q, k, v))), dense(q, k, v)
        own = [x[:, rank::size] for x in (k, v)]
        if way == "replicated":
            a, asked = cm.attend(q, ShardedKeys(*own, group=group)), slice(None)
        else:
            shard = ShardedKeys(*own, group=group, queries="sharded", route=way)
            asked = slice(rank, None, size)
            a = cm.attend(q[:, asked], shard)
        for name in FIELDS:
            exact = getattr(truth, name)[:, asked]
            both = (getattr(a, name), getattr(plain, name)[:, asked])
            out[name].append([error(x, exact) for x in both])
    return {name: torch.tensor(x).median(0).values.tolist() for name, x in out.items()}


@pytest.mark.parametrize("way", ["replicated", "gather", "ring"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_as_precise_as_dense_attention(crew, way, offset):
    for found in crew.run(errors_on_a_rank, 3, way, offset):
        for name, (ours, theirs) in found.items():
            assert ours <= 3 * theirs + 1e-6, f"{name}: {ours:.1e}, dense float32 {theirs:.1e}"
