"""What contrastive training keeps between steps: keys of earlier batches, a temperature."""

from __future__ import annotations

import math
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from cumulant.core.checks import holds, real, whole
from cumulant.core.errors import InputError

__all__ = ["KeyQueue", "Temperature"]


class _Loads(Protocol):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None: ...


class KeyQueue(nn.Module):
    """A first-in, first-out queue of the last `size` keys (MoCo; He et al., 2020).

    ``keys`` holds the current keys, oldest first. Push a batch after its loss: pushed before,
    its keys would be negatives of their own anchors. Everything is in the state_dict, so a
    checkpoint taken while the queue fills resumes where it was.

    >>> import torch, cumulant as cm
    >>> queue = cm.contrastive.KeyQueue(4, 2)
    >>> queue.push(torch.ones(3, 2)); queue.push(torch.zeros(3, 2)); queue.keys[:, 0]
    tensor([1., 0., 0., 0.])
    """

    stored: Tensor
    pushed: Tensor

    def __init__(self, size: int, dimension: int) -> None:
        super().__init__()
        rows = whole("KeyQueue", "size", size, 1)
        width = whole("KeyQueue", "dimension", dimension, 1)
        self.register_buffer("stored", torch.zeros(rows, width))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.long))

    def extra_repr(self) -> str:
        return f"{self.stored.shape[0]}, {self.stored.shape[1]}, filled={len(self)}"

    def __len__(self) -> int:
        return min(int(self.pushed), self.stored.shape[0])

    @property
    def keys(self) -> Tensor:
        """``(filled, d)``, oldest first; a copy, without gradient."""
        size, start = self.stored.shape[0], int(self.pushed) % self.stored.shape[0]
        if len(self) < size:
            return self.stored[: len(self)].clone()
        return torch.cat([self.stored[start:], self.stored[:start]])

    @torch.no_grad()
    def push(self, keys: Tensor) -> None:
        """Add keys ``(n, d)``, dropping the oldest; of more than `size`, keep the last."""
        size, width = self.stored.shape
        given: Any = keys
        if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != width:
            came = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise InputError(f"KeyQueue.push: keys must have shape (n, {width}), not {came}.")
        if not given.is_floating_point():
            raise InputError(f"KeyQueue.push: keys must be real, not {given.dtype}.")
        count = given.shape[0]
        skipped = max(0, count - size)
        last = given.detach()[skipped:].to(self.stored, copy=True)
        if not bool(last.isfinite().all()):
            raise InputError(
                f"KeyQueue.push: keys must be finite as {last.dtype}; nothing was added."
            )
        first = int(self.pushed) + skipped
        at = torch.arange(first, first + len(last), device=self.stored.device) % size
        self.stored[at] = last
        self.pushed += count

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, *args: Any
    ) -> None:
        """Both tensors or none: a queue of another size must leave this one as it is."""
        given = state_dict.get(prefix + "stored")
        came = None if given is None else tuple(given.shape)
        both = (given is None) == (prefix + "pushed" not in state_dict)
        if not both or came not in (None, tuple(self.stored.shape)):
            errors: list[str] = args[-1]
            errors.append(
                f"KeyQueue needs stored {tuple(self.stored.shape)} and pushed, the checkpoint has "
                f"{came} and {'' if prefix + 'pushed' in state_dict else 'no '}pushed."
            )
            return
        cast(_Loads, super())._load_from_state_dict(state_dict, prefix, *args)


class Temperature(nn.Module):
    """A learned temperature, parametrized by its logarithm, so it stays positive.

    Args:
        start: initial value; CLIP's 0.07.
        least: lower bound; CLIP's 0.01.

    >>> import torch, cumulant as cm
    >>> temperature = cm.contrastive.Temperature()
    >>> x = torch.randn(8, 16)
    >>> cm.contrastive.info_nce(x, x, temperature=temperature()).backward()
    >>> temperature.log_value.grad is not None
    True
    """

    def __init__(self, start: float = 0.07, *, least: float = 0.01) -> None:
        super().__init__()
        self.least = real("Temperature", "least", least, least=0.0, open_at_least=True)
        value = real("Temperature", "start", start, least=self.least)
        self.log_value = nn.Parameter(torch.tensor(math.log(value)))

    def extra_repr(self) -> str:
        return f"{float(self.log_value.detach().exp()):.4g}, least={self.least:g}"

    def forward(self) -> Tensor:
        """The temperature, with gradient."""
        floor = math.log(self.least)
        if holds(self.log_value.detach() >= floor) is False:
            with torch.no_grad():  # the parameter itself, so that its gradient never dies
                self.log_value.clamp_(min=floor)
        return self.log_value.exp()
