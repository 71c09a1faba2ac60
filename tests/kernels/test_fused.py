"""torch's fused operator under vmap, whichever arguments are batched."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.func import vjp, vmap

import cumulant as cm
from oracle import assert_close

BATCHED = [b for b in itertools.product([False, True], repeat=4) if any(b)]
NAMES = ["".join(n for n, b in zip("qkvg", x, strict=True) if b) for x in BATCHED]


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 3, 5, 4)])
@pytest.mark.parametrize("batched", BATCHED, ids=NAMES)
def test_gradients_under_vmap(shape, batched):
    """Queries, keys, values and the cotangent: each its own for every member, or shared."""
    xs = [torch.randn(*((3,) if b else ()), *shape, dtype=torch.float64) for b in batched]

    def plain(q, k, v):
        return torch.softmax(q @ k.mT / 2, -1) @ v

    def gradients(function, wanted):
        def one(*args):
            def of(*some):
                given = dict(zip(wanted, some, strict=True))
                return function(*(given.get(i, args[i]) for i in range(3)))

            return vjp(of, *(args[i] for i in wanted))[1](args[3])

        return vmap(one, in_dims=tuple(0 if b else None for b in batched))(*xs)

    for wanted in [(0,), (1,), (2,), (0, 1, 2)]:
        found = gradients(cm.scaled_dot_product_attention, wanted)
        assert_close(found, gradients(plain, wanted), 1e-12)
