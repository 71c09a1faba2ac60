"""Fair timing on a noisy machine: interleaved rounds, paired ratios, medians."""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cumulant.kernels.engines import engines

__all__ = ["Others", "Row", "clock", "fastest", "interleave", "load", "machine", "markdown"]


@dataclass(frozen=True)
class Row:
    """One measured ratio and what it was hoped to be at most."""

    shape: str
    quantity: str
    against: str
    amount: float
    baseline: float
    ratio: float
    at_most: float
    unit: str = "ms"

    @property
    def met(self) -> bool:
        return self.ratio <= self.at_most * 1.005

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None where nothing was hoped for."""
        hoped = self.at_most if math.isfinite(self.at_most) else None
        return {**asdict(self), "at_most": hoped, "met": self.met}


def clock() -> Callable[[], float]:
    """CPU time on one thread, which a busy machine disturbs least; with more threads real time.

    Threads that wait for each other spin, so their CPU time is no measure of work.
    """
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def interleave(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    tick: Callable[[str], None] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
    repeats: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Seconds per round of every case, run in turn so that drift hits all alike.

    Garbage is collected before each case, so that none pays for the graphs of the one before it.
    `repeats` are calls of a case in one round, of which the mean counts: for calls so short that
    the caches would be cold after the other cases.
    """
    repeats = repeats or {}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, run in cases.items():
            tick(name)
            gc.collect()
            count = repeats.get(name, 1)
            start = clock()
            for _ in range(count):
                run()
            if turn:  # the first round warms up
                seconds[name].append((clock() - start) / count)
    return seconds


def row(
    seconds: Mapping[str, list[float]],
    shape: str,
    quantity: str,
    against: str,
    at_most: float,
) -> Row:
    """The median over rounds of quantity / baseline, both of the same round."""
    ours, base = seconds[quantity], seconds[against]
    return Row(
        shape,
        quantity,
        against,
        1e3 * statistics.median(ours),
        1e3 * statistics.median(base),
        statistics.median(a / b for a, b in zip(ours, base, strict=True)),
        at_most,
    )


def fastest(seconds: Mapping[str, list[float]], shape: str, quantity: str, against: str) -> Row:
    """The fastest round of each: on a busy machine the one that was disturbed least."""
    ours, base = min(seconds[quantity]), min(seconds[against])
    return Row(shape, quantity, against, 1e3 * ours, 1e3 * base, ours / base, float("inf"))


class Others:
    """How many processors other programs kept busy since this was made.

    The load average counts this program too, and minutes that are gone; this is what disturbed a
    measurement.
    """

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds of the wall, of all processors at work, of this program and its children."""
        try:
            with open("/proc/stat") as lines:
                # user, nice, system, idle, iowait, irq, softirq, steal
                ticks = [int(x) for x in lines.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        spent = os.times()
        work = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), work, sum(spent[:4])

    @property
    def processors(self) -> float | None:
        """The mean number since then; None where the system does not tell."""
        now = self._now()
        if now is None or self._start is None or now[0] <= self._start[0]:
            return None
        wall, work, own = (a - b for a, b in zip(now, self._start, strict=True))
        return max(0.0, (work - own) / wall)

    def note(self) -> str:
        """What a reader of ratios must know; "" if the machine was quiet, or does not tell."""
        others = self.processors
        if others is None or others < 0.25:
            return ""
        return (
            f"Other programs kept {others:.1f} of {os.cpu_count() or 1} processors busy meanwhile. "
            "They share caches and arithmetic units with what is measured, which costs the more "
            "efficient code more, so these ratios are not those of a quiet machine."
        )


def short(ratio: float) -> str:
    """Two decimals, or two digits where the ratio is small."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def processor() -> dict[str, str]:
    """What Linux says of the first processor; elsewhere nothing."""
    try:
        with open("/proc/cpuinfo") as info:
            first = info.read().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def machine(threads: int | None = None) -> str:
    """The machine and software the numbers come from; by default the threads are torch's own."""
    found = processor()
    model = found.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in found:  # a virtual machine may call every generation AMD EPYC
        model += f" (family {found['cpu family']} model {found.get('model', '?')})"
    threads = threads or torch.get_num_threads()
    capability, native = torch.backends.cpu.get_cpu_capability(), engines()["native"]
    built = f"engine {native.instruction_set}" if native.available else "no compiled engine"
    return (
        f"{model}, {threads} thread{'s' * (threads != 1)}, Python {platform.python_version()}, "
        f"torch {torch.__version__} ({capability}), {built}"
    )


def load() -> str:
    """The load average, for the reader to judge by; ask before measuring."""
    if not hasattr(os, "getloadavg"):
        return "load unknown"
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count() or 1} processors at the start"


def aim(row: Row, stated: bool) -> str:
    """The target, and whether it was missed; nothing if no target was set."""
    if not stated or row.at_most == float("inf"):
        return "-"
    return short(row.at_most) + ("" if row.met else " (missed)")


MEDIANS = (
    "Times are medians of interleaved rounds; each ratio is the median over rounds of two times of "
    "the same round. Below 1, ours is better. On one thread, attention and the lens are measured "
    "in CPU time."
)


def markdown(
    title: str,
    command: str,
    rows: list[Row],
    aims: bool = True,
    busy: str = "",
    how: str = MEDIANS,
) -> str:
    """The rows as a page for the docs.

    Args:
        title: of the page.
        command: that measured them.
        rows: as measured.
        aims: whether to show what was hoped for.
        busy: what `load` said before the measurements.
        how: what the numbers are.
    """
    lines = [
        f"# {title}",
        "",
        f"Measured by `{command}` on {machine()}{', ' + busy if busy else ''}.",
        f"Single precision unless stated otherwise. {how}",
        "",
        "| shape | quantity | against | ours | theirs | ratio | aim, at most |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.shape} | {r.quantity} | {r.against} | {r.amount:.1f} {r.unit} "
        f"| {r.baseline:.1f} {r.unit} | {short(r.ratio)} | {aim(r, aims)} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"
