"""Smoothing with singular covariances and vague starts, against conditioning with 50 digits."""

import numpy as np
import pytest
import statsmodels.api as sm
import torch

import cumulant as cm
from fuzz import smoothing as fuzz

F = cm.filtering
D = torch.float64


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed):
    """Rank-deficient noises and starts, variances from 1e-6 to 1e10, gaps, up to three modes."""
    case, found = fuzz.once(seed)
    assert not fuzz.fails(found), (found, case)


def rank_one(seed, scale=2.0**20, R=1.0, modes=1, T=8, n=4, sensors=1):
    """One direction is uncertain at the start, by much, and one is driven by noise."""
    rng = np.random.default_rng(seed)

    def repeat(x):
        return np.broadcast_to(x, (modes, *x.shape)).copy()

    W, C = rng.normal(size=(n, n)) / 2, rng.integers(-16, 17, (sensors, n)) / 8
    q, start = (rng.integers(-16, 17, (n, 1)) / 8 for _ in range(2))
    Q, P = q @ q.T, scale * start @ start.T
    x, y = np.sqrt(scale) * start[:, 0] * rng.normal(), []
    for _ in range(T):
        x = W @ x + q[:, 0] * rng.normal()
        y.append(C @ x + np.sqrt(R) * rng.normal(size=sensors))
    return fuzz.Case(
        np.full((modes, modes), 1 / modes),
        np.full(modes, 1 / modes),
        *(repeat(W), repeat(Q), repeat(C), repeat(R * np.eye(sensors)), P, np.array(y)),
    )


@pytest.mark.parametrize(("scale", "R"), [(2.0**20, 1.0), (2.0**33, 1.0), (2.0**33, 2.0**-20)])
@pytest.mark.parametrize("seed", range(6))
def test_rank_one_noise_and_rank_one_start(seed, scale, R):
    case = rank_one(seed, scale, R)
    m = case.model()
    smoothed = F.smooth(m, F.filter(m, torch.tensor(case.y)))
    found = fuzz.misses(case, smoothed, fuzz.oracle(case))
    assert not fuzz.fails(found), found


@pytest.mark.parametrize("collapse", ["gpb1", "imm", "gpb2", 3])
@pytest.mark.parametrize("scale", [2.0**20, 2.0**33])
def test_equal_modes_are_one(collapse, scale):
    """Collapsing equal messages loses nothing, so every scheme is exact."""
    one, three = rank_one(3, scale), rank_one(3, scale, modes=3)
    smoothed = F.smooth(
        three.model(), F.filter(three.model(), torch.tensor(three.y), collapse=collapse)
    )
    means, covariances, _ = fuzz.oracle(one)
    found = fuzz.misses(three, smoothed, (means, covariances, np.full((9, 3), 1 / 3)))
    assert not fuzz.fails(found), found


@pytest.mark.parametrize("seed", range(4))
def test_the_filter_with_a_vague_start(seed):
    """Two sensors see one vague direction: what is left has 16 digits less variance."""
    case = rank_one(seed, 2.0**33, 2.0**-20, T=4, sensors=2)
    y = case.y
    post = F.filter(case.model(), torch.tensor(y))
    for t in range(4):
        means, covariances, _ = fuzz.oracle(case._replace(y=y[: t + 1]))
        size = np.abs(covariances[-1]).max()
        assert np.abs(post.covariance[t].numpy() - covariances[-1]).max() < 1e-6 * size
        assert np.linalg.eigvalsh(post.covariance[t].numpy())[0] > -1e-12 * size
        miss = np.abs(post.mean[t].numpy() - means[-1]).max()
        assert miss < 1e-4 * np.sqrt(size) + 1e-10 * np.abs(means).max()


def test_online_as_at_once():
    case = rank_one(5, 2.0**33, 2.0**-10)
    m, y = case.model(), torch.tensor(case.y)
    post = F.filter(m, y[:1])
    for row in y[1:]:
        post = F.update(post, row)
    truth = fuzz.oracle(case)
    for found in (post, F.filter(m, y)):
        assert not fuzz.fails(fuzz.misses(case, F.smooth(m, found), truth))
        ahead = F.forecast(found, 5)
        assert (torch.linalg.eigvalsh(ahead.covariance) >= -1e-12 * ahead.covariance.max()).all()
    light = F.update(F.filter(m, y[:-1]).latest(), y[-1])
    torch.testing.assert_close(light.covariance[-1], post.covariance[-1], rtol=1e-6, atol=0)


def level_and_season(dtype):
    n = 12
    W = torch.zeros(n, n, dtype=dtype)
    W[0, 0], W[1, 1:] = 1.0, -1.0
    W[2:, 1:-1] = torch.eye(n - 2, dtype=dtype)
    C = torch.zeros(1, n, dtype=dtype)
    C[0, :2] = 1.0
    return F.SwitchingLinearGaussian(
        transition=torch.ones(1, 1, dtype=dtype),
        initial=torch.ones(1, dtype=dtype),
        dynamics=W,
        dynamics_noise=torch.diag(torch.tensor([0.1, 0.05] + [0.0] * 10, dtype=dtype)),
        emission=C,
        emission_noise=torch.ones(1, 1, dtype=dtype),
        initial_mean=torch.zeros(n, dtype=dtype),
        initial_covariance=1e8 * torch.eye(n, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_level_and_season_as_statsmodels_with_a_diffuse_start(dtype):
    rng = np.random.default_rng(0)
    t = np.arange(48)
    y = 100 + 0.1 * t + 5 * np.sin(2 * np.pi * t / 12) + rng.normal(size=48)
    y[7] = np.nan
    theirs = sm.tsa.UnobservedComponents(y, "llevel", seasonal=12, use_exact_diffuse=True)
    theirs = theirs.smooth([1.0, 0.1, 0.05])
    mean, spread = theirs.smoothed_state.T, theirs.smoothed_state_cov.transpose(2, 0, 1)
    m = level_and_season(dtype)
    ours = F.smooth(m, F.filter(m, torch.tensor(y, dtype=dtype)[:, None]))
    assert ours.mean.dtype == dtype
    deviation = np.sqrt(spread.diagonal(axis1=1, axis2=2))
    assert (np.abs(ours.mean.numpy() - mean) / deviation).max() < 1e-4
    found = ours.covariance.diagonal(dim1=-2, dim2=-1).sqrt().numpy()
    assert np.abs(found / deviation - 1).max() < 1e-5


@pytest.mark.parametrize("scale", [2.0**4, 2.0**30])
@pytest.mark.parametrize("what", ["y", "R", "Q", "W", "P"])
def test_gradients_through_a_singular_model(what, scale):
    """Against central differences, along changes that keep the ranks."""
    case = rank_one(0, scale, 2.0**-4, modes=2, T=3, n=3)
    case.W[1] = case.W[1].T
    m, y = case.model(), torch.tensor(case.y)
    rng = torch.Generator().manual_seed(0)
    u = torch.randn(3, 3, generator=rng, dtype=D)
    at = {"Q": "dynamics_noise", "W": "dynamics", "R": "emission_noise", "P": "initial_covariance"}

    def value(x):
        if what == "y":
            post = F.filter(m, y * x)
        else:
            old = m.parameters[at[what]]
            new = old + (x - 1) * torch.tril(u) if what == "W" else old * x
            post = F.filter(m.unchecked({at[what]: new}), y)
        smoothed = F.smooth(post.model, post)
        moments = (smoothed.mean @ u).sum() / scale**0.5 + (smoothed.covariance * u).sum()
        return moments + post.log_likelihood

    x = torch.ones((), dtype=D, requires_grad=True)
    (slope,) = torch.autograd.grad(value(x), x)
    h = 1e-4
    with torch.no_grad():
        points = [value(torch.tensor(1 + k * h, dtype=D)) for k in (-2, -1, 1, 2)]
    numeric = (points[0] - 8 * points[1] + 8 * points[2] - points[3]) / (12 * h)
    assert abs(float(slope - numeric)) < 1e-5 * (1 + abs(float(numeric)))


def test_em_from_a_vague_start():
    """One mode: EM is exact, so the likelihood of a level with a vague start never falls."""
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, D):
        one = torch.ones(1, 1, dtype=dtype)
        m = F.SwitchingLinearGaussian(
            transition=one,
            dynamics=torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=dtype),
            dynamics_noise=torch.tensor([[0.0, 0.0], [0.0, 0.3]], dtype=dtype),
            emission=torch.tensor([[1.0, 0.0]], dtype=dtype),
            emission_noise=5 * one,
            initial_mean=torch.zeros(2, dtype=dtype),
            initial_covariance=1e8 * torch.eye(2, dtype=dtype),
        )
        y = torch.randn(25, 1, generator=g).cumsum(0).cumsum(0).to(dtype)
        found = F.fit(m, y, free=["emission_noise"], method="em")
        best = F.fit(m, y, free=["emission_noise"])
        assert found.model.dtype == dtype
        assert found.log_likelihood > F.filter(m, y).log_likelihood
        assert abs(found.log_likelihood - best.log_likelihood) < 0.05


@pytest.mark.parametrize("large", [1.0, 1e14])
def test_covariances_that_are_none_are_refused(large):
    m = level_and_season(D)
    P = torch.eye(12, dtype=D)
    P[0, 0] = large
    P[1, 2] = P[2, 1] = 2.0
    with pytest.raises(cm.InputError, match=r"initial_covariance.*positive semi-definite.*-1"):
        m.replace(initial_covariance=P)
    P[2, 1] = -2.0 * large
    with pytest.raises(cm.InputError, match=r"initial_covariance must be symmetric"):
        m.replace(initial_covariance=P)
    with pytest.raises(cm.InputError, match=r"emission_noise.*positive semi-definite"):
        m.replace(emission_noise=-torch.ones(1, 1, dtype=D))
    # Known states beside vague ones, and what rounding makes of a rank-one matrix, are fine.
    root = large**0.5 * torch.arange(12, dtype=D)[:, None] / 7
    m.replace(initial_covariance=root @ root.mT)


def test_no_density_is_an_error_with_a_vague_start_too():
    case = rank_one(0, 2.0**33)
    case = case._replace(R=np.zeros((1, 1, 1)), Q=np.zeros((1, 4, 4)))
    with pytest.raises(cm.InputError, match="has no density"):
        F.filter(case.model(), torch.tensor(case.y))
