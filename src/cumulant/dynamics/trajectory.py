"""`Trajectory`: what a cloud went through; kept, saved, drawn."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant.dynamics import shape
from cumulant.errors import InputError

__all__ = ["Observables", "Trajectory", "collect"]

Observables = Mapping[str, Callable[[Tensor], Tensor]]

STANDARD: Observables = {
    "norm": shape.norm,
    "spread": shape.spread,
    "participation_ratio": shape.participation_ratio,
}


@dataclass(frozen=True)
class Trajectory:
    """States of an ensemble of clouds at several times, with what was observed on the way.

    Attributes:
        times: ``(T,)``, in units of the step size: ``k * step_size`` after k steps.
        states: ``(T, *batch, N, d)``; the first is the start.
        observables: by name, each ``(T, *batch)``.
        blow_up_time: ``(*batch,)``, when a cloud left the range of its numbers; inf if it never
            did. From then on it is held at its last state, and where no cloud is left the
            trajectory ends.

    >>> import torch, cumulant as cm
    >>> run = cm.dynamics.simulate(torch.eye(3), 4, contraction=cm.dynamics.Sphere())
    >>> run
    Trajectory(5 times from 0 to 4, states (5, 3, 3), observables norm, spread, participation_ratio)
    """

    times: Tensor
    states: Tensor
    observables: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    blow_up_time: Tensor = field(default_factory=lambda: torch.tensor(float("inf")))

    def __repr__(self) -> str:
        seen = ", ".join(self.observables) or "none"
        gone = int(self.blow_up_time.isfinite().sum())
        lost = f", {gone} of {self.blow_up_time.numel()} blown up" if gone else ""
        span = f"{float(self.times[0]):g} to {float(self.times[-1]):g}"
        return (
            f"Trajectory({len(self.times)} times from {span}, states {tuple(self.states.shape)}, "
            f"observables {seen}{lost})"
        )

    @property
    def final(self) -> Tensor:
        """The last state."""
        return self.states[-1]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an npz file, whole or not at all; `load` reads it back, and so does numpy."""
        path = Path(path)
        arrays = {"times": self.times, "states": self.states, "blow_up_time": self.blow_up_time}
        arrays |= {f"observable {n}": x for n, x in self.observables.items()}
        plain = {n: _plain(x) for n, x in arrays.items()}
        kinds = {n: str(x.dtype).removeprefix("torch.") for n, x in arrays.items()}
        part = path.with_name(path.name + ".part")
        try:
            with open(part, "wb") as file:
                np.savez_compressed(file, format=json.dumps(kinds), **plain)
            os.replace(part, path)
        except OSError as error:
            raise InputError(f"save: cannot write {path}: {error.strerror}.") from None
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Trajectory:
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as file:
                kinds: dict[str, str] = json.loads(str(file["format"]))
                arrays = {
                    n: torch.from_numpy(file[n]).to(getattr(torch, k)) for n, k in kinds.items()
                }
            seen = {n.removeprefix("observable "): x for n, x in arrays.items() if " " in n}
            return Trajectory(arrays["times"], arrays["states"], seen, arrays["blow_up_time"])
        except FileNotFoundError:
            raise InputError(f"load: there is no file {path}.") from None
        except (KeyError, ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
            raise InputError(f"load: {path} is not a saved trajectory ({error}).") from None

    def plot(self, path: str | os.PathLike[str] | None = None, *, snapshots: int = 4) -> Any:
        """A figure: the cloud at several times above, the observables below.

        d = 2 and 3 are drawn as they are, more dimensions on the two principal axes of all states.
        The first cloud of a batch is shown.

        Args:
            path: also write it there (png, svg, pdf).
            snapshots: how many clouds are drawn.

        Returns:
            The matplotlib figure.

        Raises:
            InputError: matplotlib is missing (``pip install 'cumulant[plot]'``).
        """
        from cumulant.dynamics.picture import plot

        return plot(self, path, snapshots)

    def animate(self, path: str | os.PathLike[str], *, frames: int = 60, fps: int = 12) -> Path:
        """Write the cloud in motion as a GIF, or as an HTML page with a player, by the suffix.

        Raises:
            InputError: another suffix, or matplotlib is missing (``pip install 'cumulant[plot]'``).
        """
        from cumulant.dynamics.picture import animate

        return animate(self, Path(path), frames, fps)


def _plain(x: Tensor) -> Any:
    x = x.detach().cpu()
    return (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).numpy()


@dataclass(frozen=True)
class Moment:
    """One state of a run as it goes: time, cloud, and when each cloud blew up."""

    time: float
    state: Tensor
    blow_up_time: Tensor


def collect(
    moments: Iterable[Moment],
    *,
    dtype: torch.dtype,
    observables: Observables | None,
    checkpoint: str | os.PathLike[str] | None,
    progress: Callable[[float], None] | None,
) -> Trajectory:
    """Gather a run. With a checkpoint it is on disk every half minute, when it ends, and when it is
    interrupted or fails."""
    chosen = STANDARD if observables is None else observables
    got: list[Moment] = []
    seen: dict[str, list[Tensor]] = {name: [] for name in chosen}
    saved = time.monotonic()

    def so_far() -> Trajectory:
        blown = got[-1].blow_up_time
        times = torch.tensor([m.time for m in got], dtype=torch.float64)
        states = torch.stack([m.state for m in got]).to(dtype)
        seen_now = {n: torch.stack(x[: len(got)]) for n, x in seen.items()}
        return Trajectory(times, states, seen_now, blown)

    try:
        for moment in moments:
            values = {name: observe(moment.state) for name, observe in chosen.items()}
            for name, value in values.items():
                seen[name].append(value)
            got.append(moment)
            if progress is not None:
                progress(moment.time)
            if checkpoint is not None and time.monotonic() - saved > 30:
                so_far().save(checkpoint)
                saved = time.monotonic()
    finally:
        if checkpoint is not None and got:
            so_far().save(checkpoint)
    return so_far()
