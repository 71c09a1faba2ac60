"""T17: what particles and Gaussian populations do. Oracles: scipy's ODE solvers on the stated
equations, closed forms, sampling error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64


def equiangular(n, cosine, d):
    gram = (1 - cosine) * torch.eye(n, dtype=DOUBLE) + cosine
    values, vectors = torch.linalg.eigh(gram)
    x = vectors * values.clamp_min(0).sqrt()
    return torch.cat([x, torch.zeros(n, d - n, dtype=DOUBLE)], -1)


@pytest.mark.parametrize("beta", [0.0, 1.0, 6.0])
@pytest.mark.parametrize(
    ("n", "cosine", "d"), [(2, 0.0, 2), (5, 0.0, 7), (8, -0.1, 8), (6, 0.4, 6)]
)
def test_equiangular_points_follow_their_equation(n, cosine, d, beta):
    times = torch.linspace(0, 4, 9, dtype=DOUBLE)
    run = D.flow(equiangular(n, cosine, d), times, beta=beta, contraction=D.Sphere())
    rate = lambda t, g: 2 * (1 - g) * ((n - 1) * g + 1) / (np.exp(beta * (1 - g)) + n - 1)
    exact = solve_ivp(rate, (0, 4), [cosine], t_eval=times.numpy(), rtol=1e-12, atol=1e-13).y[0]
    inner = run.states @ run.states.mT
    i, j = torch.triu_indices(n, n, 1)
    error = (inner[:, i, j] - torch.from_numpy(exact)[:, None]).abs().max()
    assert error < 1e-6
    assert (run.states.norm(dim=-1) - 1).abs().max() < 1e-7


def test_small_steps_approach_the_flow():
    x = D.initial_cloud("sphere", 10, 3, dtype=DOUBLE)
    exact = D.flow(x, [0.0, 2.0], beta=2.0, contraction=D.Sphere()).final
    errors = [
        (D.simulate(x, k, step_size=2.0 / k, beta=2.0, contraction=D.Sphere()).final - exact)
        .abs()
        .max()
        .item()
        for k in (100, 200)
    ]
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=0.1)  # first order, as Euler's method


@pytest.mark.parametrize("contraction", [D.LayerNorm(), D.RMSNorm(), D.Whiten()])
def test_small_steps_approach_the_flow_of_every_contraction(contraction):
    x = contraction(torch.randn(12, 3, dtype=DOUBLE))
    exact = D.flow(x, [1.0], beta=0.5, contraction=contraction).final
    last = D.simulate(x, 4000, step_size=1 / 4000, beta=0.5, contraction=contraction, every=4000)
    assert (last.final - exact).abs().max() < 2e-3


def test_flow_in_space_against_scipy_on_the_dense_field():
    x = torch.randn(6, 2, dtype=DOUBLE)

    def rate(t, y):
        z = y.reshape(6, 2)
        w = np.exp(0.8 * z @ z.T - (0.8 * z @ z.T).max(-1, keepdims=True))
        return (w / w.sum(-1, keepdims=True) @ z).ravel()

    exact = solve_ivp(rate, (0, 1.5), x.numpy().ravel(), method="LSODA", rtol=1e-11, atol=1e-12)
    ours = D.flow(x, [0.5, 1.5], beta=0.8).final
    torch.testing.assert_close(
        ours.flatten(), torch.from_numpy(exact.y[:, -1]), rtol=1e-6, atol=1e-6
    )


def test_flow_with_fixed_patterns_goes_in_straight_lines_at_last():
    patterns = torch.tensor([[1.0, 0.0], [-1.0, 0.5]], dtype=DOUBLE)
    x = torch.tensor([[5.0, 0.0]], dtype=DOUBLE)
    run = D.flow(x, [0.0, 10.0, 20.0], patterns=patterns, beta=3.0)
    moved = run.states[2] - run.states[1]
    torch.testing.assert_close(moved, 10 * patterns[:1], atol=1e-6, rtol=0)


def test_exponential_growth_past_the_numbers_is_reported_as_a_time():
    """One point is its own mean: x' = x, so it passes any limit at log(limit / |x0|)."""
    x = torch.tensor([[2.0]], dtype=DOUBLE)
    run = D.flow(x, torch.linspace(0, 1000, 11))
    limit = 1e-3 * math.sqrt(torch.finfo(DOUBLE).max)
    assert run.blow_up_time.item() == pytest.approx(math.log(limit / 2), rel=1e-6)
    assert run.states.isfinite().all()
    assert run.times[-1] == run.blow_up_time
    assert len(run.times) < 11


def test_a_batch_goes_on_when_one_cloud_has_left():
    x = torch.tensor([[[1.0]], [[1e-100]]], dtype=DOUBLE)
    run = D.flow(x, [0.0, 300.0, 400.0, 500.0])
    assert run.blow_up_time[0] == pytest.approx(
        math.log(1e-3 * torch.finfo(DOUBLE).max ** 0.5), rel=1e-6
    )
    assert run.blow_up_time[1].isinf()
    exact = 1e-100 * math.exp(500)
    assert run.states[-1, 1].item() == pytest.approx(exact, rel=1e-4)
    assert run.states.isfinite().all()


# Gaussian populations ----------------------------------------------------------------------------


def integrate(m, S, t, A, V):
    d = len(m)

    def rate(_, y):
        m, S = y[:d], y[d:].reshape(d, d)
        drift = V @ S @ A @ S
        return np.concatenate([V @ (m + S @ A @ m), (drift + drift.T).ravel()])

    start = np.concatenate([m, S.ravel()])
    out = solve_ivp(rate, (0, t), start, method="Radau", rtol=1e-10, atol=1e-12).y[:, -1]
    return torch.from_numpy(out[:d]), torch.from_numpy(out[d:].reshape(d, d))


def law(d, seed=0):
    random = torch.Generator().manual_seed(seed)
    m = torch.randn(d, dtype=DOUBLE, generator=random)
    L = 0.4 * torch.randn(d, d, dtype=DOUBLE, generator=random)
    A, V = torch.randn(2, d, d, dtype=DOUBLE, generator=random)
    return m, L @ L.mT, A, V


@pytest.mark.parametrize("kind", ["symmetric", "general scores", "general values"])
def test_gaussian_flow_solves_its_equations(kind):
    m, S, A, V = law(3)
    A = A + A.mT if kind == "symmetric" else A
    V = V if kind == "general values" else torch.eye(3, dtype=DOUBLE)
    path = D.gaussian_flow(m, S, [0.05, 0.1], scores=A, values=V)
    mean, covariance = integrate(*(x.numpy() for x in (m, S)), 0.1, A.numpy(), V.numpy())
    torch.testing.assert_close(path.mean[-1], mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(path.covariance[-1], covariance, rtol=1e-6, atol=1e-8)


def test_blow_up_time_of_the_closed_form():
    _, S, A, _ = law(3)
    root = torch.linalg.cholesky(S)
    top = torch.linalg.eigvalsh(root.mT @ (A + A.mT) @ root).max()
    path = D.gaussian_flow(torch.zeros(3, dtype=DOUBLE), S, torch.linspace(0, 10, 101), scores=A)
    assert path.blow_up_time.item() == pytest.approx(1 / top.item(), rel=1e-10)
    assert path.times[-1] < path.blow_up_time
    assert path.covariance.isfinite().all()
    assert path.covariance[-1].abs().max() > path.covariance[0].abs().max()


@pytest.mark.parametrize("c", [0.5, 2.0, -1.0])
def test_values_that_are_a_multiple_of_the_identity(c):
    """Closed form, against the equations integrated."""
    m, S, A, _ = law(3)
    path = D.gaussian_flow(m, S, [0.1], scores=A, values=c)
    V = c * np.eye(3)
    mean, covariance = integrate(m.numpy(), S.numpy(), 0.1, A.numpy(), V)
    torch.testing.assert_close(path.mean[-1], mean, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(path.covariance[-1], covariance, rtol=1e-7, atol=1e-9)
    scaled = D.gaussian_flow(m, S, [0.1], scores=c * A)
    torch.testing.assert_close(path.blow_up_time, scaled.blow_up_time)


def test_blow_up_time_of_the_integrated_flow():
    """Diagonal values, scores and covariance fall apart into S_i' = 2 v_i S_i^2."""
    v, s = torch.tensor([1.5, 0.5, -1.0], dtype=DOUBLE), torch.tensor([0.4, 0.9, 2.0], dtype=DOUBLE)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=DOUBLE)).Q  # the same in other coordinates
    V, S = turn @ torch.diag(v) @ turn.mT, turn @ torch.diag(s) @ turn.mT
    path = D.gaussian_flow(torch.zeros(3, dtype=DOUBLE), S, torch.linspace(0, 2, 41), values=V)
    assert path.blow_up_time.item() == pytest.approx(1 / (2 * 1.5 * 0.4), rel=1e-6)
    assert path.times[-1] < path.blow_up_time
    late = path.times[-1].item()
    exact = turn @ torch.diag(1 / (1 / s - 2 * v * late)) @ turn.mT
    torch.testing.assert_close(path.covariance[-1], exact, rtol=1e-6, atol=1e-8)
    early = D.gaussian_flow(torch.zeros(3, dtype=DOUBLE), S, [0.1], values=V)
    assert early.blow_up_time.isinf()  # not before the last time asked for


def test_without_a_positive_direction_it_never_blows_up():
    m, S, A, _ = law(3)
    path = D.gaussian_flow(m, S, [0.0, 1.0, 100.0], scores=-(A @ A.mT))
    assert path.blow_up_time.isinf()
    assert path.covariance[-1].diagonal().sum() < path.covariance[0].diagonal().sum()
    exact = torch.linalg.inv(torch.linalg.inv(S) + 200 * A @ A.mT)
    torch.testing.assert_close(path.covariance[-1], exact, rtol=1e-6, atol=1e-12)


def test_a_singular_covariance_stays_in_its_subspace():
    m = torch.tensor([1.0, 1.0, 0.0], dtype=DOUBLE)
    S = torch.diag(torch.tensor([1.0, 0.5, 0.0], dtype=DOUBLE))
    path = D.gaussian_flow(m, S, [0.0, 0.2])
    torch.testing.assert_close(
        path.covariance[1].diagonal(), torch.tensor([1 / 0.6, 1 / 1.6, 0.0], dtype=DOUBLE)
    )
    exact = math.exp(0.2) * m * torch.tensor([0.6, 0.8, 1.0], dtype=DOUBLE).rsqrt()
    torch.testing.assert_close(path.mean[1], exact)
    assert path.rank.tolist() == [2, 2]


def test_larger_variances_grow_faster_so_the_shape_loses_rank():
    S = torch.diag(torch.tensor([1.0, 0.9], dtype=DOUBLE))
    end = 0.5 * (1 - 1e-9)
    path = D.gaussian_flow(torch.zeros(2, dtype=DOUBLE), S, [0.0, 0.4, end])
    assert path.participation_ratio[0] > 1.98
    assert path.participation_ratio[2] < 1.0001
    assert path.rank.tolist() == [2, 2, 1]
    round_one = D.gaussian_flow(torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE), [end])
    assert round_one.participation_ratio[0] == pytest.approx(2.0)


def test_a_batch_of_gaussians():
    S = torch.eye(2, dtype=DOUBLE) * torch.tensor([1.0, 0.1], dtype=DOUBLE)[:, None, None]
    path = D.gaussian_flow(torch.zeros(2, 2, dtype=DOUBLE), S, [0.1, 1.0, 10.0])
    torch.testing.assert_close(path.blow_up_time, torch.tensor([0.5, 5.0], dtype=DOUBLE))
    assert path.times.tolist() == [0.1, 1.0]
    assert path.covariance[1, 0].isinf().all()
    assert path.rank.tolist() == [[2, 2], [-1, 2]]
    assert path.participation_ratio[1].tolist() == [math.inf, 2.0]
    assert path.covariance[1, 1, 0, 0].item() == pytest.approx(1 / (10 - 2))


def test_gaussian_map_is_the_stated_one():
    m, S, A, V = law(3)
    one = torch.eye(3, dtype=DOUBLE)
    plain = D.gaussian_map(m, S, 1)
    torch.testing.assert_close(plain.mean[1], 2 * m + S @ m)
    torch.testing.assert_close(plain.covariance[1], (one + S) @ S @ (one + S))
    general = D.gaussian_map(m, S, 1, step_size=0.3, scores=A, values=V)
    B = one + 0.3 * V @ S @ A
    torch.testing.assert_close(general.mean[1], B @ m + 0.3 * V @ m)
    torch.testing.assert_close(general.covariance[1], B @ S @ B.mT)


def test_small_gaussian_maps_approach_the_flow():
    m, S, A, V = law(2)
    exact = D.gaussian_flow(m, S, [0.2], scores=A, values=V)
    small = D.gaussian_map(m, S, 4000, step_size=0.2 / 4000, scores=A, values=V)
    torch.testing.assert_close(small.covariance[-1], exact.covariance[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(small.mean[-1], exact.mean[0], rtol=1e-3, atol=1e-3)


def test_gaussian_map_loses_rank_and_ends_before_overflow():
    one = torch.eye(2, dtype=DOUBLE)
    lost = D.gaussian_map(
        torch.zeros(2, dtype=DOUBLE), one, 1, scores=torch.diag(torch.tensor([-1.0, 1.0]).double())
    )
    torch.testing.assert_close(
        lost.covariance[1], torch.diag(torch.tensor([0.0, 4.0], dtype=DOUBLE))
    )
    assert lost.rank.tolist() == [2, 1]
    far = D.gaussian_map(torch.zeros(2, dtype=DOUBLE), one, 100)
    assert far.covariance.isfinite().all()
    assert len(far.times) == far.blow_up_time.item() < 15


def sample(n, d, size):
    """Points whose mean is zero, covariance size * I, and odd moments zero, exactly."""
    x = torch.randn(n // 2, d, dtype=DOUBLE)
    x = torch.cat([x, -x])
    return math.sqrt(size) * D.Whiten()(x)


def test_particles_follow_the_gaussian_law_where_they_can():
    """beta^2 x'Sx is about 0.1 here, far below 2 log N = 18."""
    torch.manual_seed(0)
    n = 10_000
    x = sample(n, 2, 0.2)
    path = D.gaussian_map(torch.zeros(2).double(), 0.2 * torch.eye(2).double(), 2)
    run = D.simulate(x, 2)
    cov = run.states[-1].mT @ run.states[-1] / n
    error = 4 * math.sqrt(2 / n)
    torch.testing.assert_close(cov, path.covariance[-1], rtol=error, atol=error * 0.4)
    flowing = D.flow(x, [0.5])
    exact = D.gaussian_flow(torch.zeros(2).double(), 0.2 * torch.eye(2).double(), [0.5])
    cov = flowing.final.mT @ flowing.final / n
    torch.testing.assert_close(cov, exact.covariance[0], rtol=error, atol=error * 0.3)


def test_particles_fall_behind_where_they_cannot():
    """d = 64, N = 4000, N(0, 4 I): the law moves x by 4 x, but a point that sees mostly itself only
    by x. New queries, which are not among the points, see neither."""
    x = 2 * torch.randn(4000, 64, dtype=DOUBLE)
    along = ((D.step(x) - x) * x).sum(-1) / x.square().sum(-1)
    assert along.mean().item() == pytest.approx(1.0, abs=0.01)
    x, query = torch.randn(2, 4000, 64, dtype=DOUBLE)  # the law N(0, I) moves them by themselves
    along = ((D.step(query, patterns=x) - query) * query).sum(-1) / query.square().sum(-1)
    assert along.mean() < 0.6
    few = torch.randn(4000, 2, dtype=DOUBLE) * 0.3  # here the law holds
    moved = D.step(few) - few
    assert ((moved - 0.09 * few).square().sum(-1).mean() / few.square().sum(-1).mean()) < 1e-3


def test_blow_up_time_from_particles_within_one_percent():
    """1 / variance falls linearly to zero at t*, and particles show the line while they follow."""
    torch.manual_seed(1)
    size = 0.05
    x = sample(10_000, 1, size)
    times = torch.linspace(0, 2.0, 9, dtype=DOUBLE)
    run = D.flow(x, times, observables={"variance": lambda x: x.square().mean((-2, -1))})
    slope, offset = np.polyfit(times.numpy(), 1 / run.observables["variance"].numpy(), 1)
    exact = D.gaussian_flow(torch.zeros(1).double(), torch.tensor([[size]]).double(), [0.0])
    assert -offset / slope == pytest.approx(exact.blow_up_time.item(), rel=0.01)


# The sphere --------------------------------------------------------------------------------------


def test_at_small_beta_random_starts_collapse_to_one_point():
    x = torch.stack(
        [
            D.initial_cloud(
                "sphere", 32, 3, generator=torch.Generator().manual_seed(s), dtype=DOUBLE
            )
            for s in range(6)
        ]
    )
    run = D.flow(x, [0.0, 40.0], beta=1.0, contraction=D.Sphere())
    assert D.clusters(run.final).count.tolist() == [1] * 6
    assert (run.final.mT @ run.final / 32).diagonal(dim1=-2, dim2=-1).sum(-1) == pytest.approx(1)


def test_at_large_beta_clusters_live_long():
    x = D.initial_cloud("sphere", 24, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    run = D.flow(x, [0.0, 10.0, 100.0], beta=9.0, contraction=D.Sphere())
    counts = D.clusters(run.states).count.tolist()
    assert counts[0] > counts[1] >= counts[2] > 1


def test_more_clusters_at_larger_beta_and_fewer_in_time():
    beta = torch.tensor([1.0, 4.0, 16.0, 64.0], dtype=DOUBLE)[:, None, None]
    starts = [
        D.initial_cloud("sphere", 64, 3, generator=torch.Generator().manual_seed(s), dtype=DOUBLE)
        for s in range(4)
    ]
    totals = torch.zeros(3, 4)
    for x in starts:
        run = D.flow(x.expand(4, 64, 3), [3.0, 10.0, 30.0], beta=beta, contraction=D.Sphere())
        totals += D.clusters(run.states).count
    assert (totals.diff(dim=0) <= 0).all()
    assert (totals[-1].diff() > 0).all()
    assert totals[-1, 0] == 4  # one in each of four runs


def test_the_uniform_law_on_the_circle_is_stationary():
    x = D.initial_cloud("ring", 200, 2, dtype=DOUBLE)
    moved = D.flow(x, [0.0, 1.0], beta=2.0, contraction=D.Sphere()).final - x
    assert moved.abs().max() < 1e-7
