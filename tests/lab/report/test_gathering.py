"""`cumulant report` from end to end, small: parts are made, kept, taken up again, left out."""

from __future__ import annotations

import sys

import pytest

from cumulant.cli import main
from cumulant.core.errors import InputError
from cumulant.core.journal import Journal
from cumulant.lab.claims import select
from cumulant.lab.report import gathering

COMMAND = ["cumulant", "report", "--quick"]


@pytest.fixture
def few(monkeypatch):
    """Two claims and no benchmark: the rest has its own tests."""
    monkeypatch.setattr(gathering, "select", lambda: select(["T4", "T17"]))
    made = []

    def bench(name, progress):
        made.append(f"bench {name}")
        row = {"shape": "4 x 4", "quantity": "attention", "against": "SDPA", "unit": "ms"}
        return {"rows": [{"bench": name, **row, "amount": 2.0, "baseline": 4.0, "ratio": 0.5}]}

    monkeypatch.setattr(gathering, "_bench", bench)
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
    assert few == ["bench calculus"]
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
    monkeypatch.setattr(gathering, "_bench", lambda name, _: {"note": f"{name} is left out."})
    code, said, _ = run(monkeypatch, capsys, "-o", tmp_path)
    assert code == 0
    assert "The lens was skipped: models are loaded by transformers" in " ".join(said.split())
    page = (tmp_path / "report.html").read_text()
    assert "The lens was skipped" in page
    assert "calculus is left out." in page


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
    bench = gathering._bench
    monkeypatch.setattr(
        gathering, "import_module", lambda name: (_ for _ in ()).throw(ImportError("no filterpy"))
    )
    assert bench("filtering", lambda *told: None) == {
        "note": "The benchmark filtering was skipped: no filterpy"
    }
