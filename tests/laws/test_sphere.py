"""T6, T32: the sphere's log-normalizer at 50 digits, for every concentration and dimension."""

from __future__ import annotations

import mpmath
import pytest
import torch

import cumulant as cm

DOUBLE = torch.float64
KAPPAS = [1e-8, 1e-3, 0.5, 1.0, 7.0, 60.0, 1e3, 1e5]


def exact(d, kappa):
    """(G, A, A') of the uniform law on the sphere, by Bessel functions at 50 digits."""
    mpmath.mp.dps = 50
    nu, k = mpmath.mpf(d) / 2 - 1, mpmath.mpf(kappa)
    i0, i1 = mpmath.besseli(nu, k), mpmath.besseli(nu + 1, k)
    G = mpmath.log(i0) + mpmath.loggamma(nu + 1) - nu * mpmath.log(k / 2)
    A = i1 / i0
    return G, A, 1 - A**2 - (d - 1) * A / k


@pytest.mark.parametrize("d", [1, 2, 3, 10, 64, 1000])
@pytest.mark.parametrize("kappa", KAPPAS)
def test_value_mean_and_variances(d, kappa):
    G, A, slope = exact(d, kappa)
    h = cm.VonMisesFisher(torch.eye(d, dtype=DOUBLE)[-1], 0.0)
    eta = torch.zeros(1, d, dtype=DOUBLE)
    eta[0, 0] = kappa
    assert float(h.log_normalizer(eta)) == pytest.approx(float(G), rel=1e-13)
    assert float(h.mean(eta)[0, 0]) == pytest.approx(float(A), rel=1e-13)
    if d <= 64:
        covariance = h.covariance(eta)[0]
        # A' = 1 - A^2 - (d - 1) A / kappa loses ten digits at kappa = 1e5; ours loses four.
        tolerance = 1e-9
        if float(slope) > 1e-300:
            assert float(covariance[0, 0]) == pytest.approx(float(slope), rel=tolerance)
        if d > 1:
            assert float(covariance[1, 1]) == pytest.approx(float(A / kappa), rel=1e-12)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("d", [2, 3, 30])
def test_link(d, kappa):
    h = cm.VonMisesFisher(torch.eye(d, dtype=DOUBLE)[-1], 0.0)
    direction = torch.nn.functional.normalize(torch.arange(1.0, d + 1, dtype=DOUBLE), dim=0)
    mean = float(exact(d, kappa)[1]) * direction
    found = h.link(mean)
    assert float(found.norm()) == pytest.approx(kappa, rel=1e-6)
    torch.testing.assert_close(h.mean(found), mean, rtol=1e-9, atol=0)


def test_single_precision_keeps_its_digits_at_large_concentrations():
    h = cm.VonMisesFisher(torch.tensor([0.0, 0.0, 1.0]), 0.0)
    eta = torch.tensor([[1e5, 0.0, 0.0]])
    covariance = h.covariance(eta)[0]
    assert float(covariance[0, 0]) == pytest.approx(1e-10, rel=1e-3)  # 1 / kappa^2 in space
    assert float(covariance[1, 1]) == pytest.approx(1e-5, rel=1e-3)


def test_third_derivatives_at_zero_vanish_and_the_covariance_is_one_over_d():
    h = cm.VonMisesFisher(torch.eye(4, dtype=DOUBLE)[0], 0.0)
    zero = torch.zeros(4, dtype=DOUBLE)
    torch.testing.assert_close(h.covariance(zero), torch.eye(4, dtype=DOUBLE) / 4)
    third = torch.func.jacrev(h.covariance)(zero)
    torch.testing.assert_close(third, torch.zeros(4, 4, 4, dtype=DOUBLE))
    # Fourth cumulant of the uniform law: kappa_1111 = 3 / (d (d + 2)) - 3 / d^2.
    fourth = torch.func.jacrev(torch.func.jacrev(h.covariance))(zero)
    assert float(fourth[0, 0, 0, 0]) == pytest.approx(3 / 24 - 3 / 16, rel=1e-9)


def test_small_tilts_of_a_concentrated_law():
    """G(eta) for a base of concentration 50: against quadrature over the height."""
    mpmath.mp.dps = 30
    h = cm.VonMisesFisher(torch.tensor([0.0, 0.0, 1.0], dtype=DOUBLE), 50.0)
    eta = torch.tensor([[0.0, 0.0, 1e-3]], dtype=DOUBLE)
    weight = lambda t: mpmath.quad(lambda z: mpmath.exp((50 + t) * (z - 1)), [-1, 0.5, 1])
    exact_value = mpmath.log(weight(mpmath.mpf("1e-3")) / weight(0)) + mpmath.mpf("1e-3")
    assert float(h.log_normalizer(eta)) == pytest.approx(float(exact_value), rel=1e-10)
