"""The command `cumulant` inside the test's own process, which saves importing torch each time.

Where the process is the point (signals, a working directory, the environment), tests start one.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from cumulant.cli import main


@dataclass(frozen=True)
class Finished:
    """What `subprocess.run` would return."""

    returncode: int
    stdout: str
    stderr: str


def cumulant(*arguments: object) -> Finished:
    """``cumulant ARGUMENTS``."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["cumulant", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Finished(code, out.getvalue(), err.getvalue())
