"""`simulate` and `flow`: clouds in discrete and in continuous time.

See docs/theory.md, T13, T16, T17.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cumulant.core.checks import real, whole
from cumulant.core.errors import ConvergenceError, InputError
from cumulant.core.progress import ProgressCallback
from cumulant.dynamics.contraction import Contraction, contract
from cumulant.dynamics.field import Call, prepare
from cumulant.dynamics.ode import integrate
from cumulant.dynamics.shape import cloud_norm, size_of
from cumulant.dynamics.trajectory import Moment, Observables, Trajectory, collect

__all__ = ["flow", "simulate"]


def _march(call: Call, steps: int, every: int, lost: Tensor | None) -> Iterator[Moment]:
    """The start and every `every`-th state after it; a cloud that overflows is held, as are those
    already lost."""
    x = call.x
    alive = torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device)
    if lost is not None:
        alive &= ~lost.to(x.device)
    blown = torch.full(x.shape[:-2], float("inf"), dtype=torch.float64)
    tau = call.step_size if isinstance(call.step_size, float) else 1.0
    kept = 0
    yield Moment(0.0, x, blown)
    for k in range(1, steps + 1):
        new = call.step(x if bool(alive.all()) else _harmless(x, alive))
        good = alive & new.detach().to(call.dtype).isfinite().all(-1).all(-1)
        if not torch.equal(good, alive):
            blown[(alive & ~good).to("cpu")] = k * tau  # in place: all moments share it
            if not bool(good.any()):
                if kept < k - 1:
                    yield Moment((k - 1) * tau, x, blown)
                return
            new = call.step(_harmless(x, good))  # once more, or its NaN would enter derivatives
        alive = good
        x = new if bool(alive.all()) else torch.where(alive[..., None, None], new, x)
        if k % every == 0 or k == steps:
            kept = k
            yield Moment(k * tau, x, blown)


def _harmless(x: Tensor, alive: Tensor) -> Tensor:
    """The clouds, those that are held replaced by constants of moderate size."""
    return torch.where(alive[..., None, None], x, x.detach() / size_of(x))


def _start(x0: Tensor | Trajectory) -> tuple[Tensor, Trajectory | None]:
    return (x0.final, x0) if isinstance(x0, Trajectory) else (x0, None)


def simulate(
    x0: Tensor | Trajectory,
    steps: int,
    *,
    beta: float | Tensor = 1.0,
    step_size: float | Tensor = 1.0,
    contraction: Contraction | None = None,
    patterns: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    is_causal: bool = False,
    every: int = 1,
    observables: Observables | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: ProgressCallback | None = None,
) -> Trajectory:
    """Repeat `step` and record the states.

    Args:
        x0: ``(*batch, N, d)``, the start; or a `Trajectory` to continue from its last state.
        steps: number of steps; the trajectory has steps + 1 states.
        beta, step_size, contraction, patterns, query_weight, key_weight, value_weight, is_causal:
            see `step`.
        every: keep one state in this many, and the last.
        observables: functions from clouds to ``(*batch,)`` by name; norm, spread and participation
            ratio by default.
        checkpoint: an npz file for the run, also written if it is interrupted or fails; if it is
            killed, `Trajectory.load` recovers all but the last half minute.
        progress: called for each state kept, with its time and the last time.

    Returns:
        A `Trajectory`, differentiable in x0 and everything else that requires a gradient. A cloud
        that overflows is held at its last finite state, see ``blow_up_time``.

    Raises:
        InputError: see `step`; steps or every out of range.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    >>> run = cm.dynamics.simulate(x, 200, contraction=cm.dynamics.Sphere())
    >>> run.states.shape, cm.dynamics.clusters(run.final).count
    (torch.Size([201, 100, 3]), tensor(1))
    """
    whole("simulate", "steps", steps, 0)
    whole("simulate", "every", every, 1)
    start, earlier = _start(x0)
    call = prepare(
        "simulate",
        start,
        beta=beta,
        step_size=step_size,
        contraction=contraction,
        patterns=patterns,
        query_weight=query_weight,
        key_weight=key_weight,
        value_weight=value_weight,
        is_causal=is_causal,
    )
    return collect(
        _march(call, steps, every, None if earlier is None else earlier.blow_up_time.isfinite()),
        dtype=call.dtype,
        observables=observables,
        checkpoint=checkpoint,
        progress=progress,
        end=steps * (call.step_size if isinstance(call.step_size, float) else 1.0),
        earlier=earlier,
        settings={"kind": "simulate", **call.settings},
    )


def ascending(owner: str, times: Tensor | Sequence[float]) -> Tensor:
    """Output times: finite, >= 0, increasing."""
    try:
        out = torch.as_tensor(times, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{owner}: times must be numbers, not {type(times).__name__}.") from None
    if out.ndim != 1 or not len(out):
        raise InputError(f"{owner}: times must be a list of numbers, but have {tuple(out.shape)}.")
    if not bool(out.isfinite().all()) or float(out[0]) < 0 or bool((out.diff() <= 0).any()):
        raise InputError(
            f"{owner}: times must be finite, increase, and begin at 0 (the start) or later."
        )
    return out


def flow(
    x0: Tensor | Trajectory,
    times: Tensor | Sequence[float],
    *,
    beta: float | Tensor = 1.0,
    contraction: Contraction | None = None,
    patterns: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    is_causal: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    observables: Observables | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: ProgressCallback | None = None,
    throw: bool = True,
) -> Trajectory:
    """The limit of small steps: x' = Dc(x) attention(x), c the contraction, D its differential.

    The limit exists only if contracting twice equals contracting once, as for contractions without
    gain and bias.

    On the sphere it is attention's tangent part; without a contraction, x' = attention(x). scipy's
    adaptive 8th-order method integrates it, with one step size for the whole batch.

    Args:
        x0: ``(*batch, N, d)``, the state at time 0, which is contracted first; or a `Trajectory`
            to continue from its last state.
        times: output times, increasing, from 0 (the start) or later.
        beta, contraction, patterns, query_weight, key_weight, value_weight, is_causal: see `step`.
        rtol, atol: tolerances of the solver; 1e-8 and 1e-10 for double precision, 1e-5 and 1e-7
            for single, the second times the largest coordinate if that is above 1. rtol is at least
            8 times the rounding of the points.
        observables, checkpoint, progress: see `simulate`.
        throw: raise if the solver fails; False holds the clouds at fault from then on, with the
            time in ``blow_up_time``.

    Returns:
        A `Trajectory` without derivatives (use `simulate` with a small step size for those).
        Softmax averages are never longer than the longest value, so a cloud grows at most
        exponentially; ``blow_up_time`` is when it passes 1e-3 of the root of the largest number
        its precision has, after which scores would overflow.

    Raises:
        InputError: see `step`; times that do not increase, input that requires a gradient, a
            contraction that has no limit of small steps.
        ConvergenceError: the solver's steps became too small; ``result`` is the trajectory so far.

    Two points on the circle meet:

    >>> import torch, cumulant as cm
    >>> x = torch.eye(2, dtype=torch.float64)
    >>> run = cm.dynamics.flow(x, [0.0, 1.0, 10.0], contraction=cm.dynamics.Sphere())
    >>> (run.states[:, 0] * run.states[:, 1]).sum(-1)
    tensor([0.0000, 0.5..., 1.0000], dtype=torch.float64)
    """
    start, earlier = _start(x0)
    call = prepare(
        "flow",
        start,
        beta=beta,
        contraction=contraction,
        patterns=patterns,
        query_weight=query_weight,
        key_weight=key_weight,
        value_weight=value_weight,
        is_causal=is_causal,
    )
    given = (call.x, beta, patterns, query_weight, key_weight, value_weight)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given):
        raise InputError(
            "flow: the adaptive solver has no derivative, but an input requires one. Use simulate "
            "with a small step_size, which has, or pass detached tensors."
        )
    wanted = ascending("flow", times)
    begin = _on_the_image(call)
    precision = torch.finfo(call.x.dtype)
    usual = (1e-8, 1e-10) if call.x.dtype == torch.float64 else (1e-5, 1e-7)
    size = float(begin.abs().max()) if begin.numel() else 1.0
    finest = 8 * precision.eps
    rtol = real("flow", "rtol", usual[0] if rtol is None else rtol, least=finest)
    coarse = usual[1] * max(1.0, size) if atol is None else atol
    atol = real("flow", "atol", coarse, least=0.0, open_at_least=True)

    failures: list[float] = []

    def moments() -> Iterator[Moment]:
        if begin.numel() == 0:
            none = torch.full(begin.shape[:-2], float("inf"), dtype=torch.float64)
            yield from (Moment(float(t), begin, none) for t in wanted)
            return
        largest = torch.finfo(call.dtype).max
        limit = min(1e-3 * precision.max**0.5, 0.1 * largest)
        with torch.no_grad():
            outputs = integrate(
                lambda _, x: call.velocity(x),
                begin,
                wanted,
                size=cloud_norm,
                limit=limit,
                rtol=rtol,
                atol=atol,
            )
            for out in outputs:
                yield Moment(out.time, out.state, out.escaped)
                early = out.escaped.isfinite() & (cloud_norm(out.state).cpu() < 0.5 * limit)
                if bool(early.any()):  # held, but not for its size
                    failures.append(float(out.escaped[early].min()))
                    if throw:
                        return

    run = collect(
        moments(),
        dtype=call.dtype,
        observables=observables,
        checkpoint=checkpoint,
        progress=progress,
        end=float(wanted[-1]),
        earlier=earlier,
        settings={"kind": "flow", **call.settings, "step_size": None},
    )
    if throw and failures:
        raise ConvergenceError(
            f"flow: the solver's steps vanished at t = {failures[0]:.4g}. Likely cause: the "
            "tolerances ask for more than the precision of the points has, or the contraction is "
            "not smooth. Try: larger rtol and atol, or float64. throw=False holds clouds there.",
            run,
        )
    return run


def _on_the_image(call: Call) -> Tensor:
    """The start, contracted, if contracting it again would change nothing."""
    with torch.no_grad():
        once = contract(call.contraction, call.x)
        twice = contract(call.contraction, once)
    if once.numel() and float((twice - once).abs().max()) > 1e-3 * (1e-3 + float(once.abs().max())):
        raise InputError(
            f"flow: the contraction {call.contraction} applied twice is not the same as once, so "
            "small steps have no limit. Drop gain and bias, or use simulate."
        )
    return once
