"""T1-T3, T6: what tilting does to points, Gaussians and the natural families.

Oracles: sums written out, mpmath at 50 digits, importance-sampled Monte Carlo with its error bar,
scipy.stats.
"""

from __future__ import annotations

import math

import mpmath
import pytest
import scipy.stats
import torch
from torch import distributions as td
from torch.func import jacrev

import cumulant as cm

DOUBLE = torch.float64


def test_t1_mean_is_nadaraya_watson_regression():
    """With Gaussian kernels the weights exp(-|x - y|^2 / 2) are weights exp<x, y> on a sphere."""
    x = torch.nn.functional.normalize(torch.randn(20, 3, dtype=DOUBLE), dim=-1)
    y, v = torch.randn(5, 3, dtype=DOUBLE), torch.randn(20, 2, dtype=DOUBLE)
    kernel = (-0.5 * torch.cdist(y, x) ** 2).exp()
    smoothed = kernel @ v / kernel.sum(-1, keepdim=True)
    torch.testing.assert_close(cm.Empirical(x, values=v).value_mean(y), smoothed)


def test_t1_derivative_of_the_value_mean_is_a_covariance():
    x, v = torch.randn(8, 3, dtype=DOUBLE), torch.randn(8, 2, dtype=DOUBLE)
    w, eta = torch.randn(8, dtype=DOUBLE), torch.randn(3, dtype=DOUBLE)
    h = cm.Empirical(x, w, v)
    p = (x @ eta + w).softmax(0)
    expected = torch.einsum("n,na,nb->ab", p, v - p @ v, x - p @ x)
    torch.testing.assert_close(jacrev(h.value_mean)(eta), expected)
    torch.testing.assert_close(h.mean(eta), p @ x)  # mean stays that of the points


def test_t1_uniform_weights_shift_the_log_normalizer():
    x, eta = torch.randn(8, 3, dtype=DOUBLE), torch.randn(2, 3, dtype=DOUBLE)
    counting = cm.Empirical(x).log_normalizer(eta)
    uniform = cm.Empirical(x, torch.full((8,), -math.log(8), dtype=DOUBLE)).log_normalizer(eta)
    torch.testing.assert_close(uniform, counting - math.log(8))


def test_t1_fifty_digits():
    mpmath.mp.dps = 50
    points, logs, eta = [[0.5, -1.25], [2.0, 0.75], [-30.0, 4.0]], [0.5, -3.0, 1.0], [1.5, -2.25]
    mp = [[mpmath.mpf(a) for a in p] for p in points]
    terms = [
        mpmath.exp(mpmath.mpf(w) + sum(a * mpmath.mpf(e) for a, e in zip(p, eta, strict=True)))
        for p, w in zip(mp, logs, strict=True)
    ]
    total = sum(terms)
    mean = [float(sum(t * p[a] for t, p in zip(terms, mp, strict=True)) / total) for a in range(2)]
    h = cm.Empirical(torch.tensor(points, dtype=DOUBLE), torch.tensor(logs, dtype=DOUBLE))
    at = torch.tensor(eta, dtype=DOUBLE)
    assert float(h.log_normalizer(at)) == pytest.approx(float(mpmath.log(total)), rel=1e-15)
    torch.testing.assert_close(h.mean(at), torch.tensor(mean, dtype=DOUBLE), rtol=1e-13, atol=0)


TILTED = {
    "Poisson": (cm.Poisson(2.0), td.Poisson(torch.tensor(2.0, dtype=DOUBLE)), 0.4),
    "Bernoulli": (cm.Bernoulli(0.3), td.Bernoulli(torch.tensor(0.3, dtype=DOUBLE)), 1.5),
    "Binomial": (cm.Binomial(6, 0.3), td.Binomial(6, torch.tensor(0.3, dtype=DOUBLE)), 0.8),
    "Geometric": (cm.Geometric(0.6), td.Geometric(torch.tensor(0.6, dtype=DOUBLE)), 0.3),
    "Exponential": (cm.Exponential(3.0), td.Exponential(torch.tensor(3.0, dtype=DOUBLE)), 1.0),
    "Gamma, fixed shape": (
        cm.FixedShapeGamma(2.0, 3.0),
        td.Gamma(torch.tensor(2.0, dtype=DOUBLE), torch.tensor(3.0, dtype=DOUBLE)),
        1.0,
    ),
    "Gaussian": (
        cm.Gaussian([0.3], 0.7),
        td.Normal(torch.tensor(0.3, dtype=DOUBLE), math.sqrt(0.7)),
        1.0,
    ),
}


@pytest.mark.parametrize("name", TILTED)
def test_t2_t6_importance_sampling(name):
    """E under p_eta = E_h[x e^{eta x}] / E_h[e^{eta x}], from 400,000 draws of torch's own h."""
    h, law, size = TILTED[name]
    eta = torch.tensor([[size]], dtype=DOUBLE)
    x = law.sample((400_000,))
    w = (size * x).exp()
    error = 5 / math.sqrt(len(x))
    assert abs(float(w.mean().log() - h.log_normalizer(eta))) < error * float(w.std() / w.mean())
    mean = (w * x).mean() / w.mean()
    spread = (w * (x - mean)).std() / w.mean()
    assert abs(float(mean - h.mean(eta))) < error * float(spread)


def test_t2_tilting_stays_in_the_family():
    """And what it does to the familiar parameters, as textbooks have it."""
    eta = torch.tensor([0.5], dtype=DOUBLE)
    e = math.exp(0.5)
    assert float(cm.Poisson(2.0).tilt(eta).rate) == pytest.approx(2 * e)
    assert float(cm.Exponential(2.0).tilt(eta).rate) == pytest.approx(1.5)
    assert float(cm.FixedShapeGamma(3.0, 2.0).tilt(eta).rate) == pytest.approx(1.5)
    assert float(cm.Geometric(0.6).tilt(eta).probs) == pytest.approx(1 - 0.4 * e)
    p = 0.3 * e / (0.7 + 0.3 * e)
    assert float(cm.Bernoulli(0.3).tilt(eta).probs) == pytest.approx(p)
    assert float(cm.Binomial(9, 0.3).tilt(eta).probs) == pytest.approx(p)
    moved = cm.Gaussian([1.0], 2.0).tilt(eta)
    assert float(moved.loc) == pytest.approx(2.0)
    assert float(moved.covariance_matrix) == pytest.approx(2.0)
    both = torch.tensor([-1.0, 2.0], dtype=DOUBLE)
    gamma = cm.Gamma(2.0, 3.0).tilt(both)
    assert (float(gamma.concentration), float(gamma.rate)) == pytest.approx((4.0, 4.0))


@pytest.mark.parametrize(
    ("h", "edge"),
    [
        (cm.Exponential(2.0), 2.0),
        (cm.FixedShapeGamma(3.0, 2.0), 2.0),
        (cm.Geometric(0.6), -math.log(0.4)),
    ],
)
def test_t6_outside_the_domain_is_infinite_and_never_nan(h, edge):
    eta = torch.tensor([[edge - 1e-3], [edge + 1e-3], [1e9]], dtype=DOUBLE)
    for out in (h.log_normalizer(eta), h.mean(eta)[:, 0], h.covariance(eta)[:, 0, 0]):
        assert out.tolist()[1:] == [math.inf, math.inf]
        assert math.isfinite(out[0])
    zero = torch.zeros_like(eta)
    for out in (h.kl(zero, eta), h.kl(eta, zero), h.relative_entropy(eta)):
        assert out.tolist()[1:] == [math.inf, math.inf]
    slope = torch.func.grad(lambda e: h.log_normalizer(e)[:1].sum())(eta)
    assert not slope.isnan().any()
    with pytest.raises(cm.InputError, match="outside the domain"):
        h.sample(eta, 1)
    with pytest.raises(cm.InputError, match="outside the domain"):
        h.tilt(eta)


@pytest.mark.parametrize(
    ("ours", "theirs", "x"),
    [
        (cm.Binomial(7, 0.3), scipy.stats.binom(7, 0.3), [0, 3, 7]),
        (cm.Poisson(2.5), scipy.stats.poisson(2.5), [0, 1, 9]),
        (cm.Geometric(0.3), scipy.stats.geom(0.3, loc=-1), [0, 1, 9]),
        (cm.Exponential(2.0), scipy.stats.expon(scale=0.5), [0.0, 0.5, 3.0]),
        (cm.Gamma(2.5, 2.0), scipy.stats.gamma(2.5, scale=0.5), [0.1, 0.5, 3.0]),
        (cm.Beta(2.5, 2.0), scipy.stats.beta(2.5, 2.0), [0.1, 0.5, 0.9]),
        (cm.Gaussian([0.5], 2.0), scipy.stats.norm(0.5, math.sqrt(2.0)), [-1.0, 0.5, 3.0]),
    ],
)
def test_densities_are_scipys(ours, theirs, x):
    points = torch.tensor(x, dtype=DOUBLE)[:, None]
    log = theirs.logpmf if hasattr(theirs.dist, "logpmf") else theirs.logpdf
    expected = torch.tensor([float(log(v)) for v in x], dtype=DOUBLE)
    torch.testing.assert_close(
        ours.log_prob(points, torch.zeros(1, 1 if ours.dimension == 1 else 2, dtype=DOUBLE)),
        expected,
    )


def test_outside_the_support_the_log_probability_is_minus_infinity():
    x = torch.tensor([[-1.0], [0.5]], dtype=DOUBLE)
    for h in (cm.Poisson(2.0), cm.Binomial(3, 0.5), cm.Geometric(0.5)):
        assert h.log_prob(x).tolist() == [-math.inf, -math.inf]
    for h in (cm.Exponential(2.0), cm.Gamma(2.0, 3.0), cm.Beta(2.0, 3.0), cm.FixedShapeGamma(1, 2)):
        out = h.log_prob(x).tolist()
        assert out[0] == -math.inf
        assert math.isfinite(out[1])
    die = cm.Empirical(torch.arange(1.0, 7.0, dtype=DOUBLE)[:, None])
    out = die.log_prob(torch.tensor([[3.0], [3.5]], dtype=DOUBLE), torch.zeros(1, 1))
    torch.testing.assert_close(out[0].exp(), torch.tensor(1 / 6, dtype=DOUBLE))
    assert out[1] == -math.inf
    two = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=DOUBLE)
    assert cm.Categorical([0.5, 0.5]).log_prob(two).tolist()[1] == -math.inf
    ball = cm.VonMisesFisher([1.0, 0.0], 1.0).log_prob(two)
    assert math.isfinite(ball[0])
    assert ball[1] == -math.inf
