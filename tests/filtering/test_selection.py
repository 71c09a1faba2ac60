"""How many regimes: criteria of statsmodels, and p-values by simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from statsmodels.datasets import macrodata
from statsmodels.tsa.api import MarkovRegression

import cumulant as cm
from switching import means, seeded

F = cm.filtering


def make(n):
    return F.switching_mean_variance(n, switching="mean")


def test_criteria_over_the_number_of_regimes_are_those_of_statsmodels():
    y = 100 * np.diff(np.log(macrodata.load_pandas().data["realgdp"].to_numpy()))
    found = F.compare_regimes(make, torch.tensor(y)[:, None], (1, 2))
    assert found.rows[0].found.log_likelihood == pytest.approx(
        stats.norm(y.mean(), y.std()).logpdf(y).sum(), abs=1e-6
    )
    np.random.seed(0)
    theirs = MarkovRegression(y, 2).fit(search_reps=5)
    row = found.table.loc[2]
    assert [row["AIC"], row["BIC"], row["HQIC"]] == pytest.approx(
        [theirs.aic, theirs.bic, theirs.hqic], abs=1e-3
    )
    ratio = 2 * (theirs.llf - found.rows[0].found.log_likelihood)
    assert row["ratio"] == pytest.approx(ratio, abs=1e-3)
    assert np.isnan(row["p"])
    assert found.best("bic").model.modes == found.best("aic").model.modes == 2
    text = str(found)
    assert "not chi-squared" in text
    assert f"{theirs.bic:.2f}" in text
    assert "<td>" in found._repr_html_()
    assert set(found.fits) == {1, 2}


@pytest.mark.parametrize("regimes", [1, 2])
def test_p_values_tell_one_regime_from_two(regimes):
    centers = [0.0, 4.0] if regimes == 2 else [0.0, 0.0]
    model = means([[0.9, 0.1], [0.1, 0.9]], centers, [1.0, 1.0])
    y = F.sample(model, 60, generator=seeded(5)).observations
    found = F.compare_regimes(make, y, (1, 2), draws=9, starts=2, max_steps=60)
    p = found.rows[1].p_value
    assert (p == pytest.approx(0.1)) if regimes == 2 else (p > 0.1)
    assert found.draws == 9


def test_a_vague_start_and_gaps_are_simulated_as_they_are():
    y = torch.randn(25, 1, generator=seeded(1)).double().cumsum(0)
    y[4] = torch.nan
    found = F.compare_regimes(
        lambda n: F.autoregression(1, regimes=n), y, (1, 2), draws=1, starts=1, max_steps=3
    )
    assert found.rows[1].p_value in (0.5, 1.0)


def test_bad_input():
    y = torch.zeros(9, 1).double()
    with pytest.raises(cm.InputError, match="two or more, rising"):
        F.compare_regimes(make, y, (2, 1))
    with pytest.raises(cm.InputError, match="draws"):
        F.compare_regimes(make, y, (1, 2), draws=-1)
