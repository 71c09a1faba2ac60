"""`cumulant doctor` as a person runs it."""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

import pytest

import cumulant as cm
from cumulant.cli import main

MODULE = """
import torch
from torch import nn

def smooth(x, y):
    return (x @ y).sin()

def example():
    return nn.LayerNorm(5), torch.randn(2, 5)

def nothing():
    return 3

def corner():
    return torch.abs, torch.zeros(3)

def broken():
    raise RuntimeError("no such file")
"""


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cumulant", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())

    return run


def test_installation(doctor):
    out = doctor("--json")
    assert out.returncode == 0
    found = json.loads(out.stdout)
    assert found["versions"]["cumulant"] == cm.__version__
    assert "torch" in found["versions"]
    assert "torch" in doctor().stdout


def test_a_right_function(doctor):
    out = doctor("--derivatives", "mine:smooth", "--shape", "2,3", "--shape", "3,4", "--json")
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    assert report["ok"]
    assert [row["word"] for row in report["rows"]] == ["F", "R", "FF", "FR", "RF", "RR"]


def test_a_wrong_function_is_exit_code_1(doctor):
    out = doctor("--derivatives", "mine:example")
    assert out.returncode == 1
    assert "torch.nn.functional.layer_norm: FF RF wrong" in out.stdout
    assert "doctor.py" not in out.stdout  # the place is in the model, not in the command


def test_reasons_are_printed(doctor):
    out = doctor("--derivatives", "mine:corner")
    assert out.returncode == 1
    assert "F R FF FR RF RR kink: one-sided derivatives of order 1 differ" in out.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--derivatives", "mine"], "module:function"),
        (["--derivatives", "missing:f"], "missing"),
        (["--derivatives", "mine:missing"], "missing"),
        (["--derivatives", "mine.py:smooth"], "without .py"),
        (["--derivatives", "mine:smooth"], "--shape"),
        (["--derivatives", "mine:nothing"], "(f, inputs)"),
        (["--derivatives", "mine:broken"], "no such file"),
        (["--derivatives", "mine:smooth", "--shape", "2,x"], "2,x"),
        (["--derivatives", "mine:smooth", "--shape", "2,3", "--order", "9"], "order"),
        (["--shape", "2"], "--derivatives"),
        (["--output", "page.md"], "--derivatives torch"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(doctor, arguments, message):
    out = doctor(*arguments)
    assert out.returncode == 2
    assert len(out.stderr.strip().splitlines()) == 1
    assert message in out.stderr


def test_a_module_that_does_not_compile_is_bad_input(doctor, tmp_path):
    (tmp_path / "torn.py").write_text("def f(:\n")
    out = doctor("--derivatives", "torn:f", "--shape", "2")
    assert out.returncode == 2
    assert len(out.stderr.strip().splitlines()) == 1
    assert "importing torn failed with SyntaxError" in out.stderr


ATTENTION = """
from torch import nn

layer = nn.MultiheadAttention(4, 2, batch_first=True).double()

def loss(x):
    return layer(x, x, x, need_weights=False)[0].square().sum()
"""


def test_attention_inside_a_layer_comes_with_its_remedy(doctor, tmp_path):
    (tmp_path / "deep.py").write_text(ATTENTION)
    out = doctor("--derivatives", "deep:loss", "--shape", "1,3,4")
    assert out.returncode == 1
    assert "multi_head_attention_forward: F FF FR RF RR not supported" in out.stdout
    assert "issues/128971" in out.stdout
    assert "sdpa_replaced()" in out.stdout
