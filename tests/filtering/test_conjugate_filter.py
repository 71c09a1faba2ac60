"""GPB and IMM in conjugate families against enumeration, quadrature and closed laws (T26)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

import cumulant as cm
from cumulant.filtering import SwitchingLinearGaussian
from cumulant.filtering.conjugate import SwitchingConjugate, filter_conjugate, update_conjugate
from cumulant.filtering.maps import Flip, Linear, Merge, Permute, Renew, Scale, push

T64 = torch.float64
TRANSITION = torch.tensor([[0.85, 0.15], [0.3, 0.7]], dtype=T64)
INITIAL = torch.tensor([0.4, 0.6], dtype=T64)


def f64(*x):
    return torch.tensor(x, dtype=T64)


def model_of(prior, likelihood, dynamics=None, transition=TRANSITION, initial=INITIAL):
    return SwitchingConjugate(
        transition=transition,
        initial=initial,
        prior=prior,
        likelihood=likelihood,
        dynamics=dynamics,
    )


# Exact enumeration over mode paths ---------------------------------------------------------------
#
# Each case knows its laws as scipy and textbooks do: where a path starts, how a mode moves a
# member, the predictive law of an observation, Bayes' rule, mean and covariance of a member.


class GammaPoisson:
    y = (3, 0, 7, 2, 1)
    prior = cm.Gamma(f64(2.0)[0], 1.0)
    likelihood = cm.Poisson
    dynamics = (Scale(f64(1.3)[0]), Scale(0.5))
    observations = f64(*y)

    def start(self, mode):
        return 2.0, 1.0

    def move(self, x, mode):
        return x[0], x[1] / (1.3, 0.5)[mode]

    def log_evidence(self, x, y, mode):
        return stats.nbinom.logpmf(y, x[0], x[1] / (1 + x[1]))

    def update(self, x, y, mode):
        return x[0] + y, x[1] + 1

    def moments(self, x):
        law = stats.gamma(x[0], scale=1 / x[1])
        return np.array([law.mean()]), np.array([[law.var()]])


class GammaPerMode(GammaPoisson):
    prior = cm.Gamma(f64(2.0, 5.0), f64(1.0, 0.7))

    def start(self, mode):
        return ((2.0, 1.0), (5.0, 0.7))[mode]


class GammaExponential(GammaPoisson):
    y = (0.3, 0.0, 2.5, 1.1, 0.2)
    likelihood = cm.Exponential
    observations = f64(*y)

    def log_evidence(self, x, y, mode):
        return stats.lomax.logpdf(y, x[0], scale=x[1])

    def update(self, x, y, mode):
        return x[0] + 1, x[1] + y


class GammaMixed(GammaExponential):
    """Waiting times in one mode, counts in the other."""

    y = (0.0, 2.0, 1.0, 1.0, 3.0)
    likelihood = (cm.Exponential, torch.distributions.Poisson)
    observations = f64(*y)

    def log_evidence(self, x, y, mode):
        return (GammaExponential, GammaPoisson)[mode].log_evidence(self, x, y, mode)

    def update(self, x, y, mode):
        return (GammaExponential, GammaPoisson)[mode].update(self, x, y, mode)


class BetaBernoulli:
    y = (1, 1, 0, 1, 0)
    prior = cm.Beta(f64(2.0)[0], 0.8)
    likelihood = cm.Bernoulli
    dynamics = (None, Flip())
    observations = torch.tensor(y)

    def start(self, mode):
        return 2.0, 0.8

    def move(self, x, mode):
        return x if mode == 0 else x[::-1]

    def log_evidence(self, x, y, mode):
        return special.betaln(x[0] + y, x[1] + 1 - y) - special.betaln(*x)

    def update(self, x, y, mode):
        return x[0] + y, x[1] + 1 - y

    def moments(self, x):
        law = stats.beta(*x)
        return np.array([law.mean()]), np.array([[law.var()]])


class DirichletCategorical:
    y = np.eye(3)[[0, 2, 2, 1, 0]]
    prior = cm.Dirichlet(f64(1.0, 2.0, 0.5))
    likelihood = cm.Categorical
    dynamics = (Permute([1, 2, 0]), Renew(cm.Dirichlet(f64(1.0, 1.0, 3.0))))
    observations = torch.from_numpy(y)

    def start(self, mode):
        return np.array([1.0, 2.0, 0.5])

    def move(self, x, mode):
        return x[[1, 2, 0]] if mode == 0 else np.array([1.0, 1.0, 3.0])

    def log_evidence(self, x, y, mode):
        return math.log(x @ y / x.sum())

    def update(self, x, y, mode):
        return x + y

    def moments(self, x):
        return stats.dirichlet.mean(x), stats.dirichlet.cov(x)


class NormalGaussian:
    y = np.array([[1.0, 0.5], [-0.3, 2.0], [0.7, 0.1], [3.0, -1.0], [0.2, 0.4]])
    W = np.array([[[0.9, 0.2], [-0.1, 0.8]], [[1.0, 0.0], [0.5, 1.0]]])
    b = np.array([[0.0, 0.0], [0.3, -0.2]])
    Q = np.array([np.diag([0.1, 0.2]), np.zeros((2, 2))])
    R = np.array([[[1.0, 0.3], [0.3, 0.5]], 2 * np.eye(2)])
    prior = cm.Gaussian(f64(0.2, -0.1), torch.tensor([[1.0, 0.2], [0.2, 2.0]], dtype=T64))
    likelihood = tuple(cm.Gaussian(f64(0.0, 0.0), r) for r in torch.from_numpy(R))
    dynamics = (
        Linear(torch.from_numpy(W[0]), Q=torch.from_numpy(Q[0])),
        Linear(torch.from_numpy(W[1]), torch.from_numpy(b[1])),
    )
    observations = torch.from_numpy(y)

    def start(self, mode):
        return np.array([0.2, -0.1]), np.array([[1.0, 0.2], [0.2, 2.0]])

    def move(self, x, mode):
        W = self.W[mode]
        return W @ x[0] + self.b[mode], W @ x[1] @ W.T + self.Q[mode]

    def log_evidence(self, x, y, mode):
        return stats.multivariate_normal.logpdf(y, x[0], x[1] + self.R[mode])

    def update(self, x, y, mode):
        gain = x[1] @ np.linalg.inv(x[1] + self.R[mode])
        return x[0] + gain @ (y - x[0]), x[1] - gain @ x[1]

    def moments(self, x):
        return x


CASES = [
    GammaPoisson(),
    GammaExponential(),
    GammaMixed(),
    BetaBernoulli(),
    DirichletCategorical(),
    NormalGaussian(),
]
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)


def built(case, **changes):
    laws = case.likelihood
    laws = list(laws) if isinstance(laws, tuple) else laws
    return model_of(case.prior, laws, list(case.dynamics), **changes)


def paths(case, T, missing=()):
    """(log p(path, y), last mode, member) of every path of modes."""
    P, pi = TRANSITION.numpy(), INITIAL.numpy()
    out = []
    for path in itertools.product(range(2), repeat=T + 1):
        x, log_p = case.start(path[0]), math.log(pi[path[0]])
        for t, mode in enumerate(path[1:]):
            log_p += math.log(P[path[t], mode])
            x = case.move(x, mode)
            if t not in missing:
                log_p += case.log_evidence(x, case.y[t], mode)
                x = case.update(x, case.y[t], mode)
        out.append((log_p, path[-1], x))
    return out


def weights_of(found):
    logs = np.array([log_p for log_p, _, _ in found])
    return special.logsumexp(logs), special.softmax(logs)


def moments_of(case, found):
    _, share = weights_of(found)
    means, covariances = map(np.array, zip(*(case.moments(x) for *_, x in found), strict=True))
    mean = share @ means
    second = covariances + means[:, :, None] * means[:, None, :]
    return mean, np.tensordot(share, second, 1) - np.outer(mean, mean)


def close(ours, truth, tolerance=1e-9):
    np.testing.assert_allclose(ours.detach(), truth, rtol=tolerance, atol=tolerance)


def check_modes(post, found):
    total, share = weights_of(found)
    last = np.array([mode for _, mode, _ in found])
    close(post.log_likelihood, total)
    close(post.mode_probabilities[-1], [share[last == j].sum() for j in range(2)])


def check_states(case, post, found):
    mean, covariance = moments_of(case, found)
    close(post.mean[-1], mean)
    close(post.covariance[-1], covariance)
    for j in range(2):
        mean, covariance = moments_of(case, [part for part in found if part[1] == j])
        close(post.mode_means[-1, j], mean)
        close(post.mode_covariances[-1, j], covariance)


@pytest.mark.parametrize("case", [*CASES, GammaPerMode()], ids=lambda case: type(case).__name__)
@pytest.mark.parametrize("T", [1, 3, 5])
def test_enumeration_is_exact(case, T):
    post = filter_conjugate(built(case), case.observations[:T], "exact")
    check_modes(post, paths(case, T))
    check_states(case, post, paths(case, T))


@ALL
@pytest.mark.parametrize(("collapse", "T"), [("gpb2", 1), (3, 2), (4, 3)])
def test_exact_before_the_first_collapse(case, collapse, T):
    post = filter_conjugate(built(case), case.observations[:T], collapse)
    check_modes(post, paths(case, T))
    check_states(case, post, paths(case, T))


@ALL
@pytest.mark.parametrize(("collapse", "T"), [("gpb2", 2), (3, 3)])
def test_modes_are_exact_at_the_first_collapse(case, collapse, T):
    post = filter_conjugate(built(case), case.observations[:T], collapse)
    found = paths(case, T)
    check_modes(post, found)
    if not isinstance(case, BetaBernoulli | DirichletCategorical):
        close(post.mean[-1], moments_of(case, found)[0])  # x is a statistic, so it is matched


@pytest.mark.parametrize("collapse", ["gpb1", "gpb2", "imm", 3, "exact"])
def test_gaussians_agree_with_the_filter_in_moments(collapse):
    case = NormalGaussian()
    T = 9 if collapse == "exact" else 20
    generator = np.random.default_rng(0)
    y = torch.from_numpy(generator.normal(size=(2, T, 2)).cumsum(-2))
    y[0, 3, 1] = y[1, 5] = torch.nan
    moments = SwitchingLinearGaussian(
        transition=TRANSITION,
        initial=INITIAL,
        dynamics=torch.from_numpy(case.W),
        dynamics_bias=torch.from_numpy(case.b),
        dynamics_noise=torch.from_numpy(case.Q),
        emission=torch.eye(2, dtype=T64),
        emission_noise=torch.from_numpy(case.R),
        initial_mean=case.prior.loc,
        initial_covariance=case.prior.covariance_matrix,
    )
    theirs = cm.filtering.filter(moments, y, collapse=collapse)
    ours = filter_conjugate(built(case), y, collapse)
    for name in (
        *("log_likelihood", "step_log_likelihood", "mode_probabilities"),
        *("predicted_mode_probabilities", "mean", "covariance", "mode_means", "mode_covariances"),
    ):
        close(getattr(ours, name), getattr(theirs, name), 1e-8)
    measure = ours.mode_measures
    assert measure.batch_shape == (2, T, 2)
    close(measure.loc, theirs.mode_means, 1e-8)
    close(measure.covariance_matrix, theirs.mode_covariances, 1e-8)
    close(ours.measure(T // 2).covariance_matrix, theirs.covariance[:, T // 2], 1e-8)


# The projection ----------------------------------------------------------------------------------


def expected(density, function, low, high):
    return integrate.quad(lambda x: density(x) * function(x), low, high, epsabs=1e-11, limit=500)[0]


def test_projection_matches_x_and_log_x_not_the_variance():
    case = GammaPoisson()
    found = paths(case, 2)
    _, share = weights_of(found)
    laws = [stats.gamma(a, scale=1 / b) for *_, (a, b) in found]

    def density(x):
        return share @ [law.pdf(x) for law in laws]

    mean = expected(density, lambda x: x, 0, 80)
    logarithm = expected(density, math.log, 0, 80)
    variance = expected(density, lambda x: (x - mean) ** 2, 0, 80)
    post = filter_conjugate(built(case), case.observations[:2])
    member = post.measure(1)
    law = stats.gamma(float(member.concentration), scale=1 / float(member.rate))
    assert law.mean() == pytest.approx(mean, rel=1e-8)
    assert law.expect(math.log) == pytest.approx(logarithm, rel=1e-7)
    assert abs(law.var() / variance - 1) > 0.02
    # What is reported as the covariance is that of the kept mixture, neither of one member.
    matched = stats.gamma(mean**2 / variance, scale=variance / mean)
    assert matched.var() == pytest.approx(variance)
    assert abs(matched.expect(math.log) - logarithm) > 1e-3


def test_projection_of_betas_matches_both_logarithms():
    case = BetaBernoulli()
    found = paths(case, 2)
    _, share = weights_of(found)
    laws = [stats.beta(*x) for *_, x in found]

    def density(x):
        return share @ [law.pdf(x) for law in laws]

    member = filter_conjugate(built(case), case.observations[:2]).measure()
    law = stats.beta(float(member.concentration1), float(member.concentration0))
    for function in (math.log, lambda x: math.log1p(-x)):
        truth = expected(density, function, 0, 1)
        assert expected(law.pdf, function, 0, 1) == pytest.approx(truth, rel=1e-6)


def test_projection_of_dirichlets_matches_every_logarithm():
    case = DirichletCategorical()
    found = paths(case, 2)
    _, share = weights_of(found)
    member = filter_conjugate(built(case), case.observations[:2]).measure(1)
    a = member.concentration.numpy()
    for k in range(3):
        truth = sum(
            w * expected(stats.beta(x[k], x.sum() - x[k]).pdf, math.log, 0, 1)
            for w, (*_, x) in zip(share, found, strict=True)
        )
        own = expected(stats.beta(a[k], a.sum() - a[k]).pdf, math.log, 0, 1)
        assert own == pytest.approx(truth, rel=1e-6)


def test_one_mode_is_bayes_rule():
    y = f64(3, 1, 4)
    one = torch.ones(1, 1, dtype=T64)
    post = filter_conjugate(
        model_of(cm.Gamma(2.0, 1.0), cm.Poisson, transition=one, initial=one[0]), y
    )
    truth = cm.posterior(cm.Gamma(2.0, 1.0), cm.Poisson, y)
    close(post.log_likelihood, truth.log_evidence)
    close(post.measure().natural, f64(-4, 10))


# Maps --------------------------------------------------------------------------------------------


def test_push_scale():
    image = push(cm.Gamma(f64(2.0, 3.0), 4.0), Scale(f64(0.5, 6.0)))
    for a, c, own in zip((2.0, 3.0), (0.5, 6.0), range(2), strict=True):
        x = np.linspace(0.1, 5, 7)
        truth = stats.gamma.pdf(x / c, a, scale=0.25) / c  # the change of variables
        law = stats.gamma(float(image.concentration[own]), scale=1 / float(image.rate[own]))
        np.testing.assert_allclose(law.pdf(x), truth, rtol=1e-10)


def test_push_flip():
    image = push(cm.Beta(2.0, 5.0), Flip())
    x = np.linspace(0.05, 0.95, 7)
    law = stats.beta(float(image.concentration1), float(image.concentration0))
    np.testing.assert_allclose(law.pdf(x), stats.beta.pdf(1 - x, 2, 5), rtol=1e-10)


def test_push_permute_and_merge():
    a = np.array([1.0, 2.0, 3.0, 0.5])
    measure = cm.Dirichlet(torch.from_numpy(a))
    x = np.array([0.1, 0.2, 0.3, 0.4])
    order = [2, 0, 3, 1]
    image = push(measure, Permute(torch.tensor(order)))
    assert stats.dirichlet.logpdf(x[order], image.concentration.numpy()) == pytest.approx(
        stats.dirichlet.logpdf(x, a)
    )
    merged = push(measure, Merge([[3, 0], [1], [2]])).concentration.numpy()
    drawn = stats.dirichlet.rvs(a, size=40_000, random_state=0)
    first = drawn[:, 0] + drawn[:, 3]
    assert stats.kstest(first, stats.beta(merged[0], merged[1:].sum()).cdf).pvalue > 0.01
    assert stats.kstest(drawn[:, 2], stats.beta(merged[2], merged[:2].sum()).cdf).pvalue > 0.01


@pytest.mark.parametrize("family", [cm.MeanCovarianceGaussian, cm.Gaussian])
def test_push_linear(family):
    m, S = np.array([1.0, -2.0]), np.array([[2.0, 0.3], [0.3, 1.0]])
    W, b = np.array([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]]), np.array([0.1, 0.2, 0.3])
    Q = np.diag([0.0, 0.0, 0.7])
    image = push(
        family(torch.from_numpy(m), torch.from_numpy(S)), Linear(*map(torch.from_numpy, (W, b, Q)))
    )
    assert type(image) is family
    close(image.loc, W @ m + b)
    close(image.covariance_matrix, W @ S @ W.T + Q)
    batch = push(image, Linear(torch.eye(3, dtype=T64).expand(5, 3, 3)))
    assert batch.batch_shape == (5,)


def test_push_renew_and_identity():
    old, new = cm.Gamma(f64(1.0, 2.0, 3.0), 1.0), cm.Gamma(7.0, 2.0)
    image = push(old, Renew(new))
    assert image.batch_shape == (3,)
    close(image.concentration, [7.0, 7.0, 7.0])
    assert push(old, None) is old


def test_push_keeps_precision_and_derivatives():
    c = torch.tensor(2.0, requires_grad=True)
    image = push(cm.Gamma(2.0, 4.0), Scale(c))
    assert image.rate.dtype == torch.float32
    image.rate.backward()
    assert float(c.grad) == pytest.approx(-1.0)
    assert push(cm.Gamma(f64(2.0)[0], 4.0), Scale(c)).rate.dtype == T64


@pytest.mark.parametrize(
    ("measure", "map"),
    [
        (cm.Gamma(1.0, 1.0), Flip()),
        (cm.Gamma(1.0, 1.0), Linear(torch.eye(1))),
        (cm.Beta(1.0, 1.0), Scale(2.0)),
        (cm.Beta(1.0, 1.0), Permute([1, 0])),
        (cm.Dirichlet(torch.ones(2)), Flip()),
        (cm.MeanCovarianceGaussian(torch.zeros(1), 1.0), Scale(2.0)),
        (cm.Gamma(1.0, 1.0), torch.exp),
    ],
)
def test_pairs_that_are_not_closed_are_refused(measure, map):
    with pytest.raises(cm.InputError, match=r"not closed under .* Closed are Gamma under Scale"):
        push(measure, map)
    with pytest.raises(cm.InputError, match="not closed under"):
        model_of(measure, cm.Poisson, [None, map])


def test_maps_that_do_not_fit():
    three = cm.Dirichlet(torch.ones(3))
    with pytest.raises(cm.InputError, match="expected a Gamma, Beta"):
        push(cm.Poisson(1.0), Scale(2.0))
    with pytest.raises(cm.InputError, match="one family and dimension"):
        push(three, Renew(cm.Dirichlet(torch.ones(4))))
    with pytest.raises(cm.InputError, match="one family and dimension"):
        push(three, Renew(cm.Gamma(1.0, 1.0)))
    with pytest.raises(cm.InputError, match="2 coordinates for 3"):
        push(three, Permute([1, 0]))
    with pytest.raises(cm.InputError, match="law of 1 numbers"):
        push(cm.MeanCovarianceGaussian(torch.zeros(1), 1.0), Linear(torch.eye(2)))
    with pytest.raises(cm.InputError, match="must broadcast"):
        push(cm.Gamma(torch.ones(2), 1.0), Scale(torch.ones(3)))
    with pytest.raises(cm.InputError, match="several eta"):
        push(cm.Gamma(1.0, 1.0).tilt(torch.zeros(3, 2)), Scale(2.0))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Scale(0.0), "positive"),
        (lambda: Scale(torch.nan), "NaN"),
        (lambda: Permute([0, 0, 1]), "named once"),
        (lambda: Permute(3), "named once"),
        (lambda: Merge([[0, 1]]), "at least two"),
        (lambda: Merge([[0, 1], []]), "at least two"),
        (lambda: Merge(3), "named once"),
        (lambda: Linear(torch.ones(2)), "at least 2 dimensions"),
        (lambda: Linear(torch.eye(2), torch.ones(3)), r"b must be \(2,\)"),
        (lambda: Linear(torch.eye(2), Q=torch.eye(3)), r"Q \(2, 2\)"),
        (lambda: Linear(torch.eye(2), Q=-torch.eye(2)), "semi-definite"),
        (lambda: Linear(torch.ones(2, 2)), "no density"),
    ],
)
def test_maps_that_make_no_sense(make, match):
    with pytest.raises(cm.InputError, match=match):
        make()


# Derivatives -------------------------------------------------------------------------------------


@pytest.mark.parametrize("collapse", ["gpb1", "gpb2", "imm", "exact"])
def test_gradients_gamma(collapse):
    def value(c, shape, rate, logits, fresh):
        model = model_of(
            cm.Gamma(shape, rate),
            [cm.Poisson, cm.Exponential],
            [Scale(c), Renew(cm.Gamma(fresh, 1.0))],
            transition=logits.softmax(-1),
        )
        post = filter_conjugate(model, f64(2, 0, 5), collapse)
        return post.log_likelihood, post.mean, post.covariance

    given = [f64(1.2)[0], f64(2.0, 3.0), f64(1.5)[0], torch.randn(2, 2).to(T64), f64(1.7)[0]]
    assert torch.autograd.gradcheck(value, [x.requires_grad_() for x in given], atol=1e-4)


@pytest.mark.parametrize("family", ["beta", "dirichlet", "normal"])
def test_gradients_other_families(family):
    def value(a, b, logits):
        rows = logits.softmax(-1)
        if family == "beta":
            model = model_of(cm.Beta(*a), cm.Bernoulli, [None, Renew(cm.Beta(*b))], rows)
            return filter_conjugate(model, f64(1, 0, 0, 1)).log_likelihood
        if family == "dirichlet":
            renew = Renew(cm.Dirichlet(b))
            model = model_of(cm.Dirichlet(a), cm.Categorical, [None, renew], rows)
            return filter_conjugate(model, torch.eye(2)[[0, 1, 1, 0]]).log_likelihood
        noise = cm.Gaussian(f64(0.0), b[:1])
        linear = Linear(a[:1, None], a[1:], b[1:, None])
        model = model_of(cm.MeanCovarianceGaussian(a[:1], a[1:]), noise, [None, linear], rows)
        return filter_conjugate(model, f64(1, 0.5, -2, 1)[:, None]).log_likelihood

    given = [f64(0.8, 2.0), f64(1.5, 0.6), torch.randn(2, 2).to(T64)]
    assert torch.autograd.gradcheck(value, [x.requires_grad_() for x in given], atol=1e-4)


def test_gradients_in_observations_with_gaps():
    def value(y):
        gaps = torch.where(f64(0, 1, 0)[:, None] > 0, torch.nan, y)
        return filter_conjugate(built(NormalGaussian()), gaps).log_likelihood

    y = torch.randn(3, 2, dtype=T64, requires_grad=True)
    (slope,) = torch.autograd.grad(value(y), y)
    assert bool(slope.isfinite().all())
    assert not bool(slope[1].any())
    assert torch.autograd.gradcheck(value, [y], atol=1e-4)


# Series ------------------------------------------------------------------------------------------


@ALL
def test_missing_observations(case):
    y = case.observations.to(T64).clone()
    y[1] = y[3] = torch.nan
    post = filter_conjugate(built(case), y, "exact")
    check_modes(post, paths(case, 5, missing=(1, 3)))
    check_states(case, post, paths(case, 5, missing=(1, 3)))
    close(post.step_log_likelihood[[1, 3]], [0, 0])


def test_missing_elements_use_the_marginal_noise():
    model = built(NormalGaussian())
    y = torch.tensor([[torch.nan, 0.7]], dtype=T64)
    case, total = NormalGaussian(), 0.0
    P, pi = TRANSITION.numpy(), INITIAL.numpy()
    for j in range(2):
        m, S = case.move(case.start(0), j)
        spread = (S + case.R[j])[1, 1]
        total += (pi @ P)[j] * stats.norm.pdf(0.7, m[1], math.sqrt(spread))
    close(filter_conjugate(model, y).log_likelihood, math.log(total))


@ALL
def test_batches_lengths_and_updates(case):
    model = built(case)
    y = case.observations.to(T64)
    both = torch.stack([y, y.flip(0)])
    post = filter_conjugate(model, both, lengths=torch.tensor([5, 3]))
    for row, T in ((0, 5), (1, 3)):
        alone = filter_conjugate(model, both[row, :T])
        close(post.log_likelihood[row], alone.log_likelihood)
        close(post.mean[row, :T], alone.mean)
        close(post.mode_measures.natural[row, :T], alone.mode_measures.natural)
    online = filter_conjugate(model, both[:, :2])
    for t in range(2, 5):
        online = update_conjugate(online, both[:, t])
    whole = filter_conjugate(model, both)
    assert online.steps == 5
    close(online.step_log_likelihood, whole.step_log_likelihood)
    close(online.covariance, whole.covariance)
    last = update_conjugate(filter_conjugate(model, both[:, :4]).latest(), both[:, 4])
    close(last.mean, whole.mean[:, 3:])
    assert last.measure().batch_shape == (2,)


def test_update_takes_a_gap_and_refuses_nonsense():
    post = filter_conjugate(built(GammaPoisson()), f64(1, 2))
    close(update_conjugate(post, torch.nan).step_log_likelihood[-1], 0.0)
    with pytest.raises(cm.InputError, match=r"shape \(\), not \(2,\)"):
        update_conjugate(post, f64(1, 2))
    with pytest.raises(cm.InputError, match="y holds an infinity"):
        update_conjugate(post, torch.inf)
    for y in ("a", None, [[1], [2, 3]]):
        with pytest.raises(cm.InputError, match="y must be a tensor or an array of numbers"):
            update_conjugate(post, y)
    for y in (1j, torch.tensor(True)):
        with pytest.raises(cm.InputError, match="y must be real numbers"):
            update_conjugate(post, y)
    with pytest.raises(cm.InputError, match="counts"):
        update_conjugate(post, -1.0)


def test_precision_of_the_answer():
    single = model_of(cm.Gamma(2.0, 1.0), cm.Poisson, transition=TRANSITION.float(),
                      initial=INITIAL.float())  # fmt: skip
    post = filter_conjugate(single, torch.tensor([1, 2, 3]))
    double = filter_conjugate(model_of(cm.Gamma(2.0, 1.0), cm.Poisson), torch.tensor([1, 2, 3]))
    for name in ("log_likelihood", "mean", "covariance", "mode_probabilities"):
        assert getattr(post, name).dtype == torch.float32
        assert getattr(double, name).dtype == T64
        close(getattr(post, name), getattr(double, name), 1e-6)
    assert post.measure().rate.dtype == post.mode_measures.rate.dtype == torch.float32


def test_shapes_progress_and_repr():
    seen = []
    model = built(DirichletCategorical())
    post = filter_conjugate(model, DirichletCategorical.observations[None], progress=seen.append)
    assert [(x.done, x.total) for x in seen] == [(t, 5) for t in range(1, 6)]
    assert post.mean.shape == (1, 5, 3)
    assert post.mode_covariances.shape == (1, 5, 2, 3, 3)
    assert post.predicted_mode_probabilities.shape == (1, 5, 2)
    assert "Dirichlet, modes=2, state_size=3" in repr(post)
    assert filter_conjugate(model, torch.zeros(0, 4, 3)).mean.shape == (0, 4, 3)
    with pytest.raises(cm.InputError, match="one of the 5 steps"):
        post.measure(5)


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "y", "match"),
    [
        (GammaPoisson(), f64(1, -2), "counts"),
        (GammaPoisson(), f64(1, 0.5), "counts"),
        (GammaExponential(), f64(1, -0.5), ">= 0"),
        (BetaBernoulli(), f64(1, 2), "0 or 1"),
        (DirichletCategorical(), torch.full((2, 3), 0.5), "one-hot"),
        (
            DirichletCategorical(),
            torch.tensor([[1, 0, torch.nan]]),
            "missing completely or not at all",
        ),
        (DirichletCategorical(), torch.eye(2), r"\(\*batch, T, 3\)"),
        (NormalGaussian(), f64(1, 2), r"\(\*batch, T, 2\)"),
        (GammaPoisson(), f64(torch.nan, torch.nan), "no observation at all"),
        (GammaPoisson(), f64(1, torch.inf), "infinity"),
        (GammaPoisson(), torch.tensor([True, False]), "real numbers"),
        (GammaPoisson(), torch.ones(2) * 1j, "real numbers"),
        (GammaPoisson(), torch.ones(2, 0), "T >= 1"),
        (GammaPoisson(), f64(1.0)[0], "T >= 1"),
        (GammaPoisson(), "many", "not str"),
        (GammaPoisson(), f64(1e300, 1.0), "no Gamma has"),
    ],
)
def test_observations_that_make_no_sense(case, y, match):
    with pytest.raises(cm.InputError, match=match) as caught:
        filter_conjugate(built(case), y)
    assert str(caught.value).startswith("filter: ")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prior": cm.Poisson(1.0)}, "expected a Gamma, Beta"),
        ({"prior": cm.Gamma(torch.ones(3), 1.0)}, r"batch shape \(\) or \(2,\)"),
        ({"likelihood": cm.Bernoulli}, "Gamma is not conjugate to Bernoulli"),
        ({"likelihood": [cm.Poisson] * 3}, "3 entries for 2 modes"),
        ({"dynamics": [None]}, "1 entries for 2 modes"),
        ({"dynamics": Scale(torch.ones(2))}, "a batch of maps"),
        ({"transition": TRANSITION.mT}, "looks transposed"),
        ({"transition": TRANSITION[None]}, r"transition must be \(M, M\)"),
        ({"initial": f64(0.5, 0.6)}, "sum to one"),
        (
            {
                "prior": cm.Dirichlet(torch.ones(3)),
                "likelihood": cm.Categorical,
                "dynamics": [None, Merge([[0, 1], [2]])],
            },
            "Merge, maps 3 numbers to 2",
        ),
        (
            {
                "prior": cm.MeanCovarianceGaussian(torch.zeros(2), 1.0),
                "likelihood": cm.Gaussian(torch.zeros(2), 1.0),
                "dynamics": Linear(torch.ones(1, 2)),
            },
            "Linear, maps 2 numbers to 1",
        ),
        (
            {
                "prior": cm.MeanCovarianceGaussian(torch.zeros(2), 1.0),
                "likelihood": cm.Gaussian(torch.zeros(2, 2), 1.0),
            },
            "as a list",
        ),
        (
            {
                "prior": cm.MeanCovarianceGaussian(torch.zeros(2), 1.0),
                "likelihood": cm.Gaussian(torch.zeros(3), 1.0),
            },
            "must agree",
        ),
    ],
)
def test_models_that_make_no_sense(changes, match):
    given = {"prior": cm.Gamma(1.0, 1.0), "likelihood": cm.Poisson, **changes}
    with pytest.raises(cm.InputError, match=match):
        model_of(**given)


def test_a_merge_that_keeps_the_dimension_is_a_permutation():
    prior = cm.Dirichlet(f64(1, 2, 3))
    y = torch.eye(3)[[0, 2, 1]]
    values = [
        filter_conjugate(model_of(prior, cm.Categorical, [None, map]), y).log_likelihood
        for map in (Merge([[2], [0], [1]]), Permute([2, 0, 1]))
    ]
    assert values[0] == values[1]


# British coal mines, disasters in a year, 1851-1962 (Jarrett 1979) -------------------------------

COAL = [
    *(4, 5, 4, 0, 1, 4, 3, 4, 0, 6, 3, 3, 4, 0, 2, 6, 3, 3, 5, 4, 5, 3, 1, 4, 4, 1, 5, 5, 3, 4),
    *(2, 5, 2, 2, 3, 4, 2, 1, 3, 2, 2, 1, 1, 1, 1, 3, 0, 0, 1, 0, 1, 1, 0, 0, 3, 1, 0, 3, 2, 2),
    *(0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 2, 1, 0, 0, 0, 1, 1, 0, 2, 3, 3, 1, 1, 2, 1, 1, 1, 1, 2),
    *(4, 2, 0, 0, 0, 1, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1),
]


def run_lengths(counts, hazard, a, b):
    """Exact inference by the length of the run since the last change (Adams & MacKay 2007)."""
    shapes, rates, logs = np.array([a]), np.array([b]), np.array([0.0])
    total, means = 0.0, []
    for y in counts:
        fresh = np.append(shapes, a), np.append(rates, b)
        logs = np.append(logs + math.log1p(-hazard), special.logsumexp(logs) + math.log(hazard))
        logs = logs + stats.nbinom.logpmf(y, fresh[0], fresh[1] / (1 + fresh[1]))
        total += special.logsumexp(logs)
        logs = logs - special.logsumexp(logs)
        shapes, rates = fresh[0] + y, fresh[1] + 1
        means.append(np.exp(logs) @ (shapes / rates))
    return total, np.array(means)


def test_change_points_in_coal_mining_disasters():
    hazard, a, b = 0.02, 2.0, 1.0
    rate = cm.Gamma(a, b)
    model = model_of(
        rate,
        cm.Poisson,
        [None, Renew(rate)],
        transition=f64(1 - hazard, hazard).expand(2, 2),
        initial=f64(1, 0),
    )
    post = filter_conjugate(model, torch.tensor(COAL))
    truth, means = run_lengths(COAL, hazard, a, b)
    mean = post.mean[:, 0].numpy()
    assert 2.7 < mean[20:36].mean() < 3.5  # before 1887
    assert 0.5 < mean[55:].mean() < 1.5
    # A belief of two members against one of a member for each year: close, and far from no change.
    constant = cm.posterior(rate, cm.Poisson, torch.tensor(COAL, dtype=T64)).log_evidence
    assert abs(float(post.log_likelihood) - truth) < 0.5
    assert truth - float(constant) > 25
    assert np.abs(mean - means).max() < 0.4
    longer = filter_conjugate(model, torch.tensor(COAL), 6).mean[:, 0].numpy()
    assert np.abs(longer - means).max() < 0.2
    short = filter_conjugate(model, torch.tensor(COAL[:10]), "exact")
    exact, means = run_lengths(COAL[:10], hazard, a, b)
    close(short.log_likelihood, exact)
    close(short.mean[:, 0], means)


def test_modes_that_are_all_alike_change_nothing():
    """However narrow the law: identical messages are never projected."""
    for a in (1e-200, 1e8, 1e14):
        shape = torch.tensor(a, dtype=torch.float64)
        plain = {"prior": cm.Gamma(shape, shape), "likelihood": cm.Poisson}
        many = SwitchingConjugate(
            transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]]),
            initial=torch.tensor([0.3, 0.7]),
            **plain,
        )
        one = SwitchingConjugate(transition=torch.ones(1, 1), initial=torch.ones(1), **plain)
        y = f64(3, 0, 7, 2)
        ours, theirs = (filter_conjugate(m, y, "exact") for m in (many, one))
        close(ours.covariance / theirs.covariance, torch.ones(4, 1, 1).double(), 1e-9)
        close(ours.log_likelihood, theirs.log_likelihood)


def test_narrow_gammas_are_projected_with_the_digits_there_are():
    """log a - digamma(a) = gap at large shapes, where the gap itself is known."""
    for a in (1e-3, 0.5, 3.0, 1e3, 2e3, 5e3, 1e6):
        found = cm.Gamma.from_expectation(cm.Gamma(f64(a), f64(2.0)).expectation)
        assert abs(float(found.concentration) / a - 1) < 1e-14 * max(1, a) * 100


def test_orders_and_groups_are_whole_numbers():
    for order in (
        [1.9, 0.2],
        torch.tensor([True, False]),
        "ab",
        None,
        [[0, 1], [2]],
        [math.inf, 0],
    ):
        with pytest.raises(cm.InputError, match="Permute: each coordinate"):
            Permute(order)
    for groups in ([[0.7], [1.2]], ["0", "1"], [[math.inf], [1]]):
        with pytest.raises(cm.InputError, match="Merge: each coordinate"):
            Merge(groups)
    post = filter_conjugate(built(GammaPoisson()), f64(1, 2))
    for t in (1.0, None, "a", 5):
        with pytest.raises(cm.InputError, match="measure: t must be"):
            post.measure(t)
