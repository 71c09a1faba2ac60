"""Losses that sample: each is tested for what it estimates (docs/theory.md, T24)."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch.nn import functional as F

import cumulant as cm
from cumulant.contrastive import AliasSampler, nce, negative_sampling, sampled_softmax

DOUBLE = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class TestAliasSampler:
    @pytest.mark.parametrize("n", [1, 2, 7, 1000])
    def test_probabilities_are_exact(self, n):
        """The columns, read back, give the weights: no sampling involved."""
        w = torch.rand(n, dtype=DOUBLE, generator=generator(n)) ** 4
        w[0] += 1e-3
        sampler = AliasSampler(w)
        column = torch.full((n,), 1 / n, dtype=DOUBLE)
        p = torch.zeros(n, dtype=DOUBLE).index_add(0, sampler._alias, column * (1 - sampler._share))
        p += column * sampler._share
        torch.testing.assert_close(p, w / w.sum(), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(sampler.log_probability, (w / w.sum()).log())

    def test_draws_by_chi_squared(self):
        w = torch.tensor([5.0, 1.0, 0.5, 3.0, 0.5], dtype=DOUBLE)
        sampler, expected = AliasSampler(w), (5000 * w / w.sum()).numpy()
        draws = (sampler.sample(5000, generator=generator(seed)) for seed in range(60))
        counts = (torch.bincount(x, minlength=5).numpy() for x in draws)
        p = [stats.chisquare(x, expected).pvalue for x in counts]
        assert stats.kstest(p, "uniform").pvalue > 1e-3

    def test_no_weight_is_never_drawn(self):
        w = torch.tensor([0.0, 1.0, 0.0, 1e-30, 2.0, 0.0])
        x = AliasSampler(w).sample(100, 100, generator=generator())
        assert set(x.unique().tolist()) <= {1, 3, 4}

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (torch.zeros(3), "at least one"),
            (torch.tensor([1.0, -1.0]), "negative"),
            (torch.tensor([1.0, math.inf]), "finite"),
            (torch.tensor([1.0, math.nan]), "NaN"),
            (torch.ones(2, 2), "shape"),
            (torch.ones(0), "shape"),
        ],
    )
    def test_bad_weights(self, weights, message):
        with pytest.raises(cm.InputError, match=message):
            AliasSampler(weights)


class TestSampledSoftmax:
    n, d, m = 40, 3, 5

    def problem(self):
        q = torch.randn(self.m, self.d, dtype=DOUBLE, generator=generator(1))
        v = torch.randn(self.n, self.d, dtype=DOUBLE, generator=generator(2))
        y = torch.randint(0, self.n, (self.m,), generator=generator(3))
        proposal = torch.rand(self.n, dtype=DOUBLE, generator=generator(4)) + 0.2
        return q, v, y, AliasSampler(proposal)

    def estimates(self, samples, runs):
        q, v, y, sampler = self.problem()
        positive = (q * v[y]).sum(-1)
        g = generator(5)
        return torch.stack(
            [
                sampled_softmax(q, v, y, sampler, samples, generator=g) + positive
                for _ in range(runs)
            ]
        )

    def test_unbiased_for_the_normalizer_and_low_for_its_logarithm(self):
        q, v, *_ = self.problem()
        exact = (q @ v.T).logsumexp(-1)
        G = self.estimates(samples=4, runs=1500)
        for estimate, truth, low in ((G.exp(), exact.exp(), False), (G, exact, True)):
            error = estimate.std(0) / math.sqrt(len(G))
            z = (estimate.mean(0) - truth) / error
            assert (z < -5).all() if low else (z.abs() < 4).all()

    def test_bias_by_the_second_order_formula(self):
        """E[G_est] - G is about -Var[e^G] / (2 e^2G) with many samples."""
        q, v, y, sampler = self.problem()
        scores, p = q @ v.T, sampler.log_probability.exp()
        other = torch.ones_like(scores).scatter(1, y[:, None], 0.0)
        samples = 20
        terms = scores.exp() * other / p
        variance = ((terms**2 * p).sum(-1) - (terms * p).sum(-1) ** 2) / samples
        Z = scores.exp().sum(-1)
        G = self.estimates(samples, runs=2500)
        bias = G.mean(0) - Z.log()
        error = G.std(0) / math.sqrt(len(G))
        predicted = -variance / (2 * Z**2)
        assert (predicted < -5 * error).any()  # there is something to see
        assert ((bias - predicted).abs() < 4 * error + 0.35 * predicted.abs()).all()

    def test_gradients_reach_table_and_queries(self):
        q, v, y, sampler = self.problem()
        q, v = q.requires_grad_(), v.requires_grad_()
        ours = sampled_softmax(q, v, y, sampler, 30, generator=generator(6)).mean()
        drawn = sampler.sample(30, generator=generator(6))
        logits = q @ v[drawn].T - sampler.log_probability[drawn] - math.log(30)
        logits = logits.masked_fill(drawn[None] == y[:, None], -math.inf)
        logits = torch.cat([(q * v[y]).sum(-1, keepdim=True), logits], -1)
        theirs = F.cross_entropy(logits, torch.zeros(self.m).long())
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(*(torch.autograd.grad(x, (q, v)) for x in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b)


def fitted(loss, parameters, steps=400):
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()


class TestWhatTheOptimumIs:
    """Scores are free: contexts are unit vectors, so <q_i, v_j> is the table's entry (j, i)."""

    contexts, classes, k = 3, 4, 5

    def joint(self):
        weights = (
            torch.rand(self.contexts, self.classes, dtype=DOUBLE, generator=generator(7)) + 0.3
        )
        return weights / weights.sum()

    def sample(self, joint, count, g):
        pairs = torch.multinomial(joint.flatten(), count, replacement=True, generator=g)
        return pairs // self.classes, pairs % self.classes

    def test_nce_fits_the_log_normalizer(self):
        """The scores are held and only c moves: it goes to G."""
        joint, g = self.joint(), generator(8)
        conditional = joint / joint.sum(1, keepdim=True)
        G = torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)
        table = (conditional.log() + G[:, None]).T  # unnormalized: log-normalizer G
        sampler = AliasSampler(joint.sum(0))
        eye = torch.eye(self.contexts, dtype=DOUBLE)
        c = torch.zeros(self.contexts, dtype=DOUBLE, requires_grad=True)

        def loss():
            i, j = self.sample(joint, 4000, g)
            return nce(eye[i], table, j, sampler, self.k, log_normalizer=c[i], generator=g).mean()

        fitted(loss, [c], 200)
        torch.testing.assert_close(c.detach(), G, atol=0.05, rtol=0)

    def test_nce_with_zero_normalizes_itself(self):
        joint, g = self.joint(), generator(9)
        sampler = AliasSampler(torch.ones(self.classes, dtype=DOUBLE))
        eye = torch.eye(self.contexts, dtype=DOUBLE)
        table = torch.zeros(self.classes, self.contexts, dtype=DOUBLE, requires_grad=True)

        def loss():
            i, j = self.sample(joint, 4000, g)
            return nce(eye[i], table, j, sampler, self.k, generator=g).mean()

        fitted(loss, [table])
        conditional = (joint / joint.sum(1, keepdim=True)).T
        torch.testing.assert_close(table.detach(), conditional.log(), atol=0.08, rtol=0)

    def test_negative_sampling_gives_pmi_minus_log_k(self):
        joint, g = self.joint(), generator(10)
        marginal = joint.sum(0)
        sampler = AliasSampler(marginal)
        eye = torch.eye(self.contexts, dtype=DOUBLE)
        table = torch.zeros(self.classes, self.contexts, dtype=DOUBLE, requires_grad=True)

        def loss():
            i, j = self.sample(joint, 4000, g)
            return negative_sampling(eye[i], table, j, sampler, self.k, generator=g).mean()

        fitted(loss, [table])
        pmi = (joint / joint.sum(1, keepdim=True) / marginal).log().T
        torch.testing.assert_close(table.detach(), pmi - math.log(self.k), atol=0.08, rtol=0)


q, table, target = torch.randn(3, 2), torch.randn(5, 2), torch.arange(3)
sampler = AliasSampler(torch.ones(5))


@pytest.mark.parametrize("loss", [sampled_softmax, nce, negative_sampling])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((q, table[:, :1], target, sampler, 3), "shape"),
        ((q, table, torch.tensor([0, 1, 5]), sampler, 3), "between 0 and 4"),
        ((q, table, target[:2], sampler, 3), "one for each query"),
        ((q, table, target.float(), sampler, 3), "integers"),
        ((q, table, target, AliasSampler(torch.ones(4)), 3), "over the 5 classes"),
        ((q, table, target, torch.ones(5), 3), "AliasSampler"),
        ((q, table, target, sampler, 0), "samples"),
    ],
)
def test_bad_input(loss, arguments, message):
    with pytest.raises(cm.InputError, match=message):
        loss(*arguments)


def test_bad_log_normalizer():
    with pytest.raises(cm.InputError, match="one for each of 3"):
        nce(q, table, target, sampler, 3, log_normalizer=torch.zeros(2))
