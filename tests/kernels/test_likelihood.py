"""The weighted log-likelihood of one key for each query, against the whole matrix."""

from __future__ import annotations

import itertools

import pytest
import torch

from cumulant.kernels import likelihood as module
from cumulant.kernels.likelihood import likelihood, score_total

M, N, D = 9, 13, 5


def problem(*, bias, cap):
    named = {
        "query": torch.randn(M, D, dtype=torch.float64, requires_grad=True),
        "key": torch.randn(N, D, dtype=torch.float64, requires_grad=True),
    }
    if bias:
        named["bias"] = torch.randn(1, N, dtype=torch.float64, requires_grad=True)
    if cap:
        named["cap"] = torch.full((1, 1), 1.5, dtype=torch.float64)
    target = torch.randint(N, (M,))
    target[1] = target[0]  # two rows that add to the same key
    level, share = torch.rand(2, M, dtype=torch.float64)
    level[2] = share[2] = 0.0
    return named, target, level, share


def dense(named, target, level, share):
    s = named["query"] @ named["key"].mT
    if "cap" in named:
        s = named["cap"] * (s / named["cap"]).tanh()
    s = s + named.get("bias", 0.0)
    G = s.logsumexp(-1)
    return (level * G - share * s.gather(-1, target[:, None])[:, 0]).sum(), G


def leaves(named):
    return [x for x in named.values() if x.requires_grad]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("bias", "cap"), [*itertools.product([False, True], repeat=2)])
class TestAgainstTheWholeMatrix:
    def test_value_and_first_gradient(self, bias, cap):
        named, *rest = problem(bias=bias, cap=cap)
        ours, G = likelihood(named, *rest)
        theirs, expected = dense(named, *rest)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(G[:, 0], expected)
        for a, b in zip(
            torch.autograd.grad(3 * ours, leaves(named)),
            torch.autograd.grad(3 * theirs, leaves(named)),
            strict=True,
        ):
            torch.testing.assert_close(a, b)

    def test_only_what_is_wanted(self, bias, cap):
        named, *rest = problem(bias=bias, cap=cap)
        for name, x in named.items():
            only = {n: y.detach().requires_grad_(n == name) for n, y in named.items()}
            if not x.requires_grad:
                continue
            got = torch.autograd.grad(likelihood(only, *rest).loss, only[name])
            expected = torch.autograd.grad(dense(only, *rest)[0], only[name])
            torch.testing.assert_close(got, expected)

    def test_second_derivatives(self, bias, cap):
        named, *rest = problem(bias=bias, cap=cap)
        out = []
        for f in (likelihood, dense):
            first = torch.autograd.grad(f(named, *rest)[0], leaves(named), create_graph=True)
            out.append(torch.autograd.grad(sum((g**3).sum() for g in first), leaves(named)))
        for a, b in zip(*out, strict=True):
            torch.testing.assert_close(a, b)

    def test_gradients_through_the_normalizers(self, bias, cap):
        named, *rest = problem(bias=bias, cap=cap)
        out = []
        for f in (likelihood, dense):
            loss, G = f(named, *rest)
            out.append(torch.autograd.grad(loss + (G.reshape(-1) ** 2).sum(), leaves(named)))
        for a, b in zip(*out, strict=True):
            torch.testing.assert_close(a, b)


def test_the_gradient_is_made_in_the_forward_pass(monkeypatch):
    """The first backward pass takes it; a second one over a retained graph computes it anew."""
    named, *rest = problem(bias=True, cap=True)
    loss = likelihood(named, *rest).loss
    again = []
    original = module._composed
    monkeypatch.setattr(module, "_composed", lambda *a: again.append(1) or original(*a))
    first = torch.autograd.grad(loss, leaves(named), retain_graph=True)
    assert not again
    kept = [x.clone() for x in first]
    for x in first:
        x.zero_()  # whoever owns a gradient may write into it
    second = torch.autograd.grad(loss, leaves(named))
    assert again
    for a, b in zip(kept, second, strict=True):
        torch.testing.assert_close(a, b)


def test_inputs_that_changed_are_noticed():
    named, *rest = problem(bias=False, cap=False)
    loss = likelihood(named, *rest).loss
    with torch.no_grad():
        named["key"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [1, 3])
def test_totals_of_capped_scores(rows):
    q, k = (torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    w = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    cap = torch.full((1, 1), 1.5, dtype=torch.float64)

    def ours(q, k, w):
        return score_total({"query": q, "key": k, "cap": cap}, w)

    def expected(q, k, w):
        return (1.5 * (q @ k.mT / 1.5).tanh() * w).sum(-1)

    given = (q, k, w)
    torch.testing.assert_close(ours(*given), expected(*given))
    assert torch.autograd.gradcheck(ours, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, given)
