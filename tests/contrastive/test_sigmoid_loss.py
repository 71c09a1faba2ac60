"""`sigmoid_loss` against the whole matrix of pairs in double precision."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.nn import functional as F

import cumulant as cm

sigmoid_loss = cm.contrastive.sigmoid_loss
M = 6


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def dense(q, k, pairs, t, b, *, similarity="cosine", seen=None):
    """SigLIP's formula for each anchor, sign by sign."""
    if similarity == "cosine":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    sign = 2 * pairs.to(q.dtype) - 1
    losses = -F.logsigmoid(sign * (q @ k.mT / t + b))
    return (losses if seen is None else losses * seen).sum(-1)


def pairs_of(kind):
    mask = torch.zeros(M, M, dtype=torch.bool)
    if kind == "diagonal":
        return mask.fill_diagonal_(True), {}
    if kind == "several":
        index = torch.stack([torch.arange(M).roll(2), torch.arange(M).roll(3)], 1)
        mask.scatter_(1, index, True)
        mask[0, index[0, 1]] = False
        index[0, 1] = -1
        return mask, {"positives": index}
    if kind == "mask":
        mask = (torch.rand(M, M) < 0.4) | torch.eye(M, dtype=torch.bool)
        return mask, {"positives": mask}
    labels = torch.tensor([5, -1, 5, -1, 5, -1])
    return labels[:, None] == labels, {"labels": labels}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("kind", ["diagonal", "several", "mask", "labels"])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_option(similarity, kind, exclude, reduction):
    """Values, first and second derivatives, in points, temperature and bias."""
    q, k = randn(M, 4), randn(M, 4)
    t, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, -2.0))
    pairs, options = pairs_of(kind)
    seen = None
    if exclude:
        hidden = (torch.rand(M, M) < 0.3) & ~pairs
        options["exclude"], seen = hidden, ~hidden
    leaves = (q, k, t, b)
    seeds = torch.randn(M, dtype=torch.float64)
    rows = dense(q, k, pairs, t, b, similarity=similarity, seen=seen)
    theirs = {"mean": rows.mean(), "sum": rows.sum(), "none": rows}[reduction]
    ours = sigmoid_loss(
        q, k, temperature=t, bias=b, similarity=similarity, reduction=reduction, **options
    )
    torch.testing.assert_close(ours, theirs)
    if reduction == "none":
        ours, theirs = (ours * seeds).sum(), (theirs * seeds).sum()
    first = [torch.autograd.grad(x, leaves, create_graph=True) for x in (ours, theirs)]
    for a, e in zip(*first, strict=True):
        torch.testing.assert_close(a, e)
    second = [torch.autograd.grad(sum((g**2).sum() for g in x), leaves) for x in first]
    for a, e in zip(*second, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)


def test_forward_mode_and_transforms():
    q, k = randn(M, 3).detach(), randn(M, 3).detach()
    pairs = torch.eye(M, dtype=torch.bool)

    def ours(q, k):
        return sigmoid_loss(q, k, temperature=0.5, bias=-1.0, similarity="dot")

    def expected(q, k):
        return dense(q, k, pairs, 0.5, -1.0, similarity="dot").mean()

    along = (torch.randn_like(q), torch.randn_like(k))
    for f in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(f(ours)(q, k), f(expected)(q, k))
    tangents = [torch.func.jvp(f, (q, k), along)[1] for f in (ours, expected)]
    torch.testing.assert_close(*tangents)


def test_batches():
    q, k = randn(2, M, 4), randn(2, M, 4)
    ours = sigmoid_loss(q, k, reduction="none")
    one_by_one = [
        dense(*x, torch.eye(M, dtype=torch.bool), 0.1, -10.0) for x in zip(q, k, strict=True)
    ]
    torch.testing.assert_close(ours, torch.stack(one_by_one))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_far_scores_in_double_precision(scale):
    """softplus is not yet linear at 20; with scores of thousands nothing overflows."""
    q, k = scale * randn(20, 4), randn(20, 4)
    ours = sigmoid_loss(q, k, similarity="dot", temperature=0.2, bias=0.0)
    expected = dense(q, k, torch.eye(20, dtype=torch.bool), 0.2, 0.0, similarity="dot").mean()
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision(dtype):
    q, k = torch.randn(50, 16, dtype=dtype), torch.randn(50, 16, dtype=dtype)
    ours = sigmoid_loss(q, k)
    exact = dense(q.double(), k.double(), torch.eye(50, dtype=torch.bool), 0.1, -10.0).mean()
    assert ours.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=4 * eps + 1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bias": "low"}, "sigmoid_loss: bias must be a number"),
        ({"bias": torch.zeros(2)}, "one entry"),
        ({"bias": float("inf")}, "finite"),
        ({"temperature": 0.0}, "sigmoid_loss: temperature must be positive"),
        ({"reduction": "median"}, "sigmoid_loss: reduction"),
        ({"key": torch.zeros(M, 4)}, "sigmoid_loss: key holds a zero vector"),
        ({"key": torch.ones(M, 5)}, "same d"),
    ],
)
def test_bad_input(wrong, said):
    given = {"query": torch.randn(M, 4), "key": torch.randn(M, 4)} | wrong
    with pytest.raises(cm.InputError, match=said):
        sigmoid_loss(given.pop("query"), given.pop("key"), **given)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.integers(1, 30), st.integers(0, 40), st.integers(0, 2**31), st.floats(-20, 5),
    st.floats(0.02, 5),
)  # fmt: skip
def test_any_shape(anchors, more, seed, bias, temperature):
    torch.manual_seed(seed)
    q, k = randn(anchors, 3), randn(anchors + more, 3)
    pairs = torch.eye(anchors, anchors + more, dtype=torch.bool)
    ours = sigmoid_loss(q, k, bias=bias, temperature=temperature)
    theirs = dense(q, k, pairs, temperature, bias).mean()
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for a, b in zip(*(torch.autograd.grad(x, (q, k)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
