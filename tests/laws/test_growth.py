"""T34: how fast small departures from the Gaussian and from the uniform law grow."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import eval_gegenbauer, gegenbauer, ive, roots_gegenbauer

import cumulant as cm
from cumulant.lab.fixed_points import rates

D = cm.dynamics


def whitened(x, w):
    x = x - w @ x
    return x / np.sqrt(w @ x**2)


@pytest.mark.parametrize("beta", [0.2, 0.5, 0.75, 1.0, 1.5])
@pytest.mark.parametrize("n", [3, 4, 5, 6])
def test_a_cumulant_of_a_whitened_population_grows_as_predicted(n, beta):
    """Gauss-Hermite quadrature of the definition: nothing of the library but the formula."""
    x, w = np.polynomial.hermite_e.hermegauss(60)
    basis = np.polynomial.hermite_e.HermiteE.basis(n)
    w = w / w.sum() * (1 + 1e-6 * basis(x) / math.factorial(n))
    tilted = w * np.exp(beta * np.outer(x, x))
    field = tilted @ x / tilted.sum(-1)
    h = 1e-3
    ahead, back = (w @ basis(whitened(x + s * field, w)) for s in (h, -h))
    measured = math.log(ahead / back) / (2 * h)
    assert measured == pytest.approx(D.gaussian_growth_rate(n, beta), rel=0.02)


def test_higher_cumulants_feed_lower_ones_and_never_the_reverse():
    """The linearized flow is triangular, so the rates are its eigenvalues."""
    x, w = np.polynomial.hermite_e.hermegauss(60)
    w, beta = w / w.sum(), 0.6
    orders = [3, 4, 5, 6, 7]
    matrix = np.zeros((5, 5))
    for j, n in enumerate(orders):
        field = (beta * x) ** (n - 1) / math.factorial(n - 1)
        for i, m in enumerate(orders):
            slope = np.polynomial.hermite_e.HermiteE.basis(m).deriv()
            matrix[i, j] = w @ (slope(x) * field)
    assert np.abs(np.tril(matrix, -1)).max() < 1e-12
    assert matrix[0, 2] > 0  # the fifth cumulant feeds the third
    np.testing.assert_allclose(
        np.diag(matrix), [D.gaussian_growth_rate(n, beta) for n in orders], rtol=1e-10
    )


@pytest.mark.parametrize("d", [2, 3, 4, 7])
@pytest.mark.parametrize("beta", [0.01, 1.0, 8.0, 300.0])
def test_rates_on_the_sphere_are_ratios_of_bessel_functions(d, beta):
    for degree in (1, 2, 5, 12):
        nu = mpmath.mpf(d) / 2 - 1
        ratio = mpmath.besseli(degree + nu, beta) / mpmath.besseli(nu, beta)
        exact = degree * (degree + d - 2) * ratio / beta
        ours = D.sphere_growth_rate(degree, beta, dimension=d)
        assert ours == pytest.approx(float(exact), rel=1e-12)
    assert D.circle_growth_rate(3, beta) == D.sphere_growth_rate(3, beta)


@pytest.mark.parametrize(("k", "beta"), [(1, 0.5), (2, 2.0), (4, 8.0), (6, 32.0), (12, 64.0)])
def test_a_mode_of_the_circle_grows_as_predicted(k, beta):
    """The continuity equation on a grid, its derivative by Fourier."""
    theta = 2 * np.pi * np.arange(256) / 256
    density = 1 + 1e-6 * np.cos(k * theta)
    kernel = np.exp(beta * (np.cos(theta[:, None] - theta) - 1)) * density
    pull = kernel @ np.stack([np.cos(theta), np.sin(theta)], -1) / kernel.sum(-1, keepdims=True)
    turn = -np.sin(theta) * pull[:, 0] + np.cos(theta) * pull[:, 1]
    flux = np.fft.ifft(1j * np.fft.fftfreq(256, 1 / 256) * np.fft.fft(density * turn)).real
    measured = -2 * np.mean(flux * np.cos(k * theta)) / 1e-6
    assert measured == pytest.approx(D.circle_growth_rate(k, beta), rel=0.02)


@pytest.mark.parametrize(("d", "degree", "beta"), [(3, 2, 4.0), (3, 6, 16.0), (4, 3, 8.0)])
def test_a_harmonic_of_the_sphere_grows_as_predicted(d, degree, beta):
    """The potential by Funk and Hecke's integral, with scipy's polynomials as harmonics."""
    alpha = d / 2 - 1
    t, mass = roots_gegenbauer(100, alpha)  # the weight is (1 - t^2)^((d-3)/2), as it should be
    harmonic = eval_gegenbauer(degree, alpha, t) / eval_gegenbauer(degree, alpha, 1.0)
    ratio = mass @ (np.exp(beta * t) * harmonic) / (mass @ np.exp(beta * t))
    # The Laplacian of a zonal function is (1 - t^2) f'' - (d - 1) t f'.
    first, second = gegenbauer(degree, alpha).deriv(1), gegenbauer(degree, alpha).deriv(2)
    laplacian = (1 - t**2) * second(t) - (d - 1) * t * first(t)
    value = eval_gegenbauer(degree, alpha, t)
    growth = -(mass @ (laplacian * value)) / (mass @ value**2) * ratio / beta
    assert D.sphere_growth_rate(degree, beta, dimension=d) == pytest.approx(growth, rel=1e-6)
    assert rates.sphere_rate(degree, beta, d) == pytest.approx(growth, rel=1e-4)


def test_particles_grow_as_predicted():
    some = {"points": 400, "draws": 4, "generator": torch.Generator().manual_seed(0)}
    line = rates.gaussian_particle_rate(3, 0.5, **some).mean()
    assert float(line) == pytest.approx(0.75, rel=0.02)
    circle = rates.circle_particle_rate(4, 8.0, **some).mean()
    assert float(circle) == pytest.approx(D.circle_growth_rate(4, 8.0), rel=0.02)


def test_equal_particles_have_no_tails_and_are_slower():
    some = {"points": 400, "draws": 4, "generator": torch.Generator().manual_seed(0)}
    share = rates.equal_particle_rate(4, 0.75, **some).mean() / D.gaussian_growth_rate(4, 0.75)
    assert 0 < share < 0.7


@pytest.mark.parametrize("beta", [0.3, 2.0, 8.0, 50.0, 1000.0])
@pytest.mark.parametrize("d", [2, 3, 10])
def test_the_fastest_degree_beats_all_others(beta, d):
    found = D.fastest_degree(beta, dimension=d)
    degree = np.arange(1, 200)
    growth = degree * (degree + d - 2) * ive(degree + d / 2 - 1, beta) / ive(d / 2 - 1, beta) / beta
    assert found == 1 + growth.argmax()
    if beta == 1000.0:
        assert found == pytest.approx(math.sqrt(2 * beta), abs=d / 2 + 1)
        assert growth.max() == pytest.approx(2 / math.e, rel=0.02)


def test_uniform_attention_moves_the_mean_alone():
    assert D.sphere_growth_rate(1, 0.0, dimension=5) == pytest.approx(4 / 5)
    assert D.sphere_growth_rate(2, 0.0, dimension=5) == 0
    assert D.fastest_degree(0.0) == 1


def test_bad_arguments_are_named():
    with pytest.raises(cm.InputError, match="order must be an integer >= 3"):
        D.gaussian_growth_rate(2, 1.0)
    with pytest.raises(cm.InputError, match="dimension"):
        D.sphere_growth_rate(1, 1.0, dimension=1)
    with pytest.raises(cm.InputError, match="beta"):
        D.fastest_degree(-1.0)
