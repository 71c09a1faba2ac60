"""How many of torch's threads take part in a piece of work."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter

import torch

__all__ = ["one_thread", "threads_that_help"]

ROUNDS = 5


@contextmanager
def one_thread(when: bool = True) -> Generator[None]:
    """One of torch's threads does what is inside, where `when` says so.

    Threads wait for each other after every operation. For small ones that gains nothing, and on a
    machine with other work a wait takes a time slice of the scheduler: ten times the operation.

    >>> before = torch.get_num_threads()
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    threads = torch.get_num_threads()
    if not when or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_that_help() -> int:
    """All of torch's threads, or 1 where other work on the machine makes them slower than one.

    Measured on products of matrices, for some 50 ms.
    """
    threads = torch.get_num_threads()
    x, y = torch.ones(128, 1024), torch.ones(1024, 1024)
    seconds: dict[int, list[float]] = {1: [], threads: []}
    for _ in range(ROUNDS):
        for count, taken in seconds.items():
            with one_thread(count == 1):
                started = perf_counter()
                torch.matmul(x, y)
                taken.append(perf_counter() - started)
    return min(seconds, key=lambda count: (sorted(seconds[count])[ROUNDS // 2], -count))
