"""The example that comes with the package: US inflation, calm and turbulent."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import torch

import cumulant as cm
from cumulant.filtering.model_files import example_files, read_model
from cumulant.filtering.series import read_series


def cumulant(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "cumulant", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120"},
    )


def test_it_runs_and_can_be_run_again(tmp_path):
    said = cumulant("filter", "--example", cwd=tmp_path).stdout
    folder = tmp_path / "cumulant-filter"
    names = {p.name for p in folder.iterdir()}
    assert names == {"filtered.csv", "filter.png", "us_inflation.csv", "us_inflation.toml"}
    assert "1972Q4 to 1982Q4" in said  # the Great Inflation
    assert "log-likelihood -412.534" in said  # as its TOML says
    first = (folder / "filtered.csv").read_bytes()
    line = next(x for x in said.splitlines() if "--model" in x)
    again = cumulant(*shlex.split(line)[1:], "--json", cwd=tmp_path)
    assert (folder / "filtered.csv").read_bytes() == first
    assert abs(json.loads(again.stdout)["log_likelihood"] + 412.534) < 1e-3


def test_changed_files_survive_another_look(tmp_path):
    mine = tmp_path / "my files" / "us_inflation.toml"
    mine.parent.mkdir()
    mine.write_text("mine")
    how = ("--json", "--no-picture", "-o", str(mine.parent))
    out = cumulant("filter", "--example", *how, cwd=tmp_path)
    assert "left as it is" in out.stderr
    assert mine.read_text() == "mine"
    again = shlex.split(json.loads(out.stdout)["again"])
    assert again[:2] == ["cumulant", "filter"]
    assert again[-1] == str(mine.parent)


def test_the_series_is_complete_but_for_its_first_quarter():
    series = read_series(example_files()[0])
    assert series.values.shape == (203, 1)
    assert (series.labels[0], series.labels[-1]) == ("1959Q1", "2009Q3")
    assert series.values.isnan().nonzero().tolist() == [[0, 0]]


def test_its_parameters_are_a_maximum():
    series, model = example_files()
    model, _ = read_model(model)
    y = read_series(series).values
    best = cm.filtering.filter(model, y).log_likelihood
    for name in ("dynamics_noise", "emission_noise"):
        for factor in ([1.3, 1], [1 / 1.3, 1], [1, 1.3], [1, 1 / 1.3]):
            scale = torch.tensor(factor, dtype=torch.float64)[:, None, None]
            other = model.replace(**{name: getattr(model, name) * scale})
            assert cm.filtering.filter(other, y).log_likelihood < best - 0.05
