"""`Shards`: processes that examine a corpus together."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from cumulant.core.errors import GroupError, InputError
from cumulant.distributed.ranks import Ranks
from cumulant.lens.partial import PARTIAL, begun, claimed, is_complete, share_name

__all__ = ["Shards"]

Item = TypeVar("Item")


class _StoppedError(GroupError):
    """This rank is well, but another has failed."""


class Shards:
    """This process among those that examine texts together: rank r of k takes r, r + k, ...

    Each keeps its unfinished work in a folder of its own, below the one that all share. While they
    work they do not wait for each other; a failure is announced by a file, then by a message.

    Args:
        group: a process group, a dimension of a device mesh, or `Ranks`; None for this process
            alone.
    """

    def __init__(self, group: Any = None) -> None:
        given = group if group is None or isinstance(group, Ranks) else Ranks(group)
        self._ranks: Ranks | None = given
        self.rank, self.size = (0, 1) if given is None else (given.rank, given.size)
        # In the folder of unfinished work: a rank has failed, and the others may stop. The
        # name is new in every run, because network drives may still show a file that is gone.
        self._failed = f"failed-{time.time_ns()}"

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def own(self, texts: Iterable[Item]) -> Iterator[Item]:
        """The texts of this rank."""
        return islice(iter(texts), self.rank, None, self.size)

    def number(self, own: int) -> int:
        """The number, among all texts, of one of this rank's."""
        return self.rank + self.size * own

    def place(self, folder: Path, rank: int | None = None) -> Path:
        """Where this rank, or another, keeps unfinished work of the examination in a folder."""
        rank, whole = self.rank if rank is None else rank, folder / PARTIAL
        return whole if self.alone else whole / share_name(rank, self.size)

    def told(self, fact: Item) -> list[Item]:
        """A small fact of every rank, on every rank."""
        return [fact] if self._ranks is None else self._ranks.objects(fact)

    @contextmanager
    def together(self) -> Generator[None]:
        """Wait until the block has succeeded on every rank.

        Raises:
            GroupError: names the rank that failed, and why; that rank raises its own error.
        """
        if self.alone:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as problem:
            error = problem
        well = error is None or isinstance(error, _StoppedError)
        messages = self.told("" if well else str(error) or type(error).__name__)
        if error is not None and not well:
            raise error
        for rank, message in enumerate(messages):
            if message:
                raise GroupError(f"rank {rank} of {self.size} has failed: {message}") from error
        if error is not None:
            raise error

    @contextmanager
    def claimed(self, folder: Path | None) -> Generator[None]:
        """Hold the folder of unfinished work, for one run at a time: rank 0 does it for all.

        Raises:
            InputError: another run is at work there, or another number of processes began the work.
        """
        self._failed = self.told(self._failed)[0]
        with ExitStack() as stack:
            with self.together():
                whole = stack.enter_context(claimed(folder)) if self.rank == 0 else None
                if whole is not None and not is_complete(whole):
                    self._check_size(whole)
            yield

    def _check_size(self, whole: Path) -> None:
        if (size := begun(whole)) not in (0, self.size):
            raise InputError(
                f"{whole.parent} holds an unfinished examination that was begun with {size} "
                f"process{'es' * (size > 1)}, not {self.size}: start it with as many, choose "
                f"another folder, or remove {whole}."
            )

    @contextmanager
    def working(self, place: Path | None) -> Generator[None]:
        """Hold the folder of this rank while it works; ends when all are done, or one has failed.

        It is released before rank 0 removes it: an open file would stay behind on a network drive.
        """
        if self.alone or place is None:
            yield
            return
        with self.together():
            try:
                with claimed(place.parent, place.name):
                    yield
            except Exception:
                with suppress(OSError):
                    (place.parent / self._failed).touch()
                raise

    def check(self, place: Path | None) -> None:
        """Stop if another rank has failed."""
        if not self.alone and place is not None and (place.parent / self._failed).exists():
            raise _StoppedError("another rank has failed.")
