"""statsmodels, filterpy and published numbers."""

import ast
import warnings
from pathlib import Path

import numpy as np
import pytest
import statsmodels
import torch
from filterpy.kalman import IMMEstimator, KalmanFilter
from statsmodels.tsa.api import MarkovAutoregression, MarkovRegression, UnobservedComponents

import cumulant as cm
from switching import exact, parameters, seeded

F = cm.filtering
TESTS = Path(statsmodels.__file__).parent / "tsa" / "regime_switching" / "tests"


def shipped(file, name):
    """A series that statsmodels writes out in its own tests, read without importing them."""
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


fedfunds = shipped("test_markov_regression.py", "fedfunds")
rgnp = shipped("test_markov_autoregression.py", "rgnp")


def close(a, b, tol=1e-9):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tol, atol=tol)


def regression(transition, means, variances, **rest):
    """Markov-switching means and variances, without a state."""
    M = len(means)
    zero = torch.zeros(0, dtype=torch.float64)
    return F.SwitchingLinearGaussian(
        transition=torch.as_tensor(transition, dtype=torch.float64),
        dynamics=zero.new_zeros(M, 0, 0),
        dynamics_noise=zero.new_zeros(M, 0, 0),
        emission=zero.new_zeros(M, 1, 0),
        emission_bias=torch.as_tensor(means, dtype=torch.float64)[:, None],
        emission_noise=torch.as_tensor(variances, dtype=torch.float64)[:, None, None],
        initial_mean=zero,
        initial_covariance=zero.new_zeros(0, 0),
        **rest,
    )


def test_federal_funds_with_the_parameters_that_stata_publishes():
    """Stata's manual of mswitch: log-likelihood -508.63592."""
    stay, back = 0.9820939, 0.0503587
    m = regression(
        [[stay, 1 - stay], [back, 1 - back]], [3.70877, 9.556793], [2.107562**2, 2.107562**2]
    )
    y = torch.tensor(fedfunds, dtype=torch.float64)[:, None]
    for collapse in ("gpb1", "gpb2", "imm", 3):
        post = F.filter(m, y, collapse=collapse)
        assert abs(float(post.log_likelihood) + 508.63592) < 5e-5
    theirs = MarkovRegression(np.array(fedfunds), k_regimes=2)
    result = theirs.smooth(np.r_[stay, back, 3.70877, 9.556793, 2.107562**2])
    close(post.mode_probabilities, result.filtered_marginal_probabilities, 1e-6)
    smoothed = F.smooth(m, post)
    close(smoothed.mode_probabilities, result.smoothed_marginal_probabilities, 1e-6)
    joint = np.moveaxis(result.smoothed_joint_probabilities, -1, 0)[1:]  # [t, current, previous]
    close(smoothed.transition_probabilities[1:], np.swapaxes(joint, 1, 2), 1e-6)


def test_a_state_without_uncertainty_is_the_hamilton_filter():
    """The limit of the issue: a state that never moves, in the general recursion."""
    stay, back = 0.9820939, 0.0503587
    general = F.SwitchingLinearGaussian(
        transition=torch.tensor([[stay, 1 - stay], [back, 1 - back]], dtype=torch.float64),
        dynamics=torch.eye(1, dtype=torch.float64),
        dynamics_noise=torch.zeros(1, 1, dtype=torch.float64),
        emission=torch.tensor([[[3.70877]], [[9.556793]]], dtype=torch.float64),
        emission_noise=torch.full((1, 1), 2.107562**2, dtype=torch.float64),
        initial_mean=torch.ones(1, dtype=torch.float64),
        initial_covariance=torch.zeros(1, 1, dtype=torch.float64),
    )
    y = torch.tensor(fedfunds, dtype=torch.float64)[:, None]
    for collapse in ("gpb1", "gpb2", "imm"):
        post = F.filter(general, y, collapse=collapse)
        assert abs(float(post.log_likelihood) + 508.63592) < 5e-5


def test_fitting_finds_what_statsmodels_finds():
    y = np.array(fedfunds)
    theirs = MarkovRegression(y, k_regimes=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = theirs.fit()
    start = regression([[0.9, 0.1], [0.1, 0.9]], [8.0, 4.0], [4.0, 4.0])
    start = start.replace(emission_noise=torch.full((1, 1), 4.0, dtype=torch.float64))
    for method in ("lbfgs", "em"):
        ours = F.fit(start, torch.tensor(y)[:, None], method=method, max_steps=500, tol=1e-9)
        # EM does not know that `initial` follows from `transition`; it comes very close.
        assert abs(ours.log_likelihood - result.llf) < (1e-4 if method == "lbfgs" else 0.05)
        assert ours.converged
    ours = F.fit(start, torch.tensor(y)[:, None], tol=1e-9)
    p = dict(zip(theirs.param_names, result.params, strict=True))
    close(ours.model.emission_bias[:, 0], [p["const[0]"], p["const[1]"]], 1e-3)
    close(ours.model.transition[:, 0], [p["p[0->0]"], p["p[1->0]"]], 1e-3)
    errors = dict(zip(theirs.param_names, result.bse, strict=True))
    close(
        ours.standard_errors["emission_bias"][:, 0], [errors["const[0]"], errors["const[1]"]], 0.02
    )
    close(ours.standard_errors["emission_noise"][0, 0], errors["sigma2"], 0.02)
    close(ours.standard_errors["transition"][:, 0], [errors["p[0->0]"], errors["p[1->0]"]], 0.05)


def test_hamiltons_gnp_model():
    """Hamilton 1989: an autoregression of order 4 around a switching mean; 32 modes of history."""
    params = np.r_[0.754673, 0.095915, -0.358811, 1.163516, np.exp(-0.262658) ** 2]
    ar = np.r_[0.013486, -0.057521, -0.246983, -0.212923]
    theirs = MarkovAutoregression(np.asarray(rgnp), k_regimes=2, order=4, switching_ar=False)
    # statsmodels' order: p[0->0], p[1->0], const[0], const[1], sigma2, ar
    result = theirs.smooth(np.r_[params, ar])
    stay, back = params[:2]
    P = np.array([[stay, 1 - stay], [back, 1 - back]])
    means = params[2:4]
    histories = np.array(np.meshgrid(*[[0, 1]] * 5, indexing="ij")).reshape(5, -1).T  # oldest first
    T = np.zeros((32, 32))
    bias = np.zeros(32)
    for a, h in enumerate(histories):
        bias[a] = means[h[4]] - sum(ar[k] * means[h[3 - k]] for k in range(4))
        for b, g in enumerate(histories):
            if (h[1:] == g[:-1]).all():
                T[a, b] = P[h[4], g[4]]
    y = np.asarray(rgnp, float)
    lags = np.stack([y[3 - k : len(y) - 1 - k] for k in range(4)], -1)
    m = regression(T, bias, np.full(32, params[4]))
    m = m.replace(emission_input=torch.tensor(ar)[None, :])
    post = F.filter(m, torch.tensor(y[4:])[:, None], inputs=torch.tensor(lags))
    # Published by Stata for this model and series (mswitch), as statsmodels tests it.
    assert abs(float(post.log_likelihood) - result.llf) < 1e-8
    assert abs(float(post.log_likelihood) + 181.26339) < 1e-4
    current = post.mode_probabilities.reshape(-1, 16, 2).sum(1)
    close(current, result.filtered_marginal_probabilities, 1e-7)


def test_one_mode_is_statsmodels_local_level():
    y = np.array(fedfunds)[:60]
    theirs = UnobservedComponents(y, "local level")
    theirs.initialize_known(np.array([3.0]), np.array([[4.0 + 0.5]]))
    theirs.loglikelihood_burn = 0  # the start is known, so the first observation counts
    result = theirs.smooth([0.2, 0.5])
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    m = F.SwitchingLinearGaussian(
        transition=torch.ones(1, 1, dtype=torch.float64),
        dynamics=one,
        dynamics_noise=0.5 * one,
        emission=one,
        emission_noise=0.2 * one,
        initial_mean=torch.tensor([3.0], dtype=torch.float64),
        initial_covariance=torch.tensor([[4.0]], dtype=torch.float64),
    )
    post = F.filter(m, torch.tensor(y)[:, None])
    close(post.log_likelihood, result.llf)
    close(post.mean[:, 0], result.filtered_state[0])
    close(F.smooth(m, post).mean[:, 0], result.smoothed_state[0])
    close(F.smooth(m, post).covariance[:, 0, 0], result.smoothed_state_cov[0, 0])


def imm_of(given):
    filters = []
    for j in range(given["transition"].shape[0]):
        n, p = given["dynamics"].shape[-1], given["emission"].shape[-2]
        f = KalmanFilter(dim_x=n, dim_z=p)
        f.F, f.Q = given["dynamics"][j].numpy(), given["dynamics_noise"][j].numpy()
        f.H, f.R = given["emission"][j].numpy(), given["emission_noise"][j].numpy()
        f.x, f.P = (
            given["initial_mean"].numpy()[:, None].copy(),
            given["initial_covariance"].numpy(),
        )
        filters.append(f)
    return IMMEstimator(filters, given["initial"].numpy(), given["transition"].numpy())


def plain(seed, modes=3, n=2, p=2):
    given = parameters(modes, n, p, seed)
    return {k: v for k, v in given.items() if not k.endswith("_bias")}


@pytest.mark.parametrize("seed", range(3))
def test_filterpy_on_well_behaved_data(seed):
    given = plain(seed)
    m = F.SwitchingLinearGaussian(**given)
    y = F.sample(m, 40, generator=seeded(seed)).observations
    post = F.filter(m, y, collapse="imm")
    imm = imm_of(given)
    for t, z in enumerate(y.numpy()):
        imm.predict()
        imm.update(z[:, None])
        close(post.mode_probabilities[t], imm.mu, 1e-7)
        close(post.mean[t], imm.x[:, 0], 1e-7)
        close(post.covariance[t], imm.P, 1e-7)


def test_where_filterpy_is_wrong_likelihoods_that_underflow():
    given = plain(5, modes=2, n=1, p=1)
    given["emission_noise"] = torch.tensor([[[0.1]], [[1.0]]], dtype=torch.float64)
    given["dynamics"] = torch.ones(2, 1, 1, dtype=torch.float64)
    given["emission"] = torch.ones(2, 1, 1, dtype=torch.float64)
    given["dynamics_noise"] = torch.full((2, 1, 1), 0.1, dtype=torch.float64)
    y = torch.tensor([[500.0]], dtype=torch.float64)
    truth = exact(given, y)["modes"][-1]
    post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse="imm")
    close(post.mode_probabilities[-1], truth)
    imm = imm_of(given)
    imm.predict()
    imm.update(y.numpy().T)
    assert truth[1] > 1 - 1e-9
    assert imm.mu[1] < 0.99


def test_where_filterpy_is_wrong_missing_observations():
    given = plain(6)
    y = F.sample(F.SwitchingLinearGaussian(**given), 2, generator=seeded(6)).observations
    y[1] = torch.nan
    truth = exact(given, y)["modes"][-1]
    post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse="imm")
    close(post.mode_probabilities[-1], truth)
    imm = imm_of(given)
    imm.predict()
    imm.update(y[0].numpy()[:, None])
    imm.predict()
    imm.update(None)
    assert np.abs(imm.mu - truth).max() > 0.01


def test_where_filterpy_is_wrong_predicted_mean():
    given = plain(7)
    y = F.sample(F.SwitchingLinearGaussian(**given), 2, generator=seeded(7)).observations
    blind = torch.stack([y[0], torch.full_like(y[0], torch.nan)])
    truth = exact(given, blind)["mean"][-1]
    post = F.filter(F.SwitchingLinearGaussian(**given), y, collapse="imm")
    close(post.predicted_mean[-1], truth)
    imm = imm_of(given)
    imm.predict()
    imm.update(y[0].numpy()[:, None])
    imm.predict()
    assert np.abs(imm.x_prior[:, 0] - truth).max() > 0.01
