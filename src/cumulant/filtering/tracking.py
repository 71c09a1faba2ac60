"""Ready models of tracking: constant velocity and coordinated turns, in the units of the sensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.checks import numbers, real, whole
from cumulant.core.errors import InputError
from cumulant.filtering.components import Build, Q, R, Regimes
from cumulant.filtering.structure import ReadyModel

__all__ = ["constant_velocity", "coordinated_turn"]

AXES = ("x", "y", "z")


def constant_velocity(
    *,
    step: float | Sequence[float] | Tensor = 1.0,
    acceleration: float | Sequence[float] = 1.0,
    noise: float = 1.0,
    dimensions: int = 2,
    regimes: Regimes | None = None,
    spread: float = 1e3,
) -> ReadyModel:
    """Targets that keep their velocity but for white acceleration; positions are observed.

    On each axis x_t = x + step v, v_t = v, with noise q [[s^3 / 3, s^2 / 2], [s^2 / 2, s]] for a
    step s; the state is (x, vx, y, vy, ...). Several accelerations make as many modes.

    Args:
        step: time between observations, or one for each of T steps: the time before each
            observation since the last one, or since the start.
        acceleration: q, the intensity of the acceleration's noise, or one for each mode.
        noise: standard deviation of the observed positions.
        dimensions: 1, 2 or 3.
        regimes: names of the modes.
        spread: standard deviation of positions and velocities at the start.

    >>> import cumulant as cm
    >>> cm.filtering.constant_velocity(acceleration=[0.01, 4.0], regimes=["cruise", "maneuver"])
    ReadyModel(modes=2, state_size=4, observation_size=2)
    """
    owner = "constant_velocity"
    axes, s = _axes(owner, dimensions), _steps(owner, step)
    given = [acceleration] if isinstance(acceleration, int | float) else list(acceleration)
    q = torch.tensor([_positive(owner, "acceleration", x) for x in given], dtype=torch.float64)
    one, zero = torch.ones_like(s), torch.zeros_like(s)
    track = _Tracker(owner, "a target of constant velocity", axes, noise, spread, s.ndim > 0)
    return track.model(
        _repeated(_matrix([[one, s], [zero, one]]), axes),
        _each_mode(_white(s, axes), q),
        _named(owner, regimes, len(q)),
        ("acceleration",),
    )


def coordinated_turn(
    rates: Sequence[float] = (0.0, -0.1, 0.1),
    *,
    step: float | Sequence[float] | Tensor = 1.0,
    acceleration: float = 0.01,
    noise: float = 1.0,
    regimes: Regimes | None = None,
    spread: float = 1e3,
) -> ReadyModel:
    """Targets that fly straight or turn at known rates, one mode for each; positions are observed.

    With turn rate w the velocity (vx, vy) rotates by w step, and the position follows its arc. The
    state is (x, vx, y, vy), as in `constant_velocity`, which is the mode with w = 0.

    Args:
        rates: turn rates in radians per unit of time, positive to the left, one for each mode.
        step, acceleration, noise, regimes, spread: as in `constant_velocity`.

    >>> import torch, cumulant as cm
    >>> model = cm.filtering.coordinated_turn([0.0, torch.pi / 2], regimes=["straight", "left"])
    >>> state = torch.tensor([0.0, 1.0, 0.0, 0.0]).double()  # at the origin, eastward
    >>> [round(float(x), 3) for x in model.dynamics[1] @ state]  # a quarter turn later, northward
    [0.637, 0.0, 0.637, 1.0]
    """
    owner = "coordinated_turn"
    s, q = _steps(owner, step), _positive(owner, "acceleration", acceleration)
    turns = [real(owner, "rates", w) for w in rates]
    if not turns or len(set(turns)) < len(turns):
        raise InputError(f"{owner}: rates must be different numbers, one per mode, not {rates!r}.")
    dynamics = torch.stack([_turned(w, s) for w in turns], -3)
    track = _Tracker(owner, "a target in coordinated turns", 2, noise, spread, s.ndim > 0)
    return track.model(
        dynamics if len(turns) > 1 else dynamics.squeeze(-3),
        q * _white(s, 2),
        _named(owner, regimes, len(turns)),
        ("turn rate",),
    )


def _turned(w: float, s: Tensor) -> Tensor:
    """The dynamics of (x, vx, y, vy) at turn rate w over a step s."""
    angle = w * s
    # sin(ws) / w and (1 - cos(ws)) / w, which are s and 0 at w = 0
    along = s * torch.sinc(angle / math.pi)
    across = s * (angle / 2) * torch.sinc(angle / (2 * math.pi)) ** 2
    c, d, one, zero = angle.cos(), angle.sin(), torch.ones_like(s), torch.zeros_like(s)
    return _matrix(
        [
            [one, along, zero, -across],
            [zero, c, zero, -d],
            [zero, across, one, along],
            [zero, d, zero, c],
        ]
    )


def _white(s: Tensor, axes: int) -> Tensor:
    """The noise that white acceleration of intensity 1 leaves after a step."""
    return _repeated(_matrix([[s**3 / 3, s**2 / 2], [s**2 / 2, s]]), axes)


def _each_mode(noise: Tensor, intensity: Tensor) -> Tensor:
    """``(..., M, n, n)``, or ``(..., n, n)`` for one mode."""
    if len(intensity) == 1:
        return intensity[0] * noise
    return intensity[:, None, None] * noise.unsqueeze(-3)


class _Tracker(NamedTuple):
    """What all trackers share: sensors of positions, and a start that is hardly known."""

    owner: str
    about: str
    axes: int
    noise: float
    spread: float
    timed: bool

    def model(
        self, dynamics: Tensor, noise: Tensor, names: Regimes, switching: Sequence[str]
    ) -> ReadyModel:
        """With these dynamics."""
        build = Build(self.owner, self.about, names, None, switching)
        sigma = _positive(self.owner, "noise", self.noise)
        vague = _positive(self.owner, "spread", self.spread)
        n, M = 2 * self.axes, build.modes
        emission = torch.eye(n, dtype=torch.float64)[::2]
        return build.model(
            dynamics=_timed(dynamics, M) if self.timed else dynamics,
            dynamics_noise=_timed(noise, M) if self.timed else noise,
            emission=emission,
            emission_noise=sigma**2 * torch.eye(self.axes),
            initial_mean=torch.zeros(n),
            initial_covariance=vague**2 * torch.eye(n),
            states=[name for x in AXES[: self.axes] for name in (x, f"v{x}")],
            labels={Q(1): "acceleration variance", R(0): "noise variance"},
            free={
                "dynamics_noise": torch.zeros(n, dtype=torch.long),
                "emission_noise": torch.zeros(self.axes, dtype=torch.long),
            },
            units="known",
        )


def _timed(x: Tensor, modes: int) -> Tensor:
    """What changes with time has a dimension of modes, ``(T, M, n, n)``."""
    return x if x.ndim == 4 else x.unsqueeze(1).expand(-1, modes, -1, -1)


def _matrix(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """``(..., n, n)`` from entries ``(...)``."""
    return torch.stack([torch.stack(list(row), -1) for row in rows], -2)


def _steps(owner: str, step: float | Sequence[float] | Tensor) -> Tensor:
    """One step (), or T of them."""
    given, _ = numbers(owner, step=step)
    s = given["step"].double()
    if s.ndim > 1 or not s.numel() or not bool((s > 0).all()) or not bool(s.isfinite().all()):
        raise InputError(f"{owner}: step must be a positive number or one for each step.")
    return s


def _positive(owner: str, name: str, value: float) -> float:
    return real(owner, name, value, least=0.0, open_at_least=True)


def _axes(owner: str, dimensions: int) -> int:
    axes = whole(owner, "dimensions", dimensions, 1)
    if axes > len(AXES):
        raise InputError(f"{owner}: dimensions must be 1, 2 or 3, not {axes}.")
    return axes


def _named(owner: str, regimes: Regimes | None, count: int) -> Regimes:
    if regimes is None:
        return count
    given = regimes if isinstance(regimes, int) else len(regimes)
    if given != count:
        raise InputError(f"{owner}: there are {count} modes, but regimes is {regimes!r}.")
    return regimes


def _repeated(block: Tensor, times: int) -> Tensor:
    """The block ``(..., 2, 2)`` on the diagonal for each axis."""
    eye = torch.eye(times, dtype=block.dtype)
    whole = torch.einsum("ab,...ij->...aibj", eye, block)
    return whole.reshape(*block.shape[:-2], 2 * times, 2 * times)
