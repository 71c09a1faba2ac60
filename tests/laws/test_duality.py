"""T7-T10: entropy, maximum entropy, the ELBO, Bregman divergences.

Oracles: torch's KL and entropies, scipy's optimizers, published numbers.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import distributions as td

import cumulant as cm

DOUBLE = torch.float64


def number(x):
    return torch.tensor(x, dtype=DOUBLE)


PAIRS = {
    "Poisson": cm.Poisson(number(2.0)),
    "Bernoulli": cm.Bernoulli(number(0.3)),
    "Binomial": cm.Binomial(8, number(0.3)),
    "Geometric": cm.Geometric(number(0.6)),
    "Exponential": cm.Exponential(number(3.0)),
    "Gamma": cm.Gamma(number(2.5), number(3.0)),
    "Beta": cm.Beta(number(2.5), number(3.0)),
    "Dirichlet": cm.Dirichlet(torch.tensor([2.0, 3.0, 4.0], dtype=DOUBLE)),
    "Categorical": cm.Categorical(torch.tensor([0.2, 0.3, 0.5], dtype=DOUBLE)),
    "Gaussian": cm.Gaussian(
        torch.tensor([0.0, 1.0], dtype=DOUBLE), torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=DOUBLE)
    ),
    "MeanCovarianceGaussian": cm.MeanCovarianceGaussian(
        torch.tensor([0.0, 1.0], dtype=DOUBLE), torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=DOUBLE)
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_t7_t10_kl_is_torchs(name):
    h = PAIRS[name]
    a, b = 0.1 * torch.randn(2, 3, h.dimension, dtype=DOUBLE)
    if name == "Binomial":  # torch has no KL of binomials; n trials have n times the KL of one
        expected = 8 * td.kl_divergence(
            td.Bernoulli(h.tilt(a).probs), td.Bernoulli(h.tilt(b).probs)
        )
        untilted = 8 * td.kl_divergence(td.Bernoulli(h.tilt(a).probs), td.Bernoulli(h.probs))
    else:
        expected = td.kl_divergence(h.to_torch(a), h.to_torch(b))
        untilted = td.kl_divergence(h.to_torch(a), h.to_torch(torch.zeros_like(a)))
    torch.testing.assert_close(h.kl(a, b), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(h.relative_entropy(a), untilted, rtol=1e-9, atol=1e-12)


def test_t7_shannon_entropy():
    x, w = torch.randn(30, 4, dtype=DOUBLE), torch.randn(30, dtype=DOUBLE)
    eta = torch.randn(5, 4, dtype=DOUBLE)
    p = (eta @ x.mT + w).softmax(-1)
    entropy = td.Categorical(probs=p).entropy()
    torch.testing.assert_close(cm.Empirical(x, w).relative_entropy(eta), -entropy - p @ w)
    p = (eta @ x.mT).softmax(-1)
    torch.testing.assert_close(
        cm.Empirical(x).relative_entropy(eta), -td.Categorical(probs=p).entropy()
    )


def test_t7_the_difference_does_not_cancel_in_single_precision():
    """Scores near 1000, entropies near 1: G - <eta, mean> would keep three digits."""
    x = 100 + torch.randn(50, 4)
    eta = torch.full((1, 4), 2.5)
    exact = cm.Empirical(x.double()).relative_entropy(eta.double())
    assert abs(float(cm.Empirical(x).relative_entropy(eta) - exact)) < 2e-6


def test_t8_jaynes_die():
    """E. T. Jaynes, Brandeis lectures 1962: the die whose throws average 4.5."""
    p = cm.maximum_entropy(torch.arange(1.0, 7.0, dtype=DOUBLE), 4.5)
    jaynes = torch.tensor([0.05435, 0.07877, 0.11416, 0.16545, 0.23977, 0.34749], dtype=DOUBLE)
    torch.testing.assert_close(p, jaynes, rtol=0, atol=6e-6)
    entropy = -(p * p.log()).sum()
    assert float(entropy) == pytest.approx(1.61358, abs=1e-5)


def test_t8_nothing_else_with_that_mean_has_more_entropy():
    x = torch.randn(12, 2, dtype=DOUBLE)
    target = x[:5].mean(0)
    p = cm.maximum_entropy(x, target)
    torch.testing.assert_close(p @ x, target)
    found = scipy.optimize.minimize(
        lambda q: float(np.sum(q * np.log(np.maximum(q, 1e-300)))),
        np.full(12, 1 / 12),
        jac=lambda q: np.log(np.maximum(q, 1e-300)) + 1,
        bounds=[(1e-12, 1)] * 12,
        constraints=[
            {"type": "eq", "fun": lambda q: q.sum() - 1},
            {"type": "eq", "fun": lambda q: q @ x.numpy() - target.numpy()},
        ],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    torch.testing.assert_close(p, torch.tensor(found.x), rtol=0, atol=1e-6)


def test_t8_with_a_prior_it_is_the_closest_law():
    x, prior = torch.arange(4.0, dtype=DOUBLE), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DOUBLE)
    p = cm.maximum_entropy(x, 1.0, log_weights=prior.log())
    away = torch.tensor([1.0, -2.0, 1.0, 0.0], dtype=DOUBLE)  # keeps total and mean
    slope = (away * (p.log() - prior.log())).sum()
    assert abs(float(slope)) < 1e-10
    assert float(p @ x) == pytest.approx(1.0)
    same = cm.maximum_entropy(x, float(prior @ x), log_weights=prior.log())
    torch.testing.assert_close(same, prior)


def test_t8_batches_and_gradients():
    x = torch.arange(1.0, 7.0, dtype=DOUBLE)[:, None]
    targets = torch.tensor([[2.0], [4.5]], dtype=DOUBLE)
    p = cm.maximum_entropy(x.expand(2, 6, 1), targets)
    torch.testing.assert_close((p @ x)[:, 0], targets[:, 0])
    slope = torch.func.jacrev(lambda m: cm.maximum_entropy(x, m))(targets[1])
    # sum_j dp_j = 0 and sum_j x_j dp_j = 1.
    assert abs(float(slope.sum())) < 1e-12
    assert float((x * slope).sum()) == pytest.approx(1.0)


def test_t9_the_elbo_is_below_and_touches_at_the_tilted_law():
    x, w = torch.randn(9, 3, dtype=DOUBLE), torch.randn(9, dtype=DOUBLE)
    h, eta = cm.Empirical(x, w), torch.randn(1, 3, dtype=DOUBLE)
    value = float(h.log_normalizer(eta))

    def elbo(q):
        return float(q @ (x @ eta[0]) - (q * (q.log() - w)).sum())

    for q in torch.distributions.Dirichlet(torch.ones(9, dtype=DOUBLE)).sample((200,)):
        assert elbo(q) < value
    assert elbo(h.probabilities(eta)[0]) == pytest.approx(value)


def test_t9_adaboosts_loss_is_the_same_normalizer():
    """min over q >= 0 of KL(q || h) - <eta, E_q x>, with KL of unnormalized measures, is
    sum h - exp G (Collins, Schapire and Singer 2002): its dual is the exponential loss."""
    x, w = torch.randn(6, 2, dtype=DOUBLE), torch.randn(6, dtype=DOUBLE)
    eta = torch.randn(2, dtype=DOUBLE)
    h, scores = w.exp().numpy(), (x @ eta).numpy()

    def objective(q):
        return float(np.sum(q * np.log(q / h) - q + h) - q @ scores)

    found = scipy.optimize.minimize(
        objective, h, jac=lambda q: np.log(q / h) - scores, bounds=[(1e-9, None)] * 6
    )
    loss = float(cm.Empirical(x, w).log_normalizer(eta).exp())
    assert found.fun == pytest.approx(float(h.sum()) - loss, rel=1e-6)


def test_t10_both_bregman_divergences_are_the_kl():
    x = torch.randn(15, 3, dtype=DOUBLE)
    h = cm.Empirical(x)
    a, b = torch.randn(2, 4, 3, dtype=DOUBLE)
    p, q = (cm.Empirical(x).probabilities(e) for e in (a, b))
    expected = (p * (p.log() - q.log())).sum(-1)
    torch.testing.assert_close(h.kl(a, b), expected)
    mean_a, mean_b = h.mean(a), h.mean(b)
    dual = h.dual(mean_a) - h.dual(mean_b) - ((mean_a - mean_b) * h.link(mean_b)).sum(-1)
    torch.testing.assert_close(dual, expected, rtol=1e-8, atol=1e-10)


def test_the_gradient_of_the_dual_is_the_link():
    x = torch.randn(15, 3, dtype=DOUBLE)
    h, eta = cm.Empirical(x), 0.5 * torch.randn(3, dtype=DOUBLE)
    mean = h.mean(eta)
    torch.testing.assert_close(torch.func.grad(h.dual)(mean), eta)
    torch.testing.assert_close(torch.func.hessian(h.dual)(mean), h.covariance(eta).inverse())


def test_the_dual_is_infinite_outside_and_finite_on_the_boundary():
    die = cm.Empirical(torch.arange(1.0, 7.0, dtype=DOUBLE)[:, None])
    dual = die.dual(torch.tensor([[7.0], [6.0], [3.5]], dtype=DOUBLE))
    assert dual[0] == math.inf
    assert float(dual[1]) == pytest.approx(0.0, abs=1e-9)  # a point mass: entropy zero
    assert float(dual[2]) == pytest.approx(-math.log(6))
