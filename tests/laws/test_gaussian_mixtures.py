"""T3-T5: Gaussians and mixtures with unequal weights. Oracle: quadrature of torch's density."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as td
from torch.func import grad

import cumulant as cm
from measures.quadrature import plane

DOUBLE = torch.float64
WEIGHTS = torch.tensor([0.05, 0.25, 0.7], dtype=DOUBLE)
MEANS = torch.tensor([[2.0, 0.0], [-1.0, 1.0], [0.0, -1.5]], dtype=DOUBLE)
SHARED = torch.tensor([[0.8, 0.3], [0.3, 0.5]], dtype=DOUBLE)
OWN = torch.stack([SHARED, SHARED.flip(0, 1) * 2, torch.eye(2, dtype=DOUBLE) / 3])


def integral(covariances, eta):
    """log of the integral of the mixture times exp<x, eta>, and the mean there."""
    law = td.MixtureSameFamily(
        td.Categorical(probs=WEIGHTS), td.MultivariateNormal(MEANS, covariances)
    )
    x, logs = plane(law.log_prob, 22, 300)
    logs = logs + eta @ x.mT
    return logs.logsumexp(-1), logs.softmax(-1) @ x


def test_t3_gaussian_mean_moves_by_the_covariance():
    m, eta = torch.tensor([1.0, -2.0], dtype=DOUBLE), torch.tensor([0.4, 0.6], dtype=DOUBLE)
    torch.testing.assert_close(cm.Gaussian(m, SHARED).mean(eta), m + SHARED @ eta)


def test_t4_shared_covariance_is_attention_plus_a_linear_map():
    eta = torch.randn(6, 2, dtype=DOUBLE)
    h = cm.GaussianMixture(MEANS, SHARED, WEIGHTS.log())
    value, mean = integral(SHARED.expand(3, 2, 2), eta)
    torch.testing.assert_close(h.log_normalizer(eta), value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(h.mean(eta), mean, rtol=1e-9, atol=1e-9)
    attention = cm.attend(eta, MEANS, attn_mask=WEIGHTS.log().expand(6, 3), scale=1.0).mean
    torch.testing.assert_close(h.mean(eta), eta @ SHARED + attention)


def test_t4_the_drafts_form_without_weights_is_wrong():
    eta = torch.randn(6, 2, dtype=DOUBLE)
    _, mean = integral(SHARED.expand(3, 2, 2), eta)
    dropped = eta @ SHARED + cm.attend(eta, MEANS, scale=1.0).mean
    assert (dropped - mean).abs().max() > 0.1


def test_t5_own_covariances_have_a_closed_form():
    eta = torch.randn(6, 2, dtype=DOUBLE)
    value, mean = integral(OWN, eta)
    h = cm.GaussianMixture(MEANS, OWN, WEIGHTS.log())
    torch.testing.assert_close(h.log_normalizer(eta), value, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(h.mean(eta), mean, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("covariances", [SHARED, OWN])
def test_t5_jensens_bound(covariances):
    h = cm.GaussianMixture(MEANS, covariances, WEIGHTS.log())
    eta = 2 * torch.randn(50, 2, dtype=DOUBLE)
    value, r = h.log_normalizer(eta), h.responsibilities(eta)
    q = torch.distributions.Dirichlet(torch.ones(3, dtype=DOUBLE)).sample((50,))
    bound = h.log_normalizer_bound(eta, q)
    # Below G, and by exactly torch's KL(q || r).
    gap = td.kl_divergence(td.Categorical(probs=q), td.Categorical(probs=r))
    torch.testing.assert_close(value - bound, gap, rtol=1e-8, atol=1e-10)
    assert (bound < value).all()
    torch.testing.assert_close(h.log_normalizer_bound(eta, r), value)


def test_t5_frozen_weights_touch_value_and_gradient():
    h = cm.GaussianMixture(MEANS, OWN, WEIGHTS.log())
    at = torch.tensor([[0.7, -0.4]], dtype=DOUBLE)
    q = h.responsibilities(at)
    slope = grad(lambda e: h.log_normalizer_bound(e, q).sum())(at)
    torch.testing.assert_close(slope, h.mean(at))
    assert h.log_normalizer_bound(2 * at, q) < h.log_normalizer(2 * at)


def test_t5_the_prior_weights_give_average_moments_and_are_tight_at_zero():
    h = cm.GaussianMixture(MEANS, OWN, WEIGHTS.log())
    eta = torch.randn(4, 2, dtype=DOUBLE)
    slope = grad(lambda e: h.log_normalizer_bound(e).sum())(eta)
    average = (WEIGHTS[:, None, None] * OWN).sum(0)
    torch.testing.assert_close(slope, WEIGHTS @ MEANS + eta @ average)
    zero = torch.zeros(1, 2, dtype=DOUBLE)
    torch.testing.assert_close(h.log_normalizer_bound(zero), h.log_normalizer(zero))
    # One set of weights for all, as a vector.
    torch.testing.assert_close(
        h.log_normalizer_bound(eta, WEIGHTS), h.log_normalizer_bound(eta), rtol=1e-12, atol=1e-12
    )


def test_a_component_without_weight_does_not_count():
    logs = torch.tensor([0.0, -torch.inf], dtype=DOUBLE)
    far = torch.tensor([[1.0, 0.0], [1e6, 1e6]], dtype=DOUBLE)
    eta = torch.randn(3, 2, dtype=DOUBLE)
    for covariances in (SHARED, OWN[:2], torch.ones(2, 2, dtype=DOUBLE), 1.0):
        h = cm.GaussianMixture(far, covariances, logs, covariance_type=None)
        one = cm.GaussianMixture(far[:1], _first(covariances), logs[:1])
        torch.testing.assert_close(h.log_normalizer(eta), one.log_normalizer(eta))
        torch.testing.assert_close(h.mean(eta), one.mean(eta))
        assert h.log_normalizer_bound(eta, torch.tensor([0.5, 0.5])).tolist() == [-torch.inf] * 3
        assert h.sample(eta, 10).isfinite().all()


def _first(covariances):
    shaped = isinstance(covariances, torch.Tensor) and covariances is not SHARED
    return covariances[:1] if shaped else covariances
