"""Recorded studies: pages, tables and verdicts follow from the recorded runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

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
