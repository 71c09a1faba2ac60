"""Every measure through the one test case."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as td

import cumulant as cm
from cumulant.testing.measures import DOUBLE, MeasureCase
from measures.quadrature import counts, legendre, line, plane


def t(*x):
    return torch.tensor(x, dtype=DOUBLE)


def number(x):
    return torch.tensor(x, dtype=DOUBLE)


class TestEmpirical(MeasureCase):
    absolute = False

    def parameters(self, k):
        g = torch.Generator().manual_seed(k)
        return {
            "points": torch.randn(9, 3, generator=g, dtype=DOUBLE),
            "log_weights": torch.randn(9, generator=g, dtype=DOUBLE),
        }

    def make(self, **parameters):
        return cm.Empirical(**parameters)

    def nodes(self, points, log_weights):
        return points, log_weights

    def points(self, points, log_weights):
        return points, log_weights


class TestCounting(TestEmpirical):
    """No weights, and points far from the origin."""

    def parameters(self, k):
        g = torch.Generator().manual_seed(k)
        return {"points": 100 + torch.randn(7, 2, generator=g, dtype=DOUBLE)}

    tol = 1e-8

    def nodes(self, points):
        return points, torch.zeros(len(points), dtype=DOUBLE)

    def points(self, points):
        return points, torch.zeros(len(points), dtype=DOUBLE)

    @pytest.mark.parametrize("dtype", [torch.float32])
    def test_precision_follows_the_input(self, dtype):
        """In single precision a value of 100 has no more digits than this."""
        narrow, wide = self.measure(dtype=dtype), self.measure()
        eta = self.eta(dtype=dtype)
        error = narrow.covariance(eta) - wide.covariance(eta.double())
        assert error.abs().max() < 1e-4


class TestFlat(TestEmpirical):
    """Points on a plane in space: eta is determined up to the normal."""

    unique = False

    def parameters(self, k):
        g = torch.Generator().manual_seed(k)
        basis = t([1.0, 0.5, 0.0], [0.0, 1.0, -1.0])
        return {"points": torch.randn(8, 2, generator=g, dtype=DOUBLE) @ basis + 1}

    def nodes(self, points):
        return points, torch.zeros(len(points), dtype=DOUBLE)

    def points(self, points):
        return points, torch.zeros(len(points), dtype=DOUBLE)

    def gauge(self, h, eta):
        normal = t(0.5, -1.0, -1.0) / 1.5
        return eta - (eta @ normal) * normal

    def test_link_has_the_smallest_norm(self):
        h, eta = self.measure(), self.eta()
        found = h.link(h.mean(eta))
        normal = t(0.5, -1.0, -1.0) / 1.5
        assert (found @ normal).abs().max() < 1e-10


def spd(seed, d=2):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(d, d, generator=g, dtype=DOUBLE)
    return a @ a.mT / d + 0.5 * torch.eye(d, dtype=DOUBLE)


class TestGaussian(MeasureCase):
    def parameters(self, k):
        return {"mean": t(0.3, -0.2) + k, "covariance": spd(k)}

    def make(self, mean, covariance):
        return cm.Gaussian(mean, (covariance + covariance.mT) / 2)

    def nodes(self, mean, covariance):
        return plane(td.MultivariateNormal(mean, covariance).log_prob, 20, 200)

    def points(self, mean, covariance):
        x = torch.randn(5, 2, dtype=DOUBLE)
        return x, td.MultivariateNormal(mean, covariance).log_prob(x)


class TestDiagonalGaussian(TestGaussian):
    def parameters(self, k):
        return {"mean": t(0.3, -0.2, 0.1)[:2] + k, "covariance": t(0.5, 1.5)}

    def make(self, mean, covariance):
        return cm.Gaussian(mean, covariance)

    def nodes(self, mean, covariance):
        return super().nodes(mean, covariance.diag())

    def points(self, mean, covariance):
        return super().points(mean, covariance.diag())

    def test_batches_broadcast(self):
        """Three of them, since two diagonals of length two look like a matrix."""
        h = cm.Gaussian(torch.zeros(3, 2, dtype=DOUBLE), torch.rand(3, 2, dtype=DOUBLE) + 0.5)
        assert h.batch_shape == (3,)
        assert h.diagonal
        assert h.mean(self.eta(4)).shape == (3, 4, 2)


def mixture(means, matrices, log_weights):
    return td.MixtureSameFamily(
        td.Categorical(logits=log_weights), td.MultivariateNormal(means, matrices)
    )


class TestOwnMixture(MeasureCase):
    """Unequal weights, as Theorem 2's proof forgot them."""

    kind = "own"

    def parameters(self, k):
        g = torch.Generator().manual_seed(k)
        means = torch.randn(3, 2, generator=g, dtype=DOUBLE)
        return {
            "means": means,
            "covariances": self.covariances(k),
            "log_weights": t(0.1, 0.3, 0.6).log(),
        }

    def covariances(self, k):
        return torch.stack([spd(k), spd(k + 7), spd(k + 9)])

    def make(self, means, covariances, log_weights):
        if self.kind in ("own", "shared"):
            covariances = (covariances + covariances.mT) / 2
        return cm.GaussianMixture(means, covariances, log_weights, covariance_type=self.kind)

    def matrices(self, covariances):
        return covariances

    def nodes(self, means, covariances, log_weights):
        law = mixture(means, self.matrices(covariances), log_weights)
        return plane(law.log_prob, 16, 220)

    def points(self, means, covariances, log_weights):
        x = torch.randn(5, 2, dtype=DOUBLE)
        return x, mixture(means, self.matrices(covariances), log_weights).log_prob(x)


class TestSharedMixture(TestOwnMixture):
    kind = "shared"

    def covariances(self, k):
        return spd(k)

    def matrices(self, covariances):
        return covariances.expand(3, 2, 2)


class TestDiagonalMixture(TestOwnMixture):
    kind = "diagonal"

    def covariances(self, k):
        return t([0.5, 1.0], [1.5, 0.7], [0.6, 0.9]) + 0.1 * k

    def matrices(self, covariances):
        return torch.diag_embed(covariances)


class TestIsotropicMixture(TestOwnMixture):
    kind = "isotropic"

    def covariances(self, k):
        return t(0.5, 1.0, 1.4) + 0.1 * k

    def matrices(self, covariances):
        return covariances[:, None, None] * torch.eye(2, dtype=DOUBLE)


class TestBernoulli(MeasureCase):
    scale = 2.0

    def parameters(self, k):
        return {"probs": number(0.3 + 0.4 * k)}

    def make(self, probs):
        return cm.Bernoulli(probs)

    def law(self, probs):
        return td.Bernoulli(probs)

    def nodes(self, **parameters):
        return counts(self.law(**parameters), 1)

    def points(self, **parameters):
        return self.nodes(**parameters)


class TestBinomial(TestBernoulli):
    def parameters(self, k):
        return {"probs": number(0.3 + 0.4 * k), "total_count": 7}

    def make(self, probs, total_count):
        return cm.Binomial(total_count, probs)

    def nodes(self, probs, total_count):
        return counts(td.Binomial(total_count, probs), total_count)


class TestPoisson(TestBernoulli):
    scale = 1.0

    def parameters(self, k):
        return {"rate": number(2.0 + k)}

    def make(self, rate):
        return cm.Poisson(rate)

    def nodes(self, rate):
        return counts(td.Poisson(rate), 150)

    def points(self, rate):
        x = torch.arange(9, dtype=DOUBLE)
        return x[:, None], td.Poisson(rate).log_prob(x)


class TestGeometric(TestBernoulli):
    scale = 0.1

    def parameters(self, k):
        return {"probs": number(0.5 + 0.2 * k)}

    def make(self, probs):
        return cm.Geometric(probs)

    def nodes(self, probs):
        return counts(td.Geometric(probs), 400)

    def points(self, probs):
        x = torch.arange(9, dtype=DOUBLE)
        return x[:, None], td.Geometric(probs).log_prob(x)


class TestExponential(MeasureCase):
    def parameters(self, k):
        return {"rate": number(4.0 + k)}

    def make(self, rate):
        return cm.Exponential(rate)

    def nodes(self, rate):
        return line(td.Exponential(rate), 0.0, 16.0)

    def points(self, rate):
        x = t(0.1, 1.0, 3.0)
        return x[:, None], td.Exponential(rate).log_prob(x)


class TestFixedShapeGamma(MeasureCase):
    def parameters(self, k):
        return {"concentration": number(3.0), "rate": number(5.0 + k)}

    def make(self, concentration, rate):
        return cm.FixedShapeGamma(concentration, rate)

    def nodes(self, concentration, rate):
        return line(td.Gamma(concentration, rate), 0.0, 16.0)

    def points(self, concentration, rate):
        x = t(0.1, 1.0, 3.0)
        return x[:, None], td.Gamma(concentration, rate).log_prob(x)


class TestCategorical(MeasureCase):
    scale = 2.0
    unique = False

    def parameters(self, k):
        return {"probs": t([0.2, 0.3, 0.5], [0.6, 0.3, 0.1])[k]}

    def make(self, probs):
        return cm.Categorical(probs)

    def nodes(self, probs):
        return torch.eye(3, dtype=DOUBLE), probs.log()

    def points(self, probs):
        return self.nodes(probs)

    def gauge(self, h, eta):
        return eta - eta.mean()

    def test_gradients_in_the_parameters(self):
        """Probabilities are normalized, so the oracle is the normalized sum."""
        probs, eta = self.cast()["probs"], self.eta(2)
        slope = torch.func.jacrev(lambda p: cm.Categorical(p).log_normalizer(eta))(probs)
        expected = torch.func.jacrev(lambda p: ((p / p.sum()) * eta.exp()).sum(-1).log())(probs)
        torch.testing.assert_close(slope, expected)


class TestVonMisesFisher(MeasureCase):
    """The unit sphere in space: Gauss and Legendre in height, equal steps in angle."""

    def parameters(self, k):
        return {"mean_direction": t(2.0, -1.0, 2.0) / 3, "concentration": number(1.5 + k)}

    def make(self, mean_direction, concentration):
        return cm.VonMisesFisher(mean_direction, concentration)

    def nodes(self, mean_direction, concentration):
        z, log_w = legendre(-1.0, 1.0, 40)
        angle = 2 * torch.pi * torch.arange(80, dtype=DOUBLE) / 80
        flat = (1 - z**2).sqrt()[:, None]
        x = torch.stack([flat * angle.cos(), flat * angle.sin(), z[:, None].expand(40, 80)], -1)
        x = x.reshape(-1, 3)
        logs = concentration * (x @ mean_direction) + log_w.repeat_interleave(80)
        return x, logs - logs.logsumexp(0)

    def points(self, mean_direction, concentration):
        """scipy's density."""
        from scipy.stats import vonmises_fisher

        x = torch.nn.functional.normalize(torch.randn(5, 3, dtype=DOUBLE), dim=-1)
        law = vonmises_fisher(mean_direction.numpy(), float(concentration))
        return x, torch.tensor(law.logpdf(x.numpy()))


class TestCircle(TestVonMisesFisher):
    def parameters(self, k):
        return {"mean_direction": t(0.6, 0.8), "concentration": number(1.5 + k)}

    def nodes(self, mean_direction, concentration):
        angle = 2 * torch.pi * torch.arange(100, dtype=DOUBLE) / 100
        x = torch.stack([angle.cos(), angle.sin()], -1)
        logs = concentration * (x @ mean_direction)
        return x, logs - logs.logsumexp(0)

    def points(self, mean_direction, concentration):
        angle = t(0.1, 1.0, 3.0)
        x = torch.stack([angle.cos(), angle.sin()], -1)
        loc = torch.atan2(mean_direction[1], mean_direction[0])
        return x, td.VonMises(loc, concentration).log_prob(angle)

    tol = 1e-6  # torch's density is a polynomial fit


class TestGamma(MeasureCase):
    event = 1

    def parameters(self, k):
        return {"concentration": number(4.0 + k), "rate": number(5.0)}

    def make(self, concentration, rate):
        return cm.Gamma(concentration, rate)

    def nodes(self, concentration, rate):
        x, logs = line(td.Gamma(concentration, rate), 0.0, 16.0, 1500)
        return torch.cat([x, x.log()], -1), logs

    def points(self, concentration, rate):
        x = t(0.1, 1.0, 3.0)
        return x[:, None], td.Gamma(concentration, rate).log_prob(x)


class TestBeta(MeasureCase):
    event = 1

    def parameters(self, k):
        return {"concentration1": number(6.0 + k), "concentration0": number(5.0)}

    def make(self, concentration1, concentration0):
        return cm.Beta(concentration1, concentration0)

    def nodes(self, concentration1, concentration0):
        x, logs = line(td.Beta(concentration1, concentration0), 0.0, 1.0, 1500)
        return torch.cat([x.log(), (1 - x).log()], -1), logs

    def points(self, concentration1, concentration0):
        x = t(0.1, 0.5, 0.9)
        return x[:, None], td.Beta(concentration1, concentration0).log_prob(x)


class TestDirichlet(MeasureCase):
    """The triangle as a square, x = (a, (1 - a) b, (1 - a)(1 - b))."""

    tol = 1e-7

    def parameters(self, k):
        return {"concentration": t([6.0, 7.0, 8.0], [9.0, 6.0, 7.0])[k]}

    def make(self, concentration):
        return cm.Dirichlet(concentration)

    def nodes(self, concentration):
        z, log_w = legendre(0.0, 1.0, 150)
        a, b = torch.cartesian_prod(z, z).T
        x = torch.stack([a, (1 - a) * b, (1 - a) * (1 - b)], -1)
        area = torch.cartesian_prod(log_w, log_w).sum(-1) + (1 - a).log()
        law = td.Dirichlet(concentration, validate_args=False)
        return x.log(), law.log_prob(x) + area

    def points(self, concentration):
        x = t([0.2, 0.3, 0.5], [0.6, 0.3, 0.1])
        return x, td.Dirichlet(concentration).log_prob(x)


class TestNormal(MeasureCase):
    """Mean and variance both moving, on the line."""

    event = 1
    scale = 0.2

    def parameters(self, k):
        return {"mean": t(0.5 - k), "covariance": t([0.7])}

    def make(self, mean, covariance):
        return cm.MeanCovarianceGaussian(mean, covariance)

    def law(self, mean, covariance):
        return td.Normal(mean[0], covariance[0, 0].sqrt())

    def nodes(self, mean, covariance):
        x, logs = line(self.law(mean, covariance), -16.0, 16.0, 600)
        return torch.cat([x, x**2], -1), logs

    def points(self, mean, covariance):
        x = t(0.1, -0.5, 0.9)
        return x[:, None], self.law(mean, covariance).log_prob(x)


class TestPlaneNormal(MeasureCase):
    """Mean and covariance both moving, in the plane."""

    event = 2
    scale = 0.08

    def parameters(self, k):
        return {"mean": t(0.5, -k), "covariance": spd(k)}

    def make(self, mean, covariance):
        return cm.MeanCovarianceGaussian(mean, (covariance + covariance.mT) / 2)

    def nodes(self, mean, covariance):
        x, logs = plane(td.MultivariateNormal(mean, covariance).log_prob, 40, 440)
        return torch.cat([x, x[:, :1] ** 2, x[:, :1] * x[:, 1:], x[:, 1:] ** 2], -1), logs

    def points(self, mean, covariance):
        x = torch.randn(5, 2, dtype=DOUBLE)
        return x, td.MultivariateNormal(mean, covariance).log_prob(x)


class TestMixture(MeasureCase):
    """Two Poisson laws with unequal weights."""

    def parameters(self, k):
        return {"rate": t(1.0, 6.0 - k), "log_weights": t(0.3, 0.7).log()}

    def make(self, rate, log_weights):
        return cm.Mixture(cm.Poisson(rate), log_weights)

    def law(self, rate, log_weights):
        return td.MixtureSameFamily(td.Categorical(logits=log_weights), td.Poisson(rate))

    def nodes(self, rate, log_weights):
        return counts(self.law(rate, log_weights), 150)

    def points(self, rate, log_weights):
        x = torch.arange(9, dtype=DOUBLE)
        return x[:, None], self.law(rate, log_weights).log_prob(x)


def test_every_public_measure_has_its_case():
    tested = {type(c().measure()) for c in MeasureCase.__subclasses__()}
    tested |= {
        type(c().measure()) for s in MeasureCase.__subclasses__() for c in s.__subclasses__()
    }
    public = {
        x
        for x in (getattr(cm, n) for n in cm.__all__)
        if isinstance(x, type) and issubclass(x, cm.Measure) and x is not cm.Measure
    }
    assert public <= tested


@pytest.mark.parametrize("d", [1, 5])
def test_von_mises_fisher_elsewhere(d):
    """d = 1 is two points; d = 5 by the first two moments of a large sample of the uniform law."""
    h = cm.VonMisesFisher(torch.eye(d, dtype=DOUBLE)[0], 0.0)
    eta = torch.full((1, d), 0.7, dtype=DOUBLE)
    if d == 1:
        torch.testing.assert_close(h.mean(eta), eta.tanh())
        torch.testing.assert_close(h.log_normalizer(eta), eta.cosh().log()[0])
        assert set(h.sample(eta, 50).unique().tolist()) <= {-1.0, 1.0}
    else:
        x = torch.nn.functional.normalize(torch.randn(400_000, d, dtype=DOUBLE), dim=-1)
        w = (x @ eta[0]).exp()
        assert abs(float(h.log_normalizer(eta) - w.mean().log())) < 5e-3
        assert ((w[:, None] * x).mean(0) / w.mean() - h.mean(eta)[0]).abs().max() < 5e-3
