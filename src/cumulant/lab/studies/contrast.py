"""Contrastive learning of digits with dot products or cosines: norms, loss, probe accuracy (T42).

Numbers of a run: `norm` of the embeddings of test pictures and `growth`, its ratio to the norm
before training; `late`, the slope of log norm against log step over the second half; `error`, the
share of test pictures that a linear probe of the encoder gets wrong; `loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample, one_hot

from cumulant.contrastive import info_nce
from cumulant.core.checks import real, whole
from cumulant.core.errors import InputError
from cumulant.core.typed import functions, linalg
from cumulant.lab.studies.training import Training, drawn, made

__all__ = ["Contrast"]

_PARTS = {"training": slice(0, 1000), "validation": slice(1000, 1300), "test": slice(1300, None)}


class Contrast:
    """Two views of a picture are to be alike, and unlike the views of the others."""

    SETTINGS: Mapping[str, Any] = {
        **{"similarity": "cosine", "steps": 300, "every": 20, "batch": 128, "width": 64},
        **{"clip": 0.0, "decay": 0.0},
    }
    objective = "error"
    worst = 0.9
    limit = 1e6

    def __init__(self, settings: Mapping[str, Any], *, seed: int, rate: float, beta: float) -> None:
        s = settings
        self.settings, self.seed, self.temperature = s, seed, 1 / beta
        self.pictures, self.labels = _digits()
        width = int(s["width"])
        self.model = cast(nn.Sequential, made(seed, lambda: _network(width)))
        self.steps, self.every = int(s["steps"]), int(s["every"])
        self.training = Training(
            self.model, rate=rate, steps=self.steps, clip=s["clip"], decay=s["decay"]
        )
        self.start = self._norm()
        self.norms: list[list[float]] = []
        self.loss = math.nan
        self.done = 0

    @staticmethod
    def check(settings: Mapping[str, Any]) -> None:
        """
        Raises:
            InputError: settings with which there is no run.
        """
        for name, least in {"steps": 1, "every": 1, "width": 1, "batch": 2}.items():
            whole("contrast", name, settings[name], least)
        for name in ("clip", "decay"):
            real("contrast", name, settings[name], least=0.0)
        if settings["similarity"] not in ("cosine", "dot"):
            given = settings["similarity"]
            raise InputError(f"contrast: similarity must be cosine or dot, not {given!r}.")

    @staticmethod
    def quantities(settings: Mapping[str, Any]) -> list[str]:
        """What `finish` returns."""
        return ["error", "norm", "loss", "growth", "late", "validation", "accuracy"]

    def step(self, n: int) -> float:
        source = drawn(self.seed, n)
        rows = torch.randperm(1000, generator=source)[: self.settings["batch"]]
        x = self.pictures[_PARTS["training"]][rows]
        first, second = self.model(torch.cat([_views(x, source), _views(x, source)])).chunk(2)
        loss = info_nce(
            first,
            second,
            temperature=self.temperature,
            similarity=self.settings["similarity"],
            symmetric=True,
        )
        self.training.update(loss, n)
        self.loss, self.done = float(loss.detach()), n + 1
        return self.loss

    def measure(self) -> dict[str, float]:
        norm = self._norm()
        self.norms.append([self.done, norm])
        return {"error": self._probe("validation"), "norm": norm, "loss": self.loss}

    def finish(self) -> dict[str, float]:
        found = {"error": self._probe("test"), "norm": self._norm(), "loss": self.loss}
        late = [(n, x) for n, x in self.norms if n >= self.steps / 2]
        slope = 0.0
        if len(late) > 1:
            logs = np.log(np.array(late))
            slope = float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])
        growth = found["norm"] / self.start
        told = {"validation": self._probe("validation"), "accuracy": 1 - found["error"]}
        return {**found, "growth": growth, "late": slope, **told}

    def state(self) -> dict[str, Any]:
        about = {"start": self.start, "norms": self.norms, "loss": self.loss, "done": self.done}
        return {**self.training.state(), **about}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.training.restore(state)
        self.start, self.norms = state["start"], list(state["norms"])
        self.loss, self.done = state["loss"], state["done"]

    @torch.no_grad()
    def _norm(self) -> float:
        """Mean norm of the embeddings of test pictures, before any projection on the sphere."""
        return float(linalg.vector_norm(self.model(self.pictures[1300:]), dim=-1).mean())

    @torch.no_grad()
    def _probe(self, part: str) -> float:
        """Error of ridge regression from what the encoder says to the digits."""
        encoder = cast(Callable[[Tensor], Tensor], self.model[0])
        x = encoder(self.pictures).double()
        x = (x - x[:1000].mean(0)) / x[:1000].std(0).clamp_min(1e-6)
        known, targets = x[:1000], one_hot(self.labels[:1000], 10).double() - 0.1
        inverse = known.mT @ known + 10.0 * torch.eye(x.shape[-1], dtype=x.dtype)
        said = (x @ linalg.solve(inverse, known.mT @ targets)).argmax(-1)
        return float((said != self.labels)[_PARTS[part]].double().mean())


def _network(width: int) -> nn.Module:
    """The encoder, whose output the probe reads, and the head, whose output the loss compares."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    )
    return nn.Sequential(
        encoder, nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, width))
    )


def _views(x: Tensor, source: torch.Generator) -> Tensor:
    """Each picture turned, scaled, shifted and with noise, at random."""
    n = len(x)
    angle = 0.25 * torch.randn(n, generator=source)
    scale = 1 + 0.15 * torch.randn(n, generator=source)
    shift = 0.25 * (2 * torch.rand(n, 2, generator=source) - 1)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    turn = torch.stack([cos, -sin, shift[:, 0], sin, cos, shift[:, 1]], -1).view(n, 2, 3)
    grid = affine_grid(turn, list(x.shape), align_corners=False)
    noise = torch.randn(x.shape, generator=source)
    return grid_sample(x, grid, align_corners=False) + 0.1 * noise


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """Pictures ``(1797, 1, 8, 8)`` of scikit-learn's digits in a random order, and labels."""
    try:
        datasets: Any = import_module("sklearn.datasets")
    except ImportError:
        raise InputError("the digits need scikit-learn: pip install scikit-learn.") from None
    found = datasets.load_digits()
    order = torch.randperm(len(found.target), generator=drawn(7, 0))
    pictures = functions.from_numpy(found.images).float()[order, None] / 8 - 1
    return pictures, functions.from_numpy(found.target).long()[order]
