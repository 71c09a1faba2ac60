"""What a public host runs: workflows that lint, Pythons that agree, a version that is one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import cumulant

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = ROOT / ".github" / "workflows"


def test_workflows_lint():
    zizmor = Path(sys.executable).with_name("zizmor")
    done = subprocess.run(
        [zizmor, "--offline", "--strict-collection", WORKFLOWS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_matrix_runs_every_python_that_is_promised():
    promised = {c.split()[-1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    (line,) = re.findall(r"python: \[(.*)\]", (WORKFLOWS / "test.yml").read_text())
    assert set(re.findall(r"3\.\d+", line)) == promised


def test_one_version():
    version = cumulant.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)}", (ROOT / "CHANGELOG.md").read_text(), re.M)
