"""Which of the table's tiles is fastest on the GPU at hand: ``triton.autotune``, but once and kept.

Times are taken when ``cumulant doctor --self-test`` asks, never inside a call, where they would
stall the GPU; the choice is kept beside the self-test's result and read by every later process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from cumulant.core.progress import ProgressCallback, counted
from cumulant.kernels.tiles import Band
from cumulant.kernels.triton.blocks import KERNELS, WIDTHS, Blocks, candidates, target_of
from cumulant.kernels.triton.recording import choice_of, trial
from cumulant.kernels.triton.validating import Case, example

__all__ = ["Timer", "seconds_on_device", "tune"]

Timer = Callable[[Callable[[], object]], float]

# The question that is timed for a kernel; the other kernels of the question do not change.
_QUESTIONS = {"forward": "forward", "rows": "tangent", "means": "tangent"}


def seconds_on_device(run: Callable[[], object]) -> float:
    """The median time of seven runs by the GPU's own clock, after three to warm up."""
    cuda = cast(Any, torch.cuda)
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(7):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def tune(
    device: torch.device,
    *,
    timer: Timer = seconds_on_device,
    sizes: tuple[int, int] = (2048, 2048),
    widths: tuple[int, ...] = WIDTHS,
    progress: ProgressCallback | None = None,
) -> dict[str, str]:
    """The fastest tile of every kernel, by `choice_of`, where the table has more than one."""
    plan: list[tuple[str, int, torch.dtype, bool, tuple[Blocks, ...]]] = []
    for dtype in (torch.float32, torch.float16):
        for width in widths:
            for pairs in (False, True):
                for kernel in KERNELS:
                    found = candidates(kernel, width, dtype, target_of(device), pairs=pairs)
                    if len(found) > 1 and (pairs or kernel != "to_bias"):
                        plan.append((kernel, width, dtype, pairs, found))
    tick = counted(progress, len(plan))
    out: dict[str, str] = {}
    for kernel, width, dtype, pairs, found in plan:
        tick(f"{kernel}, width {width}")
        case = Case("timing", (width, width), Band(None, 0), (1, 8), (1, 8), bias=pairs, mask=pairs)
        ask = example(case, device, dtype, sizes)[_QUESTIONS.get(kernel, "gradient")]
        best = min(found, key=lambda b, k=kernel, run=ask: _timed(k, b, run, timer))
        out[choice_of(kernel, width, dtype, pairs)] = str(best)
    return out


def _timed(kernel: str, b: Blocks, run: Callable[[], object], timer: Timer) -> float:
    """Seconds with this tile; infinite where it does not run, so another is chosen."""
    tried: Mapping[str, Blocks] = {kernel: b}
    token = trial.set(tried)
    try:
        return timer(run)
    except Exception:  # out of registers or shared memory on a GPU that nobody compiled for
        return math.inf
    finally:
        trial.reset(token)
