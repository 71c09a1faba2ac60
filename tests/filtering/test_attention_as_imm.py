"""Attention through the IMM's own pieces, induced transitions, and Sinkhorn's normalization."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import cumulant as cm
from cumulant.filtering import (
    attention_as_imm,
    sinkhorn,
    sinkhorn_attention,
    transition_from_mixing,
)
from cumulant.filtering.attention_imm import _imm
from cumulant.filtering.moments import Affine
from cumulant.filtering.recursion import advance, scheme_of

DOUBLE = torch.float64


def weights(*heads, d=5, d_v=3, E=4, dtype=DOUBLE):
    shapes = {"query": d, "key": d, "value": d_v}
    return {f"{n}_weight": torch.randn(*heads, rows, E, dtype=dtype) for n, rows in shapes.items()}


def covariances(*shape, dtype=DOUBLE):
    root = torch.randn(*shape, shape[-1], dtype=dtype)
    return root @ root.mT


def softmax_attention(x, w, **options):
    x = x.unsqueeze(-3) if w["query_weight"].ndim == 3 else x
    qkv = (x @ w[f"{name}_weight"].mT for name in ("query", "key", "value"))
    return F.scaled_dot_product_attention(*qkv, **options)


def by_loops(x, S, w, Q, scale, seen=None):
    """T28 for one sequence and one head, in numpy, one query and token at a time."""
    x, S, Q = (np.asarray(a) for a in (x, S, Q))
    W_q, W_k, W_v = (np.asarray(w[f"{name}_weight"]) for name in ("query", "key", "value"))
    n, d = len(x), len(W_v)
    means, spreads, mixing = np.zeros((n, d)), np.zeros((n, d, d)), np.zeros((n, n))
    for j in range(n):
        p = np.array([math.exp(scale * (W_q @ x[j]) @ (W_k @ x[i])) for i in range(n)])
        p = p if seen is None else p * np.asarray(seen)[j]
        mixing[:, j] = p / p.sum()
        means[j] = sum(mixing[i, j] * W_v @ x[i] for i in range(n))
        for i in range(n):
            away = W_v @ x[i] - means[j]
            spreads[j] += mixing[i, j] * (W_v @ S[i] @ W_v.T + Q + np.outer(away, away))
    return (torch.from_numpy(a) for a in (means, spreads, mixing))


class TestMeanIsAttention:
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    @pytest.mark.parametrize("heads", [(), (2,)])
    @pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
    def test_plain_and_causal(self, batch, heads, dtype):
        x, w = torch.randn(*batch, 7, 4, dtype=dtype), weights(*heads, dtype=dtype)
        for options in ({}, {"is_causal": True}, {"scale": 0.3}):
            out = attention_as_imm(x, **w, **options)
            assert out.mean.shape == (*batch, *heads, 7, 3)
            assert out.covariance.shape == (*batch, *heads, 7, 3, 3)
            assert out.mixing.shape == (*batch, *heads, 7, 7)
            assert {a.dtype for a in out} == {dtype}
            torch.testing.assert_close(out.mean, softmax_attention(x, w, **options))
            torch.testing.assert_close(out.mixing.sum(-2), torch.ones_like(out.mixing[..., 0]))

    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    def test_masks(self, dtype):
        x, w = torch.randn(3, 7, 4, dtype=dtype), weights(2, dtype=dtype)
        seen = (torch.rand(3, 2, 7, 7) > 0.5) | torch.eye(7, dtype=torch.bool)
        bias = torch.randn(7, 7, dtype=dtype)
        for mask in (
            *(seen, seen[:1, :1], bias, bias.masked_fill(~seen, -math.inf)),
            bias.masked_fill(~seen, torch.finfo(dtype).min),
        ):
            out = attention_as_imm(x, **w, attn_mask=mask)
            torch.testing.assert_close(out.mean, softmax_attention(x, w, attn_mask=mask))

    def test_a_huge_number_common_to_all_keys_is_none(self):
        x, w = torch.randn(6, 4, dtype=DOUBLE), weights()
        lowest = torch.full((6, 6), torch.finfo(DOUBLE).min, dtype=DOUBLE)
        out = attention_as_imm(x, **w, attn_mask=lowest)
        torch.testing.assert_close(out.mean, softmax_attention(x, w))

    def test_peaked_scores(self):
        x, w = torch.randn(6, 4, dtype=DOUBLE), weights()
        out = attention_as_imm(x, **w, scale=300.0)
        torch.testing.assert_close(out.mean, softmax_attention(x, w, scale=300.0))
        assert out.mixing.max() > 1 - 1e-12

    def test_half_precision_comes_back(self):
        x, w = torch.randn(6, 4, dtype=torch.bfloat16), weights(dtype=torch.bfloat16)
        mask = torch.zeros(6, 6, dtype=torch.bfloat16)
        out = attention_as_imm(x, **w, attn_mask=mask)
        assert {a.dtype for a in out} == {torch.bfloat16}
        wide = attention_as_imm(x.double(), **{n: a.double() for n, a in w.items()})
        torch.testing.assert_close(out.mean.double(), wide.mean, rtol=0.02, atol=0.02)

    def test_mixed_precision_is_promoted(self):
        x, w = torch.randn(6, 4), weights()
        out = attention_as_imm(x, **w)
        assert out.mean.dtype == DOUBLE
        torch.testing.assert_close(out.mean, softmax_attention(x.double(), w))

    @pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (1, 4)])
    def test_sizes_at_the_edge(self, shape):
        w = weights()
        out = attention_as_imm(torch.randn(shape, dtype=DOUBLE), **w)
        assert out.mean.shape == (*shape[:-1], 3)
        assert out.mixing.shape == (*shape[:-1], shape[-2])

    def test_strides_and_vmap(self):
        w, x = weights(), torch.randn(4, 3, 7, dtype=DOUBLE).permute(1, 2, 0)
        assert not x.is_contiguous()
        torch.testing.assert_close(attention_as_imm(x, **w).mean, softmax_attention(x, w))
        each = torch.func.vmap(lambda a: attention_as_imm(a, **w).mean)(x)
        torch.testing.assert_close(each, softmax_attention(x, w))


class TestCovariance:
    @pytest.mark.parametrize("causal", [False, True])
    def test_by_loops(self, causal):
        x, S, w = torch.randn(6, 4, dtype=DOUBLE), covariances(6, 4), weights()
        Q = covariances(3)
        out = attention_as_imm(x, S, **w, noise=Q, scale=0.4, is_causal=causal)
        seen = np.tril(np.ones((6, 6))) if causal else None
        for ours, theirs in zip(out, by_loops(x, S, w, Q, 0.4, seen), strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_heads_and_batch_by_loops(self):
        x, S, w = torch.randn(2, 5, 4, dtype=DOUBLE), covariances(2, 5, 4), weights(3)
        Q = covariances(3, 3)
        out = attention_as_imm(x, S, **w, noise=Q)
        for b in range(2):
            for h in range(3):
                one = {name: a[h] for name, a in w.items()}
                theirs = by_loops(x[b], S[b], one, Q[h], 1 / math.sqrt(5))
                for ours, expected in zip(out, theirs, strict=True):
                    torch.testing.assert_close(ours[b, h], expected)

    def test_a_number_is_a_multiple_of_the_identity(self):
        x, w = torch.randn(5, 4, dtype=DOUBLE), weights()
        none, some = attention_as_imm(x, **w), attention_as_imm(x, **w, noise=0.7)
        added = 0.7 * torch.eye(3, dtype=DOUBLE).expand(5, 3, 3)
        torch.testing.assert_close(some.covariance - none.covariance, added)

    def test_certain_tokens_that_agree_stay_certain(self):
        x = torch.randn(1, 4, dtype=DOUBLE).expand(5, 4)
        spread = attention_as_imm(x, **weights()).covariance
        torch.testing.assert_close(spread, torch.zeros_like(spread))


class TestIsTheFilter:
    """The same step through `advance`, the recursion of every filter in the library."""

    def test_advance(self):
        S, W, Q = covariances(2, 6, 4), torch.randn(3, 4, dtype=DOUBLE), covariances(3)
        x, scores = torch.randn(2, 6, 4, dtype=DOUBLE), torch.randn(2, 6, 6, dtype=DOUBLE)
        seen = (torch.rand(2, 6, 6) > 0.3) | torch.eye(6, dtype=torch.bool)
        step = Affine(W, torch.zeros((), dtype=DOUBLE), Q)
        bank, belief, log_mixing = _imm(scores, seen, (x, S), step)
        total = belief.log_weights.exp().sum((-2, -1))
        torch.testing.assert_close(total, torch.ones(2, dtype=DOUBLE))
        rows = bank.log_transition(None).exp().sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))
        out = advance(bank, scheme_of("test", "imm"), belief, None)
        torch.testing.assert_close(out.log_likelihood, torch.zeros(2, dtype=DOUBLE))
        even = torch.full((2, 6), -math.log(6), dtype=DOUBLE)
        torch.testing.assert_close(out.log_predicted, even)
        for b in range(2):
            p = (scores[b] + seen[b].log()).softmax(-1)
            torch.testing.assert_close(log_mixing[b].exp(), p.mT)
            torch.testing.assert_close(out.belief.message[0][b, 0], p @ x[b] @ W.mT)


class TestSeesNothing:
    def blind(self, heads=()):
        seen = torch.rand(*heads, 6, 6) > 0.4
        seen = seen | torch.eye(6, dtype=torch.bool)
        seen[..., 2, :] = False
        return seen

    @pytest.mark.parametrize("kind", ["boolean", "added"])
    def test_zero_mean_and_only_noise(self, kind):
        x, S, w, Q = torch.randn(6, 4, dtype=DOUBLE), covariances(6, 4), weights(2), covariances(3)
        seen = self.blind((2,))
        added = torch.zeros(2, 6, 6, dtype=DOUBLE).masked_fill(~seen, -math.inf)
        mask = seen if kind == "boolean" else added
        out = attention_as_imm(x, S, **w, noise=Q, attn_mask=mask)
        assert torch.equal(out.mean[:, 2], torch.zeros(2, 3, dtype=DOUBLE))
        torch.testing.assert_close(out.covariance[:, 2], Q.expand(2, 3, 3))
        assert torch.equal(out.mixing[..., 2], torch.zeros(2, 6, dtype=DOUBLE))
        rest = [0, 1, 3, 4, 5]
        plain = softmax_attention(x, w, attn_mask=mask)
        torch.testing.assert_close(out.mean[:, rest], plain[:, rest])

    def test_gradients_are_numbers(self):
        x = torch.randn(6, 4, dtype=DOUBLE, requires_grad=True)
        S = covariances(6, 4).requires_grad_()
        w = {name: a.requires_grad_() for name, a in weights().items()}
        for seen in (self.blind(), torch.zeros(6, 6, dtype=torch.bool)):
            out = attention_as_imm(x, S, **w, attn_mask=seen)
            loss = sum(a.square().sum() for a in out)
            for g in torch.autograd.grad(loss, [x, S, *w.values()]):
                assert g.isfinite().all()

    def test_a_token_nobody_sees(self):
        x, w = torch.randn(6, 4, dtype=DOUBLE), weights()
        seen = torch.ones(6, 6, dtype=torch.bool)
        seen[:, 3] = False
        out = attention_as_imm(x, **w, attn_mask=seen)
        torch.testing.assert_close(out.mean, softmax_attention(x, w, attn_mask=seen))
        assert torch.equal(out.mixing[3], torch.zeros(6, dtype=DOUBLE))


class TestGradients:
    def test_gradcheck(self):
        inputs = [torch.randn(4, 3), covariances(4, 3), *weights(2, d=2, d_v=2, E=3).values()]
        inputs = [a.double().requires_grad_() for a in (*inputs, torch.randn(4, 4))]
        hidden = torch.zeros(4, 4, dtype=DOUBLE)
        hidden[1], hidden[2, 0] = -math.inf, -math.inf  # a query that sees nothing

        def function(x, S, q, k, v, bias):
            w = {"query_weight": q, "key_weight": k, "value_weight": v}
            return tuple(attention_as_imm(x, (S + S.mT) / 2, **w, attn_mask=bias + hidden))

        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)

    def test_mean_has_the_gradient_of_attention(self):
        x, w = torch.randn(6, 4, dtype=DOUBLE, requires_grad=True), weights()
        ours = torch.autograd.grad(attention_as_imm(x, **w).mean.cos().sum(), x)
        theirs = torch.autograd.grad(softmax_attention(x, w).cos().sum(), x)
        torch.testing.assert_close(ours, theirs)


class TestTransition:
    def columns(self, *shape, spread=1.0):
        return (spread * torch.randn(*shape, dtype=DOUBLE)).softmax(-2)

    @pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
    def test_stationary(self, spread):
        A = self.columns(3, 9, 9, spread=spread)
        found = transition_from_mixing(A)
        assert found.consistent.all()
        assert (found.current >= 0).all()
        one = torch.ones(3, 9, dtype=DOUBLE)
        torch.testing.assert_close(found.transition.sum(-1), one)
        for b in range(3):
            values, vectors = np.linalg.eig(A[b].numpy())
            perron = vectors[:, values.real.argmax()].real
            perron = torch.from_numpy(perron / perron.sum())
            torch.testing.assert_close(found.current[b], perron, rtol=1e-8, atol=1e-12)

    def test_gives_back_the_mixing(self):
        """Bayes' rule: pi_i T_ij, normalized over i."""
        A = self.columns(2, 7, 7)
        c = torch.rand(2, 7, dtype=DOUBLE)
        c = c / c.sum(-1, keepdim=True)
        pi = (A @ c[..., None])[..., 0]
        for found in (transition_from_mixing(A), transition_from_mixing(A, pi)):
            joint = found.current[..., None] * found.transition
            torch.testing.assert_close(joint / joint.sum(-2, keepdim=True), A)
            torch.testing.assert_close(joint.sum(-2), found.following)
            assert found.consistent.all()
        torch.testing.assert_close(found.following, c)

    def test_reducible_and_periodic(self):
        """Two closed classes, one of which alternates, and a transient mode."""
        rows = [[0.9, 0.5, 0, 0, 0.4], [0.1, 0.5, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0.3]]
        A = torch.tensor([*rows, [0, 0, 0, 0, 0.3]], dtype=DOUBLE)
        found = transition_from_mixing(A)
        assert found.consistent
        # From uniform, mode 4 goes to the classes 4 : 3, and so does its fifth.
        first, second = 2 / 5 + 4 / 35, 2 / 5 + 3 / 35
        expected = [first * 5 / 6, first / 6, second / 2, second / 2, 0.0]
        torch.testing.assert_close(found.current, torch.tensor(expected, dtype=DOUBLE))
        torch.testing.assert_close(found.transition[4], torch.full((5,), 0.2, dtype=DOUBLE))
        torch.testing.assert_close(found.transition.sum(-1), torch.ones(5, dtype=DOUBLE))

    def test_causal_attention_ends_at_the_first_token(self):
        x, w = torch.randn(8, 4, dtype=DOUBLE), weights()
        found = transition_from_mixing(attention_as_imm(x, **w, is_causal=True).mixing)
        assert found.consistent
        torch.testing.assert_close(found.current, torch.eye(8, dtype=DOUBLE)[0])

    def test_slow_chains(self):
        """Two pairs of modes joined by 1e-10: their long run is decided by which way is wider."""
        e = 1e-10
        one = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=DOUBLE)
        A = torch.block_diag((1 - e) * one, (1 - 3 * e) * one)
        A[2:, :2], A[:2, 2:] = e / 2, 3 * e / 2
        current = transition_from_mixing(A).current
        expected = torch.tensor([3 / 8, 3 / 8, 1 / 8, 1 / 8], dtype=DOUBLE)
        torch.testing.assert_close(current, expected, rtol=1e-4, atol=0)

    def test_zero_marginal(self):
        A = torch.tensor([[1.0, 0.5], [0.0, 0.5]], dtype=DOUBLE)
        found = transition_from_mixing(A, torch.tensor([1.0, 0.0], dtype=DOUBLE))
        assert found.consistent
        torch.testing.assert_close(found.transition[1], torch.full((2,), 0.5, dtype=DOUBLE))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_lower_precision(self, dtype):
        A = self.columns(9, 9).to(dtype)
        found = transition_from_mixing(A)
        assert found.consistent
        assert {x.dtype for x in found} == {torch.float32}
        assert not transition_from_mixing(A, torch.full((9,), 1 / 9)).consistent

    def test_no_batch(self):
        pi = torch.full((3,), 1 / 3, dtype=DOUBLE)
        assert transition_from_mixing(self.columns(0, 3, 3), pi).residual.shape == (0,)
        assert transition_from_mixing(self.columns(0, 3, 3)).residual.shape == (0,)


class TestSinkhorn:
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    def test_sums(self, dtype):
        P = sinkhorn(3 * torch.randn(2, 3, 12, 12, dtype=dtype))
        assert P.dtype == dtype
        assert (P > 0).all()
        one = torch.ones(2, 3, 12, dtype=dtype)
        tight = {"rtol": 0, "atol": 1e-12 if dtype == DOUBLE else 1e-6}
        torch.testing.assert_close(P.sum(-1), one, **tight)
        torch.testing.assert_close(P.sum(-2), one, **tight)

    def test_is_a_scaling_of_the_exponential(self):
        """log P - scores = f_i + g_j: second differences vanish."""
        scores = torch.randn(7, 7, dtype=DOUBLE)
        rest = sinkhorn(scores).log() - scores
        rest = rest - rest[:1]
        torch.testing.assert_close(rest, rest[:, :1].expand(7, 7), rtol=0, atol=1e-12)

    def test_two_by_two_in_closed_form(self):
        """p / (1 - p) is the square root of the cross ratio."""
        s = torch.tensor([[0.3, -1.2], [2.0, 1.7]], dtype=DOUBLE)
        odds = math.exp((0.3 + 1.7 + 1.2 - 2.0) / 2)
        assert float(sinkhorn(s)[0, 0]) == pytest.approx(odds / (1 + odds), rel=1e-12)

    def test_huge_offsets(self):
        scores = torch.randn(5, 5, dtype=DOUBLE)
        moved = scores + 1e4 * torch.randn(5, 1, dtype=DOUBLE) - 1e4
        torch.testing.assert_close(sinkhorn(moved), sinkhorn(scores), rtol=1e-8, atol=1e-8)

    def test_forbidden_entries(self):
        """A cyclic band has total support; two blocks do not speak to each other."""
        apart = (torch.arange(6)[:, None] - torch.arange(6)) % 6
        blocks = torch.arange(6)[:, None] // 3 == torch.arange(6) // 3
        for seen in (apart <= 2, blocks):
            P = sinkhorn(torch.randn(6, 6, dtype=DOUBLE).masked_fill(~seen, -math.inf))
            assert torch.equal(P > 0, seen)
            torch.testing.assert_close(P.sum(-1), torch.ones(6, dtype=DOUBLE))
            torch.testing.assert_close(P.sum(-2), torch.ones(6, dtype=DOUBLE))

    def test_derivatives(self):
        scores = torch.randn(2, 4, 4, dtype=DOUBLE, requires_grad=True)
        assert gradcheck(sinkhorn, scores)
        assert gradgradcheck(sinkhorn, scores)
        blocks = torch.arange(4)[:, None] // 2 == torch.arange(4) // 2
        hidden = torch.zeros(4, 4, dtype=DOUBLE).masked_fill(~blocks, -math.inf)
        inner = torch.randn(4, 4, dtype=DOUBLE, requires_grad=True)
        assert gradcheck(lambda x: sinkhorn(x + hidden), inner)
        assert gradgradcheck(lambda x: sinkhorn(x + hidden), inner)

    def test_third_derivative_is_that_of_the_iteration(self):
        scores, along = torch.randn(2, 5, 5, dtype=DOUBLE)

        def iterated(s):
            for _ in range(200):
                s = s - s.logsumexp(-1, keepdim=True)
                s = s - s.logsumexp(-2, keepdim=True)
            return s.exp()

        def third(function):
            t = torch.zeros((), dtype=DOUBLE, requires_grad=True)
            out = function(scores + t * along)[1, 2]
            for _ in range(3):
                (out,) = torch.autograd.grad(out, t, create_graph=True)
            return out

        assert third(iterated).abs() > 1e-2
        torch.testing.assert_close(third(sinkhorn), third(iterated), rtol=1e-7, atol=1e-9)

    def test_vmap(self):
        scores = torch.randn(3, 5, 5, dtype=DOUBLE)
        torch.testing.assert_close(torch.func.vmap(sinkhorn)(scores), sinkhorn(scores))

    @pytest.mark.parametrize("size", [(0, 0), (2, 0, 0), (0, 3, 3), (1, 1)])
    def test_sizes_at_the_edge(self, size):
        P = sinkhorn(torch.randn(size))
        torch.testing.assert_close(P, torch.ones(size))

    @pytest.mark.parametrize("why", ["causal", "steep"])
    def test_says_when_it_does_not_converge(self, why):
        scores = torch.zeros(4, 4, dtype=DOUBLE)
        if why == "causal":
            scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
        else:
            scores = 200 * torch.randn(4, 4, dtype=DOUBLE)
        told = "sinkhorn: unfinished: .*the sum of a row or column is off by"
        with pytest.raises(cm.ConvergenceError, match=told) as caught:
            sinkhorn(scores, max_steps=50)
        assert caught.value.result.value.shape == (4, 4)
        easy = torch.randn(4, 4, dtype=DOUBLE)
        found = sinkhorn(torch.stack([easy, scores]), max_steps=50, throw=False)
        assert found.status.converged.tolist() == [True, False]
        torch.testing.assert_close(found.value[0], sinkhorn(easy))
        assert bool(found.value.isfinite().all())
        with pytest.raises(cm.ConvergenceError, match="1 of 2 unfinished"):
            torch.func.vmap(lambda x: sinkhorn(x, max_steps=50))(torch.stack([easy, scores]))


class TestSinkhornAttention:
    def test_values_by_the_weights(self):
        q, k, v = torch.randn(3, 2, 6, 4, dtype=DOUBLE)
        bias = torch.randn(6, 6, dtype=DOUBLE)
        P = sinkhorn(q @ k.mT / 2 + bias)
        torch.testing.assert_close(sinkhorn_attention(q, k, v, attn_mask=bias), P @ v)
        torch.testing.assert_close(
            sinkhorn_attention(q, k, v, scale=0.3), sinkhorn(0.3 * q @ k.mT) @ v
        )

    def test_keeps_the_mean_of_the_values(self):
        """Each token is seen once in all; softmax attention does not keep the mean."""
        q, k, v = torch.randn(3, 9, 4, dtype=DOUBLE)
        kept = sinkhorn_attention(q, k, v).mean(0) - v.mean(0)
        lost = F.scaled_dot_product_attention(q, k, v).mean(0) - v.mean(0)
        assert kept.abs().max() < 1e-12
        assert lost.abs().max() > 0.05

    def test_boolean_mask(self):
        seen = (torch.arange(6)[:, None] - torch.arange(6)) % 6 <= 2
        q, k, v = torch.randn(3, 6, 4)
        hidden = torch.zeros(6, 6).masked_fill(~seen, -math.inf)
        expected = sinkhorn(q @ k.mT / 2 + hidden) @ v
        torch.testing.assert_close(sinkhorn_attention(q, k, v, attn_mask=seen), expected)

    def test_gradcheck(self):
        q, k, v = (torch.randn(4, 3, dtype=DOUBLE, requires_grad=True) for _ in range(3))
        assert gradcheck(sinkhorn_attention, (q, k, v))

    def test_half_precision_comes_back(self):
        q, k, v = torch.randn(3, 6, 4, dtype=torch.bfloat16)
        assert sinkhorn_attention(q, k, v).dtype == torch.bfloat16
        assert sinkhorn(q @ k.mT).dtype == torch.bfloat16


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"hidden": torch.randn(4)}, r"hidden \(\*batch, N, E\)"),
            ({"hidden": torch.randn(5, 3)}, r"hidden \(5, 3\).*w\.mT"),
            ({"hidden": torch.full((5, 4), math.nan)}, "hidden holds NaN"),
            ({"hidden": torch.full((5, 4), math.inf)}, "hidden must be finite"),
            ({"hidden": torch.ones(5, 4, dtype=torch.cfloat)}, "must be real"),
            ({"key_weight": torch.randn(2, 4)}, r"key_weight \(2, 4\)"),
            ({"key_weight": torch.randn(2, 5, 4)}, "heads in front"),
            ({"value_weight": torch.randn(4)}, r"value_weight \(4,\)"),
            ({"covariance": torch.ones(5, 4)}, "diag_embed"),
            ({"covariance": -torch.eye(4).expand(5, 4, 4)}, "positive semi-definite"),
            ({"covariance": torch.ones(5, 4, 4).triu()}, "covariance must be symmetric"),
            ({"noise": -1.0}, "noise must be positive semi-definite"),
            ({"noise": torch.eye(4)}, r"noise must be a number, \(3, 3\)"),
            ({"noise": "much"}, "noise must be a tensor or a number"),
            ({"scale": math.inf}, "scale must be finite"),
            ({"scale": "auto"}, "scale must be a number"),
            ({"attn_mask": torch.ones(5, 6).bool()}, r"attn_mask must broadcast to \(5, 5\)"),
            ({"attn_mask": torch.ones(5, 5).int()}, "attn_mask must be boolean"),
            ({"attn_mask": torch.full((5, 5), math.nan)}, "NaN"),
            ({"attn_mask": torch.ones(5, 5).bool(), "is_causal": True}, "exclude each other"),
        ],
    )
    def test_attention(self, change, told):
        call = {"hidden": torch.randn(5, 4), **weights(dtype=torch.float32), **change}
        with pytest.raises(cm.InputError, match=f"(?s){told}"):
            attention_as_imm(call.pop("hidden"), call.pop("covariance", None), **call)

    @pytest.mark.parametrize(
        ("mixing", "marginal", "told"),
        [
            (torch.ones(2, 3), None, r"square.*\(2, 3\)"),
            (torch.ones(0, 0), None, "square"),
            (torch.ones(3), None, "square"),
            (torch.tensor([[0.9, 0.1], [0.8, 0.2]]), None, "transposed.*sum to one"),
            (torch.tensor([[1.5, 0.5], [-0.5, 0.5]]), None, "least entry is -0.5"),
            (torch.eye(2) * math.nan, None, "NaN"),
            (torch.eye(2), torch.ones(3) / 3, r"marginal.*\(2,\).*\(3,\)"),
            (torch.eye(2), torch.ones(2), "marginal must be probabilities"),
        ],
    )
    def test_transition(self, mixing, marginal, told):
        with pytest.raises(cm.InputError, match=told):
            transition_from_mixing(mixing, marginal)

    @pytest.mark.parametrize(
        ("scores", "options", "told"),
        [
            (torch.ones(2, 3), {}, r"square.*\(2, 3\)"),
            (torch.ones(3), {}, "square"),
            (torch.full((2, 2), math.nan), {}, "NaN"),
            (torch.full((2, 2), math.inf), {}, r"not \+inf"),
            (torch.tensor([[0.0, -math.inf], [0.0, -math.inf]]), {}, "row or column"),
            (torch.ones(2, 2), {"tol": -1}, "tol must be"),
            (torch.ones(2, 2), {"max_steps": 0}, "max_steps must be"),
        ],
    )
    def test_sinkhorn(self, scores, options, told):
        with pytest.raises(cm.InputError, match=told):
            sinkhorn(scores, **options)

    def test_sinkhorn_attention(self):
        q, k = torch.randn(4, 3), torch.randn(5, 3)
        with pytest.raises(cm.InputError, match="as many queries as keys"):
            sinkhorn_attention(q, k, k)
        with pytest.raises(cm.InputError, match="same number of features"):
            sinkhorn_attention(q, k[:4, :2], k[:4])
        with pytest.raises(cm.InputError, match="row or column"):
            sinkhorn_attention(q, q, q, attn_mask=torch.zeros(4, 4).bool())


def test_blocks_that_hardly_touch():
    """Normalizing alone misses by 1e-6 after 10^5 steps."""
    nearly = torch.tensor([[0, -15, -15], [-13, 0, -1], [-14, -1, 0]], dtype=DOUBLE)
    for scores in (
        nearly,
        30 * torch.randn(6, 6, dtype=DOUBLE),
        10 * torch.randn(20, 20, dtype=DOUBLE),
    ):
        A = sinkhorn(scores)
        assert (A.sum(-1) - 1).abs().max() < 1e-8
        assert (A.sum(-2) - 1).abs().max() < 1e-8


def test_variances_below_zero_and_autocast():
    S = torch.diag_embed(torch.tensor([1.0, -9e-4])).expand(3, 2, 2)
    e = torch.eye(2)
    named = {"query_weight": e, "key_weight": e, "value_weight": e}
    with pytest.raises(cm.InputError, match="positive semi-definite"):
        attention_as_imm(torch.zeros(3, 2), S, **named)
    x = torch.randn(6, 2)
    plain = attention_as_imm(x, **named)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention_as_imm(x, **named)
    assert torch.equal(cast.mean, plain.mean)
