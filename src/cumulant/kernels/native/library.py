"""The shared library: which build of it runs on this machine, and why none does."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

__all__ = ["Library", "Missing", "library"]

# From the best down: what torch calls the machine's instructions, and the build that uses them.
_BUILDS = {
    "x86_64": (("AVX512", "x86-64-v4"), ("AVX2", "x86-64-v3"), ("", "portable")),
    "other": (("", "portable"),),
}

Kernel = Callable[[int, float, float], int]


class Missing(Exception):  # noqa: N818
    """No build of the library can be loaded; the message says why."""


@dataclass(frozen=True)
class Library:
    """A loaded build: its instruction set, and its kernels by name such as ``forward_f32``."""

    instruction_set: str
    _handle: ctypes.CDLL

    def kernel(self, name: str) -> Kernel:
        found = getattr(self._handle, f"cumulant_{name}")
        found.argtypes = (ctypes.c_void_p, ctypes.c_double, ctypes.c_double)
        return found


def _levels() -> list[str]:
    """Builds that this machine can run, the best first."""
    machine = "x86_64" if platform.machine().lower() in ("x86_64", "amd64") else "other"
    capability = torch.backends.cpu.get_cpu_capability().upper()
    builds = _BUILDS[machine]
    # Without AMX and bfloat16, AVX512_* still has all of x86-64-v4.
    able = [i for i, (name, _) in enumerate(builds) if name and capability.startswith(name)]
    return [build for _, build in builds[able[0] if able else len(builds) - 1 :]]


def library() -> Library:
    """The best build for this machine; from the folder CUMULANT_NATIVE names, if it is set.

    Raises:
        Missing: none was built, or none can be loaded.
    """
    found = _found()
    if isinstance(found, str):
        raise Missing(found)
    return found


@cache
def _found() -> Library | str:
    """The build, or why there is none; kept, because every call of attention asks."""
    folder = os.environ.get("CUMULANT_NATIVE", str(Path(__file__).parent))
    if folder == "0":
        return "CUMULANT_NATIVE=0 is set"
    told: list[str] = []
    for build in _levels():
        path = Path(folder) / f"_engine_{build}.so"
        if not path.exists():
            told.append(f"{build} was not built")
            continue
        try:
            handle = ctypes.CDLL(str(path))
        except OSError as error:
            told.append(f"{build}: {error}")
            continue
        if _is_stale(handle):
            told.append(f"{build} is of older sources: run python hatch_build.py")
            continue
        pool = _torch_pool()
        handle.cumulant_use_pool.argtypes = (ctypes.c_void_p,)
        handle.cumulant_use_pool(pool)
        return Library(build, handle)
    return "; ".join(told) + " (install with a C++ compiler at hand)"


def _is_stale(handle: ctypes.CDLL) -> bool:
    """Whether the C++ sources beside the library are not the ones it was built from.

    Its structures would not be those that Python fills in. An installed wheel cannot be stale.
    """
    here = Path(__file__).parent
    sources = (here, here.parents[1] / "filtering" / "native")
    paths = [path for folder in sources for path in sorted(folder.glob("*.[ch]pp"))]
    if not paths:
        return False
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    try:
        handle.cumulant_sources.restype = ctypes.c_char_p
        built: bytes = handle.cumulant_sources()
    except AttributeError:
        return True
    return built.decode() != digest.hexdigest()[:16]


def _torch_pool() -> int | None:
    """The address of torch's own parallel loop, a C symbol of libtorch_cpu since 2.10."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            symbol = ctypes.CDLL(str(folder / name)).torch_parallel_for
        except (OSError, AttributeError):
            continue
        return ctypes.cast(symbol, ctypes.c_void_p).value
    return None
