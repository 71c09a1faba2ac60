"""`check_derivatives`: every mode and order of a function against finite differences."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from cumulant.core.errors import InputError
from cumulant.core.typed import random
from cumulant.derivatives.comparing import Options, compare
from cumulant.derivatives.examining import find_faults
from cumulant.derivatives.problem import pose
from cumulant.derivatives.reporting import DerivativeReport

__all__ = ["check_derivatives"]

HIGHEST = 4


def check_derivatives(
    f: Callable[..., Any],
    inputs: Any,
    *,
    order: int = 2,
    parameters: bool = True,
    tolerance: float = 1e-6,
    seconds: float = 60.0,
    seed: int = 0,
    examine: bool = True,
) -> DerivativeReport:
    """Compare every mode of differentiation of `f` with finite differences.

    A word says in which order modes are nested, outermost first: F is forward mode, R reverse
    mode, RF the gradient of a Jacobian-vector product. All words of one length compute the same
    number, D^n g(x)[v_1, ..., v_n] for a scalar g of f(x) and random v; finite differences with an
    error bar say which are right. If one is not, the operators of the call are checked one by one,
    and those at fault are named.

    Everything runs in float64, whatever precision `f` asks for inside. The torch seed is fixed, so
    dropout can be checked. R is ``torch.autograd`` outside of any F, and ``torch.func`` inside.

    Args:
        f: a function or an ``nn.Module``.
        inputs: a tensor, a tuple or list of arguments, or a dict of keyword arguments. Their
            floating-point tensors are differentiated; everything else is constant.
        order: the highest order of derivative, 1 to 4.
        parameters: with a module, differentiate in its parameters too, as a loss that contains a
            derivative does when it is backpropagated; those without ``requires_grad`` are constant.
        tolerance: the largest relative error that counts as right.
        seconds: the time budget; what it does not cover is reported as left out.
        seed: seed of directions, weights and random operators.
        examine: name the operators at fault.

    Returns:
        DerivativeReport: `ok` is True only if every word was checked and is right.

    Raises:
        InputError: nothing to differentiate, or f fails, is random, or returns no real tensors.

    >>> import torch, cumulant as cm
    >>> x = torch.tensor([0.3, -1.2, 0.7])
    >>> cm.check_derivatives(torch.sin, x).ok
    True
    >>> report = cm.check_derivatives(torch.nn.LayerNorm(3), x)
    >>> report.words("wrong")
    ('FF', 'RF')
    >>> report.faults[0].operator
    'torch.nn.functional.layer_norm'
    """
    if not callable(f):
        raise InputError(f"check_derivatives needs a function or a module, not {f!r}.")
    if isinstance(order, bool) or order not in range(1, HIGHEST + 1):
        raise InputError(f"order must be an integer from 1 to {HIGHEST}, not {order!r}.")
    if not tolerance > 0 or not seconds > 0:
        raise InputError(f"tolerance and seconds must be positive: {tolerance!r}, {seconds!r}.")
    options = Options(order, seed, tolerance, time.monotonic() + seconds)
    with random.fork_rng():
        problem = pose(f, inputs, parameters=parameters, seed=seed)
        rows = compare(problem, options)
        faults, notes = (), list[str]()
        if examine and any(row.status in ("wrong", "not supported") for row in rows):
            module = f if isinstance(f, nn.Module) else None
            faults, notes = find_faults(problem, module, rows, options)
    if problem.left_out:
        notes.append(f"{problem.left_out} outputs are not finite and were left out.")
    if problem.opaque:
        kinds = ", ".join(sorted(problem.opaque))
        notes.append(f"Tensors inside outputs of type {kinds} were not checked: return tensors.")
    if any(row.status == "left out" for row in rows):
        notes.append(f"Stopped after {seconds:g} seconds; pass seconds= for a complete check.")
    return DerivativeReport(rows, tuple(faults), tuple(notes))
