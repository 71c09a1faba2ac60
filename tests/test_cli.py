"""The command as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import cumulant as cm


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "cumulant", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def test_help_and_version():
    assert "bench" in run("--help").stdout
    assert run("--version").stdout.strip() == f"cumulant {cm.__version__}"
    for bare in (run(), run("bench")):
        assert bare.returncode == 0
        assert "Usage" in bare.stdout


def test_bench_as_json_and_as_a_page(tmp_path):
    page = tmp_path / "page.md"
    out = run("bench", "calculus", "--quick", "--rounds", "1", "--json", "-o", str(page))
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    quantities = {row["quantity"] for row in report["rows"]}
    assert {"attention forward", "JVP, all tangents", "double backward alone"} <= quantities
    assert all(row["ratio"] > 0 for row in report["rows"])
    assert "| (1, 8, 1024, 64) | JVP, all tangents |" in page.read_text()


def test_bench_measures(tmp_path):
    page = tmp_path / "page.md"
    out = run("bench", "measures", "--quick", "--rounds", "1", "--json", "-o", str(page))
    assert out.returncode == 0, out.stderr
    rows = json.loads(out.stdout)["rows"]
    assert {row["quantity"] for row in rows} == {
        "empirical mean",
        "mixture G",
        "mixture mean",
        "empirical link",
    }
    assert "| 64 x 1000 x 8 | empirical link |" in page.read_text()


def test_bad_input_is_one_line_and_exit_2(tmp_path):
    for arguments in (
        ["bench", "calculus", "--rounds", "0"],
        ["bench", "calculus", "-o", str(tmp_path / "missing" / "page.md")],
        ["bench", "calculus", "-o", str(tmp_path)],
    ):
        out = run(*arguments)
        assert out.returncode == 2
        assert len(out.stderr.strip().splitlines()) == 1
        assert out.stderr.startswith("cumulant: ")
    assert run("bench", "nonsense").returncode == 2
