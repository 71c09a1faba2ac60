"""Token strings beside the numbers of a table of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumulant.lens.typed import view

if TYPE_CHECKING:
    from cumulant.lens.recorder import Layer
    from cumulant.lens.tables import DataFrame

__all__ = ["Words", "with_words"]

SINK = "<sink>"  # what top_key -1 is called: the sink logit


class Words(NamedTuple):
    """The tokens of each input as strings, and what a decoder reads, if there is one."""

    source: Sequence[Sequence[str]]
    target: Sequence[Sequence[str]] | None = None


def with_words(
    table: DataFrame, words: Words, first: int, layers: Mapping[Any, Layer]
) -> DataFrame:
    """The table with ``token_text`` after ``token``, and ``top_key_text`` after ``top_key``.

    Args:
        table: of tokens.
        words: of the inputs from number `first` on.
        first: the number of the first input.
        layers: of the model; those of a decoder read the target.
    """
    rows = view(table)
    number: NDArray[Any] = rows["input"].to_numpy() - first
    sides = {x.number: (x.cross, "decoder" in x.name) for x in layers.values()}
    flags = [sides.get(int(x), (False, False)) for x in range(max(sides, default=-1) + 1)]
    cross, decoder = np.array(flags, dtype=bool).reshape(-1, 2)[rows["layer"].to_numpy()].T
    if words.target is None:
        cross, decoder = cross & False, decoder & False
    source, target = _Flat(words.source), _Flat(words.target or words.source)

    def said(column: str, is_target: NDArray[Any]) -> NDArray[Any]:
        index: NDArray[Any] = rows[column].to_numpy()
        out = source.at(number, index)
        out[is_target] = target.at(number, index)[is_target]
        out[index < 0] = SINK
        return out

    columns = list(rows.columns)
    rows.insert(columns.index("token") + 1, "token_text", said("token", cross | decoder))
    if "top_key" in columns:
        place = columns.index("top_key") + 2
        rows.insert(place, "top_key_text", said("top_key", decoder & ~cross))
    return table


class _Flat:
    """Lists of strings, looked up by list and place; "" where there is none."""

    def __init__(self, lists: Sequence[Sequence[str]]) -> None:
        self.sizes = np.array([len(x) for x in lists], dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.strings = np.array([*(w for x in lists for w in x), ""], dtype=object)

    def at(self, number: NDArray[Any], place: NDArray[Any]) -> NDArray[Any]:
        known = (number >= 0) & (number < len(self.sizes)) & (place >= 0)
        own = np.where(known, number, 0)
        known &= place < self.sizes[own]
        return self.strings[np.where(known, self.starts[own] + place, len(self.strings) - 1)]
