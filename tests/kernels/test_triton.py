"""The Triton engine without a GPU: interpreted, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(*command, **environment):
    """Python in a process of its own; what it printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_in_the_interpreter():
    file = str(Path(__file__).with_name("triton_interpreted.py"))
    run("-m", "pytest", "-p", "no:cacheprovider", "-k", "triton", file, TRITON_INTERPRET="1")


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_kernels_compile_without_spilling(target):
    told = run("-m", "cumulant.kernels.triton.compiling", target, "64")
    assert {line.split()[0] for line in told.splitlines()} == {
        *("forward", "rows", "means", "to_queries", "to_keys", "to_bias"),
    }
