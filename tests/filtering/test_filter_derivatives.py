"""Derivatives of the log-likelihood in every parameter, and long runs in single precision."""

import math

import pytest
import torch

import cumulant as cm
from cumulant.filtering.filters import run
from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.recursion import scheme_of
from switching import model, parameters

F = cm.filtering
NAMES = [
    *("transition", "initial", "dynamics", "dynamics_noise", "dynamics_bias", "dynamics_input"),
    *("emission", "emission_noise", "emission_bias", "emission_input"),
    *("initial_mean", "initial_covariance"),
]


def series(T, p=1, seed=0):
    g = torch.Generator().manual_seed(300 + seed)
    return 2 * torch.randn(T, p, generator=g, dtype=torch.float64)


def likelihood(given, name, y, collapse, u):
    def value(x):
        return F.filter(
            F.SwitchingLinearGaussian(**{**given, name: x}), y, collapse=collapse, inputs=u
        ).log_likelihood

    return value


@pytest.mark.parametrize("collapse", ["gpb1", "gpb2", "imm", 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradcheck_in_every_parameter(name, collapse):
    """As the parameter was given: entries of covariances and transition move one by one."""
    given = parameters(2, 2, 2, 0, inputs=1)
    y, u = series(4, 2), series(4, 1, 9)
    y[1, 0] = torch.nan
    x = given[name].clone().requires_grad_()
    value = likelihood(given, name, y, collapse, u)
    torch.autograd.gradcheck(value, (x,), atol=1e-6)


@pytest.mark.parametrize("name", ["transition", "dynamics_noise", "emission", "initial_mean"])
def test_second_derivatives(name):
    given = parameters(2, 1, 1, 1, inputs=1)
    y, u = series(3), series(3, 1, 9)
    x = given[name].clone().requires_grad_()
    torch.autograd.gradgradcheck(likelihood(given, name, y, "gpb2", u), (x,), atol=1e-6)


@pytest.mark.parametrize("n", [0, 1])
def test_without_a_state_as_well(n):
    given = parameters(2, n, 1, 2)
    for name in ("transition", "emission_bias", "emission_noise"):
        x = given[name].clone().requires_grad_()
        value = likelihood(given, name, series(5), "gpb2", None)
        torch.autograd.gradcheck(value, (x,), atol=1e-6)
        torch.autograd.gradgradcheck(value, (x,), atol=1e-6)


def test_in_the_observations_and_through_the_smoother():
    m = model(2, 2, 1, 3)
    y = series(4).requires_grad_()
    torch.autograd.gradcheck(lambda y: F.filter(m, y).observation_mean, (y,), atol=1e-6)
    torch.autograd.gradcheck(lambda y: F.smooth(m, F.filter(m, y)).mean, (y,), atol=1e-6)
    torch.autograd.gradcheck(
        lambda y: F.smooth(m, F.filter(m, y, collapse="imm")).mode_probabilities, (y,), atol=1e-6
    )
    torch.autograd.gradcheck(lambda y: F.forecast(F.filter(m, y), 2).covariance, (y,), atol=1e-6)


def test_forward_mode_and_torch_func():
    given = parameters(2, 2, 2, 4)
    y = series(3, 2)
    value = likelihood(given, "dynamics", y, "gpb2", None)
    x, v = given["dynamics"], torch.randn(2, 2, 2, dtype=torch.float64)
    slope = torch.func.grad(value)(x)
    _, along = torch.func.jvp(value, (x,), (v,))
    assert abs(float(along - (slope * v).sum())) < 1e-9
    # Many series, large batches: the other way of multiplying and factoring.
    wide = y.expand(300, 3, 2).contiguous()
    many = likelihood(given, "dynamics", wide, "gpb2", None)
    _, alongs = torch.func.jvp(many, (x,), (v,))
    assert (alongs - along).abs().max() < 1e-9
    m = F.SwitchingLinearGaussian(**given)
    each = torch.func.vmap(lambda y: F.filter(m, y).log_likelihood)(wide[:3])
    assert (each - value(x)).abs().max() < 1e-9


@pytest.mark.parametrize("collapse", ["gpb2", "imm"])
def test_many_series_have_the_gradient_of_each(collapse):
    given = parameters(2, 2, 2, 5)
    y = series(300 * 3, 2).reshape(300, 3, 2)
    x = given["emission_noise"].clone().requires_grad_()
    (whole,) = torch.autograd.grad(
        likelihood(given, "emission_noise", y, collapse, None)(x).sum(), x
    )
    parts = 0
    for s in y.split(20):
        (g,) = torch.autograd.grad(
            likelihood(given, "emission_noise", s, collapse, None)(x).sum(), x
        )
        parts = parts + g
    assert (whole - parts).abs().max() < 1e-9 * parts.abs().max()


def test_single_precision_stays_positive_definite_over_a_hundred_thousand_steps():
    """A constant-velocity target, precise sensor, vague start: covariances over ten decades."""
    dt = 0.1
    W = torch.tensor([[1.0, dt], [0.0, 1.0]])
    G = torch.tensor([[dt**2 / 2], [dt]])
    m = F.SwitchingLinearGaussian(
        transition=torch.tensor([[0.95, 0.05], [0.05, 0.95]]),
        dynamics=W,
        dynamics_noise=torch.stack([1e-6 * G @ G.mT, 1.0 * G @ G.mT]),
        emission=torch.tensor([[1.0, 0.0]]),
        emission_noise=torch.full((1, 1), 1e-6),
        initial_mean=torch.zeros(2),
        initial_covariance=1e4 * torch.eye(2),
    )
    chunk = 5000
    g = torch.Generator().manual_seed(0)
    steps = 0.05 * torch.randn(20, chunk, 1, generator=g)
    y = torch.cat(list(steps)).cumsum(0).reshape(20, chunk, 1) / 100
    belief, alike = GaussianBank(m, y[0]).start()
    lowest, total = [], 0.0
    with torch.no_grad():
        for part in y:
            post = run(
                GaussianBank(m, part),
                scheme_of("test", "imm"),
                belief,
                alike=alike,
            )
            belief, alike = post.beliefs[-1], False
            P = post.mode_covariances
            assert P.dtype == torch.float32
            assert torch.equal(P, P.mT)
            # Scaled to correlations, in double precision, so that units do not hide a sign.
            d = P.double().diagonal(dim1=-2, dim2=-1)
            assert (d > 0).all()
            lowest.append((d[..., 0] * d[..., 1] - P[..., 0, 1].double() ** 2).min())
            total += float(post.log_likelihood)
    assert min(lowest) > 0
    assert math.isfinite(total)
