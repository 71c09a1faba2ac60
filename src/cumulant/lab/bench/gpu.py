"""The Triton engine on a GPU: measured beside what the paper model expects.

The engine's questions are asked directly, in the precision of the inputs. Beside them, as multiples
of the same flash forward pass: torch's math backend, and jvp_flash_attention if it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant.core.errors import InputError
from cumulant.core.progress import ProgressCallback, counted
from cumulant.kernels.triton.blocks import target_of
from cumulant.lab.bench.costs import GPUS, Gpu, ratio
from cumulant.lab.bench.timing import Row

__all__ = ["SHAPES", "Timer", "measure"]

Timer = Callable[[Callable[[], object]], float]
Shape = tuple[int, int, int, int]
SHAPES: tuple[Shape, ...] = ((4, 16, 1024, 64), (2, 16, 4096, 64), (2, 16, 4096, 128))
_QUICK: tuple[Shape, ...] = ((1, 4, 256, 64),)
_FLASH = "flash forward"

# Quantity: the questions whose times are added.
_QUANTITIES = {
    "mean, G, entropy": ("forward",),
    "JVP, all tangents, with the value": ("forward", "tangent"),
    "gradient alone": ("gradient",),
    "double backward alone": ("curvature",),
}


def _gpu(device: torch.device) -> Gpu | None:
    """The GPU whose data sheet applies; ``None``: nothing is expected of this one."""
    target = target_of(device)
    return next((gpu for gpu in GPUS.values() if gpu.target == target), None)


def _alternatives(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """JVPs of all tangents by others."""
    along = tuple(torch.randn_like(x) for x in (q, k, v))

    def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)

    jvp = cast(Any, torch.func).jvp
    out: dict[str, Callable[[], object]] = {
        "JVP by the math backend": lambda: jvp(math, (q, k, v), along)
    }
    if importlib.util.find_spec("jvp_flash_attention") is not None:
        theirs: Any = importlib.import_module("jvp_flash_attention.jvp_attention").JVPAttn
        # `fwd_dual` computes tangents; their `attention` is the value alone, whatever is asked.
        out["JVP by jvp_flash_attention"] = lambda: jvp(theirs.fwd_dual, (q, k, v), along)
    return out


def _cases(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    from cumulant.kernels.triton.validating import Case, example  # Triton need not be installed

    batch, heads, length, width = shape
    sizes = (batch, heads)
    case = Case("bench", (width, width), batch=sizes, keys=sizes)
    asked = example(case, device, dtype, (length, length))
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    ours: dict[str, Callable[[], object]] = {
        name: lambda questions=questions: [asked[question]() for question in questions]
        for name, questions in _QUANTITIES.items()
    }
    return {
        _FLASH: lambda: F.scaled_dot_product_attention(q, k, v),
        **ours,
        **_alternatives(q, k, v),
    }


def measure(
    *,
    device: str,
    timer: Timer | None = None,
    rounds: int = 7,
    quick: bool = False,
    progress: ProgressCallback | None = None,
) -> list[Row]:
    """Rows of measured ratios to torch's forward pass; the aim is what the paper model expects.

    Args:
        device: "cuda" or "cuda:1"; in Triton's interpreter "cpu", to see that it runs.
        timer: seconds of one call; the default is the GPU's own clock.

    Raises:
        InputError: there is no such device, or Triton cannot run there.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if importlib.util.find_spec("triton") is None:
        raise InputError("--device needs the package triton: pip install triton.")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {device}: torch finds no GPU here.")
    if target_of(place) is None:
        raise InputError(f"--device {device}: the Triton engine runs on CUDA and ROCm devices.")
    if timer is None:
        timer = importlib.import_module("cumulant.kernels.triton.tuning").seconds_on_device
    return _rows(place, cast(Timer, timer), rounds, quick, progress)


def _rows(
    device: torch.device,
    timer: Timer,
    rounds: int,
    quick: bool,
    progress: ProgressCallback | None,
) -> list[Row]:
    shapes = _QUICK if quick else SHAPES
    dtypes = (torch.float16,) if quick else (torch.bfloat16, torch.float32)
    tick = counted(progress, len(shapes) * len(dtypes) * rounds)
    gpu, rows = _gpu(device), list[Row]()
    for shape in shapes:
        for dtype in dtypes:
            cases = _cases(shape, dtype, device)
            label = f"{shape} {str(dtype).removeprefix('torch.')}"
            taken: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(rounds):
                tick(label)
                for name, run in cases.items():
                    taken[name].append(timer(run))
            base = taken.pop(_FLASH)
            for name, times in taken.items():
                expected = float("inf")
                if gpu is not None and name in _QUANTITIES:
                    asked = _QUANTITIES[name]
                    expected = ratio(*asked, d=shape[3], dtype=dtype, gpu=gpu, length=shape[2])
                measured = statistics.median(a / b for a, b in zip(times, base, strict=True))
                ours, theirs = (1e3 * statistics.median(x) for x in (times, base))
                rows.append(Row(label, name, _FLASH, ours, theirs, measured, expected))
    return rows
