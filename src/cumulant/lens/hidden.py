"""Hidden states: followed through a block, and sampled (T14, T15).

The *stream* of a block passes through the inputs of its normalizations, unless such an input is the
output of a submodule: then the normalization sits on a branch, as Gemma 2's do. What lies between
two points of the stream is a sublayer with its residual: attention if an attention call happened on
the way, feed-forward otherwise. If the block returns the output of its last normalization (BERT),
the stream continues from outputs, otherwise from inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.core.typed import linalg, tolist

__all__ = [
    "LISTS",
    "Call",
    "Event",
    "Frame",
    "Map",
    "Point",
    "Reservoir",
    "add_ratios",
    "maps_of",
    "quantiles",
    "some_pairs",
    "sublayer_of",
    "version_of",
]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


class Point(NamedTuple):
    """A tensor, held so that its memory is not used again, and its values at that moment."""

    tensor: Tensor
    value: Tensor

    def is_now(self, tensor: Tensor) -> bool:
        """The same memory, and nothing written to it since."""
        same = tensor.data_ptr() == self.tensor.data_ptr() and tensor.numel() == self.value.numel()
        return same and torch.equal(tensor.reshape(self.value.shape), self.value)


class Call(NamedTuple):
    """An attention call inside a block; `real` and `sink` ``(B, T)`` mark its queries."""

    name: str
    layer: int
    cross: bool
    real: Tensor
    sink: Tensor
    batch_first: bool


class Event(NamedTuple):
    """Something that happened in a block: a norm, an attention call, a matrix, a child entered."""

    kind: str
    name: str
    before: Point | None = None
    after: Point | None = None
    branch: bool = False


class Map(NamedTuple):
    """One map of token states to token states: a sublayer or a normalization."""

    column: str
    before: Tensor
    after: Tensor


@dataclass
class Frame:
    """One run of a module that may be a block: all that is held while it runs."""

    name: str
    module: nn.Module
    start: Point | None
    points: list[Point] = field(default_factory=lambda: [])
    outputs: list[tuple[Tensor, int]] = field(default_factory=lambda: [])  # of submodules
    events: list[Event] = field(default_factory=lambda: [])
    calls: list[Call] = field(default_factory=lambda: [])

    def drop(self) -> None:
        """Let go of every tensor; nothing more is recorded."""
        self.start = None
        for held in (self.points, self.outputs, self.events):
            held.clear()

    def holds(self, tensor: Any) -> bool:
        """Whether it could be a state of this block's tokens, perhaps without a batch dimension."""
        if self.start is None or not isinstance(tensor, Tensor) or tensor.ndim > 3:
            return False
        mine = self.start.value
        return tensor.shape[-1:] == mine.shape[-1:] and tensor.numel() == mine.numel()

    def point(self, tensor: Tensor) -> Point:
        known = next((p for p in self.points if p.is_now(tensor)), None)
        if known is None:
            known = Point(tensor, tensor.detach().clone())
            self.points.append(known)
        return known

    def is_output(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(at == t.data_ptr() and version_of(t) == v for t, v in self.outputs)


def maps_of(frame: Frame, end: Point, modules: dict[str, nn.Module]) -> Iterator[Map]:
    """The sublayers and normalizations of a block that has run, found along its stream."""
    if frame.start is None:
        return
    stream = _Stream(frame, frame.start, end, modules)
    for event in frame.events:
        if event.kind == "matrix":
            stream.pass_matrix(event)
        elif event.kind == "enter":
            yield from stream.enter(event)
        elif event.before is None or event.after is None:
            stream.seen.add(event.kind)
        else:
            yield from stream.normalize(event, event.before, event.after)
    yield from stream.move(end)
    yield Map("block:", frame.start.value, end.value)


class _Stream:
    """How far the stream of a block is followed: to `tail`; `seen` has happened since."""

    def __init__(
        self, frame: Frame, start: Point, end: Point, modules: dict[str, nn.Module]
    ) -> None:
        self.frame, self.tail, self.seen = frame, start, set[str]()
        self._cores = {call.name for call in frame.calls}
        self._tops = {sublayer_of(name, frame.name, modules) for name in self._cores}
        self._norms = [e for e in frame.events if e.kind == "norm"]
        norms = self._norms
        self._post = bool(norms) and norms[-1].after is end and norms[0].before is not start
        stated = any(not e.branch and not _inside(e.name, self._cores) for e in norms)
        self._bare = not stated and all(e.before is not start for e in norms)

    def pass_matrix(self, event: Event) -> None:
        """Outside the attention sublayer a matrix is the feed-forward's."""
        self.seen |= {"matrix"} if _inside(event.name, self._tops) else {"matrix", "feed_forward"}

    def enter(self, event: Event) -> Iterator[Map]:
        """Without a norm on the stream (OLMo 2), the feed-forward's input shows where it is."""
        attended = self.seen & {"attention", "cross_attention"}
        if not self._bare or not attended or _inside(event.name, self._tops):
            return
        if event.before is not None and all(event.before is not e.after for e in self._norms):
            yield from self.move(event.before)

    def normalize(self, event: Event, before: Point, after: Point) -> Iterator[Map]:
        """A normalization, and the sublayer before it if its input is on the stream."""
        core = _inside(event.name, self._cores)
        if before is self.tail or not (event.branch or core) or self._sums_to(before):
            yield from self.move(before)
            self.tail = after if self._post else before
        elif core:
            return  # a norm of queries or keys
        name = event.name.removeprefix(f"{self.frame.name}.")
        yield Map(f"norm:{name}", before.value, after.value)

    def move(self, head: Point) -> Iterator[Map]:
        """To the next point; what lies between is a sublayer, if it is of one kind."""
        if self.tail is head:
            return
        kinds = self.seen - {"matrix"} or ({"feed_forward"} if self.seen else set[str]())
        if len(kinds) == 1:
            yield Map(f"{kinds.pop()}:", self.tail.value, head.value)
        self.tail, self.seen = head, set[str]()

    def _sums_to(self, point: Point) -> bool:
        return _is_sum(point.value, self.tail.value, self.frame.outputs)


def _is_sum(total: Tensor, part: Tensor, outputs: list[tuple[Tensor, int]]) -> bool:
    """Whether a tensor is the stream plus an output of a submodule, up to rounding.

    BLOOM's and ALBERT's attention modules add the residual themselves.
    """
    slack, width = 4 * torch.finfo(total.dtype).eps, total.shape[-1]
    step = 1 + total.numel() // width // 64  # some tokens are enough to tell
    u, s = (x.reshape(-1, width)[::step].double() for x in (total, part))
    for output, _ in outputs:
        m = output.detach().reshape(-1, width)[::step].double()
        if bool(((u - s - m).abs() <= slack * (u.abs() + s.abs() + m.abs())).all()):
            return True
    return False


def sublayer_of(name: str, block: str, modules: dict[str, nn.Module]) -> str:
    """The child of a block, lists not counted, that is or holds the module of that name."""
    if not name.startswith(f"{block}."):
        return name
    at = block
    for part in name.removeprefix(f"{block}.").split("."):
        at = f"{at}.{part}"
        if not isinstance(modules.get(at), LISTS):
            break
    return at


def _inside(name: str, tops: set[str]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def version_of(tensor: Tensor) -> int:
    """Changes when something is written to the tensor; inference tensors do not tell."""
    return 0 if tensor.is_inference() else tensor._version


def _generator(seed: int, position: int) -> torch.Generator:
    """Randomness that depends on how much was seen before, not on how it came in batches."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + position) % 2**63)


class Draw(NamedTuple):
    """Which of the offered items may enter a reservoir, ``item`` ``(n,)``, and their keys."""

    item: Tensor
    key: Tensor


class Reservoir:
    """A uniform sample of at most `size` rows of everything offered.

    Every item draws a key, uniform in [0, 1), and the smallest keys stay. So it is known before an
    item is measured whether it can enter, and the sample of two reservoirs together is the smallest
    keys of both. Keys depend on the seed and on the number of items seen before: a run that resumes
    from a saved state ends as one that was never interrupted.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.seen = size, seed, 0
        self.key = torch.empty(0, dtype=torch.float64)
        self.columns: dict[str, Tensor] = {}

    def offer(self, counts: list[int]) -> Draw:
        """Keys for the items of several texts, one after another; only the promising are kept."""
        keys = [torch.empty(0, dtype=torch.float64)]
        for count in counts:
            generator = _generator(self.seed, self.seen)
            keys.append(torch.rand(count, dtype=torch.float64, generator=generator))
            self.seen += count
        key = torch.cat(keys)
        index = key.argsort(stable=True)[: self.size].sort().values
        if len(self.key) == self.size:
            index = index[key[index] < self.key[-1]]
        return Draw(index, key[index])

    def add(self, key: Tensor, columns: dict[str, Tensor]) -> None:
        """Rows for the keys of a draw; a column that one side lacks is NaN there."""
        order = torch.cat([self.key, key]).argsort(stable=True)[: self.size]
        for name in {**self.columns, **columns}:
            old, new = self.columns.get(name), columns.get(name)
            like = old if old is not None else columns[name]
            old = like.new_full((len(self.key), *like.shape[1:]), math.nan) if old is None else old
            new = like.new_full((len(key), *like.shape[1:]), math.nan) if new is None else new
            self.columns[name] = torch.cat([old, new.to(old)])[order]
        self.key = torch.cat([self.key, key])[order]

    def state(self) -> dict[str, Any]:
        """What was taken in so far, for a journal."""
        return {"seen": self.seen, "key": self.key, "columns": dict(self.columns)}

    def merge(self, state: dict[str, Any]) -> None:
        """Take in the state of another reservoir."""
        self.add(state["key"], state["columns"])
        self.seen += state["seen"]


def some_pairs(count: int, *, limit: int, seed: int, position: int) -> Tensor:
    """Pairs i != j of `count` tokens, ``(pairs, 2)``: all, or `limit` random ones if fewer."""
    if count * (count - 1) // 2 <= limit:
        return torch.triu_indices(count, count, 1).T
    generator = _generator(seed + 1, position)
    first = torch.randint(count, (limit,), generator=generator)
    step = torch.randint(1, count, (limit,), generator=generator)
    return torch.stack([first, (first + step) % count], -1)


def add_ratios(
    reservoir: Reservoir,
    maps: dict[str, tuple[Tensor, Tensor]],
    rows: Callable[[Tensor], Tensor],
    *,
    real: Tensor,
    sink: Tensor,
) -> None:
    """Sample ||f(x_i) - f(x_j)|| / ||x_i - x_j|| over pairs of real tokens of one text (T14, T15).

    Args:
        maps: states before and after each map, by column; `rows` makes them ``(B T, d)``.
        real, sink: ``(B, T)``; the column "sink" marks pairs with a sink token among them.
    """
    B, T = real.shape
    offered = [torch.empty(0, 2, dtype=torch.long)]
    position = reservoir.seen
    for b in range(B):
        at = b * T + real[b].nonzero()[:, 0].cpu()
        local = some_pairs(len(at), limit=reservoir.size, seed=reservoir.seed, position=position)
        offered.append(at[local])
        position += len(local)
    draw = reservoir.offer([len(pairs) for pairs in offered[1:]])
    chosen = torch.cat(offered)[draw.item].to(real.device)
    known: dict[int, tuple[Tensor, Tensor]] = {}
    columns = {"sink": sink.flatten()[chosen].any(-1).double().cpu()}
    for column, states in maps.items():
        for x in states:
            if id(x) not in known:
                known[id(x)] = _distances(rows(x), chosen)
        (before, apart), (after, _) = (known[id(x)] for x in states)
        columns[column] = torch.where(apart, after / before, math.nan).double().cpu()
    reservoir.add(draw.key, columns)


def _distances(states: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """||x_i - x_j|| for pairs of rows, and whether it is more than rounding."""
    if states.dtype not in (torch.float32, torch.float64):
        states = states.float()
    size = linalg.vector_norm(states, dim=-1)[pairs].amax(-1)
    rows = max(1, 2**17 // states.shape[-1])  # some at a time: the differences stay in the cache
    length = torch.cat(
        [
            linalg.vector_norm(states.index_select(0, i).sub_(states.index_select(0, j)), dim=-1)
            for i, j in (some.unbind(-1) for some in torch.split(pairs, rows))
        ]
    )
    return length, length > 8 * torch.finfo(states.dtype).eps * size


def quantiles(values: Tensor) -> tuple[int, list[float]]:
    """How many values are numbers, and their quantiles at `LEVELS`; none if there are none."""
    known = values[values.isfinite()].double()
    if len(known) == 0:
        return 0, []
    return len(known), tolist(known.quantile(torch.tensor(LEVELS, dtype=torch.float64)))
