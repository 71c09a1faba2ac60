"""Progress: one callback everywhere, a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import ast
import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import cumulant as cm
from cumulant.cli import progress as shown
from cumulant.core.progress import Progress

SCRIPT = """
import time
from cumulant.cli.progress import Shown
from cumulant.core.progress import Progress
with Shown("counting", quiet={quiet}) as progress:
    for k in range(30):
        progress(Progress(k, 30, "[red]step[/] :cat:" if k % 2 else ""))
        time.sleep({pause})
"""


def test_short_work_says_nothing():
    out = run(0.0)
    assert (out.stdout, out.stderr) == ("", "")


def run(pause, quiet=False):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(pause=pause, quiet=quiet)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_work_over_two_seconds_is_told_in_a_pipe():
    out = run(0.1)
    assert out.stdout == ""
    assert out.stderr.count("\n") == 1  # after two of three seconds; the next ten later
    assert out.stderr.startswith(("cumulant: counting (", "cumulant: [red]step[/] :cat: ("))
    assert out.stderr.endswith(" of 30)\n")
    assert run(0.1, quiet=True).stderr == ""


def test_lines_come_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: now[0])
    with shown.Shown("work") as progress:
        for k in range(250):
            now[0] = k / 10
            progress(Progress(k))
    assert capsys.readouterr().err.splitlines() == [f"cumulant: work ({k})" for k in (20, 120, 220)]


def test_a_terminal_has_a_bar_that_goes_away():
    ours, theirs = pty.openpty()
    script = SCRIPT.format(pause=0.05, quiet=False)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    run = subprocess.Popen([sys.executable, "-c", script], stderr=theirs, env=environment)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(ours, 4096):
            said += more
    assert run.wait() == 0
    assert "[red]step[/]" in said.decode()  # names are no markup
    assert "%" in said.decode()
    assert "cumulant:" not in said.decode()


def test_every_progress_takes_the_one_callback():
    """No function of the library has a callback of its own for how far it is."""
    root = Path(cm.__file__).parent
    found = 0
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.arg in ("progress", "tell"):
                said = "" if node.annotation is None else ast.unparse(node.annotation)
                assert said in ("ProgressCallback", "ProgressCallback | None", "Progress"), path
                found += 1
    assert found > 10
