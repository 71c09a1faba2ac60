"""`cumulant claims` as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from command import cumulant
from cumulant.cli import main
from cumulant.core.journal import Journal


def run(*arguments):
    return cumulant("claims", *arguments)


def process(*arguments, env):
    return subprocess.run(
        [sys.executable, "-m", "cumulant", "claims", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=env,
    )


def test_json_alone_on_standard_output():
    out = run("--only", "T4,t1", "--quick", "--json")
    assert out.returncode == 0, out.stderr
    ledger = json.loads(out.stdout)
    assert [entry["id"] for entry in ledger["claims"]] == ["T1", "T4"]
    t4 = ledger["claims"][1]
    assert t4["verdict"] == "holds with a correction"
    assert t4["measured"]["drafted_gap"] > 1e-3 > t4["measured"]["corrected_gap"]


def test_people_see_a_verdict_a_finding_and_a_sum():
    out = run("--only", "T4", "--quick")
    assert "T4  holds with a correction" in out.stdout
    assert "quadrature" in out.stdout
    assert "1 claim: 1 holds with a correction." in out.stdout


def test_only_what_rests_on_one_kind_of_evidence():
    out = run("--only", "T4,T20", "--evidence", "simulation", "--quick", "--json")
    assert out.returncode == 0, out.stderr
    assert [(x["id"], x["evidence"]) for x in json.loads(out.stdout)["claims"]] == [
        ("T20", "simulation")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--evidence", "hearsay"], "one of identity, simulation, empirical, not 'hearsay'"),
        (
            ["--only", "T4", "--evidence", "empirical"],
            "none of the selected claims has empirical",
        ),
    ],
)
def test_evidence_that_there_is_not(arguments, said):
    out = run(*arguments)
    assert out.returncode == 2
    assert said in out.stderr
    assert out.stderr.count("\n") == 1


def test_unknown_claims_list_the_known():
    out = run("--only", "T99")
    assert out.returncode == 2
    assert out.stdout == ""
    assert out.stderr.count("\n") == 1
    assert "there is no claim 'T99'; the claims are T1, T2," in out.stderr
    assert "simclr" in out.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--only", " , "], "--only needs"), (["--only", ""], "--only needs")],
)
def test_empty_names(arguments, said):
    out = run(*arguments)
    assert out.returncode == 2
    assert said in out.stderr


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("kept")
    out = run("--only", "T4", "-o", str(tmp_path / "file" / "below"))
    assert out.returncode == 2
    assert "cannot make the folder" in out.stderr
    assert out.stderr.count("\n") == 1
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_is_filled(tmp_path):
    out = run("--only", "T4", "--quick", "-o", str(tmp_path / "made"))
    assert out.returncode == 0, out.stderr
    folder = tmp_path / "made"
    assert json.loads((folder / "claims.json").read_text())["complete"]
    assert "## T4" in (folder / "ledger.md").read_text()
    assert (folder / "figures" / "T4.svg").is_file()
    assert sorted(p.name for p in folder.iterdir()) == ["claims.json", "figures", "ledger.md"]


def _nobody_is_left(group):
    """Within a while: Python's own tracker of resources ends last."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_interrupted_run_keeps_what_was_finished(tmp_path, processes):
    command = [sys.executable, "-m", "cumulant", "claims", "--quick", "-o", str(tmp_path)]
    command += ["--processes", processes, "--evidence", "simulation"]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command, start_new_session=True, **pipes)
    partial = tmp_path / "claims.journal"
    deadline = time.monotonic() + 240
    while not partial.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in said.splitlines()[-1]
    assert "run the same command again to resume" in said.splitlines()[-1]
    assert _nobody_is_left(running.pid)
    first = next(iter(Journal(partial, {})))["id"]
    out = run("--quick", "--only", first, "-o", str(tmp_path))
    assert "resuming after 1 claim" in out.stderr
    assert out.returncode == 0


def test_a_departure_is_told_and_fails(monkeypatch, capsys):
    import cumulant as cm

    mean = cm.GaussianMixture.mean
    monkeypatch.setattr(cm.GaussianMixture, "mean", lambda h, eta: 1.001 * mean(h, eta))
    monkeypatch.setattr(sys, "argv", ["cumulant", "claims", "--only", "T4", "--quick"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert "T4 departs from its recorded verdict, holds with a correction" in said
    assert "corrected_gap" in said


def test_what_a_missing_extra_leaves_out(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('transformers', 'matplotlib'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
    )
    places = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    out = process("--only", "T29", "--quick", env=environment)
    assert out.returncode == 2
    assert "pip install '.[demo]'" in out.stderr
    assert out.stderr.count("\n") == 1
    both = process("--only", "T29,T4", "-o", str(tmp_path / "o"), "--json", env=environment)
    assert both.returncode == 0
    assert [x["id"] for x in json.loads(both.stdout)["claims"]] == ["T4", "T29"]
    assert "T29 not run" in both.stderr
    assert "no figures" in both.stderr


def test_each_reason_that_claims_were_not_run_is_told_once(monkeypatch, capsys):
    from cumulant.lab.claims import ledger

    gone = {"T31": ["transformers"], "T35": ["rxnmapper"], "T39": ["rxnmapper"]}
    monkeypatch.setattr(ledger, "lacking", lambda claim: gone.get(claim.id, []))
    monkeypatch.setattr(sys, "argv", ["cumulant", "claims", "--only", "T4,T31,T35,T39", "--quick"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert capsys.readouterr().err.splitlines() == [
        "cumulant: T31 not run: needs transformers: pip install '.[demo]'",
        "cumulant: T35, T39 not run: needs rxnmapper: pip install --no-deps 'rxnmapper<0.5'",
    ]
