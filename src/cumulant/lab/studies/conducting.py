"""All runs of a study: the search, then the runs that count, several processes at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, printable
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.lab.studies.judging import best
from cumulant.lab.studies.running import Run, Stopped, finished, run
from cumulant.lab.studies.study import Job, Study
from cumulant.lab.studies.tasks import start
from cumulant.lab.workers import Workers, duration, report, stopping

__all__ = ["Estimate", "conduct", "estimate"]

# Seconds that a run may take to end a step and save its state.
_GRACE = 10.0


class Estimate:
    """Expected real time of a study on some processes, from the first steps of every variant."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps = seconds, steps

    def __str__(self) -> str:
        return duration(self.seconds)


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
    with Workers(processes, grace=_GRACE) if processes > 1 else nullcontext() as workers:
        crew = _Crew(workers, folder, total, progress)
        runs = crew.make(study.tuning_jobs())
        chosen = best(study, runs)
        finals = [job for v in study.variants for job in study.final_jobs(v, *chosen[v])]
        return [*runs, *crew.make(finals)]


class _Crew:
    """Makes runs, in workers or in this process; counts steps."""

    def __init__(
        self, workers: Workers | None, folder: Path, total: int, progress: ProgressCallback | None
    ) -> None:
        self.workers, self.folder, self.total, self.progress = workers, folder, total, progress
        self.done, self.made, self.begun = 0, 0, time.monotonic()

    def make(self, jobs: Iterable[Job]) -> list[Run]:
        """Runs in the order of the jobs."""
        wanted = list(jobs)
        found: dict[str, Run] = {}
        for job in wanted:
            if made := finished(job, self.folder):
                found[job.id] = made
                self.done += _steps(job)
        left = [job for job in wanted if job.id not in found]
        for made in (
            self._alone(left) if self.workers is None else self._together(self.workers, left)
        ):
            found[made.id] = made
        return [found[job.id] for job in wanted]

    def _alone(self, jobs: Sequence[Job]) -> Iterable[Run]:
        for job in jobs:
            yield run(job, self.folder, counted=lambda n, job=job: self._tell(n, job.id))

    def _together(self, workers: Workers, jobs: Sequence[Job]) -> Iterable[Run]:
        given = [(job, self.folder) for job in jobs]
        return workers.each(_work, given, told=lambda told: self._tell(*told))

    def _tell(self, steps: int, name: str) -> None:
        self.done, self.made = self.done + steps, self.made + steps
        if self.progress is not None:
            spent = time.monotonic() - self.begun
            rest = spent / self.made * (self.total - self.done) if self.made else 0.0
            sure = spent > 3 and self.made > 0.02 * self.total
            left = f"about {duration(rest)} left, " if sure else ""
            self.progress(Progress(self.done, self.total, f"{left}{name}"))


def _work(given: tuple[Job, Path]) -> Run:
    """A run in a worker; a few reports a second."""
    (job, folder), count, last = given, 0, time.monotonic()

    def tell(steps: int) -> None:
        nonlocal count, last
        count += steps
        if time.monotonic() - last > 0.3:
            report((count, job.id))
            count, last = 0, time.monotonic()

    try:
        return run(job, folder, counted=tell, stop=stopping)
    except Stopped:
        raise KeyboardInterrupt from None
    finally:
        report((count, job.id))
