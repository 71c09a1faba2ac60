"""`cumulant report` from end to end, small: parts are made, kept, taken up again, left out."""

from __future__ import annotations

import json
import math
import sys
from html import unescape

import pytest

from cumulant.cli import main
from cumulant.core.errors import InputError
from cumulant.core.journal import Journal
from cumulant.lab.bench import front, timing
from cumulant.lab.bench.timing import Row
from cumulant.lab.claims import select
from cumulant.lab.report import gathering

COMMAND = ["cumulant", "report", "--quick"]


@pytest.fixture
def few(monkeypatch):
    """Two claims and no benchmark: the rest has its own tests."""
    monkeypatch.setattr(gathering, "select", lambda: select(["T4", "T17"]))
    made = []

    def measure(*, rounds, quick, progress, notes):
        made.append(quick)
        line = gathering.front.FRONT[0]
        named = (line.shape, line.quantity, line.against)
        return [Row(*named, 2.0, 4.0, 0.5, math.inf)]

    monkeypatch.setattr(gathering.front, "run", measure)
    return made


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", [*COMMAND, *map(str, arguments)])
    try:
        main()
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def test_one_file_with_everything(few, monkeypatch, capsys, tmp_path):
    code, said, _ = run(monkeypatch, capsys, "-o", tmp_path / "made")
    assert code == 0
    page = tmp_path / "made" / "report.html"
    assert str(page) in said
    assert "2 claims: 1 holds with a correction, 1 does not hold in general." in said
    text = page.read_text()
    for part in ("T17", "Darwin", "turbulent", "all-MiniLM-L6-v2", "<math", "calculus"):
        assert part in text, part
    assert text.count("<svg") >= 2
    first = gathering.front.FRONT[0]  # the words of the README
    assert f"<td>{first.says}</td><td>{first.alternative}</td>" in unescape(text)
    assert few == [True]
    names = sorted(p.name for p in page.parent.iterdir())
    assert names == ["claims", "lens", "report.html"]


def test_an_interrupted_run_goes_on(few, monkeypatch, capsys, tmp_path):
    whole = gathering._series

    def interrupted(progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(gathering, "_series", interrupted)
    code, _, said = run(monkeypatch, capsys, "-o", tmp_path)
    assert code == 130
    assert said.splitlines()[-1].startswith("cumulant: interrupted; finished parts are kept in")
    assert not (tmp_path / "report.html").exists()
    kept = Journal(tmp_path / gathering.STATE, {})
    assert [name for name, _ in kept] == ["ledger", "lens"]
    again = []
    monkeypatch.setattr(gathering, "_series", whole)
    monkeypatch.setattr(gathering, "_ledger", lambda *given: again.append("ledger"))
    monkeypatch.setattr(gathering, "_lens", lambda *given: again.append("lens"))
    code, said, _ = run(monkeypatch, capsys, "-o", tmp_path)
    assert code == 0
    assert again == []
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / gathering.STATE).exists()


def test_what_cannot_be_made_is_noted(few, monkeypatch, capsys, tmp_path):
    def load():
        raise InputError("models are loaded by transformers, which is missing.")

    monkeypatch.setattr(gathering, "load", load)

    def skipped(*, rounds, quick, progress, notes):
        notes.append("The benchmark filtering was skipped: no filterpy")
        return []

    monkeypatch.setattr(gathering.front, "run", skipped)
    code, said, _ = run(monkeypatch, capsys, "-o", tmp_path)
    assert code == 0
    assert "The lens was skipped: models are loaded by transformers" in " ".join(said.split())
    page = (tmp_path / "report.html").read_text()
    assert "The lens was skipped" in page
    assert "no filterpy" in page
    assert 'id="benchmarks"' not in page


def test_a_folder_that_cannot_be(few, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("kept")
    code, _, said = run(monkeypatch, capsys, "-o", tmp_path / "file")
    assert code == 2
    assert said.count("\n") == 1
    assert "cannot make the folder" in said
    assert (tmp_path / "file").read_text() == "kept"


def test_damaged_work_is_done_again(few, monkeypatch, capsys, tmp_path):
    (tmp_path / gathering.STATE).write_text('{"about": 3')
    assert run(monkeypatch, capsys, "-o", tmp_path)[0] == 0


def test_benchmarks_say_why_they_are_missing(monkeypatch):
    def missing(name):
        raise ImportError("no filterpy")

    monkeypatch.setattr(front, "import_module", missing)
    notes: list[str] = []
    assert front.run(rounds=1, quick=True, notes=notes) == []
    assert "The benchmark filtering was skipped: no filterpy" in notes
    with pytest.raises(ImportError):
        front.run(rounds=1, quick=True)


def test_other_programs_are_seen_and_told(monkeypatch):
    """One processor that others kept busy for ten seconds, of ten that passed."""
    now = iter([(0.0, 0.0, 0.0), (10.0, 14.0, 4.0), (20.0, 24.0, 14.0)])
    monkeypatch.setattr(timing.Others, "_now", staticmethod(lambda: next(now)))
    others = timing.Others()
    assert others.processors == pytest.approx(1.0)
    monkeypatch.setattr(timing.Others, "_now", staticmethod(lambda: (10.0, 14.0, 4.0)))
    assert "Other programs kept 1.0 of" in others.note()
    monkeypatch.setattr(timing.Others, "_now", staticmethod(lambda: (10.0, 4.2, 4.0)))
    assert others.note() == ""
    monkeypatch.setattr(timing.Others, "_now", staticmethod(lambda: None))
    assert others.processors is None
    assert others.note() == ""


def test_the_front_page_measures_what_it_names():
    """Every row has a group, at its shape, with cases of these names."""
    for line in front.FRONT:
        groups = [g for g in front._GROUPS if (g.bench, g.shape) == (line.bench, line.shape)]
        assert groups or line.unit == "MB", line


def test_the_fastest_rounds_are_compared():
    seconds = {"ours": [3.0, 1.0, 2.0], "theirs": [9.0, 4.0, 5.0]}
    row = timing.fastest(seconds, "shape", "ours", "theirs")
    assert (row.amount, row.baseline, row.ratio) == (1000.0, 4000.0, 0.25)


def test_a_ratio_of_which_nothing_was_hoped_is_json():
    made = Row("8 x 8", "step", "torch", 2.0, 4.0, 0.5, math.inf)
    assert made.met
    assert json.loads(json.dumps(made.as_dict(), allow_nan=False))["at_most"] is None
