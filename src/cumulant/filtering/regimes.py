"""Which regime is which: the order of a fitted model's modes, and which mode each one was.

A likelihood stays the same when modes trade places, so a search may leave them in any order.
`rising` sorts them by a parameter. `matched` pairs each fitted mode with the mode of the starting
model that behaves most like it, so that a name stays with what it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import functions, tolist
from cumulant.filtering import moments
from cumulant.filtering.filters import run
from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.model import COVARIANCES, SHAPES, SwitchingLinearGaussian
from cumulant.filtering.parameters import Coordinates
from cumulant.filtering.posterior import over_time, whole
from cumulant.filtering.recursion import Scheme

__all__ = ["OrderBy", "exchangeable", "matched", "rising", "sorted_by"]

OrderBy = str | Callable[[SwitchingLinearGaussian], Tensor] | Literal[False] | None

# By default modes are sorted by the first of these that is free and differs between them.
SORTED_BY = (
    *("emission_bias", "dynamics_bias", "emission_noise", "dynamics_noise"),
    *("emission_input", "dynamics", "emission", "dynamics_input"),
)


def exchangeable(found: Coordinates) -> bool:
    """Whether modes may trade places: nothing that the fit leaves alone tells them apart."""
    model = found.model
    if not _fixed_alike(found):
        return False
    for block in found.blocks:
        tail = len(SHAPES.get(block.name, ""))
        if block.name == "transition" and bool((model.parameters["transition"] == 0).any()):
            return False  # zeros stay zero: some moves are possible from some modes only
        if tail and block.mask.ndim > tail:
            # In a covariance what the mask leaves out is zero, or follows from the rest.
            rest = 0.0 if block.name in COVARIANCES else torch.where(block.mask, 0.0, block.start)
            if not _alike(block.mask, tail) or not _alike(block.mask + rest, tail):
                return False
    return True


def _fixed_alike(found: Coordinates) -> bool:
    """Whether the parameters that are not free are the same in all modes."""
    model, free = found.model, {block.name for block in found.blocks}
    fixed = {n: x for n, x in model.parameters.items() if n in SHAPES and n not in free}
    alike = (_alike(x, len(SHAPES[n])) for n, x in fixed.items() if x.ndim > len(SHAPES[n]))
    return not getattr(model, "functions", None) and all(alike)


def _alike(x: Tensor, tail: int) -> bool:
    modes = x.movedim(-tail - 1, 0)
    return bool((modes == modes[:1]).all())


def sorted_by(found: Coordinates) -> str | None:
    """The parameter that modes are sorted by; None if they keep their order."""
    model, free = found.model, {block.name for block in found.blocks}
    if model.modes > 1 and _fixed_alike(found):
        for name in SORTED_BY:
            if name in free and model.parameters[name].ndim > len(SHAPES[name]):
                return name
    return None


def rising(model: SwitchingLinearGaussian, order_by: OrderBy) -> list[int]:
    """The modes in rising order of a parameter, or of a function of the model."""
    if callable(order_by):
        given = order_by(model)
    elif isinstance(order_by, str) and order_by in SHAPES and order_by in model.parameters:
        given = _size(model, order_by)
    else:
        raise InputError(
            f"fit: order_by must be a function of the model, False, or one of "
            f"{', '.join(n for n in SHAPES if n in model.parameters)}, not {order_by!r}."
        )
    try:
        key = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        key = torch.zeros(())
    if key.shape != (model.modes,):
        raise InputError(
            f"fit: order_by must give one number for each of the {model.modes} modes; it gave "
            f"shape {tuple(key.shape)}."
        )
    return tolist(key.argsort(stable=True))


def _size(model: SwitchingLinearGaussian, name: str) -> Tensor:
    """A number for each mode: the trace of a matrix, the sum of a vector."""
    x = model.steps_of(name)
    if x is None:
        raise InputError(f"fit: the model has no {name} to order its modes by.")
    x = x.diagonal(dim1=-2, dim2=-1).sum(-1) if len(SHAPES[name]) == 2 else x.sum(-1)
    return x.reshape(-1, model.modes).mean(0)


def matched(
    start: SwitchingLinearGaussian,
    fitted: SwitchingLinearGaussian,
    observations: Tensor,
    inputs: Tensor | None,
    scheme: Scheme,
) -> list[int]:
    """For each fitted mode, the mode of the start that predicts most like it.

    From every state that the fitted filter passes through, each mode of either model predicts the
    next observation with some mean and standard deviation. The pairing with the smallest mean
    square difference of both wins; each column counts in units of its own standard deviation.
    """
    bank = GaussianBank(fitted, observations, inputs)
    belief, alike = bank.start()
    before = run(bank, scheme, belief, alike=alike).beliefs[:-1]
    states = tuple(over_time(before, lambda b, k=k: whole(b)[k]) for k in (0, 1))
    rows = observations.flatten(0, -2)
    unit = (rows - rows.nanmean(0)).square().nanmean(0).sqrt()
    unit = torch.where(unit > 0, unit, 1.0)  # also where a column is missing altogether
    here, there = (
        _predictions(GaussianBank(model, observations, inputs), states).unsqueeze(-2 - k) / unit
        for k, model in enumerate((start, fitted))
    )
    gaps = (here - there).square().sum((0, -1)).flatten(0, -3)
    cost = gaps.nanmean(0).cpu().double()  # NaN where the state is not determined yet
    assign: Any = import_module("scipy.optimize").linear_sum_assignment
    first, second = assign(cost.numpy())
    as_is = list(range(fitted.modes))
    if cost.diagonal().sum() <= cost[first, second].sum() * (1 + 1e-9):
        return as_is  # as good as any: the modes never traded places
    was = dict(zip(second.tolist(), first.tolist(), strict=True))
    return [was[k] for k in as_is]


def _predictions(bank: GaussianBank, states: Sequence[Tensor]) -> Tensor:
    """Means and standard deviations of the next observation, ``(2, *batch, T, M, p)``."""
    mean, covariance = (x.to(bank.dtype) for x in states)
    message = bank.predict((mean[..., None, None, :], covariance[..., None, None, :, :]), None)
    center, spread = moments.predict(bank.linear("emission", message, None), *message[:2])
    deviation = spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    return torch.stack(functions.broadcast_tensors(center, deviation)).squeeze(-3)
