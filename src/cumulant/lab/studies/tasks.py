"""What a run of a study does: `Work`, and the kinds of it by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from cumulant.core.errors import InputError
from cumulant.lab.studies.study import Job, Study

__all__ = ["TASKS", "Work", "measured", "objective_of", "refusal", "settings_of", "start"]

# Name: module and class. Each class has `SETTINGS`, what a study file may set, with defaults;
# `check`, which raises an InputError for settings it cannot run; and `quantities`, the names of the
# numbers of a run with such settings.
TASKS = {
    "language": ("language", "Language", "next or masked characters of a text, in bits"),
    "contrast": ("contrast", "Contrast", "contrastive learning of digits, dot product or cosine"),
    "recall": ("recall", "Recall", "how many patterns a kernel recalls, without training"),
    "features": ("features", "Features", "positive random features against exact attention"),
}


class Work(Protocol):
    """A run in steps; the runner decides when to measure, save and stop.

    Attributes:
        steps: how many.
        every: steps between measurements.
        objective: the quantity that the search minimizes and curves show.
        limit: a loss that stays above this, or one that is not finite, is a divergence.
        worst: the objective of a run that diverged: knowing nothing.
    """

    steps: int
    every: int
    objective: str
    limit: float
    worst: float

    def step(self, n: int) -> float:
        """Make step n, counted from 0; the loss."""
        ...

    def measure(self) -> dict[str, float]:
        """A point of the curves."""
        ...

    def finish(self) -> dict[str, float]:
        """The numbers of the run, objective included."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything that a later step depends on: numbers, strings, tensors."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


def _kind(task: str) -> Any:
    module, name, _ = TASKS[task]
    return getattr(import_module(f"cumulant.lab.studies.{module}"), name)


def settings_of(task: str) -> dict[str, Any]:
    """What a study file may set for this task, with defaults."""
    return dict(_kind(task).SETTINGS)


def refusal(task: str, settings: Mapping[str, Any]) -> str:
    """Why the task cannot run with these settings; empty if it can."""
    try:
        _kind(task).check(settings)
    except InputError as error:
        return str(error)
    return ""


def measured(study: Study, variant: str = "") -> list[str]:
    """The quantities of a variant that a rule may name, or those of any."""
    found = ["diverged", "max_rate"] if study.tuning.steps else []
    for name in [variant] if variant else study.variants:
        found += _kind(study.task).quantities(study.settings_of(name))
    return [*dict.fromkeys(found)]


def start(job: Job) -> Work:
    """The work of a job, at its beginning."""
    return _kind(job.task)(job.settings, seed=job.seed, rate=job.rate, beta=job.beta)


def objective_of(task: str) -> str:
    """The quantity that the search minimizes and curves show."""
    return _kind(task).objective
