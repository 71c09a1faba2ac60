"""Clusters, dimensions, entropies, expansion ratios. Oracles: closed forms, scipy, counting."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64


def test_clusters_are_those_of_single_linkage():
    x = torch.rand(3, 60, 2, dtype=DOUBLE)
    found = D.clusters(x, distance=0.1)
    for one, count, labels in zip(x, found.count, found.labels, strict=True):
        theirs = fcluster(linkage(one.numpy(), "single"), 0.1, "distance")
        assert count == len(set(theirs))
        same = torch.from_numpy(theirs)[:, None] == torch.from_numpy(theirs)
        assert torch.equal(labels[:, None] == labels, same)
    assert D.clusters(torch.zeros(5, 2)).count == 1
    assert D.clusters(1e200 * torch.randn(5, 2).double()).count == 5
    assert D.clusters(torch.arange(4.0)[:, None], distance=0.0).count == 4


@pytest.mark.parametrize(("d", "distance"), [(1, 0.004), (3, 0.15), (10, 0.6)])
def test_clusters_at_every_density(d, distance):
    x = torch.cat([torch.rand(150, d, dtype=DOUBLE), 1e-3 * torch.rand(150, d, dtype=DOUBLE)])
    theirs = torch.from_numpy(fcluster(linkage(x.numpy(), "single"), distance, "distance"))
    found = D.clusters(x, distance=distance)
    assert found.count == len(theirs.unique())
    assert torch.equal(found.labels[:, None] == found.labels, theirs[:, None] == theirs)
    seen = list(dict.fromkeys(found.labels.tolist()))
    assert seen == sorted(seen)  # counted in the order in which the points come


def test_clusters_of_a_collapsed_cloud_take_no_pairs():
    x = torch.randn(200_000, 3) * 1e-4
    assert D.clusters(x).count == 1  # the pairs would fill 300 GB


def test_sizes_of_far_off_clouds_do_not_overflow():
    x = torch.tensor([[3.0, 4.0], [-3.0, -4.0]], dtype=DOUBLE)
    for scale in (1e-200, 1.0, 1e200):
        assert D.cloud_norm(scale * x).item() == pytest.approx(5 * scale)
        assert D.cloud_spread(scale * x).item() == pytest.approx(5 * scale)
    assert D.cloud_norm(torch.zeros(3, 2)) == 0


def test_participation_ratio():
    S = torch.tensor([4.0, 1.0, 0.25], dtype=DOUBLE)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=DOUBLE)] * 3)
    x = corners * S.sqrt() + 100
    exact = S.sum() ** 2 / S.square().sum()
    torch.testing.assert_close(D.participation_ratio(x), exact)
    torch.testing.assert_close(D.participation_ratio(x * 1e-150), exact)
    wide = torch.randn(5, 40, dtype=DOUBLE)
    C = torch.cov(wide.mT)
    torch.testing.assert_close(
        D.participation_ratio(wide), C.diagonal().sum() ** 2 / C.square().sum()
    )
    assert D.participation_ratio(torch.ones(6, 3)) == 0


@pytest.mark.parametrize("d", [1, 2, 5])
def test_entropy_of_gaussian_uniform_and_scaled(d):
    torch.manual_seed(d)
    x = torch.randn(4000, d, dtype=DOUBLE)
    exact = 0.5 * d * math.log(2 * math.pi * math.e)
    assert D.cloud_entropy(x).item() == pytest.approx(exact, abs=0.1 * d**0.5)
    torch.testing.assert_close(
        D.cloud_entropy(3 * x) - D.cloud_entropy(x), torch.tensor(d * math.log(3)).double()
    )
    if d < 3:
        assert D.cloud_entropy(torch.rand(4000, d, dtype=DOUBLE)).item() == pytest.approx(
            0, abs=0.1
        )


def test_entropy_of_atoms_and_batches():
    x = torch.randn(3, 200, 2, dtype=DOUBLE)
    together = D.cloud_entropy(x)
    torch.testing.assert_close(together, torch.stack([D.cloud_entropy(one) for one in x]))
    assert D.cloud_entropy(torch.zeros(10, 2)) == -math.inf
    with pytest.raises(cm.InputError, match="neighbors must lie"):
        D.cloud_entropy(x, neighbors=200)


def test_expansion_of_a_linear_map():
    x = torch.randn(30, 3, dtype=DOUBLE)
    found = D.expansion(x, 2.5 * x)
    torch.testing.assert_close(found.ratios, torch.full((435,), 2.5, dtype=DOUBLE))
    assert found.minimum == pytest.approx(2.5)
    assert found.maximum == pytest.approx(2.5)


def test_expansion_quantiles_and_coincident_points():
    x = torch.tensor([[0.0], [0.0], [1.0], [3.0]], dtype=DOUBLE)
    y = torch.tensor([[0.0], [0.0], [2.0], [3.0]], dtype=DOUBLE)
    found = D.expansion(x, y, levels=(0.0, 1.0))
    assert found.ratios.isnan().sum() == 1
    assert found.quantiles.tolist() == [0.5, 2.0]
    assert (found.minimum, found.maximum) == (0.5, 2.0)
    with pytest.raises(cm.InputError, match="coincide"):
        D.expansion(torch.zeros(3, 2), torch.zeros(3, 2))
    with pytest.raises(cm.InputError, match="same points"):
        D.expansion(torch.zeros(3, 2), torch.zeros(4, 2))


def test_expansion_samples_pairs_of_large_clouds():
    x = torch.randn(2, 5000, 2)
    found = D.expansion(x, 3 * x, pairs=1000, generator=torch.Generator().manual_seed(0))
    assert found.ratios.shape == (2, 1000)
    torch.testing.assert_close(found.median, torch.full((2,), 3.0))


# Gaussianity -------------------------------------------------------------------------------------

STATISTICS = ["energy", "stein", "skewness", "kurtosis"]


def test_mardia_against_its_definition():
    x = torch.randn(40, 3, dtype=DOUBLE).exp()
    away = x - x.mean(0)
    precision = torch.linalg.inv(away.mT @ away / 40)
    m = away @ precision @ away.mT
    skew = D.gaussianity(x, statistic="skewness", draws=9).statistic
    assert skew.item() == pytest.approx((m**3).mean().item(), rel=1e-9)
    kurt = D.gaussianity(x, statistic="kurtosis", draws=9).statistic
    expected = abs((m.diagonal() ** 2).mean().item() - 15 * 39 / 41)
    assert kurt.item() == pytest.approx(expected, rel=1e-9)


def test_mardia_null_is_the_asymptotic_one():
    """N b1 / 6 is chi-squared (d(d+1)(d+2)/6), (b2 - d(d+2)) / sqrt(8d(d+2)/N) normal."""
    from scipy.stats import chi2, norm

    n, d = 400, 2
    skew = D.gaussianity(torch.randn(n, d), statistic="skewness", draws=1999, levels=(0.5, 0.95))
    exact = 6 / n * chi2.ppf([0.5, 0.95], d * (d + 1) * (d + 2) / 6)
    assert skew.null_quantiles.tolist() == pytest.approx(exact.tolist(), rel=0.12)
    kurt = D.gaussianity(torch.randn(n, d), statistic="kurtosis", draws=1999, levels=(0.95,))
    exact = norm.ppf(0.975) * math.sqrt(8 * d * (d + 2) / n)
    assert kurt.null_quantiles.item() == pytest.approx(exact, rel=0.12)


@pytest.mark.parametrize("d", [1, 3])
def test_energy_against_monte_carlo(d):
    """2 E|x - Z| - E|Z - Z'| - mean|x - y|, with expectations by a large sample."""
    from cumulant.dynamics.gaussianity import energy

    z = D.Whiten()(torch.rand(60, d, dtype=DOUBLE))
    Z = torch.randn(2, 400_000, d, dtype=DOUBLE)
    across = torch.stack([(one - Z[0]).norm(dim=-1).mean() for one in z]).mean()
    between = (Z[0] - Z[1]).norm(dim=-1).mean()
    exact = 60 * (2 * across - between - torch.cdist(z, z).mean())
    assert energy(z).item() == pytest.approx(exact.item(), abs=0.3)


def test_stein_kernel_by_automatic_differentiation():
    """k0(x, y) = s.s' k + s.grad_y k + s'.grad_x k + tr grad_x grad_y k with s(x) = -x."""
    from cumulant.dynamics.gaussianity import stein

    z = torch.randn(7, 3, dtype=DOUBLE)
    k = lambda x, y: (3 + (x - y).square().sum()).rsqrt()
    grad, jacfwd = torch.func.grad, torch.func.jacfwd
    total = 0.0
    for x in z:
        for y in z:
            total += (
                (x @ y) * k(x, y)
                - x @ grad(k, 1)(x, y)
                - y @ grad(k, 0)(x, y)
                + jacfwd(grad(k, 0), 1)(x, y).trace()
            )
    assert stein(z).item() == pytest.approx(7 * total.item() / 49, rel=1e-10)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_p_values_are_uniform_under_the_hypothesis_whatever_the_parameters(statistic):
    from scipy.stats import kstest

    x = torch.randn(300, 40, 3, dtype=DOUBLE) @ torch.randn(3, 3, dtype=DOUBLE) + 50
    p = D.gaussianity(x, statistic=statistic).p_value
    assert p.shape == (300,)
    assert kstest(p.numpy(), "uniform").pvalue > 0.001
    assert p.min() >= 1 / 500


@pytest.mark.parametrize(
    ("statistic", "make"),
    [
        ("energy", lambda x: x.exp()),
        ("stein", lambda x: x.exp()),
        ("skewness", lambda x: x.exp()),
        ("energy", lambda x: x.sign() + 0.1 * x),
        ("stein", lambda x: x.sign() + 0.1 * x),
        ("kurtosis", lambda x: x.sign() + 0.1 * x),
        ("energy", lambda x: torch.nn.functional.normalize(x, dim=-1)),
        ("stein", lambda x: torch.nn.functional.normalize(x, dim=-1)),
    ],
)
def test_departures_are_seen(statistic, make):
    x = make(torch.randn(20, 200, 2, dtype=DOUBLE))
    assert (D.gaussianity(x, statistic=statistic).p_value < 0.05).double().mean() > 0.9


@pytest.mark.parametrize("statistic", STATISTICS)
def test_affine_maps_change_nothing(statistic):
    x = torch.randn(50, 2, dtype=DOUBLE).exp()
    moved = x @ torch.randn(2, 2, dtype=DOUBLE) + 7
    first, second = (D.gaussianity(y, statistic=statistic, draws=9).statistic for y in (x, moved))
    torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("x", "how", "message"),
    [
        (torch.randn(3, 2), {}, "N must exceed"),
        (torch.randn(30, 2) * torch.tensor([1.0, 0.0]), {}, "subspace"),
        (torch.randn(30, 2), {"statistic": "shapiro"}, "statistic must be one of"),
        (torch.randn(30, 2), {"draws": 0}, "draws must be"),
        (torch.full((30, 2), math.nan), {}, "NaN"),
    ],
)
def test_bad_input(x, how, message):
    with pytest.raises(cm.InputError, match=message):
        D.gaussianity(x, **how)
