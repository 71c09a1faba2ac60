"""The canonical link: where it exists, what is said where it does not, and what it costs."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.optimize
import torch
from torch.func import jacfwd, jacrev, vmap

import cumulant as cm
from cumulant.core.outcome import Solution
from cumulant.measures import newton as solver

DOUBLE = torch.float64
DIE = torch.arange(1.0, 7.0, dtype=DOUBLE)[:, None]


def column(*x):
    return torch.tensor(x, dtype=DOUBLE)[:, None]


def test_the_answer_is_scipys():
    x = torch.randn(40, 3, dtype=DOUBLE)
    h, target = cm.Empirical(x), x[:20].mean(0)
    X, mu = x.numpy(), target.numpy()

    def objective(e):
        s = X @ e
        w = np.exp(s - s.max())
        return s.max() + math.log(w.sum()) - e @ mu, w @ X / w.sum() - mu

    found = scipy.optimize.minimize(objective, np.zeros(3), jac=True, options={"gtol": 1e-12})
    torch.testing.assert_close(h.link(target), torch.tensor(found.x), rtol=1e-6, atol=1e-7)


def test_status_of_each_mean():
    value, status = cm.Empirical(DIE).link(column(4.5, 6.0, 1.0, 6.1, -3.0, 5.999999), throw=False)
    assert status.code.tolist() == [0, 1, 1, 2, 2, 0]
    assert status.converged.tolist() == [True, False, False, False, False, True]
    assert status.boundary.tolist() == [False, True, True, False, False, False]
    assert status.outside.tolist() == [False, False, False, True, True, False]
    assert value.isfinite().all()
    assert "2 of 6 outside: the mean lies outside the convex hull" in str(status)
    assert str(cm.Empirical(DIE).link(column(4.5), throw=False).status) == "converged"


def test_outside_raises_and_says_how_many():
    with pytest.raises(cm.InputError, match=r"1 of 2 outside: the mean .*throw=False"):
        cm.Empirical(DIE).link(column(4.5, 7.0))
    with pytest.raises(cm.InputError, match="boundary"):
        cm.Empirical(DIE).link(column(6.0))
    with pytest.raises(cm.InputError, match="outside"):
        vmap(cm.Empirical(DIE).link)(column(4.5, 7.0)[:, None])


@pytest.mark.parametrize("error", [cm.NoSolutionError, cm.InputError, cm.ConvergenceError])
@pytest.mark.parametrize("call", [lambda f: f, vmap])
def test_the_error_outside_is_of_both_kinds_and_carries_the_result(error, call):
    means = column(4.5, 7.0)[:, None]
    with pytest.raises(error) as caught:
        call(cm.Empirical(DIE).link)(means)
    value, status = call(lambda m: cm.Empirical(DIE).link(m, throw=False))(means)
    assert torch.equal(caught.value.result.value, value)
    assert caught.value.result.status == status
    assert status.outside.flatten().tolist() == [False, True]


def test_maximum_entropy_without_raising():
    faces = torch.arange(1.0, 7.0, dtype=DOUBLE)
    value, status = cm.maximum_entropy(faces.expand(2, 6)[..., None], column(4.5, 7.0), throw=False)
    assert status.outside.tolist() == [False, True]
    torch.testing.assert_close(value[0], cm.maximum_entropy(faces, 4.5))
    with pytest.raises(cm.NoSolutionError) as caught:
        cm.maximum_entropy(faces, 7.0)
    assert caught.value.result.status == "outside"


def test_a_stall_is_no_fault_of_the_input(monkeypatch):
    monkeypatch.setattr(solver, "_STEPS", 1)
    with pytest.raises(cm.ConvergenceError, match="link: stalled") as caught:
        cm.Empirical(DIE).link(column(4.5))
    assert not isinstance(caught.value, cm.InputError)
    assert caught.value.result.status == "stalled"


def test_a_corner_an_edge_and_a_face_of_a_cube():
    cube = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=DOUBLE)] * 3)
    means = torch.tensor(
        [[1, 1, 1], [1, 1, 0.3], [1, 0.2, 0.3], [0.9, 0.2, 0.3], [1.01, 0, 0]], dtype=DOUBLE
    )
    for scale in (1e-6, 1.0, 1e6):
        value, status = cm.Empirical(scale * cube).link(scale * means, throw=False)
        assert status.code.tolist() == [1, 1, 1, 0, 2]
        torch.testing.assert_close(value[3] * scale, means[3].atanh())  # independent signs


def test_off_the_affine_span():
    flat = torch.randn(10, 2, dtype=DOUBLE) @ torch.randn(2, 4, dtype=DOUBLE) + 3
    h = cm.Empirical(flat)
    middle = flat.mean(0)
    value, status = h.link(torch.stack([middle, middle + 0.1]), throw=False)
    assert status.code.tolist() == [0, 2]
    torch.testing.assert_close(value[0], torch.zeros(4, dtype=DOUBLE), atol=1e-7, rtol=0)
    single = cm.Empirical(flat.float())  # rounding does not make it solid
    assert single.link(single.mean(torch.zeros(1, 4)), throw=False).status.converged.all()


def test_one_point_and_coincident_points():
    one = cm.Empirical(torch.tensor([[2.0, 3.0]], dtype=DOUBLE))
    value, status = one.link(torch.tensor([[2.0, 3.0], [2.0, 3.1]], dtype=DOUBLE), throw=False)
    assert status.code.tolist() == [0, 2]
    assert value[0].tolist() == [0.0, 0.0]
    same = cm.Empirical(torch.ones(5, 2, dtype=DOUBLE))
    assert same.link(torch.ones(2, dtype=DOUBLE)).tolist() == [0.0, 0.0]


def test_points_without_weight_do_not_widen_the_hull():
    logs = torch.tensor([0.0] * 5 + [-math.inf], dtype=DOUBLE)
    codes = cm.Empirical(DIE, logs).link(column(4.9, 5.0, 5.5), throw=False).status.code
    assert codes.tolist() == [0, 1, 2]


def test_weights_do_not_move_the_boundary():
    for logs in (torch.full((6,), -20.0), torch.linspace(-30.0, 30.0, 6)):
        h = cm.Empirical(DIE, logs.double())
        codes = h.link(column(1.0, 1.1, 5.9, 6.0, 6.001, 0.99), throw=False).status.code
        assert codes.tolist() == [1, 0, 0, 1, 2, 2]


def test_points_of_very_different_sizes():
    """A mean between two points that lie close together beside a far one."""
    h = cm.Empirical(column(0.0, 1e-6, 1.0))
    mean = column(3e-7)
    found = h.link(mean)
    torch.testing.assert_close(h.mean(found), mean, rtol=1e-8, atol=0)
    x = torch.randn(50, 3, dtype=DOUBLE) * torch.tensor([1e-5, 1.0, 1e5], dtype=DOUBLE)
    h, eta = cm.Empirical(x), torch.tensor([[3e4, -0.5, 4e-6]], dtype=DOUBLE)
    torch.testing.assert_close(h.link(h.mean(eta)), eta, rtol=1e-6, atol=0)


def test_far_from_the_origin():
    x = 1e6 + torch.randn(30, 2, dtype=DOUBLE)
    h, eta = cm.Empirical(x), torch.tensor([[0.5, -0.3]], dtype=DOUBLE)
    torch.testing.assert_close(h.link(h.mean(eta)), eta, rtol=1e-5, atol=1e-6)


def test_hull_of_families():
    inside, edge, outside = 0, 1, 2
    cases = [
        (cm.Poisson(2.0), (1.0, 0.0, -1.0), (inside, edge, outside)),
        (cm.Bernoulli(0.3), (0.5, 1.0, 1.5), (inside, edge, outside)),
        (cm.Binomial(4, 0.3), (3.0, 4.0, 4.5), (inside, edge, outside)),
        (cm.Geometric(0.3), (3.0, 0.0, -4.5), (inside, edge, outside)),
        (cm.Exponential(0.3), (3.0, 0.0, -4.5), (inside, edge, outside)),
        (cm.Bernoulli(1.0), (1.0, 0.5, 0.0), (inside, outside, outside)),
    ]
    for h, means, codes in cases:
        value, status = h.link(column(*means), throw=False)
        assert status.code.tolist() == list(codes), h
        assert value.isfinite().all()
        with pytest.raises(cm.InputError, match=r"of 3 (outside|boundary)"):
            h.link(column(*means))
    simplex = cm.Categorical([0.2, 0.8, 0.0])
    means = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0, 0], [0.4, 0.4, 0.2], [0.4, 0.4, 0.0]])
    assert simplex.link(means, throw=False).status.code.tolist() == [0, 1, 2, 2]
    ball = cm.VonMisesFisher([1.0, 0.0], 1.0)
    means = torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 0.1]])
    assert ball.link(means, throw=False).status.code.tolist() == [0, 1, 2]
    gamma = cm.Gamma(2.0, 3.0)
    means = torch.tensor([[1.0, -0.1], [1.0, 0.0], [1.0, 0.1], [-1.0, 0.1]])
    assert gamma.link(means, throw=False).status.code.tolist() == [0, 1, 2, 2]
    with pytest.raises(cm.InputError, match="outside"):
        cm.Gamma.from_expectation([1.0, 0.1])
    beta = cm.Beta(2.0, 3.0)
    assert beta.link(torch.tensor([-0.1, -0.1]), throw=False).status.code == outside
    normal = cm.MeanCovarianceGaussian([0.0], 1.0)
    means = torch.tensor([[1.0, 2.0], [1.0, 1.0], [1.0, 0.5]])
    assert normal.link(means, throw=False).status.code.tolist() == [0, 1, 2]


def test_derivatives_to_third_order():
    """The inverse of the mean, differentiated as a composition: all derivatives of m(l(x)) = x."""
    x = torch.randn(12, 2, dtype=DOUBLE)
    h = cm.Empirical(x)
    mean = h.mean(torch.tensor([0.4, -0.3], dtype=DOUBLE))
    torch.testing.assert_close(jacrev(h.link)(mean), h.covariance(h.link(mean)).inverse())
    second = lambda m: h.covariance(h.link(m)).inverse()
    for outer in (jacfwd, jacrev):
        torch.testing.assert_close(outer(jacrev(h.link))(mean), jacrev(second)(mean))
        third = jacfwd(outer(jacrev(h.link)))(mean)
        torch.testing.assert_close(third, jacfwd(jacrev(second))(mean), rtol=1e-5, atol=1e-6)


def test_derivative_in_the_points():
    x = torch.randn(12, 2, dtype=DOUBLE)
    mean = x[:6].mean(0)
    assert torch.autograd.gradcheck(
        lambda x, m: cm.Empirical(x).link(m), (x.requires_grad_(), mean.requires_grad_())
    )
    assert torch.autograd.gradgradcheck(
        lambda m: cm.Empirical(x.detach()).link(m), (mean.detach().requires_grad_(),)
    )


def test_rows_that_fail_leave_the_gradients_of_the_others():
    h = cm.Empirical(DIE)
    mean = column(4.5, 7.0, 6.0).requires_grad_()
    value, _ = h.link(mean, throw=False)
    (slope,) = torch.autograd.grad(value.sum(), mean)
    assert slope[0, 0] > 0
    assert slope.isfinite().all()
    alone = column(4.5).requires_grad_()
    (expected,) = torch.autograd.grad(h.link(alone).sum(), alone)
    torch.testing.assert_close(slope[:1], expected)


def test_plain_forward_mode():
    import torch.autograd.forward_ad as fwad

    h, mean = cm.Empirical(DIE), column(4.5)
    with fwad.dual_level():
        tangent = fwad.unpack_dual(h.link(fwad.make_dual(mean, torch.ones_like(mean)))).tangent
    torch.testing.assert_close(tangent[:, 0], 1 / h.covariance(h.link(mean))[:, 0, 0])


def test_convergence_is_quadratic(monkeypatch):
    """Exact Newton steps at the end: each squares the gap, up to a constant."""
    monkeypatch.setattr(solver, "_KEEP", 0.0)
    h = cm.Empirical(torch.randn(200, 5, dtype=DOUBLE))
    mean = h.mean(0.5 * torch.randn(1, 5, dtype=DOUBLE))
    decrements = []
    search = solver._search

    def watched(problem, target, now, direction, decrement, going):
        decrements.append(float(decrement.max()))
        return search(problem, target, now, direction, decrement, going)

    monkeypatch.setattr(solver, "_search", watched)
    h.link(mean)
    late = [x for x in decrements if 1e-13 < x < 1e-1]
    assert len(decrements) <= 8
    assert all(b < 5 * a**1.5 for a, b in pairwise(late))


def test_ill_conditioned_clouds_converge():
    """Near the boundary in many directions at once: weights of one point of 500 near one."""
    x = torch.randn(500, 10, dtype=DOUBLE)
    eta = torch.randn(20, 10, dtype=DOUBLE)
    h = cm.Empirical(x)
    value, status = h.link(h.mean(eta), throw=False)
    good = status.converged
    assert good.float().mean() > 0.9
    torch.testing.assert_close(h.mean(value)[good], h.mean(eta)[good], rtol=1e-7, atol=1e-9)


def test_status_survives_vmap():
    found = vmap(lambda m: cm.Empirical(DIE).link(m, throw=False))(column(4.5, 7.0)[:, None])
    assert isinstance(found, Solution)
    assert found.status.code.tolist() == [[0], [2]]
