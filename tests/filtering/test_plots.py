"""What `plot()` draws is what the results say; residuals are normal where the model is right."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from statsmodels.tsa.stattools import acf

import cumulant as cm
from cumulant.filtering.predictive import quantiles
from switching import means, parameters, seeded

F = cm.filtering
CHAIN = means([[0.9, 0.1], [0.2, 0.8]], [1.5, -1.0], [0.25, 1.0])


@pytest.fixture(scope="module")
def post():
    y = F.sample(CHAIN, 80, generator=seeded(1)).observations[:, 0].numpy().copy()
    y[7] = np.nan
    index = pd.period_range("1990Q1", periods=80, freq="Q")
    return F.filter(CHAIN, pd.Series(y, index, name="growth"))


def test_residuals_are_quantiles_of_the_mixture(post):
    z = F.residuals(post)[:, 0].numpy()
    y = post.observations[0][:, 0].numpy()
    p = post.predicted_mode_probabilities.numpy()
    normal = stats.norm(CHAIN.emission_bias[:, 0], CHAIN.emission_noise.flatten().sqrt())
    expected = stats.norm.ppf((p * normal.cdf(y[:, None])).sum(-1))
    assert z == pytest.approx(expected, abs=1e-9, nan_ok=True)
    assert np.isnan(z[7])


def test_residuals_of_the_true_model_are_standard_normal():
    """Kolmogorov and Smirnov on 4000 draws; Gaussian residuals of the same filter are not."""
    drawn = F.sample(CHAIN, 400, (10,), generator=seeded(0)).observations
    post = F.filter(CHAIN, drawn)
    z = F.residuals(post).flatten().numpy()
    assert stats.kstest(z, "norm").pvalue > 0.01
    spread = post.observation_covariance[..., 0, 0].sqrt()[..., None]
    naive = ((drawn - post.observation_mean) / spread).flatten().numpy()
    assert stats.kstest(naive, "norm").pvalue < 1e-6


def test_one_mode_has_the_usual_residuals_far_out():
    model = F.SwitchingLinearGaussian(**parameters(1, 2, 2, 3))
    y = F.sample(model, 12, generator=seeded(1)).observations
    y[6] += 60.0
    post = F.filter(model, y)
    spread = post.observation_covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    usual = (y - post.observation_mean) / spread
    assert torch.allclose(F.residuals(post), usual, atol=1e-6)
    assert F.residuals(post).abs().max() > 20


def test_quantiles_hold_their_share(post):
    ahead = F.forecast(post, 3)
    levels = [0.025, 0.5, 0.9]
    found = quantiles(ahead, levels)[:, :, 0].numpy()
    p = ahead.mode_probabilities.numpy()
    normal = stats.norm(CHAIN.emission_bias[:, 0], CHAIN.emission_noise.flatten().sqrt())
    for level, row in zip(levels, found, strict=True):
        assert (p * normal.cdf(row[:, None])).sum(-1) == pytest.approx(level, abs=1e-9)


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def words(figure):
    return {x.get_text() for axes in figure.axes for x in axes.get_legend().get_texts()}


def test_regimes_are_named_and_dated(post, tmp_path):
    path = tmp_path / "regimes.png"
    figure = post.plot(path=path, names=["expansion", "recession"])
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert titles(figure) == ["growth", "probability of the modes"]
    assert {"expansion", "recession", "mostly recession", "observed"} <= words(figure)
    assert {"1992", "2002"} <= {x.get_text() for x in figure.axes[-1].get_xticklabels()}
    smoothed = F.smooth(CHAIN, post)
    assert "mode 2, so far" in words(post.plot(smoothed=smoothed))
    alone = smoothed.plot(names=["expansion", "recession"])
    assert words(alone) == {"expansion", "recession"}
    low = np.clip(1 - smoothed.mode_probabilities[:, 0].numpy(), 0, 1)
    steps = alone.axes[0].patches[0].get_data()
    assert steps.baseline == pytest.approx(low)


def test_states_have_their_bands():
    model = F.SwitchingLinearGaussian(**parameters(2, 2, 1, 1))
    post = F.filter(model, F.sample(model, 30, generator=seeded(1)).observations)
    smoothed = F.smooth(model, post)
    for figure, known in (
        (post.plot("states"), post),
        (post.plot("states", smoothed=smoothed), smoothed),
        (smoothed.plot("states"), smoothed),
    ):
        assert titles(figure) == ["state 1", "state 2"]
        line = figure.axes[1].lines[0].get_ydata()
        assert line == pytest.approx(known.mean[:, 1].numpy())
        band = figure.axes[1].collections[0].get_paths()[0].vertices[:, 1]
        top = known.mean[:, 1] + 1.96 * known.covariance[:, 1, 1].sqrt()
        assert band.max() == pytest.approx(float(top.max()))


def test_a_fan_continues_the_dates(post, tmp_path):
    ahead = F.forecast(post, 8)
    figure = ahead.plot(path=tmp_path / "fan.svg")
    assert words(figure) == {
        *("observed", "median", "50% of the forecast", "80% of the forecast", "95% of the forecast")
    }
    median = figure.axes[0].lines[-1]
    assert median.get_ydata() == pytest.approx(quantiles(ahead, [0.5])[0, :, 0].numpy())
    assert len(figure.axes[0].lines[0].get_ydata()) == 32
    plain = F.forecast(F.filter(CHAIN, torch.zeros(5, 1).double()), 2).plot()
    assert plain.axes[0].lines[-1].get_xdata() == pytest.approx([6.0, 7.0])


def test_diagnostics_are_those_of_statsmodels(post):
    figure = post.plot("diagnostics")
    z = F.residuals(post)[:, 0].numpy()
    drawn = figure.axes[2].collections[-1].get_segments()
    heights = [segment[1][1] for segment in drawn]
    assert heights == pytest.approx(acf(z, nlags=20, missing="conservative")[1:], abs=1e-9)
    quantile = figure.axes[1].lines[-1]
    assert quantile.get_ydata() == pytest.approx(np.sort(z[~np.isnan(z)]))
    (theory, _), _ = stats.probplot(z[~np.isnan(z)])
    assert quantile.get_xdata() == pytest.approx(theory, abs=1e-9)


def test_plots_of_a_fit(post):
    y = post.observations[0].numpy()[:, 0]
    model = F.switching_mean_variance(["low", "high"])
    found = F.fit(model, pd.Series(y, name="growth"))
    assert {"low", "high"} <= words(found.plot())
    assert len(found.plot("diagnostics").axes) == 4
    with pytest.raises(cm.InputError, match="has no state"):
        found.plot("states")


def test_bad_input(post):
    with pytest.raises(cm.InputError, match="what must be one of regimes, states, forecast"):
        post.plot("fan")
    with pytest.raises(cm.InputError, match="a fan is drawn of forecast"):
        post.plot("forecast")
    with pytest.raises(cm.InputError, match="what must be one of regimes, states, not"):
        F.smooth(CHAIN, post).plot("diagnostics")
    with pytest.raises(cm.InputError, match=r"has a batch \(3,\)"):
        F.filter(CHAIN, torch.zeros(3, 4, 1).double()).plot()
    with pytest.raises(cm.InputError, match="fewer than three residuals"):
        F.filter(CHAIN, torch.zeros(2, 1).double()).plot("diagnostics")
    with pytest.raises(cm.InputError, match="2 different names of modes"):
        post.plot(names=["one"])
