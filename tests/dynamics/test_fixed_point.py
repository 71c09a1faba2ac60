"""Fixed points, their derivatives and their spectra. Oracles: unrolling, linear algebra, closed
forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64
SOLVERS = ["anderson", "broyden", "damped"]


def setting(d=4, size=0.3):
    W = size * torch.randn(d, d, dtype=DOUBLE)
    return W.requires_grad_(), torch.randn(3, d, dtype=DOUBLE).requires_grad_()


def layer(x, W, b):
    return torch.tanh(x @ W + b)


def solved(W, b, **how):
    start = torch.zeros_like(b)
    return D.fixed_point(lambda x: layer(x, W, b), start, tol=1e-13, **how).value


def unrolled(W, b, rounds=300):
    x = torch.zeros_like(b)
    for _ in range(rounds):
        x = layer(x, W, b)
    return x


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_value(solver, batch_dims):
    W, b = setting()
    found = D.fixed_point(lambda x: layer(x, W, b), 0 * b, solver=solver, batch_dims=batch_dims)
    torch.testing.assert_close(found.value, unrolled(W, b), atol=1e-9, rtol=0)
    assert found.status == "converged"
    assert (found.residual <= 1e-10).all()
    assert found.steps.shape == found.residual.shape == (3,)[:batch_dims]
    assert len(found.history) == found.steps.max()


@pytest.mark.parametrize("solver", SOLVERS)
def test_linear_maps_exactly(solver):
    A = 0.4 * torch.linalg.qr(torch.randn(6, 6, dtype=DOUBLE)).Q
    b = torch.randn(6, dtype=DOUBLE)
    found = D.fixed_point(lambda x: A @ x + b, torch.zeros_like(b), solver=solver)
    exact = torch.linalg.solve(torch.eye(6, dtype=DOUBLE) - A, b)
    torch.testing.assert_close(found.value, exact, atol=1e-9, rtol=0)


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_gradients_equal_unrolling(batch_dims):
    W, b = setting()
    ours = torch.autograd.grad(solved(W, b, batch_dims=batch_dims).cos().sum(), (W, b))
    theirs = torch.autograd.grad(unrolled(W, b).cos().sum(), (W, b))
    for a, c in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, c, atol=1e-10, rtol=1e-10)


def test_gradcheck_and_gradgradcheck():
    W, b = setting()
    assert torch.autograd.gradcheck(solved, (W, b))
    assert torch.autograd.gradgradcheck(solved, (W, b))


def powers(function, x, order):
    """A scalar chain of `order` nested gradients, each squared and summed."""
    value = function(x)
    for _ in range(order):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        value = slope.square().sum()
    return value


@pytest.mark.parametrize("order", [1, 2, 3])
def test_orders_one_to_three(order):
    W, b = setting()
    ours = powers(lambda b: solved(W.detach(), b).square().sum(), b, order)
    theirs = powers(lambda b: unrolled(W.detach(), b).square().sum(), b, order)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian])
def test_under_functional_transforms(transform):
    W, b = (x.detach() for x in setting())
    ours = transform(lambda b: solved(W, b).square().sum())(b)
    theirs = transform(lambda b: unrolled(W, b).square().sum())(b)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_forward_mode():
    W, b = (x.detach() for x in setting())
    tangent = torch.randn_like(b)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(b, tangent)
        moved = torch.autograd.forward_ad.unpack_dual(solved(W, dual)).tangent
    expected = torch.func.jvp(lambda b: unrolled(W, b), (b,), (tangent,))[1]
    torch.testing.assert_close(moved, expected, atol=1e-10, rtol=1e-10)


def test_second_derivative_of_the_square_root():
    a = torch.tensor(2.0, dtype=DOUBLE, requires_grad=True)
    one = torch.ones((), dtype=DOUBLE)
    root = D.fixed_point(lambda x: (x + a / x) / 2, one, tol=1e-14).value
    (first,) = torch.autograd.grad(root, a, create_graph=True)
    (second,) = torch.autograd.grad(first, a, create_graph=True)
    (third,) = torch.autograd.grad(second, a)
    for ours, exact in ((first, 2**-1.5), (second, -(2**-3.5)), (third, 3 * 2**-5.5)):
        assert ours.item() == pytest.approx(exact, rel=1e-10)


def test_the_start_has_no_gradient():
    W, b = setting()
    x0 = torch.zeros_like(b).requires_grad_()
    value = D.fixed_point(lambda x: layer(x, W, b), x0).value
    assert torch.autograd.grad(value.sum(), x0, allow_unused=True) == (None,)


def test_rows_stop_separately():
    rate = torch.tensor([0.1, 0.9], dtype=DOUBLE)[:, None]
    start = torch.zeros(2, 3, dtype=DOUBLE)
    found = D.fixed_point(
        lambda x: rate * x + 1, start, solver="damped", batch_dims=1, max_steps=500
    )
    # |g_k| = rate^k, so the first k with rate^k <= 1e-10, counted from one.
    expected = [math.ceil(-10 / math.log10(r)) + 1 for r in (0.1, 0.9)]
    assert found.steps.tolist() == pytest.approx(expected, abs=1)
    torch.testing.assert_close(found.value, (1 / (1 - rate)).expand(2, 3), atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    ("f", "word"),
    [
        (lambda x: -x, "cycling"),
        (lambda x: torch.stack([-x[1], x[0]]), "cycling"),
        (lambda x: 2 * x + 1, "diverging"),
        (lambda x: x * x + 1, "diverging"),
        (lambda x: x + 1, "stalled"),
        (lambda x: 0.9999 * x + 0.1, "unfinished"),
        (lambda x: 1.01 * x + 1, "diverging"),
        (lambda x: x * float("nan"), "not_finite"),
        (lambda x: (x - 5).sqrt(), "not_finite"),
        (lambda x: 0.9999 * torch.stack([-x[1], x[0]]) + 1, "unfinished"),
        (lambda x: 3.9 * x * (1 - x / 3), "stalled"),  # the logistic map, chaotic
    ],
)
def test_failures_are_diagnosed(f, word):
    x0 = torch.tensor([1.0, 2.0], dtype=DOUBLE)
    found = D.fixed_point(f, x0, solver="damped", throw=False)
    assert found.status == word
    assert str(found.status).startswith(word)
    assert found.value.isfinite().all()
    with pytest.raises(cm.ConvergenceError, match=word) as caught:
        D.fixed_point(f, x0, solver="damped")
    assert caught.value.result.status == word


def test_no_fixed_point_is_never_called_converged():
    for solver in SOLVERS:
        found = D.fixed_point(lambda x: x + 1, torch.zeros(2), solver=solver, throw=False)
        assert not found.status.converged


def test_damping_ends_a_cycle():
    found = D.fixed_point(lambda x: -x + 2, torch.zeros(2), solver="damped", damping=0.5)
    torch.testing.assert_close(found.value, torch.ones(2))


CONTRACTIONS = {
    "linear": lambda x: 0.9 * x.flip(-1) + torch.linspace(0, 1, x.shape[-1], dtype=x.dtype),
    "cosine": torch.cos,
    "hopfield": lambda x: D.step(x, patterns=torch.eye(8, dtype=DOUBLE)) - x,
    "tanh": lambda x: torch.tanh(x @ torch.full((8, 8), 0.11, dtype=DOUBLE) + 0.5),
}


def attention_and_norm(x):
    patterns = torch.randn(64, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    return D.step(x, patterns=patterns, contraction=D.LayerNorm())


CONTRACTIONS["attention and layer norm"] = attention_and_norm


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_anderson_needs_no_more_evaluations_than_plain_iteration(name):
    x0 = torch.randn(5, 8, dtype=DOUBLE)
    steps = {
        s: int(D.fixed_point(CONTRACTIONS[name], x0, solver=s, max_steps=500).steps)
        for s in ("anderson", "damped")
    }
    assert steps["anderson"] <= steps["damped"]


def test_degenerate_fixed_points_refuse_a_derivative():
    """x -> x has a continuum of fixed points: I - J = 0."""
    a = torch.ones(3, dtype=DOUBLE, requires_grad=True)
    value = D.fixed_point(lambda x: x + 0 * a, torch.ones(3, dtype=DOUBLE)).value
    with pytest.raises(cm.ConvergenceError, match="eigenvalue close to 1"):
        value.sum().backward()


@pytest.mark.parametrize("d", [1, 2, 7, 60])
def test_spectral_radius_is_that_of_the_matrix(d):
    A = torch.randn(3, d, d, dtype=DOUBLE)
    ours = D.spectral_radius(
        lambda x: (A @ x[..., None])[..., 0], torch.zeros(3, d).double(), batch_dims=1
    )
    exact = torch.linalg.eigvals(A).abs().amax(-1)
    torch.testing.assert_close(ours.radius, exact, rtol=1e-5, atol=0)


def test_spectral_radius_of_rotations():
    angle = 0.3
    turn = 0.7 * torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=DOUBLE
    )
    found = D.spectral_radius(lambda x: x @ turn, torch.zeros(5, 2, dtype=DOUBLE))
    assert found.radius.item() == pytest.approx(0.7, rel=1e-9)
    assert abs(found.eigenvalue.imag.item()) == pytest.approx(0.7 * math.sin(angle), rel=1e-9)


def test_spectral_radius_predicts_the_rate():
    W, b = (x.detach() for x in setting())
    b = b[:1]
    f = lambda x: layer(x, W, b)
    found = D.fixed_point(f, 0 * b, solver="damped", tol=1e-13, max_steps=1000)
    radius = D.spectral_radius(f, found.value).radius.item()
    middle = found.history[10:40]
    rate = (middle[-1] / middle[0]).item() ** (1 / 29)
    assert rate == pytest.approx(radius, rel=0.1)


def test_nilpotent_and_zero_maps():
    shift = torch.diag(torch.ones(3, dtype=DOUBLE), 1)
    zero = torch.zeros(4, dtype=DOUBLE)
    assert D.spectral_radius(lambda x: shift @ x, zero).radius.item() < 1e-3
    assert D.spectral_radius(lambda x: 0 * x, zero).radius.item() == 0


def test_self_attention_with_a_contraction_has_implicit_gradients():
    patterns = torch.randn(6, 3, dtype=DOUBLE).requires_grad_()
    start = torch.randn(4, 3, dtype=DOUBLE)

    def hopfield(x, patterns):
        # The Hopfield update: attention without skip.
        return D.step(x, patterns=patterns, beta=0.3) - x

    found = D.fixed_point(lambda x: hopfield(x, patterns), start, tol=1e-13).value
    x = start
    for _ in range(300):
        x = hopfield(x, patterns)
    ours = torch.autograd.grad(found.square().sum(), patterns)[0]
    theirs = torch.autograd.grad(x.square().sum(), patterns)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"solver": "newton"}, "solver must be one of"),
        ({"tol": -1.0}, "tol must be"),
        ({"max_steps": 0}, "max_steps must be"),
        ({"batch_dims": 3}, "batch_dims must lie"),
        ({"damping": 0.0}, "damping must be"),
    ],
)
def test_bad_options(how, message):
    with pytest.raises(cm.InputError, match=message):
        D.fixed_point(lambda x: x / 2, torch.ones(2, 2), **how)


def test_bad_maps_and_states():
    with pytest.raises(cm.InputError, match="shape of its input"):
        D.fixed_point(lambda x: x.sum(), torch.ones(3))
    with pytest.raises(cm.InputError, match="NaN"):
        D.fixed_point(lambda x: x, torch.full((3,), float("nan")))
    with pytest.raises(cm.InputError, match="empty"):
        D.fixed_point(lambda x: x, torch.ones(0))
