"""One run of a study: steps, curves, and a journal from which it continues after a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, printable
from cumulant.core.journal import Journal
from cumulant.lab.studies.study import Job
from cumulant.lab.studies.tasks import Work, start

__all__ = ["Run", "Stopped", "finished", "run"]

# Share of the time that saving may take. A state of a megabyte takes ten milliseconds, so a kill
# loses a fifth of a second of work; if a step takes longer than that, it loses a step.
_SAVING = 0.05
# A run diverges if its loss is above the limit for so many steps in a row, or is not finite, or if
# it ends worse than knowing nothing. One bad step is a spike, from which runs recover.
_PATIENCE = 20


class Stopped(Exception):  # noqa: N818
    """The run was asked to stop; its state is saved."""


@dataclass
class Run:
    """What a job came to.

    Attributes:
        job: which.
        numbers: of the finished run.
        curve: measurements, each with its step.
        diverged: the step at which it did, or None. A run that diverges is a result: its objective
            is that of knowing nothing.
        seconds: CPU time, over all its parts.
    """

    job: Job
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    curve: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    diverged: int | None = None
    seconds: float = 0.0

    @property
    def id(self) -> str:
        return self.job.id

    def as_dict(self, *, curve: bool = True) -> dict[str, Any]:
        """For JSON and journals."""
        about = self.job.as_dict()
        del about["settings"], about["task"]
        rest = {"diverged": self.diverged, "seconds": self.seconds}
        return {
            **about,
            "numbers": self.numbers,
            **rest,
            **({"curve": self.curve} if curve else {}),
        }


def _journal(job: Job, folder: Path) -> Journal:
    journal = Journal(folder / f"{job.id}.journal", job.as_dict())
    if journal.differs:
        raise InputError(
            f"{printable(folder.parent)} holds runs of another study or of other settings "
            f"({job.variant}: {', '.join(journal.differs)}); choose another folder."
        )
    return journal


def finished(job: Job, folder: Path) -> Run | None:
    """The run, if it is already there."""
    last = _journal(job, folder).last
    return _from(job, last["result"]) if last and last["result"] else None


def _from(job: Job, kept: dict[str, Any]) -> Run:
    return Run(job, kept["numbers"], kept["curve"], kept["diverged"], kept["seconds"])


def run(
    job: Job,
    folder: Path,
    *,
    counted: Callable[[int], object] = lambda steps: None,
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """Make the run, or what is left of it, on one thread.

    Args:
        job: which.
        folder: of journals.
        counted: is told how many steps were made.
        stop: asked after every step; if true, the state is saved.

    Raises:
        Stopped: it was asked to.
    """
    journal = _journal(job, make_folder(folder))
    last: dict[str, Any] | None = journal.last
    if last and last["result"]:
        return _from(job, last["result"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return _run(job, journal, last, counted, stop)
    finally:
        torch.set_num_threads(threads)


def _run(
    job: Job,
    journal: Journal,
    last: dict[str, Any] | None,
    counted: Callable[[int], object],
    stop: Callable[[], bool],
) -> Run:
    work, made, begun, n = start(job), Run(job), time.process_time(), 0
    before, above = 0.0, 0
    if last:
        n, made.curve, before = last["step"], last["curve"], last["seconds"]
        above = last["above"]
        work.restore(last["state"])
        counted(n)

    def seconds() -> float:
        return before + time.process_time() - begun

    def save() -> float:
        saving = time.perf_counter()
        kept = {"step": n, "curve": made.curve, "seconds": seconds(), "state": work.state()}
        journal.append({**kept, "above": above, "result": None})
        journal.keep(1, 16)
        return time.perf_counter() - saving

    saved, cost = time.perf_counter(), 0.0
    while n < work.steps:
        loss = work.step(n)
        n += 1
        counted(1)
        above = above + 1 if loss > work.limit else 0
        if not math.isfinite(loss) or above >= _PATIENCE:
            made.diverged = n
            break
        if n % work.every == 0 or n == work.steps:
            made.curve.append({"step": n, **work.measure()})
        halt = stop()
        if halt or (n < work.steps and time.perf_counter() - saved > cost / _SAVING):
            cost = save()
            saved = time.perf_counter()
        if halt:
            raise Stopped(job.id)
    made.numbers = _numbers(work, made)
    made.seconds = round(seconds(), 2)  # as files have it, so that they add up to the same
    counted(work.steps - n)
    result = {"numbers": made.numbers, "curve": made.curve}
    result |= {"diverged": made.diverged, "seconds": made.seconds}
    journal.rewrite([{"result": result}])
    return made


def _numbers(work: Work, made: Run) -> dict[str, float]:
    """Finite numbers only; to end worse than knowing nothing is a divergence too."""
    if made.diverged is None:
        numbers = work.finish()
        reached = numbers[work.objective]
        if math.isfinite(reached) and reached <= work.worst:
            return {n: float(x) for n, x in numbers.items() if math.isfinite(x)}
        made.diverged = work.steps
    return {work.objective: work.worst}
