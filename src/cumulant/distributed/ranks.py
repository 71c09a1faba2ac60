"""`Ranks`: the processes of a group and what they can do together; no derivatives here.

The only module that knows torch.distributed. Rows are dimension -2; what the ranks hold need not
have equally many. Every call counts the bytes that this rank sends (`traffic`), and a collective
that fails becomes a `GroupError` that says what was going on.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.core.errors import GroupError, InputError
from cumulant.core.typed import tolist
from cumulant.distributed.facts import Facts, digest, told

__all__ = ["Group", "Ranks", "Traffic", "launched", "process_rank", "traffic"]

_T = TypeVar("_T")

# A process group, one dimension of a device mesh, or None for all processes.
Group = Any

# torch 2.13 renamed it; builds without torch.distributed do not have it.
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))


class _Calls(Protocol):
    """What `Ranks` calls in `torch.distributed`, which has no types there."""

    def all_reduce(self, tensor: Tensor, op: Any, *, group: Any) -> object: ...
    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: list[int], sent: list[int], /, *, group: Any
    ) -> object: ...
    def all_gather_object(self, object_list: list[Any], obj: Any, *, group: Any) -> None: ...
    def new_group(self, *, timeout: timedelta) -> Any: ...


_calls: _Calls = dist

# Seconds within which processes that were started together must find each other.
MEETING = 600.0

# What a rank sends before a call: which call, whether it refuses its input, the digest of its
# facts, and as many numbers as ranks may differ in.
_DIFFER = 4
COMPARED = 3 + _DIFFER


@dataclass(eq=False)
class Traffic:
    """What this process has sent: bytes, and in how many calls."""

    bytes: float = 0.0
    calls: int = 0


_counting: list[Traffic] = []


@contextmanager
def traffic() -> Generator[Traffic]:
    """Count the bytes that this process sends to others while the context is open.

    A rank of P sends 2 (P - 1) / P of the array in a sum over ranks, as in algorithms that use all
    links evenly, and P - 1 times its own part in an all-gather.

    >>> import torch, cumulant as cm
    >>> with cm.distributed.traffic() as sent:  # without a group there is nobody to send to
    ...     total = cm.distributed.total(torch.ones(3))
    >>> sent.bytes
    0.0
    """
    mine = Traffic()
    _counting.append(mine)
    try:
        yield mine
    finally:
        _counting.remove(mine)


def _count(sent: float) -> None:
    for each in _counting:
        each.bytes += sent
        each.calls += 1


def _size_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _none(_: object) -> Facts:
    return {}


class Ranks:
    """The processes of a group, seen from one of them; without torch.distributed a group of one.

    Args:
        group: a process group, a one-dimensional `DeviceMesh`, or None for all processes.

    Raises:
        InputError: this process is not in the group, or the mesh has several dimensions.
    """

    def __init__(self, group: Group = None) -> None:
        self.rank, self.size = 0, 1
        if group is not None and not dist.is_available():
            raise InputError("a group was given, but this build of torch has no torch.distributed.")
        if group is not None and isinstance(group, dist.DeviceMesh):
            if group.ndim != 1:
                names = group.mesh_dim_names or ("name",)
                named = "" if group.mesh_dim_names else " (make it with mesh_dim_names)"
                raise InputError(
                    f"group must be one dimension of a device mesh, but this one has "
                    f"{group.ndim}: take one of them, such as mesh[{names[0]!r}]{named}."
                )
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                raise InputError(
                    "this process is not in the given group; only its members may call this."
                )
            raise InputError(
                "group must be a torch.distributed process group, one dimension of a DeviceMesh, "
                f"or None for all processes, not a {type(group).__name__}."
            )
        self.group: Any = group
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise InputError(
                    "a group was given, but torch.distributed is not initialized (any more): call "
                    "init_process_group first."
                )
            if _under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
                raise InputError(
                    f"torchrun started {os.environ['WORLD_SIZE']} processes, but they are no group "
                    "yet: call torch.distributed.init_process_group first, or work inside of "
                    "cumulant.distributed.launched()."
                )
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError(
                "this process is not in the given group; only its members may call this."
            )

    @classmethod
    def solo(cls) -> Ranks:
        """This process alone, whatever groups there are."""
        me = cls.__new__(cls)
        me.rank, me.size, me.group = 0, 1, None
        return me

    def __repr__(self) -> str:
        return f"Ranks(rank {self.rank} of {self.size})"

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.size == 1

    @contextmanager
    def _talking(self, what: str, sent: float | None = None) -> Generator[None]:
        if sent is not None:
            _count(sent)
        started = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            took = time.monotonic() - started
            said = re.sub(r"^\[\S*\]\s*", "", str(error).strip().splitlines()[0])[:200]
            if "timed out" in said.lower():
                why = (
                    "the group's timeout expired while waiting for another rank, which is stalled, "
                    "slow (then give the group a longer timeout), has died unnoticed,"
                )
            else:
                why = "another rank has died or left,"
            raise GroupError(
                f"{what} failed on rank {self.rank} of {self.size} after {took:.1f} s: {why} or is "
                "in another call than this one (ranks must make the same calls in the same order, "
                "with the same group). The group cannot be used any more; start again. torch says: "
                f"{said}"
            ) from error

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        return self._reduced(x, dist.ReduceOp.SUM, "a sum over ranks")

    def largest(self, x: Tensor) -> Tensor:
        """The entrywise maximum over ranks, on every rank."""
        return self._reduced(x, dist.ReduceOp.MAX, "a maximum over ranks")

    def _reduced(self, x: Tensor, how: Any, what: str) -> Tensor:
        if self.alone:
            return x.clone()
        out = x.contiguous().clone()
        with self._talking(what, 2 * (self.size - 1) / self.size * _size_of(out)):
            _calls.all_reduce(out, how, group=self.group)
        return out

    def gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows of all ranks, in their order, on every rank; rank r brings ``rows[r]``.

        Uneven parts are padded to the longest, which is what a rank then sends.
        """
        if self.alone:
            return x.clone()
        most = max(rows)
        part = _front(x, most)
        out = part.new_empty(self.size * most, *part.shape[1:])
        with self._talking("an all-gather", (self.size - 1) * _size_of(part)):
            _all_gather(out, part, group=self.group)
        if min(rows) < most:
            out = torch.cat([out[r * most : r * most + n] for r, n in enumerate(rows)])
        return out.movedim(0, -2)

    def scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows of this rank in the sum over ranks; the other way round than `gather`.

        Everybody's rows are sent to them and added up there, in the order of ranks: what a
        reduce-scatter should send (gloo's sends twice that), without padding.
        """
        if self.alone:
            return x.clone()
        sent = x.movedim(-2, 0).contiguous()
        own = rows[self.rank]
        out = sent.new_empty(self.size * own, *sent.shape[1:])
        row = _size_of(sent[:1]) if len(sent) else 0
        with self._talking("a sum of rows", (sum(rows) - own) * row):
            _calls.all_to_all_single(out, sent, [own] * self.size, list(rows), group=self.group)
        return torch.unflatten(out, 0, (self.size, own)).sum(0).movedim(0, -2)

    def pass_on(self, tensors: Sequence[Tensor], rows: int) -> Callable[[], list[Tensor]]:
        """Send to the next rank and receive from the one before, which has so many rows.

        It starts immediately and continues in the background; the returned function waits for it.
        """
        sent = [x.contiguous() for x in tensors]
        got = [x.new_empty(*x.shape[:-2], rows, x.shape[-1]) for x in sent]
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        what, size = "passing keys around the ring", sum(map(_size_of, sent))
        with self._talking(what, size):
            there = (dist.P2POp(dist.isend, x, None, self.group, group_peer=after) for x in sent)
            back = (dist.P2POp(dist.irecv, x, None, self.group, group_peer=before) for x in got)
            ops = [op for op in (*there, *back) if op.tensor.numel()]
            works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> list[Tensor]:
            with self._talking(what):
                for work in works:
                    work.wait()
            sent.clear()
            return got

        return wait

    @eager
    def agree(
        self, what: str, facts: Callable[[], Facts], *, differ: Sequence[str] = ()
    ) -> dict[str, list[int]]:
        """Compare what the ranks were given before anything is sent that could not be undone.

        Args:
            what: the call; all ranks must be in the same one.
            facts: checks this rank's input and describes it. If it raises, every rank stops: here
                with that error, elsewhere with one that says so.
            differ: facts that are integers and need not be equal on all ranks, at most four.

        Returns:
            The facts named by `differ`, one number for each rank.
        """
        error: Exception | None = None
        given: Facts = {}
        try:
            given = facts()
        except Exception as problem:
            error = problem
        own = [int(given[name]) for name in differ if name in given]  # pyright: ignore[reportArgumentType]
        if self.alone:
            if error is not None:
                raise error
            return {name: [number] for name, number in zip(differ, own, strict=True)}
        shared = {name: x for name, x in given.items() if name not in differ}
        rows = self._compared(what, error is not None, digest(shared), own)
        if len({r[0] for r in rows}) > 1:
            calls = ", ".join(f"rank {i} in {x}" for i, x in enumerate(self.objects(what)))
            raise GroupError(
                f"the ranks are in different calls: {calls}. All ranks of a group must make the "
                "same calls in the same order."
            )
        if any(r[1] for r in rows):
            self._stopped(what, error)
        if len({r[2] for r in rows}) > 1:
            self._differing(what, shared)
        return {name: [r[3 + k] for r in rows] for k, name in enumerate(differ)}

    def _compared(self, what: str, refused: bool, facts: int, own: list[int]) -> list[list[int]]:
        """One row of numbers from every rank."""
        if len(own) > _DIFFER:
            raise RuntimeError(f"{what} lets ranks differ in more than {_DIFFER} numbers")
        numbers = [zlib.crc32(what.encode()), int(refused), facts, *own]
        row = torch.tensor(numbers + [0] * (COMPARED - len(numbers)), device=self.device)
        table = row.new_empty(self.size * COMPARED)
        with self._talking(f"{what}: comparing input", (self.size - 1) * _size_of(row)):
            _all_gather(table, row, group=self.group)
        return tolist(table.reshape(self.size, COMPARED))

    def _stopped(self, what: str, error: Exception | None) -> NoReturn:
        """Some rank has refused its input: each says its own error, or whose it was."""
        reasons = self.objects(None if error is None else str(error)[:400])
        if error is not None:
            raise error
        said = "; ".join(f"rank {i}: {x}" for i, x in enumerate(reasons) if x is not None)
        raise GroupError(
            f"{what}: another rank refused its input, so nothing was computed here (rank "
            f"{self.rank}) either. It says: {said}"
        )

    def _differing(self, what: str, shared: Facts) -> NoReturn:
        """The first fact that differs, with what it is on each rank."""
        everyone: list[Facts] = self.objects(dict(shared))
        names = dict.fromkeys(name for facts in everyone for name in facts)
        for name in names:
            values = [facts.get(name) for facts in everyone]
            if len({repr(x) for x in values}) > 1:
                parts = ", ".join(f"{told(x)} on rank {i}" for i, x in enumerate(values))
                raise InputError(f"{what}: ranks must agree on {name}, but it is {parts}.")
        raise InputError(f"{what}: ranks describe their input in different orders.")

    def checked(
        self, what: str, make: Callable[[], _T], facts: Callable[[_T], Facts] = _none
    ) -> _T:
        """What `make` returns; if it raises on one rank, every rank stops, as in `agree`.

        `facts` of it must be equal on all ranks.
        """
        if self.alone:
            return make()
        made: list[_T] = []

        def check() -> Facts:
            made.append(make())
            return facts(made[0])

        self.agree(what, check)
        return made[0]

    @property
    def device(self) -> torch.device:
        """Where small messages live: on the processor if the group talks there."""
        if self.alone or "cpu" in str(dist.get_backend_config(self.group)):
            return torch.device("cpu")
        return torch.device(torch.accelerator.current_accelerator() or "cpu")

    def objects(self, given: Any) -> list[Any]:
        """One small Python object of every rank, in their order, on every rank."""
        if self.alone:
            return [given]
        out: list[Any] = [None] * self.size
        with self._talking("exchanging facts"):
            _calls.all_gather_object(out, given, group=self.group)
        return out


def _front(x: Tensor, rows: int) -> Tensor:
    """Rows first, contiguous, padded to so many."""
    return _padded(x.movedim(-2, 0), rows).contiguous()


def _padded(x: Tensor, rows: int) -> Tensor:
    more = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(more, *x.shape[1:])]) if more else x


def process_rank() -> int:
    """The rank of this process among all; 0 where there is no group, or none yet."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if _under_torchrun() else 0


def _under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


@contextmanager
def launched(timeout: float = 600.0) -> Generator[Ranks]:
    """The processes that ``torchrun`` started, as a group while the context is open.

    Outside of torchrun, a group of one. A group that is there already is used and left as it is.

    Args:
        timeout: seconds after which a rank that waits for another gives up with a `GroupError`.
    """
    if not _under_torchrun() or not dist.is_available() or dist.is_initialized():
        yield Ranks()
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=min(timeout, MEETING)))
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the processes did not find each other: "
            f"{str(error).strip().splitlines()[0][:200]}. Start them with torchrun; where it "
            "restarts them itself, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 must be in its environment."
        ) from error
    patient = timedelta(seconds=timeout)
    group = _calls.new_group(timeout=patient) if timeout > MEETING else None
    try:
        yield Ranks(group)
    finally:
        dist.destroy_process_group()
