"""The formulas of `cost` against what ranks really send, and against torch's count of FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cumulant as cm
from cumulant.distributed import ShardedKeys, cheaper_route, cost, seconds, traffic

WAYS = ("replicated", "gather", "ring")
STEPS = ("forward", "training step")
KEYS = {1: [11], 2: [4, 7], 3: [4, 0, 7], 4: [5, 1, 0, 5]}
QUERIES = {1: [6], 2: [2, 4], 3: [3, 3, 0], 4: [1, 2, 0, 3]}


def sent(group, rank, size, way, step, dtype, width, batch):
    """Bytes and calls of one step, by the counter."""
    trained = step == "training step"
    asked = sum(QUERIES[size]) if way == "replicated" else QUERIES[size][rank]
    shapes = [(batch, asked, 5), (batch, KEYS[size][rank], 5)]
    shapes += [] if width is None else [(batch, KEYS[size][rank], width)]
    query, *held = (torch.randn(s, requires_grad=trained, dtype=dtype) for s in shapes)
    how = {} if way == "replicated" else {"queries": "sharded", "route": way}
    shard = ShardedKeys(*held, group=group, **how)
    with traffic() as counted:
        mean = cm.attend(query, shard).mean
        if trained:
            torch.autograd.grad(mean, (query, *held), torch.ones_like(mean))
    return counted.bytes, counted.calls


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_that_are_sent(crew, way, step, size):
    for dtype, width, batch in (
        (torch.float32, 3, 2),
        (torch.float64, 3, 1),
        (torch.half, None, 1),
    ):
        counted = crew.run(sent, size, way, step, dtype, width, batch)
        queries = sum(QUERIES[size]) if way == "replicated" else QUERIES[size]
        for rank, (number, calls) in enumerate(counted):
            model = cost(
                *(way, queries, KEYS[size], 5, width),
                **{"ranks": size, "rank": rank, "step": step, "batch": batch},
                size=dtype.itemsize,
            )
            assert number == pytest.approx(model.bytes, rel=1e-12, abs=0)
            assert calls == model.messages


def dense(query, key, value):
    """Attention with its matrix of scores, which backward makes again."""
    weights = checkpoint(lambda q, k: (q @ k.mT).softmax(-1), query, key, use_reentrant=False)
    return weights @ value


@pytest.mark.parametrize("batch", [1, 3])
def test_flops_are_those_of_dense_attention_that_makes_its_scores_again(batch):
    inputs = [
        torch.randn(batch, *shape, requires_grad=True) for shape in ((32, 16), (48, 16), (48, 24))
    ]
    for function in (dense, lambda *x: cm.attend(*x).mean):
        with cm.engine("torch"), FlopCounterMode(display=False) as counted:
            mean = function(*inputs)
        assert counted.get_total_flops() == cost("ring", 32, 48, 16, 24, batch=batch).flops
        with cm.engine("torch"), counted:
            torch.autograd.grad(function(*inputs), inputs, torch.ones_like(mean))
        model = cost("ring", 32, 48, 16, 24, batch=batch, step="training step")
        assert counted.get_total_flops() == model.flops


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", STEPS)
def test_all_ranks_together_do_the_work_of_one(way, step):
    one = cost(way, 60, 70, 8, 8, step=step)
    parts = [cost(way, 60, 70, 8, 8, step=step, ranks=4, rank=r) for r in range(4)]
    assert sum(p.flops for p in parts) == one.flops
    assert one.bytes == one.messages == one.hops == 0


def test_a_billion_patterns_on_64_hosts():
    held = 15_625_000 * 128  # numbers on a host
    for size, queries in ((4, 1), (4, 4096), (2, 1), (2, 4096)):
        one = cost("replicated", queries, 10**9, 128, ranks=64, size=size)
        assert one.flops == queries * 15_625_000 * 2 * 256
        # half precision becomes float32 first: written, then read
        assert one.reads == held * size + (2 * held * 4 if size == 2 else 0)
        # two comparisons of seven 8-byte numbers, a maximum, and a sum of 128 features and the mass
        assert one.bytes == 2 * 63 * 7 * 8 + 2 * 63 / 64 * queries * (1 + 129) * 4
        copies = held * 4 + queries * 128 * 4 if size == 2 else 0
        merging = queries * (128 + 4 * 129) * 4
        assert one.memory == held * size + queries * 128 * size + merging + copies
        assert one.hops == 2 * 63 + 2 * 2 * 63
    one = cost("replicated", 1, 10**9, 128, ranks=64)
    took = seconds(one, bandwidth=3.125e9, latency=1e-5, flops=1e12, memory=1e11)
    assert took == pytest.approx(0.08 + one.bytes / 3.125e9 + 378e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
@pytest.mark.parametrize("step", STEPS)
def test_the_cheaper_route_is_the_one_that_sends_less(step, ranks):
    for keys in range(100, 2000, 7):
        sizes = 1000 * ranks, keys * ranks, 64, 32
        bytes_of = {
            way: cost(way, *sizes, ranks=ranks, step=step).bytes for way in ("gather", "ring")
        }
        route = cheaper_route(*sizes, ranks=ranks, gradients=step == "training step")
        assert route == min(bytes_of, key=bytes_of.__getitem__)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("star", 6, 11, 4), {}),
        (("ring", 6, 11, 4), {"step": "backward"}),
        (("ring", 6, 11, 4), {"ranks": 2, "rank": 2}),
        (("ring", [3, 3], 11, 4), {"ranks": 3}),
        (("ring", 6, -1, 4), {}),
        (("ring", 6, 11, 0), {}),
        (("replicated", [3, 3], 11, 4), {"ranks": 2}),
    ],
)
def test_what_does_not_fit_is_an_error(arguments, options):
    with pytest.raises(cm.InputError, match="cost: "):
        cost(*arguments, **options)
