"""Attention as a map and a velocity field on clouds of points (docs/theory.md, T13)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cumulant.core.checks import broadcast, broadcasts_to, finite, numbers, require
from cumulant.core.errors import InputError
from cumulant.dynamics.contraction import Contraction, contract
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.tiles import Band

__all__ = ["Field", "prepare", "step"]

_CAUSAL = Band(upper=0)


@dataclass(frozen=True)
class Field:
    """x -> E[v] under p(j|x) ∝ exp(beta <W_q' x, W_k' y_j>): the points y are x, or fixed."""

    beta: float | Tensor = 1.0
    patterns: Tensor | None = None
    query_weight: Tensor | None = None
    key_weight: Tensor | None = None
    value_weight: Tensor | None = None
    is_causal: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        y = x if self.patterns is None else self.patterns
        shape = x.shape
        weights = (self.query_weight, self.key_weight, self.value_weight)
        plain = all(W is None or W.ndim == 2 for W in weights)
        if self.patterns is not None and y.ndim == 2 and plain and not self.is_causal:
            x = x.reshape(-1, shape[-1])  # one set of patterns: all points are queries of it
        elif y.ndim < x.ndim:
            y = y[(None,) * (x.ndim - y.ndim)]
        scale, query = 1.0, x
        if isinstance(self.beta, Tensor):
            query = (query.reshape(shape) * self.beta).reshape(query.shape)
        else:
            scale = self.beta
        named = {
            "query": _times(query, self.query_weight),
            "key": _times(y, self.key_weight),
            "value": _times(y, self.value_weight),
        }
        options = Options(scale=scale, band=_CAUSAL if self.is_causal else Band())
        return attention(named, options).mean.reshape(shape)


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x @ weight


@dataclass(frozen=True)
class Call:
    """A checked call: where it starts, what moves it, how far, and what pulls it back."""

    x: Tensor
    field: Field
    step_size: float | Tensor
    contraction: Contraction | None
    dtype: torch.dtype

    def step(self, x: Tensor) -> Tensor:
        return contract(self.contraction, x + self.step_size * self.field(x))

    @property
    def settings(self) -> dict[str, Any]:
        """What a file can say of this call."""
        return {
            "beta": _told(self.field.beta),
            "step_size": _told(self.step_size),
            "contraction": str(self.contraction) if self.contraction is not None else None,
            "is_causal": self.field.is_causal,
            **{
                name: None if x is None else f"tensor {tuple(x.shape)}"
                for name in ("patterns", "query_weight", "key_weight", "value_weight")
                for x in [getattr(self.field, name)]
            },
        }

    def velocity(self, x: Tensor) -> Tensor:
        """The differential of the contraction, applied to the field: for the sphere, the tangent
        part of it."""
        moving = self.field(x)
        if self.contraction is None:
            return moving

        def contracted(x: Tensor) -> Tensor:
            return contract(self.contraction, x)

        return cast(Any, torch.func.jvp(contracted, (x,), (moving,)))[1]


def _told(x: float | Tensor) -> float | str:
    if isinstance(x, Tensor) and x.numel() > 1:
        return f"tensor {tuple(x.shape)}"
    return float(x.detach() if isinstance(x, Tensor) else x)


def _number(owner: str, name: str, given: Any, like: Tensor) -> float | Tensor:
    """A finite number, or a tensor that broadcasts against each point's first coordinate."""
    if not isinstance(given, Tensor):
        try:
            value = float(given)
        except (TypeError, ValueError):
            raise InputError(
                f"{owner}: {name} must be a number or a tensor, not {type(given).__name__}."
            ) from None
        if not math.isfinite(value):
            raise InputError(f"{owner}: {name} must be finite, not {value}.")
        return value
    if given.is_complex() or given.dtype == torch.bool:
        raise InputError(f"{owner}: {name} must be real, but has dtype {given.dtype}.")
    require(given.isfinite(), lambda: f"{owner}: {name} must be finite everywhere.")
    target = (*like.shape[:-1], 1)
    if not broadcasts_to(given.shape, target):
        raise InputError(
            f"{owner}: {name} must be a number or broadcast to {target}, one for each point of "
            f"{tuple(like.shape)}, but has shape {tuple(given.shape)}. One for each cloud of a "
            "batch is (*batch, 1, 1)."
        )
    return given.to(like.device, like.dtype)


def _weight(owner: str, name: str, x: Tensor, d: int) -> Tensor:
    if x.ndim < 2 or x.shape[-2] != d:
        raise InputError(
            f"{owner}: {name} must have shape ({d}, r), to multiply points of dimension {d} from "
            f"the right, but has {tuple(x.shape)}."
        )
    return finite(owner, name, x)


def prepare(
    owner: str,
    x: Tensor,
    *,
    beta: float | Tensor,
    step_size: float | Tensor = 1.0,
    contraction: Contraction | None = None,
    patterns: Tensor | None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    is_causal: bool = False,
) -> Call:
    """Check everything once."""
    given = {
        "x": x,
        "patterns": patterns,
        "query_weight": query_weight,
        "key_weight": key_weight,
        "value_weight": value_weight,
    }
    got, _ = numbers(owner, **{n: t for n, t in given.items() if t is not None or n == "x"})
    points = _points(owner, got["x"])
    _check_patterns(owner, points, got.get("patterns"))
    _check_weights(owner, points.shape[-1], got)
    _check_batch(owner, points, got)
    _check_contraction(owner, contraction)
    field = Field(
        _inverse_temperature(owner, beta, points),
        got.get("patterns"),
        got.get("query_weight"),
        got.get("key_weight"),
        got.get("value_weight"),
        is_causal,
    )
    size = _number(owner, "step_size", step_size, points)
    given_tensor = isinstance(x, Tensor) and x.is_floating_point()  # pyright: ignore[reportUnnecessaryIsInstance]
    kind = x.dtype if given_tensor else points.dtype
    return Call(points, field, size, contraction, kind)


def _points(owner: str, x: Tensor) -> Tensor:
    points = finite(owner, "x", x)
    if points.ndim < 2 or 0 in points.shape[-2:]:
        raise InputError(
            f"{owner}: points must have shape (*batch, N, d) with N and d at least 1, but have "
            f"{tuple(points.shape)}. Pass a single point as x[None]."
        )
    return points


def _check_patterns(owner: str, points: Tensor, patterns: Tensor | None) -> None:
    if patterns is None:
        return
    y, d = finite(owner, "patterns", patterns), points.shape[-1]
    if y.ndim < 2 or y.shape[-2] == 0 or y.shape[-1] != d:
        raise InputError(
            f"{owner}: patterns must have shape (*batch, P, {d}), P at least 1, to meet points "
            f"of dimension {d}, but have {tuple(y.shape)}."
        )


_WEIGHTS = ("query_weight", "key_weight", "value_weight")


def _check_weights(owner: str, d: int, got: Mapping[str, Tensor]) -> None:
    """Queries and keys meet in one space, and values come back to that of the points."""
    for name in _WEIGHTS:
        if name in got:
            _weight(owner, name, got[name], d)
    inner = [got[n].shape[-1] if n in got else d for n in ("query_weight", "key_weight")]
    if inner[0] != inner[1]:
        raise InputError(
            f"{owner}: queries and keys must have one dimension to be compared, but query_weight "
            f"makes {inner[0]} and key_weight {inner[1]}."
        )
    if "value_weight" in got and got["value_weight"].shape[-1] != d:
        raise InputError(
            f"{owner}: value_weight must map back to dimension {d}, but has shape "
            f"{tuple(got['value_weight'].shape)}. Multiply by the output weight first."
        )


def _check_batch(owner: str, points: Tensor, got: Mapping[str, Tensor]) -> None:
    names = [n for n in ("patterns", *_WEIGHTS) if n in got]
    shapes = {"x": points.shape[:-2], **{n: got[n].shape[:-2] for n in names}}
    if broadcast(owner, **shapes) != points.shape[:-2]:
        raise InputError(
            f"{owner}: the batch dimensions of the points, {tuple(points.shape[:-2])}, must be "
            "those of the whole call; expand the points to the batch of patterns or weights first."
        )


def _inverse_temperature(owner: str, beta: float | Tensor, points: Tensor) -> float | Tensor:
    value = _number(owner, "beta", beta, points)
    low = torch.as_tensor(value)
    require(
        low >= 0,
        lambda: (
            f"{owner}: beta, an inverse temperature, must not be negative, but {float(low.min())} "
            "is; to go down the gradient, make step_size negative."
        ),
    )
    return value


def _check_contraction(owner: str, contraction: Contraction | None) -> None:
    if contraction is not None and not callable(contraction):  # pyright: ignore[reportUnnecessaryComparison]
        raise InputError(
            f"{owner}: contraction must be None or a callable such as Sphere(), not "
            f"{type(contraction).__name__}."
        )
    if isinstance(contraction, type):
        raise InputError(
            f"{owner}: contraction is the class {contraction.__name__}; write "
            f"{contraction.__name__}()."
        )


def step(
    x: Tensor,
    *,
    beta: float | Tensor = 1.0,
    step_size: float | Tensor = 1.0,
    contraction: Contraction | None = None,
    patterns: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """One sublayer: contraction(x + step_size * attention(x)) (T13).

    Without weights attention(x) is the gradient of G(beta x) / beta, so every point takes a step of
    gradient ascent on the log-normalizer of the cloud (or of the patterns) as it was before.

    Args:
        x: ``(*batch, N, d)``, an ensemble of clouds.
        beta: inverse temperature >= 0 (0 is uniform attention), without a factor 1/sqrt(d). A
            tensor broadcasts against the points, ``(*batch, 1, 1)`` for one value per cloud.
        step_size: a number, or a tensor that broadcasts in the same way: a gate.
        contraction: applied after the step, see `Sphere`.
        patterns: ``(*batch, P, d)``, fixed keys; self-attention by default.
        query_weight, key_weight: ``(d, r)``, multiplied from the right as torch does, so that the
            score of x and y is y' A x with A = key_weight @ query_weight.T.
        value_weight: ``(d, d)``; the value of y is V y with V = value_weight.T.
        is_causal: point i sees the points up to i only.

    Returns:
        The moved points, differentiable to any order.

    Raises:
        InputError: non-finite numbers, beta < 0, or shapes that do not match.

    >>> import torch, cumulant as cm
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> cm.dynamics.step(x, beta=0.0)
    tensor([[1.5000, 0.5000],
            [0.5000, 1.5000]])
    >>> cm.dynamics.step(x, beta=0.0, contraction=cm.dynamics.Sphere())
    tensor([[0.9487, 0.3162],
            [0.3162, 0.9487]])
    """
    call = prepare(
        "step",
        x,
        beta=beta,
        step_size=step_size,
        contraction=contraction,
        patterns=patterns,
        query_weight=query_weight,
        key_weight=key_weight,
        value_weight=value_weight,
        is_causal=is_causal,
    )
    out = call.step(call.x).to(call.dtype)
    require(
        out.isfinite(),
        lambda: (
            f"step: the points went out of the range of {call.dtype}; they reach "
            f"{float(call.x.abs().max()):.3g}, beta {_told(call.field.beta)}. Scale them down, or "
            "use a wider dtype."
        ),
    )
    return out
