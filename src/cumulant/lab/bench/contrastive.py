"""The contrastive loss against cross-entropy on the full matrix."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cumulant.contrastive import info_nce
from cumulant.core.progress import ProgressCallback, counted
from cumulant.core.typed import backward
from cumulant.lab.bench.peak import growth
from cumulant.lab.bench.timing import Row, interleave, row

__all__ = ["run"]

_TEMPERATURE = 0.07


def _views(n: int, d: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    first, second = (torch.randn(n, d, generator=g, requires_grad=True) for _ in range(2))
    return first, second


def full_matrix(q: Tensor, k: Tensor, symmetric: bool) -> Tensor:
    """The loss as everybody writes it."""
    logits = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T / _TEMPERATURE
    target = torch.arange(len(q))
    loss = F.cross_entropy(logits, target)
    return (loss + F.cross_entropy(logits.T, target)) / 2 if symmetric else loss


def streaming(q: Tensor, k: Tensor, symmetric: bool) -> Tensor:
    """The same loss, ours."""
    return info_nce(q, k, temperature=_TEMPERATURE, symmetric=symmetric)


def _child(
    loss: Callable[[Tensor, Tensor, bool], Tensor], n: int, symmetric: bool
) -> Callable[[], None]:
    """What a child measures: not the first call, which loads libraries."""
    train(loss, 64, 256, symmetric)()
    return train(loss, n, 256, symmetric)


def train(
    loss: Callable[[Tensor, Tensor, bool], Tensor], n: int, d: int, symmetric: bool
) -> Callable[[], None]:
    q, k = _views(n, d)

    def run() -> None:
        q.grad = k.grad = None
        backward(loss(q, k, symmetric))

    return run


def losses(n: int, d: int, symmetric: bool) -> dict[str, Callable[[], None]]:
    """A training step with the full matrix, and with ours."""
    name = "info_nce, symmetric" if symmetric else "info_nce"
    return {
        "full matrix": train(full_matrix, n, d, symmetric),
        name: train(streaming, n, d, symmetric),
    }


# For children that measure peak memory: functions without arguments, by name.
def full() -> Callable[[], None]:
    """Cross-entropy on the full matrix at N = 16384."""
    return _child(full_matrix, 16384, False)


def full_symmetric() -> Callable[[], None]:
    """The same from both sides."""
    return _child(full_matrix, 16384, True)


def ours() -> Callable[[], None]:
    """`info_nce` at N = 16384."""
    return _child(streaming, 16384, False)


def ours_symmetric() -> Callable[[], None]:
    """The same from both sides."""
    return _child(streaming, 16384, True)


def ours_large() -> Callable[[], None]:
    """`info_nce` at N = 131072."""
    return _child(streaming, 131072, False)


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything; `progress` is called before every single run."""
    n, d = (4096, 128) if quick else (16384, 256)
    few = max(3, rounds // 2)
    sides = {"info_nce": (False, 1 / 1.7), "info_nce, symmetric": (True, 1 / 2)}
    tick = counted(progress, 4 * (few + 1) + (0 if quick else 5))
    label, rows = f"{n} x {d}", list[Row]()
    for name, (symmetric, at_most) in sides.items():
        cases = losses(n, d, symmetric)

        def told(what: str, label: str = label) -> None:
            tick(f"{label}: {what}")

        seconds = interleave(cases, rounds=few, tick=told)
        rows.append(row(seconds, label, name, "full matrix", at_most))
    if quick:
        return rows
    for name, mine, theirs in (
        ("info_nce", "ours", "full"),
        ("info_nce, symmetric", "ours_symmetric", "full_symmetric"),
    ):
        amounts: list[float] = []
        for which in (mine, theirs):
            tick(f"{label}: peak memory of {which}")
            grown = growth(__name__, which)
            if grown is None:
                return rows
            amounts.append(grown)
        a, b = amounts
        rows.append(Row(label, name, "full matrix", a, b, a / b, 1 / 20, unit="MB"))
    tick("131072 x 256: forward and backward, some minutes")
    start = time.perf_counter()
    grown = growth(__name__, "ours_large")
    if grown is not None:
        took = f"info_nce ({time.perf_counter() - start:.0f} s)"
        scores = 131072**2 * 4 / 2**20
        rows.append(
            Row(
                "131072 x 256",
                took,
                "the scores alone",
                grown,
                scores,
                grown / scores,
                1 / 20,
                "MB",
            )
        )
    return rows
