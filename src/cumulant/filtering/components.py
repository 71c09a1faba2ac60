"""What ready models are made of: regimes, starting values in standard units, companion matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.filtering.structure import Design, Place, ReadyModel

__all__ = [
    "FLAT",
    "VAGUE",
    "Build",
    "Q",
    "R",
    "Regimes",
    "Switching",
    "companion",
    "in_front",
    "lagged",
    "regime_names",
    "series_names",
    "sticky",
]

D = torch.float64
Regimes = int | Sequence[str]
Switching = str | Sequence[str] | None

# The variance of a start of which nothing is known, in variances of the series: small enough for
# the filter to keep its digits without square roots. FLAT is for regimes with different means: the
# first observations must not tell them apart.
VAGUE, FLAT = 1e5, 1e7
# The probability of staying in a regime, where a fit starts.
STAY = 0.9
# What `switching="variance"` stands for in a model with several variances.
VARIANCES = ("level", "slope", "noise", "seasonal")


class Build:
    """A ready model in the making: how many regimes there are, and what differs between them."""

    def __init__(
        self,
        owner: str,
        about: str,
        regimes: Regimes,
        switching: Switching,
        able: Sequence[str],
        default: Sequence[str] | None = None,
    ) -> None:
        self.about = about
        self.names = regime_names(owner, regimes)
        self.modes = len(self.names)
        self.switching = _switching(owner, switching, able, default or able, self.modes)

    def means(self) -> Tensor:
        """Means ``(M, 1)`` apart by standard deviations, or one ``(1,)`` for all."""
        return self.spread("mean", 0.0, 1.0)

    def spread(self, what: str, center: float, apart: float) -> Tensor:
        """Numbers around a center, ``(M, 1)``; ``(1,)`` if they do not switch."""
        if what not in self.switching:
            return torch.tensor([center], dtype=D)
        return center + apart * torch.linspace(-1, 1, self.modes, dtype=D)[:, None]

    def variances(self, what: str, usual: float) -> Tensor:
        """Variances, each regime's some times the one before, ``(M, 1)``, or ``(1,)``."""
        if what not in self.switching:
            return torch.tensor([usual], dtype=D)
        decades = 0.3 if "mean" in self.switching else 0.6
        return usual * torch.logspace(-decades, decades, self.modes, dtype=D)[:, None]

    def model(
        self,
        *,
        states: Sequence[str],
        labels: Mapping[Place, str],
        free: Mapping[str, bool | Tensor],
        given: int = 0,
        units: Literal["state", "rows", "known"] = "state",
        transition: Tensor | None = None,
        **parameters: Tensor | None,
    ) -> ReadyModel:
        """The model, in double precision."""
        there = {n: x.double() for n, x in parameters.items() if x is not None}
        moving = {n: how for n, how in free.items() if n in there}
        if self.modes > 1:
            moving = {"transition": True, **moving}
        shown = {place: label for place, label in labels.items() if place[0] in there}
        nouns = (f"{x} variance" if x in VARIANCES else x for x in self.switching)
        design = Design(
            *(self.about, self.names, tuple(states), shown, moving, given, units),
            switching=tuple(nouns),
        )
        chain = sticky(self.modes) if transition is None else transition.double()
        return ReadyModel(design=design, transition=chain, **there)


def regime_names(owner: str, regimes: Regimes) -> tuple[str, ...]:
    """The names that were given, or regime 1, regime 2, ..."""
    if isinstance(regimes, int):
        count = whole(owner, "regimes", regimes, 1)
        return tuple(f"regime {k + 1}" for k in range(count))
    names: tuple[Any, ...] = tuple(regimes) if isinstance(regimes, list | tuple) else ()
    if not names or len(set(names)) < len(names) or not all(isinstance(x, str) for x in names):
        raise InputError(
            f"{owner}: regimes must be an integer >= 1 or a list of different names, not "
            f"{regimes!r}."
        )
    return names


def series_names(series: int | Sequence[str]) -> list[str]:
    """Names of several series."""
    if isinstance(series, int):
        return [f"y{k + 1}" for k in range(whole("dynamic_factor", "series", series, 2))]
    names = list(series)
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(f"dynamic_factor: needs two or more different series, not {series!r}.")
    return names


def _switching(
    owner: str, given: Switching, able: Sequence[str], default: Sequence[str], modes: int
) -> tuple[str, ...]:
    """What switches, in the order of `able`; nothing if there is one regime."""
    named: Any = default if given is None else [given] if isinstance(given, str) else list(given)
    asked = {x for name in named for x in (VARIANCES if name == "variance" else [name])}
    chosen = tuple(x for x in able if x in asked or x in named)
    known = {*able, *(["variance"] if set(able) & set(VARIANCES) else [])}
    if not chosen or set(named) - known:
        raise InputError(
            f"{owner}: switching must name some of {', '.join(sorted(known))}, not {given!r}."
        )
    return chosen if modes > 1 else ()


def sticky(modes: int, stay: float = STAY) -> Tensor:
    """A transition that mostly stays, and goes anywhere else alike."""
    if modes == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    rest = (1 - stay) / (modes - 1)
    return torch.full((modes, modes), rest, dtype=torch.float64).fill_diagonal_(stay)


def companion(coefficients: Tensor, size: int) -> Tensor:
    """``(..., size, size)``: the first coefficients in the first row, then what shifts the lags."""
    out = torch.zeros(*coefficients.shape[:-1], size, size, dtype=D)
    out[..., 0, : coefficients.shape[-1]] = coefficients
    out[..., 1:, :-1] = torch.eye(size - 1)
    return out


def in_front(variances: Tensor, size: int) -> Tensor:
    """``(..., size, size)``: a variance of the first state alone."""
    out = torch.zeros(*variances.shape[:-1], size, size, dtype=D)
    out[..., :1, 0] = variances
    return out


def lagged(name: str, size: int) -> tuple[str, ...]:
    """Names of a state and its lags."""
    return (name, *(f"{name}, lag {k}" for k in range(1, size)))


def Q(k: int) -> Place:  # noqa: N802 (as in the equations)
    """The variance of state k."""
    return "dynamics_noise", (k, k)


def R(k: int) -> Place:  # noqa: N802
    """The variance of observation k."""
    return "emission_noise", (k, k)
