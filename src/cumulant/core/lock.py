"""One run at a time: a lock file that names its holder and is released when the holder exits."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from cumulant.core.errors import InputError
from cumulant.core.files import printable

__all__ = ["locked"]

_held: set[int] = set()


@contextmanager
def locked(path: str | os.PathLike[str], what: str | None = None) -> Generator[None]:
    """Hold the lock file `path` while the block runs; its folder is created if missing.

    The kernel releases the lock whenever the process exits, so a lock file left by a killed run
    is taken over. On file systems without locks the process named in the file counts as the
    holder while it is alive; on Windows nothing is locked.

    Args:
        path: the lock file; removed at the end.
        what: name of the resource in the error; default the folder.

    Raises:
        InputError: another run holds the lock (names its process and host), or the folder cannot
            be made or written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder, "lock")):
    ...     Path(folder, "lock").read_text().split()[0] == str(os.getpid())
    True
    """
    target, process = Path(path), os.getpid()
    held = _acquire(target, printable(target.parent if what is None else what))
    try:
        yield
    finally:
        if held is not None and os.getpid() == process:  # a forked child has no part in it
            try:  # before the lock is dropped: later the file may be another run's
                target.unlink(missing_ok=True)
            finally:
                _held.discard(held)
                os.close(held)


def _acquire(path: Path, what: str) -> int | None:
    """A descriptor that holds the lock until it is closed.

    Between opening and locking, the previous run may have removed the file: such a lock protects
    nothing, so retry.
    """
    try:
        fcntl = import_module("fcntl")
    except ImportError:  # Windows
        _make_folder(path.parent)
        return None
    _close_in_children()
    while True:
        _make_folder(path.parent)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the folder went with the run before
            continue
        except OSError as error:
            raise InputError(f"cannot write {printable(path)}: {error.strerror}.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:  # a file system without locks
            free = not _alive(_holder(path))
        if not free:
            os.close(file)
            raise InputError(
                f"another run{_named(path)} is writing into {what}: wait for it, or choose another "
                "place."
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                os.ftruncate(file, 0)
                os.write(file, f"{os.getpid()} {socket.gethostname()}\n".encode())
                _held.add(file)
                return file
        os.close(file)


def _make_folder(folder: Path) -> None:
    """Without the check of `make_folder` for write access, which a vanishing folder would fail."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {printable(folder)}: {error.strerror}.") from None


@cache
def _close_in_children() -> None:
    """A forked child shares the lock and would hold it after its parent exits."""

    def close() -> None:
        while _held:
            os.close(_held.pop())

    os.register_at_fork(after_in_child=close)


def _holder(path: Path) -> tuple[int, str] | None:
    """Process and host in a lock file."""
    try:
        process, host = path.read_text("utf-8").split()
        return int(process), host
    except (OSError, ValueError):
        return None


def _alive(holder: tuple[int, str] | None) -> bool:
    """Whether a process is alive; one on another host is assumed to be."""
    if holder is None or holder[1] != socket.gethostname():
        return holder is not None
    try:
        os.kill(holder[0], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _named(path: Path) -> str:
    """The holder; right after a takeover the file may still name the dead process."""
    for _ in range(20):
        holder = _holder(path)
        if holder is not None and _alive(holder):
            return f" (process {holder[0]} on {printable(holder[1])})"
        time.sleep(0.01)
    return ""
