"""Attention over sharded keys: what it costs alone, what it sends, how long it takes."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from math import inf
from typing import Any

import torch
from torch import Tensor

import cumulant as cm
from cumulant.core.progress import ProgressCallback, counted
from cumulant.distributed import Ranks, ShardedKeys, cost, seconds, traffic
from cumulant.distributed.cost import Step, Way
from cumulant.lab.bench.crew import (
    Crew,
    end_with_parent,
    private_network,
    sent_on_loopback,
    throttle,
)
from cumulant.lab.bench.timing import Row, interleave, row

__all__ = ["run"]

_log = logging.getLogger(__name__)
_WAYS: tuple[Way, ...] = ("replicated", "gather", "ring")
_STEPS: tuple[Step, ...] = ("forward", "training step")
_D = 64
_MEGABITS = 200

Shape = tuple[int, int]


# What workers run. A step is prepared first, so that it alone is timed and counted.
_prepared: list[Callable[[], object]] = []


def _part(total: int, ranks: Ranks) -> int:
    return total // ranks.size + (ranks.rank < total % ranks.size)


def _stepper(
    make: Callable[..., cm.Attended], inputs: list[Tensor], step: Step
) -> Callable[[], None]:
    """A step of `make(*inputs).mean`, as a function without arguments."""
    for x in inputs:
        x.requires_grad_(step == "training step")

    def go() -> None:
        mean = make(*inputs).mean
        if step == "training step":
            torch.autograd.grad(mean, inputs, torch.ones_like(mean))

    return go


def prepare(way: Way, shape: Shape, step: Step) -> None:
    """Make inputs and warm up."""
    ranks, (M, N) = Ranks(), shape
    m = M if way == "replicated" else _part(M, ranks)
    random = torch.Generator().manual_seed(0 if way == "replicated" else ranks.rank)
    sizes = m, _part(N, ranks), _part(N, ranks)
    inputs = [torch.randn(n, _D, generator=random) for n in sizes]
    how: Any = {} if way == "replicated" else {"queries": "sharded", "route": way}

    def sharded(query: Tensor, *_: Tensor) -> cm.Attended:
        return cm.attend(query, shard)

    _prepared[:] = [_stepper(sharded, inputs, step)]
    shard = ShardedKeys(inputs[1], inputs[2], **how)  # now that they require gradients
    _prepared[0]()


def go() -> tuple[float, float]:
    """Take the prepared step; bytes that this rank sent, and its processor time."""
    start = time.process_time()
    with traffic() as sent:
        _prepared[0]()
    return sent.bytes, time.process_time() - start


def _sharded(query: Tensor, key: Tensor, value: Tensor) -> cm.Attended:
    return cm.attend(query, ShardedKeys(key, value))


def alone(heads: int, length: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds in a group of one, and without."""
    shape = heads, length, _D
    found: dict[str, dict[str, list[float]]] = {}
    for step in _STEPS:
        inputs = [torch.randn(shape) for _ in range(3)]
        cases = {
            "attend": _stepper(cm.attend, inputs, step),
            step: _stepper(_sharded, inputs, step),
        }
        found[step] = interleave(cases, rounds=rounds)
    return found


# What the leader does, in a process of its own so that it can have a network of its own.
def _label(shape: Shape, size: int) -> str:
    return f"{shape[0]} x {shape[1]} x {_D}, {size} rank{'s' * (size != 1)}"


def _volumes(crew: Crew, size: int, shape: Shape, watched: bool) -> Iterator[Row | str]:
    """Bytes counted, and bytes on the wire, against the formula; sums over ranks."""
    for way in _WAYS:
        for step in _STEPS:
            yield f"{_label(shape, size)}: bytes of {way}, {step}"
            crew.run(prepare, way, shape, step)
            before = sent_on_loopback() if watched else 0
            counted = sum(sent for sent, _ in crew.run(go))
            wire = sent_on_loopback() - before if watched else 0
            each = (cost(way, *shape, _D, _D, ranks=size, rank=r, step=step) for r in range(size))
            formula = sum(x.bytes for x in each)
            for name, found, at_most in (("counted", counted, 1.0), ("on the wire", wire, 1.1)):
                if found:
                    what = f"{way}, {step}, bytes {name}"
                    amounts = found / 1e3, formula / 1e3, found / formula
                    yield Row(_label(shape, size), what, "formula", *amounts, at_most, "kB")


def _times(one: Crew, crew: Crew, size: int, shape: Shape, rounds: int) -> Iterator[Row | str]:
    """A step on several ranks against the same step on one."""
    yield f"{_label(shape, size)}: time of a training step"
    for each in (one, crew):
        each.run(prepare, "replicated", shape, "training step")
    name, busy = "replicated, training step", dict[str, list[float]]()

    def stepping(who: str, crew: Crew) -> Callable[[], None]:
        return lambda: busy.setdefault(who, []).append(max(took for _, took in crew.run(go)))

    cases = {"one rank": stepping("one rank", one), name: stepping(name, crew)}
    took = interleave(cases, rounds=rounds)
    yield row(took, _label(shape, size), name, "one rank", 0.6 if size == 2 else inf)
    # Which more ranks than cores, and other work on the machine, do not spoil.
    label = f"{_label(shape, size)}, processor time of a rank"
    warm = {who: taken[1:] for who, taken in busy.items()}  # as `interleave` does
    yield row(warm, label, name, "one rank", 1.2 / size)


def _median(crew: Crew, way: Way, shape: Shape, rounds: int) -> float:
    crew.run(prepare, way, shape, "training step")
    taken = interleave({way: lambda: crew.run(go)}, rounds=rounds)[way]
    return statistics.median(taken)


def _throttled(one: Crew, crew: Crew, size: int, queries: int, rounds: int) -> Iterator[Row | str]:
    """Gather and ring over a slow link, on both sides of the crossover, against the model."""
    fast = (queries, 4 * queries)
    yield "how fast a rank computes, and how long a message takes"
    speed = cost("ring", *fast, _D, _D, step="training step").flops
    speed /= _median(one, "ring", fast, rounds)
    small = cost("gather", size, size, _D, _D, ranks=size, step="training step")
    latency = _median(crew, "gather", (size, size), 5 * rounds) / small.hops
    for shape, better in (((queries, queries // 8), "ring"), (fast, "gather")):
        label, taken = f"{_label(shape, size)}, {_MEGABITS} Mbit/s", dict[str, float]()
        for way in ("gather", "ring"):
            yield f"{label}: time of {way}"
            crew.run(prepare, way, shape, "training step")
            if not throttle(_MEGABITS):
                _log.warning("tc cannot throttle here; times over a slow link are left out")
                return
            taken[way] = _median(crew, way, shape, rounds)
            throttle(None)
            # All ranks share the one device, so each has its part of the rate.
            model = seconds(
                cost(way, *shape, _D, _D, ranks=size, step="training step"),
                bandwidth=_MEGABITS * 1e6 / 8 / size,
                flops=speed,
                latency=latency,
            )
            amounts = 1e3 * taken[way], 1e3 * model, taken[way] / model
            yield Row(label, f"{way}, training step", "model", *amounts, 1.25)
        worse = "gather" if better == "ring" else "ring"
        a, b = taken[better], taken[worse]
        yield Row(label, f"{better}, training step", worse, 1e3 * a, 1e3 * b, a / b, 1.0)


def _measured(rounds: int, quick: bool, private: bool) -> Iterator[Row | str]:
    few = max(3, rounds // 2)
    with ExitStack() as stack:
        one = stack.enter_context(Crew(1))
        heads, length = (2, 256) if quick else (8, 1024)
        yield f"{heads} x {length} x {_D}: a group of one"
        (found,) = one.run(alone, heads, length, 5 * rounds)
        for step in _STEPS:
            label = f"{heads} x {length} x {_D}, 1 rank"
            yield row(found[step], label, step, "attend", 1.05)
        for size in (2,) if quick else (2, 3, 4):
            with Crew(size) as crew:
                yield from _volumes(crew, size, (500, 1000) if quick else (2000, 5000), private)
                yield from _times(one, crew, size, (512, 2048) if quick else (2048, 16384), few)
                if size == 2 and private:
                    yield from _throttled(one, crew, size, 512 if quick else 2048, few)


def lead(rounds: int, quick: bool, private: bool) -> None:
    """Measure everything; a line of JSON for every row and before every measurement."""
    end_with_parent()
    if private:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for found in _measured(rounds, quick, private):
        sys.stdout.write(json.dumps(found if isinstance(found, str) else asdict(found)) + "\n")
        sys.stdout.flush()


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything; `progress` is called before every measurement."""
    prefix = private_network()
    if not prefix:
        _log.warning(
            "no network namespace can be made here (unshare, ip); bytes on the wire and times over "
            "a slow link are left out"
        )
    code = (
        f"from cumulant.lab.bench.distributed import lead; lead({rounds}, {quick}, {bool(prefix)})"
    )
    tick = counted(progress, 1 + 7 * (1 if quick else 3) + 5 * bool(prefix))
    rows: list[Row] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code],
            # torch warns that addresses of a private network have no names.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            for line in process.stdout or ():
                found = json.loads(line)
                if isinstance(found, str):
                    tick(found)
                else:
                    rows.append(Row(**found))
            process.wait()
        finally:  # its workers end with it
            process.kill()
            process.wait()
        errors.seek(0)
        said = errors.read()
    if process.returncode:
        raise RuntimeError(f"the workers failed:\n{said}")
    sys.stderr.write(said)
    return rows
