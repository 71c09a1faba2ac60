"""The compiled recursion: when it runs, its derivatives, any number of threads."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm
from cumulant.filtering import compiled
from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.native import calls
from cumulant.filtering.recursion import Beliefs
from cumulant.kernels.engines import engines
from switching import model, parameters

pytestmark = pytest.mark.skipif(not engines()["native"].available, reason="no compiled engine here")
F = cm.filtering
D = torch.float64


def series(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=D)


@pytest.fixture
def runs(monkeypatch):
    """How often the compiled recursion ran."""
    made = []
    original = compiled._found

    def found(*arguments):
        made.append(arguments[0])
        return original(*arguments)

    monkeypatch.setattr(compiled, "_found", found)
    return made


def test_it_runs_where_it_can(runs):
    m, y = model(2, 2, 1), series(5, 1)
    assert isinstance(F.filter(m, y).beliefs, Beliefs)
    F.update(F.filter(m, y), y[0])
    F.filter(m, y.float())
    assert len(runs) == 4
    with cm.engine("torch"):
        F.filter(m, y)
    assert len(runs) == 4


def test_what_it_does_not_take_goes_to_torch(runs):
    m, y = model(2, 2, 1), series(5, 1)
    torch.func.grad(lambda y: F.filter(m, y).log_likelihood)(y)
    torch.func.vmap(lambda y: F.filter(m, y).log_likelihood)(series(3, 5, 1))
    with torch.autograd.forward_ad.dual_level():
        F.filter(m, torch.autograd.forward_ad.make_dual(y, y))
    F.filter(F.SwitchingLinearGaussian(**parameters(1, 20, 1)), y)
    assert not runs


def test_lost_digits_end_in_roots():
    """A vague start, nearly exact observations: as by the torch recursion, which carries roots."""
    given = parameters(2, 2, 1)
    given["initial_covariance"] = 1e10 * torch.eye(2, dtype=D)
    given["emission_noise"] = torch.full((1, 1), 1e-6, dtype=D)
    m, y = F.SwitchingLinearGaussian(**given), series(6, 1)
    found = F.filter(m, y)
    assert len(found.beliefs[-1].message) == 3
    with cm.engine("torch"):
        assert torch.equal(F.filter(m, y).covariance, found.covariance)


@pytest.mark.parametrize("collapse", ["gpb2", "imm", 3])
@pytest.mark.parametrize("order", [1, 2])
def test_exactly_observed_states_need_no_roots(monkeypatch, order, collapse):
    """An autoregression without noise, a zero and a gap among the data: as with roots."""
    m = F.autoregression(order, regimes=2, switching=("mean", "variance"))
    y = series(40, 1)
    y[7], y[20] = 0.0, torch.nan
    found = F.filter(m, y, collapse=collapse)
    monkeypatch.setattr(GaussianBank, "loses_digits", lambda self, b: len(b[0].message) == 2)
    with cm.engine("torch"):
        expected = F.filter(m, y, collapse=collapse)
    assert len(found.beliefs[-1].message) == 2
    assert len(expected.beliefs[-1].message) == 3
    assert found.mode_covariances[25:, :, 0, 0].abs().max() < 1e-25
    for name in ("step_log_likelihood", "mean", "covariance", "observation_covariance"):
        a, b = getattr(found, name), getattr(expected, name)
        assert ((a - b).abs() / (1 + b.abs())).max() < 1e-9, name
    a, b = F.smooth(m, found), F.smooth(m, expected)
    torch.testing.assert_close(a.covariance, b.covariance, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(a.mode_probabilities, b.mode_probabilities, rtol=1e-8, atol=1e-8)


def test_exact_observations_that_cancel_end_in_roots():
    """y = x + u exactly, where the noise that is left is 1e-12 of what cancels."""
    eye = torch.eye(2, dtype=D)
    given = {
        "transition": torch.ones(1, 1, dtype=D),
        "dynamics": eye,
        "dynamics_noise": 1e-12 * eye,
        "emission": torch.ones(1, 2, dtype=D),
        "emission_noise": torch.zeros(1, 1, dtype=D),
        "initial_mean": torch.zeros(2, dtype=D),
        "initial_covariance": eye,
    }
    y = 1e-6 * series(6, 1).cumsum(0)
    found = F.filter(F.SwitchingLinearGaussian(**given), y)
    assert len(found.beliefs[-1].message) == 3
    # The first observation has variance 2, the others are steps of variance 2e-12.
    steps = torch.cat([y[:1, 0], y.diff(dim=0)[:, 0]])
    variances = torch.tensor([2.0 + 2e-12, *[2e-12] * 5], dtype=D)
    expected = torch.distributions.Normal(0, variances.sqrt()).log_prob(steps)
    torch.testing.assert_close(found.step_log_likelihood, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("collapse", ["gpb1", "gpb2", "imm", 3, "exact"])
def test_gradients_by_differences(collapse):
    given = parameters(2, 2, 2, seed=4)
    y = series(4, 2)
    y[1, 0] = torch.nan
    names = ("transition", "dynamics", "emission", "dynamics_bias", "emission_bias")

    def value(*xs):
        m = F.SwitchingLinearGaussian(**given).unchecked(dict(zip(names, xs, strict=True)))
        post = F.filter(m, y, collapse=collapse)
        return post.step_log_likelihood, post.mean, post.mode_probabilities

    at = tuple(given[name].requires_grad_() for name in names)
    assert torch.autograd.gradcheck(value, at, atol=1e-7)
    assert torch.autograd.gradgradcheck(lambda *xs: value(*xs)[0].sum(), at, atol=1e-6)


def test_third_derivatives_are_those_of_the_torch_recursion():
    given, y = parameters(2, 1, 1, seed=2), series(4, 1)
    direction = torch.randn(2, 1, 1, dtype=D)

    def third(engine, field):
        x = given["dynamics"].clone().requires_grad_()
        with cm.engine(engine):
            post = F.filter(F.SwitchingLinearGaussian(**given | {"dynamics": x}), y)
            value = getattr(post, field).sum()
            for _ in range(3):
                (slope,) = torch.autograd.grad(value, x, create_graph=True)
                value = (slope * direction).sum()
        return value.detach()

    for field in ("log_likelihood", "covariance"):
        expected = third("torch", field)
        assert abs(expected) > 1e-3
        torch.testing.assert_close(third("native", field), expected, rtol=1e-9, atol=1e-9)


def test_the_log_likelihood_of_a_fit_has_all_derivatives():
    """The pass that finds the total alone, as `fit` uses it."""
    from cumulant.filtering.filters import log_likelihood
    from cumulant.filtering.recursion import scheme_of

    given, y = parameters(2, 2, 1, seed=5), series(3, 6, 1)

    def total(x):
        m = F.SwitchingLinearGaussian(**given).unchecked({"dynamics_noise": x @ x.mT})
        return log_likelihood(m, y, None, scheme_of("", "gpb2")).sum()

    x = torch.linalg.cholesky(given["dynamics_noise"]).requires_grad_()
    assert torch.autograd.gradcheck(total, (x,))
    assert torch.autograd.gradgradcheck(total, (x,))
    with cm.engine("torch"):
        reference = torch.autograd.functional.hessian(total, x.detach())
    found = torch.autograd.functional.hessian(total, x.detach())
    torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-9)


def test_threads_change_nothing():
    m, y = model(3, 2, 2), series(40, 30, 2)
    before = torch.get_num_threads()

    def answer(threads):
        torch.set_num_threads(threads)
        x = y.clone().requires_grad_()
        post = F.filter(m, x)
        return post.covariance, *torch.autograd.grad(post.log_likelihood.sum(), x)

    try:
        for one, three in zip(answer(1), answer(3), strict=True):
            assert torch.equal(one, three)
    finally:
        torch.set_num_threads(before)


def test_a_series_in_a_lane_is_filtered_as_alone():
    m, y = model(3, 4, 2), series(11, 20, 2)
    y[torch.rand(y.shape) < 0.2] = torch.nan
    together = F.filter(m, y)
    for k in (0, 7, 10):
        torch.testing.assert_close(together.mean[k], F.filter(m, y[k]).mean, rtol=1e-12, atol=1e-12)


def test_what_is_kept_of_a_model_follows_changes_in_place():
    """Filters of the same model share what its parameters come to; a write ends that."""
    m, y = model(2, 2, 1), series(5, 1)
    with torch.no_grad():
        before = F.filter(m, y).log_likelihood
        m.parameters["emission"].mul_(1.5)
        after = F.filter(m, y).log_likelihood
    fresh = F.SwitchingLinearGaussian(**m.parameters)
    assert before != after
    assert torch.equal(F.filter(fresh, y).log_likelihood, after)
    slope = m.parameters["emission"].requires_grad_()
    assert F.filter(m, y).log_likelihood.requires_grad
    slope.requires_grad_(False)
    with torch.inference_mode():
        inside = F.filter(m, y).log_likelihood
    assert not F.filter(m, y).log_likelihood.is_inference()
    assert torch.equal(inside, after)


@pytest.mark.parametrize("collapse", ["gpb1", "gpb2", "imm", 3])
def test_the_smoother_agrees_with_the_one_in_square_roots(monkeypatch, collapse):
    m, y = model(2, 3, 2), series(5, 30, 2)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.2] = torch.nan
    ran = []
    original = calls.smoothed
    monkeypatch.setattr(calls, "smoothed", lambda *a: ran.append(1) or original(*a))
    found = F.smooth(m, F.filter(m, y, collapse=collapse))
    assert ran
    with cm.engine("torch"):
        expected = F.smooth(m, F.filter(m, y, collapse=collapse))
    for name in ("mode_probabilities", "transition_probabilities", "mean", "mode_covariances"):
        a, b = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_singular_state_is_smoothed_in_square_roots(monkeypatch):
    """The lags of an autoregression are known: no plain inverse."""
    m, y = F.autoregression(2, regimes=2), series(20, 1)
    answers = []
    original = calls.smoothed

    def smoothed(*given):
        answers.append(original(*given))
        return answers[-1]

    monkeypatch.setattr(calls, "smoothed", smoothed)
    found = F.smooth(m, F.filter(m, y))
    assert answers[0][1].item() == 0
    assert found.covariance.isfinite().all()
    # The last state is exactly what was observed, less the mean of the mode.
    means = y[-1] - m.emission_bias[:, 0]
    torch.testing.assert_close(found.mode_means[-1, :, 0], means)
