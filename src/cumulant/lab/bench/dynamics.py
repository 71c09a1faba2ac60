"""Dynamics against torch's attention, a loop over clouds, and plain iteration."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import dynamics
from cumulant.core.progress import ProgressCallback, counted
from cumulant.core.typed import linalg
from cumulant.lab.bench.timing import Row, interleave, row

__all__ = ["run"]

Cases = dict[str, Callable[[], object]]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def _step(n: int, d: int) -> Cases:
    x = _random(n, d) / d**0.25
    heads = x[None, None]
    return {
        "F.sdpa": lambda: F.scaled_dot_product_attention(heads, heads, heads, scale=1.0),
        "step": lambda: dynamics.step(x),
        "step onto the sphere": lambda: dynamics.step(x, contraction=dynamics.Sphere()),
    }


_TORCH_LOOP, _OUR_LOOP = "loop over F.sdpa", "loop over simulate"


def ensemble(clouds: int, n: int, d: int, steps: int) -> Cases:
    x = F.normalize(_random(clouds, n, d), dim=-1)

    def in_torch() -> None:
        for one in x:
            y = one[None, None]
            for _ in range(steps):
                y = F.normalize(y + F.scaled_dot_product_attention(y, y, y, scale=1.0), dim=-1)

    def ours(y: Tensor) -> object:
        return dynamics.simulate(y, steps, contraction=dynamics.Sphere(), every=steps)

    return {
        _TORCH_LOOP: in_torch,
        _OUR_LOOP: lambda: [ours(one) for one in x],
        "one batched call": lambda: ours(x),
    }


def contractions() -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Maps with a fixed point that plain iteration finds, and where to begin."""
    double = torch.float64
    x = _random(32, 16, dtype=double)
    raw = _random(16, 16, dtype=double)
    W: Tensor = 0.95 * raw / linalg.matrix_norm(raw, 2)
    patterns = _random(64, 16, dtype=double)
    return {
        "affine, norm 0.95": (lambda z: F.linear(z, W) + 1, x),
        "tanh layer": (lambda z: torch.tanh(z @ W + x), x),
        "Hopfield update": (
            lambda z: dynamics.step(z, patterns=patterns, beta=0.1) - z,
            x,
        ),
        "attention and layer norm": (
            lambda z: dynamics.step(z, patterns=patterns, contraction=dynamics.LayerNorm()),
            x,
        ),
    }


def _evaluations() -> list[Row]:
    rows: list[Row] = []
    for name, (f, x) in contractions().items():
        used = {
            solver: int(dynamics.fixed_point(f, x, solver=solver, max_steps=2000).steps)
            for solver in ("anderson", "damped")
        }
        ours, base = used["anderson"], used["damped"]
        rows.append(
            Row(name, "Anderson", "plain iteration", ours, base, ours / base, 1.0, unit="calls")
        )
    return rows


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything; `progress` is called before every single run."""
    n, clouds = (4096, 200) if quick else (16384, 1000)
    few = max(3, rounds // 2)
    plan = [
        (f"{n} x 64", _step(n, 64), rounds),
        (f"{clouds} clouds of 64 x 3", ensemble(clouds, 64, 3, 10), few),
    ]
    tick = counted(progress, sum(len(cases) * (r + 1) for _, cases, r in plan) + 1)
    seconds: list[dict[str, list[float]]] = []
    for label, cases, repeats in plan:

        def told(name: str, label: str = label) -> None:
            tick(f"{label}: {name}")

        seconds.append(interleave(cases, rounds=repeats, tick=told))
    names = [label for label, _, _ in plan]
    rows = [
        row(seconds[0], names[0], what, "F.sdpa", 1.15) for what in ("step", "step onto the sphere")
    ]
    rows += [
        row(seconds[1], names[1], "one batched call", what, 1 / 20)
        for what in (_OUR_LOOP, _TORCH_LOOP)
    ]
    tick("fixed points: evaluations")
    return rows + _evaluations()
