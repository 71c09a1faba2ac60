"""What experiments share: differences, errors, slopes, and scipy's solvers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.core.typed import backward, functions, linalg, take_step

__all__ = [
    "fitted",
    "gap",
    "integrated",
    "interval",
    "median",
    "minimized",
    "order",
    "pair_ratios",
    "relative",
    "standard_error",
]


def gap(ours: Any, truth: Any) -> float:
    """The largest |difference|, of tensors, arrays or numbers."""
    a, b = (
        x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=torch.float64)
        for x in (ours, truth)
    )
    return float((a - b).detach().abs().max())


def relative(ours: Tensor, truth: Tensor) -> float:
    """|ours - truth| / |truth|, Frobenius."""
    return float(linalg.vector_norm(ours - truth) / linalg.vector_norm(truth))


def median(values: Tensor | Sequence[float]) -> float:
    """The middle value; of an even count the mean of both (`torch.median` takes the lower one)."""
    return float(torch.as_tensor(values, dtype=torch.float64).quantile(0.5))


def standard_error(samples: Tensor) -> float:
    """Of the mean of independent samples."""
    return float(samples.std()) / len(samples) ** 0.5


def interval(samples: Tensor) -> float:
    """Half of the 95 % confidence interval of the mean, by Student's law."""
    student: Any = import_module("scipy.stats").t
    return float(student.ppf(0.975, len(samples) - 1)) * standard_error(samples)


def order(steps: Sequence[int], errors: Sequence[float]) -> float:
    """The power of the step size 1/steps with which the error falls."""
    return -float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


def integrated(rate: Callable[[Any], Any], start: Tensor, end: float, **options: Any) -> Tensor:
    """Where dz/dt = rate(z) leads from the start, by scipy; ``rate`` takes and gives arrays."""

    def flat(_: float, z: Any) -> Any:
        return rate(z.reshape(start.shape)).ravel()

    solve: Any = import_module("scipy.integrate").solve_ivp
    path = solve(flat, (0, end), start.numpy().ravel(), **options)
    return functions.from_numpy(path.y[:, -1].reshape(start.shape))


def minimized(objective: Callable[[Any], Any], start: Any, **options: Any) -> Any:
    """scipy's least point of an objective of arrays: ``x`` where it is, ``fun`` how low."""
    return import_module("scipy.optimize").minimize(objective, start, **options)


def pair_ratios(before: Tensor, after: Tensor) -> Tensor:
    """Distances after over distances before, over all pairs of points ``(..., N, d)``."""
    i, j = torch.triu_indices(before.shape[-2], before.shape[-2], 1)
    after, before = (x[..., i, :] - x[..., j, :] for x in (after, before))
    return linalg.vector_norm(after, dim=-1) / linalg.vector_norm(before, dim=-1)


def fitted(loss: Callable[[Tensor], Tensor], start: Tensor, **options: Any) -> Tensor:
    """Where a smooth loss is least, by L-BFGS."""
    found = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([found], line_search_fn="strong_wolfe", **options)

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(found)
        backward(value)
        return value

    take_step(optimizer, closure)
    return found.detach()
