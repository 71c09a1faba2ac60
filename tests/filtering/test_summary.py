"""The table of a fit: numbers that statsmodels and Stata print, and how it is shown."""

from __future__ import annotations

import math
import sys
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from statsmodels.datasets import macrodata
from statsmodels.tsa.api import MarkovRegression

import cumulant as cm
from cumulant.filtering.model_files import Names
from cumulant.filtering.summary import Estimate
from switching import means, seeded

F = cm.filtering


@pytest.fixture(scope="module")
def growth():
    data = macrodata.load_pandas().data
    index = pd.period_range("1959Q2", periods=len(data) - 1, freq="Q")
    return pd.Series(100 * np.diff(np.log(data["realgdp"])), index=index, name="growth")


@pytest.fixture(scope="module")
def found(growth):
    model = F.switching_mean_variance(["recession", "expansion"], switching="mean")
    return F.fit(model, growth, tol=1e-8, starts=2)


@pytest.fixture(scope="module")
def theirs(growth):
    np.random.seed(0)
    return MarkovRegression(growth, 2).fit(search_reps=5)


def test_the_criteria_are_those_of_statsmodels(found, theirs):
    assert found.log_likelihood == pytest.approx(theirs.llf, abs=1e-5)
    for ours, name in ((found.aic, "aic"), (found.bic, "bic"), (found.hqic, "hqic")):
        assert ours == pytest.approx(getattr(theirs, name), abs=1e-4)
    assert found.observation_count == theirs.nobs


def test_the_estimates_are_those_of_statsmodels(found, theirs):
    """Coefficients, standard errors, z, p-values, intervals and durations, number by number."""
    table = found.summary().table
    values, errors = dict(theirs.params), dict(theirs.bse)
    low = "[0]" if values["const[0]"] < values["const[1]"] else "[1]"
    high = "[1]" if low == "[0]" else "[0]"
    intervals = theirs.conf_int()
    for regime, at in (("recession", low), ("expansion", high)):
        row = table.loc[(regime, "mean")]
        name = f"const{at}"
        assert row["coef"] == pytest.approx(values[name], abs=1e-4)
        assert row["std err"] == pytest.approx(errors[name], rel=0.01)
        assert row["z"] == pytest.approx(theirs.tvalues[name], rel=0.01)
        assert row["P>|z|"] == pytest.approx(theirs.pvalues[name], abs=0.003)
        assert [row["[0.025"], row["0.975]"]] == pytest.approx(list(intervals.loc[name]), abs=0.01)
    row = table.loc[("all regimes", "variance")]
    assert row["coef"] == pytest.approx(values["sigma2"], abs=1e-4)
    assert row["std err"] == pytest.approx(errors["sigma2"], rel=0.01)
    assert math.isnan(row["z"])  # that a variance is 0 is no test
    assert row["[0.025"] > 0
    stay = table.loc[("transition", "P(recession -> recession)")]
    name = "p[0->0]" if low == "[0]" else "p[1->0]"
    expected = values[name] if low == "[0]" else 1 - values[name]
    assert stay["coef"] == pytest.approx(expected, abs=1e-3)
    assert stay["std err"] == pytest.approx(errors[name], rel=0.02)
    durations = found.summary().duration_table["duration"]
    order = [0, 1] if low == "[0]" else [1, 0]
    assert list(durations) == pytest.approx(list(theirs.expected_durations[order]), rel=1e-3)


def test_standard_errors_of_durations_follow_from_the_delta_method(found):
    p = found.model.transition[1, 1].item()
    error = found.standard_errors["transition"][1, 1].item()
    h = 1e-6
    slope = (1 / (1 - p - h) - 1 / (1 - p + h)) / (2 * h)
    assert found.summary().durations[1][1] == pytest.approx(slope * error, rel=1e-4)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("kind", ["location", "variance", "probability"])
def test_intervals_are_normal_on_the_scale_where_they_are_symmetric(kind, level):
    x = Estimate("", "x", 0.3, 0.1, kind)
    low, high = x.interval(level)
    scale = {"location": lambda v: v, "variance": math.log, "probability": stats.logistic.ppf}[kind]
    center = float(scale(0.3))
    slope = {"location": 1.0, "variance": 1 / 0.3, "probability": 1 / (0.3 * 0.7)}[kind]
    reach = stats.norm.ppf((1 + level) / 2) * 0.1 * slope
    assert [float(scale(low)), float(scale(high))] == pytest.approx(
        [center - reach, center + reach]
    )
    if kind != "location":
        assert math.isnan(x.p_value)
    else:
        assert x.p_value == pytest.approx(2 * stats.norm.sf(3.0))


def test_the_text_shows_every_number(found):
    text = str(found.summary())
    assert max(map(len, text.splitlines())) <= 79
    for word in ("recession", "expansion", "AIC", "BIC", "HQIC", "growth", "1959Q2 - 2009Q3"):
        assert word in text
    for number in (
        f"{found.log_likelihood:.4f}",
        f"{found.hqic:.4f}",
        f"{found.model.emission_bias[0, 0]:.4f}",
        f"{found.standard_errors['emission_bias'][0, 0]:.3f}",
        f"{found.model.transition[0, 1]:.4f} (",
        f"{1 / (1 - found.model.transition[1, 1]):.4f} (",
    ):
        assert number in text
    assert "2 of 2 starts reached this maximum." in text
    assert "where mean switches between 2 regimes" in text.splitlines()[0]


class Cells(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells.append(data)


def test_html_is_well_formed_and_says_the_same(found):
    page = Cells(found.summary()._repr_html_())
    assert page.open == []
    assert f"{found.model.emission_bias[1, 0]:.4f}" in page.cells
    assert f"{found.aic:.4f}" in page.cells
    named = Cells(found.summary(["a <b>", "c & d"])._repr_html_())
    assert "a <b>" in named.cells


def test_a_model_without_names_and_names_that_are_given():
    y = F.sample(
        means([[0.9, 0.1], [0.2, 0.8]], [1.5, -1.0], [0.25, 0.25]), 60, generator=seeded(3)
    )
    start = means([[0.9, 0.1], [0.2, 0.8]], [1.0, -1.0], [1.0, 1.0])
    found = F.fit(start, y.observations)
    table = found.summary().table
    assert ("mode 1", "emission_bias[0]") in table.index
    assert ("transition", "P(mode 1 -> mode 2)") in table.index
    assert len(table) == 2 + 2 + 4
    names = [["expansion", "recession"][i] for i in found.order]
    named = found.summary(names).table
    assert named.loc[("recession", "emission_bias[0]"), "coef"] < 0
    assert found.summary(Names(names, [])).regimes == ("recession", "expansion")
    with pytest.raises(cm.InputError, match="2 different names of modes"):
        found.summary(["one"])
    with pytest.raises(cm.InputError, match="level must be between 0 and 1"):
        found.summary(level=1.0)


def test_what_did_not_move_has_no_row():
    y = F.sample(
        means([[0.9, 0.1], [0.2, 0.8]], [1.5, -1.0], [0.25, 0.25]), 60, generator=seeded(3)
    )
    start = means([[0.9, 0.1], [0.2, 0.8]], [1.5, -1.0], [0.25, 0.25])
    found = F.fit(start, y.observations, free={"emission_bias": torch.tensor([[True], [False]])})
    table = found.summary().table
    assert found.order == (1, 0)
    assert list(table.index) == [("mode 2", "emission_bias[0]")]
    assert found.summary().durations[0][0] == pytest.approx(5.0)
    assert math.isnan(found.summary().durations[0][1])
    plain = F.fit(start, y.observations, standard_errors=False).summary()
    assert plain.table["std err"].isna().all()
    assert "Standard errors" not in str(plain)


def test_a_fit_that_did_not_converge_says_so(growth):
    model = F.switching_mean_variance(2)
    found = F.fit(model, growth, max_steps=1, throw=False)
    text = str(found.summary())
    assert "Converged:                          no" in text
    assert "max_steps reached" in text


def test_text_needs_no_pandas(found, monkeypatch):
    text = str(found.summary())
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert str(found.summary()) == text
    with pytest.raises(cm.InputError, match=r"\[pandas\]"):
        _ = found.summary().table
