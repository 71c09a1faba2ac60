"""Every claim, run small: it comes to its recorded verdict, and can be shown on a page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from latex2mathml.converter import convert

from cumulant.figures import as_svg
from cumulant.lab.claims import claims, run

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("claim", claims().values(), ids=lambda c: c.id)
def test_entry(claim):
    entry = run(claim, quick=True)
    assert entry.crash is None
    assert entry.not_run is None
    failed = [x for x in entry.numbers if x.outcome == "failed"]
    assert entry.verdict == claim.recorded, failed
    assert not entry.departs
    names = [x.name for x in entry.numbers]
    assert len(set(names)) == len(names) >= 2
    assert all(math.isfinite(x.value) and x.rule.says for x in entry.numbers)
    if claim.recorded in ("open", "does not hold in general"):
        assert any(x.form == "control" for x in entry.numbers)
    if claim.recorded == "holds with a correction":
        assert claim.correction
    assert entry.finding
    assert all("NaN" not in str(x) for x in entry.as_dict().values())
    if entry.picture is not None:
        drawing = as_svg(entry.picture.draw, entry.picture.size, claim.id)
        assert drawing == as_svg(entry.picture.draw, entry.picture.size, claim.id)
        assert drawing.count("<path") > 5
        assert len(drawing) < 400_000
        assert len(entry.picture.caption.split()) > 5


@pytest.mark.parametrize("claim", claims().values(), ids=lambda c: c.id)
def test_entry_can_be_shown(claim):
    assert "<math" in convert(claim.formula, display="block")
    assert "merror" not in convert(claim.formula, display="block")
    assert claim.statement.rstrip(")").endswith(".")
    assert claim.source
    for path in claim.tests:
        assert (ROOT / path).is_file(), path
    assert claim.tests or claim.id[0] != "T"
    assert claim.bounds or claim.evidence == "identity"
    assert claim.bounds or all(map(of_rounding, claim.rules.values()))


def of_rounding(rule):
    """Whether a bound leaves room for rounding, quadrature or a solver's tolerance alone."""
    bound = rule.low if rule.high is None else rule.high
    return bound is None or min(abs(bound), abs(bound - 1)) <= 1e-3


@pytest.mark.parametrize("name", ["T1", "T14", "T19", "T24", "T33"])
def test_the_same_seed_finds_the_same_numbers(name):
    first, second, other = (
        run(claims()[name], seed=seed, quick=True).as_dict()["measured"] for seed in (5, 5, 6)
    )
    assert first == second
    assert first != other
