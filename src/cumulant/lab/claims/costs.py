"""How long claims take, so that the most expensive begin and the time left can be told."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cumulant.core.progress import Progress, ProgressCallback
from cumulant.lab.claims.claim import Claim
from cumulant.lab.workers import duration

__all__ = ["Pace", "by_cost", "cost"]

# CPU seconds, full and quick, of those that take more than the rest do.
SECONDS: dict[str, tuple[float, float]] = {
    "T37a": (100.0, 12.0),
    "T38": (77.0, 3.0),
    "T41a": (63.0, 6.0),
    "T39": (39.0, 3.0),
    "norms": (31.0, 0.5),
    "T35": (25.0, 3.0),
    "T34": (22.0, 1.6),
    "T31": (19.0, 1.0),
    "T22": (16.0, 0.7),
    "T40": (12.0, 2.4),
    "T17": (6.0, 1.4),
    "T29": (5.0, 0.7),
    "T41b": (4.0, 0.8),
    "T23": (3.0, 1.2),
    "mondeq": (2.4, 0.5),
    "T30": (2.1, 0.5),
    "T20": (2.1, 0.6),
}
REST = (0.3, 0.1)
LONG = 5.0  # seconds from which times are compared with what was expected


def cost(name: str, quick: bool) -> float:
    """Expected seconds of a claim on one processor."""
    return SECONDS.get(name, REST)[quick]


def by_cost(claims: Sequence[Claim], quick: bool) -> list[Claim]:
    """The most expensive first, otherwise in their order."""
    return sorted(claims, key=lambda claim: -cost(claim.id, quick))


class Pace:
    """Tells which claims run and how long the others will take, by what those so far took.

    Args:
        total: claims of the ledger, of which those in ``left`` are to be run.
        left: claims to run.
        quick: small experiments.
        processes: claims at once.
        progress: is told.
    """

    def __init__(
        self,
        total: int,
        left: Sequence[Claim],
        quick: bool,
        processes: int,
        progress: ProgressCallback,
    ) -> None:
        self.total, self.processes, self.progress = total, processes, progress
        self.left = {claim.id: cost(claim.id, quick) for claim in left}
        self.running: dict[str, float] = {}
        self.expected = self.taken = 0.0

    def begins(self, name: str) -> None:
        self.running[name] = time.monotonic()
        self.tell()

    def ends(self, row: Mapping[str, Any]) -> None:
        self.running.pop(row["id"], None)
        self.expected += self.left.pop(row["id"])
        self.taken += row["seconds"]
        self.tell()

    def tell(self) -> None:
        done = self.total - len(self.left)
        names = ", ".join(self.running) or "starting"
        self.progress(Progress(done, self.total, f"about {duration(self.seconds())} left, {names}"))

    def seconds(self) -> float:
        """Expected time left: by what claims took so far, and those that run by now, if longer."""
        now = time.monotonic()
        spent = {name: now - begun for name, begun in self.running.items()}
        late = [x / self.left[n] for n, x in spent.items() if self.left[n] > LONG]
        slower = max([self.taken / self.expected if self.expected > LONG else 1.0, *late])
        rest = {n: max(0.0, slower * x - spent.get(n, 0.0)) for n, x in self.left.items()}
        return max(sum(rest.values()) / self.processes, max(rest.values(), default=0.0))
