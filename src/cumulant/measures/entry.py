"""The public edge of a measure: checks natural parameters and means, and broadcasts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.checks import broadcast, require
from cumulant.core.errors import InputError
from cumulant.core.precision import HALF, widened

if TYPE_CHECKING:
    from cumulant.measures.measure import Measure

__all__ = ["Entry", "enter"]


class Entry(NamedTuple):
    """A checked call: the measure in the computing precision, and the conversion back."""

    measure: Any
    arguments: list[Tensor]
    flat: bool
    dtype: torch.dtype

    def finish(self, x: Tensor, tail: int) -> Tensor:
        """Convert to the caller's precision; `tail` dimensions follow the M natural parameters."""
        x = x.squeeze(-1 - tail) if self.flat else x
        return x.to(self.dtype)


def enter(measure: Measure, call: str, given: Mapping[str, Tensor | None]) -> Entry:
    """Check natural parameters or means, and broadcast them to ``(*batch, M, d)``.

    None means zero. A vector ``(d,)`` becomes one row, which `Entry.finish` drops again.
    """
    owner = f"{type(measure).__name__}.{call}"
    tensors = {name: _argument(owner, name, x, measure) for name, x in given.items()}
    output = _output_precision(measure, [x.dtype for x in tensors.values()])
    compute = _computing_precision(measure, output)
    flat = all(x.ndim == 1 for x in tensors.values()) and not measure._rows
    rows = {n: (x if x.ndim > 1 else x[None]).to(compute) for n, x in tensors.items()}
    # The rows of a tilted measure pair off with those of eta, so they broadcast together.
    own = (*measure.batch_shape, measure._row_count())
    full = broadcast(owner, measure=own, **{n: x.shape[:-1] for n, x in rows.items()})
    arguments = [x.expand(*full, measure.dimension) for x in rows.values()]
    return Entry(measure._to(compute), arguments, flat, output)


def _argument(owner: str, name: str, given: Any, measure: Measure) -> Tensor:
    """A finite floating-point tensor ``(..., d)`` on the measure's device."""
    d = measure.dimension
    x = _tensor(owner, name, given, measure)
    if x.layout != torch.strided:
        raise InputError(f"{owner}: {name} must be dense: use .to_dense().")
    if x.is_complex() or x.dtype == torch.bool or x.ndim < 1 or x.shape[-1] != d:
        raise InputError(
            f"{owner}: {name} must be real with shape (..., M, {d}) or ({d},), where {d} is the "
            f"dimension of the measure; got {tuple(x.shape)} {x.dtype}."
            + (" Add a dimension with x[..., None]." if d == 1 else "")
        )
    if x.device != measure.device:
        raise InputError(
            f"{owner}: {name} is on {x.device}, the measure on {measure.device}; move one."
        )
    require(x.isfinite(), lambda: f"{owner}: {name} must be finite.")
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _tensor(owner: str, name: str, given: Any, measure: Measure) -> Tensor:
    """The argument as a tensor: zero for None; plain numbers take the measure's precision."""
    if isinstance(given, Tensor):
        return given
    kind = torch.get_default_dtype() if measure._weak else measure.dtype
    if given is None:
        return torch.zeros(measure.dimension, dtype=kind, device=measure.device)
    try:
        return torch.as_tensor(given, dtype=kind, device=measure.device)
    except (TypeError, ValueError, RuntimeError):
        came = type(given).__name__
        raise InputError(f"{owner}: {name} must be a tensor, not {came}.") from None


def _output_precision(measure: Measure, given: Sequence[torch.dtype]) -> torch.dtype:
    """The widest dtype given, except that half precision in gives half precision out."""
    if all(kind in HALF for kind in given) and measure.dtype != torch.float64:
        return given[0]
    kinds = [*given] if measure._weak else [measure.dtype, *given]
    output = kinds[0]
    for kind in kinds[1:]:
        output = torch.promote_types(output, kind)
    return output


def _computing_precision(measure: Measure, output: torch.dtype) -> torch.dtype:
    """At least single precision; double where the family requires it and the device has it."""
    if measure._double and measure.device.type != "mps":
        return torch.float64
    return widened(output)
