"""Recorded studies: pages, tables and verdicts follow from the recorded runs."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from cumulant.lab.studies.reading import known
from cumulant.lab.studies.recording import FOLDER, page, recorded
from cumulant.lab.studies.results import _plain

DOCS = Path(__file__).parents[3] / "docs" / "studies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def numbers(cell):
    """A cell's numbers; one seed has no interval."""
    cells = cell if isinstance(cell, list) else [cell]
    return [math.nan if x is None else x for x in cells]


@pytest.mark.parametrize("name", NAMES)
def test_page_table_and_verdict_follow_from_the_runs(name):
    results = recorded()[name]
    content = json.loads((FOLDER / f"{name}.json").read_text())
    again = _plain(results.as_dict())
    assert again["verdict"] == content["verdict"]
    assert [x["outcome"] for x in again["rules"]] == [x["outcome"] for x in content["rules"]]
    for mine, theirs in zip(again["table"], content["table"], strict=True):
        assert mine.keys() == theirs.keys()
        for column, x in theirs.items():
            if isinstance(x, str):
                assert mine[column] == x
            else:
                expected = pytest.approx(numbers(x), rel=1e-4, abs=1e-6, nan_ok=True)
                assert numbers(mine[column]) == expected
    assert (DOCS / f"{name}.md").read_text() == page(results)
    assert f"{name}.md" in (DOCS / "index.md").read_text()


def students(values):
    """Mean and 95 % interval by scipy."""
    if len(values) < 2:
        return values[0], -math.inf, math.inf
    found = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return sum(values) / len(values), found.low, found.high


@pytest.mark.parametrize("name", NAMES)
def test_intervals_follow_from_the_raw_numbers(name):
    """The rules' intervals again, from the JSON file and scipy alone."""
    content = json.loads((FOLDER / f"{name}.json").read_text())
    rules = {x["name"]: x for x in tomllib.loads(known()[name].read_text())["rules"]}

    def by_seed(rule, variant):
        rows = [x for x in content["runs"] if x["variant"] == variant and x["stage"] == "final"]
        return {x["seed"]: x["numbers"][rule["quantity"]] for x in rows}

    checked = 0
    for told in content["rules"]:
        rule = rules[told["name"]]
        if "ranks" in rule or rule["quantity"] == "max_rate":
            continue  # of the search; `test_runs.py` has them
        mine = by_seed(rule, rule["variant"])
        found = [students([*mine.values()])]
        if rivals := [*rule.get("below", ()), *rule.get("above", ())]:
            sign = 1 if "below" in rule else -1
            theirs = [by_seed(rule, rival) for rival in rivals]
            found = [students([sign * (x[k] - mine[k]) for k in mine]) for x in theirs]
        mean, low, high = min(found, key=lambda x: x[1])
        assert (told["mean"], told["low"], told["high"]) == pytest.approx(
            (mean, low, high), rel=1e-4, abs=1e-6
        )
        bound = rule.get("at_most", rule.get("at_least", rule.get("by", 0.0)))
        good, bad = low >= bound, high < bound
        if "at_most" in rule:
            good, bad = high <= bound, low > bound
        said = "passed" if good else "failed" if bad else "undecided"
        assert told["outcome"] == ("noted" if rule.get("form") == "noted" else said)
        checked += 1
    assert checked >= 2


# Quantity of a run, and the point of the curve that is the same measurement.
SAME = {
    "dot-or-cosine": {"norm": ("step", None, "norm")},
    "link-over-training": {
        "symmetry": ("step", None, "symmetry"),
        "null": ("step", None, "null"),
        "definiteness": ("step", None, "definiteness"),
    },
    "random-features": {"error_256": ("features", 256, "error")},
    "recall-capacity": {"capacity_16": ("dimension", 16, "capacity")},
}


@pytest.mark.parametrize("name", SAME)
def test_curves_are_of_the_recorded_runs(name):
    """What the picture is drawn from agrees with what the verdict is made of."""
    curves = pd.read_parquet(DOCS / f"{name}.parquet")
    for x in recorded()[name].runs:
        if x.job.stage == "tuning" or x.diverged is not None:
            continue
        mine = curves[(curves.variant == x.job.variant) & (curves.seed == x.job.seed)]
        mine = mine[mine.stage == "final"].pivot(index="step", columns="quantity", values="value")
        for quantity, (where, at, column) in SAME[name].items():
            row = mine.iloc[-1] if at is None else mine[mine[where] == at].iloc[0]
            assert row[column] == pytest.approx(x.numbers[quantity], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_curves_end_where_the_runs_end(name):
    """Every final run that did not diverge has a curve, and the seeds are the study's."""
    results = recorded()[name]
    curves = pd.read_parquet(DOCS / f"{name}.parquet")
    for variant in results.study.variants:
        final = [x for x in results.runs if x.job.variant == variant and x.job.stage == "final"]
        assert {x.job.seed for x in final} == set(results.study.seeds)
        drawn = curves[(curves.variant == variant) & (curves.stage == "final")]
        assert set(drawn.seed) == {x.job.seed for x in final if x.diverged is None}
