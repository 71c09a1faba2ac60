"""The compiled engine where products dominate, against the torch tiles; and a call of tiny size."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cumulant.attention import attend
from cumulant.contrastive import info_nce
from cumulant.kernels.engines import engine
from cumulant.memory import Memory

__all__ = ["EXPRESSION", "SMALL", "SMALL_SHAPE", "TILES", "cases", "small_cases"]

Cases = dict[str, Callable[[], object]]

TILES = "torch tiles"
SMALL_SHAPE = "(1, 8, 64, 64)"
SMALL = "attention + entropy, forward+backward"
EXPRESSION = "the plain torch expression"
_CALLS = 200  # of a tiny problem in one measurement


def _against_tiles(name: str, run: Callable[[], object]) -> Cases:
    def tiles() -> object:
        with engine("torch"):
            return run()

    return {TILES: tiles, name: run}


def cases(*, quick: bool = False) -> dict[tuple[str, str], Cases]:
    """By shape and quantity: the contrastive loss with its gradient, and retrieval."""
    n, d = (2048, 128) if quick else (16384, 256)
    first, second = (torch.randn(n, d, requires_grad=True) for _ in range(2))
    queries, stored = (512, 2048) if quick else (4096, 16384)
    patterns, state = torch.randn(stored, 64), torch.randn(queries, 64)
    memory = Memory(patterns, 1 / 8)

    def loss() -> object:
        return torch.autograd.grad(info_nce(first, second), (first, second))

    return {
        (f"{n} x {d}", "info_nce"): _against_tiles("info_nce", loss),
        (f"{queries} in {stored} x 64", "retrieve"): _against_tiles(
            "retrieve", lambda: memory.retrieve(state)
        ),
    }


def _expression(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and entropy as everybody writes them."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    log_weights = scores.log_softmax(-1)
    weights = log_weights.exp()
    return weights @ v, -(weights * log_weights).sum(-1)


def _ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = attend(q, k, v)
    entropy = a.entropy
    return a.mean, entropy


def small_cases() -> Cases:
    """What Python around the kernel costs: mean and entropy with their gradient at length 64."""
    leaves = [torch.randn(1, 8, 64, 64, requires_grad=True) for _ in range(3)]

    def many(function: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        for _ in range(_CALLS):
            mean, entropy = function(*leaves)
            torch.autograd.grad(mean.sum() + entropy.sum(), leaves)

    return {EXPRESSION: lambda: many(_expression), SMALL: lambda: many(_ours)}
