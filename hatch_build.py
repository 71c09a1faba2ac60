"""Compile the native engine where there is a C++ compiler; without one the package is pure Python.

``python hatch_build.py`` builds in place, next to the sources; ``pip install`` does the same.
``python hatch_build.py --sanitize FOLDER`` builds with AddressSanitizer and UBSan into a folder,
from where CUMULANT_NATIVE=FOLDER loads it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment, misc]

SOURCES = Path(__file__).parent / "src/cumulant/kernels/native"
FILTERS = Path(__file__).parent / "src/cumulant/filtering/native"
BUILDS = {
    "x86_64": {"x86-64-v4": ["-march=x86-64-v4"], "x86-64-v3": ["-march=x86-64-v3"]},
    "aarch64": {},
}
ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}
FLAGS = [
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
]
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def fingerprint() -> str:
    """A digest of the C++ sources. The library carries it, so one of older sources is refused."""
    digest = hashlib.sha256()
    for folder in (SOURCES, FILTERS):
        for path in sorted(folder.glob("*.[ch]pp")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str | None:
    """The C++ compiler: CXX, or the first that is there."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((name for name in names if name and shutil.which(name)), None)


def build(*, sanitized: Path | None = None) -> tuple[list[Path], list[str]]:
    """Compile every build for this kind of machine; the libraries made, and what went wrong.

    With sanitizers one build is enough, and takes as long as all.
    """
    if os.environ.get("CUMULANT_NATIVE") == "0" or sys.platform == "win32":
        return [], ["the native engine is left out"]
    if (command := compiler()) is None:
        return [], ["no C++ compiler: the native engine is left out, everything works without it"]
    machine = platform.machine().lower()
    builds = {**BUILDS.get(ALIASES.get(machine, machine), {}), "portable": []}
    if sanitized is not None:
        builds = dict(list(builds.items())[-2:-1]) or builds

    def one(item: tuple[str, list[str]]) -> tuple[Path, subprocess.CompletedProcess[str]]:
        name, flags = item
        out = (sanitized or SOURCES) / f"_engine_{name}.so"
        made = out.with_suffix(".tmp")
        line = [
            command,
            *FLAGS,
            *flags,
            *(SANITIZE if sanitized else []),
            f"-I{SOURCES}",
            f'-DCUMULANT_SOURCES="{fingerprint()}"',
            *(str(SOURCES / "engine.cpp"), str(FILTERS / "filters.cpp")),
        ]
        done = subprocess.run([*line, "-o", str(made)], capture_output=True, text=True)
        if done.returncode == 0:
            made.replace(out)  # never over a library that is in use
        return out, done

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(one, builds.items()))
    made = [path for path, done in results if done.returncode == 0]
    failed = [f"{path.name}: {done.stderr}" for path, done in results if done.returncode]
    return made, failed


def documents() -> dict[str, str]:
    """What the report shows: texts and pictures, and their places in the wheel."""
    docs, package = Path(__file__).parent / "docs", "cumulant/lab/report/docs"
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (docs / "answers.md").read_text("utf-8"))
    return {str(docs / x): f"{package}/{x}" for x in ("answers.md", "theory.md", *pictures)}


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc, type-arg]
    """Put the libraries into the wheel, the wheel's tag on them, and what the report shows."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before the wheel's files are collected."""
        if self.target_name != "wheel":
            return
        if version != "editable":
            build_data["force_include"] |= documents()
        made, problems = build()
        for problem in problems:
            self.app.display_warning(problem[:400])
        if made:
            kind = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{kind}"
            build_data["artifacts"] += [str(p.relative_to(self.root)) for p in made]


if __name__ == "__main__":
    folder = Path(sys.argv[2]) if sys.argv[1:2] == ["--sanitize"] else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    libraries, complaints = build(sanitized=folder)
    for text in [*(f"built {path.name}" for path in libraries), *complaints]:
        print(text)  # noqa: T201
    sys.exit(0 if libraries else 1)
