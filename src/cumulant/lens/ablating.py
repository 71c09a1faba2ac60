"""`ablate`: a Hugging Face model with parts of some layers replaced (T23, T37, T40).

The model's own forward pass runs; calls of the attention interface and outputs of projections are
answered by something else. Parameters are never written to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.attention.calls import AttentionCall
from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.core.interception import Begun, Effect, Hook, Scope
from cumulant.core.typed import named_modules, tolist
from cumulant.lens.editing import block_of, edits
from cumulant.lens.standing_in import continuous, scores_of
from cumulant.lens.weights import is_attention, output_block

__all__ = ["PARTS", "ablate"]

PARTS = {
    "query_key": "W_q and W_k the identity: heads compare slices of the hidden state, without "
    "positions; one temperature a head, fitted",
    "uniform": "every visible key has the same weight",
    "value_output": "W_v and W_o the identity: heads pass slices of the hidden state on; one gain "
    "a layer, fitted",
    "one_head": "all heads use the mean of their weights",
    "gaussian": "the keys of each head are a Gaussian, the values its regression on them (T40)",
    "attention": "the attention sublayer adds nothing to its residual",
    "feed_forward": "the feed-forward sublayer adds nothing to its residual",
}
FITTED = ("query_key", "value_output")
WHOLE = ("value_output", "feed_forward")  # which have no heads
TEMPERATURES = tuple(tolist(torch.logspace(-3, 1.5, 19)))  # times the head's own scale
# The last matrix of a feed-forward layer, from its block on.
_DOWN = (
    *("mlp.down_proj", "output.dense", "ffn_output", "mlp.c_proj", "mlp.fc2", "fc2", "linear2"),
    *("mlp.dense_4h_to_h", "ffn.lin2", "mlp.Wo", "feed_forward.w2", "mlp.wo"),
)


def ablate(
    model: nn.Module,
    part: str,
    layers: Iterable[int] | int | None = None,
    *,
    heads: Iterable[int] | int | None = None,
    fit: Mapping[str, Tensor] | None = None,
) -> Scope[None]:
    """Within this context, one part of some layers of a model is replaced.

    What is learned, and so what is lost, shows in whatever the model is for: run it and compare.
    Parameters and buffers are untouched, so the model is bit for bit what it was afterwards.
    Contexts nest: parts of different layers add up; for one layer's attention the innermost
    context decides.

    Args:
        model: a Hugging Face model; its attention must go through the attention interface.
        part: one of `PARTS`.
        layers: numbers of attention layers in the order in which they run, from 0; all by default.
        heads: numbers of the heads that change in these layers, as in the tables of the lens; all
            by default. With "attention" such a head adds nothing. Not for "value_output" and
            "feed_forward", which are of whole layers.
        fit: arguments of the model to fit temperature or gain on, by least squares of the
            sublayer's output in the intact model; needed for "query_key" and "value_output".

    Raises:
        InputError: an unknown part, layer or head, no inputs to fit on, or a model that has no
            attention, or whose projections or feed-forward layers go by unknown names.

    >>> import torch, cumulant as cm
    >>> model, tokenizer, *_ = cm.lens.load()
    >>> inputs = tokenizer("To be, or not to be, that is the question", return_tensors="pt")
    >>> with torch.no_grad(), cm.lens.ablate(model, "uniform", layers=[0, 1]):
    ...     changed = model(**inputs).last_hidden_state
    >>> with torch.no_grad(), cm.lens.ablate(model, "attention", layers=2, heads=5):
    ...     without_one_head = model(**inputs).last_hidden_state
    """
    if part not in PARTS:
        raise InputError(f"ablate: there is no part {part!r}; the parts are {', '.join(PARTS)}.")
    chosen = _layers(model, layers)
    if part in FITTED and fit is None:
        raise InputError(
            f"ablate: {part!r} has a constant to fit; pass fit=, arguments of the model such as "
            'tokenizer(text, return_tensors="pt").'
        )
    places = _Places(model)
    some = _heads(model, part, heads)
    fitted = _fitted(model, places, part, chosen, fit or {}) if part in FITTED else {}
    return Scope(lambda: Begun(None, _effects(model, places, part, chosen, fitted, some)))


def _layers(model: nn.Module, layers: Iterable[int] | int | None) -> frozenset[int]:
    config = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        count = sum(map(is_attention, model.modules()))
    if count == 0:
        raise InputError(
            f"ablate: {type(model).__name__} has no attention layers; pass a Hugging Face model."
        )
    if layers is None:
        return frozenset(range(count))
    chosen = frozenset(whole("ablate", "a layer", n) for n in _listed(layers))
    if wrong := sorted(chosen - set(range(count))):
        raise InputError(
            f"ablate: {type(model).__name__} has layers 0 to {count - 1}, not "
            f"{', '.join(map(str, wrong))}."
        )
    return chosen


def _heads(model: nn.Module, part: str, heads: Iterable[int] | int | None) -> list[int] | None:
    """The numbers of heads, checked."""
    if heads is None:
        return None
    if part in WHOLE:
        raise InputError(f"ablate: {part!r} is of whole layers; leave heads out.")
    count = getattr(getattr(model, "config", None), "num_attention_heads", None)
    most = count if isinstance(count, int) else sys.maxsize
    chosen = sorted({whole("ablate", "a head", h, 0) for h in _listed(heads)})
    if not chosen:
        raise InputError("ablate: heads is empty; leave it out to change all heads.")
    if chosen[-1] >= most:
        raise InputError(f"ablate: the layers have heads 0 to {most - 1}, not {chosen[-1]}.")
    return chosen


def _listed(numbers: Iterable[int] | int) -> Iterable[int]:
    """One number, also of numpy, or several."""
    return numbers if isinstance(numbers, Iterable) else [numbers]


def _in_heads(call: AttentionCall, changed: Tensor | None, heads: list[int]) -> Tensor:
    """The call's own output with some heads changed; to nothing, if there is no change."""
    own = call.attend().mean.clone()
    own[:, heads] = 0.0 if changed is None else changed[:, heads].to(own.dtype)
    return own


@dataclass(frozen=True)
class _Fit:
    """What was fitted for one layer: temperatures ``(H,)`` and a gain."""

    temperature: Tensor
    gain: float = 1.0


class _Places:
    """The modules of a model where parts are replaced."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(named_modules(model))
        self.attention = {name: m for name, m in modules.items() if is_attention(m)}
        self.output: list[nn.Module] = []
        self.down: list[nn.Module] = []
        owners = {id(p): m for m in modules.values() for p in m.parameters(recurse=False)}
        for name, module in self.attention.items():
            parent = modules.get(name.rpartition(".")[0], model)
            block = output_block(module, parent)
            if block is not None:
                self.output.append(owners[id(block.parameter)])
            around = block_of(name, modules)
            ends = [modules.get(f"{around}.{end}") for end in _DOWN]
            self.down += [m for m in ends if m is not None][:1]

    def needed(self, part: str) -> None:
        """Check that the places of a part were found."""
        missing = None
        if part in ("query_key", "value_output") and not self.attention:
            missing = "query, key and value projections"
        elif part in ("attention", "value_output") and len(self.output) < len(self.attention):
            missing = "output projections"
        elif part in ("attention", "feed_forward") and not self.attention:
            missing = "attention layers"
        elif part == "feed_forward" and len(self.down) < len(self.attention):
            missing = "feed-forward layers"
        if missing:
            raise InputError(f"ablate: the {missing} of this model go by unknown names.")


def _effects(
    model: nn.Module,
    places: _Places,
    part: str,
    chosen: frozenset[int],
    fits: dict[int, _Fit],
    heads: list[int] | None,
) -> list[Effect]:
    """Everything that makes one part another."""
    places.needed(part)
    state: dict[str, Tensor] = {}

    def answer(layer: int, call: AttentionCall) -> Tensor | None:
        if layer not in chosen:
            return None
        found = _answer(part, call, state, fits.get(layer))
        return found if heads is None else _in_heads(call, found, heads)

    effects, now = edits(model, answer)
    if part in FITTED:
        effects += [Hook(m, partial(_keep, state), after=False) for m in places.attention.values()]
    ends: list[nn.Module] = []
    if part == "value_output" or (part == "attention" and heads is None):
        ends = places.output
    elif part == "feed_forward":
        ends = places.down

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> Any:
        if now["layer"] not in chosen or output is None:
            return None
        if part == "value_output":
            return fits[now["layer"]].gain * args[0]
        return torch.zeros_like(output)

    return [*effects, *(Hook(m, end, after=True) for m in ends)]


def _keep(
    state: dict[str, Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Remember the hidden states ``(B, M, D)`` that an attention module is given."""
    state["now"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _answer(
    part: str, call: AttentionCall, state: dict[str, Tensor], fit: _Fit | None
) -> Tensor | None:
    """The output ``(B, H, M, e)`` of one attention call, or None for the model's own."""
    if part == "uniform":
        return call.attend(query=torch.zeros_like(call.query)).mean
    if part == "gaussian":
        return continuous(call)
    if part == "one_head":
        return _one_head(call)
    if part == "query_key":
        own = _slices(state["now"], call)
        heat = torch.ones(own.shape[1]) if fit is None else fit.temperature
        return _compared(call, own, heat)
    if part == "value_output":
        return call.attend(value=_slices(state["now"], call)).mean
    return None


def _slices(hidden: Tensor, call: AttentionCall) -> Tensor:
    """``(B, N, D)`` to ``(B, H, N, D / H)``."""
    heads = call.query.shape[1]
    if hidden.shape[-1] % heads or hidden.shape[1] != call.key.shape[2]:
        raise InputError(
            f"ablate: states of shape {tuple(hidden.shape)} cannot stand in for {heads} heads over "
            f"{call.key.shape[2]} keys: use a width that is a multiple of the heads, and no cache."
        )
    return torch.unflatten(hidden, -1, (heads, -1)).transpose(1, 2)


def _compared(call: AttentionCall, own: Tensor, temperature: Tensor) -> Tensor:
    """Attention whose queries and keys are slices of the hidden state."""
    value = call.value.repeat_interleave(own.shape[1] // call.value.shape[1], 1)
    heat = temperature.to(own)[:, None, None]
    other = replace(call, query=own * heat, key=own, value=value, scale=own.shape[-1] ** -0.5)
    return other.attend().mean


def _one_head(call: AttentionCall) -> Tensor:
    """The mean of all heads' weights, applied to each head's values."""
    score, weight = scores_of(call)
    mean = (score + weight.log()).softmax(-1).nan_to_num(0).mean(1, keepdim=True)
    value = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)
    return mean @ value.to(mean.dtype)


def _fitted(
    model: nn.Module,
    places: _Places,
    part: str,
    chosen: frozenset[int],
    arguments: Mapping[str, Tensor],
) -> dict[int, _Fit]:
    """Temperature or gain of each layer, from one pass of the intact model."""
    places.needed(part)
    mask = arguments.get("attention_mask")
    state: dict[str, Tensor] = {}
    found: dict[int, _Fit] = {}
    sliced: dict[int, Tensor] = {}

    def weight_of(x: Tensor) -> Tensor:
        """1 for real tokens ``(B, 1, M, 1)``."""
        if mask is None:
            return x.new_ones(1)
        return mask.to(x)[:, None, :, None]

    def answer(layer: int, call: AttentionCall) -> None:
        if layer not in chosen:
            return
        own = _slices(state["now"], call)
        if part == "value_output":
            sliced[layer] = call.attend(value=own).mean.transpose(1, 2).flatten(2)
            return
        truth = call.attend().mean
        found[layer] = _Fit(_best_temperature(call, own, truth, weight_of(truth)))

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        layer = now["layer"]
        if layer in sliced and output is not None:
            real = weight_of(output)[:, 0] if mask is not None else 1.0
            ours = sliced.pop(layer) * real
            gain = float((ours * output).sum() / ours.square().sum())
            found[layer] = _Fit(torch.ones(1), gain)

    effects, now = edits(model, answer)
    effects += [Hook(m, partial(_keep, state), after=False) for m in places.attention.values()]
    effects += [Hook(m, end, after=True) for m in places.output]
    with torch.no_grad(), Scope(lambda: Begun(None, effects)):
        model(**arguments)
    if lost := sorted(chosen - found.keys()):
        raise InputError(f"ablate: layers {', '.join(map(str, lost))} did not run on fit=.")
    return found


def _best_temperature(call: AttentionCall, own: Tensor, truth: Tensor, weight: Tensor) -> Tensor:
    """Of each head, the one at which its output is closest to the truth."""
    errors = [
        ((_compared(call, own, torch.full((own.shape[1],), t)) - truth).square() * weight).sum(
            (0, 2, 3)
        )
        for t in TEMPERATURES
    ]
    return torch.tensor(TEMPERATURES)[torch.stack(errors).argmin(0)]
