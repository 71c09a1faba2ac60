"""The rows of the front page: a few comparisons, all on one thread, small enough for every report.

`FRONT` names them once. The README shows their recorded ratios, `cumulant bench front` and
`cumulant report` measure them anew, at the same shapes, so the numbers can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch

from cumulant.core.errors import InputError
from cumulant.core.progress import ProgressCallback, counted
from cumulant.lab.bench.peak import growth
from cumulant.lab.bench.timing import Row, clock, fastest, interleave, processor, short

__all__ = ["FRONT", "HOW", "THREADS", "Line", "run", "table"]

THREADS = 1
HOW = (
    "Each time is the fastest of a few rounds in turn, in CPU time, and each ratio that of the "
    "fastest; below 1, ours is better."
)

Cases = dict[str, Callable[[], object]]
_SMALL, _LONG = "(1, 8, 1024, 64)", "(1, 1, 16384, 64)"


class Line(NamedTuple):
    """A row of the README: in its words, and in those of the benchmark's own page.

    ``page`` is the ratio on the page of its benchmark in ``docs/benchmarks``, ``zen4`` that in
    ``docs/benchmarks/front.md``, from a processor whose AVX-512 units are 256 bits wide instead of
    512 (`is_zen4`): the compiled kernels take twice as long there. Both are on one thread.
    """

    says: str
    alternative: str
    page: float
    zen4: float
    bench: str
    shape: str
    quantity: str
    against: str
    unit: str = "ms"

    @property
    def recorded(self) -> float:
        """The ratio of the record whose processor is like this one."""
        return self.zen4 if is_zen4() else self.page

    def of(self, row: Row) -> bool:
        """Whether this is what was measured."""
        return (self.shape, self.quantity, self.against, self.unit) == (
            *(row.shape, row.quantity, row.against),
            row.unit,
        )

    def shown(self) -> dict[str, str]:
        """What the report says of the row: the words of the README."""
        return {"quantity": self.says, "against": self.alternative.replace("`", "")}


def is_zen4() -> bool:
    """Whether this is AMD's family 25, which runs AVX-512 in halves of 256 bits, if at all."""
    return processor().get("cpu family") == "25"


_ATTENTION, _MATH = "torch's fused attention", "torch's math backend"
_FULL, _LENS = "cross-entropy on the full matrix", "eager with `output_attentions`"
_SUMS = "attention + G + entropy + score mean, variance and maximum, forward"
_TWICE = "forward+backward+double backward"
_TANGENTS = "JVP, all tangents"

FRONT: tuple[Line, ...] = (
    Line(
        *("attention forward", _ATTENTION, 0.45, 0.90),
        *("calculus", _SMALL, "attention forward", "SDPA forward"),
    ),
    Line(
        *("plus G, entropy, variance and maximum of the scores", "its forward pass", 0.56, 1.00),
        *("calculus", _SMALL, _SUMS, "SDPA forward"),
    ),
    Line(
        *("forward + backward", _ATTENTION, 0.44, 0.84),
        *("calculus", _SMALL, "attention forward+backward", "SDPA forward+backward"),
    ),
    Line(
        *("JVP, all tangents, which torch's fused attention lacks", "its forward pass", 1.58, 3.07),
        *("calculus", _SMALL, _TANGENTS, "SDPA forward"),
    ),
    Line(
        *("the same", "one matrix of scores", 0.016, 0.012),
        *("calculus", _LONG, _TANGENTS, "the scores alone", "MB"),
    ),
    Line(
        *("JVP, all tangents", _MATH, 0.14, 0.28),
        *("calculus", "(1, 8, 4096, 64)", _TANGENTS, "math backend, all tangents"),
    ),
    Line(
        *("forward, backward and double backward", _MATH, 0.19, 0.33),
        *("calculus", "(1, 8, 4096, 64)", _TWICE, f"math backend, {_TWICE}"),
    ),
    Line(
        *("loss over a vocabulary", "cross-entropy of the logits", 0.51, 0.95),
        *("vocabulary", "4096 x 32000 x 512", "linear_cross_entropy", "whole logits"),
    ),
    Line(
        *("the same", "cross-entropy of the logits", 0.053, 0.053),
        *("vocabulary", "4096 x 32000 x 512", "linear_cross_entropy", "whole logits", "MB"),
    ),
    Line(
        *("InfoNCE", _FULL, 0.58, 0.52),
        *("contrastive", "4096 x 256", "info_nce", "full matrix"),
    ),
    Line(
        *("the same, symmetric", _FULL, 0.49, 0.48),
        *("contrastive", "4096 x 256", "info_nce, symmetric", "full matrix"),
    ),
    Line(
        *("Hopfield retrieval", "the layer in plain torch", 0.35, 0.35),
        *("memory", "4096 in 16384 x 64", "retrieve", "plain torch"),
    ),
    Line(
        *("IMM on one series, all fields", "filterpy's IMM", 0.007, 0.0061),
        *("filtering", "500 steps, 3 modes, 4 states", "IMM, one series, all fields"),
        "filterpy IMM, one series",
    ),
    Line(
        *("fitting two regimes", "statsmodels' `MarkovAutoregression`", 0.08, 0.076),
        *("filtering", "150 observations, 2 regimes", "fit, autoregression"),
        "statsmodels MarkovAutoregression",
    ),
    Line(
        *("1,024 links over 10,000 points", "a loop over scipy's `minimize`", 0.18, 0.20),
        *("measures", "1024 x 10000 x 32", "empirical link", "scipy, gradient, to 1e-10"),
    ),
    Line(
        *("1,000 clouds of 64 points, 10 steps", "a loop over torch calls", 0.20, 0.19),
        *("dynamics", "1000 clouds of 64 x 3", "one batched call", "loop over F.sdpa"),
    ),
    Line(
        *("lens: G, entropy, variances of a model", "the model's forward pass", 1.14, 1.28),
        *("lens", "MiniLM, 16 x 512", "G, entropy, variances", "sdpa forward"),
    ),
    Line(
        *("plus k90, classes, largest weights", _LENS, 0.72, 0.78),
        *("lens", "MiniLM, 16 x 512", "and k90, class, top key", "eager, output_attentions"),
    ),
)


def table() -> str:
    """The README's table of recorded ratios.

    >>> print(table().splitlines()[2].rpartition(" | ")[0])
    | attention forward | torch's fused attention | (1, 8, 1024, 64) | 0.45 | 0.90
    """
    rows = ["| | alternative | shape | ratio | Zen 4 | page |", "|---|---|---|---|---|---|"]
    for line in FRONT:
        what = f"{line.says}, peak memory" if line.unit == "MB" else line.says
        page = f"[{line.bench}](docs/benchmarks/{line.bench}.md)"
        ratios = f"{short(line.page)} | {short(line.zen4)}"
        rows.append(f"| {what} | {line.alternative} | {line.shape} | {ratios} | {page} |")
    return "\n".join(rows)


@dataclass(frozen=True)
class _Group:
    """What is measured in turn: cases of a benchmark's module, made when their turn comes.

    ``long`` cases take seconds each and get fewer rounds. ``repeats`` are those of `interleave`;
    ``scale`` belongs to cases that do a share of the work.
    """

    bench: str
    shape: str
    function: str
    arguments: tuple[Any, ...]
    long: bool = False
    repeats: Mapping[str, int] = field(default_factory=dict[str, int])
    scale: Mapping[str, float] = field(default_factory=dict[str, float])


_GROUPS = (
    _Group("calculus", _SMALL, "attention_cases", ((1, 8, 1024, 64),)),
    _Group("calculus", "(1, 8, 4096, 64)", "math_cases", ((1, 8, 4096, 64),), long=True),
    _Group("vocabulary", "4096 x 32000 x 512", "losses", (4096, 32000, 512), long=True),
    _Group("contrastive", "4096 x 256", "losses", (4096, 256, False)),
    _Group("contrastive", "4096 x 256", "losses", (4096, 256, True)),
    _Group("memory", "4096 in 16384 x 64", "retrieval", (4096, 16384, 64)),
    _Group(
        *("filtering", "500 steps, 3 modes, 4 states", "one_series", (500,)),
        repeats={"IMM, one series, all fields": 20},
    ),
    _Group("filtering", "150 observations, 2 regimes", "fits", (150,)),
    _Group(
        *("measures", "1024 x 10000 x 32", "links", (1024, 10_000, 32, 8)),
        scale={"scipy, gradient, to 1e-10": 128.0},
    ),
    _Group("dynamics", "1000 clouds of 64 x 3", "ensemble", (1000, 64, 3, 10)),
    _Group("lens", "MiniLM, 16 x 512", "model_cases", (16, 512), long=True),
)
# Peak memory, in child processes: whose module, who, and what the alternative needs by itself.
_PEAKS: dict[str, tuple[str, str | float]] = {
    "calculus": ("tangents", 16384**2 * 4 / 2**20),
    "vocabulary": ("ours_large", "whole_large"),
}


def run(
    *,
    rounds: int = 5,
    quick: bool = False,
    progress: ProgressCallback | None = None,
    notes: list[str] | None = None,
) -> list[Row]:
    """Measure the front page on one thread: the fastest of the rounds of each, in CPU time.

    Args:
        rounds: of short cases; those of seconds have two.
        quick: only the cases of milliseconds, at the same shapes.
        progress: called before every single run.
        notes: takes up what was skipped and why; without it a missing package is an error.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        groups = [g for g in _GROUPS if not (quick and g.long)]
        tick = counted(progress, sum(_count(g, rounds) for g in groups) + 3 * (not quick))
        rows: list[Row] = []
        for group in groups:
            try:
                rows += _measured(group, rounds, tick)
            except (InputError, ImportError) as error:
                if notes is None:
                    raise
                notes.append(f"The benchmark {group.bench} was skipped: {error}")
        return _ordered(rows if quick else rows + _memory(tick))
    finally:
        torch.set_num_threads(before)


def _lines(group: _Group) -> list[Line]:
    key = (group.bench, group.shape, "ms")
    return [line for line in FRONT if (line.bench, line.shape, line.unit) == key]


def _count(group: _Group, rounds: int) -> int:
    names = {x for line in _lines(group) for x in (line.quantity, line.against)}
    return len(names) * ((2 if group.long else rounds) + 1)


def _measured(group: _Group, rounds: int, tick: Callable[[str], None]) -> list[Row]:
    """The rows of a group, from those of its cases that the front page names."""
    module = import_module(f"cumulant.lab.bench.{group.bench}")
    made: Cases = getattr(module, group.function)(*group.arguments)
    lines = [line for line in _lines(group) if line.quantity in made]
    names = dict.fromkeys(x for line in lines for x in (line.quantity, line.against))
    seconds = interleave(
        {name: made[name] for name in names},
        rounds=2 if group.long else rounds,
        tick=lambda name: tick(f"{group.shape} {name}"),
        repeats=group.repeats,
        clock=clock(),
    )
    for name, factor in group.scale.items():
        seconds[name] = [factor * x for x in seconds[name]]
    return [fastest(seconds, line.shape, line.quantity, line.against) for line in lines]


def _memory(tick: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for line in (line for line in FRONT if line.unit == "MB"):
        tick(f"{line.shape}: peak memory of {line.quantity}")
        module, (mine, other) = f"cumulant.lab.bench.{line.bench}", _PEAKS[line.bench]
        ours = growth(module, mine)
        theirs = growth(module, other) if isinstance(other, str) else other
        if ours is not None and theirs is not None:
            named = (line.shape, line.quantity, line.against)
            rows.append(Row(*named, ours, theirs, ours / theirs, float("inf"), "MB"))
    return rows


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """As the front page has them."""
    return [row for line in FRONT for row in rows if line.of(row)]
