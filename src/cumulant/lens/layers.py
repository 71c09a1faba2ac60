"""What every sublayer of a model does to distances, and the shape of its hidden states (T14-T17).

T14 proves that attention without weights drives tokens apart and T15 that normalization pulls them
together; T23 says that on trained models both have to be measured. A `LayerProbe` does so while the
model runs. It knows no architecture: it follows the residual stream from tensor to tensor.

A *block* is the innermost child of a list of modules that holds matrices besides those of the
attention module. Within it `cumulant.lens.hidden` finds the sublayers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.core.interception import Afterwards, Begun, Effect, Hook, Scope
from cumulant.core.threads import one_thread
from cumulant.core.typed import named_modules
from cumulant.lens.clouds import Cloud, Sample
from cumulant.lens.hidden import (
    LISTS,
    Call,
    Event,
    Frame,
    Point,
    Reservoir,
    add_ratios,
    maps_of,
    quantiles,
    sublayer_of,
    version_of,
)

__all__ = ["LayerProbe"]

_Action = Callable[[nn.Module, list[Any], Any], None]

# Numbers in hidden states that one thread measures as fast as several.
SMALL = 2**20
SUBLAYERS = ("attention", "cross_attention", "feed_forward", "norm", "block")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Record:
    """What is kept of one layer: ratios of token pairs, hidden states after and before it."""

    layer: int
    module: str
    pairs: Reservoir
    states: Cloud
    inputs: Cloud


class LayerProbe:
    """Measures, block by block, expansion, contraction and hidden states of a running model.

    For pairs of tokens of one text the ratio ||f(x_i) - f(x_j)|| / ||x_i - x_j|| is taken for each
    f: attention, cross-attention and feed-forward, each with its residual, every normalization, and
    the whole block; in parallel blocks only the last exists. Pairs that coincide before are left
    out.

    Args:
        model: any torch model with blocks in a list: Hugging Face's, `torch.nn.TransformerEncoder`.
        pairs: kept per layer, a uniform sample; no text offers more.
        tokens: hidden states kept per layer, a uniform sample over all texts (layers x tokens x
            width numbers in all).
        seed: of the samples.

    While it is `attached`, call `attention` for every attention call while its block runs. A
    block that cannot be followed is skipped, and `skipped` says why; the model's own run never
    fails.

    >>> import torch, cumulant as cm
    >>> from cumulant.lens.layers import LayerProbe
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    >>> every, none = torch.ones(1, 5).bool(), torch.zeros(1, 5).bool()
    >>> with LayerProbe(model).attached() as probe:
    ...     tell = lambda m, i, o: probe.attention(m, 0, cross=False, real=every, sink=none)
    ...     handle = model.layers[0].self_attn.register_forward_hook(tell)
    ...     y = model(torch.randn(1, 5, 8))
    >>> [(row["sublayer"], row["name"], row["pairs"]) for row in probe.expansions()][::2]
    [('attention', '', 10), ('feed_forward', '', 10), ('norm', 'norm1', 10), ('norm', 'norm2', 10),
     ('block', '', 10)]
    """

    def __init__(
        self, model: nn.Module, *, pairs: int = 2048, tokens: int = 2048, seed: int = 0
    ) -> None:
        if not isinstance(cast(Any, model), nn.Module):
            raise InputError(f"LayerProbe: model must be a torch module, not {type(model)}.")
        self.pairs = whole("LayerProbe", "pairs", pairs, 1)
        self.tokens = whole("LayerProbe", "tokens", tokens, 2)
        self.seed = whole("LayerProbe", "seed", seed, 0)
        self.skipped: dict[str, str] = {}
        self._modules = dict(named_modules(model))
        self._names = {module: name for name, module in self._modules.items()}
        self._stack: list[Frame] = []
        self._records: dict[tuple[int, str], _Record] = {}
        self._small = False  # whether the states at hand are
        self._attended: dict[int, Sample] = {}  # by layer: what its attention module was given

    def attached(self) -> Scope[Self]:
        """Within this context the probe follows its model."""
        return Scope(lambda: Begun(self, self.effects()))

    def effects(self) -> list[Effect]:
        """Hooks that follow the hidden states through the model."""
        effects: list[Effect] = [Afterwards(self._stack.clear)]
        norms = {name for name, module in self._modules.items() if _is_norm(module)}
        inside = tuple(f"{norm}." for norm in norms)
        around = {norm[:i] for norm in norms for i, letter in enumerate(norm) if letter == "."}
        for name, module in self._modules.items():
            if name == "" or name.startswith(inside):
                continue
            if name in norms:
                effects.append(self._after(module, partial(self._normed, name)))
                continue
            listed = isinstance(self._modules.get(name.rpartition(".")[0]), LISTS)
            if listed and any(True for _ in module.children()) and _matrices(module):
                effects.append(self._before(module, partial(self._start, name)))
                effects.append(self._after(module, partial(self._stop, name)))
            if name not in around:
                effects.append(self._before(module, partial(self._entered, name)))
                effects.append(self._after(module, partial(self._ran, name)))
        return effects

    def _before(self, module: nn.Module, act: _Action) -> Hook:
        def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._safely(lambda: act(module, _given(args, kwargs), None))

        return Hook(module, call, after=False)

    def _after(self, module: nn.Module, act: _Action) -> Hook:
        # also where a forward pass raised: its block must be forgotten as well
        def call(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            self._safely(lambda: act(module, _given(args, kwargs), output))

        return Hook(module, call, after=True)

    def _safely(self, act: Callable[[], None]) -> None:
        """Errors of the probe never reach the model's own run."""
        try:
            with torch.no_grad(), one_thread(self._small):
                act()
        except Exception as problem:
            for frame in self._stack:
                if frame.start is not None:
                    self._skip(frame.name, f"{type(problem).__name__}: {problem}")
                    frame.drop()

    # What happens while the model runs. Hooks see every tensor as it passes.

    def attention(
        self,
        module: nn.Module,
        layer: int,
        cross: bool,
        real: Tensor,
        sink: Tensor,
        given: Tensor | None = None,
    ) -> None:
        """Report an attention call of `module`, the `layer`-th of the model, as it happens.

        `real` and `sink`, ``(B, T)`` of the queries, mark unpadded tokens and sink tokens; `given`,
        ``(B, T, D)``, are the states that the module projects to queries and keys.
        """
        if given is not None and not cross:
            self._safely(lambda: self._sampled(layer, given.detach(), real, sink))
        self._safely(lambda: self._called(module, layer, cross, real.detach(), sink.detach()))

    def _sampled(self, layer: int, given: Tensor, real: Tensor, sink: Tensor) -> None:
        """A sample of what an attention module was given."""
        if given.ndim == 3 and given.shape[:2] == real.shape:
            if layer not in self._attended:
                self._attended[layer] = Sample(self.tokens, self.seed)
            with torch.inference_mode(False), torch.no_grad():
                self._attended[layer].add(given.flatten(0, 1).clone(), real=real, sink=sink)

    def attended(self, layer: int) -> Tensor | None:
        """States that the attention of a layer was given, ``(n, D)``, without sinks; a sample."""
        return self._attended[layer].states() if layer in self._attended else None

    def _called(
        self, module: nn.Module, layer: int, cross: bool, real: Tensor, sink: Tensor
    ) -> None:
        name = self._names.get(module)
        found = [k for k, frame in enumerate(self._stack) if _is_block(frame.module, module)]
        if name is None or not found:
            return
        frame = self._stack[found[-1]]
        batch_first = bool(getattr(module, "batch_first", True))
        frame.calls.append(Call(name, layer, cross, real, sink, batch_first))
        frame.events.append(Event("cross_attention" if cross else "attention", name))
        for outer in self._stack[: found[-1]]:  # they hold blocks, so they are none
            outer.drop()

    def _start(self, name: str, module: nn.Module, given: list[Any], _: Any) -> None:
        frame = Frame(name, module, None)
        self._stack.append(frame)
        hidden = next((x for x in given if isinstance(x, Tensor) and x.is_floating_point()), None)
        if hidden is not None and not hidden.is_nested and hidden.ndim in (2, 3) and hidden.numel():
            self._small = hidden.numel() <= SMALL
            shared = (p for f in self._stack for p in f.points if p.is_now(hidden))
            frame.start = next(shared, None) or Point(hidden, hidden.detach().clone())
            frame.points.append(frame.start)

    def _stop(self, name: str, module: nn.Module, _: list[Any], output: Any) -> None:
        while self._stack:  # what an exception left behind inside goes as well
            frame = self._stack.pop()
            if frame.module is module:
                if frame.calls and output is not None:
                    try:
                        self._finish(frame, _first(output))
                    except Exception as problem:
                        self._skip(frame.name, f"{type(problem).__name__}: {problem}")
                return

    def _entered(self, name: str, module: nn.Module, given: list[Any], _: Any) -> None:
        for frame in self._stack:
            hidden = next((x for x in given if frame.holds(x)), None)
            is_child = sublayer_of(name, frame.name, self._modules) == name != frame.name
            if hidden is not None and is_child:
                fresh = not frame.is_output(hidden)
                frame.events.append(Event("enter", name, frame.point(hidden) if fresh else None))

    def _ran(self, name: str, module: nn.Module, given: list[Any], output: Any) -> None:
        result = _first(output)
        own = any(p.ndim >= 2 for p in module.parameters(recurse=False))
        plain = next(module.parameters(), None) is None
        for frame in self._stack:
            if own and frame.start is not None:
                frame.events.append(Event("matrix", name))
            if not frame.holds(result) or any(result is x for x in given):
                continue
            # dropout and the like make an output of an output, and of the stream the stream
            if not plain or any(frame.holds(x) and frame.is_output(x) for x in given):
                frame.outputs.append((result, version_of(result)))

    def _normed(self, name: str, module: nn.Module, given: list[Any], output: Any) -> None:
        for frame in self._stack:
            hidden = next((x for x in given if frame.holds(x)), None)
            if hidden is not None and frame.holds(output) and output.shape == hidden.shape:
                before, after = frame.point(hidden), frame.point(output)
                branch = frame.is_output(hidden)
                frame.events.append(Event("norm", name, before, after, branch))

    def _finish(self, frame: Frame, output: Any) -> None:
        """Measure a block that has run."""
        first = frame.calls[0]
        if not frame.holds(output) or frame.start is None:
            return self._skip(frame.name, "its states are not one tensor of the shape of its input")
        shape = tuple(frame.start.value.shape[:-1])
        wanted = tuple(first.real.shape) if first.batch_first else tuple(first.real.shape)[::-1]
        if shape != wanted and (1, *shape) != tuple(first.real.shape):
            return self._skip(frame.name, f"states {shape} do not match tokens {wanted}")
        if first.real.shape[1] < 2:
            return self._skip(frame.name, "it ran on single tokens")
        turn = not first.batch_first and len(shape) == 2
        real, sink = first.real.bool(), torch.zeros_like(first.real, dtype=torch.bool)
        for call in frame.calls:
            sink = sink | call.sink.bool() if call.sink.shape == sink.shape else sink

        def rows(x: Tensor) -> Tensor:
            x = x.reshape(*shape, -1)
            return (x.transpose(0, 1) if turn else x).reshape(real.numel(), -1)

        end = frame.point(output)
        columns: dict[str, tuple[Tensor, Tensor]] = {}
        for column, before, after in maps_of(frame, end, self._modules):
            runs = sum(c.partition("#")[0] == column for c in columns)
            columns[f"{column}#{runs + 1}" if runs else column] = (before, after)
        record = self._record(first.layer, frame.name)
        with torch.inference_mode(False), torch.no_grad():
            add_ratios(record.pairs, columns, rows, real=real, sink=sink)
            record.states.add(rows(end.value), real=real, sink=sink)
            if self._is_first(record):
                record.inputs.add(rows(frame.start.value), real=real, sink=sink)

    def _skip(self, name: str, why: str) -> None:
        self.skipped.setdefault(name, why)
        _log.debug("block %s is left out: %s", name, why)

    def _record(self, layer: int, module: str) -> _Record:
        if (layer, module) not in self._records:
            clouds = (Cloud(self.tokens, self.seed) for _ in range(2))
            pairs = Reservoir(self.pairs, self.seed)
            self._records[layer, module] = _Record(layer, module, pairs, *clouds)
        return self._records[layer, module]

    def _is_first(self, record: _Record) -> bool:
        """Whether no block of the same list runs before it."""
        stack = record.module.rpartition(".")[0]
        others = (r.layer for r in self._records.values() if r.module.rpartition(".")[0] == stack)
        return record.layer == min(others)

    # What came of it.

    def layers(self) -> list[dict[str, Any]]:
        """One row per block, of all tokens: median expansions, shape of the states after it."""
        rows: list[dict[str, Any]] = []
        for record in self._sorted():
            columns = record.pairs.columns
            with one_thread(record.states.size <= SMALL):
                rows.append(
                    {
                        "layer": record.layer,
                        "module": record.module,
                        "attention_expansion": _median(columns, "attention"),
                        "cross_attention_expansion": _median(columns, "cross_attention"),
                        "feed_forward_expansion": _median(columns, "feed_forward"),
                        "norm_contraction": _median(columns, "norm"),
                        **record.states.shape()._asdict(),
                    }
                )
        return rows

    def inputs(self) -> list[dict[str, Any]]:
        """The shape of the states that enter the first block of each list of blocks."""
        return [
            {"layer": record.layer, "module": record.module, **record.inputs.shape()._asdict()}
            for record in self._sorted()
            if record.inputs
        ]

    def expansions(self) -> list[dict[str, Any]]:
        """Quantiles of the ratios, per layer, sublayer and choice of tokens.

        ``name`` is that of the normalization inside its block, empty for other sublayers; ``pairs``
        is how many pairs the quantiles are of.
        """
        rows: list[dict[str, Any]] = []
        for record in self._sorted():
            columns = record.pairs.columns
            known = [name for name in columns if name != "sink"]
            for column in sorted(known, key=lambda c: SUBLAYERS.index(c.partition(":")[0])):
                sublayer, _, name = column.partition(":")
                for tokens in ("all", "without_sinks"):
                    keep = (columns["sink"] == 0) | (tokens == "all")
                    count, found = quantiles(columns[column][keep])
                    if count == 0:
                        continue
                    named = zip(("q05", "q25", "median", "q75", "q95"), found, strict=True)
                    where = {"layer": record.layer, "module": record.module}
                    what = {"sublayer": sublayer, "name": name, "tokens": tokens, "pairs": count}
                    rows.append({**where, **what, **dict(named)})
        return rows

    def _sorted(self) -> list[_Record]:
        return sorted(self._records.values(), key=lambda r: (r.layer, r.module))

    def state(self) -> dict[str, Any]:
        """Everything measured so far, for a journal."""
        blocks = [
            {
                "layer": record.layer,
                "module": record.module,
                "pairs": record.pairs.state(),
                "states": record.states.state(),
                "inputs": record.inputs.state(),
            }
            for record in self._sorted()
        ]
        sizes = {"pairs": self.pairs, "tokens": self.tokens, "seed": self.seed}
        attended = {str(layer): cloud.state() for layer, cloud in self._attended.items()}
        return {**sizes, "blocks": blocks, "attended": attended}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Take in what another probe measured, as if this one had seen its texts too.

        Raises:
            InputError: the other kept samples of another size.
        """
        sizes = (state.get("pairs"), state.get("tokens"))
        if sizes != (self.pairs, self.tokens):
            raise InputError(
                f"LayerProbe: a state with (pairs, tokens) = {(self.pairs, self.tokens)} was "
                f"expected, but came with {sizes}. Make the probe with the same sizes."
            )
        for block in state["blocks"]:
            record = self._record(block["layer"], block["module"])
            record.pairs.merge(block["pairs"])
            record.states.merge(block["states"])
            record.inputs.merge(block["inputs"])
        for layer, cloud in state["attended"].items():
            own = self._attended.setdefault(int(layer), Sample(self.tokens, self.seed))
            own.merge(cloud)


def _is_norm(module: nn.Module) -> bool:
    """Normalizations hold vectors at most: a class such as PreNorm wraps a whole sublayer."""
    return "Norm" in type(module).__name__ and not _matrices(module)


def _matrices(module: nn.Module, but: nn.Module | None = None) -> bool:
    """Whether a module holds matrices outside another one."""
    left_out = {id(p) for p in but.parameters()} if but is not None else set[int]()
    return any(p.ndim >= 2 and id(p) not in left_out for p in module.parameters())


def _is_block(block: nn.Module, attention: nn.Module) -> bool:
    inside = block is not attention and any(m is attention for m in block.modules())
    return inside and _matrices(block, attention)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a module was called with, hidden states first."""
    rest = dict(kwargs)
    named = [rest.pop("hidden_states")] if "hidden_states" in rest else []
    return [*named, *args, *rest.values()]


def _first(output: Any) -> Any:
    """The hidden states of what a module returned."""
    if isinstance(output, Mapping):
        output = tuple(cast(Mapping[str, Any], output).values())
    return next(iter(cast(Any, output)), None) if isinstance(output, tuple | list) else output


def _median(columns: dict[str, Tensor], sublayer: str) -> float | None:
    ratios = [x for name, x in columns.items() if name.startswith(f"{sublayer}:")]
    found = quantiles(torch.cat(ratios))[1] if ratios else []
    return found[2] if found else None
