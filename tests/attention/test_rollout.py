"""`rollout` against the product of matrices that Abnar & Zuidema (2020) define."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm
from oracle import assert_close, band_mask, dense, differentiate

DOUBLE = torch.float64
B, H, N, D, LAYERS = 2, 3, 5, 4, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def states():
    return [(normal(B, H, N, D, seed=2 * i), normal(B, H, N, D, seed=2 * i + 1)) for i in range(3)]


CALLS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"mask": band_mask(N, N, upper=0)}),
    "window": ({"window": (2, 1)}, {"mask": band_mask(N, N, lower=-2, upper=1)}),
    "softcap": ({"softcap": 0.7}, {"softcap": 0.7}),
    "sink": ({"sink": normal(H)}, {"sink": normal(H)[:, None]}),
}


def matrix(layers, residual, **options):
    """R as the paper writes it: all N x N, heads averaged, the identity mixed in."""
    out = torch.eye(N, dtype=DOUBLE).expand(B, N, N)
    for q, k in layers:
        weights = dense(q, k, k, **options).weights[..., :N].mean(1)
        out = (residual * torch.eye(N, dtype=DOUBLE) + (1 - residual) * weights) @ out
    return out


@pytest.mark.parametrize("residual", [0.5, 0.0, 0.9])
@pytest.mark.parametrize("call", CALLS)
def test_equals_the_product_of_matrices(call, residual):
    ours, theirs = CALLS[call]
    layers = [cm.attend(q, k, **ours) for q, k in states()]
    expected = matrix(states(), residual, **theirs)
    found = cm.rollout(layers, range(N), residual=residual)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(cm.rollout(layers, -1, residual=residual), expected[:, -1])
    torch.testing.assert_close(
        cm.rollout(layers, torch.tensor([3, 0]), residual=residual), expected[:, [3, 0]]
    )
    weights = normal(B, 2, N, seed=8)
    torch.testing.assert_close(cm.rollout(layers, weights, residual=residual), weights @ expected)


def test_grouped_heads_and_packed_sequences():
    q, k = normal(B, 4, N, D), normal(B, 2, N, D, seed=1)
    a = cm.attend(q, k, enable_gqa=True)
    b = cm.attend(q, k.repeat_interleave(2, 1))
    torch.testing.assert_close(cm.rollout([a, a], 2), cm.rollout([b, b], 2))
    x = normal(H, 7, D)
    packed = cm.attend_packed(x, x, query_offsets=[0, 3, 7], is_causal=True)
    alone = cm.attend(x[:, 3:], x[:, 3:], is_causal=True)
    found = cm.rollout([packed, packed], 6)
    assert (found[:3] == 0).all()
    torch.testing.assert_close(found[3:], cm.rollout([alone, alone], 3))


def test_one_head_without_a_batch():
    q, k = normal(N, D), normal(N, D, seed=1)
    weights = 0.5 * torch.eye(N, dtype=DOUBLE) + 0.5 * dense(q, k, k).weights
    a = cm.attend(q, k)
    torch.testing.assert_close(cm.rollout([a, a], 0), (weights @ weights)[0])


@pytest.mark.parametrize("word", ["F", "R", "FR", "RR"])
def test_derivatives(word):
    (q, k), *_ = states()
    tangents = (normal(*q.shape, seed=20), normal(*k.shape, seed=21))
    ours = lambda q, k: (cm.rollout([cm.attend(q, k, is_causal=True)] * 2, [4, 1]),)
    mask = band_mask(N, N, upper=0)
    theirs = lambda q, k: (matrix([(q, k)] * 2, 0.5, mask=mask)[:, [4, 1]],)
    found, expected = (
        differentiate(f, word, tangents, lambda x: x.cos())(q, k) for f in (ours, theirs)
    )
    assert_close(found, expected, 1e-11)


BAD = {
    "none": (lambda a: cm.rollout([], 0), "at least one layer"),
    "index": (lambda a: cm.rollout([a], N), "indices from -5 to 4"),
    "rows": (lambda a: cm.rollout([a], torch.ones(2, 3)), r"\(rows, 5\)"),
    "residual": (lambda a: cm.rollout([a], 0, residual=2.0), "residual must be"),
    "shapes": (
        lambda a: cm.rollout([a, cm.attend(normal(H, N, D), normal(H, N, D))], 0),
        "one shape",
    ),
    "cross": (
        lambda a: cm.rollout([cm.attend(normal(B, H, N, D), normal(B, H, 3, D))], 0),
        "3 keys and 5 queries",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    ask, message = BAD[case]
    with pytest.raises(cm.InputError, match=message):
        ask(cm.attend(*states()[0]))
