"""Runs of studies: reproducible, resumable bit for bit, and sound when they diverge."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cumulant as cm
from command import cumulant
from cumulant.core.journal import Journal
from cumulant.core.lock import locked
from cumulant.lab.studies import judging, language, running
from cumulant.lab.studies.conducting import conduct
from cumulant.lab.studies.features import Features
from cumulant.lab.studies.judging import interval, judge, quantities
from cumulant.lab.studies.reading import known, read
from cumulant.lab.studies.recall import Recall
from cumulant.lab.studies.results import Results, load, markdown, save, with_curves
from cumulant.lab.studies.running import Run, Stopped, run
from cumulant.lab.studies.study import Job, Judged, Study, Tuning
from cumulant.lab.studies.tasks import TASKS, measured, settings_of

SMALL = {"steps": 24, "every": 8, "batch": 4, "windows": 4, "width": 16, "heads": 2, "context": 16}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    words = np.random.default_rng(0).integers(0, 20, 4000)
    path.write_text(" ".join(f"word{k} and" for k in words))
    return str(path)


@pytest.fixture
def study(tmp_path, text):
    path = tmp_path / "mine.toml"
    sizes = "\n".join(f"{name} = {x}" for name, x in SMALL.items())
    path.write_text(
        f'title = "Mine"\nquestion = "Which?"\ntask = "language"\nminutes = 5\nseeds = [0, 1]\n'
        f'[settings]\ntext = "{text}"\n{sizes}\n'
        "[tuning]\nrates = [0.01, 0.03, 100.0]\nsteps = 8\n"
        '[variants]\nexp = {}\nuniform = { kernel = "uniform" }\n'
        '[[rules]]\nname = "ahead"\nsays = "exp is ahead"\nquantity = "bits"\nvariant = "exp"\n'
        'below = ["uniform"]\n'
    )
    return read(path)


def job(text, seed=0, **changed):
    settings = {**settings_of("language"), **SMALL, "text": text, **changed}
    return Job("language", "exp", "final", seed, 0.01, 1.0, settings)


def same(a: Run, b: Run) -> bool:
    return (a.numbers, a.curve, a.diverged) == (b.numbers, b.curve, b.diverged)


def test_a_seed_reproduces_and_another_differs(tmp_path, text):
    first = run(job(text), tmp_path / "a")
    assert same(first, run(job(text), tmp_path / "b"))
    assert not same(first, run(job(text, seed=1), tmp_path / "c"))


@pytest.mark.parametrize("after", [1, 9, 23])
def test_a_stopped_run_ends_bit_identical(tmp_path, text, after):
    whole = run(job(text, link=True, expansion=True), tmp_path / "whole")
    steps = iter(range(1, 100))
    with pytest.raises(Stopped):
        run(
            job(text, link=True, expansion=True),
            tmp_path / "halves",
            stop=lambda: next(steps) == after,
        )
    made: list[int] = []
    resumed = run(job(text, link=True, expansion=True), tmp_path / "halves", counted=made.append)
    assert made[0] == after  # it continued, and did not start again
    assert same(whole, resumed)


def test_other_settings_are_refused(tmp_path, text):
    run(job(text), tmp_path)
    with pytest.raises(cm.InputError, match="other settings"):
        run(job(text, layers=1), tmp_path)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_kill_loses_next_to_nothing(tmp_path, study, processes):
    """A process killed outright; what it did is resumed, and the end is that of one run."""
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "cumulant", "study", str(tmp_path / "mine.toml")]
    process = subprocess.Popen(
        [*command, "-o", str(folder), "--processes", str(processes)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if len(list((folder / "runs").glob("*.journal"))) >= 3:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    time.sleep(2.0)  # its workers notice within half a second
    resumed = conduct(study, folder / "runs")
    whole = conduct(study, tmp_path / "whole")
    assert all(same(a, b) for a, b in zip(resumed, whole, strict=True))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_stops_at_once_and_the_study_resumes(tmp_path, text, processes):
    """Ctrl-C reaches the command alone, as from a script; its processes stop in mid-run."""
    path = tmp_path / "long.toml"
    path.write_text(
        'title = "t"\nquestion = "q"\ntask = "language"\nminutes = 600\nseeds = [0, 1]\n'
        f'[settings]\ntext = "{text}"\nsteps = 200000\nevery = 100000\nbatch = 2\n'
        "width = 16\nheads = 2\ncontext = 16\nwindows = 4\n[variants]\nexp = {}\n"
    )
    command = [sys.executable, "-m", "cumulant", "study", str(path)]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "out"), "--processes", str(processes)],
        stderr=subprocess.PIPE,
        text=True,
    )
    runs = tmp_path / "out" / "runs"
    deadline = time.monotonic() + 120
    while len([*runs.glob("*.journal")]) < processes and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert "run the same command to resume" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    study = read(path)
    kept = [
        Journal(runs / f"{x.id}.journal", x.as_dict()).last
        for x in study.final_jobs("exp", 0.003, 1.0)
    ]
    assert all(x["step"] > 0 and x["result"] is None for x in kept[:processes])


def test_two_runs_in_one_folder_are_refused(tmp_path):
    arguments = ["recall-capacity", "--quick", "--processes", 1, "-o", tmp_path]
    with locked(tmp_path / "lock"):
        done = cumulant("study", *arguments)
    assert done.returncode == 2
    assert f"another run (process {os.getpid()} on" in done.stderr
    assert not (tmp_path / "results.json").exists()


def test_a_missing_package_is_told_before_the_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    done = cumulant("study", "recall-capacity", "--quick", "-o", tmp_path)
    assert done.returncode == 2
    assert "Parquet files need pyarrow; install it with" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_more_seeds_continue_a_finished_folder(tmp_path, study):
    before = conduct(study, tmp_path)
    after = conduct(replace(study, seeds=(0, 1, 2)), tmp_path)
    again = conduct(replace(study, seeds=(0, 1, 2)), tmp_path / "whole")
    assert all(same(a, b) for a, b in zip(after, again, strict=True))
    assert {x.id: x.seconds for x in before}.items() <= {x.id: x.seconds for x in after}.items()


def test_divergence_is_a_result(tmp_path, text):
    wild = replace(job(text, clip=0.0), rate=1e6)
    found = run(wild, tmp_path)
    assert found.diverged is not None
    symbols = language._encoded(text)[1]
    assert found.numbers == {"bits": math.log2(symbols)}


def test_a_spike_is_not_a_divergence(tmp_path, text, monkeypatch):
    original = language.Language.step
    monkeypatch.setattr(
        language.Language, "step", lambda self, n: 1e9 if n == 3 else original(self, n)
    )
    assert run(job(text), tmp_path / "spike").diverged is None
    monkeypatch.setattr(language.Language, "step", lambda self, n: math.nan)
    assert run(job(text), tmp_path / "nan").diverged == 1


def test_a_study_on_several_processes_is_that_of_one(tmp_path, study):
    alone = conduct(study, tmp_path / "one")
    several = conduct(study, tmp_path / "two", processes=2)
    assert all(same(a, b) for a, b in zip(alone, several, strict=True))
    rates = {x.job.rate for x in alone if x.job.stage == "final"}
    assert 100.0 not in rates  # the search saw that it diverges


def test_files_say_the_same(tmp_path, study):
    runs = conduct(study, tmp_path / "runs")
    results = Results(study, runs, {"command": "cumulant study mine.toml"})
    written = save(results, tmp_path)
    assert {p.name for p in written} == {
        *("results.json", "results.md", "curves.parquet", "curves.png", "tensorboard")
    }
    again = load(tmp_path / "results.json", study)
    assert markdown(again) == (tmp_path / "results.md").read_text()
    whole = with_curves(again, tmp_path / "curves.parquet")
    assert [x.curve for x in whole.runs] == [x.curve for x in runs]
    assert not any(x.curve for x in again.runs)
    curves = pd.read_parquet(tmp_path / "curves.parquet")
    bits = curves[(curves.quantity == "bits") & (curves.stage == "final") & (curves.step == 24)]
    assert len(bits) == 4
    first = next(x for x in runs if x.job.stage == "final")
    board = EventAccumulator(str(tmp_path / "tensorboard" / first.id)).Reload()
    assert [(x.step, x.value) for x in board.Scalars("bits")] == [
        (point["step"], pytest.approx(point["bits"])) for point in first.curve
    ]
    assert json.loads((tmp_path / "results.json").read_text())["verdict"]


def test_intervals_are_students():
    x = [0.3, -0.1, 0.7, 0.4]
    found, truth = interval(x), stats.ttest_1samp(x, 0.0).confidence_interval(0.95)
    assert found.low == pytest.approx(truth.low)
    assert found.high == pytest.approx(truth.high)
    assert interval([1.0]).half == math.inf


def made(study, values):
    """Final runs with these bits by variant and seed."""
    return [
        Run(Job("language", variant, "final", seed, 0.01, 1.0, {}), {"bits": x})
        for variant, row in values.items()
        for seed, x in enumerate(row)
    ]


@pytest.mark.parametrize(
    ("exp", "outcome"),
    [
        ([1.0, 1.1, 1.2], "passed"),
        ([3.0, 3.1, 3.2], "failed"),
        ([1.0, 3.0, 2.0], "undecided"),
        ([2.0, 2.11, 2.21], "failed"),  # a tie, as when all diverged: nobody is ahead
    ],
)
def test_a_rule_passes_fails_or_waits(study, exp, outcome):
    runs = made(study, {"exp": exp, "uniform": [2.0, 2.11, 2.21]})
    judged = judge(study, quantities(study, runs), study.rules[0])
    assert judged.measured.outcome == outcome
    difference = np.array([2.0, 2.11, 2.21]) - exp
    truth = stats.ttest_1samp(difference, 0.0).confidence_interval(0.95)
    assert judged.interval.low == pytest.approx(truth.low)


def test_a_page_tells_of_divergences_even_without_a_search(study):
    alone = replace(study, tuning=Tuning())
    fine = made(study, {"exp": [1.0, 1.1], "uniform": [2.0, 2.1]})
    assert "diverged" not in markdown(Results(alone, fine, {}))
    lost = [replace(fine[0], diverged=3), *fine[1:]]
    rows = [x.split(" | ") for x in markdown(Results(alone, lost, {})).splitlines()]
    assert next(x for x in rows if x[0] == "| exp")[2] == "1 of 2 |"


def test_bounds_ranks_and_single_seeds(study):
    found = {"bits": {"exp": {0: 1.0, 1: 1.1, 2: 1.2}}}
    low = Judged("a", "s", "bits", "exp", at_least=0.5)
    high = Judged("b", "s", "bits", "exp", at_most=0.5)
    assert judge(study, found, low).measured.outcome == "passed"
    assert judge(study, found, high).measured.outcome == "failed"
    alone = {"bits": {"exp": {0: 1.0}}}
    assert judge(study, alone, low).measured.outcome == "undecided"
    three = replace(study, variants={"a": {}, "b": {}, "c": {}})
    ranked = {
        "bits": {"a": {0: 1.0, 1: 1.0}, "b": {0: 2.0, 1: 2.0}, "c": {0: 3.0, 1: 3.0}},
        "effective": {"a": {0: 9.0}, "b": {0: 5.0}, "c": {0: 4.0}},
    }
    rule = Judged("r", "s", "bits", ranks="effective", at_most=-0.5)
    assert judge(three, ranked, rule).interval.mean == pytest.approx(-1.0)


def test_the_largest_stable_rate(study):
    def searched(rate, diverged):
        where = Job("language", "exp", "tuning", 100, rate, 1.0, {})
        return Run(where, {"bits": 1.0}, [], diverged)

    runs = [searched(0.01, None), searched(0.03, 5), searched(100.0, None)]
    found = judging.quantities(study, runs)
    assert found["max_rate"]["exp"][100] == pytest.approx(-2.0)
    assert found["diverged"]["exp"][100] == pytest.approx(1 / 3)


TINY = {
    "language": {**SMALL, "context": 24, "link": True, "expansion": True},
    "contrast": {"steps": 2, "every": 1, "batch": 8},
    "recall": {"dims": [4, 8, 12, 16], "most": 64, "queries": 16},
    "features": {"counts": [4, 8], "repeats": 2},
}


@pytest.mark.parametrize("task", TASKS)
def test_rules_may_name_what_is_measured(task, tmp_path, text):
    """The quantities that a file is checked against are those of a run."""
    settings = {**settings_of(task), **TINY[task]}
    settings |= {"text": text} if task == "language" else {}
    made = Job(task, "a", "final", 0, 0.01, 1.0, settings)
    study = Study("s", "t", "q", task, 1.0, (0,), settings, {"a": {}})
    assert {*run(made, tmp_path).numbers} == {*measured(study)}


def test_a_batch_always_hides_a_character(text):
    settings = job(text, causal=False, batch=1, context=2).settings
    work = language.Language(settings, seed=0, rate=0.01, beta=1.0)
    assert all(math.isfinite(work.step(n)) for n in range(20))


def test_a_context_longer_than_the_text_is_refused(text):
    with pytest.raises(cm.InputError, match="context = 5000 is too long for the text"):
        language.Language(job(text, context=5000).settings, seed=0, rate=0.01, beta=1.0)


def test_symmetry_of_matrices_that_are_known():
    S = torch.randn(5, 5)
    assert language._symmetry(S + S.mT) == pytest.approx(1.0)
    assert language._symmetry(S - S.mT) == pytest.approx(-1.0)


def test_statistics_are_those_of_attend(text):
    work = language.Language(job(text).settings, seed=0, rate=0.01, beta=2.0)
    told = work._attention()
    entropies = []
    with torch.no_grad():
        for attention, x in work._inputs():
            q, k, _ = attention.projected(x)
            entropies.append(cm.attend(q * 2.0, k, is_causal=True).entropy[..., 8:].mean())
    assert told["entropy"] == pytest.approx(float(sum(entropies) / len(entropies)), rel=1e-4)


def test_recall_of_a_kernel_that_is_known():
    """Exponential attention at zero temperature is the nearest pattern; uniform recalls none."""
    settings = {**settings_of("recall"), "dims": [16], "most": 64, "queries": 64}
    sharp = Recall({**settings, "betas": [50.0]}, seed=0, rate=0.0, beta=1.0)
    flat = Recall({**settings, "kernel": "uniform"}, seed=0, rate=0.0, beta=1.0)
    assert sharp._right(16, 8, 50.0) > 0.98
    assert flat._right(16, 32, 1.0) < 0.65
    sharp.step(0), flat.step(0)
    assert sharp.found[0][1] > 3 * flat.found[0][1]


def test_random_features_have_the_variance_that_is_known():
    settings = {**settings_of("features"), "counts": [256], "repeats": 64, "product": 0.5}
    work = Features(settings, seed=0, rate=0.0, beta=1.0)
    work.step(0)
    found = work.measure()
    assert found["kernel"] == pytest.approx(found["predicted"], rel=0.15)


@pytest.mark.parametrize("name", known())
def test_quick_studies_run(name, tmp_path):
    """Every study that comes along: all its variants, a line for each rule, and a page."""
    study = read(name).quickly()
    results = Results(study, conduct(study, tmp_path), {"quick": True})
    content = results.as_dict()
    assert [row["variant"] for row in content["table"]] == [*study.variants]
    assert [x["name"] for x in content["rules"]] == [rule.name for rule in study.rules]
    assert "it shows the machinery and decides nothing" in markdown(results)


@pytest.mark.parametrize("name", ["random-features", "recall-capacity"])
def test_the_command_runs_a_study(name, tmp_path):
    arguments = ["--quick", "--processes", 1, "--json", "-o", tmp_path / "out"]
    done = cumulant("study", name, *arguments)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert content["quick"] is True
    assert len(content["table"]) == len(read(name).variants)
    assert (tmp_path / "out/results.md").is_file()


def test_the_command_lists_and_refuses(tmp_path):
    listed = cumulant("study", "--list", "--json")
    assert "why-exponential" in [x["name"] for x in json.loads(listed.stdout)]
    assert "recall-capacity" in cumulant("study", "--list").stdout
    for arguments, says in [
        (["why-exponential", "--only", "softmax"], "the variants are exp, cosine"),
        (["recall-capacity", "--text", "x.txt"], "reads no text"),
        (
            ["why-exponential", "--quick", "--text", str(tmp_path / "no.txt")],
            "cannot read the text",
        ),
        ([], "cumulant study --list"),
        (["why-exponential", "--minutes", "-1"], "must be positive"),
        (["why-exponential", "--only", ","], "--only names no variant; the variants are exp"),
        (["recall-capacity", "--quick", "-o", "/dev/null/x"], "cannot make the folder /dev/null"),
    ]:
        done = cumulant("study", *arguments)
        assert done.returncode == 2
        assert says in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_damaged_journal_starts_again(tmp_path, text):
    made = run(job(text), tmp_path)
    path = tmp_path / f"{made.id}.journal"
    path.write_bytes(path.read_bytes()[:-5])
    assert len(Journal(path, job(text).as_dict())) == 0
    assert same(made, run(job(text), tmp_path))
    assert running.finished(job(text), tmp_path) is not None
