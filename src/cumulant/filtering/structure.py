"""`ReadyModel`: a switching model that names its parameters and knows what a fit may move."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.filtering.model import COVARIANCES, SHAPES, SwitchingLinearGaussian
from cumulant.filtering.model_checks import series
from cumulant.filtering.model_files import Names

__all__ = ["Design", "ReadyModel", "started"]

# A parameter and the place of an entry in it, behind the dimension of the modes.
Place = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Design:
    """What a ready model knows about itself beside its numbers.

    Attributes:
        about: what it is, as the noun of a sentence.
        modes, states: names.
        labels: names of the entries that a fit may move, by parameter and place.
        free: what `fit` moves by default, as its argument `free`.
        given: how many observations it takes before the state is known: `fit` takes them as given.
        units: what is still in standard units, for a series of mean 0 and variance 1: ``"state"``
            (state and observation alike), ``"rows"`` (each observation) or ``"known"``, nothing.
        switching: what differs between the modes.
    """

    about: str
    modes: tuple[str, ...]
    states: tuple[str, ...]
    labels: Mapping[Place, str]
    free: Mapping[str, bool | Tensor]
    given: int = 0
    units: Literal["state", "rows", "known"] = "state"
    switching: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        if len(self.modes) == 1:
            return self.about
        what = " and ".join(filter(None, [", ".join(self.switching[:-1]), *self.switching[-1:]]))
        verb = "switches" if len(self.switching) == 1 else "switch"
        return f"{self.about}, where {what} {verb} between {len(self.modes)} regimes"


class ReadyModel(SwitchingLinearGaussian):
    """A `SwitchingLinearGaussian` with names, made by one call; ``+`` adds components.

    ``local_level(regimes=2) + seasonal(4)`` has the states of both and observes their sum. Modes
    are shared: components have the same number of them, or one. `fit` moves what the design says is
    free, and starts from the series unless the model has been given numbers (``replace``, or a
    fit). Names of regimes go in the order of the fitted model: rising means, or else variances.

    >>> import cumulant as cm
    >>> model = cm.filtering.local_level(regimes=["calm", "wild"]) + cm.filtering.seasonal(4)
    >>> model, model.names.modes, model.names.states[:2]
    (ReadyModel(modes=2, state_size=4, observation_size=1), ['calm', 'wild'], ['level', 'season'])
    >>> print(cm.filtering.autoregression(1, regimes=2).design)
    an autoregression of order 1, where mean switches between 2 regimes
    """

    def __init__(self, *, design: Design, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.design = design

    def _again(self, given: Mapping[str, Any]) -> Self:
        return type(self)(design=self.design, **given)

    @property
    def names(self) -> Names:
        """Of modes and states."""
        return Names(list(self.design.modes), list(self.design.states))

    @property
    def free(self) -> Mapping[str, bool | Tensor]:
        """What `fit` moves by default."""
        return self.design.free

    def designed(self, **changes: Any) -> Self:
        """The same numbers with another design."""
        new = self.unchecked({})
        new.design = dataclasses.replace(self.design, **changes)
        return new

    def replace(self, **changes: Tensor | None) -> Self:
        """The model with some parameters changed; `fit` then starts from its numbers."""
        return super().replace(**changes).designed(units="known")

    def permute(self, order: Sequence[int]) -> Self:
        """The same model with its modes, and their names, in another order."""
        new = super().permute(order)
        return new.designed(modes=tuple(self.design.modes[k] for k in order))

    def started(self, observations: Any) -> Self:
        """The model in the units of a series: its mean and deviation, gaps left out.

        A level, which may wander far, is measured by the steps of the series, but for its start.
        """
        if self.design.units == "known":
            return self
        y = series("started", self, observations).detach()
        rows = y.flatten(0, -2)
        mean = rows.nanmean(0)
        deviation = _size(rows - mean)
        wanders = self.design.units == "state" and "emission_bias" not in self.parameters
        unit = _size(y.diff(dim=-2).flatten(0, -2)) if wanders else deviation
        given = {n: x.to(y) for n, x in self.parameters.items()}
        scaled = _rows(given, unit) if self.design.units == "rows" else _all(given, unit)
        if "emission_bias" in scaled:
            scaled["emission_bias"] = scaled["emission_bias"] + mean
        elif self.design.units == "state":  # the first state is a level
            first = torch.zeros_like(scaled["initial_mean"])
            first[..., 0] = mean
            scaled["initial_mean"] = scaled["initial_mean"] + first
            start = given["initial_covariance"] * deviation.square().maximum(unit.square())
            scaled["initial_covariance"] = start
        return self._again(scaled).designed(units="known")

    def __add__(self, other: object) -> ReadyModel:
        if not isinstance(other, ReadyModel):
            return NotImplemented
        for what in ("observation_size", "modes"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs and (what != "modes" or 1 not in (mine, theirs)):
                raise InputError(
                    f"{self.design.about} and {other.design.about} do not add up: {what} is "
                    f"{mine} and {theirs}."
                )
        chain = self if self.modes > 1 else other
        if self.modes == other.modes and self.design.modes != other.design.modes:
            raise InputError(
                f"components share one chain, but its regimes are called {self.names.modes} and "
                f"{other.names.modes}; use the same names."
            )
        own: dict[str, Any] = {"transition": chain.parameters["transition"]}
        for name in {**self.parameters, **other.parameters}:
            if name in SHAPES:
                own[name] = _joined(name, self, other)
        design = dataclasses.replace(
            chain.design,
            about=f"{self.design.about} and {other.design.about}",
            states=_distinct((*self.design.states, *other.design.states)),
            labels=_labels(self, other),
            free=_free(self, other),
            given=self.design.given + other.design.given,
            units=self.design.units if self.design.units != "known" else other.design.units,
            switching=tuple(dict.fromkeys((*self.design.switching, *other.design.switching))),
        )
        return ReadyModel(design=design, **own)


def started(model: SwitchingLinearGaussian, observations: Any) -> SwitchingLinearGaussian:
    """Where a fit starts: a ready model without numbers of its own takes them from the series."""
    return model.started(observations) if isinstance(model, ReadyModel) else model


def _size(x: Tensor) -> Tensor:
    """Root mean squares of the columns; 1 where there is nothing."""
    found = x.square().nanmean(0).sqrt()
    return torch.where(found > 0, found, 1.0)


def _all(given: dict[str, Tensor], deviation: Tensor) -> dict[str, Tensor]:
    """State and observation in the units of the one series."""
    s = deviation[0]
    power: dict[str, int] = dict.fromkeys(COVARIANCES, 2)
    power |= dict.fromkeys(("dynamics_bias", "emission_bias", "initial_mean"), 1)
    return {n: x * s ** power.get(n, 0) for n, x in given.items()}


def _rows(given: dict[str, Tensor], deviation: Tensor) -> dict[str, Tensor]:
    """Each observation in the units of its series; the state stays."""
    out = dict(given)
    out["emission"] = given["emission"] * deviation[:, None]
    out["emission_noise"] = given["emission_noise"] * deviation * deviation[:, None]
    if "emission_bias" in given:
        out["emission_bias"] = given["emission_bias"] * deviation
    return out


def _joined(name: str, first: ReadyModel, second: ReadyModel) -> Tensor:
    """A parameter of the sum of two models."""
    tail, letters = len(SHAPES[name]), SHAPES[name]
    parts: list[Tensor] = []
    for model in (first, second):
        sizes = {"n": model.state_size, "p": model.observation_size, "m": model.input_size}
        blank = first.parameters["transition"].new_zeros([sizes[c] for c in letters])
        x = model.parameters.get(name, blank)
        parts.append(x)
    if any(x.ndim > tail for x in parts):
        modes = max(first.modes, second.modes)
        parts = [x if x.ndim > tail else x.expand(modes, *x.shape) for x in parts]
        if any(x.shape[0] != modes for x in parts):  # one mode among several
            parts = [x.expand(modes, *x.shape[1:]) for x in parts]
    if letters == "nn":
        return _blocks(*parts)
    if "n" in letters:  # the states of one after those of the other
        return torch.cat(parts, -1)
    return parts[0] + parts[1]


def _blocks(first: Tensor, second: Tensor) -> Tensor:
    """Two square matrices on the diagonal of one."""
    a, b = first.shape[-1], second.shape[-1]
    top = torch.cat([first, first.new_zeros(*first.shape[:-1], b)], -1)
    below = torch.cat([second.new_zeros(*second.shape[:-1], a), second], -1)
    return torch.cat([top, below], -2)


def _labels(first: ReadyModel, second: ReadyModel) -> dict[Place, str]:
    """Names of the entries of both; a name that both use gets a number in the second."""
    out = dict(first.design.labels)
    n = first.state_size
    for (name, at), label in second.design.labels.items():
        letters = SHAPES[name]
        place = tuple(k + n if c == "n" else k for c, k in zip(letters, at, strict=True))
        if (name, place) in out:
            continue
        taken = sum(label == x or x.startswith(f"{label} (") for x in out.values())
        out[name, place] = f"{label} ({taken + 1})" if taken else label
    return out


def _free(first: ReadyModel, second: ReadyModel) -> dict[str, bool | Tensor]:
    """What moves in either component."""
    out: dict[str, bool | Tensor] = {}
    for name in {**first.free, **second.free}:
        a, b = first.free.get(name), second.free.get(name)
        letters = SHAPES.get(name, "")
        if "n" not in letters:
            out[name] = a if a is not None else b  # pyright: ignore[reportArgumentType]
        elif name in COVARIANCES:
            groups = [
                torch.full((model.state_size,), -1) if x is None else torch.as_tensor(x)
                for model, x in ((first, a), (second, b))
            ]
            behind = torch.where(groups[1] >= 0, groups[1] + groups[0].max() + 1, -1)
            out[name] = torch.cat([groups[0], behind])
        else:
            out[name] = _mask(name, first, second, a, b)
    return out


def _mask(name: str, first: ReadyModel, second: ReadyModel, a: Any, b: Any) -> Tensor:
    """The entries that move of a parameter with states in it."""
    tail = len(SHAPES[name])
    parts: list[Tensor] = []
    for model, how in ((first, a), (second, b)):
        x = model.parameters.get(name)
        sizes = {"n": model.state_size, "p": model.observation_size, "m": model.input_size}
        shape = [sizes[c] for c in SHAPES[name]] if x is None else x.shape[x.ndim - tail :]
        parts.append(torch.as_tensor(False if how is None else how).expand(shape))
    if SHAPES[name] == "nn":
        return _blocks(*parts)
    return torch.cat(parts, -1)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names of states, numbered where one repeats."""
    out: list[str] = []
    for name in names:
        taken = sum(x == name or x.startswith(f"{name} (") for x in out)
        out.append(f"{name} ({taken + 1})" if taken else name)
    return tuple(out)
