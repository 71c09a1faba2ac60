"""A function and its inputs as one scalar function of float64 tensors.

The scalar is <c, y + (y - y0)^2 / 2> with y = f(x), y0 its value at the point and random weights c
(the square in units of the size of y0, and c in units of one over it). So every output counts, a
small tensor as much as a large one, and it is passed on to something nonlinear, as in a model: what
a wrong gradient does to second derivatives shows. It is pure: the seed is set before each call,
inputs are cloned (f may write to them), buffers are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cumulant.core.errors import InputError
from cumulant.core.typed import functions, linalg
from cumulant.derivatives.differences import Line
from cumulant.derivatives.words import Tensors

__all__ = ["Double", "Problem", "is_real", "pose"]

_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
_NARROW = {"float", "half", "bfloat16"}
_PLAIN = (Tensor, int, float, complex, str, type(None))
Outputs = Callable[..., list[Tensor]]


class Double(TorchFunctionMode):
    """Keeps float64 where code asks for less, as norms and softmaxes inside models do.

    Rounding to float32 inside f would drown finite differences of second order. Dropout draws its
    mask apart from the tensors it applies to: torch draws other numbers in other modes, and then
    the derivatives of two different functions would be compared.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _NARROW and args and is_real(args[0]):
            return args[0].double()
        if func in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        args = tuple(torch.float64 if _is_single(a) else a for a in args)
        if _is_single(kwargs.get("dtype")):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **renamed: bool
) -> Tensor:
    training = renamed.get("train", training)  # as torch.dropout calls it
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    kept = torch.rand(input.shape, dtype=torch.float64).to(input.device) >= p
    mask = kept / (1 - p) if p < 1.0 else kept
    return input.mul_(mask) if inplace else input * mask


def _is_single(x: Any) -> bool:
    return isinstance(x, torch.dtype) and x in _SINGLE


def is_real(x: Any) -> bool:
    """Whether x is a tensor that can be differentiated."""
    return isinstance(x, Tensor) and x.is_floating_point()


def _parts(x: Any) -> Any:
    """Real and imaginary parts of a complex tensor; anything else as it is."""
    return torch.view_as_real(x.resolve_conj()) if isinstance(x, Tensor) and x.is_complex() else x


@dataclass(frozen=True)
class Problem:
    """A scalar function of float64 tensors.

    Attributes:
        outputs: the real tensors that f returns.
        point: the tensors that are differentiated, where they are.
        values: the outputs there, 0 where they are not finite.
        weights: c, one tensor per output, 0 where it is not finite.
        scale: the size of <c, y> without cancellation.
        left_out: how many numbers of the outputs are not finite.
        opaque: the types of outputs that were not looked into.
    """

    outputs: Outputs
    point: Tensors
    values: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    scale: float
    left_out: int
    opaque: tuple[str, ...]

    def scalar(self, *x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=x[0].device)
        for y0, c, y in zip(self.values, self.weights, self.outputs(*x), strict=True):
            y = y.masked_fill(c == 0, 0.0)
            total = total + (c * (y + (y - y0).square() / (2 * _size(y0)))).sum()
        return total

    def directions(self, order: int, seed: int) -> tuple[Tensors, ...]:
        """Random directions as large as the inputs themselves."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            tuple(_noise(x, generator) * _size(x) for x in self.point) for _ in range(order)
        )

    def line(self, coefficients: tuple[float, ...], directions: tuple[Tensors, ...]) -> Line:
        """t -> scalar(x + t (a_1 v_1 + a_2 v_2 + ...)), without derivatives."""
        along = [
            torch.stack([a * v[i] for a, v in zip(coefficients, directions, strict=False)]).sum(0)
            for i in range(len(self.point))
        ]

        def line(t: float) -> float:
            moved = (x + t * v for x, v in zip(self.point, along, strict=True))
            try:
                with torch.no_grad():
                    return self.scalar(*moved).item()
            except Exception:  # a step out of the domain: shorter ones may stay inside
                return math.nan

        return line


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)


def _size(x: Tensor) -> float:
    size = x.detach().square().mean().sqrt().item() if x.numel() else 0.0
    return size if size > 0 and math.isfinite(size) else 1.0


def pose(
    f: Callable[..., Any],
    inputs: Any,
    *,
    parameters: bool = True,
    seed: int = 0,
    moves: Callable[[Any], bool] = is_real,
) -> Problem:
    """Turn a call of f into a `Problem`; `moves` says which inputs are differentiated.

    Raises:
        InputError: nothing to differentiate, f fails, is random, or returns no real tensors.
    """
    call, point = _pure(f, inputs, parameters, seed, moves)

    opaque: set[str] = set()

    def outputs(*x: Tensor) -> list[Tensor]:
        with Double():
            leaves = [_parts(y) for y in pytree.tree_leaves(call(*x))]
            opaque.update(type(y).__name__ for y in leaves if not isinstance(y, _PLAIN))
            return [y.double() for y in leaves if is_real(y)]

    try:
        with torch.no_grad():
            first, second = outputs(*point), outputs(*point)
    except Exception as error:
        raise InputError(
            f"check_derivatives calls f in float64, and {_name(f)} failed with "
            f"{type(error).__name__}: {_line(error)}. {_remedy(error)}"
        ) from error
    if not first:
        raise InputError(
            f"{_name(f)} returned no floating-point or complex tensor; there is nothing to "
            "differentiate."
        )
    same = (torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))
    if not all(same):
        raise InputError(
            f"{_name(f)} gave two different results for the same inputs and the same torch seed, "
            "so its derivatives cannot be checked. Remove the other source of randomness or state."
        )
    generator = torch.Generator().manual_seed(seed + 1)
    finite = [y.masked_fill(~y.isfinite(), 0.0) for y in first]
    weights = tuple(
        _noise(y, generator) * y.isfinite() / _size(y0) for y, y0 in zip(first, finite, strict=True)
    )
    values = tuple(y.masked_fill(c == 0, 0.0) for c, y in zip(weights, first, strict=True))
    terms = torch.cat([(c * y).flatten() for c, y in zip(weights, values, strict=True)])
    left_out = sum(int((~y.isfinite()).sum()) for y in first)
    if left_out == terms.numel():
        raise InputError(f"{_name(f)} returned no finite number at these inputs; check the inputs.")
    return Problem(
        outputs, point, values, weights, float(linalg.vector_norm(terms)), left_out, tuple(opaque)
    )


def _pure(
    f: Callable[..., Any],
    inputs: Any,
    parameters: bool,
    seed: int,
    moves: Callable[[Any], bool],
) -> tuple[Callable[..., Any], Tensors]:
    """(f as a function of its real tensors alone, these tensors)."""
    args, kwargs = _arguments(inputs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if any(isinstance(x, Tensor) and x.is_complex() for x in leaves):
        raise InputError("check_derivatives takes real inputs; pass real and imaginary parts.")
    moving = [i for i, x in enumerate(leaves) if moves(x)]
    state: dict[str, Tensor] = {}
    if isinstance(f, nn.Module):
        every = f.named_parameters()
        state = {n: p for n, p in every if parameters and p.requires_grad and is_real(p)}
    if not moving and not state:
        kinds = ", ".join(sorted({str(getattr(x, "dtype", type(x).__name__)) for x in leaves}))
        raise InputError(
            "check_derivatives needs at least one floating-point tensor to differentiate; the "
            f"inputs hold {kinds or 'nothing'}. Pass floating-point inputs, or a module with "
            "parameters."
        )
    point = tuple(x.detach().double() for x in (*(leaves[i] for i in moving), *state.values()))
    if any(not bool(x.isfinite().all()) for x in point):
        raise InputError("The inputs or parameters hold NaN or infinity; derivatives mean nothing.")

    def call(*tensors: Tensor) -> Any:
        copies = [x.clone() for x in tensors]
        filled = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        for i, x in zip(moving, copies, strict=False):
            filled[i] = x
        args, kwargs = pytree.tree_unflatten(filled, structure)
        functions.manual_seed(seed)
        if not isinstance(f, nn.Module):
            return f(*args, **kwargs)
        held = dict(zip(state, copies[len(moving) :], strict=True))
        fixed = {
            n: (b.detach().double() if is_real(b) else b.detach()).clone()
            for n, b in [*f.named_buffers(), *f.named_parameters()]
            if n not in state
        }
        return torch.func.functional_call(f, {**fixed, **held}, args, kwargs)

    return call, point


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        named = cast(Mapping[object, Any], inputs)
        return (), {str(k): v for k, v in named.items()}
    if isinstance(inputs, list | tuple):
        return tuple(cast(Iterable[Any], inputs)), {}
    return (inputs,), {}


def _name(f: Any) -> str:
    return getattr(f, "__qualname__", None) or type(f).__name__


def _remedy(error: BaseException) -> str:
    """What to do about a call that failed; float32 tensors inside f are the usual cause."""
    if any(word in str(error).lower() for word in ("dtype", "double", "float")):
        return (
            "Pass a module itself rather than a function around it, or make f's own tensors "
            "float64."
        )
    return "Check that f runs on these inputs."


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")
