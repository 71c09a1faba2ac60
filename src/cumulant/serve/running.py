"""One run of a model on one text, with every attention call kept.

Shape legend: N tokens, H heads, d features of a head.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.attention.calls import AttentionCall
from cumulant.core.errors import InputError
from cumulant.core.interception import Scope
from cumulant.lens.layers import LayerProbe
from cumulant.lens.observing import recording
from cumulant.lens.recorder import Layer, Recorder, Wanted
from cumulant.lens.stack import Frame
from cumulant.lens.statistics import Positions

__all__ = ["Cancelled", "Run", "Seen", "run_model"]


class Cancelled(Exception):  # noqa: N818
    """Whoever asked is gone: the run stopped between two layers."""


@dataclass(frozen=True)
class Seen:
    """One attention call: which layer made it, with what, and where its tokens stand."""

    layer: Layer
    call: AttentionCall
    positions: Positions


@dataclass(frozen=True)
class Run:
    """What a model did with one text.

    Attributes:
        seen: every attention call, in order.
        states: the output of the model, ``(N, D)``.
        probe: what each sublayer did to distances, or None.
    """

    seen: tuple[Seen, ...]
    states: Tensor
    probe: LayerProbe | None = None

    def at(self, layer: int) -> Seen:
        """The call of a layer."""
        found = next((x for x in self.seen if x.layer.number == layer), None)
        if found is None:
            raise InputError(f"there is no layer {layer}; layers are 0 to {len(self.seen) - 1}.")
        return found


class _Keeper(Recorder):
    """A recorder that keeps calls instead of measuring them."""

    def __init__(self, model: nn.Module, probe: LayerProbe | None, stop: threading.Event) -> None:
        super().__init__(model, Wanted(layers=probe is not None), probe)
        self.seen: list[Seen] = []
        self._stop = stop

    def _take(self, module: nn.Module, call: AttentionCall, frame: Frame) -> None:
        if self._stop.is_set():
            raise Cancelled
        self.calls += 1
        layer, positions = self._layer(module, call, frame), self._positions(call, frame)
        self._inputs(frame, len(call.query))
        if self.probe is not None:
            none = torch.zeros_like(positions.real)
            self.probe.attention(module, layer.number, call.cross, positions.real, none)
        self.seen.append(Seen(layer, call, positions))


@torch.no_grad()
def run_model(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    stop: threading.Event | None = None,
    *,
    depth: bool = False,
) -> Run:
    """Call `model` once on a batch of one.

    Args:
        model: a Hugging Face model without a head.
        inputs: keyword arguments of the call.
        stop: when set, the run ends before the next attention call.
        depth: follow the hidden states, too, which takes longer than the run.

    Raises:
        Cancelled: `stop` was set.
    """
    probe = LayerProbe(model) if depth else None
    keeper = _Keeper(model, probe, stop or threading.Event())

    def begin() -> Any:
        return recording(model, keeper)

    with Scope(begin):
        out = model(**inputs)
    states: Tensor = out.last_hidden_state
    return Run(tuple(keeper.seen), states[0], probe)
