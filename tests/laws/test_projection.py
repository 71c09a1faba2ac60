"""T11, T26: M-projection and conjugate updates.

Oracles: scipy's maximum likelihood fits, torch's KL, Bayes' rule by quadrature.
"""

from __future__ import annotations

import math

import pytest
import scipy.special
import scipy.stats
import torch
from torch import distributions as td

import cumulant as cm
from measures.quadrature import legendre

DOUBLE = torch.float64


def t(*x):
    return torch.tensor(x, dtype=DOUBLE)


def test_gamma_is_scipys_maximum_likelihood():
    """For a sample, M-projection is maximum likelihood."""
    x = td.Gamma(t(2.5)[0], t(1.5)[0]).sample((500,))
    shape, _, scale = scipy.stats.gamma.fit(x.numpy(), floc=0)
    ours = cm.project(x, cm.Gamma)
    assert float(ours.concentration) == pytest.approx(shape, rel=1e-5)
    assert float(ours.rate) == pytest.approx(1 / scale, rel=1e-5)
    again = cm.project(x, td.Gamma)
    assert isinstance(again, td.Gamma)
    torch.testing.assert_close(again.rate, ours.rate)


def test_beta_is_scipys_maximum_likelihood():
    x = td.Beta(t(2.5)[0], t(0.7)[0]).sample((500,))
    a, b, _, _ = scipy.stats.beta.fit(x.numpy(), floc=0, fscale=1)
    ours = cm.project(x, cm.Beta)
    assert float(ours.concentration1) == pytest.approx(a, rel=1e-4)
    assert float(ours.concentration0) == pytest.approx(b, rel=1e-4)


def test_dirichlet_solves_the_digamma_equations():
    x = td.Dirichlet(t(0.3, 2.0, 7.0)).sample((400,))
    a = cm.project(x, cm.Dirichlet).concentration.numpy()
    psi = scipy.special.digamma
    torch.testing.assert_close(
        torch.tensor(psi(a) - psi(a.sum())), x.log().mean(0), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    "family",
    [
        cm.Gamma(t(1e-3, 0.7, 40.0, 1e5, 1e7), t(2.0, 1e-4, 3.0, 1e4, 3.0)),
        cm.Beta(t(1e-2, 0.7, 40.0, 1e4), t(2.0, 1e-2, 3.0, 1e4)),
        cm.Dirichlet(t([1e-2, 1.0, 5.0], [30.0, 1e4, 1.0], [0.1, 0.1, 0.1])),
    ],
)
def test_expectation_to_natural_over_nine_orders_of_magnitude(family):
    again = type(family).from_expectation(family.expectation)
    torch.testing.assert_close(again.natural, family.natural, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(again.expectation, family.expectation, rtol=1e-9, atol=1e-9)


def test_a_mixture_of_gammas_matches_its_own_statistics_not_mean_and_variance():
    parts, weights = cm.Gamma(t(2.0, 9.0), t(1.0, 3.0)), t(0.3, 0.7)
    mixture = cm.Mixture(parts, weights.log())
    ours = cm.project(mixture, cm.Gamma)
    torch.testing.assert_close(ours.expectation, weights @ parts.expectation)
    # Closest in KL(mixture || gamma), by quadrature: nothing near it is closer.
    x, log_w = legendre(0.0, 40.0, 2000)
    law = td.MixtureSameFamily(td.Categorical(weights), td.Gamma(t(2.0, 9.0), t(1.0, 3.0)))
    density = (law.log_prob(x) + log_w).exp()

    def cross(shape, rate):
        return float(-(density * td.Gamma(shape, rate).log_prob(x)).sum())

    a, b = ours.concentration, ours.rate
    best = cross(a, b)
    for da, db in ((0.03, 0.0), (-0.03, 0.0), (0.0, 0.03), (0.0, -0.03), (0.03, 0.03)):
        assert cross(a * (1 + da), b * (1 + db)) > best
    matched = td.Gamma(law.mean**2 / law.variance, law.mean / law.variance)
    assert cross(matched.concentration, matched.rate) > best + 1e-4


@pytest.mark.parametrize("onto", [cm.Gaussian, cm.MeanCovarianceGaussian, td.MultivariateNormal])
def test_gaussian_mixtures_collapse_by_moments(onto):
    means, logs = torch.randn(3, 2, dtype=DOUBLE), t(0.1, 0.3, 0.6).log()
    matrices = torch.eye(2, dtype=DOUBLE) * t(0.5, 1.0, 2.0)[:, None, None]
    law = td.MixtureSameFamily(td.Categorical(logits=logs), td.MultivariateNormal(means, matrices))
    x = law.sample((200_000,))
    for source in (law, cm.GaussianMixture(means, matrices, logs), cm.from_torch(law)):
        out = cm.project(source, onto)
        torch.testing.assert_close(out.loc, law.mean)
        torch.testing.assert_close(out.covariance_matrix.diagonal(dim1=-2, dim2=-1), law.variance)
        torch.testing.assert_close(out.covariance_matrix, x.T.cov(), rtol=0.05, atol=0.05)


def test_samples_weights_and_other_families():
    x = t(1.0, 2.0, 6.0)
    assert float(cm.project(x, cm.Poisson).rate) == pytest.approx(3.0)
    assert float(cm.project(x, cm.Exponential).rate) == pytest.approx(1 / 3)
    assert float(cm.project(x, td.Geometric).probs) == pytest.approx(1 / 4)
    assert float(cm.project(x, cm.Poisson, weights=t(1.0, 1.0, 0.0)).rate) == pytest.approx(1.5)
    assert float(cm.project(cm.Empirical(x[:, None], t(0.0, 0.0, -math.inf)), cm.Poisson).rate) == (
        pytest.approx(1.5)
    )
    hot = torch.eye(3, dtype=DOUBLE)[[0, 0, 1, 2]]
    torch.testing.assert_close(cm.project(hot, cm.Categorical).probs, t(0.5, 0.25, 0.25))
    torch.testing.assert_close(cm.project(hot, td.OneHotCategorical).probs, t(0.5, 0.25, 0.25))
    batch = torch.randn(100, 4, 2, dtype=DOUBLE)
    out = cm.project(batch, cm.Gaussian)
    assert out.batch_shape == (4,)
    torch.testing.assert_close(out.loc, batch.mean(0))


def test_onto_a_family_with_something_fixed():
    """Binomial keeps its trials; an empirical measure is tilted."""
    x = t(3.0, 4.0, 8.0)
    out = cm.project(x, cm.Binomial(10, 0.5))
    assert float(out.probs) == pytest.approx(0.5)
    assert float(out.total_count) == 10
    base = cm.Empirical(torch.arange(1.0, 7.0, dtype=DOUBLE)[:, None])
    tilted = cm.project(t(3.0, 6.0), base)
    assert float(tilted.mean()) == pytest.approx(4.5)
    assert float(cm.project(x, cm.FixedShapeGamma(2.0, 1.0)).rate) == pytest.approx(2 / 5)
    vectors = torch.nn.functional.normalize(torch.randn(50, 3, dtype=DOUBLE) + 1, dim=-1)
    ball = cm.project(vectors, cm.VonMisesFisher)
    torch.testing.assert_close(ball.mean(), vectors.mean(0))
    again = cm.project(vectors, cm.VonMisesFisher(torch.ones(3, dtype=DOUBLE), 2.0))
    torch.testing.assert_close(again.natural, ball.natural)


def test_distributions_without_a_closed_form_ask_for_samples():
    law = td.LogNormal(t(0.0)[0], t(0.5)[0])
    with pytest.raises(cm.InputError, match="samples="):
        cm.project(law, cm.Gamma)
    out = cm.project(law, cm.Gamma, samples=200_000)
    assert float(out.expectation[1]) == pytest.approx(0.0, abs=0.01)  # E[log x]
    # Mean and variance are known, so a Gaussian needs no draws.
    exact = cm.project(law, cm.Gaussian)
    torch.testing.assert_close(exact.loc[0], law.mean)
    assert float(exact.covariance_matrix) == pytest.approx(float(law.variance))
    assert float(cm.project(law, cm.Exponential).rate) == pytest.approx(1 / float(law.mean))
    exponential = cm.project(td.Exponential(t(2.0)[0]), cm.Gamma)
    assert float(exponential.concentration) == pytest.approx(1.0)


def test_projection_is_differentiable():
    x = td.Gamma(t(2.5)[0], t(1.5)[0]).sample((20,))
    assert torch.autograd.gradcheck(
        lambda x: (cm.project(x, cm.Gamma).natural, cm.project(x, cm.Gamma).concentration),
        x.requires_grad_(),
    )
    y = td.Beta(t(2.5)[0], t(1.5)[0]).sample((20,))
    assert torch.autograd.gradcheck(lambda y: cm.project(y, cm.Beta).natural, y.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda y: cm.project(y, cm.Beta).natural, y[:5])


@pytest.mark.parametrize("nu", [3.0, 40.0])
def test_t11_the_conjugate_prior_expects_chi_over_nu(nu):
    """E[grad G] = chi / nu under exp(<chi, eta> - nu G(eta)), by quadrature over eta (Poisson)."""
    chi = 2.0 * nu
    eta, log_w = legendre(-12.0, 6.0, 4000)
    h = cm.Poisson(1.0)
    logs = chi * eta - nu * (h.log_normalizer(eta[:, None]) + 1) + log_w
    mean = h.mean(eta[:, None])[:, 0]
    assert float((logs.softmax(0) * mean).sum()) == pytest.approx(chi / nu, rel=1e-9)


def bayes(log_prior, log_likelihood, low, high):
    """(evidence, posterior mean) by quadrature."""
    x, log_w = legendre(low, high, 4000)
    logs = log_prior(x) + log_likelihood(x) + log_w
    return float(logs.logsumexp(0)), float((logs.softmax(0) * x).sum())


def test_t26_gamma_priors():
    prior, law = cm.Gamma(2.0, 1.5), td.Gamma(t(2.0)[0], t(1.5)[0])
    for likelihood, data, log_likelihood in (
        (cm.Poisson, t(3.0, 0.0, 5.0), lambda x, y: td.Poisson(x).log_prob(y)),
        (cm.Exponential, t(0.3, 2.0), lambda x, y: td.Exponential(x).log_prob(y)),
    ):
        evidence, mean = bayes(
            law.log_prob,
            lambda x, f=log_likelihood, data=data: sum(f(x, y) for y in data),
            1e-12,
            40.0,
        )
        out = cm.posterior(prior, likelihood, data)
        assert float(out.log_evidence) == pytest.approx(evidence, rel=1e-7)
        assert float(out.measure.concentration / out.measure.rate) == pytest.approx(mean, rel=1e-7)


def test_t26_beta_and_dirichlet_priors():
    data = t(1.0, 1.0, 0.0, 1.0)
    evidence, mean = bayes(
        td.Beta(t(2.0)[0], t(3.0)[0]).log_prob,
        lambda x: data.sum() * x.log() + (1 - data).sum() * (1 - x).log(),
        0.0,
        1.0,
    )
    out = cm.posterior(cm.Beta(t(2.0)[0], t(3.0)[0]), cm.Bernoulli, data)
    assert float(out.log_evidence) == pytest.approx(evidence, rel=1e-9)
    assert float(out.measure.moments()[0]) == pytest.approx(mean, rel=1e-9)
    # Polya's urn: the chance of the sequence (0, 0, 2) from concentrations (1, 2, 3).
    hot = torch.eye(3, dtype=DOUBLE)[[0, 0, 2]]
    out = cm.posterior(cm.Dirichlet(t(1.0, 2.0, 3.0)), cm.Categorical, hot)
    assert float(out.log_evidence.exp()) == pytest.approx(1 / 6 * 2 / 7 * 3 / 8)
    torch.testing.assert_close(out.measure.concentration, t(3.0, 2.0, 4.0))


@pytest.mark.parametrize("kind", [cm.Gaussian, cm.MeanCovarianceGaussian])
def test_t26_gaussian_priors(kind):
    """Against torch's joint density: stacked observations are one Gaussian vector."""
    prior_mean, prior_cov = t(1.0, -1.0), t([2.0, 0.3], [0.3, 1.0])
    noise = t([0.5, 0.1], [0.1, 0.4])
    y = torch.randn(3, 2, dtype=DOUBLE)
    out = cm.posterior(kind(prior_mean, prior_cov), cm.Gaussian(t(0.0, 0.0), noise), y)
    assert type(out.measure) is kind
    joint = td.MultivariateNormal(
        prior_mean.repeat(3), prior_cov.repeat(3, 3) + torch.block_diag(noise, noise, noise)
    )
    assert float(out.log_evidence) == pytest.approx(float(joint.log_prob(y.flatten())))
    gain = prior_cov.repeat(1, 3) @ joint.precision_matrix
    expected = prior_mean + gain @ (y.flatten() - prior_mean.repeat(3))
    torch.testing.assert_close(out.measure.loc, expected)
    torch.testing.assert_close(
        out.measure.covariance_matrix, prior_cov - gain @ prior_cov.repeat(3, 1)
    )


def test_posteriors_come_in_batches():
    prior = cm.Gamma(t(1.0, 2.0), t(3.0, 4.0))
    out = cm.posterior(prior, cm.Poisson, t([1.0, 2.0], [5.0, 5.0]))
    torch.testing.assert_close(out.measure.concentration, t(4.0, 12.0))
    torch.testing.assert_close(out.measure.rate, t(5.0, 6.0))
    assert out.log_evidence.shape == (2,)


def test_pairs_that_are_not_conjugate_are_refused():
    with pytest.raises(cm.InputError, match="not conjugate"):
        cm.posterior(cm.Gamma(1.0, 1.0), cm.Bernoulli, t(1.0))
    with pytest.raises(cm.InputError, match="0 or 1"):
        cm.posterior(cm.Beta(1.0, 1.0), cm.Bernoulli, t(0.5))
    with pytest.raises(cm.InputError, match="counts"):
        cm.posterior(cm.Gamma(1.0, 1.0), cm.Poisson, t(-1.0))
    with pytest.raises(cm.InputError, match="one-hot"):
        cm.posterior(cm.Dirichlet([1.0, 1.0]), cm.Categorical, t([0.5, 0.5]))
