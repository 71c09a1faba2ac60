"""`cumulant lens` as a user runs it: output, exit codes, one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import huggingface_hub
import pandas as pd
import pytest
from rich.console import Console
from toy_texts import toy_folder

import command
from cumulant.cli.lens_run import _tell_changed
from cumulant.lens import Examination


def cumulant(*arguments):
    return command.cumulant("lens", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("model"))


def test_without_arguments_it_works_offline(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "cumulant", "lens"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "MiniLM" in done.stdout
    assert "Darwin" in done.stdout
    out = tmp_path / "cumulant-lens"
    assert (out / "report.html").stat().st_size > 10_000
    assert len(pd.read_parquet(out / "heads.parquet")) == 72
    assert len(pd.read_parquet(out / "tokens.parquet")) % 72 == 0


def test_json_and_a_comparison(folder, tmp_path):
    first = cumulant("-m", folder, "-t", "the cat sat", "-o", tmp_path / "a")
    assert first.returncode == 0, first.stderr
    done = cumulant(
        *("-m", folder, "-t", "a dog ran", "-o", tmp_path / "b"),
        *("--against", tmp_path / "a", "--json"),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["run"]["tokens"] == 5
    assert all(x["headline"] for x in told["findings"])
    assert "difference" in pd.read_csv(tmp_path / "b" / "comparison.csv").columns


@pytest.mark.parametrize(("p", "says"), [(0.01, "1 of 2 heads"), (1.0, "None of 2 heads")])
def test_a_comparison_counts_the_heads_that_changed(p, says, capsys):
    rows = {"layer": [0, 0], "head": [0, 1], "statistic": "entropy", "first": 1.0, "second": 2.0}
    _tell_changed(Console(width=200), pd.DataFrame({**rows, "noise": 0.1, "p": [p, 1.0]}))
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{says} changed by more than chance")
    assert len(told) == 1 + (p < 0.05)
    assert told[0].endswith(":") == (len(told) > 1)


def test_corpora(folder, tmp_path):
    lines = [json.dumps({"text": f"the cat sat on {w}"}) for w in ("a", "the", "mat")]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    done = cumulant("-m", folder, "--jsonl", tmp_path / "corpus.jsonl", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert pd.read_parquet(tmp_path / "out" / "inputs.parquet")["tokens"].tolist() == [7, 7, 7]


def test_script_tokens_are_shown(folder, tmp_path):
    done = cumulant("-m", folder, "-t", "the <script> ran", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<script>") <= page.count("</script>")
    assert '"<script>"' not in page


def bad(name, folder, tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "the cat"}\n{oops\n')
    (tmp_path / "file").write_text("not a folder")
    with_model = ["-m", folder]
    return {
        "no such model": ["-m", tmp_path / "nowhere"],
        "hub name": ["-m", "somebody/something"],
        "empty text": [*with_model, "-t", ""],
        "blank text": [*with_model, "-t", "  \n"],
        "empty file": [*with_model, "-f", tmp_path / "empty.txt"],
        "binary file": [*with_model, "-f", tmp_path / "binary"],
        "no file": [*with_model, "-f", tmp_path / "nothing.txt"],
        "broken line": [*with_model, "--jsonl", tmp_path / "bad.jsonl"],
        "wrong field": [*with_model, "--jsonl", tmp_path / "bad.jsonl", "--field", "body"],
        "batch size": [*with_model, "--batch-size", "0", "-t", "the cat"],
        "nothing to compare": [*with_model, "-t", "the cat", "--against", tmp_path / "none"],
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("no such model", "hub name", "empty text", "blank text", "empty file", "binary file"),
        *("no file", "broken line", "wrong field", "batch size", "nothing to compare"),
    ],
)
def test_bad_input_is_one_line(name, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    out = tmp_path / "out"
    arguments = bad(name, folder, tmp_path)
    done = cumulant(*arguments, "-o", out)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("cumulant: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    assert not out.exists()


def test_extras_may_be_separated_by_commas(folder, tmp_path):
    out = tmp_path / "out"
    done = cumulant("-m", folder, "-t", "the cat", "--with", "energy, nonsense", "-o", out)
    assert done.returncode == 2
    assert "there is no extra statistic 'nonsense'" in done.stderr
    done = cumulant("-m", folder, "-t", "the cat sat", "--with", "energy,spectrum", "-o", out)
    assert done.returncode == 0, done.stderr
    columns = set(Examination.load(out).heads().columns)
    assert {"energy_change", "lipschitz"} <= columns


def test_an_output_that_is_a_file(folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    done = cumulant("-m", folder, "-t", "the cat", "-o", tmp_path / "file" / "out")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_long_texts_are_noted(folder, tmp_path):
    done = cumulant("-m", folder, "-t", "the cat sat " * 20, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "24" in done.stdout
    assert "--windows" in done.stdout
