"""T32: mean-field spins. Oracles: enumeration of all states, Bessel functions, root finding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.optimize import brentq
from scipy.special import iv

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64


def ising():
    """Plus and minus one, evenly."""
    return cm.VonMisesFisher(torch.ones(1, dtype=DOUBLE), 0.0)


def couplings(n, size=1.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    J = size * torch.randn(n, n, dtype=DOUBLE, generator=random)
    return (J + J.mT) / 2 * (1 - torch.eye(n, dtype=DOUBLE))


@pytest.mark.parametrize("strength", [0.5, 1.5, 3.0])
def test_curie_weiss(strength):
    """n spins, J = strength / (n - 1): m = tanh(strength m)."""
    n = 10
    J = strength / (n - 1) * (1 - torch.eye(n, dtype=DOUBLE))
    start = torch.full((n, 1), 0.9, dtype=DOUBLE)
    found = D.mean_field(ising(), J, start=start, tol=1e-12)
    exact = 0.0
    if strength > 1:
        exact = brentq(lambda m: math.tanh(strength * m) - m, 1e-6, 1)
    torch.testing.assert_close(
        found.mean, torch.full((n, 1), exact, dtype=DOUBLE), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("d", [2, 3, 5])
def test_spins_on_the_sphere(d):
    """m = A_d(|eta|), a ratio of Bessel functions, at |eta| = 2 J m + field."""
    J = 2.0 * (1 - torch.eye(3, dtype=DOUBLE))
    field = torch.zeros(d, dtype=DOUBLE)
    field[0] = 0.5
    sites = cm.VonMisesFisher(torch.eye(d, dtype=DOUBLE)[0], 0.0)
    found = D.mean_field(sites, J, field, tol=1e-12)
    length = lambda k: iv(d / 2, k) / iv(d / 2 - 1, k)
    exact = brentq(lambda m: length(4 * m + 0.5) - m, 1e-3, 1)
    torch.testing.assert_close(
        found.mean[:, 0], torch.full((3,), exact, dtype=DOUBLE), atol=1e-9, rtol=0
    )
    assert found.mean[:, 1:].abs().max() < 1e-6


def test_free_energy_bounds_the_partition_function_and_is_stationary():
    n = 5
    J, field = couplings(n, 0.6), torch.randn(n, 1, dtype=DOUBLE)
    found = D.mean_field(ising(), J, field, tol=1e-13)
    states = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=DOUBLE)
    weights = 0.5 * ((states @ J) * states).sum(-1) + states @ field[:, 0]
    log_z = torch.logsumexp(weights, 0) - n * math.log(2)
    assert found.free_energy >= -log_z
    assert found.free_energy == pytest.approx(-log_z.item(), abs=0.5)

    def free(m):
        plus, minus = (1 + m) / 2, (1 - m) / 2
        entropy = (plus * (2 * plus).log() + minus * (2 * minus).log()).sum()
        return entropy - 0.5 * m @ J @ m - m @ field[:, 0]

    m = found.mean[:, 0].detach()
    assert found.free_energy.item() == pytest.approx(free(m).item(), abs=1e-10)
    assert torch.func.grad(free)(m).abs().max() < 1e-8


def test_gaussian_sites_are_linear():
    """grad G is the identity, so m = (I - J)^(-1) field: attention with J its softmax (T32)."""
    n, d = 4, 3
    J, field = couplings(n, 0.2), torch.randn(n, d, dtype=DOUBLE)
    sites = cm.Gaussian(torch.zeros(d, dtype=DOUBLE), torch.eye(d, dtype=DOUBLE))
    found = D.mean_field(sites, J, field, tol=1e-12)
    exact = torch.linalg.solve(torch.eye(n, dtype=DOUBLE) - J, field)
    torch.testing.assert_close(found.mean, exact, atol=1e-9, rtol=0)


def test_attention_is_the_map_of_gaussian_sites_with_softmax_couplings():
    x = torch.randn(5, 3, dtype=DOUBLE)
    sites = cm.Gaussian(torch.zeros(3, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE))
    J = (x @ x.mT).softmax(-1)
    torch.testing.assert_close(sites.mean(J @ x), D.step(x) - x)
    assert (J - J.mT).abs().max() > 0.01


def test_sites_of_their_own_and_gradients():
    n = 3
    J = couplings(n, 0.4).requires_grad_()
    field = torch.randn(n, 1, dtype=DOUBLE, requires_grad=True)
    kappa = torch.rand(n, dtype=DOUBLE)
    sites = cm.VonMisesFisher(torch.ones(n, 1, dtype=DOUBLE), kappa)
    solve = lambda J, h: D.mean_field(sites, (J + J.mT) / 2, h, tol=1e-13).mean
    m = solve(J, field)
    exact = torch.tanh((J + J.mT) / 2 @ m + field + kappa[:, None])
    torch.testing.assert_close(m, exact, atol=1e-10, rtol=0)
    assert torch.autograd.gradcheck(lambda h: solve(J.detach(), h), (field,))


@pytest.mark.parametrize(
    ("J", "message"),
    [
        (torch.ones(3, 2), "must be a matrix"),
        (torch.tensor([[0.0, 1.0], [2.0, 0.0]]), "symmetric"),
        (torch.ones(2, 2), "with itself must be zero"),
        (torch.full((2, 2), float("nan")), "NaN"),
    ],
)
def test_bad_input(J, message):
    with pytest.raises(cm.InputError, match=message):
        D.mean_field(ising(), J)
