"""pandas in and out: the same numbers as tensors give, under the index that came in."""

from __future__ import annotations

import pickle
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

import cumulant as cm
from cumulant.filtering.model_files import Names
from switching import means, parameters, seeded

F = cm.filtering
D = torch.float64
CHAIN = means([[0.9, 0.1], [0.2, 0.8]], [1.5, -1.0], [0.25, 0.25])
STATES = F.SwitchingLinearGaussian(**parameters(2, 2, 2, 1))

INDEXES = {
    "datetime": pd.date_range("2001-01-31", periods=20, freq="ME", name="when"),
    "daily without a freq": pd.DatetimeIndex(pd.date_range("2001-01-01", periods=20).tolist()),
    "period": pd.period_range("1999Q3", periods=20, freq="Q"),
    "range": pd.RangeIndex(100, 140, 2),
    "text": pd.Index([f"week {k}" for k in range(20)]),
}


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(params=INDEXES)
def index(request):
    return INDEXES[request.param]


def series(index):
    y = F.sample(CHAIN, 20, generator=seeded(1)).observations[:, 0].numpy().copy()
    y[4] = np.nan
    return pd.Series(y, index=index, name="growth")


def table(index):
    y = F.sample(STATES, 20, generator=seeded(1)).observations.numpy().copy()
    y[4, 1] = y[7] = np.nan
    return pd.DataFrame(y, index=index, columns=["gdp", "jobs"])


def tensor(y):
    return torch.tensor(y.to_numpy(copy=True))


def test_a_series_is_filtered_under_its_index(index):
    y = series(index)
    post = F.filter(CHAIN, y)
    plain = F.filter(CHAIN, tensor(y)[:, None])
    assert torch.equal(post.mode_probabilities, plain.mode_probabilities)
    found = post.to_pandas(names=["expansion", "recession"])
    assert found.index.equals(index)
    assert list(found.columns) == [
        *("P(expansion)", "P(recession)"),
        *("growth predicted mean", "growth predicted sd", "log_likelihood"),
    ]
    assert np.array_equal(found["P(recession)"], plain.mode_probabilities[:, 1])
    assert np.array_equal(found["growth predicted mean"], plain.observation_mean[:, 0])
    sd = plain.observation_covariance[:, 0, 0].sqrt()
    assert np.array_equal(found["growth predicted sd"], sd)


def test_a_frame_is_filtered_and_smoothed_under_its_index(index):
    y = table(index)
    post = F.filter(STATES, y)
    plain = F.filter(STATES, tensor(y))
    assert torch.equal(post.mean, plain.mean)
    names = Names(["calm", "wild"], ["level", "slope"])
    found, smoothed = post.to_pandas(names), F.smooth(STATES, post).to_pandas(names)
    assert found.index.equals(index)
    assert smoothed.index.equals(index)
    later = F.smooth(STATES, plain)
    assert np.array_equal(found["slope mean"], plain.mean[:, 1])
    assert np.array_equal(smoothed["slope mean"], later.mean[:, 1])
    assert np.array_equal(smoothed["level sd"], later.covariance[:, 0, 0].sqrt())
    assert np.array_equal(smoothed["P(wild)"], later.mode_probabilities[:, 1])
    assert np.array_equal(found["jobs predicted mean"], plain.observation_mean[:, 1])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("datetime", pd.date_range("2002-09-30", periods=3, freq="ME")),
        ("daily without a freq", pd.date_range("2001-01-21", periods=3)),
        ("period", pd.period_range("2004Q3", periods=3, freq="Q")),
        ("range", pd.RangeIndex(140, 146, 2)),
        ("text", pd.RangeIndex(3)),
    ],
)
def test_forecasts_carry_dates(kind, expected):
    y = table(INDEXES[kind])
    found = F.forecast(F.filter(STATES, y), 3)
    assert found.to_pandas().index.equals(expected)
    again = F.forecast(F.filter(STATES, tensor(y)), 3)
    assert np.array_equal(found.to_pandas()["state 1 mean"], again.mean[:, 0])


def test_dates_without_a_pace_are_not_made_up():
    for dates in (["2020-01-01", "2020-01-02", "2020-01-09"], ["2020-01-01", "2020-01-02"]):
        y = table(INDEXES["range"]).iloc[: len(dates)].set_axis(pd.DatetimeIndex(dates))
        found = F.forecast(F.filter(STATES, y), 2)
        assert found.to_pandas().index.equals(pd.RangeIndex(2))


def test_updates_continue_the_index(index):
    y = table(index)
    post = F.filter(STATES, y.iloc[:-1])
    named = F.update(post, y.iloc[-1])
    assert named.to_pandas().index.equals(index)
    assert torch.allclose(named.mean, F.filter(STATES, y).mean)
    assert named.latest().to_pandas().index.equals(index[-1:])
    unnamed = F.update(post, tensor(y)[-1]).to_pandas()
    if isinstance(index, pd.DatetimeIndex | pd.PeriodIndex | pd.RangeIndex):
        assert unnamed.index.equals(index)
    else:  # what comes after "week 18" is not known
        assert unnamed.index.equals(pd.RangeIndex(20))


def test_a_fit_takes_pandas_and_gives_a_table(index):
    y = series(index)
    start = means([[0.9, 0.1], [0.2, 0.8]], [1.0, -1.0], [1.0, 1.0])
    free = ["emission_bias", "emission_noise"]
    found, plain = (F.fit(start, x, free=free) for x in (y, tensor(y)[:, None]))
    assert found.log_likelihood == plain.log_likelihood
    rows = found.to_pandas()
    assert len(rows) == 2 + 2
    row = rows.loc[("emission_bias", "1, 0")]
    assert row["estimate"] == float(found.model.emission_bias[1, 0])
    assert row["standard_error"] == float(found.standard_errors["emission_bias"][1, 0])
    bare = F.fit(start, y, free=free, standard_errors=False).to_pandas()
    assert bare["standard_error"].isna().all()
    assert set(bare.index.get_level_values("parameter")) == set(free)


def test_nullable_and_read_only_numbers():
    y = series(INDEXES["range"]).round()
    whole = y.astype("Int64")
    assert whole.isna().sum() == 1
    expected = F.filter(CHAIN, tensor(y)[:, None]).mode_probabilities
    assert torch.equal(F.filter(CHAIN, whole).mode_probabilities, expected)
    locked = y.to_numpy(copy=True)[:, None]
    locked.flags.writeable = False
    assert torch.equal(F.filter(CHAIN, locked).mode_probabilities, expected)
    before = y.copy()
    F.filter(CHAIN, y)
    pd.testing.assert_series_equal(y, before)


def test_counts_of_a_conjugate_model():
    rate = cm.Gamma(1.0, 0.5)
    model = F.SwitchingConjugate(
        transition=torch.tensor([[0.9, 0.1], [0.9, 0.1]], dtype=D),
        prior=rate,
        likelihood=cm.Poisson,
        dynamics=[None, F.Renew(rate)],
    )
    counts = pd.Series([2, 3, 1, 12], index=pd.period_range("2020", periods=4, freq="Y"))
    post = F.filter(model, counts)
    assert torch.equal(post.mean, F.filter(model, counts.to_frame()).mean)
    assert torch.equal(post.mean, F.filter(model, torch.tensor([2, 3, 1, 12])).mean)
    more = F.update(post, torch.tensor(3.0))
    assert more.to_pandas().index.equals(pd.period_range("2020", periods=5, freq="Y"))


def test_without_an_index_steps_are_counted():
    found = F.filter(CHAIN, torch.zeros(3, 1, dtype=D)).to_pandas()
    assert found.index.equals(pd.RangeIndex(3))
    assert list(found.columns[:3]) == ["P(mode 1)", "P(mode 2)", "observation 1 predicted mean"]
    again = pickle.loads(pickle.dumps(F.filter(CHAIN, series(INDEXES["period"]))))
    assert again.to_pandas().index.equals(INDEXES["period"])


def test_bad_input(monkeypatch):
    y = table(INDEXES["period"])
    with pytest.raises(cm.InputError, match="observations must have shape"):
        F.filter(CHAIN, y)
    with pytest.raises(cm.InputError, match="observations must hold numbers only"):
        F.filter(STATES, y.assign(jobs="many"))
    post = F.filter(STATES, y)
    with pytest.raises(cm.InputError, match="2 different names of modes are needed"):
        post.to_pandas(["calm"])
    batch = F.filter(STATES, torch.zeros(3, 4, 2, dtype=D))
    with pytest.raises(cm.InputError, match="one series makes a frame"):
        batch.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(cm.InputError, match=r"install .*\[pandas\]"):
        post.to_pandas()
