"""To and from torch's distributions."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as td

import cumulant as cm

DOUBLE = torch.float64


def t(*x):
    return torch.tensor(x, dtype=DOUBLE)


LAWS = [
    td.Bernoulli(t(0.3, 0.6)),
    td.Binomial(5, t(0.3, 0.6)),
    td.Poisson(t(1.0, 3.0)),
    td.Geometric(t(0.3, 0.6)),
    td.Exponential(t(1.0, 3.0)),
    td.Gamma(t(1.0, 3.0), t(2.0, 0.5)),
    td.Chi2(t(3.0, 4.0)),
    td.Beta(t(1.0, 3.0), t(2.0, 0.5)),
    td.Dirichlet(t([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])),
    td.OneHotCategorical(t([0.1, 0.9], [0.4, 0.6])),
    td.Normal(t(0.0, 1.0), t(1.0, 2.0)),
    td.MultivariateNormal(torch.zeros(2, 3, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE)),
    td.LowRankMultivariateNormal(
        torch.zeros(2, 3, dtype=DOUBLE), torch.ones(2, 3, 1, dtype=DOUBLE), torch.ones(2, 3)
    ),
    td.Independent(td.Normal(torch.zeros(2, 3, dtype=DOUBLE), t(1.0, 2.0, 3.0)), 1),
    td.MixtureSameFamily(
        td.Categorical(t([0.3, 0.7], [0.5, 0.5])), td.Poisson(t([1.0, 4.0], [2.0, 3.0]))
    ),
    td.MixtureSameFamily(
        td.Categorical(t([0.3, 0.7], [0.5, 0.5])), td.Normal(t([1.0, 4.0], [2.0, 3.0]), t(1.0))
    ),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda x: type(x).__name__)
def test_same_law(law):
    """Densities and moments agree, batch and all."""
    h = cm.from_torch(law)
    assert h.batch_shape == law.batch_shape
    x = law.sample((6,))
    rows = x if law.event_shape else x[..., None]
    ours = h.log_prob(rows)
    torch.testing.assert_close(ours, law.log_prob(x).to(ours.dtype), rtol=1e-9, atol=1e-9)
    mean, covariance = h.moments()
    expected = law.mean if law.event_shape else law.mean[..., None]
    torch.testing.assert_close(mean, expected.to(mean.dtype))
    spread = law.variance if law.event_shape else law.variance[..., None]
    torch.testing.assert_close(
        covariance.diagonal(dim1=-2, dim2=-1), spread.to(mean.dtype), rtol=1e-6, atol=1e-9
    )


def test_integer_categories_and_angles():
    h = cm.from_torch(td.Categorical(t(0.2, 0.8)))
    torch.testing.assert_close(h.mean(), t(0.2, 0.8))
    law = td.VonMises(t(0.4)[0], t(2.0)[0])
    h = cm.from_torch(law)
    angle = t(0.0, 1.0, -2.0)
    x = torch.stack([angle.cos(), angle.sin()], -1)
    torch.testing.assert_close(h.log_prob(x), law.log_prob(angle), rtol=0, atol=1e-6)


@pytest.mark.parametrize("law", LAWS[:10], ids=lambda x: type(x).__name__)
def test_there_and_back(law):
    again = cm.from_torch(law).to_torch()
    x = law.sample((4,))
    torch.testing.assert_close(again.log_prob(x), law.log_prob(x))


def test_tilted_laws_as_torch_distributions():
    eta = t([0.1], [0.3])
    rates = cm.Poisson(2.0).to_torch(eta)
    assert isinstance(rates, td.Poisson)
    torch.testing.assert_close(rates.rate, 2 * eta[:, 0].exp())
    law = cm.Gaussian(t(0.0, 1.0), torch.eye(2, dtype=DOUBLE)).to_torch(t([1.0, 1.0]))
    torch.testing.assert_close(law.mean, t([1.0, 2.0]))
    mixture = cm.GaussianMixture(torch.randn(3, 2, dtype=DOUBLE), t(0.5, 1.0, 2.0)).to_torch()
    assert isinstance(mixture, td.MixtureSameFamily)
    with pytest.raises(cm.InputError, match="no distribution"):
        cm.VonMisesFisher([1.0, 0.0], 1.0).to_torch()


@pytest.mark.parametrize(
    "family",
    [
        cm.Gamma(t(2.0, 3.0), t(1.0, 0.5)),
        cm.Beta(t(2.0, 3.0), t(1.0, 0.5)),
        cm.Dirichlet(t([1.0, 2.0], [3.0, 4.0])),
        cm.MeanCovarianceGaussian(
            torch.zeros(2, 2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE).expand(2, 2, 2)
        ),
        cm.Poisson(t(1.0, 2.0)),
        cm.Bernoulli(t(0.1, 0.2)),
        cm.Geometric(t(0.1, 0.2)),
        cm.Exponential(t(1.0, 2.0)),
        cm.Categorical(t([0.3, 0.7], [0.5, 0.5])),
        cm.VonMisesFisher(t([0.0, 1.0], [1.0, 0.0]), t(1.0, 2.0)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_natural_and_expectation_coordinates(family):
    kind = type(family)
    torch.testing.assert_close(kind.from_natural(family.natural).expectation, family.expectation)
    again = kind.from_expectation(family.expectation)
    torch.testing.assert_close(again.expectation, family.expectation, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(family.expectation, family.mean())
    assert again.batch_shape == (2,)


def test_coordinates_of_families_with_something_fixed():
    h = cm.Binomial.from_natural(t(0.0), total_count=10)
    assert float(h.expectation) == 5.0
    h = cm.FixedShapeGamma.from_expectation(t(4.0), concentration=2.0)
    assert float(h.rate) == 0.5
    assert float(cm.Exponential.from_expectation(t(4.0)).rate) == 0.25
    with pytest.raises(cm.InputError, match="outside the domain"):
        cm.Gamma.from_natural(t(1.0, 1.0))
    with pytest.raises(cm.InputError, match="2 statistics"):
        cm.Gamma.from_natural(t(1.0, 1.0, 1.0))
    with pytest.raises(cm.InputError, match="2, 5, 9"):
        cm.MeanCovarianceGaussian.from_natural(t(1.0, 1.0, 1.0))
