"""Masks made of huge finite numbers mean what they say: scores plus mask, as real numbers.

A row whose entries are all hidden by one number is then plain attention, since softmax does not
change when a constant is added to all scores (T1). The oracle adds mask and scores with 700 digits.
"""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F

import cumulant as cm

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
ROUNDING = {HALF: 2e-3, BRAIN: 1.6e-2, SINGLE: 3e-6, DOUBLE: 1e-13}
LOWS = [
    *((dtype, torch.finfo(dtype).min) for dtype in (HALF, BRAIN, SINGLE, DOUBLE)),
    *((dtype, -1e4) for dtype in (HALF, BRAIN, SINGLE, DOUBLE)),
    *((dtype, low) for dtype in (BRAIN, SINGLE, DOUBLE) for low in (-1e9, -1e5)),
]


def case(dtype, m=4, n=5, d=3):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        (2 * torch.randn(size, d, dtype=DOUBLE, generator=generator)).to(dtype)
        for size in (m, n, n)
    )
    return q, k, v


def masked(dtype, low, m=4, n=5):
    """Row 0 sees nothing, row 1 two keys, row 2 nothing but with a slope, row 3 all."""
    bias = torch.zeros(m, n, dtype=DOUBLE)
    bias[0] = low
    bias[1, 2:] = low
    bias[2] = low
    bias[2, 0] = 2 * low if low > torch.finfo(dtype).min / 2 else -math.inf
    return bias.to(dtype)


def exactly(q, k, v, bias, scale):
    """Mean, entropy and log-normalizer of every row with 700 digits."""
    with mpmath.workdps(700):
        means, entropies, normalizers = [], [], []
        for i in range(len(q)):
            scores = []
            for j in range(len(k)):
                b = float(bias[i, j])
                dot = mpmath.fdot(q[i].tolist(), k[j].tolist())
                scores.append(dot * scale + mpmath.mpf(b) if b > -math.inf else mpmath.mpf("-inf"))
            top = max(scores)
            shifted = [s - top for s in scores]
            total = mpmath.fsum(mpmath.exp(s) for s in shifted)
            p = [mpmath.exp(s) / total for s in shifted]
            columns = v.double().T.tolist()
            means.append([float(mpmath.fdot(p, c)) for c in columns])
            entropies.append(float(-mpmath.fsum(a * mpmath.log(a) for a in p if a > 0)))
            normalizers.append(float(top + mpmath.log(total)))
    return (torch.tensor(x, dtype=DOUBLE) for x in (means, entropies, normalizers))


@pytest.mark.parametrize(("dtype", "low"), LOWS, ids=str)
def test_scores_and_mask_add_as_real_numbers(dtype, low):
    q, k, v = case(dtype)
    bias = masked(dtype, low)
    mean, entropy, normalizer = exactly(q, k, v, bias, 1 / math.sqrt(3))
    slack = ROUNDING[dtype] * float(v.abs().max())
    a = cm.attend(q, k, v, attn_mask=bias)
    with cm.sdpa_replaced():
        replaced = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    merged = cm.merge(
        cm.attend(q, k[:2], v[:2], attn_mask=bias[:, :2]),
        cm.attend(q, k[2:], v[2:], attn_mask=bias[:, 2:]),
    )
    ours = cm.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    windowed = cm.attend(q, k, v, attn_mask=bias, window=(9, 9))
    for found in (a.mean, windowed.mean, merged.mean, ours, replaced):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), mean, rtol=0, atol=slack)
    for found in (a, windowed, merged):
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            found.log_normalizer.double(), normalizer, rtol=1e-6, atol=0, check_dtype=False
        )


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(SINGLE).min])
def test_derivatives_are_those_of_the_row_without_its_mask(low):
    q, k, v = (x.requires_grad_() for x in case(SINGLE))
    bias = masked(SINGLE, low).requires_grad_()
    total = cm.scaled_dot_product_attention(q, k, v, attn_mask=bias).sin().sum()
    found = torch.autograd.grad(total, (q, k, v, bias), create_graph=True)
    again = torch.autograd.grad(sum(g.sin().sum() for g in found), (q, k, v, bias))

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    lifted = bias.detach().double()
    lifted = (lifted - lifted.amax(-1, keepdim=True)).requires_grad_()
    p = (wide[0] @ wide[1].T / math.sqrt(3) + lifted).softmax(-1)
    total = (p @ wide[2]).sin().sum()
    first = torch.autograd.grad(total, (*wide, lifted), create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in first), (*wide, lifted))
    for x, y in zip((*found, *again), (*first, *second), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=3e-5)


def test_a_row_turns_smoothly_from_partly_to_wholly_masked():
    """What is left visible sinks to the level of the hidden: every step is an exact softmax."""
    q, k, v = case(DOUBLE)
    for low in (-65536.0, -1e9):
        for above in (0.0, 0.5, 2.0, 30.0, 1000.0, -low):
            bias = torch.full((4, 5), low, dtype=DOUBLE)
            bias[:, :2] = low + above
            offset = torch.zeros(4, 5, dtype=DOUBLE)
            offset[:, 2:] = -above
            p = (q @ k.T / math.sqrt(3) + offset).softmax(-1)
            found = cm.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            torch.testing.assert_close(found, p @ v, rtol=1e-12, atol=1e-12)


def test_where_torch_differs():
    """In float32 the scores vanish beside -1e9 and torch's row is uniform; beside -1e4 they do not.

    Boolean masks have one answer in both: zeros.
    """
    q, k, v = (x[None, None] for x in case(SINGLE))
    exact = (q.double() @ k.double().mT / math.sqrt(3)).softmax(-1) @ v.double()
    for low, uniform in ((-1e4, False), (-1e9, True), (torch.finfo(SINGLE).min, True)):
        bias = torch.full((4, 5), low)
        theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        expected = v.double().mean(-2, keepdim=True).expand_as(exact) if uniform else exact
        torch.testing.assert_close(theirs.double(), expected, rtol=0, atol=5e-3)
        ours = cm.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5)
    hidden = torch.zeros(4, 5, dtype=torch.bool)
    for function in (F.scaled_dot_product_attention, cm.scaled_dot_product_attention):
        assert torch.equal(function(q, k, v, attn_mask=hidden), torch.zeros_like(q))
