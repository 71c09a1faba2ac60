"""`Progress` and `ProgressCallback`: progress reports of long functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

__all__ = ["Progress", "ProgressCallback", "counted"]


@dataclass(frozen=True)
class Progress:
    """Progress of a long computation.

    Attributes:
        done: number of steps, texts or time units finished.
        total: the total; None if unknown.
        what: the current activity.
        value: current value of the objective, if there is one.
    """

    done: float
    total: float | None = None
    what: str = ""
    value: float | None = None


class ProgressCallback(Protocol):
    """Type of ``progress=`` arguments: any function of one `Progress`.

    >>> import torch, cumulant as cm
    >>> seen = []
    >>> run = cm.dynamics.simulate(torch.eye(3), 2, progress=seen.append)
    >>> [(x.done, x.total) for x in seen]
    [(0.0, 2.0), (1.0, 2.0), (2.0, 2.0)]
    """

    def __call__(self, progress: Progress, /) -> object: ...


def counted(progress: ProgressCallback | None, total: int | None = None) -> Callable[[str], None]:
    """A counter to call with the name of each step before it begins.

    >>> seen = []
    >>> step = counted(seen.append, 2)
    >>> step("first"), step("second")
    (None, None)
    >>> [(x.done, x.total, x.what) for x in seen]
    [(0, 2, 'first'), (1, 2, 'second')]
    """
    done = count()

    def step(what: str) -> None:
        if progress is not None:
            progress(Progress(next(done), total, what))

    return step
