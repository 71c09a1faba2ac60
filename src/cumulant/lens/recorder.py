"""Takes every attention call of a model down: which text, which token, which statistics."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.attention.calls import AttentionCall
from cumulant.core.errors import InputError
from cumulant.core.threads import one_thread
from cumulant.lens.heads import Link, energy_change, link
from cumulant.lens.layers import LayerProbe
from cumulant.lens.patterns import Asked, asked, masses
from cumulant.lens.sampling import Sample, sampled
from cumulant.lens.stack import Frame, Running, Stack, is_model, under_transform
from cumulant.lens.statistics import Positions, Top, statistics, top_of_text

__all__ = ["Layer", "Record", "Recorder", "Wanted", "top_of"]

# A token counts as a sink where it is the top key of so many of a layer's queries.
SINK_SHARE = 0.3
# Pairs of a query and a key, over texts and heads, that one thread measures as fast as several.
SMALL = 2**22
# Queries of a text whose largest weights are kept; the report shows no more of longer ones.
MOST_SHOWN = 1024


@dataclass(frozen=True)
class Wanted:
    """What to measure: k90 and the top key, the leading eigenvalue, patterns, energy, layers,
    received mass.

    `links` and `top` are how many texts, from the first, to test the link on and to keep the five
    largest weights of. With `sample`, only some queries of a training step are measured, once for
    each layer (`cumulant.lens.monitoring`).
    """

    order: bool = True
    spectrum: bool = True
    patterns: bool = True
    energy: bool = False
    links: int = 0
    top: int = 0
    layers: bool = False
    sample: Sample | None = None
    received: bool = False


@dataclass(frozen=True)
class Layer:
    """An attention call of the model, as often as it runs in one pass."""

    number: int
    name: str
    module: nn.Module
    cross: bool
    heads: int
    key_heads: int
    size: int
    scale: float
    capped: bool = False


@dataclass(frozen=True)
class Record:
    """Statistics of one call: ``(B, H, M)`` each, with the texts and the tokens they belong to.

    ``sums`` are per head, over the real tokens.
    """

    layer: int
    inputs: list[int]
    real: Tensor
    token: Tensor
    columns: dict[str, Tensor]
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class Recorder:
    """Fed by `observe` with the calls of one model."""

    def __init__(self, model: nn.Module, wanted: Wanted, probe: LayerProbe | None = None) -> None:
        self.model = model
        self.wanted = wanted
        self.stack = Stack(model, self._closed)
        self.probe = probe
        self.layers: dict[tuple[str, int], Layer] = {}
        self.records: list[Record] = []
        self.links: dict[int, list[Link | None]] = {}
        self.top: dict[tuple[int, int], Top] = {}
        self.calls = 0
        self.next_input = 0
        self._caches: dict[int, tuple[Any, dict[int, list[int]]]] = {}
        self._encoded: dict[int, list[int]] = {}
        self._lock = threading.RLock()
        self._known: dict[str, Tensor] = {}  # what is padding, by stack, for its next steps
        self._ended: dict[str, _Ended] = {}

    def state(self) -> dict[str, Any]:
        """What survives an interruption, for a journal."""
        return {
            "links": {str(layer): links for layer, links in self.links.items()},
            "top": [[*where, *top] for where, top in self.top.items()],
            "probe": None if self.probe is None else self.probe.state(),
            "next_input": self.next_input,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where another recorder stopped."""
        self.links = {
            int(layer): [None if x is None else Link(*x) for x in links]
            for layer, links in state["links"].items()
        }
        self.top, self.next_input = top_of(state), state["next_input"]
        self.merge_probe(state)

    def merge_probe(self, state: Mapping[str, Any]) -> None:
        """Take in what the probe of another recorder measured."""
        if self.probe is not None and state["probe"] is not None:
            self.probe.merge_state(state["probe"])

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self.stack.names

    @torch.no_grad()
    def take(self, module: nn.Module | None, call: AttentionCall) -> None:
        """Record a call made by `module`, or by whichever module is running."""
        frame = self.stack.frame
        if frame is None:  # not a pass through the model: a checkpoint computed again
            return
        if under_transform(call.query):
            raise InputError(
                "observe cannot look inside torch.func transforms (vmap, jvp, grad): call the "
                "model itself inside observe."
            )
        module = self.stack.running[-1].module if module is None else module
        pairs = call.query.shape[:-1].numel() * call.key.shape[-2]
        with self._lock, one_thread(pairs <= SMALL):
            self._take(module, call, frame)

    def _take(self, module: nn.Module, call: AttentionCall, frame: Frame) -> None:
        self.calls += 1
        if 0 in (*call.query.shape, call.key.shape[2]):
            return
        layer = self._layer(module, call, frame)
        if self.wanted.sample is not None:
            self._take_sample(self.wanted.sample, layer, call, frame)
            return
        positions = self._positions(call, frame)
        inputs = self._inputs(frame, call.query.shape[0])
        keys = self._asked(call, positions) if self.wanted.patterns else None
        shown = min(inputs) < self.wanted.top and frame.outermost.past == 0
        shown = shown and call.query.shape[2] <= MOST_SHOWN
        columns = statistics(
            call,
            positions,
            order=self.wanted.order,
            spectrum=self.wanted.spectrum,
            asked=None if keys is None else keys.marks(),
            top=shown,
        )
        if self.wanted.received and not call.cross:
            columns["received"] = _received(call, positions.real)
        if self.wanted.energy:
            columns["energy_change"] = energy_change(call)
        seen = (columns["visible"] > 0).any(1)
        real = positions.real & seen
        sums: dict[str, Tensor] = {}
        if keys is not None:
            found = masses(columns.pop("asked"), keys, real)
            columns |= found.columns
            if not call.cross:
                sums = {"distances": found.distances, "distance_counts": found.counts}
        usable = bool(
            columns["log_normalizer"][real[:, None].expand_as(columns["entropy"])].isfinite().all()
        )
        if not call.cross and usable and self.wanted.links and min(inputs) < self.wanted.links:
            few = self.wanted.links - min(inputs)
            self.links.setdefault(layer.number, []).append(link(_cut(call, slice(few)), real[:few]))
        if shown:
            largest = columns.pop("largest"), columns.pop("largest_key")
            for text, number in enumerate(inputs):
                if number < self.wanted.top:
                    top = top_of_text(*largest, positions, text)
                    self.top[number, layer.number] = top
        if self.probe is not None:
            sink = _sinks(columns, positions, call) if self.wanted.order else real & False
            given = self._given(module)
            self.probe.attention(module, layer.number, call.cross, real, sink & real, given)
        self.records.append(
            Record(
                layer.number,
                inputs,
                real.cpu(),
                positions.token.cpu(),
                {name: x.cpu() for name, x in columns.items()},
                sums,
            )
        )

    def _asked(self, call: AttentionCall, positions: Positions) -> Asked:
        """The keys that the patterns of heads name; tokens only where the stack was given ids."""
        owner = self.stack.innermost(is_model)
        ids = None if owner is None else owner.given.get("input_ids")
        shape = positions.key_token.shape
        if (
            call.cross
            or not isinstance(ids, Tensor)
            or not ids.shape == positions.own.shape == shape
        ):
            return asked(positions, None)
        return asked(positions, ids.to(positions.own.device))

    def _given(self, module: nn.Module) -> Tensor | None:
        """The states ``(B, T, D)`` that an attention module was called with."""
        running = self.stack.innermost(lambda x: x.module is module)
        if running is None:
            return None
        given = running.given.get("hidden_states", running.given.get("query"))
        if not isinstance(given, Tensor) or given.ndim != 3:
            return None
        return given if getattr(module, "batch_first", True) else given.transpose(0, 1)

    def _take_sample(self, sample: Sample, layer: Layer, call: AttentionCall, frame: Frame) -> None:
        """Measure some queries of the first call of a layer; later ones are other micro-batches."""
        again = any(record.layer == layer.number for record in self.records)
        if again or not (frame.differentiated or sample.replayed):
            return
        few = sampled(call, self._positions(call, frame), sample, layer.number)
        columns = statistics(few.call, few.positions, order=False, spectrum=False)
        columns["score_max"] = few.call.attend().score_max
        at = few.positions
        figures = {name: x.cpu() for name, x in columns.items()}
        self.records.append(Record(layer.number, few.texts, at.real.cpu(), at.token.cpu(), figures))

    def _layer(self, module: nn.Module, call: AttentionCall, frame: Frame) -> Layer:
        name = self.stack.names.get(id(module), type(module).__name__)
        run = frame.times.get(name, 0)
        frame.times[name] = run + 1
        known = self.layers.get((name, run))
        if known is None:
            known = self.layers[name, run] = Layer(
                number=len(self.layers),
                name=name,
                module=module,
                cross=call.cross,
                heads=call.query.shape[1],
                key_heads=call.key.shape[1],
                size=call.query.shape[-1],
                scale=call.scale,
                capped=call.softcap is not None,
            )
        return known

    def _inputs(self, frame: Frame, count: int) -> list[int]:
        """Numbers of the texts; a cache, or what an encoder just gave, continue theirs.

        Towers of a model that take batches of different sizes have texts (or images) of their own.
        """
        if count not in frame.inputs:
            now = frame.outermost
            known: dict[int, list[int]] = {}
            if now.past > 0:
                kept = self._caches.get(id(now.given.get("past_key_values")))
                known = kept[1] if kept is not None and kept[0]() is not None else {}
            elif now.given.get("encoder_outputs") is not None:
                known = self._encoded
            if count in known:
                frame.inputs[count] = known[count]
            else:
                frame.inputs[count] = list(range(self.next_input, self.next_input + count))
                self.next_input += count
        return frame.inputs[count]

    def _closed(self, frame: Frame, output: Any) -> None:
        """Remember whose texts a cache holds, and what an encoder called by itself was given."""
        given, now = frame.outermost.given, getattr(output, "past_key_values", None)
        for cache in (given.get("past_key_values"), now):
            if cache is not None and frame.inputs:
                with suppress(TypeError):  # tuples, as old models return, cannot be referred to
                    self._caches[id(cache)] = (weakref.ref(cache), frame.inputs)
        alone = "encoder" in frame.outermost.name.rpartition(".")[2]
        self._encoded = frame.inputs if alone else {}

    def _positions(self, call: AttentionCall, frame: Frame) -> Positions:
        batch, _, m, _ = call.query.shape
        n = call.key.shape[2]
        owner = self.stack.innermost(is_model)
        past = 0 if owner is None else owner.past
        device = call.query.device
        if call.cross:
            keys = _flat(owner, "encoder_attention_mask", (batch, n), device)
            real_keys = _unhidden(call, batch, n) if keys is None else keys
            queries = _flat(owner, "attention_mask", (batch, past + m), device)
            if queries is None:
                known = frame.real.get((batch, m))
                queries = torch.ones(batch, past + m, dtype=torch.bool, device=device)
                if known is not None:
                    queries[:, past:] = known
            own = torch.full((batch, m), -1, device=device)
        else:
            total = past + m
            queries = _flat(owner, "attention_mask", (batch, total), device)
            stack = "" if owner is None else owner.name
            if queries is None:
                queries = self._guessed(call, stack, past)
            if past and m == 1 and owner is not None:
                queries = queries & ~self._over(owner, frame, (batch, past + 1)).to(device)
            self._known[stack] = queries
            start = max(0, total - n) if past else 0  # a window's cache has dropped the oldest
            real_keys = torch.zeros(batch, n, dtype=torch.bool, device=device)
            real_keys[:, : total - start] = queries[:, start : start + n]
            own = torch.arange(past - start, past - start + m, device=device).expand(batch, m)
            own = own.where(own < n, -1)
            frame.real[batch, m] = queries[:, -m:]
        token = queries.cumsum(-1) - 1
        key_token = _numbers(real_keys, 0 if call.cross or not past else token[:, -1:] + 1)
        return Positions(queries[:, -m:], token[:, -m:], key_token, own)

    def _over(self, owner: Running, frame: Frame, shape: tuple[int, int]) -> Tensor:
        """Texts that had ended before this step of generation: what they are fed is padding."""
        ids, last = owner.given.get("input_ids"), self._ended.get(owner.name)
        now = torch.zeros(shape, dtype=torch.bool)
        if not isinstance(ids, Tensor) or ids.shape != (shape[0], 1):
            return now
        now = now.to(ids.device)
        if last is None or last.serial != frame.serial:
            before = now[:, 0].clone()
            if last is not None and last.past + 1 == owner.past and len(last.after) == shape[0]:
                before = last.after
            ends = torch.tensor(_end_tokens(self.model), device=ids.device)
            last = _Ended(frame.serial, owner.past, before, before | torch.isin(ids[:, 0], ends))
            self._ended[owner.name] = last
        now[:, -1] = last.before
        return now

    def _guessed(self, call: AttentionCall, stack: str, past: int) -> Tensor:
        """What is no padding, ``(B, past + M)``, where the model was given no mask of its texts.

        Static caches are called with finished masks: a key hidden from all queries is padding, and
        what a cache holds was seen in the step before.
        """
        batch, _, m, _ = call.query.shape
        known = self._known.get(stack)
        if past and known is not None and len(known) == batch and known.shape[1] >= past:
            return torch.cat([known[:, :past], torch.ones_like(known[:, :1]).expand(-1, m)], 1)
        if past == 0 and call.key.shape[2] >= m:
            return _unhidden(call, batch, call.key.shape[2])[:, :m]
        return torch.ones(batch, past + m, dtype=torch.bool, device=call.query.device)


def _received(call: AttentionCall, real: Tensor) -> Tensor:
    """The share of all weight that each token receives, ``(B, H, M)``; padded queries give none."""
    from_real = call.attend().received(real[:, None].expand(call.query.shape[:3]).to(torch.float32))
    return from_real / real.sum(-1).clamp_min(1)[:, None, None]


def top_of(state: Mapping[str, Any]) -> dict[tuple[int, int], Top]:
    """The largest weights, by text and layer, in the state of a recorder."""
    return {(text, layer): Top(*top) for text, layer, *top in state["top"]}


class _Ended(NamedTuple):
    """Which texts had ended before the step of a frame, and which after it."""

    serial: int
    past: int
    before: Tensor
    after: Tensor


def _end_tokens(model: nn.Module) -> list[int]:
    """The tokens that end a text, as the model's configuration has them."""
    for name in ("generation_config", "config"):
        found = getattr(getattr(model, name, None), "eos_token_id", None)
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def _flat(
    running: Running | None, name: str, shape: tuple[int, int], device: torch.device
) -> Tensor | None:
    """The two-dimensional mask of a call as booleans, if it has one of this shape."""
    mask = None if running is None else running.given.get(name)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) not in (1, shape[0]):
        return None
    if mask.shape[1] != shape[1]:  # of a static cache, or of sound before it became frames
        return None
    return (mask != 0).expand(shape).to(device)


def _unhidden(call: AttentionCall, batch: int, n: int) -> Tensor:
    """Keys that some query sees: a key hidden from all is padding."""
    if call.mask is None:
        return torch.ones(batch, n, dtype=torch.bool, device=call.query.device)
    seen = call.mask.any(-2)
    seen = seen.any(1) if call.mask.ndim == 4 else seen
    return seen.expand(batch, n)


def _numbers(real: Tensor, total: Tensor | int) -> Tensor:
    """Numbers of the real entries, so that the last is total - 1; -1 for padding."""
    count = real.cumsum(-1)
    offset = count[:, -1:] - total if isinstance(total, Tensor) else 0
    return torch.where(real, count - 1 - offset, -1)


def _cut(call: AttentionCall, texts: slice) -> AttentionCall:
    """The call for some texts of the batch."""

    def cut(x: Tensor | None) -> Tensor | None:
        return x[texts] if x is not None and x.ndim == 4 and x.shape[0] > 1 else x

    return AttentionCall(
        call.query[texts],
        call.key[texts],
        call.value[texts],
        mask=cut(call.mask),
        bias=cut(call.bias),
        scale=call.scale,
        causal=call.causal,
        softcap=call.softcap,
        sinks=call.sinks,
        cross=call.cross,
    )


def _sinks(columns: dict[str, Tensor], positions: Positions, call: AttentionCall) -> Tensor:
    """Tokens that are the top key of many queries, ``(B, M)``; none while a cache is in use."""
    top, real = columns["top_key"], positions.real
    batch, heads, m = top.shape
    if call.cross or m != positions.key_token.shape[1]:
        return torch.zeros_like(real)
    votes = torch.zeros(batch, m + 1, device=top.device)
    weight = real[:, None].expand_as(top).reshape(batch, -1).float()
    votes.scatter_add_(1, (top + 1).reshape(batch, -1), weight)
    share = votes[:, 1:] / (heads * real.sum(-1, keepdim=True)).clamp_min(1)
    return (share.gather(1, positions.token.clamp(0, m - 1)) > SINK_SHARE) & real
