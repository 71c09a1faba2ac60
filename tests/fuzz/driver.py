"""What every fuzzer shares: rounds from a seed, and the command that repeats each failure."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import NamedTuple

Check = Callable[[int], str | None]


def run(check: Check, file: str, rounds: int, seed: int) -> list[str]:
    """The failures of `rounds` cases from this seed on, each with the command that repeats it."""
    found = ((each, check(each)) for each in range(seed, seed + rounds))
    again = f"python tests/fuzz/{file}.py --rounds 1 --seed"
    return [f"{wrong}\n  {again} {each}" for each, wrong in found if wrong is not None]


class Options(NamedTuple):
    """How many cases, and from which seed on."""

    rounds: int
    seed: int


def options(description: str | None, rounds: int) -> Options:
    """Read from the command line; the seed is drawn by default, and said."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    sys.stdout.write(f"seed {given.seed}, {given.rounds} rounds\n")
    sys.stdout.flush()
    return Options(given.rounds, given.seed)


def main(check: Check, file: str, description: str | None, rounds: int) -> int:
    """The command: exit code 1 if a case failed."""
    given = options(description, rounds)
    failures = run(check, file, given.rounds, given.seed)
    sys.stdout.write("".join(f"{x}\n" for x in failures))
    sys.stdout.write(f"{len(failures)} failures\n")
    return 1 if failures else 0
