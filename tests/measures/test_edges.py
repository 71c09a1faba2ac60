"""Corners where a careless formula breaks: each has an exact answer."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import distributions as td
from torch.func import jacfwd, jacrev, vmap

import cumulant as cm

DOUBLE = torch.float64
INF = math.inf


def t(*x):
    return torch.tensor(x, dtype=DOUBLE)


def test_the_dual_works_in_every_precision():
    points = torch.tensor([[0.0], [1.0], [2.0]])
    for dtype in (torch.float32, torch.float16, DOUBLE):
        out = cm.Empirical(points.to(dtype)).dual(torch.tensor([[1.0], [3.0]], dtype=dtype))
        assert float(out[0]) == pytest.approx(-math.log(3), rel=1e-3)
        assert out[1] == INF
    assert cm.GaussianMixture(torch.zeros(4, 2), 1.0).dual(torch.ones(2)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("h", "mean", "exact"),
    [
        (cm.Bernoulli(0.25), [[0.0], [1.0]], [-math.log(0.75), -math.log(0.25)]),
        (cm.Binomial(3, 0.5), [[0.0]], [3 * math.log(2)]),
        (cm.Poisson(3.0), [[0.0]], [3.0]),
        (cm.Geometric(0.25), [[0.0]], [math.log(4)]),
        (
            cm.Categorical([0.2, 0.3, 0.5]),
            [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]],
            [-math.log(0.2), 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.3)],
        ),
        (cm.Exponential(2.0), [[0.0]], [INF]),
        (cm.Gamma(2.0, 1.0), [[1.0, 0.0]], [INF]),
        (cm.VonMisesFisher([1.0, 0.0], 1.0), [[1.0, 0.0]], [INF]),
        (cm.MeanCovarianceGaussian([0.0], 1.0), [[1.0, 1.0]], [INF]),
    ],
)
def test_the_dual_on_the_boundary(h, mean, exact):
    """The KL of a law on the boundary: finite where h has mass there."""
    out = h.dual(torch.tensor(mean, dtype=DOUBLE))
    assert out.tolist() == pytest.approx(exact)


def test_mixtures_of_parameters_of_different_rank():
    assert cm.Mixture(cm.Bernoulli(t(0.1, 0.9))).mean(torch.zeros(1, 1)).shape == (1, 1)
    assert cm.Mixture(cm.Exponential(t(1.0, 3.0))).mean().shape == (1,)
    h = cm.Mixture(cm.Gaussian(torch.randn(3, 2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE)))
    assert h.mean(torch.zeros(1, 2)).shape == (1, 2)


def test_mixtures_know_their_hull():
    value, status = cm.Mixture(cm.Poisson(t(1.0, 5.0))).link(t([0.0], [-1.0], [3.0]), throw=False)
    assert status.code.tolist() == [1, 2, 0]
    assert value.isfinite().all()
    assert cm.Mixture(cm.Poisson(t(1.0, 5.0))).dual(t([-1.0])) == INF
    ball = cm.Mixture(cm.VonMisesFisher(t([1.0, 0.0], [0.0, 1.0]), t(1.0, 2.0)))
    assert ball.link(t([1.0, 0.0], [2.0, 0.0]), throw=False).status.code.tolist() == [1, 2]
    normals = cm.Mixture(cm.MeanCovarianceGaussian(t([0.0], [3.0]), t([1.0], [2.0])))
    mean = t([0.0, 100.0])
    torch.testing.assert_close(normals.mean(normals.link(mean)), mean)


def test_forward_mode_through_a_precision_matrix():
    """torch's cholesky_inverse is wrong there."""
    f = lambda S: cm.MeanCovarianceGaussian(t(0.0, 0.0), (S + S.mT) / 2).natural
    S = t([2.0, 0.5], [0.5, 1.0])
    torch.testing.assert_close(jacfwd(f)(S), jacrev(f)(S))


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
def test_reverse_over_forward_in_parameters(outer):
    points, mean = t([0.0], [1.0], [5.0]), t(0.3)
    f = lambda points: cm.Empirical(points).link(mean)
    torch.testing.assert_close(outer(jacfwd(f))(points), jacrev(jacrev(f))(points))
    g = lambda w: cm.Empirical(points, w).mean(mean)
    w = t(0.1, 0.2, 0.3)
    torch.testing.assert_close(outer(jacfwd(g))(w), jacrev(jacrev(g))(w))
    h = cm.GaussianMixture(torch.randn(3, 2, dtype=DOUBLE), torch.rand(3, 2, dtype=DOUBLE))
    eta = t(0.3, -0.4)
    torch.testing.assert_close(outer(jacfwd(h.mean))(eta), jacrev(jacrev(h.mean))(eta))


def test_samples_of_a_batch_go_back_in():
    h = cm.Poisson(t(1.0, 20.0, 300.0))
    x = h.sample(n=3)
    assert x.shape == (3, 3, 1)
    expected = td.Poisson(t(1.0, 20.0, 300.0)).log_prob(x[..., 0])
    torch.testing.assert_close(h.log_prob(x), expected)


def test_one_q_for_a_batch_of_mixtures():
    h = cm.GaussianMixture(torch.randn(4, 3, 2, dtype=DOUBLE), 1.0)
    eta, q = torch.randn(4, 5, 2, dtype=DOUBLE), t(0.2, 0.3, 0.5)
    torch.testing.assert_close(
        h.log_normalizer_bound(eta, q), h.log_normalizer_bound(eta, q.expand(4, 5, 3))
    )
    assert (h.log_normalizer_bound(eta, q) <= h.log_normalizer(eta)).all()


def test_lists_keep_double_precision():
    assert cm.Gaussian(t(0.0), 1.0).mean([0.1]).item() == 0.1
    assert cm.Gamma(2.0, 1.0).log_prob(t([0.5])).dtype == DOUBLE


def test_very_concentrated_directions():
    h = cm.VonMisesFisher(t(0.0, 0.0, 1.0), t(1e18)[0])
    assert (h.sample(n=10)[..., 2] > 1 - 1e-9).all()
    far = cm.VonMisesFisher(torch.tensor([1e25, 0.0]), 2.0)
    torch.testing.assert_close(far.mean_direction, torch.tensor([1.0, 0.0]))


def test_interior_means_under_skewed_weights():
    """The first Newton step overshoots by far; there is an answer all the same."""
    two = cm.Empirical(t([0.0], [1.0]), t(math.log(100), 0.0))
    assert float(two.link(t(0.9))) == pytest.approx(math.log(900))
    p = cm.maximum_entropy(t(0.0, 1.0), 0.95, log_weights=t(0.99, 0.01).log())
    torch.testing.assert_close(p, t(0.05, 0.95))
    wide = cm.Empirical(t([0.0], [1.0], [2.0]), t(0.0, -40.0, -80.0))
    assert float(wide.link(t(1.0))) == pytest.approx(40.0)
    outlier = cm.Empirical(torch.cat([torch.randn(1000, 1, dtype=DOUBLE), t([50.0])]))
    mean = t([49.0], [49.9], [0.5])
    torch.testing.assert_close(outlier.mean(outlier.link(mean)), mean)


def test_single_precision_knows_the_boundary_too():
    square = torch.cartesian_prod(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    means = torch.tensor([[0.0, 0.3], [1.0, 1.0], [0.5, 0.1]])
    assert cm.Empirical(square).link(means, throw=False).status.code.tolist() == [1, 1, 0]


def test_coordinates_in_different_units():
    x = torch.randn(1000, 2) * torch.tensor([1e-2, 1e2])
    out = cm.project(x, cm.Gaussian)
    torch.testing.assert_close(out.covariance_matrix, x.T.cov(correction=0), rtol=1e-3, atol=1e-6)


def test_flat_supports_tilted():
    points = t([0.0, 0.0], [1.0, 1.0], [2.0, 2.0])
    found = cm.Empirical(points).tilt(t(1.0, 0.0)).link(t(0.5, 0.5))
    assert float(found[0]) == pytest.approx(float(found[1]))


def test_poisson_far_out():
    tilted = cm.Poisson(3.0).tilt(t([-200.0]))
    assert float(tilted.log_normalizer(t([100.0]))) == pytest.approx(3 * math.exp(-100))
    small = cm.Poisson(1e-30).log_normalizer(torch.tensor([[80.0]]))
    assert float(small) == pytest.approx(1e-30 * math.exp(80), rel=1e-5)
    for out in (
        cm.Poisson(3.0).kl(t([800.0]), t([0.0])),
        cm.Poisson(3.0).relative_entropy(t([800.0])),
    ):
        assert out.tolist() == [INF]
    assert cm.Mixture(cm.Poisson(t(1.0, 2.0))).mean(t([800.0])).tolist() == [[INF]]


def test_geometric_far_out():
    out = cm.Geometric(0.5).covariance(t([-100.0], [-1000.0]))
    assert float(out[0]) == pytest.approx(0.5 * math.exp(-100))
    assert float(out[1]) == 0.0
    assert cm.Geometric(1.0).covariance().tolist() == [[0.0]]


@pytest.mark.parametrize("a", [1e-25, 1e-8, 1.0, 1e5, 1e8])
def test_concentrations_of_all_sizes_in_single_precision(a):
    """Stored in single precision, computed in double: scipy's values."""
    from scipy.special import betaln, gammaln

    given = float(torch.tensor(a))  # as single precision holds it
    gamma = cm.Gamma(torch.tensor(a), torch.tensor(1.0))
    assert float(gamma.concentration) == given
    exact = gammaln(given + 0.5) - gammaln(given)
    assert float(gamma.log_normalizer(torch.tensor([0.0, 0.5]))) == pytest.approx(exact, rel=1e-5)
    beta = cm.Beta(torch.tensor(a), torch.tensor(a))
    exact = betaln(given + 0.5, given) - betaln(given, given)
    assert float(beta.log_normalizer(torch.tensor([0.5, 0.0]))) == pytest.approx(exact, rel=1e-5)


def test_infinite_parameters_are_refused():
    for call in (
        lambda: cm.Poisson.from_natural([INF]),
        lambda: cm.Gamma.from_natural([-1.0, INF]),
        lambda: cm.Poisson.from_expectation([INF]),
        lambda: cm.Binomial(INF, 0.5),
        lambda: cm.Categorical.from_natural([-INF, -INF]),
        lambda: cm.MeanCovarianceGaussian.from_natural(torch.zeros(0)),
        lambda: cm.Dirichlet.from_natural(torch.ones(1)),
    ):
        with pytest.raises(cm.InputError):
            call()
    torch.testing.assert_close(
        cm.Categorical(torch.tensor([3e38, 3e38])).probs, torch.tensor([0.5, 0.5])
    )


def test_infinite_points_have_no_density():
    for h in (cm.Gamma(2.0, 1.0), cm.FixedShapeGamma(2.0, 1.0), cm.Exponential(1.0)):
        assert h.log_prob(t([INF])).tolist() == [-INF]
    assert cm.GaussianMixture(t([0.0], [1.0]), 1.0).log_prob(t([INF])).tolist() == [-INF]


def test_logits_come_in_unrounded():
    h = cm.from_torch(td.Bernoulli(logits=t(-100.0)[0]))
    assert float(h.log_normalizer(t(100.0))) == pytest.approx(math.log(2))
    h = cm.from_torch(td.Categorical(logits=t(0.0, -200.0)))
    assert float(h.log_normalizer(t(0.0, 200.0))) == pytest.approx(math.log(2))


def test_clouds_far_from_the_origin_in_single_precision():
    x = torch.tensor([[1e6], [1e6 + 1], [1e6 + 2]])
    h, eta = cm.Empirical(x), torch.tensor([[0.7]])
    exact = torch.tensor([[0.0, 0.7, 1.4]]).softmax(-1)
    torch.testing.assert_close(h.probabilities(eta), exact)
    torch.testing.assert_close(h.log_prob(x[None], eta[None])[0], exact[0].log())
    p = cm.maximum_entropy(x[:, 0], 1e6 + 1.5)
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(p, cm.maximum_entropy(torch.arange(3.0), 1.5), rtol=1e-4, atol=1e-5)
    sample = torch.randn(1000, 1) + 1e4
    out = cm.project(sample, cm.Gaussian)
    assert float(out.covariance_matrix) == pytest.approx(float(sample.double().var()), rel=0.01)
    prior, noise = cm.Gaussian(torch.tensor([1e4]), 1.0), cm.Gaussian(torch.zeros(1), 1.0)
    evidence = cm.posterior(prior, noise, torch.tensor([[1e4]])).log_evidence
    assert float(evidence) == pytest.approx(-0.5 * math.log(4 * math.pi), rel=1e-4)


@pytest.mark.parametrize(
    ("sample", "family"),
    [
        ([-1.0, 3.0], cm.Poisson),
        ([0.5, 3.0], cm.Poisson),
        ([0.5, 1.0], cm.Bernoulli),
        ([-0.5, 3.0], cm.Exponential),
        ([0.0, 1.0, 2.0, 1.0], cm.Categorical),
        ([[0.3, 0.0]], cm.VonMisesFisher),
        ([[0.3, 0.3]], cm.Dirichlet),
        ([14.0], cm.Binomial(10, 0.5)),
    ],
)
def test_samples_outside_the_support(sample, family):
    with pytest.raises(cm.InputError, match="outside the support"):
        cm.project(torch.tensor(sample), family)


def test_weighted_batches_of_points():
    points, logs = torch.rand(6, 1, dtype=DOUBLE) + 0.1, torch.randn(2, 6, dtype=DOUBLE)
    h = cm.Empirical(points, logs)
    for family in (cm.Gamma, cm.MeanCovarianceGaussian, cm.Gaussian, cm.Exponential):
        out = cm.project(h, family)
        assert out.batch_shape == (2,)
        one = cm.project(cm.Empirical(points, logs[1]), family)
        torch.testing.assert_close(out.moments()[0][1], one.moments()[0])
    dead = cm.Empirical(t([1.0], [2.0], [-5.0]), t(0.0, 0.0, -INF))
    assert float(cm.project(dead, cm.Gamma).expectation[0]) == pytest.approx(1.5)


def test_tilted_mixtures_with_other_statistics_ask_for_samples():
    h = cm.Mixture(cm.MeanCovarianceGaussian(t([1.0], [2.0]), t([1.0], [1.0]))).tilt(t(0.0, 0.0))
    with pytest.raises(cm.InputError, match="samples="):
        cm.project(h, cm.Gaussian)
    assert float(cm.project(h, cm.Gaussian, samples=20_000).loc) == pytest.approx(1.5, abs=0.05)


def test_results_keep_the_precision_of_the_source():
    single = torch.tensor([1.0, 2.0, 6.0])
    for onto in (cm.Gamma, cm.Gaussian, cm.Exponential(2.0), cm.Binomial(10, 0.5)):
        assert cm.project(single, onto).mean().dtype == torch.float32
    assert isinstance(cm.project(single, td.Normal), td.Normal)
    assert cm.project(single, td.Poisson).rate.dtype == torch.float32
    hot = torch.eye(3)[[0, 0, 1]]
    assert isinstance(cm.project(hot, td.Categorical), td.Categorical)


def test_laws_on_the_boundary_that_are_members():
    hot = torch.eye(3, dtype=DOUBLE)[[0, 0, 1, 1]]
    torch.testing.assert_close(cm.project(hot, cm.Categorical).probs, t(0.5, 0.5, 0.0))
    for sample, p in (([0.0, 0.0], 0.0), ([1.0, 1.0], 1.0)):
        assert float(cm.project(torch.tensor(sample), cm.Bernoulli).probs) == p
    assert float(cm.project(torch.zeros(3), cm.Geometric).probs) == 1.0
    with pytest.raises(cm.InputError, match="boundary"):
        cm.project(torch.zeros(3), cm.Poisson)


def test_posteriors_of_nothing_and_of_torch_classes():
    empty = cm.posterior(cm.Gamma(t(2.0, 3.0), t(1.0, 1.0)), td.Poisson, torch.zeros(2, 0))
    assert empty.log_evidence.tolist() == [0.0, 0.0]
    torch.testing.assert_close(empty.measure.rate, t(1.0, 1.0))
    for call, message in (
        (lambda: cm.posterior(td.Gamma(1.0, 1.0), cm.Poisson, t(1.0)), "prior must be a measure"),
        (lambda: cm.posterior(cm.Gamma(1.0, 1.0), cm.Poisson(1.0), t(1.0)), "as classes"),
        (
            lambda: cm.posterior(cm.Gamma(1.0, 1.0).tilt(torch.zeros(2, 2)), cm.Poisson, t(1.0)),
            "several eta",
        ),
        (lambda: cm.posterior(cm.Dirichlet([1.0, 1.0]), cm.Categorical, t(1.0)), "one-hot"),
    ):
        with pytest.raises(cm.InputError, match=message):
            call()


def test_log_prob_refuses_what_is_no_number():
    for x in ("a", None, {}, [[1.0], [2.0, 3.0]], torch.zeros(1, 1, dtype=torch.complex64)):
        with pytest.raises(cm.InputError):
            cm.Poisson(1.0).log_prob(x)
    with pytest.raises(cm.InputError):
        cm.Empirical(None)


def test_empty_samples():
    for h in (
        cm.Categorical([0.5, 0.5]),
        cm.VonMisesFisher([1.0, 0.0], 1.0),
        cm.Mixture(cm.Poisson(t(1.0, 2.0))),
        cm.Beta(1.0, 1.0),
    ):
        assert h.sample(torch.zeros(2, h.dimension), 0).shape == (0, 2, h._event_size())
        assert h.sample(torch.zeros(0, h.dimension), 3).shape == (3, 0, h._event_size())


def test_measures_inside_vmap_that_cannot_be_read_ask():
    m, c = torch.randn(4, 3, 3), torch.rand(4, 3, 3) + 0.1
    with pytest.raises(cm.InputError, match="covariance_type"):
        vmap(lambda m, c: cm.GaussianMixture(m, c).log_normalizer())(m, c)
    kind = "diagonal"
    out = vmap(lambda m, c: cm.GaussianMixture(m, c, covariance_type=kind).log_normalizer())(m, c)
    torch.testing.assert_close(out, torch.zeros(4), atol=1e-6, rtol=0)
    assert vmap(lambda x: cm.Gamma.from_natural(x).expectation)(
        -torch.ones(3, 2) * t(1.0, -2.0)
    ).shape == (3, 2)


def test_a_covariance_can_be_changed_without_changing_the_measure():
    h = cm.Gaussian(torch.zeros(2), torch.eye(2))
    h.covariance(torch.zeros(3, 2)).add_(1.0)
    torch.testing.assert_close(h.covariance_matrix, torch.eye(2))


def test_copies_and_pickles():
    h = cm.GaussianMixture(torch.randn(3, 2), torch.rand(3, 2))
    eta = torch.randn(4, 2)
    for again in (copy.deepcopy(h), pickle.loads(pickle.dumps(h))):
        torch.testing.assert_close(again.mean(eta), h.mean(eta))
    assert repr(h) == "GaussianMixture(dimension=2, batch_shape=())"


def test_errors_name_the_call_that_failed():
    with pytest.raises(cm.InputError, match=r"^maximum_entropy: outside: the mean lies outside"):
        cm.maximum_entropy(torch.arange(6.0), 7.0)
    with pytest.raises(cm.InputError, match=r"^project: .*Gaussian.*boundary"):
        cm.project(torch.ones(3, 2), cm.Gaussian)
    with pytest.raises(cm.InputError, match=r"^Gamma.from_expectation: "):
        cm.Gamma.from_expectation([1.0, 1.0])


class Laplace(cm.Measure):
    """The example of the guide: G = m eta - log(1 - b^2 eta^2), |eta| < 1/b."""

    _parameters = {"loc": 0, "scale": 0}  # noqa: RUF012

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale

    dimension = 1

    def _inside(self, eta):
        return (self.scale[..., None] * eta[..., 0]).abs() < 1

    def _log_normalizer(self, eta):
        eta = eta[..., 0]
        return self.loc[..., None] * eta - torch.log1p(-((self.scale[..., None] * eta) ** 2))

    def _log_density(self, x, eta):
        away = (x[..., 0] - self.loc[..., None]).abs() / self.scale[..., None]
        base = -away - torch.log(2 * self.scale[..., None])
        return base + (x * eta).sum(-1) - self._log_normalizer(eta)

    def _sample(self, eta, n):
        raise NotImplementedError


def test_a_measure_of_ones_own():
    h = Laplace(t(0.0, 1.0), t(1.0, 2.0))
    assert h.batch_shape == (2,)
    eta = t([0.2], [-0.3])
    exact = t(0.0, 1.0)[:, None] + 2 * t(1.0, 4.0)[:, None] * eta[:, 0] / (
        1 - t(1.0, 4.0)[:, None] * eta[:, 0] ** 2
    )
    torch.testing.assert_close(h.mean(eta)[..., 0], exact)
    torch.testing.assert_close(h.link(h.mean(eta)), eta.expand(2, 2, 1))
    assert h.log_normalizer(t([3.0])).tolist() == [[INF], [INF]]
    x = t([0.5], [2.0])[:, None]
    expected = td.Laplace(t(0.0, 1.0), t(1.0, 2.0)).log_prob(x[:, 0, 0])
    torch.testing.assert_close(h.log_prob(x, torch.zeros(1, 1))[:, 0], expected)


def test_categories_in_single_precision_accept_their_own_means():
    for seed in range(20):
        torch.manual_seed(seed)
        h = cm.Categorical(torch.rand(10))
        eta = torch.randn(3, 10)
        mean = h.mean(eta)
        torch.testing.assert_close(h.mean(h.link(mean)), mean)
        assert h.dual(mean).isfinite().all()
    cm.Categorical.from_expectation(torch.randn(10).softmax(-1))


def test_the_dual_of_mixtures_on_the_boundary():
    """Minus the log of the mass there, by torch; infinite where there is none."""
    law = td.MixtureSameFamily(td.Categorical(torch.ones(2)), td.Poisson(t(1.0, 5.0)))
    h = cm.Mixture(cm.Poisson(t(1.0, 5.0)))
    assert float(h.dual(t(0.0))) == pytest.approx(-float(law.log_prob(t(0.0))), rel=1e-7)
    tilted = h.tilt(t(0.3))
    assert float(tilted.dual(t(0.0))) == pytest.approx(-float(tilted.log_prob(t(0.0))), rel=1e-7)
    corners = cm.Mixture(cm.Categorical(t([0.2, 0.3, 0.5], [0.1, 0.1, 0.8])))
    assert float(corners.dual(t(1.0, 0.0, 0.0))) == pytest.approx(-math.log(0.15))
    assert cm.Mixture(cm.Exponential(t(1.0, 2.0))).dual(t(0.0)) == INF


def test_a_mixture_of_points_is_a_set_of_points():
    h = cm.Mixture(cm.Empirical(t([[0.0], [1.0]], [[1.0], [3.0]])))
    assert h.dual(t(4.0)) == INF
    value, status = h.link(t([0.0], [3.0], [1.2]), throw=False)
    assert status.code.tolist() == [1, 1, 0]
    assert float(h.mean(value[2])) == pytest.approx(1.2)


def test_mixtures_keep_their_digits_in_single_precision():
    far = torch.tensor([[1e4], [1e4 + 3]])
    h = cm.Mixture(cm.Gaussian(far, torch.tensor([[1.0], [2.0]])))
    double = cm.Mixture(cm.Gaussian(far.double(), t([1.0], [2.0])))
    eta = torch.tensor([[-0.1]])
    torch.testing.assert_close(
        h.covariance(eta).double(), double.covariance(eta.double()), rtol=1e-5, atol=0
    )
    beta = cm.Mixture(cm.Beta(torch.tensor([1e4, 2e4]), torch.tensor([1e4, 1e4])))
    exact = cm.Mixture(cm.Beta(t(1e4, 2e4), t(1e4, 1e4)))
    e = torch.tensor([[0.1, 0.2]])
    assert float(beta.relative_entropy(e)) == pytest.approx(
        float(exact.relative_entropy(e.double())), rel=1e-3
    )


MODES = [jacrev, jacfwd]


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("middle", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_third_derivatives_of_links_in_every_mode(outer, middle, inner):
    """torch's solve is wrong at second order over forward mode; finite differences tell."""
    f, m = cm.Gamma(2.0, 1.0).link, t(2.2, 0.5)
    second = lambda m: jacrev(jacrev(f))(m)
    step = 1e-5
    basis = torch.eye(2, dtype=DOUBLE)
    numeric = torch.stack(
        [(second(m + step * e) - second(m - step * e)) / (2 * step) for e in basis], -1
    )
    torch.testing.assert_close(outer(middle(inner(f)))(m), numeric, rtol=1e-4, atol=1e-3)
    h = cm.Gaussian(t(0.0, 0.0), t([2.0, 0.5], [0.5, 1.0]))
    g = lambda S: cm.Gaussian(t(0.0, 0.0), (S + S.mT) / 2).link(t(0.3, -0.4))
    S = h.covariance_matrix
    torch.testing.assert_close(middle(inner(g))(S), jacrev(jacrev(g))(S))


def test_laws_of_other_sizes_are_refused():
    for source in (
        td.Independent(td.Gamma(t(2.0, 3.0), t(1.0, 1.0)), 1),
        td.VonMises(t(0.0)[0], t(1.0)[0]),
        td.Independent(td.Normal(torch.zeros(2, 3), torch.ones(2, 3)), 2),
        cm.Gaussian(t(0.5, 1.0), 1.0),
    ):
        for onto in (td.Normal, cm.Exponential):
            with pytest.raises(cm.InputError, match="project each coordinate separately"):
                cm.project(source, onto)


def test_failing_rows_have_zero_slopes_in_every_mode():
    h = cm.Empirical(torch.randn(30, 2, dtype=DOUBLE))
    f = lambda m: h.link(m, throw=False).value
    means = t([0.0, 0.0], [100.0, 0.0])
    for derivative in (vmap(jacfwd(f)), vmap(jacrev(f)), vmap(jacfwd(jacrev(f)))):
        out = derivative(means)
        assert out.isfinite().all()
        assert (out[1] == 0).all()


def test_off_the_support_the_log_probability_has_no_slope():
    f = lambda w: cm.Empirical(t([0.0], [1.0]), w).log_prob(t(5.0), t(0.3))
    for derivative in (jacfwd, jacrev):
        assert derivative(f)(t(0.0, 0.0)).tolist() == [0.0, 0.0]


def test_weights_spread_over_fifty_nats():
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        points = torch.randn(60, 9, generator=g, dtype=DOUBLE)
        logs = 10 * torch.randn(60, generator=g, dtype=DOUBLE)
        shift = torch.randn(9, generator=g, dtype=DOUBLE)
        mean = (points @ shift).softmax(0) @ points  # inside: positive weights on all points
        h = cm.Empirical(points, logs)
        torch.testing.assert_close(h.mean(h.link(mean)), mean, rtol=1e-8, atol=1e-9)


def test_infinite_observations_are_refused():
    for likelihood in (cm.Poisson, cm.Exponential):
        with pytest.raises(cm.InputError, match="observations must be finite"):
            cm.posterior(cm.Gamma(1.0, 1.0), likelihood, t(INF))
