"""The work of several ranks into one, as a single process would have done it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cumulant.core.errors import InputError
from cumulant.lens.files import part_name, read_rows, read_table, write_table
from cumulant.lens.keeping import InFolder
from cumulant.lens.partial import PARTIAL, clear
from cumulant.lens.reading import SHOWN, Reading
from cumulant.lens.recorder import Recorder, top_of
from cumulant.lens.state import State
from cumulant.lens.tables import pandas
from cumulant.lens.typed import Table, view

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["merge_ranks"]

# Rows of each rank that are held while tables are merged, and inputs that make one part, at least:
# the report finds its first three in the first part.
ROWS, INPUTS = 65_536, 16


class Work(NamedTuple):
    """The finished work of one rank: its folder, and the number of parts there."""

    place: Path
    parts: int


def merge_ranks(
    store: InFolder, reading: Reading, recorder: Recorder, parts: Sequence[int]
) -> None:
    """Merge, on rank 0, what the other ranks found; `parts` is how many parts each rank wrote."""
    state, whole = reading.state, store.folder / PARTIAL
    works = [Work(reading.shards.place(store.folder, rank), n) for rank, n in enumerate(parts)]
    shown, top = {0: state.shown}, {0: recorder.top}
    for rank, work in enumerate(works):
        if rank == 0 or not work.parts:  # there may be fewer texts than ranks
            continue
        journal = store.journal(work.place)
        kept = None if journal.damage or journal.differs else journal.last
        if kept is None or kept["run"]["parts"] != work.parts:
            raise InputError(
                f"{work.place} does not hold what rank {rank} has written: the folder must be on a "
                "file system that all processes share."
            )
        other = State(**kept["run"])
        state.merge(other)
        reading.sums.merge(kept["sums"])
        recorder.merge_probe(kept["recorder"])
        shown[rank], top[rank] = other.shown, top_of(kept["recorder"])
    clear(whole, keep=[x.place.name for x in works])  # what an interrupted merge has left
    state.parts, places = merge_tables(works, whole)
    state.shown = [shown[rank][own] for rank, own in places[:SHOWN]]
    recorder.top = {
        (number, layer): x
        for number, (rank, own) in enumerate(places[:SHOWN])
        for (text, layer), x in top[rank].items()
        if text == own
    }
    store.partial = whole


def merge_tables(works: Sequence[Work], target: Path) -> tuple[int, list[tuple[int, int]]]:
    """One table of tokens and one of inputs, as a single process would have written them.

    Inputs are renumbered in the order of texts and of the pieces of each. Memory holds some rows of
    every rank and the inputs of one part.

    Returns:
        How many parts there are, and rank and number there of each of the first inputs.
    """
    frames = pandas()
    tables = [
        view(read_table(work.place / "inputs.parquet", work.parts)).assign(rank=rank)
        for rank, work in enumerate(works)
        if work.parts
    ]
    inputs = frames.concat(tables, ignore_index=True)
    # Pieces of a text are on one rank, in their order, which a stable sort keeps.
    inputs = inputs.sort_values("number", kind="stable", ignore_index=True)
    places = list(zip(inputs["rank"].tolist(), inputs["input"].tolist(), strict=True))
    inputs["input"] = range(len(inputs))
    numbers: dict[int, NDArray[Any]] = {r: x.to_numpy() for r, x in inputs.groupby("rank")["input"]}
    inputs = inputs.drop(columns=["number", "rank"])
    for name in ("tokens", "inputs"):
        (target / f"{name}.parquet").mkdir()
    parts = start = 0
    held: list[Table] = []
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


def _rows(work: Work, numbers: NDArray[Any]) -> Iterator[Table]:
    """The tokens of one rank, some rows at a time, with the numbers of inputs among all."""
    for part in range(work.parts):
        for each in read_rows(work.place / "tokens.parquet" / part_name(part), ROWS):
            rows = view(each)
            yield rows.assign(input=numbers[rows["input"].to_numpy()])


def _in_order(streams: Sequence[Iterator[Table]]) -> Iterator[Table]:
    """Rows of all streams in the order of inputs, whole inputs at a time; each stream has its own.

    The stream that is furthest behind is read on, and what lies before all of them is complete.
    """
    frames = pandas()
    going = dict(enumerate(streams))
    held: dict[int, Table] = {}
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
        done: list[Table] = []
        for k, rows in held.items():
            cut = len(rows) if end is None else int(rows["input"].searchsorted(end))
            done.append(rows.iloc[:cut])
            held[k] = rows.iloc[cut:]
        if sum(map(len, done)):
            yield frames.concat(done).sort_values("input", kind="stable", ignore_index=True)
