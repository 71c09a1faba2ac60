"""Jobs in several processes at once: one thread each, stopped together, ended with this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from cumulant.core.errors import GroupError

__all__ = ["Workers", "cores", "duration", "report", "stopping"]

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """How many processors this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def duration(seconds: float) -> str:
    """
    >>> duration(40), duration(400), duration(9000)
    ('40 s', '7 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Workers:
    """Processes that make jobs.

    They are spawned when the first job needs them, and import torch once each. If the block is left
    by an exception, such as Ctrl-C, they stop; if this process dies, they do too.

    Args:
        count: of processes.
        grace: seconds that a job may take to save its state once it is to stop.
    """

    def __init__(self, count: int, *, grace: float = 0.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._told: Any = context.SimpleQueue()
        # A plain byte: setting an event waits for those that wait for it, dead or alive.
        self._stop: Any = context.RawValue("b", 0)
        given = (self._told, self._stop, os.getpid(), grace)
        self._pool = ProcessPoolExecutor(count, context, _begin, given)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._stop.value = 1
        self._pool.shutdown(cancel_futures=True)

    def each(
        self,
        work: Callable[[T], R],
        given: Iterable[T],
        *,
        told: Callable[[Any], object] = lambda _: None,
        waiting: Callable[[], object] = lambda: None,
    ) -> Iterator[R]:
        """What ``work`` returns for each argument, about in the order in which jobs end.

        Args:
            work: a function that can be pickled; jobs begin in the order of their arguments.
            given: the arguments.
            told: called with what jobs `report`.
            waiting: called twice a second.

        Raises:
            GroupError: a process died.
        """
        number: dict[Future[R], int] = {self._pool.submit(work, x): i for i, x in enumerate(given)}
        pending = set(number)
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            self._drain(told)
            waiting()
            for future in sorted(done, key=number.__getitem__):
                try:
                    found = future.result()
                except BrokenProcessPool:
                    raise GroupError(
                        "a worker process died, perhaps for lack of memory: run the same command "
                        "again with fewer --processes."
                    ) from None
                yield found

    def _drain(self, told: Callable[[Any], object]) -> None:
        while not self._told.empty():
            told(self._told.get())


_queue: Any = None
_stopping = threading.Event()


def report(what: Any) -> None:
    """Inside a job: tell the process that waits for it."""
    if _queue is not None:
        _queue.put(what)


def stopping() -> bool:
    """Inside a job: whether it should save its state and end."""
    return _stopping.is_set()


def _begin(told: Any, stop: Any, parent: int, grace: float) -> None:
    """In a new process: one thread; Ctrl-C is the parent's, which says when to stop."""
    global _queue
    _queue = told
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent and not stop.value:
            time.sleep(0.3)
        _stopping.set()
        time.sleep(grace)
        os._exit(1)  # jobs that were to save their state have done so

    threading.Thread(target=watch, daemon=True).start()
