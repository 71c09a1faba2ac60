"""G alone, G of both sides, hidden pairs, largest scores, coverage: against the whole matrix."""

from __future__ import annotations

import math

import pytest
import torch

from cumulant.kernels.attention import Options
from cumulant.kernels.potential import both_normalizers, log_normalizer
from cumulant.kernels.rows import summarize
from cumulant.kernels.search import largest

pytestmark = pytest.mark.usefixtures("small_tiles")


def problem(scale=1.0, *, tags=True, bias=True, batch=()):
    q = (scale * torch.randn(*batch, 7, 5, dtype=torch.float64)).requires_grad_()
    k = torch.randn(*batch, 9, 5, dtype=torch.float64, requires_grad=True)
    named = {"query": q, "key": k}
    shift = torch.zeros(*batch, 7, 9, dtype=torch.float64)
    if bias:
        named["bias"] = torch.randn(*batch, 1, 9, dtype=torch.float64)
        shift = shift + named["bias"]
    if tags:
        named["query_tag"] = torch.randint(-1, 4, (*batch, 7, 2))
        named["key_tag"] = torch.randint(0, 4, (*batch, 9, 2))
        named["key_tag"][..., 0, :] = 9  # one key that nobody is kept from
        same = named["query_tag"][..., :, None, :] == named["key_tag"][..., None, :, :]
        shift = shift.masked_fill(same.any(-1), -math.inf)
    return named, lambda q, k: q @ k.mT + shift


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["small scores", "large scores"])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("weights", ["equal", "different"])
def test_log_normalizer(scale, batch, weights):
    """Equal cotangents take the gradient of the forward pass, different ones do not."""
    named, scores = problem(scale, batch=batch)
    q, k = named["query"], named["key"]
    w = torch.ones(*batch, 7, dtype=torch.float64)
    w = w if weights == "equal" else torch.randn_like(w)
    ours = log_normalizer(named)[..., 0]
    dense = scores(q, k).logsumexp(-1)
    torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    first = [torch.autograd.grad((w * x).sum(), (q, k), create_graph=True) for x in (ours, dense)]
    for a, b in zip(*first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    second = [torch.autograd.grad(sum((g**2).sum() for g in x), (q, k)) for x in first]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12 * scale**2 * float(b.abs().max()))


def test_the_gradient_is_made_in_the_forward_pass(monkeypatch, engine):
    """With equal cotangents the backward pass walks over no tiles, and asks no kernel."""
    from cumulant.kernels import tiles
    from cumulant.kernels.native import answers

    q, k = (torch.randn(20, 4, requires_grad=True) for _ in range(2))
    G = log_normalizer({"query": q, "key": k})
    ran = []
    module, name = (tiles, "walk") if engine == "torch" else (answers, "_ask")
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: ran.append(1) or original(*a, **k))
    G.mean().backward(retain_graph=True)
    assert not ran
    (G[:, 0] * torch.arange(20)).sum().backward()
    assert ran


def test_a_row_without_keys():
    q = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    tags = {"query_tag": torch.tensor([[0], [1]]), "key_tag": torch.tensor([[0], [0]])}
    G = log_normalizer({"query": q, "key": k, **tags})[:, 0]
    assert G[0] == -math.inf
    G[1].backward()
    assert q.grad[0].abs().max() == 0
    assert k.grad.isfinite().all()


def test_transforms_of_torch_func():
    named, scores = problem(tags=False, bias=False)
    q, k = named["query"].detach(), named["key"].detach()

    def ours(q):
        return log_normalizer({"query": q, "key": k}).sum()

    def dense(q):
        return scores(q, k).logsumexp(-1).sum()

    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        torch.testing.assert_close(transform(ours)(q), transform(dense)(q))
    many = torch.stack([q, 2 * q])
    for f in (torch.func.vmap(torch.func.grad(ours)),):
        torch.testing.assert_close(f(many), torch.func.vmap(torch.func.grad(dense))(many))


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["small scores", "large scores"])
@pytest.mark.parametrize("mask", [False, True])
def test_both_sides(scale, mask):
    named, scores = problem(scale, bias=False)
    hidden = torch.zeros(7, 9, dtype=torch.bool)
    if mask:
        seen = torch.rand(7, 9) < 0.8
        seen[:, 0] = seen[0] = True
        named["mask"], hidden = seen, ~seen

    def ours(q, k):
        both = both_normalizers({**named, "query": q, "key": k})
        return both.rows[:, 0], both.columns[:, 0]

    def dense(q, k):
        s = scores(q, k).masked_fill(hidden, -math.inf)
        return s.logsumexp(1), s.logsumexp(0)

    q, k = named["query"], named["key"]
    for a, b in zip(ours(q, k), dense(q, k), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, (q, k), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, (q, k))


@pytest.mark.parametrize("count", [1, 3, 12])
def test_largest(count):
    named, scores = problem(batch=(2,))
    q, k = named["query"], named["key"]
    found = largest(named, k=count)
    s = torch.nn.functional.pad(scores(q, k), (0, 12), value=-math.inf)
    expected = s.sort(-1, descending=True)
    score = expected.values[..., :count]
    torch.testing.assert_close(found.score, score.detach())
    index = expected.indices[..., :count].masked_fill(score == -math.inf, -1)
    assert torch.equal(found.index, index)


def test_coverage_by_counting():
    """Known rows: all on one key, equal on four, geometric."""
    p = torch.tensor(
        [
            [1.0, 0.0, 0.0, 0.0, 0.0],
            [0.25, 0.25, 0.25, 0.25, 0.0],
            [0.5, 0.25, 0.125, 0.0625, 0.0625],
            [0.2, 0.2, 0.2, 0.2, 0.2],
        ],
        dtype=torch.float64,
    )
    n = p.shape[1]
    named = {
        "query": torch.zeros(4, 1).double(),
        "key": torch.zeros(n, 1).double(),
        "bias": p.log(),
    }
    for mass, expected in ((0.9, [1, 4, 4, 5]), (0.5, [1, 2, 1, 3]), (0.8, [1, 4, 3, 4])):
        found = summarize(named, Options(), spectrum=False, mass=mass)
        k, visible = found["coverage"], found["visible"]
        assert k[:, 0].tolist() == expected
        assert visible[:, 0].tolist() == [1, 4, 5, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nine_tenths_of_equal_weights(dtype):
    for n in (10, 100, 1000):
        named = {"query": torch.zeros(1, 1, dtype=dtype), "key": torch.zeros(n, 1, dtype=dtype)}
        k = summarize(named, Options(), spectrum=False)["coverage"]
        assert int(k) == 9 * n // 10
