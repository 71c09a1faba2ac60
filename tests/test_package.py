"""The wheel, built, installed elsewhere and used; extras that a clean environment can satisfy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import cumulant as cm

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel's content and nothing of the checkout."""
    target = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def use(installed, *arguments):
    """Python in an empty folder, where `cumulant` is the installed one."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); "
        "import cumulant; assert cumulant.__file__.startswith(sys.path[0]), cumulant.__file__; "
        "from cumulant.cli import main; sys.argv[0] = 'cumulant'; main()"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", code, str(installed), *arguments],
        cwd=installed.parent,
        env={**os.environ, "HOME": str(installed.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_wheel_holds_the_library_whole_and_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = {
        str(p.relative_to(source))
        for p in (source / "cumulant").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert wanted <= names
    assert all(x.startswith(("cumulant/", f"cumulant-{cm.__version__}.dist-info/")) for x in names)
    assert "cumulant/py.typed" in names
    shown = {f"cumulant/lab/report/docs/{x}" for x in ("answers.md", "theory.md")}
    assert shown | {"cumulant/lab/report/docs/claims/figures/T39.svg"} <= names
    assert {p.rsplit(".", 1)[-1] for p in names} >= {"html", "css", "js", "csv", "toml", "txt"}


def test_the_installed_command_works(installed):
    assert use(installed, "--version").stdout.strip() == f"cumulant {cm.__version__}"
    out = use(installed, "claims", "--only", "T1,T4,T17", "--quick", "--json")
    assert out.returncode == 0, out.stderr
    assert len(json.loads(out.stdout)["claims"]) == 3


def test_the_installed_filter_finds_its_data(installed, tmp_path):
    out = use(installed, "filter", "--example", "--json", "-o", str(tmp_path / "f"))
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["log_likelihood"] == pytest.approx(-412.534, abs=0.01)


def test_extras_are_pinned_for_development():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pins = {line.split("==")[0] for line in lines if "==" in line}
    asked = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        asked += extra
    for requirement in asked:
        name = requirement.split(">=")[0].split("[")[0].lower().replace("_", "-")
        assert name == "cumulant" or name in pins, requirement
