"""`Shards`: processes that examine a corpus together, and one table out of the parts of all."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cumulant.core.errors import GroupError, InputError
from cumulant.distributed.ranks import Ranks
from cumulant.lens.files import (
    PARTIAL,
    begun,
    claimed,
    is_complete,
    part_name,
    read_rows,
    read_table,
    share_name,
    write_table,
)
from cumulant.lens.tables import pandas

__all__ = ["Shards", "Work", "merge_tables"]

# So many rows of each rank are held while tables are merged, and so many inputs, or more, make one
# part: the report finds its first three in the first part.
ROWS, INPUTS = 65_536, 16

Item = TypeVar("Item")


class _StoppedError(GroupError):
    """This rank is well, but another has failed."""


class Shards:
    """This process among those that examine texts together: rank r of k takes r, r + k, ...

    Each keeps its unfinished work in a folder of its own, below the one that all share. While they
    work they do not wait for each other; a failure is told by a file, then by a message.

    Args:
        group: a process group, a dimension of a device mesh, or `Ranks`; None for this process
            alone.
    """

    def __init__(self, group: Any = None) -> None:
        given = group if group is None or isinstance(group, Ranks) else Ranks(group)
        self._ranks: Ranks | None = given
        self.rank, self.size = (0, 1) if given is None else (given.rank, given.size)
        # In the folder for unfinished work: a rank has failed, and the others need not go on. The
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

    def place(self, folder: Path | None) -> Path | None:
        """Where this rank keeps unfinished work of the examination in a folder."""
        if folder is None:
            return None
        whole = folder / PARTIAL
        return whole if self.alone else whole / share_name(self.rank, self.size)

    def told(self, fact: Item) -> list[Item]:
        """A small fact of every rank, on every rank."""
        return [fact] if self._ranks is None else self._ranks.objects(fact)

    @contextmanager
    def together(self) -> Generator[None]:
        """What is done inside must succeed on every rank; all wait for that.

        Raises:
            GroupError: which rank has failed, and why; that rank raises its own error.
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
        """The folder for unfinished work, for one run at a time: rank 0 holds it for all.

        Raises:
            InputError: another run is at work there, or the work is of another number of processes.
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
        """The folder of this rank, while it works; all wait until the last is done, or one fails.

        It is let go before rank 0 removes it: an open file would stay behind on a network drive.
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


class Work(NamedTuple):
    """The finished work of one rank: its folder, and the number of parts there."""

    place: Path
    parts: int


def merge_tables(works: Sequence[Work], target: Path) -> tuple[int, list[tuple[int, int]]]:
    """One table of tokens and one of inputs, as a single process would have written them.

    Inputs are numbered anew, in the order of texts and of the pieces of each. No more is held than
    some rows of every rank and the inputs of one part.

    Returns:
        How many parts there are, and rank and number there of each of the first inputs.
    """
    frames = pandas()
    tables = [
        read_table(work.place / "inputs.parquet", work.parts).assign(rank=rank)
        for rank, work in enumerate(works)
        if work.parts
    ]
    inputs = frames.concat(tables, ignore_index=True)
    # Pieces of a text are on one rank, in their order, which a stable sort keeps.
    inputs = inputs.sort_values("number", kind="stable", ignore_index=True)
    places = list(zip(inputs["rank"].tolist(), inputs["input"].tolist(), strict=True))
    inputs["input"] = range(len(inputs))
    numbers = {r: x.to_numpy() for r, x in inputs.groupby("rank")["input"]}
    inputs = inputs.drop(columns=["number", "rank"])
    for name in ("tokens", "inputs"):
        (target / f"{name}.parquet").mkdir()
    parts = start = 0
    held: list[Any] = []
    rows = _in_order([_rows(works[r], numbers[r]) for r in numbers])
    for some in rows:
        held.append(some)
        end = int(some["input"].iloc[-1]) + 1
        if end - start >= INPUTS or end == len(inputs):
            for name, table in (
                ("tokens", frames.concat(held, ignore_index=True)),
                ("inputs", inputs.iloc[start:end]),
            ):
                write_table(table, target / f"{name}.parquet" / part_name(parts), name)
            held, start, parts = [], end, parts + 1
    return parts, places[:INPUTS]


def _rows(work: Work, numbers: Any) -> Iterator[Any]:
    """The tokens of one rank, some rows at a time, with the numbers of inputs among all."""
    for part in range(work.parts):
        for rows in read_rows(work.place / "tokens.parquet" / part_name(part), ROWS):
            yield rows.assign(input=numbers[rows["input"].to_numpy()])


def _in_order(streams: Sequence[Iterator[Any]]) -> Iterator[Any]:
    """Rows of all streams in the order of inputs, whole inputs at a time; each stream has its own.

    The stream that is furthest behind is read on, and what lies before all of them is complete.
    """
    frames = pandas()
    going = dict(enumerate(streams))
    held: dict[int, Any] = {}
    reached = dict.fromkeys(going, -1)
    while going:
        behind = min(going, key=reached.__getitem__)
        more = next(going[behind], None)
        if more is None:
            del going[behind]
        else:
            held[behind] = frames.concat([held[behind], more]) if behind in held else more
            reached[behind] = int(more["input"].iloc[-1])
        end = min((reached[k] for k in going), default=None)
        done: list[Any] = []
        for k, rows in held.items():
            cut = len(rows) if end is None else int(rows["input"].searchsorted(end))
            done.append(rows.iloc[:cut])
            held[k] = rows.iloc[cut:]
        if sum(map(len, done)):
            yield frames.concat(done).sort_values("input", kind="stable", ignore_index=True)
