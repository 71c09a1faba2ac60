"""pandas in and out: values and labels of what was observed, results as data frames.

pandas itself is imported only to build a frame; what comes in is recognized by what it can do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import tolist

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame  # pyright: ignore[reportMissingTypeStubs]

__all__ = [
    "Labels",
    "ModeNames",
    "PandasLike",
    "frame",
    "is_pandas",
    "labels_of",
    "mode_names",
    "need_pandas",
    "state_names",
    "values_of",
]


class PandasLike(Protocol):
    """A pandas Series or DataFrame, or whatever else has these."""

    @property
    def index(self) -> Any: ...

    @property
    def ndim(self) -> int: ...

    def to_numpy(self, *args: Any, **kwargs: Any) -> Any: ...


class HasModes(Protocol):
    """Names of modes and states, as `read_model` returns them."""

    @property
    def modes(self) -> list[str]: ...

    @property
    def states(self) -> list[str]: ...


ModeNames = HasModes | Sequence[str] | None


class Labels(NamedTuple):
    """The index of the steps, None where it is not known, and names of the columns."""

    index: Any
    columns: tuple[str, ...]

    def last(self) -> Labels:
        """Of the last step alone."""
        return self._replace(index=None if self.index is None else self.index[-1:])

    def extended(self, y: Any) -> Labels:
        """With one more step: the name of a row, or what follows in the index."""
        if self.index is None:
            return self
        name = getattr(y, "name", None) if is_pandas(y) else None
        more = self.ahead(1).index
        if name is not None and (more is None or more[0] != name):
            more = need_pandas().Index([name], name=self.index.name)
        return self._replace(index=None if more is None else self.index.append(more))

    def ahead(self, steps: int) -> Labels:
        """Of the steps after the last one; unknown where the index has no regular step."""
        return self._replace(index=None if self.index is None else _following(self.index, steps))


def _following(index: Any, steps: int) -> Any:
    pd, last = need_pandas(), index[-1]
    if isinstance(index, pd.PeriodIndex):
        return pd.period_range(last + 1, periods=steps, freq=index.freq, name=index.name)
    if isinstance(index, pd.DatetimeIndex):
        try:
            pace = index.freq or pd.DatetimeIndex(index, freq="infer").freq
        except ValueError:  # fewer than three dates
            pace = None
        if pace is None:
            return None
        return pd.date_range(last, periods=steps + 1, freq=pace, name=index.name)[1:]
    if isinstance(index, pd.RangeIndex):
        first = last + index.step
        return pd.RangeIndex(first, first + steps * index.step, index.step, name=index.name)
    return None


def is_pandas(x: object) -> TypeGuard[PandasLike]:
    """Whether x is a Series or a DataFrame."""
    return hasattr(x, "to_numpy") and hasattr(x, "index") and hasattr(x, "ndim")


def values_of(owner: str, name: str, x: PandasLike) -> Any:
    """The numbers as an array of our own, NaN where they are missing."""
    try:
        return x.to_numpy(dtype="float64", na_value=math.nan, copy=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"{owner}: {name} must hold numbers only: {error}.") from None


def labels_of(x: object) -> Labels | None:
    """The labels of what was given, if it has any."""
    if not is_pandas(x):
        return None
    given = getattr(x, "columns", None)
    name = getattr(x, "name", None)
    names = [name if name is not None else "observation"] if given is None else list(given)
    return Labels(x.index, tuple(map(str, names)))


def frame(owner: str, columns: dict[str, Tensor], labels: Labels | None, steps: int) -> DataFrame:
    """Columns ``(T,)`` under the index of the steps; steps count from 0 if it is not known."""
    for x in columns.values():
        if x.ndim != 1:
            raise InputError(
                f"{owner}: one series makes a frame, but the batch has shape "
                f"{tuple(x.shape[:-1])}; filter them one at a time."
            )
    pd = need_pandas()
    index = None if labels is None else labels.index
    index = pd.RangeIndex(steps, name="step") if index is None else index
    return pd.DataFrame({n: x.detach().cpu().numpy() for n, x in columns.items()}, index=index)


def state_columns(
    names: ModeNames, probabilities: Tensor, mean: Tensor, covariance: Tensor
) -> dict[str, Tensor]:
    """Probabilities of the modes, means and standard deviations of the states, by name."""
    modes = mode_names(names, probabilities.shape[-1])
    states = state_names(names, mean.shape[-1])
    out = {f"P({m})": x for m, x in zip(modes, probabilities.unbind(-1), strict=True)}
    return out | moment_columns(states, mean, covariance)


def mode_names(names: ModeNames, count: int) -> list[str]:
    """The names of the modes; mode 1, mode 2, ... by default."""
    given: Any = names if names is None else getattr(names, "modes", names)
    return _counted("mode", given, count)


def state_names(names: ModeNames, count: int) -> list[str]:
    """The names of the states; state 1, state 2, ... by default."""
    return _counted("state", getattr(names, "states", None), count)


def moment_columns(names: Iterable[str], mean: Tensor, covariance: Tensor) -> dict[str, Tensor]:
    """Means and standard deviations, by name."""
    deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    out: dict[str, Tensor] = {}
    for name, m, s in zip(names, mean.unbind(-1), deviation.unbind(-1), strict=True):
        out |= {f"{name} mean": m, f"{name} sd": s}
    return out


def _counted(what: str, names: Sequence[str] | None, count: int) -> list[str]:
    found = [f"{what} {k + 1}" for k in range(count)] if names is None else list(names)
    if len(found) != count or len(set(found)) != count:
        raise InputError(f"{count} different names of {what}s are needed, not {found}.")
    return found


def parameter_frame(parameters: dict[str, Tensor], errors: dict[str, Tensor] | None) -> DataFrame:
    """One row for each entry of each parameter: its estimate and its standard error."""
    pd = need_pandas()
    rows: list[tuple[str, str, float, float]] = []
    for name, x in parameters.items():
        error = None if errors is None else errors.get(name)
        spread = torch.full_like(x, math.nan) if error is None else error
        for at in tolist(torch.cartesian_prod(*map(torch.arange, x.shape)).reshape(-1, x.ndim)):
            place = ", ".join(map(str, at))
            rows.append((name, place, float(x[tuple(at)]), float(spread[tuple(at)])))
    table = pd.DataFrame(rows, columns=["parameter", "entry", "estimate", "standard_error"])
    return table.set_index(["parameter", "entry"])


def need_pandas() -> Any:
    """pandas, or an error that says how to get it."""
    try:
        return import_module("pandas")
    except ImportError:
        raise InputError(
            "data frames need pandas; install it with: pip install '.[pandas]'"
        ) from None
