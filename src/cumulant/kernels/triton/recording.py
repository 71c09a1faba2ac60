"""What is known about a GPU: whether its self-test passed, and which tiles were fastest there.

One JSON file per GPU, versions and kernels' source, in ``$CUMULANT_CACHE``, else
``$XDG_CACHE_HOME/cumulant``, else ``~/.cache/cumulant``. Another driver, torch, Triton or kernel
is another file, so nothing is believed about what was not tested.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from cumulant.core.files import make_folder, write_file
from cumulant.kernels.triton.blocks import Blocks, candidates, padded, read, target_of

__all__ = [
    "Check",
    "Record",
    "choice_of",
    "choose",
    "folder",
    "forget",
    "identity",
    "keep",
    "recorded",
    "trial",
    "validated",
]

# Tiles by kernel that are being timed, before anything is known (``tuning.py``).
trial: ContextVar[Mapping[str, Blocks]] = ContextVar("trial", default=MappingProxyType({}))

_MODULES = ("answers.py", "blocks.py", "blocks.txt", "sums.py", "tile.py")


@dataclass(frozen=True)
class Check:
    """One comparison of the self-test: the largest error relative to the largest true number."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN does not pass


@dataclass(frozen=True)
class Record:
    """A self-test: of what, when, its checks, and the tiles that were fastest (`choice_of`)."""

    identity: Mapping[str, str]
    when: str
    checks: tuple[Check, ...]
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(c.passed for c in self.checks)


def folder() -> Path:
    """Where records are kept."""
    if given := os.environ.get("CUMULANT_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cumulant"


@cache
def fingerprint() -> str:
    """A hash of the source of the kernels and of their tiles."""
    here = files("cumulant.kernels.triton")
    source = (here.joinpath(n).read_bytes() for n in _MODULES)
    return hashlib.sha256(b"\0".join(source)).hexdigest()[:16]


def identity(device: torch.device) -> dict[str, str]:
    """What a self-test is valid for."""
    target = target_of(device) or "none"
    known = cast(Any, torch.cuda)
    name = known.get_device_name(device) if device.type == "cuda" else f"{device.type}, {target}"
    version = torch.version.hip or torch.version.cuda or "none"
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {
        "device": str(name),
        "target": target,
        "torch": str(torch.__version__),
        "triton": triton,
        "runtime": str(version),
        "kernels": fingerprint(),
    }


def _path(found: Mapping[str, str]) -> Path:
    key = hashlib.sha256(json.dumps(dict(found), sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"gpu-{key}.json"


def keep(record: Record) -> Path:
    """Write a record where `recorded` finds it."""
    path = _path(record.identity)
    make_folder(path.parent)
    write_file(path, json.dumps(asdict(record), indent=2) + "\n")
    forget()
    return path


def forget() -> None:
    """Read records again: a file has changed."""
    recorded.cache_clear()


@cache
def recorded(device: torch.device) -> Record | None:
    """The last self-test of exactly this device, these versions and these kernels."""
    found = identity(device)
    try:
        told: Any = json.loads(_path(found).read_text())
        checks = tuple(Check(**c) for c in told["checks"])
        record = Record(told["identity"], told["when"], checks, told["chosen"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or not one of ours
    return record if record.identity == found else None


def validated(device: torch.device) -> bool:
    """Whether the self-test has passed here."""
    record = recorded(device)
    return record is not None and record.passed


def choice_of(kernel: str, width: int, dtype: torch.dtype, pairs: bool) -> str:
    """The key of a choice among tiles."""
    kind = "float32" if dtype == torch.float32 else "float16"
    return f"{kernel} {kind} {padded(width)}" + " pairs" * pairs


def choose(
    kernel: str, width: int, dtype: torch.dtype, device: torch.device, *, pairs: bool
) -> Blocks | None:
    """The tile that was fastest on this GPU, else the first of the table; ``None``: none fits."""
    table = candidates(kernel, width, dtype, target_of(device), pairs=pairs)
    tried = trial.get().get(kernel)
    if tried in table:
        return tried
    record = recorded(device) if len(table) > 1 else None
    if record is not None:
        best = record.chosen.get(choice_of(kernel, width, dtype, pairs))
        if best is not None and read(best) in table:
            return read(best)
    return table[0] if table else None
