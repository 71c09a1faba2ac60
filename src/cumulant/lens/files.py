"""Examinations on disk: Parquet and JSON with units and definitions, whole or not at all."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from cumulant.core.errors import InputError
from cumulant.core.files import whole_file, write_file
from cumulant.lens.columns import COLUMNS, TABLES
from cumulant.lens.tables import pandas

__all__ = [
    "ABOUT",
    "FINISHED",
    "PARTIAL",
    "STATE",
    "begun",
    "check_parts",
    "claimed",
    "clear",
    "finish_move",
    "is_complete",
    "mark_complete",
    "move_in",
    "outdated",
    "part_name",
    "plain",
    "read_rows",
    "read_state",
    "read_table",
    "share_name",
    "unfinished",
    "write_json",
    "write_state",
    "write_table",
]

# Unfinished work is below PARTIAL: STATE and the parts that it counts; then, in FINISHED, what is
# only to be moved into its place, which COMPLETE says. Of several processes each has a folder there
# (`share_name`) with STATE and parts of its own.
PARTIAL = ".cumulant-partial"
STATE, FINISHED, COMPLETE, LOCK = "state.pt", "finished", "complete.json", "lock"

# An examination is there if this file is; it is taken away first and put in its place last.
ABOUT = "examination.json"
# What an examination and the command may leave in a folder beside it.
_KNOWN = (
    *(f"{x}.parquet" for x in ("tokens", "heads", "layers", "expansions", "partition", "inputs")),
    *("report.html", "comparison.csv"),
)


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
    with whole_file(path) as part:
        parquet.write_table(data, part)


def part_name(number: int) -> str:
    """The file of one part of a table."""
    return f"part-{number:05d}.parquet"


def read_table(path: Path, parts: int | None = None) -> Any:
    """A table from Parquet: a file, or a folder of parts, of which so many must be there."""
    _parquet()
    if not path.is_dir():
        return _read(path)
    count = len(list(path.glob("part-*.parquet"))) if parts is None else parts
    tables = [_read(path / part_name(k)) for k in range(max(1, count))]
    return pandas().concat(tables, ignore_index=True)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} is missing: the examination there is damaged, make it again.")
    try:
        return pandas().read_parquet(path)
    except (OSError, ValueError, KeyError, TypeError):  # Arrow's own errors are among these
        raise InputError(f"{path} is damaged: make the examination again.") from None


def read_rows(path: Path, count: int) -> Iterator[Any]:
    """A table from Parquet, so many rows at a time."""
    parquet = _parquet()[1]
    try:
        with parquet.ParquetFile(path) as file:
            for rows in file.iter_batches(count):
                yield rows.to_pandas()
    except (OSError, ValueError):
        raise InputError(f"{path} is missing or damaged: remove {path.parents[1]}.") from None


def check_parts(folder: Path, count: int) -> None:
    """Parts 0 to ``count`` - 1 of a table must be there and whole; later ones are removed."""
    parquet = _parquet()[1]
    partial = folder.parent
    for path in (folder / part_name(k) for k in range(count)):
        try:
            parquet.read_metadata(path)
        except (OSError, ValueError):
            what = "damaged" if path.exists() else "missing"
            raise InputError(
                f"{path} is {what}, so the unfinished examination is damaged: remove {partial}."
            ) from None
    counted = {part_name(k) for k in range(count)}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in counted:  # written, or begun, but the state does not know of it
            path.unlink()


def write_json(content: Any, path: Path) -> None:
    """JSON without NaN: what is not finite becomes null."""
    write_file(path, json.dumps(plain(content), indent=1, allow_nan=False))


def write_state(state: dict[str, Any], partial: Path) -> None:
    """What an interrupted run needs; replaced as a whole, so that it is never half-written."""
    # Not torch.save to the file: on a full disk that is no OSError.
    content = io.BytesIO()
    torch.save(state, content)
    write_file(partial / STATE, content.getvalue())


def read_state(partial: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    """The state of an interrupted run, with these keys, if there is one."""
    path = partial / STATE
    if not path.exists():
        return None
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
        sound = set(kept) == set(keys)
    except Exception:  # whatever unpickling damaged bytes raises
        kept, sound = None, False
    if not sound:
        raise InputError(
            f"{path} is damaged, or was written by another version: remove {partial} to start over."
        )
    return kept


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


@contextmanager
def claimed(folder: Path | None, name: str = PARTIAL) -> Generator[Path | None]:
    """The folder for unfinished work, for one run at a time; removed at the end if it has none.

    Args:
        folder: of the examination; None yields None.
        name: of the folder inside.

    Raises:
        InputError: another run is at work there.
    """
    if folder is None:
        yield None
        return
    partial = folder / name
    lock = _locked(partial)
    try:
        yield partial
    finally:
        try:
            if partial.is_dir() and not _has_work(partial):
                _discard(partial)
        finally:
            if lock is not None:
                os.close(lock)


def _locked(partial: Path) -> int | None:
    """An open file that holds the lock until it is closed, by the end of the process at the latest.

    The file may be removed, by the run that had the lock, between opening and locking it: then
    the lock is on nothing, and is taken again.
    """
    try:
        fcntl = import_module("fcntl")
    except ImportError:  # Windows
        partial.mkdir(parents=True, exist_ok=True)
        return None
    path = partial / LOCK
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise InputError(
                f"another run is writing into {partial.parent}: wait for it, or choose another "
                "folder."
            ) from None
        except OSError:  # a file system without locks
            return lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)


def unfinished(folder: Path) -> bool:
    """Whether the folder has work that a later run can go on with."""
    return _has_work(folder / PARTIAL)


def _has_work(partial: Path) -> bool:
    return begun(partial) > 0 or is_complete(partial)


def share_name(rank: int, size: int) -> str:
    """The folder, below that for unfinished work, of one of several processes."""
    return f"rank-{rank:05d}-of-{size:05d}"


def begun(partial: Path) -> int:
    """By how many processes unfinished work was begun; 0 if there is none."""
    if (partial / STATE).exists():
        return 1
    names = (x.parent.name for x in partial.glob(f"rank-*-of-*/{STATE}"))
    return next((int(x.rpartition("-")[2]) for x in names), 0)


def is_complete(partial: Path) -> bool:
    """Whether everything is done and only to be moved into its place."""
    return (partial / COMPLETE).exists()


def clear(partial: Path, keep: Iterable[str] = ()) -> None:
    """Remove what lies in the folder for unfinished work, but not its lock."""
    for item in partial.iterdir():
        if item.name not in {LOCK, *keep}:
            _remove(item)


def _discard(partial: Path) -> None:
    """Remove the folder for unfinished work, the lock last."""
    clear(partial)
    (partial / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # another run has begun in it
        partial.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mark_complete(partial: Path, folder: Path) -> None:
    """From here on, `finish_move` is all that is to be done, now or in a later run."""
    written = {"tokens.parquet", *(x.name for x in (partial / FINISHED).iterdir())}
    write_json({"outdated": outdated(folder, written)}, partial / COMPLETE)


def outdated(folder: Path, written: Iterable[str]) -> list[str]:
    """Files of an earlier examination in the folder that a new one, with these, does not have."""
    if not (folder / ABOUT).exists():
        return []  # then they are somebody else's
    return [x for x in _KNOWN if x not in written and (folder / x).exists()]


def finish_move(partial: Path, folder: Path) -> None:
    """Move a complete examination into its place; may be interrupted anywhere, and done again."""
    finished = partial / FINISHED
    if (finished / ABOUT).exists():
        try:
            marker = json.loads((partial / COMPLETE).read_text("utf-8"))
            old = [x for x in _KNOWN if x in marker["outdated"]]
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{partial / COMPLETE} is damaged: remove {partial} and examine again."
            ) from None
        if (partial / "tokens.parquet").exists():
            _put(partial / "tokens.parquet", finished / "tokens.parquet")
        move_in(finished, folder, old)
    # In this order: a state without the marker would ask for parts that have been moved.
    clear(partial, keep=(COMPLETE,))
    (partial / COMPLETE).unlink(missing_ok=True)


def move_in(finished: Path, folder: Path, old: Iterable[str]) -> None:
    """Put the files of an examination into its place, so that no mixture of two ever loads."""
    (folder / ABOUT).unlink(missing_ok=True)
    for name in old:
        _remove(folder / name)
    for item in sorted(finished.iterdir(), key=lambda x: (x.name == ABOUT, x.name)):
        _put(item, folder / item.name)
    finished.rmdir()


def _put(item: Path, target: Path) -> None:
    if item.is_dir() or (target.is_dir() and not target.is_symlink()):
        _remove(target)
    os.replace(item, target)
