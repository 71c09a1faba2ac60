"""Received mass, top keys, Renyi entropies and rollout of sharded keys: those of one process."""

from __future__ import annotations

import math

import pytest
import torch

import cumulant as cm
from cumulant.distributed import ShardedKeys, total

# How many keys, and how many queries, each rank has: uneven, and some have none.
KEYS = {1: [11], 2: [4, 7], 3: [4, 0, 7]}
QUERIES = {1: [6], 2: [2, 4], 3: [3, 3, 0]}
WAYS = ("replicated", "gather", "ring")
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "sink": {"sink": 0.3, "window": (3, 2)},
    "softcap": {"softcap": 0.7},
}


def part(counts, rank):
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def inputs(seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=random, dtype=torch.float64) for s in ((2, 6, 4), (2, 11, 4))]


def shard_of(way, keys, group):
    if way == "replicated":
        return ShardedKeys(keys, group=group)
    return ShardedKeys(keys, group=group, queries="sharded", route=way)


def finite(x):
    return x.masked_fill(x.isinf(), 0.0)


def of_queries(a):
    """What each query has, ``(*batch, M, c)``."""
    columns = [a.score_max, *(a.renyi(x) for x in (0, 0.5, 2.0, math.inf))]
    return torch.cat([finite(torch.stack(columns, -1)), a.top_keys(3).weights], -1)


def every_field(group, rank, size, way, options):
    q, k = inputs()
    mine = part(KEYS[size], rank)
    asked = slice(None) if way == "replicated" else part(QUERIES[size], rank)
    full = [x.clone().requires_grad_() for x in (q, k)]
    own = [x[:, s].clone().requires_grad_() for x, s in zip((q, k), (asked, mine), strict=True)]
    a = cm.attend(*full, **options)
    b = cm.attend(own[0], shard_of(way, own[1], group), **options)
    torch.testing.assert_close(of_queries(b), of_queries(a)[:, asked])
    assert torch.equal(b.top_keys(4).indices, a.top_keys(4).indices[:, asked])
    assert torch.equal(b.score_max_key, a.score_max_key[:, asked])
    torch.testing.assert_close(b.received(), a.received()[:, mine])
    torch.testing.assert_close(b.seen_by(), a.seen_by()[:, mine])
    weights = torch.linspace(-1, 1, 6, dtype=torch.float64)
    torch.testing.assert_close(b.received(weights[asked]), a.received(weights)[:, mine])

    # One replicated loss of what queries have and of what keys receive, to second order.
    loss = of_queries(a).sin().sum() + a.received(weights).sin().sum()
    queried, keyed = of_queries(b).sin().sum(), b.received(weights[asked]).sin().sum()
    shared = way == "replicated"
    ours = queried + total(keyed, group) if shared else total(queried + keyed, group)
    torch.testing.assert_close(ours, loss)
    expected = torch.autograd.grad(loss, full, create_graph=True)
    found = torch.autograd.grad(ours, own, create_graph=True)
    for x, y, s in zip(found, expected, (asked, mine), strict=True):
        torch.testing.assert_close(x, y[:, s])
    if shared:
        square = (found[0] ** 2).sum() + total((found[1] ** 2).sum(), group)
    else:
        square = total(sum((x**2).sum() for x in found), group)
    second = torch.autograd.grad(sum((x**2).sum() for x in expected), full)
    for x, y, s in zip(torch.autograd.grad(square, own), second, (asked, mine), strict=True):
        torch.testing.assert_close(x, y[:, s], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_field(crew, way, size, options):
    crew.run(every_field, size, way, OPTIONS[options])


def masked(group, rank, size, way):
    """A bias whose rows are lifted on some ranks only."""
    q, k = (x.float() for x in inputs())
    bias = torch.randn(6, 11, generator=torch.Generator().manual_seed(5))
    bias[2] = -1e5
    bias[3, :4] = -math.inf
    bias[4] = -math.inf
    mine = part(KEYS[size], rank)
    asked = slice(None) if way == "replicated" else part(QUERIES[size], rank)
    a = cm.attend(q, k, attn_mask=bias)
    b = cm.attend(q[:, asked], shard_of(way, k[:, mine], group), attn_mask=bias[:, mine])
    torch.testing.assert_close(of_queries(b), of_queries(a)[:, asked], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(b.received(), a.received()[:, mine])
    torch.testing.assert_close(b.seen_by(), a.seen_by()[:, mine])


@pytest.mark.parametrize("way", ["replicated", "gather"])
def test_masks(crew, way):
    crew.run(masked, 3, way)


def rolled(group, rank, size, way):
    """With queries sharded as the keys are, rows of weights stay with their tokens."""
    x = torch.randn(3, 11, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = part(KEYS[size], rank)
    whole = [cm.attend(x, i * x, is_causal=True) for i in (1, 2)]
    here = [
        cm.attend(x[:, mine], shard_of(way, i * x[:, mine], group), is_causal=True) for i in (1, 2)
    ]
    rows = torch.randn(2, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = cm.rollout(whole, rows)
    torch.testing.assert_close(cm.rollout(here, rows[:, mine]), expected[..., mine])


@pytest.mark.parametrize("way", ["gather", "ring"])
def test_rollout(crew, way):
    crew.run(rolled, 3, way)


def differing(group, rank, size):
    """Ranks that ask for different things stop with an error, not a hang."""
    q, k = inputs()
    a = cm.attend(q, shard_of("replicated", k[:, part(KEYS[size], rank)], group))
    with pytest.raises(cm.GroupError, match=r"top_keys\(2\)"):
        a.top_keys(2 + rank)


def test_ranks_ask_for_the_same(crew):
    crew.run(differing, 2)
