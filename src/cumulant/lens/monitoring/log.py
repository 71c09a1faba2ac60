"""What a monitor has seen: figures of each head at each watched step, in memory and in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.files import destination, make_folder, printable, write_file
from cumulant.core.journal import Journal
from cumulant.lens.columns import COLUMNS, Column
from cumulant.lens.files import parquet, write_table
from cumulant.lens.monitoring.alarms import DEFAULTS, Thresholds
from cumulant.lens.tables import pandas

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore[reportMissingTypeStubs]

    from cumulant.lens.recorder import Layer, Record

__all__ = ["FIGURES", "JOURNAL", "MONITOR_COLUMNS", "TABLE", "MonitorLog", "Watched", "figures_of"]

JOURNAL, TABLE = "monitor.journal", "monitor.parquet"

_OWN = (
    Column("step", "steps", "number of training steps done before this one"),
    Column("queries", "count", "number of queries measured"),
    Column("entropy", "nats", "mean over the queries of H_i = -sum_j p_ij log p_ij", "T7"),
    Column("effective_keys", "keys", "mean of exp(H_i)", "T7"),
    Column(
        "entropy_share", "fraction", "mean of H_i / log(visible keys), of queries with two", "T7"
    ),
    Column("score_max", "nats", "largest score, as the softmax sees it; a sink logit is left out"),
    Column("score_variance", "nats^2", "mean of Var_i[scale <q_i, k>], without the bias", "T7"),
    Column("sink_mass", "probability", "mean weight on the first token and on a sink logit", "T12"),
    Column("loss", "", "the loss that was passed to `step`"),
)
MONITOR_COLUMNS = {
    **{name: COLUMNS[name] for name in ("layer", "head", "module")},
    **{column.name: column for column in _OWN},
}
FIGURES = (
    *("entropy", "effective_keys", "entropy_share", "score_max", "score_variance", "sink_mass"),
)


@dataclass(frozen=True)
class Watched:
    """One watched step: a row per (layer, head).

    Attributes:
        step: training steps done before it.
        modules: name of each layer's module.
        rows: columns `layer`, `head`, `queries` and the figures, each ``(rows,)``.
        loss: the loss passed to `step`, or None.
    """

    step: int
    modules: dict[int, str]
    rows: dict[str, Tensor]
    loss: float | None = None

    def layer(self, number: int) -> dict[str, Tensor]:
        """The figures of one layer, ``(heads,)`` each."""
        own = self.rows["layer"] == number
        return {name: self.rows[name][own] for name in FIGURES}

    def scalars(self) -> dict[str, float]:
        """For loggers: ``attention/<figure>/layer_<number>``, over the heads of each layer.

        `score_max` is the largest of its heads; the others are means.
        """
        out: dict[str, float] = {}
        for number in self.modules:
            for name, x in self.layer(number).items():
                value = x.max() if name == "score_max" else x.mean()
                out[f"attention/{name}/layer_{number}"] = float(value)
        return out

    def _state(self) -> dict[str, Any]:
        modules = [[number, name] for number, name in self.modules.items()]
        return {"step": self.step, "modules": modules, "rows": self.rows, "loss": self.loss}

    @classmethod
    def _of(cls, state: Mapping[str, Any]) -> Watched:
        return cls(state["step"], dict(map(tuple, state["modules"])), state["rows"], state["loss"])


def figures_of(record: Record) -> dict[str, Tensor]:
    """The figures of one call, a number for each head, in double precision."""
    visible = record.columns["visible"]
    keep_bhm = record.real[:, None] & (visible > 0)

    def mean(x: Tensor, of: Tensor) -> Tensor:
        total = x.double().masked_fill(~of, 0.0).sum((0, 2))
        return total / of.sum((0, 2)).clamp_min(1)

    entropy = record.columns["entropy"]
    several = keep_bhm & (visible > 1)
    share = entropy / visible.clamp_min(2).log()
    names = ("entropy", "effective_keys", "score_variance", "sink_mass")
    figures = {name: mean(record.columns[name], keep_bhm) for name in names}
    # With one visible key there is nothing to choose: such a head is not concentrated.
    figures["entropy_share"] = torch.where(several.any(2).any(0), mean(share, several), 1.0)
    score = record.columns["score_max"].double()
    figures["score_max"] = score.masked_fill(~keep_bhm, -torch.inf).amax((0, 2))
    return {"queries": keep_bhm.sum((0, 2)), **{name: figures[name] for name in FIGURES}}


class MonitorLog:
    """Watched steps, as a table and in files; `load` reads those of a run that was killed, too."""

    def __init__(self, steps: Sequence[Watched] = ()) -> None:
        self.steps: list[Watched] = list(steps)
        self._journal: Journal | None = None
        self.folder: Path | None = None

    def __repr__(self) -> str:
        if not self.steps:
            return "MonitorLog(nothing watched yet)"
        heads = len(self.steps[-1].rows["head"])
        first, last = self.steps[0].step, self.steps[-1].step
        return f"MonitorLog({len(self.steps)} watched steps from {first} to {last}, {heads} heads)"

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> MonitorLog:
        """What the monitor of a finished, running or killed training wrote into its folder.

        Raises:
            InputError: there is no log in the folder.
        """
        path = Path(folder) / JOURNAL
        if not path.is_file():
            raise InputError(f"{printable(folder)} holds no {JOURNAL}: name a Monitor's folder.")
        journal = Journal(path, {})
        return cls(_latest([Watched._of(x) for x in journal]))

    def keep(self, folder: str | os.PathLike[str], settings: dict[str, Any], resume: bool) -> None:
        """Write every further step into a folder, which must be writable now.

        Raises:
            InputError: it is not; or it holds the log of another run.
        """
        self.folder = make_folder(folder)
        parquet()
        journal = self._journal = Journal(destination(self.folder / JOURNAL), settings)
        if len(journal) and not resume:
            raise InputError(
                f"{printable(self.folder)} holds the log of another run: choose another folder, or "
                "pass resume=True to continue it."
            )
        if journal.differs:
            raise InputError(
                f"{printable(self.folder)} was begun with other settings "
                f"({', '.join(journal.differs)}): use the same, or choose another folder."
            )
        self.steps = _latest([Watched._of(x) for x in journal])
        probe = self.folder / ".cumulant-probe"  # full disks and odd mounts say so only on writing
        write_file(probe, "")
        probe.unlink()

    def add(self, watched: Watched) -> None:
        """Add a step; it is on disk when this returns, if there is a folder."""
        self.steps = _latest([*self.steps, watched])
        if self._journal is not None:
            self._journal.append(watched._state())

    def table(self) -> DataFrame:
        """A pandas table with one row per (step, layer, head).

        Columns are defined in ``cumulant.lens.monitoring.log.MONITOR_COLUMNS``.

        Raises:
            InputError: nothing was watched yet.
        """
        if not self.steps:
            raise InputError("nothing was watched yet: train a step, then call monitor.step().")
        frames = pandas()
        parts: list[Any] = []
        for watched in self.steps:
            rows = {name: x.numpy() for name, x in watched.rows.items()}
            part = frames.DataFrame({"step": watched.step, **rows})
            part.insert(3, "module", part["layer"].map(watched.modules))
            if any(x.loss is not None for x in self.steps):
                part["loss"] = float("nan") if watched.loss is None else watched.loss
            parts.append(part)
        return frames.concat(parts, ignore_index=True)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as a Parquet file, with units and definitions."""
        write_table(self.table(), Path(path), "monitor", MONITOR_COLUMNS)
        return Path(path)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "Training",
        thresholds: Thresholds = DEFAULTS,
    ) -> Path:
        """Write one HTML page of curves, which makes no network request."""
        from cumulant.lens.monitoring.page import render

        target = destination(path)
        return write_file(target, render(self, title, thresholds))


def rows_of(records: Sequence[Record], layers: Mapping[int, Layer]) -> dict[str, Tensor]:
    """The figures of all layers as columns with a row for each head."""
    parts: list[dict[str, Tensor]] = []
    for record in sorted(records, key=lambda r: r.layer):
        figures = figures_of(record)
        heads = layers[record.layer].heads
        where = {"layer": torch.full((heads,), record.layer), "head": torch.arange(heads)}
        parts.append({**where, **figures})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _latest(steps: Sequence[Watched]) -> list[Watched]:
    """In order; a step that was done again, after a restart from a checkpoint, counts once."""
    return [x for _, x in sorted({x.step: x for x in steps}.items())]
