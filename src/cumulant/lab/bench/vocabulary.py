"""The vocabulary loss against the whole logits and against torch's chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from cumulant.contrastive import linear_cross_entropy
from cumulant.core.progress import ProgressCallback, counted
from cumulant.core.typed import backward
from cumulant.lab.bench.peak import growth
from cumulant.lab.bench.timing import Row, row

__all__ = ["run"]

_SHAPES = ((1024, 16000, 256), (4096, 32000, 512))
_AT_MOST = 0.75
_MEMORY_AT_MOST = 0.1

_Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole_logits(x: Tensor, W: Tensor, y: Tensor) -> Tensor:
    """The loss as everybody writes it."""
    return F.cross_entropy(F.linear(x, W), y)


def in_chunks(x: Tensor, W: Tensor, y: Tensor) -> Tensor:
    """torch's own loss without all logits at once (from torch 2.13 on)."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, W, y, options=options)


def ours(x: Tensor, W: Tensor, y: Tensor) -> Tensor:
    """Ours."""
    return linear_cross_entropy(x, W, y)


def whole_policy(x: Tensor, W: Tensor, y: Tensor) -> Tensor:
    """Log-probability and entropy from the whole logits."""
    log_p = F.linear(x, W).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return -(log_p.gather(-1, y[:, None])[:, 0] + 0.01 * entropy).mean()


def our_policy(x: Tensor, W: Tensor, y: Tensor) -> Tensor:
    """The same from ours."""
    loss, entropy = linear_cross_entropy(x, W, y, reduction="none", return_entropy=True)
    return (loss - 0.01 * entropy).mean()


def train(loss: _Loss, rows: int, classes: int, features: int) -> Callable[[], None]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=g).requires_grad_()
    W = (torch.randn(classes, features, generator=g) / features**0.5).requires_grad_()
    y = torch.randint(classes, (rows,), generator=g)

    def run() -> None:
        x.grad = W.grad = None
        backward(loss(x, W, y))

    return run


def _products(rows: int, classes: int, features: int) -> Callable[[], None]:
    """The three matrix products of scores and gradients alone, into arrays that exist."""
    x, W, s = (
        torch.randn(rows, features),
        torch.randn(classes, features),
        torch.zeros(rows, classes),
    )
    dx, dW = torch.empty_like(x), torch.empty_like(W)

    def run() -> None:
        torch.mm(x, W.T, out=s)
        torch.mm(s, W, out=dx)
        torch.mm(s.T, x, out=dW)

    return run


# For children that measure peak memory: functions without arguments, by name.
def _child(loss: _Loss, shape: tuple[int, int, int]) -> Callable[[], None]:
    torch.set_num_threads(1)
    train(loss, 64, 64, 64)()  # the first call loads libraries
    return train(loss, *shape)


whole_small = partial(_child, whole_logits, _SHAPES[0])
chunks_small = partial(_child, in_chunks, _SHAPES[0])
ours_small = partial(_child, ours, _SHAPES[0])
whole_large = partial(_child, whole_logits, _SHAPES[1])
chunks_large = partial(_child, in_chunks, _SHAPES[1])
ours_large = partial(_child, ours, _SHAPES[1])


def _timed(
    cases: Mapping[str, Callable[[], None]], rounds: int, tick: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of the clock and of the processor for each round, cases in turn."""
    wall: dict[str, list[float]] = {name: [] for name in cases}
    processor: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, run in cases.items():
            tick(name)
            start, began = time.perf_counter(), time.process_time()
            run()
            if turn:  # the first round warms up
                wall[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - began)
    return wall, processor


_OURS, _WHOLE, _CHUNKS, _FLOOR = (
    "linear_cross_entropy",
    "whole logits",
    "torch's chunks",
    "three matrix products",
)


def losses(*shape: int) -> dict[str, Callable[[], None]]:
    """A training step with the whole logits, and with ours."""
    return {_WHOLE: train(whole_logits, *shape), _OURS: train(ours, *shape)}


def _speed(shape: tuple[int, int, int], rounds: int, tick: Callable[[str], None]) -> list[Row]:
    label = " x ".join(map(str, shape))
    cases = {
        _WHOLE: train(whole_logits, *shape),
        _CHUNKS: train(in_chunks, *shape),
        _FLOOR: _products(*shape),
        _OURS: train(ours, *shape),
    }
    wall, processor = _timed(cases, rounds, lambda what: tick(f"{label}: {what}"))
    rows: list[Row] = []
    for clock, seconds in (("", wall), (", CPU time", processor)):
        named = {name + clock: x for name, x in seconds.items()}
        for other, most in ((_WHOLE, _AT_MOST), (_CHUNKS, _AT_MOST), (_FLOOR, float("inf"))):
            rows.append(row(named, label, _OURS + clock, other + clock, most))
    return rows


def _memory(tick: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for shape, size in zip(_SHAPES, ("small", "large"), strict=True):
        label, amounts = " x ".join(map(str, shape)), dict[str, float]()
        for who in ("ours", "whole", "chunks"):
            tick(f"{label}: peak memory, {who}")
            grown = growth(__name__, f"{who}_{size}")
            if grown is None:
                return rows
            amounts[who] = grown
        for other, name, most in (("whole", _WHOLE, _MEMORY_AT_MOST), ("chunks", _CHUNKS, 1.0)):
            a, b = amounts["ours"], amounts[other]
            rows.append(Row(label, _OURS, name, a, b, a / b, most, unit="MB"))
    return rows


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything on one thread; `progress` is called before every single run."""
    few = max(3, rounds // 2)
    shapes = ((256, 4000, 64),) if quick else _SHAPES
    tick = counted(progress, len(shapes) * 4 * (few + 1) + 2 * (few + 1) + (0 if quick else 6))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [made for shape in shapes for made in _speed(shape, few, tick)]
        cases = {
            "whole logits with entropy": train(whole_policy, *shapes[0]),
            "with entropy": train(our_policy, *shapes[0]),
        }
        wall, _ = _timed(cases, few, tick)
        label = " x ".join(map(str, shapes[0]))
        rows.append(row(wall, label, "with entropy", "whole logits with entropy", float("inf")))
        return rows if quick else rows + _memory(tick)
    finally:
        torch.set_num_threads(threads)
