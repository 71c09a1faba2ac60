"""Positive random features (Performer) as a Monte Carlo estimate of e^G (T36).

exp(<q, k>) = E[a(q) a(k)] with a(x) = exp(<w, x> - |x|^2/2), w ~ N(0, I) (Choromanski et al.,
2021). The relative variance of one feature is e^(|q+k|^2) - 1, so the number of features needed
grows exponentially with the norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cumulant.attention import scaled_dot_product_attention
from cumulant.core.checks import real, whole
from cumulant.core.typed import linalg
from cumulant.lab.studies.training import different, drawn

__all__ = ["Features"]


class Features:
    """Errors with more and more features, at one product |q||k|; a step is a number of features."""

    SETTINGS: Mapping[str, Any] = {
        **{"product": 1.0, "width": 16, "keys": 128, "queries": 64, "repeats": 32, "steps": 0},
        "counts": [16, 64, 256, 1024, 4096],
    }
    objective = "error"
    limit = worst = math.inf
    every = 1

    def __init__(self, settings: Mapping[str, Any], *, seed: int, rate: float, beta: float) -> None:
        self.settings, self.seed = settings, seed
        self.counts: list[int] = settings["counts"]
        self.steps = len(self.counts)
        self.found: list[list[float]] = []
        source, d = drawn(seed, 0), settings["width"]
        radius = math.sqrt(settings["product"])

        def sphere(n: int) -> Tensor:
            return radius * normalize(torch.randn(n, d, generator=source).double(), dim=-1)

        self.query, self.key = sphere(settings["queries"]), sphere(settings["keys"])
        self.value = torch.randn(settings["keys"], d, generator=source).double()

    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        """
        Raises:
            InputError: settings with which there is nothing to estimate.
        """
        for name in ("width", "keys", "queries", "repeats"):
            whole("features", name, settings[name], 1)
        real("features", "product", settings["product"], least=0.0, most=300.0, open_at_least=True)
        different("features", "counts", settings["counts"], whole=True)

    @staticmethod
    def quantities(settings: Mapping[str, Any]) -> list[str]:
        """What `finish` returns."""
        told = [f"error_{m}" for m in settings["counts"]]
        return ["error", "slope", "theory_ratio", *told]

    def step(self, n: int) -> float:
        self.found.append([float(self.counts[n]), *self._errors(self.counts[n])])
        return 0.0

    def measure(self) -> dict[str, float]:
        count, error, kernel, predicted = self.found[-1]
        return {"features": count, "error": error, "kernel": kernel, "predicted": predicted}

    def finish(self) -> dict[str, float]:
        table = np.array(self.found)
        slope = np.polyfit(np.log(table[:, 0]), np.log(table[:, 1]), 1)[0]
        last = self.measure()
        told = {f"error_{int(m)}": e for m, e, *_ in self.found}
        ratio = last["kernel"] / last["predicted"]
        return {"error": last["error"], "slope": float(slope), "theory_ratio": ratio, **told}

    def state(self) -> dict[str, Any]:
        return {"found": self.found}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.found = list(state["found"])

    def _errors(self, count: int) -> tuple[float, float, float]:
        """Relative root mean square errors of the output and of the kernel, and the predicted one.

        The sum over pairs of squared relative errors of the kernel, whose expectation is known.
        """
        q, k, v = self.query, self.key, self.value
        exact = scaled_dot_product_attention(q, k, v, scale=1.0)
        kernel = (q @ k.mT).exp()
        squares = (q[:, None] + k).square().sum(-1)
        predicted = float((((squares.exp() - 1) / count).mean()).sqrt())
        output, relative = 0.0, 0.0
        repeats = self.settings["repeats"]
        for r in range(repeats):
            source = drawn(self.seed, 1000 * count + r)
            w = torch.randn(count, q.shape[-1], generator=source).double()
            a, b = (torch.exp(x @ w.mT - x.square().sum(-1, keepdim=True) / 2) for x in (q, k))
            estimate = a @ b.mT / count
            mean = (estimate @ v) / estimate.sum(-1, keepdim=True)
            gap = linalg.vector_norm(mean - exact) / linalg.vector_norm(exact)
            output += float(gap) ** 2 / repeats
            relative += float(((estimate / kernel - 1) ** 2).mean()) / repeats
        return math.sqrt(output), math.sqrt(relative), predicted
