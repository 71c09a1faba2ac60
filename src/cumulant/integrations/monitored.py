"""What callbacks of training libraries need of `cumulant.lens.Monitor`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Figures", "Watcher"]


class Figures(Protocol):
    """A watched step."""

    def scalars(self) -> dict[str, float]: ...


class Watcher(Protocol):
    """A monitor."""

    @property
    def steps(self) -> int: ...
    def start(self, step: int, *, compiled: bool | None = None) -> None: ...
    def step(self, loss: Tensor | float | None = None) -> Figures | None: ...
    def close(self) -> None: ...
