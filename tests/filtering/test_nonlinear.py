"""Extended and unscented filters: linear functions, quadrature, and a switching pendulum."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import cumulant as cm
from switching import parameters, seeded

F = cm.filtering
D = torch.float64


def close(a, b, tol=1e-8):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tol, atol=tol)


def series(T, p=1, seed=0):
    g = torch.Generator().manual_seed(400 + seed)
    return 2 * torch.randn(T, p, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("method", ["ekf", "ukf"])
@pytest.mark.parametrize("collapse", ["gpb1", "gpb2", "imm", "exact"])
def test_linear_functions_give_the_linear_filter(method, collapse):
    given = parameters(2, 2, 2, 1, inputs=1)
    linear = F.SwitchingLinearGaussian(**given)

    def f(j, which):
        W, b, B = (given[f"{which}{k}"][j] for k in ("", "_bias", "_input"))
        return lambda x, u: W @ x + b + B @ u

    rest = {
        k: given[k]
        for k in (
            "transition",
            "initial",
            "dynamics_noise",
            "emission_noise",
            "initial_mean",
            "initial_covariance",
        )
    }
    curved = F.SwitchingNonlinear(
        **rest,
        dynamics=[f(0, "dynamics"), f(1, "dynamics")],
        emission=[f(0, "emission"), f(1, "emission")],
        method=method,
        input_size=1,
    )
    y, u = series(4, 2).expand(3, 4, 2).clone(), series(4, 1, 5)
    y[1, 2, 0] = torch.nan
    a = F.filter(linear, y, collapse=collapse, inputs=u)
    b = F.filter(curved, y, collapse=collapse, inputs=u)
    for name in ("log_likelihood", "mean", "covariance", "mode_means", "observation_covariance"):
        close(getattr(a, name), getattr(b, name))
    close(F.smooth(linear, a).mean, F.smooth(curved, b).mean)
    close(F.forecast(a, 2, inputs=u[:2]).covariance, F.forecast(b, 2, inputs=u[:2]).covariance)
    drawn = F.sample(curved, 4, (3,), inputs=u, generator=seeded(0))
    close(drawn.observations, F.sample(linear, 4, (3,), inputs=u, generator=seeded(0)).observations)


def scalar(f, h, method, q=0.1, r=0.2):
    one = torch.ones(1, 1, dtype=torch.float64)
    return F.SwitchingNonlinear(
        transition=one,
        initial=one[0],
        dynamics=f,
        dynamics_noise=q * one,
        emission=h,
        emission_noise=r * one,
        initial_mean=0.7 * one[0],
        initial_covariance=0.3 * one,
        method=method,
    )


def test_extended_filter_by_hand():
    m = scalar(torch.sin, torch.exp, "ekf")
    y = torch.tensor([[1.5]], dtype=torch.float64)
    post = F.filter(m, y)
    x, P = np.sin(0.7), np.cos(0.7) ** 2 * 0.3 + 0.1
    S = np.exp(x) ** 2 * P + 0.2
    K = P * np.exp(x) / S
    close(post.mean, [[x + K * (1.5 - np.exp(x))]])
    close(post.log_likelihood, stats.norm.logpdf(1.5, np.exp(x), np.sqrt(S)))


def test_unscented_prediction_is_nearer_to_quadrature_than_extended():
    def f(x):
        return (1.5 * x).sin() + 0.2 * x**2

    law = stats.norm(0.7, np.sqrt(0.3))
    mean = integrate.quad(lambda x: (np.sin(1.5 * x) + 0.2 * x * x) * law.pdf(x), -6, 8)[0]
    square = integrate.quad(lambda x: (np.sin(1.5 * x) + 0.2 * x * x) ** 2 * law.pdf(x), -6, 8)[0]
    y = torch.tensor([[0.1]], dtype=torch.float64)
    off = {}
    for method in ("ekf", "ukf"):
        post = F.filter(scalar(f, lambda x: x, method), y)
        off[method] = (
            abs(float(post.predicted_mean) - mean),
            abs(float(post.predicted_covariance) - (square - mean**2 + 0.1)),
        )
    assert off["ukf"][0] < 0.2 * off["ekf"][0]
    assert off["ukf"][1] < 0.5 * off["ekf"][1]


def test_a_quadratic_is_exact_for_sigma_points():
    post = F.filter(scalar(lambda x: x**2, lambda x: x, "ukf"), torch.zeros(1, 1).double())
    close(post.predicted_mean, [[0.49 + 0.3]])
    close(post.predicted_covariance, [[[4 * 0.49 * 0.3 + 2 * 0.09 + 0.1]]])


@pytest.mark.parametrize("method", ["ekf", "ukf"])
def test_a_switching_pendulum(method):
    """Two damping regimes, seen through the sine of the angle: modes and angle are found."""

    def swing(damping):
        def f(x):
            return torch.stack(
                [x[0] + 0.1 * x[1], x[1] - 0.1 * (9.8 * x[0].sin() + damping * x[1])]
            )

        return f

    eye = torch.eye(2, dtype=torch.float64)
    m = F.SwitchingNonlinear(
        transition=torch.tensor([[0.98, 0.02], [0.02, 0.98]], dtype=torch.float64),
        dynamics=[swing(0.0), swing(4.0)],
        dynamics_noise=torch.stack([1e-4 * eye, torch.diag(torch.tensor([1e-4, 0.2]).double())]),
        emission=lambda x: x[:1].sin(),
        emission_noise=1e-3 * eye[:1, :1],
        initial_mean=torch.tensor([1.0, 0.0], dtype=torch.float64),
        initial_covariance=0.1 * eye,
        method=method,
    )
    drawn = F.sample(m, 150, (6,), generator=seeded(1))
    post = F.filter(m, drawn.observations)
    smoothed = F.smooth(m, post)
    right = (smoothed.mode_probabilities.argmax(-1) == drawn.modes).double().mean()
    assert float(right) > 0.85
    error = (smoothed.mean - drawn.states)[..., 0].square().mean().sqrt()
    assert float(error) < 0.1
    assert (smoothed.mean - drawn.states).square().mean() < (
        post.mean - drawn.states
    ).square().mean()


def test_gradients_reach_what_the_functions_hold():
    a = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def value(a, method):
        return F.filter(
            scalar(lambda x: (a * x).sin(), torch.exp, method), series(3)
        ).log_likelihood

    torch.autograd.gradcheck(lambda a: value(a, "ekf"), (a,))
    torch.autograd.gradcheck(lambda a: value(a, "ukf"), (a,))


def test_certain_states_have_sigma_points_too():
    one = torch.ones(1, 1, dtype=torch.float64)
    m = scalar(torch.sin, torch.exp, "ukf", q=0.0).replace(initial_covariance=0 * one)
    post = F.filter(m, torch.tensor([[2.0]], dtype=torch.float64))
    close(post.mean, [[np.sin(0.7)]], 1e-6)


def test_bad_functions():
    with pytest.raises(
        cm.InputError, match=r"emission of mode 0 must map a state \(1,\) to \(1,\)"
    ):
        scalar(torch.sin, lambda x: x.repeat(2), "ekf")
    with pytest.raises(cm.InputError, match="method must be 'ekf' or 'ukf'"):
        scalar(torch.sin, torch.sin, "pf")
    with pytest.raises(cm.InputError, match="dynamics must be a function or a list of 1"):
        scalar([torch.sin] * 2, torch.sin, "ekf")


@pytest.mark.parametrize("method", ["ekf", "ukf"])
def test_single_precision(method):
    one = torch.ones(1, 1)
    m = F.SwitchingNonlinear(
        transition=one,
        dynamics=lambda x: torch.stack([x[0] + 0.1 * x[1], 0.6 * x[1] - x[0].sin()]),
        dynamics_noise=torch.eye(2),
        emission=lambda x: x[:1],
        emission_noise=one,
        initial_mean=torch.zeros(2),
        initial_covariance=torch.eye(2),
        method=method,
    )
    drawn = F.sample(m, 5, generator=seeded(0))
    assert drawn.observations.dtype == torch.float32
    single, double = F.filter(m, drawn.observations), F.filter(m.to(D), drawn.observations)
    assert single.mean.dtype == torch.float32
    assert (single.mean - double.mean).abs().max() < 1e-4
