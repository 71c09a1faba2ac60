"""Peak memory of one function, measured in a child process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from importlib import import_module

__all__ = ["growth"]


def _status(field: str) -> float:
    """Megabytes, from Linux's account of this process."""
    with open("/proc/self/status") as lines:
        return next(int(x.split()[1]) / 1024 for x in lines if x.startswith(field))


def child(module: str, name: str) -> None:
    """Run `module.name()`, which returns what to measure, and print how far the peak rose."""
    run = getattr(import_module(module), name)()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak of making the inputs
    before = _status("VmRSS")
    run()
    sys.stdout.write(json.dumps(_status("VmHWM") - before))


def growth(module: str, name: str) -> float | None:
    """Megabytes by which the peak exceeds what was held before; None where not on Linux.

    ``ru_maxrss`` is inherited from the parent, so VmHWM of a fresh child is what counts.
    """
    if sys.platform != "linux":
        return None
    code = f"from cumulant.lab.bench.peak import child; child({module!r}, {name!r})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(json.loads(out.stdout))
