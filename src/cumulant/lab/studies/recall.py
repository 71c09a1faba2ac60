"""How many patterns a kernel recalls: capacity against dimension, without training (T21, T22, T36).

N patterns of d random signs are keys and values. A query is a pattern with some signs flipped; one
step of attention and the sign of the result recall it. The capacity is the N at which the step no
longer halves the errors, at the best temperature of a grid. ``mismatched`` gives every key the
value of another, which nothing can recall. Signal against noise predicts d^p for
a kernel that grows as s^p, and e^(c d) for exp, where c is the rate at which a random pattern comes
as near to the query as the right one: ((1+m) log(1+m) + (1-m) log(1-m))/2, m = 1 - 2 flips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cumulant.core.checks import real, whole
from cumulant.lab.studies.training import different, drawn
from cumulant.nn import similarity

__all__ = ["Recall", "predicted_rate"]


def predicted_rate(flips: float) -> float:
    """c of the capacity e^(c d) of exponential attention.

    >>> round(predicted_rate(0.1), 3)
    0.368
    """
    m = 1 - 2 * flips
    return ((1 + m) * math.log1p(m) + (1 - m) * math.log1p(-m)) / 2


class Recall:
    """Capacity at one dimension after another; a step is a dimension."""

    SETTINGS: Mapping[str, Any] = {
        **{"kernel": "exp", "dims": [8, 12, 16, 24, 32], "flips": 0.1, "queries": 128},
        **{"most": 65536, "betas": [0.5, 1.0, 2.0, 4.0, 8.0], "steps": 0, "mismatched": False},
    }
    objective = "capacity"
    limit = worst = math.inf
    every = 1

    def __init__(self, settings: Mapping[str, Any], *, seed: int, rate: float, beta: float) -> None:
        self.settings, self.seed = settings, seed
        self.kernel = similarity(settings["kernel"])
        self.dims: list[int] = settings["dims"]
        self.steps = len(self.dims)
        self.found: list[list[float]] = []

    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        """
        Raises:
            InputError: settings with which nothing can be recalled.
        """
        similarity(settings["kernel"])
        different("recall", "dims", settings["dims"], whole=True)
        different("recall", "betas", settings["betas"])
        real("recall", "flips", settings["flips"], least=0.0, most=0.49)
        whole("recall", "queries", settings["queries"], 1)
        whole("recall", "most", settings["most"], 2)

    @staticmethod
    def quantities(settings: Mapping[str, Any]) -> list[str]:
        """What `finish` returns."""
        found = ["capacity", "points", *(f"capacity_{d:g}" for d in settings["dims"])]
        found += ["exponent", "exponent_error", "growth_rate", "growth_rate_error"]
        return [*found, "exponential_better"]

    def step(self, n: int) -> float:
        d = self.dims[n]
        beyond = bool(self.found) and self.found[-1][1] >= self.settings["most"]
        self.found.append([d, self.settings["most"] if beyond else self._capacity(d)])
        return 0.0

    def measure(self) -> dict[str, float]:
        d, capacity = self.found[-1]
        return {"dimension": d, "capacity": capacity}

    def finish(self) -> dict[str, float]:
        """Exponent of a power of d, rate of an exponential of d, and the error of either fit."""
        told = {f"capacity_{d:g}": n for d, n in self.found}
        points = [(d, n) for d, n in self.found if 3 <= n < self.settings["most"]]
        if len(points) < 3:
            return {"capacity": self.found[-1][1], "points": len(points), **told}
        log_n = np.log([n for _, n in points])
        numbers: dict[str, float] = {"capacity": points[-1][1], "points": len(points), **told}
        dims = [d for d, _ in points]
        for name, x in {"exponent": np.log(dims), "growth_rate": np.array(dims)}.items():
            slope, error = _line(x, log_n)
            numbers |= {name: slope, f"{name}_error": error}
        numbers["exponential_better"] = numbers["exponent_error"] - numbers["growth_rate_error"]
        return numbers

    def state(self) -> dict[str, Any]:
        return {"found": self.found}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.found = list(state["found"])

    def _capacity(self, d: int) -> float:
        """Where the share of right signs falls below halfway, between two sizes of a grid."""
        enough = 1 - self.settings["flips"] / 2
        size, last = 2.0, (1.0, 1.0)
        while size <= self.settings["most"]:
            right = max(self._right(d, int(size), beta) for beta in self.settings["betas"])
            if right < enough:
                share = (last[1] - enough) / max(1e-9, last[1] - right)
                return math.exp((1 - share) * math.log(last[0]) + share * math.log(size))
            last, size = (size, right), size * math.sqrt(2)
        return float(self.settings["most"])

    def _right(self, d: int, count: int, beta: float) -> float:
        """Share of right signs after a step, over a few sets of patterns if they are small."""
        asked = min(count, self.settings["queries"])
        sets = max(1, self.settings["queries"] // asked)
        source = drawn(self.seed, 7919 * d + count)
        signs = torch.randint(0, 2, (sets, count, d), generator=source)
        patterns = (2 * signs - 1).float()
        flipped = torch.rand(sets, asked, d, generator=source) < self.settings["flips"]
        queries = torch.where(flipped, -patterns[:, :asked], patterns[:, :asked])
        values = patterns.roll(1, 1) if self.settings["mismatched"] else patterns
        recalled = self.kernel(queries, patterns, values, beta=beta)
        return float((recalled * patterns[:, :asked] > 0).float().mean())


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Slope of the least squares line, and the root mean square of what it leaves."""
    a, b = x - x.mean(), y - y.mean()
    slope = float(a @ b / (a @ a))
    return slope, math.sqrt(float(((b - slope * a) ** 2).mean()))
