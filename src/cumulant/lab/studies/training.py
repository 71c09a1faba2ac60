"""`Training`: one model and its optimizer, steps that can be repeated bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.core.errors import InputError
from cumulant.core.typed import backward, functions, linalg, random, take_step

__all__ = ["Training", "different", "drawn", "made"]


def drawn(seed: int, n: int) -> torch.Generator:
    """The random numbers of step n: a function of both, so that no state has to be saved."""
    return torch.Generator().manual_seed(1_000_003 * seed + n)


def made(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A model whose random start depends on the seed alone."""
    with random.fork_rng():
        functions.manual_seed(seed)
        return build()


def different(task: str, name: str, given: Sequence[Any], *, whole: bool = False) -> None:
    """Check a setting that is a list: different positive numbers, at least one.

    Raises:
        InputError: it is something else.
    """
    kinds = (int,) if whole else (int, float)
    good = all(type(x) in kinds and 0 < x < math.inf for x in given)
    if not given or not good or len({*given}) < len(given):
        kind = "integers" if whole else "numbers"
        raise InputError(f"{task}: {name} must be different positive {kind}, not {list(given)!r}.")


class Training:
    """AdamW with a warm-up over a tenth of the steps and a cosine to a tenth of the rate.

    Args:
        model: parameters that do not require a gradient stay as they are.
        rate: the largest learning rate.
        steps: length of the run.
        clip: largest norm of the whole gradient; 0 does not clip.
        decay: weight decay.
    """

    def __init__(
        self, model: nn.Module, *, rate: float, steps: int, clip: float, decay: float
    ) -> None:
        self.model, self.rate, self.steps, self.clip = model, rate, steps, clip
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, rate, betas=(0.9, 0.95), weight_decay=decay, fused=True
        )

    def update(self, loss: Tensor, n: int) -> None:
        """One step down the gradient."""
        warm, whole = max(1, self.steps // 10), max(1, self.steps)
        cosine = 0.55 + 0.45 * math.cos(math.pi * n / whole)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * min((n + 1) / warm, cosine)
        self._optimizer.zero_grad()
        backward(loss)
        if self.clip:
            nn.utils.clip_grad_norm_(self._trained, self.clip)
        take_step(self._optimizer)

    def gradients(self, groups: Mapping[str, str]) -> dict[str, float]:
        """Norm of the last gradient over the parameters whose names contain a word."""
        found: dict[str, float] = {}
        for label, words in groups.items():
            norms = [
                linalg.vector_norm(p.grad)
                for name, p in self.model.named_parameters()
                if p.grad is not None and any(word in name for word in words.split())
            ]
            if norms:
                found[f"gradient_{label}"] = float(linalg.vector_norm(torch.stack(norms)))
        return found

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and the optimizer's averages."""
        tensors: dict[str, Any] = dict(self.model.state_dict())
        kept: list[dict[str, Any]] = []
        for p in self._trained:
            found: Mapping[str, Any] = self._optimizer.state.get(p, {})
            kept.append(dict(found))
        return {"model": tensors, "optimizer": kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.model.load_state_dict(state["model"])
        for p, kept in zip(self._trained, state["optimizer"], strict=True):
            if kept:
                self._optimizer.state[p] = dict(kept)
