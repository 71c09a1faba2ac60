"""All runs of a study: the search, then the runs that count, several processes at once."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, printable
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.lab.studies.judging import best
from cumulant.lab.studies.running import Run, Stopped, finished, run
from cumulant.lab.studies.study import Job, Study
from cumulant.lab.studies.tasks import start

__all__ = ["Estimate", "conduct", "estimate"]


class Estimate:
    """Expected real time of a study on some processes, from the first steps of every variant."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps = seconds, steps

    def __str__(self) -> str:
        return duration(self.seconds)


def duration(seconds: float) -> str:
    """
    >>> duration(40), duration(400), duration(9000)
    ('40 s', '7 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def estimate(study: Study, processes: int) -> Estimate:
    """Time a few steps of each variant and count the steps of all runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cost: dict[str, float] = {}
    try:
        for variant in study.variants:
            work = start(_guess(study, variant)[0])
            work.step(0)
            begun = time.process_time()
            for n in range(1, min(3, work.steps)):
                work.step(n)
            cost[variant] = (time.process_time() - begun) / max(1, min(3, work.steps) - 1)
    except InputError:
        raise
    except (MemoryError, RuntimeError) as error:
        why = printable(str(error).split("\n")[0])
        raise InputError(f"{study.name} cannot make a step: {why}") from None
    finally:
        torch.set_num_threads(threads)
    jobs = _all(study)
    steps = sum(_steps(job) for job in jobs)
    seconds = sum(_steps(job) * cost[job.variant] for job in jobs)
    return Estimate(seconds / max(1, processes), steps)


def _guess(study: Study, variant: str) -> list[Job]:
    return study.final_jobs(variant, study.tuning.rates[0], study.tuning.betas[0])


def _all(study: Study) -> list[Job]:
    finals = [job for variant in study.variants for job in _guess(study, variant)]
    return [*study.tuning_jobs(), *finals]


def _steps(job: Job) -> int:
    """Without starting it: tasks that do not train list their steps instead."""
    listed = job.settings.get("dims") or job.settings.get("counts")
    return len(listed) if listed else int(job.settings["steps"])


def conduct(
    study: Study,
    folder: Path,
    *,
    processes: int = 1,
    progress: ProgressCallback | None = None,
    budget: bool = True,
) -> list[Run]:
    """Make all runs of the study, or those that are missing in the folder.

    Args:
        study: which.
        folder: for journals; the same folder resumes.
        processes: runs at once, each on one thread.
        progress: told of steps and of the time left.
        budget: refuse a study that is expected to take longer than its budget.

    Raises:
        InputError: the folder holds other runs; the budget does not suffice.
    """
    make_folder(folder)
    done = {job.id: x for job in study.tuning_jobs() if (x := finished(job, folder))}
    if budget and not done:
        expected = estimate(study, processes)
        if expected.seconds > 60 * study.minutes:
            raise InputError(
                f"{study.name} would take about {expected} with {processes} at once, but its "
                f"budget is {study.minutes:g} minutes: raise the budget with --minutes, or lower "
                "steps, seeds or variants."
            )
    total = sum(_steps(job) for job in _all(study))
    with _Crew(processes, folder, total, progress) as crew:
        runs = crew.make(study.tuning_jobs())
        chosen = best(study, runs)
        finals = [job for v in study.variants for job in study.final_jobs(v, *chosen[v])]
        return [*runs, *crew.make(finals)]


class _Crew:
    """Processes that make runs, or this one if one is enough; counts steps."""

    def __init__(
        self, processes: int, folder: Path, total: int, progress: ProgressCallback | None
    ) -> None:
        self.folder, self.total, self.progress = folder, total, progress
        self.processes, self.done, self.made = processes, 0, 0
        self.begun = time.monotonic()
        self._pool: ProcessPoolExecutor | None = None
        self._told: Any = None
        self._halt: Any = None

    def __enter__(self) -> _Crew:
        if self.processes > 1:
            context = multiprocessing.get_context("spawn")
            self._told, self._halt = context.Queue(), context.RawValue("b", 0)
            self._pool = ProcessPoolExecutor(
                self.processes, context, _begin, (self._told, self._halt, os.getpid())
            )
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._pool is not None:
            if kind is not None:  # a signal may have reached this process alone
                self._halt.value = 1
            self._pool.shutdown(cancel_futures=True)

    def make(self, jobs: Iterable[Job]) -> list[Run]:
        """Runs in the order of the jobs."""
        wanted = list(jobs)
        found: dict[str, Run] = {}
        for job in wanted:
            if made := finished(job, self.folder):
                found[job.id] = made
                self.done += _steps(job)
        left = [job for job in wanted if job.id not in found]
        for made in self._alone(left) if self._pool is None else self._together(self._pool, left):
            found[made.id] = made
        return [found[job.id] for job in wanted]

    def _alone(self, jobs: Sequence[Job]) -> Iterable[Run]:
        for job in jobs:
            yield run(job, self.folder, counted=lambda n, job=job: self._tell(n, job.id))

    def _together(self, pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> Iterable[Run]:
        pending: set[Future[Run]] = {pool.submit(_work, job, self.folder) for job in jobs}
        while pending:
            finished_now, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            self._drain()
            for future in finished_now:
                try:
                    yield future.result()
                except BrokenProcessPool:
                    raise InputError(
                        "a process of the study died, perhaps for lack of memory: repeat the same "
                        "command to resume, with fewer --processes."
                    ) from None

    def _drain(self) -> None:
        while True:
            try:
                self._tell(*self._told.get_nowait())
            except queue.Empty:
                return

    def _tell(self, steps: int, name: str) -> None:
        self.done, self.made = self.done + steps, self.made + steps
        if self.progress is not None:
            spent = time.monotonic() - self.begun
            rest = spent / self.made * (self.total - self.done) if self.made else 0.0
            sure = spent > 3 and self.made > 0.02 * self.total
            left = f"about {duration(rest)} left, " if sure else ""
            self.progress(Progress(self.done, self.total, f"{left}{name}"))


_queue: Any = None
_halt: Any = None
_stopping = threading.Event()


def _begin(told: Any, halt: Any, parent: int) -> None:
    """In a new process: one thread, saves on Ctrl-C, ends when its parent does."""
    global _queue, _halt
    _queue, _halt = told, halt
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # journals survive that

    threading.Thread(target=watch, daemon=True).start()


def _stop(number: int, frame: Any) -> None:
    _stopping.set()


def _work(job: Job, folder: Path) -> Run:
    """A run in this process; a few reports a second."""
    count, last = 0, time.monotonic()

    def tell(steps: int) -> None:
        nonlocal count, last
        count += steps
        if time.monotonic() - last > 0.3:
            _queue.put((count, job.id))
            count, last = 0, time.monotonic()

    try:
        return run(job, folder, counted=tell, stop=lambda: _stopping.is_set() or bool(_halt.value))
    except Stopped:
        raise KeyboardInterrupt from None
    finally:
        _queue.put((count, job.id))
