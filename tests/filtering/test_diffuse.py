"""A start of which nothing is known: as by statsmodels, by quadrature, and as a limit."""

import math

import pytest
import statsmodels.api as sm
import torch

import cumulant as cm
from switching import seeded

F = cm.filtering
D = torch.float64


def series(gap=False):
    g = seeded(2)
    y = 0.1 * torch.randn(60, 1, generator=g, dtype=D).cumsum(0).cumsum(0)
    y = y + torch.randn(60, 1, generator=g, dtype=D)
    if gap:
        y[1] = torch.nan
    return y


@pytest.mark.parametrize("gap", [False, True])
def test_one_regime_as_by_statsmodels(gap):
    """A local linear trend: likelihood, filtered and smoothed moments."""
    m, y = F.local_linear_trend().diffuse_start(), series(gap)
    post = F.filter(m, y)
    theirs = sm.tsa.UnobservedComponents(y[:, 0].numpy(), "lltrend", use_exact_diffuse=True)
    variances = m.dynamics_noise.diagonal().tolist()
    found = theirs.smooth([float(m.emission_noise), *variances])
    assert abs(float(post.log_likelihood) - found.llf) < 1e-8
    known = 2 + gap
    mean = torch.tensor(found.filtered_state.T)
    covariance = torch.tensor(found.filtered_state_cov).movedim(-1, 0)
    torch.testing.assert_close(post.mean[known:], mean[known:], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(post.covariance[known:], covariance[known:], rtol=1e-7, atol=1e-7)
    assert post.covariance[: known - 1].isnan().all()
    smoothed = F.smooth(m, post)
    mean = torch.tensor(found.smoothed_state.T)
    torch.testing.assert_close(smoothed.mean, mean, rtol=1e-6, atol=1e-6)
    covariance = torch.tensor(found.smoothed_state_cov).movedim(-1, 0)
    torch.testing.assert_close(smoothed.covariance, covariance, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("collapse", ["gpb1", "gpb2", "imm", 3])
def test_several_regimes_are_the_limit_of_large_variances(collapse):
    """log p + log k of a variance k in two states: the gap shrinks as 1 / k."""
    m, y = F.local_linear_trend(regimes=2), series(gap=True)
    exact = float(F.filter(m.diffuse_start(), y, collapse=collapse).log_likelihood)
    gaps = []
    for k in (1e5, 1e7):
        vague = m.replace(initial_covariance=k * torch.eye(2, dtype=D))
        found = float(F.filter(vague, y, collapse=collapse).log_likelihood)
        gaps.append(abs(found + math.log(k) - exact))
    assert gaps[0] < 1e-3
    assert gaps[1] < 0.02 * gaps[0] + 1e-9


def test_correlated_observations_by_quadrature_over_the_start():
    """Two noisy sights of one level: the integral over a flat start, (2 pi)^(-1/2) times."""
    noise = torch.tensor([[1.0, 0.6], [0.6, 2.0]], dtype=D)
    given = {
        "transition": torch.ones(1, 1, dtype=D),
        "dynamics": torch.eye(1, dtype=D),
        "dynamics_noise": 0.3 * torch.eye(1, dtype=D),
        "emission": torch.tensor([[1.0], [0.5]], dtype=D),
        "emission_noise": noise,
        "initial_mean": torch.zeros(1, dtype=D),
    }
    y = torch.tensor([[0.3, -0.8], [1.1, torch.nan], [0.2, 0.9]], dtype=D)
    inf = torch.full((1, 1), torch.inf, dtype=D)
    m = F.SwitchingLinearGaussian(**given, initial_covariance=inf)
    at = torch.linspace(-15, 15, 3001, dtype=D)
    each = [
        F.filter(
            F.SwitchingLinearGaussian(
                **given | {"initial_mean": x.reshape(1)},
                initial_covariance=torch.zeros(1, 1, dtype=D),
            ),
            y,
        ).log_likelihood
        for x in at[::20]
    ]
    total = torch.trapezoid(torch.stack(each).exp(), at[::20]) / math.sqrt(2 * math.pi)
    torch.testing.assert_close(F.filter(m, y).log_likelihood, total.log(), rtol=1e-9, atol=1e-9)


def test_fits_and_derivatives():
    m, y = F.local_level(regimes=2).diffuse_start(), series()
    found = F.fit(m, y)
    assert found.model.diffuse
    assert "level variance" in str(found.summary())
    x = m.dynamics_noise.clone().requires_grad_()

    def value(x):
        return F.filter(m.unchecked({"dynamics_noise": x}), y[:8]).log_likelihood

    assert torch.autograd.gradcheck(value, (x,))
    assert F.forecast(found.posterior, 3).mean.isfinite().all()


def test_what_it_does_not_take_says_so():
    m, y = F.local_level().diffuse_start(), series()
    for call in (
        lambda: F.sample(m, 3),
        lambda: F.most_likely_path(m, y),
        lambda: F.fit(F.SwitchingLinearGaussian(**m.parameters), y, method="em"),
    ):
        with pytest.raises(cm.InputError, match="infinite"):
            call()
    with pytest.raises(cm.InputError, match="do not determine"):
        F.filter(F.local_linear_trend().diffuse_start(), y[:1])
    tied = torch.tensor([[torch.inf, 1.0], [1.0, 1.0]], dtype=D)
    with pytest.raises(cm.InputError, match="covariances must be zero"):
        F.local_linear_trend().replace(initial_covariance=tied)
