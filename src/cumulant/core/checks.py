"""Input checks at the public edge: numbers, parameters and shapes."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from cumulant.core.eager import tracing
from cumulant.core.errors import InputError
from cumulant.core.precision import widened
from cumulant.core.typed import functions, functorch, linalg

__all__ = [
    "a_step",
    "broadcast",
    "broadcasts_to",
    "common_shape",
    "finite",
    "generator_of",
    "holds",
    "holds_at_once",
    "log_masses",
    "numbers",
    "positive",
    "probability",
    "real",
    "require",
    "row_of",
    "semi_definite",
    "square",
    "symmetric_definite",
    "value_checks",
    "whole",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Whether a training step is running, which must not wait for a device.
_stepping: ContextVar[bool] = ContextVar("stepping", default=False)

# Conditions to read at the end of `value_checks`, each with the message of its error.
_deferred: ContextVar[list[tuple[Tensor, Callable[[], str]]] | None] = ContextVar(
    "deferred", default=None
)


@contextmanager
def value_checks() -> Generator[None]:
    """Check the values of inputs on a GPU too: one read at the end of the block.

    Reading a number from a GPU makes the host wait for it. On the CPU losses check the values they
    are given (a temperature > 0, no zero vectors, no NaN); on any other device they do so only
    inside this block, which collects all checks and reads them at once when it ends. Shapes, dtypes
    and numbers given as Python numbers are always checked. docs/attention.md lists the rest.

    Raises:
        InputError: at the end of the block, the first check that failed.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(8, 16)  # say, on a GPU
    >>> with cm.value_checks():
    ...     loss = cm.contrastive.info_nce(x, x)
    """
    found: list[tuple[Tensor, Callable[[], str]]] = []
    token = _deferred.set(found)
    try:
        yield
    finally:
        _deferred.reset(token)
    if not found:
        return
    good = torch.stack([condition for condition, _ in found]).cpu()
    if not bool(good.all()):
        raise InputError(found[int(good.long().argmin())][1]())


def a_step(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark a function of a training step: off the CPU it defers its checks to `value_checks`."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if tracing():
            return function(*args, **kwargs)
        token = _stepping.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _stepping.reset(token)

    return call


def holds_at_once(condition: Tensor) -> bool | None:
    """`holds` for shortcuts that are not worth waiting for a device: None off the CPU."""
    return holds(condition) if condition.device.type == "cpu" else None


def _must_wait(condition: Tensor) -> bool:
    return condition.device.type != "cpu" and _stepping.get()


def holds(condition: Tensor) -> bool | None:
    """Whether a condition is true everywhere; None if that cannot be known.

    Inside vmap there is no single answer, a graph being traced has no values yet, and a training
    step does not wait for its device.
    """
    if tracing() or _must_wait(condition):
        return None
    try:
        return bool(condition.all())
    except RuntimeError:
        return None


def require(condition: Tensor, message: Callable[[], str]) -> None:
    """Raise unless the condition is true everywhere or cannot be evaluated.

    Off the CPU a training step leaves it to `value_checks`.
    """
    waiting = _deferred.get()
    if waiting is not None and not tracing() and _must_wait(condition):
        if not functorch.is_functorch_wrapped_tensor(condition):
            waiting.append((condition.detach().all(), message))
    elif holds(condition) is False:
        raise InputError(message())


def _sum_is_finite(x: Tensor) -> bool:
    """Whether every entry is provably finite, from one pass without temporaries."""
    return holds(x.detach().sum().isfinite()) is True


def numbers(owner: str, **given: Any) -> tuple[dict[str, Tensor], bool]:
    """Parameters as real tensors of one dtype without NaN, and whether all were plain numbers.

    Plain numbers become float64 and later take the precision of the natural parameters.
    """
    out: dict[str, Tensor] = {}
    for name, x in given.items():
        try:
            y = x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"{owner}: {name} must be a tensor or a number, not {type(x).__name__}."
            ) from None
        if y.is_complex() or y.dtype == torch.bool:
            raise InputError(f"{owner}: {name} must be real, but has dtype {y.dtype}.")
        if y.layout != torch.strided:
            raise InputError(f"{owner}: {name} must be dense: use .to_dense().")
        out[name] = y if y.is_floating_point() else y.to(torch.get_default_dtype())
    tensors = [out[n] for n, x in given.items() if isinstance(x, Tensor)]
    if len({x.device for x in tensors}) > 1:
        places = ", ".join(f"{n} on {out[n].device}" for n in given)
        raise InputError(f"{owner}: all parameters must be on the same device; got {places}.")
    if tensors:
        kind = tensors[0].dtype
        for x in tensors:
            kind = torch.promote_types(kind, x.dtype)
        out = {n: x.to(tensors[0].device, widened(kind)) for n, x in out.items()}
    for name, x in out.items():
        if not _sum_is_finite(x):
            require(~x.isnan(), lambda name=name: f"{owner}: {name} holds NaN.")
    return out, not tensors


def row_of(x: Tensor) -> Tensor:
    """A scalar parameter ``(*batch,)`` as ``(*batch, 1, 1)``: one row, one statistic."""
    return x[..., None, None]


def _extremes(x: Tensor) -> str:
    return f"{float(x.min()):.6g} to {float(x.max()):.6g}"


def positive(owner: str, name: str, x: Tensor) -> Tensor:
    """Return `x` if it is positive and finite."""
    require(
        (x > 0) & x.isfinite(),
        lambda: f"{owner}: {name} must be positive and finite; it ranges from {_extremes(x)}.",
    )
    return x


def probability(owner: str, name: str, x: Tensor) -> Tensor:
    """Return `x` if it lies in [0, 1]."""
    require(
        (x >= 0) & (x <= 1),
        lambda: f"{owner}: {name} must lie in [0, 1]; it ranges from {_extremes(x)}.",
    )
    return x


def finite(owner: str, name: str, x: Tensor) -> Tensor:
    """Return `x` if no entry is infinite."""
    if not _sum_is_finite(x):
        require(x.isfinite(), lambda: f"{owner}: {name} must be finite, but holds an infinity.")
    return x


def square(owner: str, name: str, x: Tensor, letter: str = "d") -> int:
    """The size of square matrices ``(..., d, d)``; `letter` is what the caller calls it."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise InputError(
            f"{owner}: {name} must be square, (..., {letter}, {letter}), not {tuple(x.shape)}."
        )
    return x.shape[-1]


def symmetric_definite(owner: str, name: str, x: Tensor) -> Tensor:
    """Return a symmetric positive definite matrix ``(..., d, d)``, exactly symmetrized."""
    square(owner, name, x)
    tolerance = 1e3 * torch.finfo(x.dtype).eps
    size = x.detach().abs().amax((-2, -1), keepdim=True)
    require(
        (x - x.mT).abs() <= tolerance * size,
        lambda: (
            f"{owner}: {name} must be symmetric; entries differ from their transposes by up to "
            f"{float((x - x.mT).abs().max()):.3g}. Use (x + x.mT) / 2 if that is rounding."
        ),
    )
    half = (x + x.mT) / 2
    require(
        linalg.cholesky_ex(half.detach()).info == 0,
        lambda: (
            f"{owner}: {name} must be positive definite; its smallest eigenvalue is "
            f"{float(linalg.eigvalsh(half.detach()).min()):.3g}. Add a small multiple of "
            "the identity if this is rounding."
        ),
    )
    return half


def semi_definite(owner: str, name: str, x: Tensor) -> None:
    """Raise unless x is a symmetric positive semi-definite matrix ``(..., d, d)``, up to rounding.

    It tests the eigenvalues of the correlations, so a large variance cannot hide a negative one.
    """
    if x.shape[-1] == 0:
        return
    # The asymmetry that rounding, or a finite difference, may cause.
    slack = 1e-5
    size = x.detach().abs().amax((-2, -1), keepdim=True)
    require(
        (x - x.mT).abs() <= slack * size,
        lambda: (
            f"{owner}: {name} must be symmetric; entries differ from their transposes by up to "
            f"{float((x - x.mT).abs().max()):.3g}."
        ),
    )
    P = ((x + x.mT) / 2).detach()
    variances = P.diagonal(dim1=-2, dim2=-1)
    # A zero variance implies zero covariances, up to rounding of the largest entry.
    least = torch.finfo(x.dtype).eps * size[..., 0]
    unit = variances.clamp_min(least).clamp_min(torch.finfo(x.dtype).tiny).sqrt()
    correlations = P / unit[..., :, None] / unit[..., None, :]
    lowest = linalg.eigvalsh(correlations)[..., 0]
    slack = 1e3 * torch.finfo(x.dtype).eps
    require(
        (variances.amin(-1) >= 0) & (lowest >= -slack),
        lambda: (
            f"{owner}: {name} must be positive semi-definite; its smallest eigenvalue is "
            f"{float(linalg.eigvalsh(P).min()):.3g}, that of its correlations "
            f"{float(lowest.min()):.3g}. Put variances on the diagonal, not standard deviations."
        ),
    )


def log_masses(owner: str, name: str, x: Tensor, size: int) -> Tensor:
    """Check log-weights ``(..., size)``: each finite or -inf, not all -inf."""
    if x.ndim < 1 or x.shape[-1] != size:
        raise InputError(
            f"{owner}: {name} must have one entry for each of the {size} points or components in "
            f"its last dimension, but has shape {tuple(x.shape)}."
        )
    require(
        x < float("inf"),
        lambda: f"{owner}: {name} must be finite or -inf (zero weight), not +inf.",
    )
    require(
        (x > -float("inf")).any(-1),
        lambda: (
            f"{owner}: all weights are zero ({name} is -inf everywhere); at least one must not be."
        ),
    )
    return x


def common_shape(*shapes: Sequence[int]) -> torch.Size | None:
    """The shape that all of these broadcast to, or None.

    >>> from cumulant.core.checks import common_shape
    >>> common_shape((3, 1), (4,)), common_shape((3,), (4,))
    (torch.Size([3, 4]), None)
    """
    if all(shape == shapes[0] for shape in shapes):  # torch's own function takes 15 us
        return torch.Size(shapes[0] if shapes else ())
    try:
        return functions.broadcast_shapes(*(torch.Size(shape) for shape in shapes))
    except RuntimeError:
        return None


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of this shape broadcasts to exactly the target shape.

    >>> from cumulant.core.checks import broadcasts_to
    >>> broadcasts_to((3, 1), (2, 3, 4)), broadcasts_to((2, 3, 4), (3, 1))
    (True, False)
    """
    return common_shape(shape, target) == torch.Size(target)


def broadcast(owner: str, **shapes: Sequence[int]) -> torch.Size:
    """The common batch shape; the error names the shapes."""
    common = torch.Size() if not any(shapes.values()) else common_shape(*shapes.values())
    if common is None:
        told = ", ".join(f"{n} {tuple(s)}" for n, s in shapes.items())
        raise InputError(f"{owner}: batch dimensions must broadcast, but are {told}.")
    return common


def whole(owner: str, name: str, value: Any, least: int = -sys.maxsize) -> int:
    """Return an integer, >= `least` if that is given."""
    try:
        truth = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool
        number = -math.inf if truth else operator.index(value)
    except TypeError:
        number = -math.inf
    if number < least:
        bound = "" if least == -sys.maxsize else f" >= {least}"
        raise InputError(f"{owner}: {name} must be an integer{bound}, not {value!r}.")
    return int(number)


def real(
    owner: str,
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    open_at_least: bool = False,
) -> float:
    """Return a finite number in [`least`, `most`]; `open_at_least` excludes `least` itself."""
    try:
        out = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{owner}: {name} must be a number, not {type(value).__name__}.") from None
    low = out > least if open_at_least else out >= least
    if not (math.isfinite(out) and low and out <= most):
        bounds = [
            f"{'above' if open_at_least else 'at least'} {least:g}" * (least > -math.inf),
            f"at most {most:g}" * (most < math.inf),
        ]
        told = " and ".join(["finite", *filter(None, bounds)])
        raise InputError(f"{owner}: {name} must be {told}, not {value!r}.")
    return out


def generator_of(owner: str, seed: Any) -> torch.Generator:
    """A generator with that seed."""
    try:
        return torch.Generator().manual_seed(operator.index(seed))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{owner}: seed must be an integer below 2^63, not {seed!r}.") from None
