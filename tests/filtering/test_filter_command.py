"""`cumulant filter` as a person runs it: its table against the library, and how it fails."""

from __future__ import annotations

import csv
import json
import math
import signal
import subprocess
import sys
import time

import pytest
import torch

import cumulant as cm
from cumulant.cli import filter_run as command
from cumulant.cli import main
from cumulant.filtering.model_files import read_model
from cumulant.filtering.series import read_series

MODEL = """
names = ["calm", "wild"]
states = ["level"]
transition = [[0.9, 0.1], [0.2, 0.8]]
initial = [0.5, 0.5]
dynamics = 1.0
dynamics_noise = [0.1, 2.0]
emission = 1.0
emission_noise = [1.0, 9.0]
initial_mean = 0.0
initial_covariance = 100.0
"""


@pytest.fixture
def files(tmp_path):
    """A series with gaps, the first row among them, and a model."""
    y = torch.randn(30, generator=torch.Generator().manual_seed(1)).cumsum(0).tolist()
    cells = ["" if k in (0, 1, 7) else f"{x:.4f}" for k, x in enumerate(y)]
    rows = "".join(f"2020-01-{k + 1:02d},{x}\n" for k, x in enumerate(cells))
    (tmp_path / "s.csv").write_text(f"date,rate\n{rows}")
    (tmp_path / "m.toml").write_text(MODEL)
    return tmp_path


@pytest.fixture
def cumulant(monkeypatch, capsys):
    """Run the command in this process: exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cumulant", "filter", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return run


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def column(rows, name):
    return torch.tensor([float(r[name]) if r[name] else math.nan for r in rows]).double()


@pytest.mark.parametrize("collapse", ["gpb2", "gpb1", "imm", 3])
def test_the_table_is_what_the_library_says(files, cumulant, collapse):
    out = files / "out"
    code, said, _ = cumulant(
        *(files / "s.csv", "--model", files / "m.toml", "-o", out, "--collapse", collapse),
        *("--forecast", 4, "--json", "--no-picture"),
    )
    assert code == 0
    assert not (out / "filter.png").exists()
    model, _ = read_model(files / "m.toml")
    y = read_series(files / "s.csv").values
    post = cm.filtering.filter(model, y, collapse=collapse)
    smoothed, future = cm.filtering.smooth(model, post), cm.filtering.forecast(post, 4)
    rows = rows_of(out / "filtered.csv")
    assert [r["forecast"] for r in rows] == ["0"] * 30 + ["1"] * 4
    dates = ["2020-01-30", "2020-01-31", "2020-02-01", "2020-02-02", "2020-02-03"]
    assert [r["label"] for r in rows[-5:]] == dates
    assert [r["step"] for r in rows] == [str(t + 1) for t in range(34)]

    def same(name, here, there):
        expected = torch.cat([here, there]).double()
        assert torch.allclose(column(rows, name), expected, atol=1e-6, equal_nan=True), name

    def sd(x):
        return x[:, 0, 0].sqrt()

    nothing = torch.full((4,), math.nan)
    same("rate", y[:, 0], nothing)
    same("log_likelihood", post.step_log_likelihood, nothing)
    for j, mode in enumerate(["calm", "wild"]):
        later = future.mode_probabilities[:, j]
        same(f"P({mode} | so far)", post.mode_probabilities[:, j], later)
        same(f"P({mode} | all)", smoothed.mode_probabilities[:, j], later)
    same("level filtered mean", post.mean[:, 0], future.mean[:, 0])
    same("level filtered sd", sd(post.covariance), sd(future.covariance))
    same("level smoothed mean", smoothed.mean[:, 0], future.mean[:, 0])
    same("level smoothed sd", sd(smoothed.covariance), sd(future.covariance))
    same("rate predicted mean", post.observation_mean[:, 0], future.observation_mean[:, 0])
    spread = sd(post.observation_covariance), sd(future.observation_covariance)
    same("rate predicted sd", *spread)
    report = json.loads(said)
    assert abs(report["log_likelihood"] - float(post.log_likelihood)) < 1e-9
    assert (report["steps"], report["observed"], report["collapse"]) == (30, 27, collapse)
    assert [round(m["expected_duration"], 9) for m in report["modes"]] == [10.0, 5.0]
    shares = smoothed.mode_probabilities.mean(0)
    assert all(abs(m["share"] - s) < 1e-9 for m, s in zip(report["modes"], shares, strict=True))
    assert sum(e["steps"] for m in report["modes"] for e in m["episodes"]) == 30


def test_exact_enumeration_of_a_short_series(files, cumulant):
    short = files / "short.csv"
    short.write_text("rate\n1\n2\nNA\n9\n")
    arguments = (short, "--model", files / "m.toml", "-o", files / "out", "--collapse", "exact")
    code, said, _ = cumulant(*arguments, "--json")
    assert code == 0
    model, _ = read_model(files / "m.toml")
    y = read_series(short).values
    exact = cm.filtering.filter(model, y, collapse="exact").log_likelihood
    assert abs(json.loads(said)["log_likelihood"] - float(exact)) < 1e-9


def test_a_model_without_a_state(files, cumulant):
    (files / "chain.toml").write_text(
        "transition = [[0.9, 0.1], [0.2, 0.8]]\ninitial = [0.5, 0.5]\n"
        "emission_bias = [-1.0, 1.0]\nemission_noise = 1.0\n"
    )
    code, said, _ = cumulant(files / "s.csv", "-m", files / "chain.toml", "-o", files, "--json")
    assert code == 0
    assert (files / "filter.png").stat().st_size > 10_000
    model, _ = read_model(files / "chain.toml")
    expected = cm.filtering.filter(model, read_series(files / "s.csv").values).log_likelihood
    assert abs(json.loads(said)["log_likelihood"] - float(expected)) < 1e-9


def test_two_observations_chosen_by_name(files, cumulant):
    (files / "two.csv").write_text("time,a,b,c\n0.0,1,2,3\n0.5,2,,4\n1.0,3,1,5\n")
    (files / "two.toml").write_text(
        "transition = 1\ninitial = 1\ndynamics = 1\ndynamics_noise = 1\n"
        "emission = [[1], [2]]\nemission_noise = [[1, 0], [0, 1]]\n"
        "initial_mean = 0\ninitial_covariance = 1\n"
    )
    arguments = (files / "two.csv", "-m", files / "two.toml", "-o", files / "out")
    code, said, _ = cumulant(*arguments, "--columns", "c, b")
    assert code == 0
    assert "c, b: 0.0 to 1.0" in said
    rows = rows_of(files / "out" / "filtered.csv")
    assert [r["label"] for r in rows] == ["0.0", "0.5", "1.0"]
    # the first step: prediction N(0, 2) of the state, observed as x + e and 2 x + e
    assert abs(float(rows[0]["c predicted sd"]) - 3**0.5) < 1e-9
    assert abs(float(rows[0]["b predicted sd"]) - 9**0.5) < 1e-9
    code, _, said = cumulant(*arguments)
    assert code == 2
    assert "the model observes 2 numbers at each step" in said
    assert "a, b, c. Choose with --columns" in said


def test_without_matplotlib_there_is_still_a_table(files, cumulant, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = (files / "s.csv", "--model", files / "m.toml", "-o", files / "out")
    code, _, warned = cumulant(*arguments, "--json")
    assert code == 0
    assert ".[plot]" in warned
    assert [p.name for p in (files / "out").iterdir()] == ["filtered.csv"]


def test_interrupted_it_keeps_what_it_has(files, cumulant, monkeypatch):
    original, seen = command.update, []

    def update(*arguments):
        seen.append(1)
        if len(seen) == 10:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(command, "update", update)
    out = files / "out"
    code, said, warned = cumulant(files / "s.csv", "--model", files / "m.toml", "-o", out)
    assert code == 130
    assert said == ""
    assert "the first 12 of 30 steps, filtered, are in" in warned
    rows = rows_of(out / "filtered.csv")
    assert len(rows) == 12
    assert not any("all" in name or "smoothed" in name for name in rows[0])
    model, _ = read_model(files / "m.toml")
    post = cm.filtering.filter(model, read_series(files / "s.csv").values)
    assert torch.allclose(column(rows, "level filtered mean"), post.mean[:12, 0], atol=1e-6)
    assert [p.name for p in out.iterdir()] == ["filtered.csv"]


def test_interrupted_while_smoothing_or_drawing(files, cumulant, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    arguments = (files / "s.csv", "--model", files / "m.toml", "-o", files / "out")
    monkeypatch.setattr(command, "picture", stop)
    code, _, warned = cumulant(*arguments)
    assert code == 130
    assert "the table is written, the picture is not" in warned
    assert "level smoothed mean" in rows_of(files / "out" / "filtered.csv")[0]
    monkeypatch.setattr(command, "smooth", stop)
    code, _, warned = cumulant(*arguments)
    assert code == 130
    assert "the first 30 of 30 steps" in warned
    monkeypatch.setattr(command, "read_model", stop)
    code, _, warned = cumulant(*arguments)
    assert code == 130
    assert "nothing was written" in warned


def test_interrupted_by_the_keyboard(files):
    long = files / "long.csv"
    long.write_text("rate\n" + "1\n2\n" * 100_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "cumulant", "filter", long, "-m", files / "m.toml"],
        cwd=files,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    began = time.monotonic()
    while not (files / "cumulant-filter").exists() and time.monotonic() - began < 60:
        time.sleep(0.2)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "of 200000 steps, filtered, are in" in said
    assert len(rows_of(files / "cumulant-filter" / "filtered.csv")) > 10


def test_bad_input_is_one_line_and_exit_2(files, cumulant):
    series, model = files / "s.csv", files / "m.toml"
    texts = {
        "text.csv": "a\n1\n2\nthree\n",
        "words.csv": "a\nx\ny\n",
        "ragged.csv": "a,b\n1,2\n3\n",
        "empty.csv": "",
        "header.csv": "a\n",
        "missing.csv": "t,a\n1,NA\n2,\n",
        "key.toml": MODEL + "noise = 1\n",
        "syntax.toml": MODEL + "dynamics_bias = [1,\n",
        "shape.toml": MODEL.replace("[1.0, 9.0]", "[1.0, 9.0, 3.0]"),
        "rows.toml": MODEL.replace("0.2, 0.8", "0.2, 0.7"),
        "inputs.toml": MODEL + "dynamics_input = [[1.0]]\n",
        "time.toml": MODEL.replace("[1.0, 9.0]", "[[[[1]], [[9]]], [[[2]], [[9]]]]"),
        "file": "",
    }
    for name, text in texts.items():
        (files / name).write_text(text)
    cases = [
        ([files / "nowhere.csv", "-m", model], "there is no file"),
        ([series, "-m", files / "nowhere.toml"], "there is no file"),
        ([files / "text.csv", "-m", model], "line 4, column 'a': 'three'"),
        ([files / "words.csv", "-m", model], "no column holds numbers"),
        ([files / "ragged.csv", "-m", model], "line 3 has 1 cell"),
        ([files / "empty.csv", "-m", model], "is empty"),
        ([files / "header.csv", "-m", model], "no rows"),
        ([files / "missing.csv", "-m", model], "no observation at all"),
        ([series, "-m", files / "key.toml"], "the keys are names"),
        ([series, "-m", files / "syntax.toml"], "line"),
        ([series, "-m", files / "shape.toml"], "emission_noise must be nested"),
        ([series, "-m", files / "rows.toml"], "rows of transition must sum to one; row 1"),
        ([series, "-m", files / "inputs.toml"], "takes inputs"),
        ([series, "-m", files / "time.toml"], "change over 2 steps, but 30"),
        ([series, "-m", model, "--columns", "x"], "no column 'x'"),
        ([series, "-m", model, "--columns", "date"], "column 'date': '2020-01-01'"),
        ([series, "-m", model, "--collapse", "gpb"], "collapse must be"),
        ([series, "-m", model, "--collapse", "-1"], "collapse must be"),
        ([series, "-m", model, "--collapse", "exact"], "1.07e+09 histories"),
        ([series, "-m", model, "--forecast", "-1"], "--forecast must be"),
        ([series, "-m", model, "-o", files / "file"], "cannot make the folder"),
        ([series, "-m", model, "-o", "/proc/nothing"], "cannot make the folder"),
        ([series], "--model (a TOML file) is missing"),
        ([], "--example"),
        ([series, "--example"], "leave out yours"),
    ]
    before = sorted(p.name for p in files.iterdir())
    for arguments, expected in cases:
        code, said, warned = cumulant(*arguments)
        assert (code, said) == (2, ""), arguments
        assert len(warned.strip().splitlines()) == 1, warned
        assert warned.startswith("cumulant: ")
        assert expected in warned
    assert sorted(p.name for p in files.iterdir()) == before


def test_a_file_that_cannot_be_written(files, cumulant):
    (files / "out" / "filtered.csv").mkdir(parents=True)
    code, _, warned = cumulant(files / "s.csv", "-m", files / "m.toml", "-o", files / "out")
    assert code == 2
    assert "cannot write" in warned
    assert len(warned.strip().splitlines()) == 1


def test_fitting_first(files, cumulant):
    """The fitted file is a model, as likely as the library's own fit."""
    out = files / "out"
    code, said, told = cumulant(
        *(files / "s.csv", "--model", files / "m.toml", "-o", out, "--fit", "--json"),
        "--no-picture",
    )
    assert code == 0
    assert "fitted, log-likelihood" in told
    fitted, names = read_model(out / "fitted.toml")
    assert names.modes == ["calm", "wild"]
    assert names.states == ["level"]
    start, _ = read_model(files / "m.toml")
    y = read_series(files / "s.csv").values
    before, after = (float(cm.filtering.filter(m, y).log_likelihood) for m in (start, fitted))
    assert after > before
    assert abs(json.loads(said)["log_likelihood"] - after) < 1e-6
    assert after == pytest.approx(cm.filtering.fit(start, y).log_likelihood, abs=1e-6)
