"""Engine selection: the compiled engine where it supports the call, torch's operations otherwise.

An engine implements a few functions on plain tensors, without autograd: forward sums, tangent,
gradient, curvature, row statistics, the potential with its gradient. The autograd Functions above
do not know which one ran. An engine returns ``None`` for a call that it does not support; the
torch tiles support everything.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from cumulant.core.context import Carried
from cumulant.core.errors import InputError
from cumulant.kernels.native import answers
from cumulant.kernels.native.library import Missing, library
from cumulant.kernels.tiles import Arguments, Band, Named, Program
from cumulant.kernels.triton.recording import recorded, validated

__all__ = ["Engine", "Status", "compiled", "engine", "engines", "fused_first", "narrowed"]


class Engine(Protocol):
    """Engine interface. Arguments are named as in ``attention.py``; ``None`` means unsupported.

    Results are as wide as sums are: float32 also where the vectors came in half precision.
    """

    @property
    def takes_half(self) -> bool: ...

    def forward(
        self, arguments: Named, *, scale: float, band: Band, rate: float, fields: tuple[str, ...]
    ) -> Arguments | None: ...

    def tangent(
        self, program: Program, arguments: Named, *, scale: float, rate: float
    ) -> Arguments | None: ...

    def gradient(
        self, program: Program, arguments: Named, *, scale: float, rate: float
    ) -> Arguments | None: ...

    def curvature(
        self, program: Program, arguments: Named, *, scale: float, rate: float
    ) -> Arguments | None: ...

    def statistics(
        self,
        arguments: Named,
        widths: Mapping[str, int],
        *,
        scale: float,
        band: Band,
        mass: float,
        start: Tensor | None,
        steps: int,
    ) -> Arguments | None: ...

    def potential(
        self, arguments: Named, shapes: Mapping[str, tuple[int, ...]]
    ) -> Arguments | None: ...


@dataclass(frozen=True)
class Status:
    """Whether an engine can run here, why (not), and the instruction set it uses."""

    available: bool
    why: str
    instruction_set: str | None


_asked: Carried[str | None] = Carried("cumulant_engine", None)


def engines() -> dict[str, Status]:
    """Every engine by its name.

    >>> engines()["torch"].available
    True
    """
    capability = torch.backends.cpu.get_cpu_capability()
    tiles = Status(True, "torch's own operations; takes every call", capability)
    try:
        native = Status(True, "compiled, float32 and float64", library().instruction_set)
    except Missing as error:
        native = Status(False, str(error), None)
    return {"torch": tiles, "native": native, "triton": _triton()}


def _triton() -> Status:
    if importlib.util.find_spec("triton") is None:
        return Status(False, "the package triton is not installed", None)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Status(True, "in Triton's interpreter, slow: for tests", None)
    if not torch.cuda.is_available():
        return Status(False, "torch finds no GPU", None)
    device = torch.device("cuda", torch.cuda.current_device())
    return Status(True, f"float32 and half precision; {_trust(device)}", None)


def _trust(device: torch.device) -> str:
    if validated(device):
        return "the self-test passed on this GPU, so it is used by default"
    if recorded(device) is not None:
        return "the self-test FAILED on this GPU: used only where asked for by name"
    return (
        "not validated on this GPU, so used only where asked for by name: "
        "run cumulant doctor --self-test"
    )


@contextmanager
def engine(name: str) -> Generator[None]:
    """Select one engine in this context (thread or task), for tests and bisecting.

    Backward passes that begin inside it use that engine, too.

    By default the fastest engine that supports a call computes it; on a GPU that is "triton" once
    its self-test has passed there (``cumulant doctor --self-test``), except for values and first
    gradients that torch's own operators take. Calls that "native" does not
    support (derivatives of third order and higher, other devices) still go to the torch tiles.

    Args:
        name: "torch", "native" or "triton".

    Raises:
        InputError: unknown engine, or it cannot run here; the message says why.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(5, 8)
    >>> with cm.engine("torch"):
    ...     cm.attend(x, x).entropy.shape
    torch.Size([5])
    """
    known = engines()
    if name not in known:
        raise InputError(f"engine must be one of {', '.join(known)}, not {name!r}.")
    if not known[name].available:
        raise InputError(f"The engine {name!r} cannot run here: {known[name].why}.")
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)


def compiled(device: torch.device | None = None) -> Engine | None:
    """The engine for tensors on `device`, if one is available and no other was selected.

    Triton's kernels, which nobody has run on every GPU, compute by default only where their
    self-test has passed (``triton/recording.py``); ``cm.engine("triton")`` uses them regardless.

    Engines read and write memory without torch's dispatcher. If a mode intercepts torch's
    operations, to record them or to count FLOPs, the torch engine computes.
    """
    asked = _asked.get()
    if asked == "torch" or torch._C._len_torch_dispatch_stack():
        return None
    if asked is None and device is not None and device.type == "cuda" and validated(device):
        asked = "triton"
    if asked == "triton":
        return cast(Engine, importlib.import_module("cumulant.kernels.triton.answers"))
    try:
        library()
    except Missing:
        return None
    return cast(Engine, answers)


def fused_first(device: torch.device) -> bool:
    """Whether torch's fused operators go before the engine, where they take a call.

    On CUDA they do unless an engine was asked for: their gradient takes 5 products, Triton's 9.
    """
    return device.type == "cuda" and _asked.get() is None


_VECTORS = ("query", "key", "value", "mean")


def narrowed(engine: Engine, arguments: Named, narrow: torch.dtype | None) -> Named:
    """The arguments as `engine` takes them: vectors in the caller's half precision, if it can.

    They were widened for the other engines (``attention/inputs.py``), so nothing is lost; under
    autocast, vectors that came in float32 are rounded, as autocast does. The bias and one number
    per query stay float32.
    """
    if narrow is None or not engine.takes_half or arguments["query"].dtype != torch.float32:
        return arguments
    return {
        n: x.to(narrow) if n.split(" ")[-1] in _VECTORS else x  # also "tangent query" and the like
        for n, x in arguments.items()
    }
