"""`read_series` and `read_model`: observations from CSV, parameters from TOML."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tomllib
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.filtering.model import SHAPES, TIMELESS, SwitchingLinearGaussian
from cumulant.writing import whole_file

__all__ = ["EXAMPLE", "ModelFile", "Names", "Series", "example_files", "read_model", "read_series"]

MISSING = {"", "na", "n/a", "nan", "null", "none", "."}
# A first column of this name tells when, even if it holds numbers.
LABELS = {
    *("", "date", "day", "id", "index", "label", "month", "observation_date", "period"),
    *("quarter", "row", "step", "t", "time", "timestamp", "week", "year"),
}
STATE = ("dynamics", "dynamics_noise", "emission", "initial_mean", "initial_covariance")
NEEDED = ("transition", "emission_noise", *STATE)
EXAMPLE = ("us_inflation.csv", "us_inflation.toml")
OPTIONAL = ("initial", "dynamics_bias", "emission_bias", "dynamics_input", "emission_input")


class Series(NamedTuple):
    """Observations ``(T, p)``, NaN where missing; a label for each step; names of the columns.

    ``labels`` is None if the file has no column that tells when.
    """

    values: Tensor
    labels: list[str] | None
    names: list[str]


class Names(NamedTuple):
    """What the modes and the states are called."""

    modes: list[str]
    states: list[str]


class ModelFile(NamedTuple):
    """A model and its names."""

    model: SwitchingLinearGaussian
    names: Names


def example_files() -> list[Path]:
    """The series and the model that come with the package."""
    return [Path(__file__).with_name("data") / name for name in EXAMPLE]


def read_series(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Series:
    """Observations from a CSV file with a header row, in double precision.

    Empty cells, NA and nan are missing. Commas, semicolons or tabs separate.

    Args:
        path: the file.
        columns: the columns to take, in this order. By default all that hold numbers (those where
            more cells are text than numbers are left out), but not a first one that tells when:
            text, or a name like date, time or year.

    Raises:
        InputError: the file, the line and the column at fault.

    >>> import pathlib, tempfile, cumulant as cm
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "series.csv")
    ...     _ = path.write_text("date,rate,note\\n2020-01,1.5,\\n2020-02,NA,closed\\n")
    ...     series = read_series(path)
    >>> series.values.flatten().tolist(), series.labels, series.names
    ([1.5, nan], ['2020-01', '2020-02'], ['rate'])
    """
    header, lines = _cells(Path(path))
    texts = [[row[k] for _, row in lines] for k in range(len(header))]
    first_is_label = len(header) > 1 and (_is_text(texts[0]) or header[0].lower() in LABELS)
    if columns is None:
        chosen = [k for k in range(first_is_label, len(header)) if not _is_text(texts[k])]
        if not chosen:
            raise InputError(f"{path}: no column holds numbers; the columns are {_list(header)}.")
    else:
        chosen = [_index(path, header, name) for name in columns]
        if len(set(chosen)) != len(chosen) or not chosen:
            raise InputError(f"{path}: columns must name each column once, not {_list(columns)}.")
    rows = [[_number(path, line, header[k], row[k]) for k in chosen] for line, row in lines]
    labels = texts[0] if first_is_label and 0 not in chosen else None
    return Series(torch.tensor(rows, dtype=torch.float64), labels, [header[k] for k in chosen])


def _cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and each row with the number of its line."""
    text = _text(path)
    head = next((x for x in text.splitlines() if x.strip()), "")
    if not head:
        raise InputError(f"{path} is empty.")
    mark = next((m for m in ",;\t" if m in head), ",")
    try:
        reader = csv.reader(io.StringIO(text.rstrip("\r\n")), delimiter=mark, strict=True)
        rows = [(reader.line_num, [x.strip() for x in row]) for row in reader]
    except csv.Error as error:
        raise InputError(f"{path} is not a CSV file: {error}.") from None
    rows = list(dropwhile(lambda row: not any(row[1]), rows))
    if not rows:
        raise InputError(f"{path} holds empty cells only.")
    names = [x or ("" if k == 0 else f"column {k + 1}") for k, x in enumerate(rows[0][1])]
    if any(_is_number(x) for x in names) and all(_is_number(x) for x in names if x):
        raise InputError(
            f"{path}: the first line must name the columns, but holds numbers: {head[:60]}"
        )
    twice = next((x for k, x in enumerate(names) if x in names[:k]), None)
    if twice is not None:
        raise InputError(f"{path}: two columns are called {twice!r}.")
    # In a single column, an empty line is an empty cell; beside others it is none.
    lines = [(n, row or [""]) for n, row in rows[1:] if row or len(names) == 1]
    if not lines:
        raise InputError(f"{path} has a header but no rows.")
    for n, row in lines:
        if len(row) != len(names):
            raise InputError(
                f"{path}: line {n} has {_count(len(row), 'cell')}, but the header has {len(names)}."
            )
    return names, lines


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}.") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file in UTF-8.") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _is_text(cells: Sequence[str]) -> bool:
    """Whether more cells of a column are text than numbers."""
    present = [x for x in cells if x.lower() not in MISSING]
    return 2 * sum(map(_is_number, present)) < len(present)


def _number(path: Any, line: int, column: str, text: str) -> float:
    if text.lower() in MISSING:
        return math.nan
    if not _is_number(text) or not math.isfinite(float(text)):
        raise InputError(
            f"{path}: line {line}, column {column!r}: {text!r} is not a finite number; leave "
            "a cell empty if it is missing."
        )
    return float(text)


def _index(path: Any, header: Sequence[str], name: str) -> int:
    if name not in header:
        raise InputError(f"{path} has no column {name!r}; its columns are {_list(header)}.")
    return header.index(name)


def _list(names: Sequence[str]) -> str:
    return ", ".join(x or '""' for x in names)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def read_model(path: str | os.PathLike[str]) -> ModelFile:
    """A `SwitchingLinearGaussian` from a TOML file, in double precision.

    The keys are the model's arguments, as nested arrays, and ``names`` of the modes and ``states``
    if wanted. With one state or one observation, a plain number stands for a 1 x 1 matrix, and a
    plain list of numbers for one such matrix per mode. A file without any of dynamics, emission
    and initial_mean is a model without a state, whose observations are emission_bias and noise.

    Raises:
        InputError: the file and the key at fault.

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
    text = _text(Path(path))
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}.") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: a number is too long, or arrays are nested too deep.") from None
    valid = ("names", "states", *NEEDED, *OPTIONAL)
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
    states = _names(path, "states", given.get("states"), "state", model.state_dimension)
    return ModelFile(model, Names(modes, states))


def write_model(path: str | os.PathLike[str], model: SwitchingLinearGaussian, names: Names) -> Path:
    """A model and its names as a TOML file that `read_model` reads."""
    listed = {"names": names.modes, "states": names.states if model.state_dimension else []}
    lines = [f"{key} = {json.dumps(x, ensure_ascii=False)}" for key, x in listed.items() if x]
    for key, x in model.parameters.items():
        if x.numel():
            lines.append(f"{key} = {json.dumps(x.detach().double().tolist())}")
    with whole_file(path) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Path(path)


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
        items: list[Any] = x
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
    names: list[Any] = given if isinstance(given, list) else [given]
    if len(names) != count or not all(isinstance(x, str) and x.strip() for x in names):
        raise InputError(f"{path}: {key} must be {_count(count, 'name')}, not {given!r}.")
    if len(set(names)) != count:
        raise InputError(f"{path}: {key} must differ: {_list(names)}.")
    return names
