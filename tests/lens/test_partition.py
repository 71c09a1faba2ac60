"""Partition functions of Gaussian vectors, where mean and variance are known (T31)."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import gammaln, ive

import cumulant as cm
from cumulant.lens.partition import partition


def log_mean_exp_cosine(kappa, d):
    """log E exp(kappa cos) for two uniform directions in R^d: the sphere's Laplace transform."""
    order = d / 2 - 1
    scaled = math.log(ive(order, kappa)) + kappa
    return gammaln(d / 2) + order * math.log(2 / kappa) + scaled


@pytest.mark.parametrize("radius", [0.5, 1.0, 1.5])
def test_gaussian_vectors(radius):
    """E Z = V exp(r^2/2); over directions, Var Z = V exp(r^2) (exp(r^2) - E exp(r^2 cos)).

    Taking off the sample's mean takes r^2/V off the relative variance: Z exp(-<m, c>) with
    Cov(Z/EZ, <m, c>) = Var <m, c> = r^2/V, cos r^2/V between directions, whose mean is 0.
    """
    V, D, runs = 10_000, 30, 12
    rows = {False: [], True: []}
    for seed in range(runs):
        vectors = torch.randn(V, D, generator=torch.Generator().manual_seed(seed))
        rows[False].append(partition(7 * vectors, radii=[radius], seed=seed)[0])
        rows[True].append(partition(7 * vectors + 3, radii=[radius], seed=seed)[1])
    plain = math.exp(radius**2) - math.exp(log_mean_exp_cosine(radius**2, D))
    for centered, expected in ((False, plain), (True, plain - radius**2)):
        found = rows[centered]
        assert all(row["centered"] is centered for row in found)
        mean = sum(row["mean"] for row in found) / runs
        variance = sum(row["relative_sd"] ** 2 for row in found) / runs
        assert mean == pytest.approx(math.log(V) + radius**2 / 2, abs=5e-3)
        assert variance == pytest.approx(expected / V, rel=0.15)


def test_constant_at_small_lengths_only():
    rows = partition(torch.randn(5000, 40), radii=[0.1, 1.0, 8.0])
    small, middle, large = (row["relative_sd"] for row in rows if row["centered"])
    assert small < 2e-3 < middle < 0.1 < 1 < large
    assert all(row["q025"] < row["mean"] < row["q975"] for row in rows)


def test_against_the_plain_sum():
    vectors = torch.randn(300, 6, dtype=torch.float64) + 1
    rows = partition(vectors, radii=[2.0], directions=500, seed=3)
    unit = torch.randn(500, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    spread = vectors.var(0, correction=0).mean().sqrt()
    context = 2 / spread * torch.nn.functional.normalize(unit, dim=1)
    plain = (context @ vectors.mT).logsumexp(1)
    centered = (context @ (vectors - vectors.mean(0)).mT).logsumexp(1)
    for row, log_z in zip(rows, (plain, centered), strict=True):
        z = log_z.exp()
        assert row["norm"] == pytest.approx(float(2 / spread))
        assert row["mean"] == pytest.approx(float(log_z.mean()))
        assert row["sd"] == pytest.approx(float(log_z.std()))
        assert row["relative_sd"] == pytest.approx(float(z.std() / z.mean()))
        assert row["q975"] == pytest.approx(float(log_z.quantile(0.975)))


def test_units_do_not_matter_and_nothing_overflows():
    vectors = torch.randn(500, 10)
    one, other = (partition(s * vectors, radii=[1.0])[1] for s in (1.0, 1e-6))
    assert one["mean"] == pytest.approx(other["mean"], rel=1e-4)
    far = partition(vectors, radii=[1e4])[1]
    assert all(math.isfinite(far[n]) for n in ("mean", "sd", "relative_sd"))


def test_frequencies_of_the_random_walk():
    """Words emitted at random contexts: log p(w) follows |v_w|^2; shuffled counts do not."""
    generator = torch.Generator().manual_seed(0)
    scale = 0.3 + 2 * torch.rand(400, 1, generator=generator)
    vectors = scale * torch.randn(400, 20, generator=generator)
    context = torch.nn.functional.normalize(torch.randn(20_000, 20, generator=generator), dim=1)
    context = 2 * context
    words = torch.multinomial((context @ vectors.mT).softmax(1), 1, generator=generator)[:, 0]
    counts = torch.bincount(words, minlength=400)
    row = partition(vectors, radii=[1.0], counts=counts)[0]
    assert row["frequency_correlation"] > 0.9
    shuffled = counts[torch.randperm(400, generator=generator)]
    assert abs(partition(vectors, radii=[1.0], counts=shuffled)[0]["frequency_correlation"]) < 0.2


def test_input():
    vectors = torch.randn(10, 3)
    assert partition(vectors, radii=[1.0])[0]["frequency_correlation"] is None
    for bad in (torch.ones(10, 3), torch.randn(1, 3), torch.randn(10)):
        with pytest.raises(cm.InputError):
            partition(bad)
    with pytest.raises(cm.InputError, match="counts"):
        partition(vectors, counts=torch.ones(4))
    with pytest.raises(cm.InputError, match="radius"):
        partition(vectors, radii=[-1.0])
    half = partition(vectors.half(), radii=[1.0])[0]["mean"]
    assert half == pytest.approx(partition(vectors, radii=[1.0])[0]["mean"], rel=1e-3)
