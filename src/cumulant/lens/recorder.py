"""Takes every attention call of a model down: which text, which token, which statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cumulant.errors import InputError
from cumulant.lens.calls import AttentionCall
from cumulant.lens.heads import Link, energy_change, link
from cumulant.lens.layers import LayerProbe
from cumulant.lens.stack import Frame, Running, Stack, under_transform
from cumulant.lens.statistics import Positions, Top, statistics, top_keys

__all__ = ["Layer", "Record", "Recorder", "Wanted"]

# A token counts as a sink where it is the top key of so many of a layer's queries.
SINK_SHARE = 0.3


@dataclass(frozen=True)
class Wanted:
    """What to measure: k90 and the top key, the leading eigenvalue, energy, layers.

    `links` and `top` are how many texts, from the first, to test the link on and to keep the five
    largest weights of.
    """

    order: bool = True
    spectrum: bool = True
    energy: bool = False
    links: int = 0
    top: int = 0
    layers: bool = False


@dataclass(frozen=True)
class Layer:
    """An attention call of the model, as often as it runs in one pass."""

    number: int
    name: str
    module: nn.Module
    cross: bool
    heads: int
    key_heads: int
    scale: float
    capped: bool = False


@dataclass(frozen=True)
class Record:
    """Statistics of one call: ``(B, H, M)`` each, with the texts and the tokens they belong to."""

    layer: int
    inputs: list[int]
    real: Tensor
    token: Tensor
    columns: dict[str, Tensor]


class Recorder:
    """Fed by `observe` with the calls of one model."""

    def __init__(self, model: nn.Module, wanted: Wanted, probe: LayerProbe | None = None) -> None:
        self.model = model
        self.wanted = wanted
        self.stack = Stack(model)
        self.probe = probe
        self.layers: dict[tuple[str, int], Layer] = {}
        self.records: list[Record] = []
        self.links: dict[int, list[Link | None]] = {}
        self.top: dict[tuple[int, int], Top] = {}
        self.calls = 0
        self.next_input = 0
        self._last: list[int] = []
        self._last_outermost = ""
        self._known: dict[str, Tensor] = {}  # what is padding, by stack, for its next steps

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
        self.calls += 1
        layer = self._layer(module, call, frame)
        positions = self._positions(call, frame)
        inputs = self._inputs(frame, call.query.shape[0])
        columns = statistics(
            call, positions, order=self.wanted.order, spectrum=self.wanted.spectrum
        )
        if self.wanted.energy:
            columns["energy_change"] = energy_change(call)
        seen = (columns["visible"] > 0).any(1)
        real = positions.real & seen
        if not call.cross and self.wanted.links and min(inputs) < self.wanted.links:
            few = self.wanted.links - min(inputs)
            self.links.setdefault(layer.number, []).append(link(_cut(call, slice(few)), real[:few]))
        for text, number in enumerate(inputs):
            if number < self.wanted.top and frame.outermost.past == 0:
                self.top[number, layer.number] = top_keys(
                    _cut(call, slice(text, text + 1)), positions, text
                )
        if self.probe is not None:
            sink = _sinks(columns, positions, call) if self.wanted.order else real & False
            self.probe.attention(module, layer.number, call.cross, real, sink & real)
        self.records.append(
            Record(
                layer.number,
                inputs,
                real.cpu(),
                positions.token.cpu(),
                {name: x.cpu() for name, x in columns.items()},
            )
        )

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
                scale=call.scale,
                capped=call.softcap is not None,
            )
        return known

    def _inputs(self, frame: Frame, count: int) -> list[int]:
        """Numbers of the texts; a cache, or what an encoder just gave, continue the last ones."""
        if not frame.inputs:
            now = frame.outermost
            encoded = now.given.get("encoder_outputs") is not None
            goes_on = now.past > 0 or (encoded and now.name != self._last_outermost)
            self._last_outermost = now.name
            if goes_on and len(self._last) == count:
                frame.inputs = self._last
            else:
                frame.inputs = list(range(self.next_input, self.next_input + count))
                self.next_input += count
            self._last = frame.inputs
        if len(frame.inputs) != count:
            raise InputError(
                f"the model attends with a batch of {count} where its first layer had "
                f"{len(frame.inputs)}; the lens needs one batch of texts in all layers."
            )
        return frame.inputs

    def _positions(self, call: AttentionCall, frame: Frame) -> Positions:
        batch, _, m, _ = call.query.shape
        n = call.key.shape[2]
        owner = self.stack.innermost(_is_model)
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
            self._known[stack] = queries
            start = max(0, total - n)  # a window's cache has dropped the oldest keys
            real_keys = torch.zeros(batch, n, dtype=torch.bool, device=device)
            real_keys[:, : total - start] = queries[:, start:]
            own = torch.arange(past - start, past - start + m, device=device).expand(batch, m)
            own = own.where(own < n, -1)
            frame.real[batch, m] = queries[:, -m:]
        token = queries.cumsum(-1) - 1
        key_token = _numbers(real_keys, 0 if call.cross else token[:, -1:] + 1)
        return Positions(queries[:, -m:], token[:, -m:], key_token, own)

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


def _is_model(running: Running) -> bool:
    """A Hugging Face model or one of its stacks, which know the mask of the texts."""
    return hasattr(running.module, "base_model_prefix")


def _flat(
    running: Running | None, name: str, shape: tuple[int, int], device: torch.device
) -> Tensor | None:
    """The two-dimensional mask of a call as booleans, if it has one of this shape."""
    mask = None if running is None else running.given.get(name)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) not in (1, shape[0]):
        return None
    if mask.shape[1] < shape[1]:
        return None
    return (mask[:, : shape[1]] != 0).expand(shape).to(device)


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
