"""Atomic file writes: everything the library writes goes through `whole_file`."""

from __future__ import annotations

import os
import secrets
import signal
import stat
import threading
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from cumulant.core.errors import InputError

__all__ = [
    "destination",
    "interrupts_held",
    "make_folder",
    "printable",
    "whole_file",
    "write_file",
]

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Generator[Path]:
    """A new, empty file beside the target; replaces the target when the block succeeds.

    Readers see the old file or the new one, never a partial one, and any number of processes may
    write the same path. If the block fails or is interrupted, the old file stays and the new one is
    removed. New files follow the umask; replaced files keep their permissions. A symbolic link
    stays: the file it points to is replaced.

    Raises:
        InputError: the target cannot be written; see `destination`.
    """
    target = destination(path)
    # Writers choose the format by suffix. Drop the stem: with it, a long name would be too long.
    part = target.with_name(f".cumulant-{secrets.token_hex(8)}{Path(path).suffix[:16]}")
    made = False
    try:
        try:
            with interrupts_held():
                os.close(os.open(part, _NEW, 0o666))
                made = True
            mode = _permissions(target if target.exists() else part)
            part.chmod(mode)  # before there is anything to read in it
            yield part
            part.chmod(mode)  # some writers put a file of their own in its place
            with open(part, "r+b") as file:  # otherwise a power cut could leave an empty file
                os.fsync(file.fileno())
            os.replace(part, target)
        except OSError as error:
            raise _refused(path, error.strerror or str(error)) from None
        finally:
            _remove(part, made)
    finally:  # once more: a second Ctrl-C may have arrived before the first removal
        _remove(part, made)


def write_file(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write text (as UTF-8) or bytes atomically.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder, "a.txt"), "whole").read_text()
    'whole'
    """
    with whole_file(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(path)


def destination(path: str | os.PathLike[str]) -> Path:
    """Where `whole_file` will write, links resolved. Call it before long work to fail early.

    Raises:
        InputError: the parent folder is missing; the target is a folder, device, pipe, socket or
            open file (``/dev/stdout``); the name is too long or holds control characters; no
            permission.
    """
    given = _as_path(path)
    try:
        target = Path(os.path.realpath(given))
        with suppress(FileNotFoundError):
            _check_kind(path, os.stat(given).st_mode)
            if _is_open_file(given):
                raise _refused(path, "it stands for a file that is open; name the file itself")
            if not os.access(given, os.W_OK):
                raise _refused(path, "the file is read-only")
        if not stat.S_ISDIR(os.stat(target.parent).st_mode):
            raise _refused(path, f"{printable(target.parent)} is not a folder")
    except FileNotFoundError:
        raise _refused(
            path, f"there is no folder {printable(given.parent)}; make it first"
        ) from None
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise _refused(path, f"the folder {printable(given.parent)} is read-only")
    return target


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, created if missing.

    Raises:
        InputError: it cannot be created or written to.
    """
    path = _as_path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"cannot make the folder {printable(path)}: {why}.") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"cannot write into the folder {printable(path)}: it is read-only.")
    return path


@contextmanager
def interrupts_held() -> Generator[None]:
    """Defer Ctrl-C until the block is done. Only the main thread ever receives it."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def printable(text: object) -> str:
    r"""Escape control characters, so that no name can control a terminal.

    >>> print(printable("run\x1b[2J\n.npz"))
    run\x1b[2J\n.npz
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _as_path(path: str | os.PathLike[str]) -> Path:
    try:
        given = Path(path)
    except TypeError:
        raise InputError(f"path must be a path, not {path!r}.") from None
    if any(unicodedata.category(c) == "Cc" for c in str(given)):
        raise _refused(path, "the name holds control characters; choose another")
    return given


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise _refused(path, "it is a folder; name a file")
    if not stat.S_ISREG(mode):
        kinds = {"c": "a device", "b": "a device", "p": "a pipe", "s": "a socket"}
        kind = kinds.get(stat.filemode(mode)[0], "something else")
        raise _refused(path, f"it is {kind}, not a file")


def _is_open_file(path: Path) -> bool:
    """Whether it is, or links to, an open file descriptor: replacing its file would lose data."""
    while path.is_symlink():
        folder = os.path.realpath(path.parent)
        if folder.startswith("/proc/") and folder.endswith("/fd"):
            return True
        path = Path(folder, os.readlink(path))
    return False


def _refused(path: str | os.PathLike[str], why: str) -> InputError:
    return InputError(f"cannot write {printable(os.fspath(path))}: {why}.")


def _permissions(path: Path) -> int:
    """Those of a file; whoever replaces it owns the new one and must be able to write it."""
    return stat.S_IMODE(path.stat().st_mode) & 0o777 | stat.S_IWUSR


def _remove(part: Path, made: bool) -> None:
    if made:
        with interrupts_held(), suppress(OSError):
            part.unlink(missing_ok=True)
