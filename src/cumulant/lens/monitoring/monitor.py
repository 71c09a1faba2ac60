"""`Monitor`: what attention does while a model trains, at little cost and without changing it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.distributed.ranks import process_rank
from cumulant.lens.monitoring.alarms import DEFAULTS, Alarm, AttentionAlarm, Bell, Thresholds
from cumulant.lens.monitoring.log import TABLE, MonitorLog, Watched, rows_of
from cumulant.lens.monitoring.watching import Layers, Observed, Replayed
from cumulant.lens.observing import is_compiled, unseen
from cumulant.lens.sampling import Sample

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore[reportMissingTypeStubs]

__all__ = ["Monitor"]


class Monitor:
    """Figures of every attention head while a model trains, on every 50th step.

    Entropy, effective keys, largest score, score variance and mass on the first token, of a sample
    of queries (docs/monitoring.md). Call `step` at the end of each training step. Loss, gradients,
    weights and random numbers are bit by bit what they would be without it.

    Only forward passes with gradients count, and of these the first of a step: not evaluation, not
    further micro-batches, not the second pass of a checkpoint. Under data parallelism every rank
    watches its own batch; rank 0 alone writes files and warns.

    Args:
        model: the model, ready to train; also inside or around DDP, FSDP2 and ``torch.compile``.
        every: steps from one watched step to the next; the first step is watched.
        queries: how many queries of each layer to measure on a watched step.
        folder: where to keep a log, made if missing; each watched step is on disk when `step`
            returns, and `close` adds a Parquet file.
        resume: continue the log that is in `folder`.
        alarm: called with each new `Alarm`, on every rank. There is a warning in any case.
        thresholds: when to ring.
        compiled: whether the model is going to be compiled by somebody else. By default it is what
            the model says.
        seed: for the choice of queries.

    Raises:
        InputError: the model is no module, a number is out of range, or the folder cannot be
            written.

    >>> import torch, cumulant as cm
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> with cm.lens.Monitor(layer, every=2) as monitor:
    ...     for _ in range(5):
    ...         optimizer.zero_grad()
    ...         layer(torch.randn(3, 5, 8)).square().mean().backward()
    ...         optimizer.step()
    ...         _ = monitor.step()
    >>> sorted(set(monitor.table()["step"]))
    [0, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        queries: int = 256,
        *,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        alarm: Callable[[Alarm], object] | None = None,
        thresholds: Thresholds = DEFAULTS,
        compiled: bool | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"Monitor takes a torch.nn.Module, not a {type(model).__name__}.")
        if alarm is not None and not callable(alarm):
            raise InputError(f"Monitor: alarm must be a function, not {type(alarm).__name__}.")
        self.model = model
        self.every = whole("Monitor", "every", every, 1)
        self.queries = whole("Monitor", "queries", queries, 1)
        self._seed = whole("Monitor", "seed", seed, 0)
        self._alarm, self._bell, self._thresholds = alarm, Bell(thresholds), thresholds
        self.log = MonitorLog()
        self._first = process_rank() == 0
        if folder is not None and self._first:
            self.log.keep(folder, {"monitor": 1}, resume)
        self.alarms: list[Alarm] = []
        self.steps = 0
        self._layers: Layers = {}
        self._watch: Observed | Replayed | None = None
        self._open = False
        self.start(0, compiled=compiled)

    def __repr__(self) -> str:
        kind = type(self.model).__name__
        seen = f"{len(self.log.steps)} watched, {len(self.alarms)} alarms"
        return f"Monitor({kind}, every {self.every} steps; {self.steps} steps, {seen})"

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, step: int, *, compiled: bool | None = None) -> None:
        """Begin anew at a step: after a restart from a checkpoint, or for another `compiled`.

        Args:
            step: how many training steps are done.
            compiled: as for the class.
        """
        self.steps = whole("Monitor", "step", step, 0)
        self._leave()
        if compiled is None:
            compiled = any(map(is_compiled, self.model.modules()))
        self._watch = (Replayed if compiled else Observed)(self.model, self._layers)
        self._due()

    def step(self, loss: Tensor | float | None = None) -> Watched | None:
        """A training step is done. Call this after each step of the optimizer.

        Args:
            loss: kept with the figures of a watched step; read on watched steps only.

        Returns:
            The figures of this step if it was watched; otherwise None.

        Raises:
            InputError: the monitor is closed, or has seen no attention by the end of the first
                step.
        """
        if self._watch is None:
            raise InputError("the monitor is closed: make another, or call start().")
        watched = self._read(loss) if self._open else None
        self.steps += 1
        self._due()
        if watched is not None:
            self._ring(watched)
        return watched

    def _due(self) -> None:
        """Watch the coming step if it is its turn."""
        if self._watch is not None and not self._open and self.steps % self.every == 0:
            self._watch.open(Sample(self.queries, self._seed + self.steps, self._replays))
            self._open = True

    @property
    def _replays(self) -> bool:
        return isinstance(self._watch, Replayed)

    def _read(self, loss: Tensor | float | None) -> Watched | None:
        recorder = None if self._watch is None else self._watch.recorder
        if recorder is None or self._watch is None:
            return None
        if not recorder.records:
            if self.log.steps:  # another part of the model was trained: try the next step
                return None
            self.close()
            raise InputError(_nothing(self.model, recorder.stack.frames, recorder.calls))
        self._watch.close()
        self._open = False
        layers = {layer.number: layer for layer in self._layers.values()}
        names = {record.layer: _plain(layers[record.layer].name) for record in recorder.records}
        value = loss.detach().mean().item() if isinstance(loss, Tensor) else loss
        watched = Watched(
            self.steps, dict(sorted(names.items())), rows_of(recorder.records, layers), value
        )
        self.log.add(watched)
        return watched

    def _ring(self, watched: Watched) -> None:
        for alarm in self._bell.check(watched):
            self.alarms.append(alarm)
            if self._alarm is not None:
                self._alarm(alarm)
            if self._first:
                warnings.warn(alarm.message, AttentionAlarm, stacklevel=3)

    def table(self) -> DataFrame:
        """A pandas table with one row per (step, layer, head)."""
        return self.log.table()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as a Parquet file, with units and definitions."""
        return self.log.save(path)

    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Write one HTML page of curves, which makes no network request."""
        named = title or type(self.model).__name__
        return self.log.report(path, title=named, thresholds=self._thresholds)

    def close(self) -> None:
        """Take everything off the model, and write the Parquet file of the folder."""
        self._leave()
        self._watch = None
        if self.log.folder is not None and self.log.steps:
            self.log.save(self.log.folder / TABLE)

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.end()
        self._open = False


def _plain(name: str) -> str:
    """The name of a module without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def _nothing(model: nn.Module, frames: int, calls: int) -> str:
    """Why the first step showed no attention."""
    name = type(model).__name__
    if calls:
        return (
            f"{name} ran without gradients in this step: only forward passes with gradients are "
            "watched. Call monitor.step() after training steps only."
        )
    if frames:
        return unseen(model)
    return (
        f"{name} was not called in this step, so the monitor saw nothing. Pass the very module "
        "that is trained. If it is compiled after the monitor was made, pass the compiled model, "
        "or compiled=True."
    )
