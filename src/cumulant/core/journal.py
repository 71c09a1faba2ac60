"""`Journal`: an append-only, checksummed log of finished steps, to resume long runs.

A journal is a magic line followed by records; the first holds the settings of the run. A record is
a header (the sizes of its two parts, a CRC of the sizes, a digest of the parts), JSON, and the
tensors that the JSON refers to, as safetensors. Nothing is unpickled. A process killed while
writing leaves a partial record, which is ignored and overwritten. Corruption is detected: the
records before it are kept, and the steps after it are redone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.files import printable, whole_file

__all__ = ["Journal"]

MAGIC = b"cumulant journal 1\n"
_SIZES, _HEAD = struct.Struct("<QQ"), struct.Struct("<QQI16s")
_TENSOR = "tensor"
_log = logging.getLogger(__name__)


class Journal:
    """The finished steps of a long run; another run with the same settings resumes it.

    Reading takes no lock; a writer holds `cumulant.core.lock.locked` beside the file. The first
    record creates the file atomically.

    Args:
        path: journal file; need not exist.
        settings: settings that must match to resume: strings, numbers, lists, dicts.

    Attributes:
        differs: names of the settings that differ in an existing journal. The caller either refuses
            to resume or calls `restart`.
        damage: where the file is corrupt; empty if it is intact. Earlier records are kept.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "sums.journal")
    ...     journal = Journal(path, {"seed": 0})
    ...     journal.append({"step": 1, "sum": torch.ones(2)})
    ...     Journal(path, {"seed": 0}).last, Journal(path, {"seed": 1}).differs
    ({'step': 1, 'sum': tensor([1., 1.])}, ['seed'])
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.differs: list[str] = []
        self.damage = ""
        self._spans: list[_Span] = []
        self._replace = True  # by the next record, with the whole file
        if self.path.is_file():  # reading a pipe would wait forever; writing refuses it
            self._scan()

    def __len__(self) -> int:
        return max(0, len(self._spans) - 1)

    def __iter__(self) -> Iterator[Any]:
        return self._read(self._spans[1:])

    @property
    def last(self) -> Any:
        """The newest record, or None."""
        return next(self._read(self._spans[1:][-1:]), None)

    def _read(self, spans: list[_Span]) -> Iterator[Any]:
        if spans:
            with open(self.path, "rb") as file:
                for span in spans:
                    yield _content(*_parts(file, span))

    def append(self, content: Any) -> None:
        """Add a record and wait until it is on disk.

        Args:
            content: dicts with string keys, lists, tuples (read back as lists), strings, numbers,
                None and tensors.

        Raises:
            InputError: the file cannot be written; it is left unchanged.
        """
        packed = _packed(content)
        if self._replace:
            self._write([_packed(self._settings), packed])
            return
        end = self._spans[-1].end
        try:
            with open(self.path, "r+b", buffering=0) as file:
                file.truncate(end)  # half a record, or a damaged one
                file.seek(end)
                try:
                    rest = memoryview(packed)
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except BaseException:
                    file.truncate(end)  # what a full disk let through
                    raise
        except OSError as error:
            why = error.strerror or str(error)
            raise InputError(f"cannot write {printable(self.path)}: {why}.") from None
        self._spans.append(_Span(end, end + len(packed)))

    def keep(self, records: int, most: int) -> None:
        """Drop all but the newest `records` once there are more than `most`."""
        if len(self) > most:
            with open(self.path, "rb") as file:
                chosen = [_raw(file, x) for x in (self._spans[0], *self._spans[-records:])]
            self._write(chosen)

    def rewrite(self, contents: Iterable[Any]) -> None:
        """Replace the records by these; without any, the file is removed."""
        if packed := [_packed(x) for x in contents]:
            self._write([_packed(self._settings), *packed])
        else:
            self.restart()
            self.path.unlink(missing_ok=True)

    def restart(self) -> None:
        """Discard the existing records; the next one replaces the file."""
        self._spans, self._replace, self.differs, self.damage = [], True, [], ""

    def _write(self, packed: list[bytes]) -> None:
        with whole_file(self.path) as part:
            part.write_bytes(b"".join([MAGIC, *packed]))
        self.restart()
        at, self._replace = len(MAGIC), False
        for each in packed:
            self._spans.append(_Span(at, at + len(each)))
            at += len(each)

    def _scan(self) -> None:
        """Index the records, checking each."""
        try:
            with open(self.path, "rb") as file:
                self.damage = self._find(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise InputError(f"cannot read {printable(self.path)}: {error.strerror}.") from None
        if self.damage:
            _log.warning("%s; the work after that is done again", self.damage)
        self._replace = not len(self)

    def _find(self, file: IO[bytes], size: int) -> str:
        """Fill `_spans` and `differs`; returns the damage."""
        start = file.read(len(MAGIC))
        if start != MAGIC:
            whole = not MAGIC.startswith(start)
            return f"{self.path} is damaged, or is not a journal of this version" if whole else ""
        at = len(MAGIC)
        while at < size:
            try:
                end = _end(file, at, size)
                parts = None if end is None else _parts(file, _Span(at, end))
            except ValueError as error:
                return f"{self.path} is damaged in record {len(self._spans)}, at byte {at}: {error}"
            if end is None or parts is None:  # killed while writing
                break
            if not self._spans:
                found = cast(dict[str, Any], _content(*parts))
                names = sorted({*found, *self._settings})
                self.differs = [n for n in names if found.get(n) != self._settings.get(n)]
            self._spans.append(_Span(at, end))
            at = end
        return ""


class _Span(NamedTuple):
    """Where a record is."""

    start: int
    end: int


def _packed(content: Any) -> bytes:
    """A record."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_plain(content, tensors)).encode()
    data = save(tensors) if tensors else b""
    check = zlib.crc32(_SIZES.pack(len(text), len(data)))
    return _HEAD.pack(len(text), len(data), check, _digest(text + data)) + text + data


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _plain(content: Any, tensors: dict[str, Tensor]) -> Any:
    """Content as JSON; each tensor moves to `tensors` and leaves a one-key dict in its place."""
    if isinstance(content, Tensor):
        name = str(len(tensors))
        tensors[name] = content.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        return {_TENSOR: name}
    if isinstance(content, Mapping):
        found = cast(Mapping[Any, Any], content)
        if not all(isinstance(name, str) for name in found) or set(found) == {_TENSOR}:
            raise TypeError(f"a journal takes dicts with string keys, not {[*found]}.")
        return {name: _plain(x, tensors) for name, x in found.items()}
    if isinstance(content, list | tuple):
        return [_plain(x, tensors) for x in cast(list[Any], content)]
    return content


def _content(text: bytes, data: bytes) -> Any:
    """Inverse of packing."""
    tensors = load(data) if data else {}

    def filled(x: dict[str, Any]) -> Any:
        return tensors[x[_TENSOR]] if set(x) == {_TENSOR} else x

    return json.loads(text, object_hook=filled)


def _end(file: IO[bytes], at: int, size: int) -> int | None:
    """Where the record at a byte ends; None if the file ends first.

    Raises:
        ValueError: its header is damaged.
    """
    file.seek(at)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    text, data, check, _ = _HEAD.unpack(head)
    if zlib.crc32(head[: _SIZES.size]) != check:
        raise ValueError("its head has another checksum")
    end = at + _HEAD.size + text + data
    return end if end <= size else None


def _raw(file: IO[bytes], span: _Span) -> bytes:
    file.seek(span.start)
    return file.read(span.end - span.start)


def _parts(file: IO[bytes], span: _Span) -> tuple[bytes, bytes]:
    """JSON and tensors of a record.

    Raises:
        ValueError: the checksum does not match.
    """
    raw = _raw(file, span)
    size, _, _, digest = _HEAD.unpack_from(raw)
    content = raw[_HEAD.size :]
    if _digest(content) != digest:
        raise ValueError("its content has another checksum")
    return content[:size], content[size:]
