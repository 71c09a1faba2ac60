"""T18 and T33: approximate alternation between means and natural parameters, and the exact sampler
behind it. Oracles: matrix powers, enumeration, the mixture's own density."""

from __future__ import annotations

import math

import pytest
import torch

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64


def setting(n=5):
    h = cm.Empirical(
        torch.randn(12, 2, dtype=DOUBLE), torch.full((12,), -math.log(12), dtype=DOUBLE)
    )
    return h, h.mean(0.8 * torch.randn(n, 2, dtype=DOUBLE))


def test_exact_link_is_a_bregman_walk_on_the_means():
    """<eta_j, mu_i> - G(eta_j) = G*(mu_i) - KL(p_i, p_j)."""
    h, means = setting()
    eta = h.link(means)
    divergence = torch.stack([h.kl(eta, e.expand_as(eta)) for e in eta], -1)
    prior = torch.randn(5, dtype=DOUBLE)
    exact = (prior - divergence).softmax(-1)
    torch.testing.assert_close(D.alternation_matrix(h, means, log_prior=prior), exact)


def test_stationary_law_is_the_limit_of_powers():
    h, means = setting()
    T = D.alternation_matrix(h, means)
    limit = torch.linalg.matrix_power(T, 2000)[0]
    torch.testing.assert_close(D.stationary(T), limit, atol=1e-9, rtol=0)


def test_alternation_with_the_exact_link_visits_by_the_stationary_law():
    h, means = setting()
    random = torch.Generator().manual_seed(0)
    run = D.alternate(h, means, 3000, generator=random)
    law = D.stationary(D.alternation_matrix(h, means))
    # Only the means that are there are visited, and 14,000 visits follow the law.
    distance = torch.cdist(run.means[-1], means).amin(-1)
    assert distance.max() < 1e-12
    spots = torch.cdist(run.means[200:].reshape(-1, 2), means).argmin(-1)
    frequency = torch.bincount(spots, minlength=5).double() / len(spots)
    torch.testing.assert_close(frequency, law, atol=0.03, rtol=0)


def test_the_draft_without_the_normalizer_has_another_law():
    """Dropping -G favors long natural parameters; the two laws differ."""
    h, means = setting()
    kept = D.stationary(D.alternation_matrix(h, means))
    dropped = D.stationary(D.alternation_matrix(h, means, drop_normalizer=True))
    assert (kept - dropped).abs().max() > 0.05


def test_linear_link_is_exact_for_gaussians_and_stays_in_the_hull_otherwise():
    covariance = torch.tensor([[2.0, 0.3], [0.3, 0.5]], dtype=DOUBLE)
    gaussian = cm.Gaussian(torch.randn(2, dtype=DOUBLE), covariance)
    means = torch.randn(6, 2, dtype=DOUBLE)
    runs = [
        D.alternate(gaussian, means, 20, link=link, generator=torch.Generator().manual_seed(3))
        for link in ("exact", "linear")
    ]
    # Both draw the same indices; the linear run re-derives its pool from where the means are.
    torch.testing.assert_close(runs[0].means[1], runs[1].means[1])
    h, inside = setting()
    run = D.alternate(h, inside, 200, link="linear")
    assert run.blow_up_step is None
    assert run.means.abs().amax() <= h.points.abs().amax()


def test_skip_connection_blows_up():
    h, means = setting()
    run = D.alternate(
        h, means, 1500, link="linear+skip", generator=torch.Generator().manual_seed(0)
    )
    grown = run.log_normalizer.amax(-1)
    assert grown[-1] > 50 * grown[0].abs() + 50
    assert run.means[-1].abs().max() > 10 * h.points.abs().max()
    assert run.means.isfinite().all()
    gaussian = cm.Gaussian(torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE))
    far = D.alternate(gaussian, means, 1500, link="linear+skip")
    assert far.blow_up_step < 2000
    assert far.means.isfinite().all()


def hopfield_mixture(patterns, beta):
    squares = 0.5 * beta * patterns.square().sum(-1)
    return cm.GaussianMixture(patterns, 1 / beta, squares - squares.logsumexp(0))


def test_hopfield_energy_is_minus_log_of_the_mixture():
    """T33, up to a constant."""
    patterns, beta = torch.randn(6, 2, dtype=DOUBLE), 2.5
    state = torch.randn(50, 2, dtype=DOUBLE)
    energy = -torch.logsumexp(beta * state @ patterns.mT, -1) / beta + 0.5 * state.square().sum(-1)
    total = -hopfield_mixture(patterns, beta).log_prob(state) - beta * energy
    assert (total - total[0]).abs().max() < 1e-10


def test_block_gibbs_samples_the_hopfield_density():
    patterns, beta = 0.8 * torch.randn(4, 2, dtype=DOUBLE), 3.0
    random = torch.Generator().manual_seed(0)
    run = D.block_gibbs(patterns, 400, beta=beta, chains=500, generator=random)
    mixture = hopfield_mixture(patterns, beta)
    kept = run.states[100:].reshape(-1, 2)
    mean, covariance = mixture.moments()
    torch.testing.assert_close(kept.mean(0), mean.reshape(2), atol=0.02, rtol=0)
    torch.testing.assert_close(torch.cov(kept.mT), covariance.reshape(2, 2), atol=0.03, rtol=0)
    frequency = torch.bincount(run.index[100:].flatten(), minlength=4).double()
    weights = (0.5 * beta * patterns.square().sum(-1)).softmax(0)
    torch.testing.assert_close(frequency / frequency.sum(), weights, atol=0.02, rtol=0)


def test_block_gibbs_keeps_the_law_it_starts_in():
    """One step from the exact mixture: the two-sample energy statistic stays in its null range."""
    patterns, beta = torch.randn(3, 1, dtype=DOUBLE) * 2, 4.0
    mixture = hopfield_mixture(patterns, beta)
    torch.manual_seed(0)
    start = mixture.sample(n=4000).reshape(4000, 1)
    after = D.block_gibbs(patterns, 1, beta=beta, start=start).states[1]
    from scipy.stats import ks_2samp

    assert ks_2samp(start[:, 0].numpy(), after[:, 0].numpy()).pvalue > 0.001


def test_the_noiseless_update_is_attention():
    patterns, beta = torch.randn(5, 3, dtype=DOUBLE), 2.0
    state = torch.randn(1, 3, dtype=DOUBLE)
    run = D.block_gibbs(patterns, 1, beta=beta, start=state.expand(100_000, 3))
    attention = D.step(state, patterns=patterns, beta=beta) - state
    assert (run.states[1].mean(0) - attention[0]).abs().max() < 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, m: D.alternate(h, m, 3, link="cubic"), "link must be one of"),
        (lambda h, m: D.alternate(h, m, -1), "steps must be"),
        (lambda h, m: D.alternate(h, m[:, :1], 3), "means must have shape"),
        (lambda h, m: D.alternate(h, m + 100, 3), "outside the convex hull"),
        (lambda h, m: D.alternate(h, m, 3, log_prior=torch.zeros(2)), "log_prior must have"),
        (lambda h, m: D.block_gibbs(m, 3, beta=0.0), "beta must be finite and above 0"),
        (lambda h, m: D.block_gibbs(m, 3, start=torch.zeros(2, 5)), "start must have shape"),
        (lambda h, m: D.stationary(torch.ones(2, 2)), "rows sum to 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(cm.InputError, match=message):
        call(*setting())
