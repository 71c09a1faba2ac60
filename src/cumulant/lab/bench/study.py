"""A training step of our transformer against the same model on torch's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cumulant.core.progress import ProgressCallback, counted
from cumulant.core.typed import backward, functions, random, take_step
from cumulant.lab.bench.timing import Row, clock, interleave, row
from cumulant.nn import Attention, Transformer

__all__ = ["run"]

SYMBOLS = 96


class _OnTorch(Attention):
    """The same layer with torch's function in place of ours."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def _step(batch: int, length: int, width: int, layers: int, **changed: Any) -> Callable[[], object]:
    """A step of AdamW on random tokens; ``attention="torch"`` calls torch's function."""
    on_torch = changed.pop("attention", "ours") == "torch"
    with random.fork_rng():
        functions.manual_seed(0)
        model = Transformer(SYMBOLS, width=width, layers=layers, context=length, **changed)
        tokens = torch.randint(SYMBOLS, (batch, length + 1))
    for module in model.modules():
        if on_torch and isinstance(module, Attention):
            module.__class__ = _OnTorch
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        backward(loss)
        take_step(optimizer)

    return step


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything; `progress` is called before every single run."""
    shapes = [(16, 64, 64, 2), (8, 256, 128, 2), (4, 512, 256, 4)]
    shapes = shapes[:1] if quick else shapes
    others = ("taylor2", "relu2", "elu1", "sigmoid")
    tick = counted(progress, (2 * len(shapes) + len(others)) * (2 * rounds + 1))
    rows: list[Row] = []
    for shape in shapes:
        batch, length, width, layers = shape
        kernels = others if shape == shapes[0] else ()
        label = f"{batch} x {length}, width {width}, {layers} layers"
        cases = {
            "F.sdpa": _step(*shape, attention="torch"),
            "step": _step(*shape),
            **{f"step, {name}": _step(*shape, kernel=name) for name in kernels},
        }

        def told(what: str, label: str = label) -> None:
            tick(f"{label}: {what}")

        seconds = interleave(cases, rounds=2 * rounds, tick=told, clock=clock())
        rows.append(row(seconds, label, "step", "F.sdpa", 1.05))
        rows += [row(seconds, label, f"step, {n}", "F.sdpa", float("inf")) for n in kernels]
    return rows
