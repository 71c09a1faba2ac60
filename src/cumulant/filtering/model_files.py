"""`read_model` and `write_model`: parameters and names in TOML; the example's files."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.files import write_file
from cumulant.core.typed import tolist
from cumulant.filtering.model import SHAPES, TIMELESS, SwitchingLinearGaussian
from cumulant.filtering.series import counted, listed, text_of

__all__ = ["EXAMPLE", "ModelFile", "Names", "example_files", "read_model", "write_model"]

STATE = ("dynamics", "dynamics_noise", "emission", "initial_mean", "initial_covariance")
NEEDED = ("transition", "emission_noise", *STATE)
EXAMPLE = ("us_inflation.csv", "us_inflation.toml")
OPTIONAL = ("initial", "dynamics_bias", "emission_bias", "dynamics_input", "emission_input")


class Names(NamedTuple):
    """What the modes and the states are called; units of observations and states by their name."""

    modes: list[str]
    states: list[str]
    units: Mapping[str, str] = {}  # a plain dict: models are pickled with their names

    def __repr__(self) -> str:
        units = f", units={dict(self.units)}" * bool(self.units)
        return f"Names(modes={self.modes}, states={self.states}{units})"


class ModelFile(NamedTuple):
    """A model and its names."""

    model: SwitchingLinearGaussian
    names: Names


def example_files() -> list[Path]:
    """The series and the model that come with the package."""
    return [Path(__file__).with_name("data") / name for name in EXAMPLE]


def read_model(path: str | os.PathLike[str]) -> ModelFile:
    """A `SwitchingLinearGaussian` from a TOML file, in double precision.

    The keys are the model's arguments, as nested arrays, and optionally ``names`` of the modes,
    ``states``, and ``units`` of columns and states by name, for pictures. With one state or one
    observation, a number stands for a 1 x 1 matrix, and a list of numbers for one such matrix per
    mode. A file without dynamics, emission and initial_mean is a model without a state:
    observations are emission_bias plus noise.

    Raises:
        InputError: names the file and the key.

    >>> import pathlib, tempfile
    >>> text = '''
    ... names = ["calm", "turbulent"]
    ... transition = [[0.95, 0.05], [0.1, 0.9]]
    ... initial = [0.5, 0.5]
    ... dynamics = 1.0
    ... dynamics_noise = [0.1, 2.0]
    ... emission = 1.0
    ... emission_noise = [1.0, 9.0]
    ... initial_mean = 0.0
    ... initial_covariance = 100.0
    ... '''
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "model.toml")
    ...     _ = path.write_text(text)
    ...     model, names = read_model(path)
    >>> model.emission_noise.flatten().tolist(), names
    ([1.0, 9.0], Names(modes=['calm', 'turbulent'], states=['state 1']))
    """
    text = text_of(Path(path))
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}.") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: a number is too long, or arrays are nested too deep.") from None
    valid = ("names", "states", "units", *NEEDED, *OPTIONAL)
    unknown = [key for key in given if key not in valid]
    if unknown:
        raise InputError(
            f"{path}: no key is called {unknown[0]!r}; the keys are {', '.join(valid)}."
        )
    stateless = not any(key in given for key in STATE)
    absent = [key for key in NEEDED if key not in given and not (stateless and key in STATE)]
    if absent:
        raise InputError(
            f"{path}: {', '.join(absent)} {'is' if absent[1:] == [] else 'are'} missing."
        )
    numeric = ("transition", "initial", *SHAPES)
    arrays = {key: _array(path, key, x) for key, x in given.items() if key in numeric}
    try:
        model = SwitchingLinearGaussian(**_expanded(arrays, stateless))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    modes = _names(path, "names", given.get("names"), "mode", model.modes)
    states = _names(path, "states", given.get("states"), "state", model.state_size)
    return ModelFile(model, Names(modes, states, _units(path, given.get("units", {}))))


def write_model(path: str | os.PathLike[str], model: SwitchingLinearGaussian, names: Names) -> Path:
    """A model and its names as a TOML file that `read_model` reads."""
    listed = {"names": names.modes, "states": names.states if model.state_size else []}
    lines = [f"{key} = {json.dumps(x, ensure_ascii=False)}" for key, x in listed.items() if x]
    for key, x in model.parameters.items():
        if x.numel():
            lines.append(f"{key} = {json.dumps(tolist(x.detach().double()))}")
    if names.units:
        told = (json.dumps(x, ensure_ascii=False) for pair in names.units.items() for x in pair)
        pairs = zip(told, told, strict=True)
        lines.append(f"units = {{ {', '.join(f'{name} = {unit}' for name, unit in pairs)} }}")
    return write_file(path, "\n".join(lines) + "\n")


def _units(path: Any, given: Any) -> dict[str, str]:
    """A table of units by name."""
    if not isinstance(given, dict) or not all(
        isinstance(x, str) for x in cast(dict[str, Any], given).values()
    ):
        raise InputError(
            f'{path}: units must be a table of texts, such as {{ inflation = "percent" }}, not '
            f"{given!r}."
        )
    return cast(dict[str, str], given)


def _array(path: Any, key: str, value: Any) -> Tensor:
    """Nested arrays of numbers as a tensor."""
    found: list[float] = []

    def shape(x: Any) -> tuple[int, ...]:
        if isinstance(x, int | float) and not isinstance(x, bool):
            try:
                found.append(float(x))
            except OverflowError:
                raise InputError(f"{path}: {key} holds a number too large.") from None
            return ()
        if not isinstance(x, list):
            raise InputError(f"{path}: {key} must hold numbers only, not {x!r}.")
        items = cast(list[Any], x)
        inner = {shape(each) for each in items}
        if len(inner) > 1:
            raise InputError(f"{path}: {key} must be a full table, but its parts differ in length.")
        return (len(items), *(inner.pop() if inner else ()))

    size = shape(value)
    return torch.tensor(found, dtype=torch.float64).reshape(size)


def _expanded(arrays: dict[str, Tensor], stateless: bool) -> dict[str, Any]:
    """Numbers and plain lists as the matrices they stand for."""
    M = arrays["transition"].shape[-1] if arrays["transition"].ndim else 1
    noise, given = arrays["emission_noise"], arrays.get("dynamics")
    sizes = {"M": M, "n": 0, "p": 1 if noise.ndim < 2 else noise.shape[-1]}
    if given is not None:
        sizes["n"] = 1 if given.ndim < 2 else given.shape[-1]
    inputs = [x for key, x in arrays.items() if key.endswith("_input") and x.ndim]
    sizes["m"] = inputs[0].shape[-1] if inputs else 1
    shapes = {"transition": "MM", "initial": "M", **SHAPES}
    out = {key: _unfolded(key, x, [sizes[c] for c in shapes[key]], M) for key, x in arrays.items()}
    if stateless:
        blank = {key: [sizes[c] for c in SHAPES[key]] for key in STATE}
        out |= {key: torch.zeros(shape, dtype=torch.float64) for key, shape in blank.items()}
    return out


def _unfolded(key: str, x: Tensor, want: list[int], modes: int) -> Tensor:
    chain = key in ("transition", "initial")
    if math.prod(want) == 1 and x.ndim == 0:
        return x.reshape(want)
    if math.prod(want) == 1 and not chain and x.shape == (modes,):
        return x.reshape(modes, *want)
    # A dimension for the modes, and one for time where it may be.
    most = len(want) + (not chain) + (key not in TIMELESS)
    if not len(want) <= x.ndim <= most:
        shape = " x ".join(map(str, want))
        rest = "" if chain else f" for all {modes} modes alike, or {modes} x {shape}"
        raise InputError(
            f"{key} must be nested as {shape}{rest}; it is "
            f"{' x '.join(map(str, x.shape)) or 'a single number'}."
        )
    return x


def _names(path: Any, key: str, given: Any, usual: str, count: int) -> list[str]:
    if given is None:
        return [f"{usual} {k + 1}" for k in range(count)]
    names = cast(list[Any], given) if isinstance(given, list) else [given]
    if len(names) != count or not all(isinstance(x, str) and x.strip() for x in names):
        raise InputError(f"{path}: {key} must be {counted(count, 'name')}, not {given!r}.")
    if len(set(names)) != count:
        raise InputError(f"{path}: {key} must differ: {listed(names)}.")
    return names
