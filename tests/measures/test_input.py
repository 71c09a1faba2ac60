"""Awkward and bad input: a defined answer or one clear error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

import cumulant as cm

DOUBLE = torch.float64
EYE = torch.eye(2)


BAD = {
    "covariance not definite": (
        lambda: cm.Gaussian(torch.zeros(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])),
        "covariance must be positive definite; its smallest eigenvalue is -1",
    ),
    "covariance not symmetric": (
        lambda: cm.Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]])),
        "covariance must be symmetric",
    ),
    "negative variance": (
        lambda: cm.Gaussian(torch.zeros(2), torch.tensor([1.0, -1.0])),
        "covariance must be positive",
    ),
    "covariance of another size": (
        lambda: cm.Gaussian(torch.zeros(2), torch.eye(3)),
        r"covariance must have shape \(\.\.\., 2, 2\)",
    ),
    "mixture covariance": (
        lambda: cm.GaussianMixture(torch.zeros(3, 2), -torch.ones(3, 2)),
        "covariances must be positive",
    ),
    "mixture shape": (
        lambda: cm.GaussianMixture(torch.zeros(3, 2), torch.ones(5)),
        r"do not fit 3 means of dimension 2; expected shared \(\.\.\., 2, 2\)",
    ),
    "mixture kind": (
        lambda: cm.GaussianMixture(torch.zeros(3, 2), EYE, covariance_type="tied"),
        "covariance_type must be one of",
    ),
    "weights all zero": (
        lambda: cm.Empirical(EYE, torch.full((2,), -math.inf)),
        "all weights are zero",
    ),
    "weights of another length": (
        lambda: cm.Empirical(EYE, torch.zeros(3)),
        "log_weights must have one entry for each of the 2 points",
    ),
    "infinite weight": (
        lambda: cm.Empirical(EYE, torch.tensor([0.0, math.inf])),
        r"not \+inf",
    ),
    "no points": (lambda: cm.Empirical(torch.zeros(0, 2)), "N and d at least 1"),
    "flat points": (lambda: cm.Empirical(torch.zeros(4)), r"x\[:, None\]"),
    "NaN points": (lambda: cm.Empirical(torch.tensor([[math.nan]])), "points holds NaN"),
    "infinite points": (lambda: cm.Empirical(torch.tensor([[math.inf]])), "points must be finite"),
    "values of another length": (
        lambda: cm.Empirical(EYE, values=torch.zeros(3, 1)),
        r"values must have shape \(\.\.\., 2, e\)",
    ),
    "sparse points": (lambda: cm.Empirical(EYE.to_sparse()), "points must be dense"),
    "sparse eta": (lambda: cm.Empirical(EYE).mean(EYE.to_sparse()), "eta must be dense"),
    "boolean eta": (lambda: cm.Empirical(EYE).mean(EYE > 0), "eta must be real"),
    "not a number": (lambda: cm.Poisson("many"), "rate must be a tensor or a number, not str"),
    "negative rate": (lambda: cm.Poisson(-1.0), "rate must be positive and finite"),
    "probability above one": (lambda: cm.Bernoulli(1.5), r"probs must lie in \[0, 1\].*1\.5"),
    "probability below zero": (lambda: cm.Binomial(3, -0.1), r"probs must lie in \[0, 1\]"),
    "half a trial": (lambda: cm.Binomial(2.5, 0.5), "total_count must be a positive integer"),
    "no success": (lambda: cm.Geometric(0.0), "probs must be positive"),
    "negative categories": (lambda: cm.Categorical([0.5, -0.5]), r"probabilities lie in \[0, 1\]"),
    "negative concentration": (
        lambda: cm.VonMisesFisher([1.0, 0.0], -2.0),
        "concentration must be >= 0.*-2",
    ),
    "no direction": (lambda: cm.VonMisesFisher([0.0, 0.0], 1.0), "must not be zero"),
    "gamma": (lambda: cm.Gamma(1.0, 0.0), "rate must be positive"),
    "dirichlet": (lambda: cm.Dirichlet([1.0]), "K at least 2"),
    "batches": (
        lambda: cm.Gaussian(torch.zeros(3, 2), torch.ones(4, 2)),
        "batch dimensions must broadcast",
    ),
    "q": (
        lambda: cm.GaussianMixture(torch.zeros(2, 1), 1.0).log_normalizer_bound(
            torch.zeros(1, 1), torch.tensor([0.5, 0.6])
        ),
        "q must be >= 0 and sum to 1",
    ),
    "q of another length": (
        lambda: cm.GaussianMixture(torch.zeros(2, 1), 1.0).log_normalizer_bound(
            torch.zeros(1, 1), torch.ones(3) / 3
        ),
        "q must end in a dimension of 2",
    ),
    "no values": (lambda: cm.Empirical(EYE).value_mean(EYE), "has no values"),
    "samples": (lambda: cm.Poisson(1.0).sample(torch.zeros(1, 1), -1), "sample: n must be"),
    "projecting nothing": (lambda: cm.project(3.0, cm.Gamma), "source must be a sample"),
    "onto nothing": (lambda: cm.project(EYE, "gamma"), "onto must be a measure"),
    "sample outside": (
        lambda: cm.project(torch.tensor([-1.0, 2.0]), cm.Gamma),
        "outside the support of Gamma",
    ),
    "sample of another size": (
        lambda: cm.project(torch.zeros(5, 2), cm.Poisson),
        "Poisson has dimension 1",
    ),
    "constant sample": (lambda: cm.project(torch.ones(5), cm.Gamma), "boundary"),
    "a family with something fixed": (
        lambda: cm.Binomial.from_expectation([2.0]),
        "takes only total_count=",
    ),
    "moments": (lambda: cm.maximum_entropy(torch.arange(6.0), 7.0), "outside the convex hull"),
    "moments of another size": (
        lambda: cm.maximum_entropy(torch.zeros(4, 2), torch.zeros(3)),
        r"moments must have shape \(\.\.\., 2\)",
    ),
    "from_torch": (lambda: cm.from_torch(td.Cauchy(0.0, 1.0)), "Cauchy is not among"),
    "from_torch of nothing": (lambda: cm.from_torch(3), "takes a torch.distributions object"),
    "mixture of one": (lambda: cm.Mixture(cm.Poisson(1.0)), "be a batch of untilted measures"),
    "rows that do not pair off": (
        lambda: cm.Poisson(1.0).tilt(torch.zeros(3, 1)).mean(torch.zeros(2, 1)),
        "must broadcast",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_error(name):
    call, message = BAD[name]
    with pytest.raises(cm.InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_square_table_is_shared_if_it_can_be():
    """N = d: symmetric positive definite means shared, anything else a table of variances."""
    means = torch.zeros(2, 2)
    assert cm.GaussianMixture(means, torch.eye(2)).covariance_type == "shared"
    assert cm.GaussianMixture(means, torch.ones(2, 2)).covariance_type == "diagonal"
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert cm.GaussianMixture(means, table).covariance_type == "diagonal"
    asked = cm.GaussianMixture(means, torch.eye(2) + 0.5, covariance_type="diagonal")
    assert asked.covariance_type == "diagonal"
    assert cm.GaussianMixture(means, torch.ones(2)).covariance_type == "isotropic"
    assert cm.GaussianMixture(means, torch.eye(2).expand(2, 2, 2)).covariance_type == "own"


def test_plain_numbers_take_the_precision_of_eta():
    h = cm.Poisson(0.1)
    assert h.mean(torch.zeros(1, 1)).dtype == torch.float32
    assert h.mean(torch.zeros(1, 1, dtype=DOUBLE)).dtype == DOUBLE
    assert float(h.mean(torch.zeros(1, 1, dtype=DOUBLE))) == pytest.approx(0.1, rel=1e-15)
    assert h.tilt(torch.zeros(1, dtype=DOUBLE)).rate.dtype == DOUBLE
    assert cm.Poisson(torch.tensor(0.1)).mean(torch.zeros(1, 1, dtype=DOUBLE)).dtype == DOUBLE


def test_non_contiguous_and_empty():
    x = torch.randn(3, 8, dtype=DOUBLE).T
    eta = torch.randn(3, 4, dtype=DOUBLE).T
    torch.testing.assert_close(
        cm.Empirical(x).mean(eta), cm.Empirical(x.contiguous()).mean(eta.contiguous())
    )
    h = cm.Empirical(x)
    assert h.mean(eta[:0]).shape == (0, 3)
    assert h.log_normalizer(eta[:0]).shape == (0,)
    assert h.covariance(eta[:0]).shape == (0, 3, 3)
    assert h.link(eta[:0]).shape == (0, 3)
    assert h.sample(eta[:0], 2).shape == (2, 0, 3)
    assert h.sample(eta, 0).shape == (0, 4, 3)
    batch = cm.Empirical(torch.zeros(0, 5, 2))
    assert batch.mean(torch.zeros(3, 2)).shape == (0, 3, 2)


def sizes(low, high):
    return st.floats(low, high, allow_nan=False, width=64)


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 6),
    d=st.integers(1, 3),
    spread=st.sampled_from([0.0, 1e-9, 1.0, 1e5]),
    size=st.sampled_from([0.0, 1e-300, 1e-9, 1.0, 1e3]),
    dead=st.booleans(),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, DOUBLE]),
)
def test_awkward_points(n, d, spread, size, dead, seed, dtype):
    """One point, coincident points, dead points, huge and tiny eta: finite, and exact laws."""
    g = torch.Generator().manual_seed(seed)
    points = (spread * torch.randn(n, d, generator=g, dtype=DOUBLE)).to(dtype)
    logs = torch.zeros(n, dtype=dtype)
    if dead and n > 1:
        logs[0] = -math.inf
    eta = (size * torch.randn(2, d, generator=g, dtype=DOUBLE)).to(dtype)
    h = cm.Empirical(points, logs)
    alive = points[logs > -math.inf]
    value, mean, covariance = h.log_normalizer(eta), h.mean(eta), h.covariance(eta)
    for out in (value, mean, covariance, h.relative_entropy(eta)):
        assert out.isfinite().all()
    exact = (eta.double() @ alive.double().mT).logsumexp(-1)
    tol = 2e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(value.double(), exact, rtol=tol, atol=tol * (1 + spread * size))
    slack = 1e-5 * (1 + spread)
    assert (mean <= alive.max(0).values + slack).all()
    assert (mean >= alive.min(0).values - slack).all()
    assert (covariance.diagonal(dim1=-2, dim2=-1) >= -(slack**2)).all()
    assert (h.kl(eta, eta.flip(0)) >= 0).all()
    link, status = h.link(mean, throw=False)
    assert link.isfinite().all()
    good = status.converged
    if dtype == DOUBLE:
        torch.testing.assert_close(
            h.mean(link)[good], mean[good], rtol=1e-6, atol=1e-6 * (spread + 1e-12)
        )


@settings(max_examples=60, deadline=None)
@given(
    condition=st.sampled_from([1.0, 1e-6, 1e-12]),
    kind=st.sampled_from(["shared", "own", "diagonal", "isotropic"]),
    size=st.sampled_from([0.0, 1e-9, 1.0, 1e2]),
    dead=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_awkward_mixtures(condition, kind, size, dead, seed):
    """Near-singular covariances, dead components, huge and tiny eta."""
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(3, 2, generator=g, dtype=DOUBLE)
    turn = torch.linalg.qr(torch.randn(2, 2, generator=g, dtype=DOUBLE))[0]
    dense = turn @ torch.tensor([1.0, condition], dtype=DOUBLE).diag() @ turn.mT
    dense = (dense + dense.mT) / 2
    covariances = {
        "shared": dense,
        "own": dense.expand(3, 2, 2),
        "diagonal": torch.tensor([1.0, condition], dtype=DOUBLE).expand(3, 2),
        "isotropic": torch.full((3,), condition, dtype=DOUBLE),
    }[kind]
    logs = torch.log(torch.tensor([0.2, 0.3, 0.5], dtype=DOUBLE))
    if dead:
        logs[0] = -math.inf
    h = cm.GaussianMixture(means, covariances, logs, covariance_type=kind)
    eta = size * torch.randn(2, 2, generator=g, dtype=DOUBLE)
    mean = h.mean(eta)
    for out in (h.log_normalizer(eta), mean, h.covariance(eta), h.relative_entropy(eta)):
        assert out.isfinite().all()
    assert (h.log_normalizer_bound(eta) <= h.log_normalizer(eta) + 1e-9 * (1 + size**2)).all()
    found, status = h.link(mean, throw=False)
    assert found.isfinite().all()
    good = status.converged
    torch.testing.assert_close(h.mean(found)[good], mean[good], rtol=1e-6, atol=1e-6 * (1 + size))


@settings(max_examples=60, deadline=None)
@given(rate=sizes(1e-6, 1e6), eta=sizes(-50.0, 50.0))
def test_awkward_scalar_families(rate, eta):
    """No NaN anywhere, and the link comes back where the mean is representable."""
    p = rate / (1 + rate)
    at = torch.tensor([[eta]], dtype=DOUBLE)
    for h in (cm.Poisson(rate), cm.Bernoulli(p), cm.Geometric(p), cm.Exponential(rate)):
        for out in (h.log_normalizer(at), h.mean(at), h.covariance(at), h.relative_entropy(at)):
            assert not out.isnan().any()
        mean = h.mean(at)
        if mean.isfinite().all() and h.log_normalizer(at).isfinite():
            value, status = h.link(mean, throw=False)
            if status.converged:
                torch.testing.assert_close(h.mean(value), mean, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("probs", [0.0, 1.0])
def test_certain_outcomes(probs):
    """p = 0 and p = 1 are point masses: tilting changes nothing."""
    for h in (cm.Bernoulli(probs), cm.Binomial(3, probs)):
        n = 3 if isinstance(h, cm.Binomial) and not isinstance(h, cm.Bernoulli) else 1
        eta = torch.tensor([[-800.0], [0.0], [2.0], [800.0]], dtype=DOUBLE)
        torch.testing.assert_close(h.log_normalizer(eta), n * probs * eta[:, 0])
        torch.testing.assert_close(h.mean(eta), torch.full_like(eta, n * probs))
        assert h.log_prob(torch.tensor([[n * probs]], dtype=DOUBLE)).tolist() == [0.0]
        assert h.log_prob(torch.tensor([[n * (1 - probs)]], dtype=DOUBLE)).tolist() == [-math.inf]
        assert (h.sample(eta, 4) == n * probs).all()
