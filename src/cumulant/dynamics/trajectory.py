"""`Trajectory`: the states of a simulation; saved, loaded, drawn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from cumulant.core.describing import readable
from cumulant.core.errors import InputError
from cumulant.core.files import destination, interrupts_held, whole_file
from cumulant.core.journal import Journal
from cumulant.core.lock import locked
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.core.typed import functions
from cumulant.dynamics import shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Observables", "Trajectory", "collect"]

Observables = Mapping[str, Callable[[Tensor], Tensor]]

PERIOD = 30.0  # seconds between two records of a journal

STANDARD: Observables = {
    "norm": shape.cloud_norm,
    "spread": shape.cloud_spread,
    "participation_ratio": shape.participation_ratio,
}


@dataclass(frozen=True)
class Trajectory:
    """States of an ensemble of clouds at several times, with their observables.

    Attributes:
        times: ``(T,)``, in units of the step size: ``k * step_size`` after k steps.
        states: ``(T, *batch, N, d)``; the first is the start.
        observables: by name, each ``(T, *batch)``.
        blow_up_time: ``(*batch,)``, when a cloud overflowed; inf if it never did. It is then held
            at its last finite state; the trajectory ends once no cloud is left.
        settings: the arguments of the run, as strings and numbers.

    >>> import torch, cumulant as cm
    >>> run = cm.dynamics.simulate(torch.eye(3), 4, contraction=cm.dynamics.Sphere())
    >>> run
    Trajectory(5 times from 0 to 4, states (5, 3, 3), observables norm, spread, participation_ratio)
    """

    times: Tensor
    states: Tensor
    observables: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    blow_up_time: Tensor = field(default_factory=lambda: torch.tensor(float("inf")))
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def __repr__(self) -> str:
        seen, span, lost = ", ".join(self.observables) or "none", "", ""
        if len(self.times) and readable(self.times):
            span = f" from {float(self.times[0]):g} to {float(self.times[-1]):g}"
        if readable(self.blow_up_time) and (gone := int(self.blow_up_time.isfinite().sum())):
            lost = f", {gone} of {self.blow_up_time.numel()} blown up"
        return (
            f"Trajectory({len(self.times)} times{span}, states {tuple(self.states.shape)}, "
            f"observables {seen}{lost})"
        )

    def _repr_html_(self) -> str:
        from cumulant.dynamics.display import as_html

        return as_html(self)

    @property
    def final(self) -> Tensor:
        """The last state."""
        return self.states[-1]

    def _since(self, start: int) -> dict[str, Any]:
        """All from one time on, for a journal."""
        seen = {n: x[start:] for n, x in self.observables.items()}
        return {
            **vars(self),
            "times": self.times[start:],
            "states": self.states[start:],
            "observables": seen,
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an npz file, whole or not at all; `load` reads it back, and so does numpy."""
        arrays = {"times": self.times, "states": self.states, "blow_up_time": self.blow_up_time}
        arrays |= {f"observable {n}": x for n, x in self.observables.items()}
        plain = {n: _plain(x) for n, x in arrays.items()}
        kinds = {n: str(x.dtype).removeprefix("torch.") for n, x in arrays.items()}
        about = json.dumps({"dtypes": kinds, "settings": self.settings})
        with whole_file(path) as part, open(part, "wb") as file:
            np.savez_compressed(file, format=about, **plain)
        return Path(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Trajectory:
        """Read what `save` wrote, or what the checkpoints of a run that was killed hold.

        Raises:
            InputError: there is no such file, or it is something else.
        """
        found = _unfinished(Path(path))
        if found is not None:
            return found
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["format"]))
                kinds: dict[str, str] = about["dtypes"]
                arrays = {
                    n: functions.from_numpy(file[n]).to(getattr(torch, k)) for n, k in kinds.items()
                }
            seen = {n.removeprefix("observable "): x for n, x in arrays.items() if " " in n}
            times, states, blown = (arrays[n] for n in ("times", "states", "blow_up_time"))
            settings: Any = about["settings"]
            fits = states.ndim >= 3 and times.shape == states.shape[:1] and len(times) > 0
            fits &= blown.shape == states.shape[1:-2] and isinstance(settings, dict)
            if not fits or any(x.shape != states.shape[:-2] for x in seen.values()):
                raise ValueError("its parts do not fit together")
            return Trajectory(times, states, seen, blown, cast(dict[str, Any], settings))
        except FileNotFoundError:
            raise InputError(f"load: there is no file {path}.") from None
        except Exception as error:  # whatever a file that is something else can raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"load: {path} is not a saved trajectory ({reason}).") from None

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        snapshots: int = 4,
        cluster_distance: float = 0.1,
    ) -> Figure:
        """A figure: the cloud at several times above, clusters and observables below.

        d = 2 and 3 are drawn as they are, on their sphere if all points stay on one; more
        dimensions on the two principal axes of all states. The first cloud of a batch is shown.

        Args:
            path: also write it there (png, svg, pdf).
            snapshots: how many clouds are drawn.
            cluster_distance: reach of the clusters that are counted, as for `clusters`.

        Returns:
            The matplotlib figure.

        Raises:
            InputError: matplotlib is missing (``pip install '.[plot]'``).
        """
        from cumulant.dynamics.picture import plot

        return plot(self, path, snapshots, cluster_distance)

    def animate(
        self,
        path: str | os.PathLike[str],
        *,
        frames: int = 60,
        fps: int = 12,
        cluster_distance: float = 0.1,
    ) -> Path:
        """Write the cloud in motion as a GIF, or as an HTML page with a player, by the suffix.

        The page holds all it needs and makes no request.

        Args:
            path: the file, ``.gif`` or ``.html``.
            frames: at most this many, evenly spaced.
            fps: frames per second.
            cluster_distance: reach of the clusters that each frame counts, as for `clusters`.

        Raises:
            InputError: another suffix, or matplotlib is missing (``pip install '.[plot]'``).
        """
        from cumulant.dynamics.film import animate

        return animate(self, path, frames, fps, cluster_distance)


def _plain(x: Tensor) -> Any:
    x = x.detach().cpu()
    return (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).numpy()


@dataclass(frozen=True)
class Moment:
    """One state of a run as it goes: time, cloud, and when each cloud blew up."""

    time: float
    state: Tensor
    blow_up_time: Tensor


def _observed(name: str, value: Any, state: Tensor) -> Tensor:
    """What an observable returned, if it is one number for each cloud."""
    try:
        out = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"observable {name!r} must return a tensor, not {type(value).__name__}."
        ) from None
    if out.shape != state.shape[:-2]:
        raise InputError(
            f"observable {name!r} must return one number for each cloud, of shape "
            f"{tuple(state.shape[:-2])}, but returned {tuple(out.shape)}."
        )
    return out


def collect(
    moments: Iterable[Moment],
    *,
    dtype: torch.dtype,
    observables: Observables | None,
    checkpoint: str | os.PathLike[str] | None,
    progress: ProgressCallback | None,
    end: float,
    earlier: Trajectory | None,
    settings: dict[str, Any],
) -> Trajectory:
    """Gather a run that lasts until time `end`, after an earlier one if there is one.

    The checkpoint is written when the run ends, fails or is interrupted. For the case that it is
    killed, a journal beside the file holds all but the last half minute; see `Trajectory.load`.
    """
    chosen = STANDARD if observables is None else observables
    if not isinstance(chosen, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError("observables must be functions by name: {'name': function}.")
    got: list[Moment] = []
    seen: dict[str, list[Tensor]] = {name: [] for name in chosen}
    begun = 0.0 if earlier is None else float(earlier.times[-1])

    def so_far() -> Trajectory:
        run = Trajectory(
            torch.tensor([m.time + begun for m in got], dtype=torch.float64),
            torch.stack([m.state for m in got]).to(dtype),
            {n: torch.stack(x[: len(got)]) for n, x in seen.items()},
            got[-1].blow_up_time + begun,
            settings,
        )
        return run if earlier is None else _joined(earlier, run, chosen)

    with _checkpoints(checkpoint, lambda: so_far() if got else None) as due:
        for moment in moments:
            values = {n: _observed(n, see(moment.state), moment.state) for n, see in chosen.items()}
            for name, value in values.items():
                seen[name].append(value)
            got.append(moment)
            if progress is not None:
                progress(Progress(moment.time + begun, end + begun, "simulating"))
            due()
    return so_far()


@contextmanager
def _checkpoints(
    path: str | os.PathLike[str] | None, so_far: Callable[[], Trajectory | None]
) -> Generator[Callable[[], None]]:
    """Keep a run: yields what is to be called after each state; writes the file at the end."""
    if path is None:
        yield lambda: None
        return
    destination(path)  # before the work, not after it
    with locked(f"{os.fspath(path)}.lock", os.fspath(path)):
        journal, latest, written = (
            Journal(_journal_of(path), {"of": "trajectory"}),
            time.monotonic(),
            0,
        )
        journal.restart()

        def due() -> None:
            nonlocal latest, written
            if time.monotonic() - latest > PERIOD and (run := so_far()) is not None:
                journal.append(run._since(written))
                latest, written = time.monotonic(), len(run.times)

        try:
            yield due
        finally:
            with interrupts_held():  # a second Ctrl-C waits until the run is on disk
                if (run := so_far()) is not None:
                    run.save(path)
                    journal.rewrite([])


def _journal_of(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.journal")


def _unfinished(path: Path) -> Trajectory | None:
    """What a run that was killed had written, unless the file is newer."""
    place = _journal_of(path)
    if not place.is_file() or (
        path.exists() and path.stat().st_mtime_ns > place.stat().st_mtime_ns
    ):
        return None
    journal = Journal(place, {"of": "trajectory"})
    if not len(journal) or journal.differs:
        return None
    parts: list[dict[str, Any]] = list(journal)
    joined = {n: torch.cat([x[n] for x in parts]) for n in ("times", "states")}
    names: list[str] = list(parts[0]["observables"])
    seen = {n: torch.cat([x["observables"][n] for x in parts]) for n in names}
    return Trajectory(
        **joined,
        observables=seen,
        blow_up_time=parts[-1]["blow_up_time"],
        settings=parts[-1]["settings"],
    )


def _joined(first: Trajectory, second: Trajectory, chosen: Observables) -> Trajectory:
    """One run after the other; the state where they meet is there once."""
    new = slice(1 if second.times[0] == first.times[-1] else 0, None)
    seen: dict[str, Tensor] = {}
    for name, observe in chosen.items():
        before = first.observables.get(name)
        if before is None:
            before = torch.stack([_observed(name, observe(x), x) for x in first.states])
        seen[name] = torch.cat([before, second.observables[name][new]])
    gone = first.blow_up_time
    return Trajectory(
        torch.cat([first.times, second.times[new]]),
        torch.cat([first.states, second.states[new].to(first.states)]),
        seen,
        torch.where(gone.isfinite(), gone, second.blow_up_time),
        second.settings,
    )
