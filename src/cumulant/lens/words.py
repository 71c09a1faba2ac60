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

__all__ = ["Sides", "Words", "sides_of", "with_words"]

SINK = "<sink>"  # what key -1 is called: the sink logit

Sides = Mapping[int, tuple[bool, bool]]  # by layer: cross-attention?, in a decoder?


class Words(NamedTuple):
    """The tokens of each input as strings, and what a decoder reads, if there is one."""

    source: Sequence[Sequence[str]]
    target: Sequence[Sequence[str]] | None = None


def sides_of(layers: Mapping[Any, Layer]) -> Sides:
    """Which layers read the target, as queries or as keys too."""
    return {x.number: (x.cross, "decoder" in x.name) for x in layers.values()}


def with_words(table: DataFrame, words: Words, first: int, sides: Sides) -> DataFrame:
    """The table with ``token_text`` after ``token``, and ``top_key_text`` after ``top_key``.

    The table of the largest weights has ``key`` and ``key_text``.

    Args:
        table: of tokens, or of their largest weights.
        words: of the inputs from number `first` on.
        first: the number of the first input.
        sides: of the layers; those of a decoder read the target.
    """
    rows = view(table)
    number: NDArray[Any] = rows["input"].to_numpy() - first
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
    for name in {"top_key", "key"} & set(columns):
        rows.insert(columns.index(name) + 2, f"{name}_text", said(name, decoder & ~cross))
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
