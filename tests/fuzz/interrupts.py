"""Ctrl-C at random moments while contexts are entered, used and left: nothing may stay behind.

    python tests/fuzz/interrupts.py --rounds 5000 --seed 0

Half of the rounds raise KeyboardInterrupt from a trace function, where CPython itself could deliver
a signal: at the start of a function, after a call, at a backward jump. Every such moment of our
files, and of torch's registration of hooks, is equally likely, however short. The other half use a
timer and a real signal, so that every moment counts by its length, torch's included. A real signal
can also spoil what is not ours (torch's ``no_grad``, an import): run this in its own process.
"""

from __future__ import annotations

import argparse
import dis
import gc
import inspect
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_utils import AttentionInterface

import cumulant as cm

DELIVERS = ("RESUME", "CALL", "JUMP_BACKWARD")
FILES = ("cumulant/core", "lens/observing", "lens/stack", "lens/sensitivity", "attention/sdpa")
FILES += ("fuzz/interrupts",)
FUNCTIONS = ("register_forward_hook", "register_forward_pre_hook", "effects", "attached")
TARGETS = (
    (F, "scaled_dot_product_attention"),
    (F, "multi_head_attention_forward"),
    (AttentionInterface, "get_interface"),
    (torch.backends.mha, "get_fastpath_enabled"),
)
ORIGINALS = [vars(owner)[name] for owner, name in TARGETS]
PATIENCE = 60.0


class Bare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Subject:
    """A small model, what it is called with, its output, and how many rows its table has."""

    def __init__(self, model: nn.Module, given: dict[str, Any], rows: int) -> None:
        self.model, self.given, self.rows = model.eval(), given, rows
        self.expected = self.output()

    def output(self) -> torch.Tensor:
        with torch.no_grad():
            out = self.model(**self.given)
        return out if isinstance(out, torch.Tensor) else out[0]


@cache
def subjects() -> list[Subject]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 16, "num_hidden_layers": 1}
    llama = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    return [
        Subject(Bare(), {"x": torch.randn(1, 2, 4, 8)}, 8),
        Subject(encoder, {"src": torch.randn(1, 4, 8)}, 8),
        Subject(llama, {"input_ids": torch.arange(4)[None]}, 8),
    ]


def scenario(subject: Subject, choose: random.Random) -> Callable[[], None]:
    """A program of contexts that are entered, used, and left in some order."""
    kinds = [choose.choice(["observe", "layers", "replaced"]) for _ in range(choose.randint(1, 3))]
    order = choose.choice(["nested", "first", "stack"])

    def context(kind: str) -> Any:
        if kind == "replaced":
            return cm.sdpa_replaced()
        return cm.lens.observe(subject.model, k90=False, spectrum=False, layers=kind == "layers")

    def nested(rest: list[str]) -> None:
        if not rest:
            subject.output()
            return
        with context(rest[0]):
            nested(rest[1:])

    def stacked() -> None:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(context(kind))
            subject.output()

    def first_out() -> None:
        contexts = [context(kind) for kind in kinds]
        try:
            for x in contexts:
                x.__enter__()
            subject.output()
        finally:
            for x in contexts:
                x.__exit__(*sys.exc_info())

    run = {"nested": lambda: nested(kinds), "first": first_out, "stack": stacked}[order]
    run.__name__ = f"{type(subject.model).__name__} {order} {kinds}"
    return run


@cache
def _instructions(code: CodeType) -> dict[int, tuple[str, int]]:
    """By offset: the name of an instruction, and which handler catches what it raises."""
    table = dis.Bytecode(code).exception_entries
    return {
        x.offset: (
            x.opname,
            next((e.target for e in table if e.start <= x.offset < e.end), -1),
        )
        for x in dis.get_instructions(code)
    }


class Tracer:
    """Counts the moments at which a signal could arrive, and raises at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count, self.where = at, 0, ""
        self._last: dict[FrameType, int] = {}

    def _moment(self, frame: FrameType) -> None:
        self.count += 1
        if self.count == self.at:
            self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            self._last.clear()
            raise KeyboardInterrupt

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        ours = any(name in code.co_filename for name in FILES) or code.co_name in FUNCTIONS
        if event != "call" or not ours or code.co_name == "attack":
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if not code.co_flags & inspect.CO_GENERATOR:  # closing one looks like calling it
            self._moment(frame)
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            instructions = _instructions(frame.f_code)
            last = self._last.get(frame)
            self._last[frame] = frame.f_lasti
            if last is not None:
                name, handler = instructions[last]
                # A signal is raised by the instruction that has just run.
                if name.startswith(DELIVERS) and handler == instructions[frame.f_lasti][1]:
                    self._moment(frame)
        elif event == "return":
            self._last.pop(frame, None)
        return self._inside


def traced(run: Callable[[], None], at: int | None) -> Tracer:
    tracer, before = Tracer(at), sys.gettrace()
    sys.settrace(tracer)
    try:
        run()
    finally:
        sys.settrace(before)
        tracer._last.clear()
    return tracer


def attack(run: Callable[[], None], choose: random.Random, timer: bool) -> str | None:
    """Interrupt a program once; says what is wrong with how the interrupt itself fared."""
    if timer:
        start = time.perf_counter()
        run()
        delay = choose.uniform(0, 1.1) * (time.perf_counter() - start)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
            run()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return None
    at = choose.randint(1, traced(run, None).count)
    try:
        traced(run, at)
    except KeyboardInterrupt:
        return None
    return f"the interrupt at moment {at} was swallowed"


def residue() -> list[str]:
    """What is not as it was, or does not work any more."""
    found = [
        f"{name} is not what it was"
        for (owner, name), original in zip(TARGETS, ORIGINALS, strict=True)
        if vars(owner)[name] is not original
    ]
    for subject in subjects():
        found += [
            f"{name!r} has {kind}: {hooks}"
            for name, module in subject.model.named_modules()
            for kind, hooks in vars(module).items()
            if kind.startswith(("_forward_hooks", "_forward_pre_hooks")) and hooks
        ]
    return found


def sound(subject: Subject) -> list[str]:
    """Whether contexts work in this thread and in another, and outside of them torch's own."""
    found: list[str] = []

    def works() -> None:
        if not torch.equal(subject.output(), subject.expected):
            found.append("the model's output has changed")
        with cm.lens.observe(subject.model, k90=False, spectrum=False) as lens:
            with cm.sdpa_replaced():
                q = torch.ones(1, 1, 8, 4)
                torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, q, q), (q,), (q,))
            subject.output()
        if len(lens.table()) != subject.rows:
            found.append(f"a table has {len(lens.table())} rows instead of {subject.rows}")

    def elsewhere() -> None:
        try:
            works()
        except Exception as problem:
            found.append(f"in another thread: {problem!r}")

    thread = threading.Thread(target=elsewhere, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        return ["another thread waits for ever"]
    works()
    return found


def fuzz(rounds: int, seed: int, first: int = 0) -> str | None:
    """Run rounds `first`, ...; returns a line that tells of the first failure."""
    for k in range(first, first + rounds):
        choose = random.Random(f"{seed}/{k}")
        subject = choose.choice(subjects())
        run = scenario(subject, choose)
        problem = attack(run, choose, timer=choose.random() < 0.5)
        torch.set_grad_enabled(True)  # the signal may have met torch's own no_grad while leaving
        if residue():  # an ExitStack keeps the exception, and what it held, in a cycle
            gc.collect()
        problems = ([] if problem is None else [problem]) + (residue() or sound(subject))
        if problems:
            again = f"python tests/fuzz/interrupts.py --seed {seed} --first {k} --rounds 1"
            return f"{run.__name__}: {'; '.join(problems)}\n{again}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    given = parser.parse_args()
    say = lambda line: print(line, flush=True)
    say(f"seed {given.seed}, {given.rounds} rounds")
    start = time.perf_counter()
    failure = fuzz(given.rounds, given.seed, given.first)
    say(failure or f"nothing stayed behind; {time.perf_counter() - start:.0f} s")
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
