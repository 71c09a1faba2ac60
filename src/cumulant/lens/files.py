"""Tables as Parquet and facts as JSON, with units and definitions; each file is whole or absent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cumulant.core.errors import InputError
from cumulant.core.files import whole_file, write_file
from cumulant.lens.columns import COLUMNS, TABLES, Column
from cumulant.lens.tables import pandas

if TYPE_CHECKING:
    from cumulant.lens.tables import DataFrame

__all__ = ["part_name", "plain", "read_rows", "read_table", "write_json", "write_table"]

_CHECKED = {"page_checksum_verification": True}  # of what `write_table` wrote


def parquet() -> Any:
    """The module pyarrow.parquet, or one clear line."""
    try:
        return import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(
            "Parquet files need pyarrow; install it with: pip install '.[lens]'"
        ) from error


def write_table(
    table: DataFrame, path: Path, name: str, columns: Mapping[str, Column] = COLUMNS
) -> None:
    """Write a table; the metadata of each field holds its unit and definition."""
    writer, arrow = parquet(), import_module("pyarrow")
    data = arrow.Table.from_pandas(table, preserve_index=False)
    fields: list[Any] = []
    for field in data.schema:
        known = columns.get(field.name)
        facts = {"unit": known.unit, "definition": known.definition} if known else {}
        fields.append(field.with_metadata({**(field.metadata or {}), **facts}))
    about: dict[Any, Any] = {
        **(data.schema.metadata or {}),
        "cumulant": f"{name}: {TABLES.get(name, '')}",
    }
    data = data.cast(arrow.schema(fields, metadata=about))
    with whole_file(path) as part:
        writer.write_table(data, part, write_page_checksum=True)


def part_name(number: int) -> str:
    """The file of one part of a table."""
    return f"part-{number:05d}.parquet"


def read_table(path: Path, parts: int | None = None) -> DataFrame:
    """A table: one file, or a folder of `parts` files (default: as many as there are)."""
    parquet()
    if not path.is_dir():
        return _read(path)
    count = len(list(path.glob("part-*.parquet"))) if parts is None else parts
    tables = [_read(path / part_name(k)) for k in range(max(1, count))]
    return pandas().concat(tables, ignore_index=True)


def _read(path: Path) -> DataFrame:
    if not path.is_file():
        raise InputError(f"{path} is missing: the examination is damaged; run it again.")
    try:
        return parquet().read_table(path, **_CHECKED).to_pandas()
    except (OSError, ValueError, KeyError, TypeError):  # Arrow's own errors are among these
        raise InputError(f"{path} is damaged: run the examination again.") from None


def read_rows(path: Path, count: int) -> Iterator[DataFrame]:
    """A table, `count` rows at a time."""
    reader = parquet()
    try:
        with reader.ParquetFile(path, **_CHECKED) as file:
            for rows in file.iter_batches(count):
                yield rows.to_pandas()
    except (OSError, ValueError):
        raise InputError(f"{path} is missing or damaged: remove {path.parents[1]}.") from None


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write JSON without NaN, an entry on each line: numbers that are not finite become null."""
    # Without indent: with it, json writes in Python instead of C.
    entries = [
        f"{json.dumps(k)}: {json.dumps(plain(v), allow_nan=False)}" for k, v in content.items()
    ]
    write_file(path, "{\n" + ",\n".join(entries) + "\n}\n")


def plain(x: Any) -> Any:
    """Lists, dicts, numbers and strings for JSON."""
    if isinstance(x, float) and not hasattr(x, "dtype"):  # most are
        return x if math.isfinite(x) else None
    if isinstance(x, Sequence) and not isinstance(x, str | bytes):
        return [plain(v) for v in cast(Sequence[Any], x)]
    if x is None or isinstance(x, bool | str | int):
        return x
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in cast(dict[object, Any], x).items()}
    if hasattr(x, "to_dict") and hasattr(x, "columns"):
        frame: Any = cast(object, x)
        return [plain(row) for row in frame.astype(object).to_dict("records")]
    if isinstance(x, os.PathLike):
        return os.fspath(cast(os.PathLike[str], x))
    return _number(x)


def _number(x: Any) -> float | str | None:
    try:
        number = float(x)
    except (TypeError, ValueError):
        return None if type(x).__name__ == "NAType" else str(x)
    if not math.isfinite(number):
        return None
    whole = hasattr(x, "dtype") and getattr(x.dtype, "kind", "f") in "iu"
    return int(number) if whole else number
