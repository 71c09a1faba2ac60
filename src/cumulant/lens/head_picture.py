"""One head's attention as a picture, from one more pass of the model.

An examination stores no N x N array, so the pass is run again, and only as far as the layer. The
weights on a block of keys are E[v] of values that mark the block, so a long text needs memory for
the picture only.

Shape legend: M queries, N keys, R rows and C columns of the picture.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.attention.calls import AttentionCall
from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.core.interception import Scope
from cumulant.core.typed import tolist
from cumulant.figures import new_figure, style, write
from cumulant.lens.observing import recording
from cumulant.lens.recorder import Layer, Recorder, Wanted
from cumulant.lens.stack import Frame
from cumulant.pages.cards import card, columns, facts, note, table
from cumulant.pages.charts import heat
from cumulant.pages.numbers import number, share

__all__ = ["HeadAttention", "Rerun", "attention_of"]

LABELED = 64  # rows or columns, each with its token's string; more, and only some have one
STRONGEST = 5


class Entry(NamedTuple):
    """A weight, with the tokens of its query and key."""

    query: int
    key: int
    query_text: str
    key_text: str
    weight: float


@dataclass(frozen=True, eq=False)
class HeadAttention:
    """Where one head looks in one text; `Examination.head` makes it.

    Attributes:
        layer, head: which head.
        text: the name of the text.
        weights: ``(R, C)``. With ``block`` 1, the attention weights of all queries and keys. Else
            the mean over ``block`` queries of their weight on ``block`` keys.
        block: tokens in a row or column.
        query_tokens, key_tokens: the strings of all tokens.
    """

    layer: int
    head: int
    text: str
    weights: Tensor
    block: int
    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]

    def __repr__(self) -> str:
        size = f"{len(self.query_tokens)} queries, {len(self.key_tokens)} keys"
        pooled = "" if self.block == 1 else f", in blocks of {self.block} tokens"
        return f"HeadAttention(layer {self.layer} head {self.head}, {self.text!r}: {size}{pooled})"

    def strongest(self, count: int = STRONGEST, *, apart: bool = True) -> list[Entry]:
        """The largest weights, with token strings; of blocks, with that of their first token.

        Args:
            count: how many.
            apart: leave out the first key, where many heads park their weight, and a token's own.
        """
        count = whole("strongest", "count", count, 0)
        found = self.weights.clone()
        if apart:
            found[:, 0] = 0
            if found.shape[0] == found.shape[1]:
                found.fill_diagonal_(0)
        top = found.flatten().topk(min(count, found.numel()))
        weights: list[float] = tolist(top.values)
        entries: list[Entry] = []
        for at, weight in zip(tolist(top.indices), weights, strict=True):
            i, j = (self.block * int(place) for place in divmod(at, found.shape[1]))
            entries.append(Entry(i, j, self.query_tokens[i], self.key_tokens[j], weight))
        return entries

    def figure(self) -> Any:
        """A matplotlib figure: queries down, keys across, token strings beside them."""
        rows, across = self.weights.shape
        side = min(12.0, max(3.5, 0.17 * max(rows, across)))
        with style():
            figure = new_figure(
                side * min(1.0, across / rows) + 1.6, side * min(1.0, rows / across) + 1
            )
            axes = figure.add_subplot()
            # Of a long text by the root: on a linear scale one sink leaves the rest white.
            power = 1.0 if self.block == 1 else 0.5
            scale = import_module("matplotlib.colors").PowerNorm(power, vmin=0.0)
            image = axes.imshow(
                self.weights.numpy(), cmap="Blues", norm=scale, interpolation="nearest"
            )
            axes.grid(visible=False)
            axes.set_title(f"layer {self.layer} head {self.head}, {self.text}")
            axes.set(xlabel="key", ylabel="query")
            axes.set_xticks(*self._ticks(across, self.key_tokens), rotation=90, fontsize=6.5)
            axes.set_yticks(*self._ticks(rows, self.query_tokens), fontsize=6.5)
            what = (
                "weight"
                if self.block == 1
                else f"weight on {self.block} keys, mean of as many queries"
            )
            figure.colorbar(image, ax=axes, shrink=0.7, label=what)
        return figure

    def _ticks(self, count: int, tokens: Sequence[str]) -> tuple[list[int], list[str]]:
        every = -(-count // LABELED)
        places = list(range(0, count, every))
        numbered = every > 1 or self.block > 1
        names = [_shown(tokens[k * self.block]) for k in places]
        return places, [
            f"{n} {k * self.block}" if numbered else n for k, n in zip(places, names, strict=True)
        ]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure to a file; the suffix sets the format (png, svg, pdf)."""
        return write(self.figure(), path)

    def _repr_html_(self) -> str:
        rows = self.strongest()
        told = table(
            ("query", "key", "weight"),
            [
                (f"{x.query} {x.query_text}", f"{x.key} {x.key_text}", number(x.weight))
                for x in rows
            ],
        )
        words = [("text", self.text), ("queries", len(self.query_tokens))]
        words += [("weight on the first key", share(float(self.weights[:, 0].mean())))]
        picture = heat(tolist(self.weights), f"attention of layer {self.layer} head {self.head}")
        pooled = f", each cell {self.block} tokens" if self.block > 1 else ""
        about = f"layer {self.layer} head {self.head}"
        parts = columns(
            (f"weights: queries down, keys across{pooled}", picture),
            ("largest, first key left out", told),
        )
        return card(
            "HeadAttention",
            about,
            facts(words),
            parts,
            note(".save(path) draws it with token strings."),
        )


class Rerun:
    """What a second pass over the shown inputs needs: their arguments, and the model if it lives.

    The model is held weakly, so that a table of results keeps no model in memory; a copy in another
    process has neither.
    """

    def __init__(self, model: nn.Module, arguments: list[dict[str, Tensor]]) -> None:
        self._model, self.arguments = weakref.ref(model), arguments

    def __reduce__(self) -> Any:
        return type(None), ()

    def model(self) -> nn.Module:
        """The model.

        Raises:
            InputError: it is gone.
        """
        found = self._model()
        if found is None:
            raise InputError(
                "head: the model of this examination is gone, and a picture of a head needs one "
                "more pass: keep the model in a variable while you look at its heads."
            )
        return found


class _Enough(Exception):  # noqa: N818
    """The layer has been seen."""


class _One(Recorder):
    """A recorder that keeps the call of one layer, and ends the pass."""

    def __init__(self, model: nn.Module, number: int) -> None:
        super().__init__(model, Wanted())
        self.number = number
        self.found: tuple[Layer, AttentionCall] | None = None

    def _take(self, module: nn.Module, call: AttentionCall, frame: Frame) -> None:
        self.calls += 1
        layer = self._layer(module, call, frame)
        if layer.number == self.number:
            self.found = layer, call
            raise _Enough


@torch.no_grad()
def attention_of(
    model: nn.Module,
    arguments: Mapping[str, Tensor],
    shown: Sequence[Any],
    layer: int,
    head: int,
    cells: int,
) -> HeadAttention:
    """The attention of one head for one input.

    Args:
        model: Hugging Face's, as examined.
        arguments: its keyword arguments, for a batch of one without padding.
        shown: the name of the text, its tokens and, of an encoder-decoder, those of the decoder.
        layer, head: which head; `layer` is known to be there.
        cells: the most rows and columns.
    """
    keeper = _One(model, layer)
    try:
        with Scope(lambda: recording(model, keeper)):
            model(**arguments)
    except _Enough:
        pass
    if keeper.found is None:
        raise InputError(f"head: the model made no attention call number {layer} this time.")
    known, call = keeper.found
    if not 0 <= head < known.heads:
        raise InputError(f"head: layer {layer} has heads 0 to {known.heads - 1}, not {head}.")
    one = _of_head(call, head)
    m, n = one.query.shape[2], one.key.shape[2]
    block = -(-max(m, n) // cells)
    mark = torch.nn.functional.one_hot(torch.arange(n, device=one.key.device) // block)
    on_blocks = one.attend(value=mark.to(one.query.dtype)[None, None]).mean[0, 0].float().cpu()
    rows = [x.mean(0) for x in torch.split(on_blocks, block)]
    target = tuple(shown[2]) if len(shown) > 2 else tuple(shown[1])
    decoder = known.cross or "decoder" in known.name
    return HeadAttention(
        layer=layer,
        head=head,
        text=str(shown[0]),
        weights=torch.stack(rows),
        block=block,
        query_tokens=_fitting(target if decoder else tuple(shown[1]), m),
        key_tokens=_fitting(target if decoder and not known.cross else tuple(shown[1]), n),
    )


def _of_head(call: AttentionCall, head: int) -> AttentionCall:
    """The call of one head."""
    own = head // (call.query.shape[1] // call.key.shape[1])

    def cut(x: Tensor | None) -> Tensor | None:
        return x[:, head : head + 1] if x is not None and x.ndim == 4 and x.shape[1] > 1 else x

    return AttentionCall(
        call.query[:, head : head + 1],
        call.key[:, own : own + 1],
        call.value[:, own : own + 1],
        mask=cut(call.mask),
        bias=cut(call.bias),
        scale=call.scale,
        causal=call.causal,
        softcap=call.softcap,
        sinks=None if call.sinks is None else call.sinks[head : head + 1],
        cross=call.cross,
    )


def _fitting(tokens: tuple[str, ...], count: int) -> tuple[str, ...]:
    """As many strings as there are tokens, numbers where they are not known."""
    return tokens if len(tokens) == count else tuple(map(str, range(count)))


def _shown(token: str, most: int = 12) -> str:
    """A token for a tick: leading spaces as they are read, long ones cut."""
    plain = token.replace("$", r"\$").strip() or "␣"
    return plain if len(plain) <= most else plain[: most - 1] + "…"
