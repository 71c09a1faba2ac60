"""Retrieval against torch's attention and against a Hopfield layer in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cumulant.core.progress import ProgressCallback, counted
from cumulant.core.typed import linalg
from cumulant.lab.bench.peak import growth
from cumulant.lab.bench.timing import Row, interleave, row
from cumulant.memory import Memory

__all__ = ["run"]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def plain_hopfield(state: Tensor, patterns: Tensor, beta: float, steps: int) -> Tensor:
    """The update of hflayers without projections: the matrix of associations is kept, and updates
    go on while it changes."""
    q, k = state[None], patterns[None]
    before: Tensor | None = None
    for _ in range(steps):
        weights = torch.softmax(torch.bmm(q * beta, k.mT), dim=-1)
        q = torch.bmm(weights, k)
        if before is not None and float(linalg.vector_norm(weights - before)) <= 1e-4:
            break
        before = weights
    return q[0]


def retrieval(q: int, n: int, d: int) -> dict[str, Callable[[], object]]:
    patterns, state = _random(n, d), _random(q, d)
    beta = 1 / d**0.5
    memory = Memory(patterns, beta)
    heads, stored = state[None, None], patterns[None, None]
    return {
        "F.sdpa": lambda: F.scaled_dot_product_attention(heads, stored, stored, scale=beta),
        "plain torch": lambda: plain_hopfield(state, patterns, beta, 1),
        "plain torch, 3 steps": lambda: plain_hopfield(state, patterns, beta, 3),
        "retrieve": lambda: memory.retrieve(state),
        "retrieve, 3 steps": lambda: memory.retrieve(state, 3),
    }


def million() -> Callable[[], object]:
    """256 queries in 10^6 patterns of dimension 128, with energy and index."""
    patterns = _random(1_000_000, 128)
    memory = Memory(patterns, beta=0.2)
    state = patterns[:256] + 0.3 * _random(256, 128)

    def run() -> object:
        found = memory.retrieve(state)
        if not bool((found.index == torch.arange(256)).all()):
            raise RuntimeError("a pattern was not found again")
        return found.energy

    return run


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything; `progress` is called before every single run."""
    few = max(3, rounds // 2)
    shapes = [(4096, 16384, 64, rounds), (16384, 4096, 128, rounds), (16384, 16384, 64, few)]
    if quick:
        shapes = [(2048, 8192, 64, rounds)]
    tick = counted(progress, sum(5 * (r + 1) for *_, r in shapes) + (0 if quick else 1))
    rows: list[Row] = []
    for q, n, d, repeats in shapes:
        label = f"{q} in {n} x {d}"

        def told(what: str, label: str = label) -> None:
            tick(f"{label}: {what}")

        seconds = interleave(retrieval(q, n, d), rounds=repeats, tick=told)
        rows.append(row(seconds, label, "retrieve", "F.sdpa", 1.1))
        rows.append(row(seconds, label, "retrieve", "plain torch", 1 / 3))
        rows.append(row(seconds, label, "retrieve, 3 steps", "plain torch, 3 steps", 1 / 3))
    if not quick:
        tick("10^6 patterns: peak memory")
        grown = growth(__name__, "million")
        if grown is not None:
            scores = 256 * 1_000_000 * 4 / 2**20
            rows.append(
                Row(
                    "256 in 10^6 x 128",
                    "retrieve, index, energy",
                    "the scores alone",
                    grown,
                    scores,
                    grown / scores,
                    1 / 5,
                    unit="MB",
                )
            )
    return rows
