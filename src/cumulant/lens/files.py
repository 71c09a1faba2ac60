"""Examinations on disk: Parquet and JSON with units and definitions, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from cumulant.errors import InputError
from cumulant.lens.columns import COLUMNS, TABLES
from cumulant.lens.tables import pandas

__all__ = ["PARTIAL", "make_folder", "move_in", "read_table", "write_json", "write_table"]

PARTIAL = ".cumulant-partial"


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, made if it is not there, or one clear line."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}.") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"cannot write into the folder {path}.")
    return path


def _parquet() -> Any:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(
            "Parquet files need pyarrow; install it with: pip install 'cumulant[lens]'"
        ) from error


def write_table(table: Any, path: Path, name: str) -> None:
    """A table as Parquet; the metadata of each field holds its unit and definition."""
    arrow, parquet = _parquet()
    data = arrow.Table.from_pandas(table, preserve_index=False)
    fields: list[Any] = []
    for field in data.schema:
        known = COLUMNS.get(field.name)
        facts = {"unit": known.unit, "definition": known.definition} if known else {}
        fields.append(field.with_metadata({**(field.metadata or {}), **facts}))
    about = {**(data.schema.metadata or {}), "cumulant": f"{name}: {TABLES.get(name, '')}"}
    data = data.cast(arrow.schema(fields, metadata=about))
    temporary = path.with_name(path.name + ".writing")
    parquet.write_table(data, temporary)
    os.replace(temporary, path)


def read_table(path: Path) -> Any:
    """A table from Parquet: a file, or a folder of parts."""
    _parquet()
    if path.is_dir():
        parts = sorted(path.glob("part-*.parquet"))
        frames = pandas()
        return frames.concat([frames.read_parquet(p) for p in parts], ignore_index=True)
    return pandas().read_parquet(path)


def write_json(content: Any, path: Path) -> None:
    """JSON without NaN: what is not finite becomes null."""
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text(json.dumps(plain(content), indent=1, allow_nan=False), "utf-8")
    os.replace(temporary, path)


def plain(x: Any) -> Any:
    """Lists, dicts, numbers and strings for JSON."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]  # pyright: ignore[reportUnknownVariableType]
    if hasattr(x, "to_dict") and hasattr(x, "columns"):
        return [plain(row) for row in x.astype(object).to_dict("records")]
    if x is None or isinstance(x, bool | str | int):
        return x
    if isinstance(x, os.PathLike):
        return os.fspath(x)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    try:
        number = float(x)
    except (TypeError, ValueError):
        return None if type(x).__name__ == "NAType" else str(x)
    if not math.isfinite(number):
        return None
    whole = hasattr(x, "dtype") and getattr(x.dtype, "kind", "f") in "iu"
    return int(number) if whole else number


def move_in(partial: Path, folder: Path) -> None:
    """Put everything of a finished partial folder into its place."""
    for item in sorted(partial.iterdir()):
        target = folder / item.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        os.replace(item, target)
    partial.rmdir()
