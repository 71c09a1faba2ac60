"""Single precision over ranks, where the scores of a query share a large part."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.func import jvp

import cumulant as cm
from cumulant.distributed import ShardedKeys
from oracle import FIELDS, dense

DOUBLE = torch.float64


def inputs(offset, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, n, 16, generator=generator) for n in (24, 60))
    return q, k + offset, torch.randn(2, 60, 16, generator=generator)


def error(found, truth):
    return float((found.double() - truth).abs().max() / truth.abs().max())


def weights(x):
    """Of a sum whose gradient is compared; the same in every precision."""
    return torch.arange(x.numel(), dtype=DOUBLE).sin().float().to(x.dtype).view(x.shape)


def derived(field, tensors, seed=None):
    """A field, and the gradients of a weighted sum of it."""
    seed = weights(field) if seed is None else seed
    return [
        field.detach(),
        *torch.autograd.grad(field, tensors, seed, retain_graph=True, materialize_grads=True),
    ]


def errors_on_a_rank(group, rank, size, way, offset):
    """Errors of each field and of its gradients in queries and keys; ours and dense float32's.

    Medians over draws.
    """
    out = {}
    for seed in range(5):
        q, k, v = inputs(offset, seed)
        mine = slice(rank, None, size)
        asked = slice(None) if way == "replicated" else mine
        options = {} if way == "replicated" else {"queries": "sharded", "route": way}
        own = [x[:, mine].clone().requires_grad_() for x in (k, v)]
        query = q[:, asked].clone().requires_grad_()
        a = cm.attend(query, ShardedKeys(*own, group=group, **options))
        wide, plain = ([x.to(d).requires_grad_() for x in (q, k, v)] for d in (DOUBLE, q.dtype))
        truth, yardstick = dense(*wide), dense(*plain)
        for name in FIELDS:
            field = getattr(truth, name)
            found = derived(getattr(a, name), (query, own[0]), weights(field)[:, asked].float())
            both = [
                derived(getattr(x, name), tensors[:2])
                for x, tensors in ((truth, wide), (yardstick, plain))
            ]
            parts = ("", "gradient in queries", "gradient in keys")
            for part, ours, exact, theirs, where in zip(
                parts, found, *both, (asked, asked, mine), strict=True
            ):
                if exact.any():
                    pair = [error(x, exact[:, where]) for x in (ours, theirs[:, where])]
                    out.setdefault((name, part), []).append(pair)
    return {key: torch.tensor(x).median(0).values.tolist() for key, x in out.items()}


@pytest.mark.parametrize("way", ["replicated", "gather", "ring"])
@pytest.mark.parametrize("offset", [0.0, 100.0, 3000.0])
def test_as_precise_as_dense_attention(crew, way, offset):
    """To scores of about 1e4."""
    for found in crew.run(errors_on_a_rank, 3, way, offset):
        for (name, part), (ours, theirs) in found.items():
            told = f"{name} {part}: {ours:.1e}, dense float32 {theirs:.1e}"
            assert ours <= 3 * theirs + 1e-6, told


def jvps_on_a_rank(group, rank, size):
    """Errors of the fields' tangents in a ring; ours and dense float32's."""
    q, k, v = inputs(300.0, 0)
    tangents = [torch.randn(x.shape, generator=torch.Generator().manual_seed(7)) for x in (q, k, v)]
    mine = slice(rank, None, size)

    def ours(q, k, v, name):
        shard = ShardedKeys(k, v, group=group, queries="sharded", route="ring")
        return getattr(cm.attend(q, shard), name)

    out = {}
    for name in FIELDS:
        pair = [(x[:, mine], t[:, mine]) for x, t in zip((q, k, v), tangents, strict=True)]
        found = jvp(partial(ours, name=name), *zip(*pair, strict=True))[1]
        exact, theirs = (
            jvp(
                lambda *xs, name=name: getattr(dense(*xs), name),
                tuple(x.to(d) for x in (q, k, v)),
                tuple(t.to(d) for t in tangents),
            )[1][:, mine]
            for d in (DOUBLE, q.dtype)
        )
        out[name] = [error(x, exact) for x in (found, theirs)]
    return out


def test_tangents_in_a_ring(crew):
    for found in crew.run(jvps_on_a_rank, 3):
        for name, (ours, theirs) in found.items():
            assert ours <= 3 * theirs + 1e-6, f"{name}: {ours:.1e}, dense float32 {theirs:.1e}"
