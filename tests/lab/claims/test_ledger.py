"""Verdicts follow from numbers; runs repeat, survive interruption, and say what they lack."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from cumulant.core.errors import InputError
from cumulant.lab.claims import (
    VERDICTS,
    Claim,
    Evidence,
    Picture,
    Trial,
    claims,
    ledger,
    record,
    run,
    select,
    verdict,
)
from cumulant.lab.claims.claim import (
    CORRECTED,
    FAILS,
    HOLDS,
    OPEN,
    at_least,
    at_most,
    noted,
)
from cumulant.lab.claims.record import LEDGER, PARTIAL, Keeper, markdown, tally

GOOD, BAD = (at_most(name, value, 0.5, "x") for name, value in (("good", 0.1), ("bad", 0.9)))
DOUBT = at_most("doubt", 0.9, 0.5, "x", refuted=2.0)


def as_form(number, form):
    return dataclasses.replace(number, form=form, name=f"{form}_{number.name}")


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([GOOD], HOLDS),
        ([BAD], FAILS),
        ([GOOD, BAD], FAILS),
        ([BAD, as_form(GOOD, "correction")], CORRECTED),
        ([GOOD, as_form(GOOD, "correction")], HOLDS),
        ([BAD, as_form(GOOD, "correction"), as_form(BAD, "correction")], FAILS),
        ([GOOD, as_form(BAD, "correction")], FAILS),
        ([DOUBT], OPEN),
        ([GOOD, DOUBT], OPEN),
        ([BAD, as_form(DOUBT, "correction")], OPEN),
        ([GOOD, as_form(BAD, "control")], OPEN),
        ([BAD, as_form(GOOD, "control")], FAILS),
        ([noted("n", 3.0, "x")], OPEN),
        ([], OPEN),
        ([as_form(GOOD, "correction")], OPEN),
        ([at_most("x", math.nan, 1.0, "x"), as_form(GOOD, "correction")], OPEN),
        ([BAD, as_form(at_most("x", math.inf, 1.0, "x"), "correction")], OPEN),
    ],
)
def test_verdict_follows_from_the_numbers(numbers, expected):
    assert verdict(numbers) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(value):
    assert at_most("x", value, 1.0, "x", refuted=9.0).outcome == "failed"
    assert at_least("x", value, 1.0, "x", refuted=-9.0).outcome == "failed"


def test_bounds_from_both_sides():
    assert [at_most("x", v, 1.0, "x", refuted=2.0).outcome for v in (1.0, 1.5, 2.0)] == [
        *("passed", "undecided", "failed")
    ]
    assert [at_least("x", v, 1.0, "x", refuted=0.5).outcome for v in (1.0, 0.7, 0.5)] == [
        *("passed", "undecided", "failed")
    ]
    assert at_least("x", -1.0, 0.0, "x").outcome == "failed"


def test_names_are_found_as_people_write_them():
    assert [c.id for c in select(["t4", " T04 ", "T4"])] == ["T4"]
    assert [c.id for c in select(["T4", "T1"])] == ["T1", "T4"]
    with pytest.raises(InputError, match=r"no claim 'T34'; the claims are T1, T2, .*T33, "):
        select(["T34"])
    for name in ("", "T²", "T4²", "T" + "4" * 5000, "T-4"):
        with pytest.raises(InputError, match="there is no claim"):
            select([name])


def fake(name="T0", **changes):
    def experiment(trial: Trial) -> Evidence:
        return Evidence([at_most("draw", trial.normal(1).abs().item(), 9.0, "x")], "found")

    about = {"title": "t", "statement": "s", "source": "o", "formula": "x", "recorded": HOLDS}
    return Claim(id=name, **{**about, "experiment": experiment, **changes})


def test_a_seed_repeats_and_claims_do_not_disturb_each_other():
    one, two = fake("a"), fake("b")
    value = run(one, seed=3).numbers[0].value
    run(two, seed=3)
    assert run(one, seed=3).numbers[0].value == value
    assert run(one, seed=4).numbers[0].value != value
    assert run(two, seed=3).numbers[0].value != value


def test_a_crash_is_an_entry_that_departs():
    def experiment(trial):
        raise ZeroDivisionError("one\ntwo")

    entry = run(fake(experiment=experiment, recorded=OPEN))
    assert (entry.verdict, entry.crash, entry.departs) == (OPEN, "ZeroDivisionError: one", True)


def test_a_failed_control_departs_even_from_an_open_verdict():
    evidence = Evidence([as_form(BAD, "control"), as_form(DOUBT, "statement")], "found")
    entry = run(fake(experiment=lambda trial: evidence, recorded=OPEN))
    assert entry.verdict == OPEN
    assert entry.departs


def test_a_missing_package_is_named_and_departs_from_nothing():
    entry = run(fake(needs=("no_such_package",)))
    assert "no_such_package" in entry.not_run
    assert "pip install" in entry.not_run
    assert not entry.departs


def test_a_ledger_in_a_folder_goes_on_after_an_interruption(tmp_path):
    calls = []

    def counting(trial):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        picture = Picture(lambda figure: figure.subplots().plot([1, 2]), "a line")
        return Evidence([GOOD], "found", picture)

    chosen = [fake(name, experiment=counting) for name in ("a", "b", "c")]
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    keeper = Keeper(chosen, **settings)
    keeper.run(chosen[0])
    with pytest.raises(KeyboardInterrupt):
        keeper.run(chosen[1])
    assert not (tmp_path / LEDGER).exists()
    again = Keeper(chosen, **settings)
    assert list(again.rows) == ["a"]
    rows = [again.run(claim) for claim in chosen]
    assert len(calls) == 4  # a, b interrupted, b, c
    ledger = again.finish()
    assert json.loads((tmp_path / LEDGER).read_text()) == ledger
    assert ledger["claims"] == rows
    assert ledger["complete"]
    assert not (tmp_path / PARTIAL).exists()
    assert "<svg" in (tmp_path / "figures" / "c.svg").read_text()
    assert Keeper(chosen, **settings).rows == {}  # finished: the next run begins anew


@pytest.mark.parametrize("change", [{"seed": 1}, {"quick": False}, {"version": "2"}])
def test_other_settings_begin_anew(tmp_path, change):
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    chosen = [fake("a"), fake("b")]
    Keeper(chosen, **settings).run(chosen[0])
    assert list(Keeper(chosen, **settings).rows) == ["a"]
    assert Keeper(chosen, **{**settings, **change}).rows == {}


@pytest.mark.parametrize("content", ["", "{", "cut", "flipped"])
def test_damaged_work_is_done_again(tmp_path, content, caplog):
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    chosen = [fake("a"), fake("b")]
    straight = [Keeper(chosen, **settings).run(claim) for claim in chosen]
    whole = (tmp_path / PARTIAL).read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 2]) + whole[-8:]
    damaged = {"cut": whole[:-9], "flipped": flipped}.get(content, content.encode())
    (tmp_path / PARTIAL).write_bytes(damaged)
    again = Keeper(chosen, **settings)
    assert list(again.rows) == (["a"] if content in ("cut", "flipped") else [])
    assert ("claims.journal is damaged" in caplog.text) == (content in ("{", "flipped"))
    for claim, row in zip(chosen, straight, strict=True):
        assert again.run(claim)["measured"] == row["measured"]
    assert list(Keeper(chosen, **settings).rows) == ["a", "b"]


def test_two_runs_in_one_folder(tmp_path):
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    refused = pytest.raises(InputError, match=r"another run \(process \d+ on .* is writing into")
    with record.keeper([fake("a")], **settings) as keeper:
        with refused, record.keeper([fake("a")], **settings):
            pass
        keeper.run(keeper.claims[0])
        keeper.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["claims.json", "figures", "ledger.md"]


def test_a_picture_that_fails_is_a_crash(tmp_path):
    def draw(figure):
        raise ValueError("no ink")

    claim = fake(experiment=lambda trial: Evidence([GOOD], "found", Picture(draw, "c")))
    keeper = Keeper([claim], seed=0, quick=True, folder=tmp_path, version="1")
    row = keeper.run(claim)
    assert row["crash"] == "picture: ValueError: no ink"
    assert row["departs"]


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    claim = fake(experiment=lambda trial: Evidence([at_most("x", math.nan, 1.0, "x")], "found"))
    keeper = Keeper([claim], seed=0, quick=True, folder=tmp_path, version="1")
    keeper.run(claim)
    ledger = keeper.finish()
    assert ledger["claims"][0]["measured"] == {"x": None}
    assert ledger["claims"][0]["verdict"] == OPEN
    assert ledger["claims"][0]["departs"]
    assert "not finite" in markdown(ledger)


def test_errors_that_are_not_finite_are_null_too(tmp_path):
    number = at_most("x", math.nan, 1.0, "x", error=math.nan, refuted=math.inf)
    claim = fake(experiment=lambda trial: Evidence([number], "found"))
    keeper = Keeper([claim], seed=0, quick=True, folder=tmp_path, version="1")
    keeper.run(claim)
    assert json.loads(json.dumps(keeper.finish(), allow_nan=False))["claims"][0]["departs"]


def test_what_crashed_or_lacked_something_is_tried_again(tmp_path):
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    chosen = [fake("a", needs=("no_such_package",)), fake("b", experiment=None), fake("c")]
    keeper = Keeper(chosen, **settings)
    rows = [keeper.run(claim) for claim in chosen]
    assert rows[0]["not_run"]
    assert rows[1]["crash"]
    assert tally(rows) == "1 holds, 1 crashed, 1 was not run"
    assert list(Keeper(chosen, **settings).rows) == ["c"]


def test_another_state_of_the_library_begins_anew(tmp_path, monkeypatch):
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    Keeper([fake("a")], **settings).run(fake("a"))
    monkeypatch.setattr(record, "sources", lambda: "other")
    assert Keeper([fake("a")], **settings).rows == {}


def test_the_state_of_the_library_is_all_of_its_sources(tmp_path, monkeypatch):
    """A changed kernel must not leave measured claims standing."""
    kernel = tmp_path / "cumulant" / "kernels" / "tiles.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("old")
    monkeypatch.setattr(ledger.cumulant, "__file__", str(tmp_path / "cumulant" / "__init__.py"))
    before = ledger.sources.__wrapped__()
    kernel.write_text("new")
    assert ledger.sources.__wrapped__() != before


def test_a_run_of_some_claims_leaves_an_interrupted_one_alone(tmp_path):
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    chosen = [fake("a"), fake("b")]
    Keeper(chosen, **settings).run(chosen[0])
    other = Keeper([fake("c")], **settings)
    other.run(other.claims[0])
    assert [row["id"] for row in other.finish()["claims"]] == ["c"]
    assert list(Keeper(chosen, **settings).rows) == ["a"]


def test_the_callers_settings_do_not_matter():
    claim = claims()["T13"]
    plain = run(claim, quick=True).as_dict()["measured"]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            assert run(claim, quick=True).as_dict()["measured"] == plain
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_tally():
    rows = [{"verdict": v} for v in (HOLDS, HOLDS, CORRECTED, FAILS, OPEN, OPEN)]
    assert tally(rows) == (
        "2 hold, 1 holds with a correction, 1 does not hold in general, 2 are open"
    )
    assert tally([]) == ""


def test_every_claim_of_the_theory_and_every_system_is_there():
    known = claims()
    assert [name for name in known if name[0] == "T"] == [f"T{i}" for i in range(1, 34)]
    assert set(VERDICTS) == {HOLDS, CORRECTED, FAILS, OPEN}
    told = " | ".join(
        [x for claim in known.values() for x in (claim.id, claim.title, *claim.systems)]
    ).lower()
    for system in (
        *("exponential famil", "laplace", "simclr", "clip", "word2vec", "nce", "turing"),
        *("residual", "equilibrium", "lstm", "modern hopfield", "classical hopfield"),
        *("maximum entropy", "adaboost", "free energy", "gpb1", "gpb2", "imm", "gibbs"),
        *("boltzmann", "random walk", "spins", "monotone", "link conjecture"),
    ):
        assert system in told, system
