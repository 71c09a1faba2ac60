"""What a fit was fitted to, and what follows from both: posterior, criteria, table, pictures."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.filtering.filters import filter
from cumulant.filtering.frames import Labels, ModeNames
from cumulant.filtering.model import SHAPES, SwitchingLinearGaussian
from cumulant.filtering.parameters import Coordinates
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.search import Problem
from cumulant.filtering.smoothing import Smoothed, smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cumulant.filtering.summary import Summary

__all__ = ["Evidence", "FitReport", "steps_given"]


class Evidence(NamedTuple):
    """The observations of a fit, how they were filtered, and which entries moved.

    ``given`` is the number of steps at the beginning that the likelihood takes as given;
    ``moving`` marks the entries of each free parameter that the fit could change.
    """

    observations: Tensor
    inputs: Tensor | None
    labels: Labels | None
    collapse: str | int
    given: int
    moving: dict[str, Tensor]

    @classmethod
    def of(cls, problem: Problem, order: list[int], labels: Labels | None) -> Evidence:
        """From what was maximized, with the modes in this order."""
        y, u = problem.observations.detach(), problem.inputs
        kept = problem.scheme.name
        moving = _moving(problem.coordinates, order)
        return cls(y, u, labels, kept, problem.given, moving)


def _moving(found: Coordinates, order: list[int]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for block in found.blocks:
        mask, at = block.moving, torch.as_tensor(order, device=block.start.device)
        if block.name in ("transition", "initial"):
            mask = mask.index_select(-1, at)
            mask = mask.index_select(-2, at) if block.name == "transition" else mask
        elif mask.ndim > len(SHAPES[block.name]):
            mask = mask.index_select(-len(SHAPES[block.name]) - 1, at)
        out[block.name] = mask
    return out


def steps_given(model: SwitchingLinearGaussian, observations: Tensor) -> int:
    """How many steps a fit takes as given: those that a `ReadyModel` needs to know its state."""
    design = getattr(model, "design", None)
    wanted = 0 if design is None else design.given
    if not wanted or model.diffuse:
        return 0
    seen = (~observations.isnan()).any(-1).cumsum(-1).reshape(-1, observations.shape[-2])
    enough = (seen >= wanted).all(0).nonzero()
    if not len(enough) or int(enough[0]) + 1 >= observations.shape[-2]:
        raise InputError(
            f"fit: the model needs {wanted} observations before it knows its state, and more to "
            f"learn from; the series has {int(seen[:, -1].min())}."
        )
    return int(enough[0]) + 1


class FitReport:
    """What every fit can tell: the field's criteria, its table, and pictures."""

    model: SwitchingLinearGaussian
    log_likelihood: float
    parameter_count: int
    observation_count: int
    evidence: Evidence

    @property
    def hqic(self) -> float:
        """Hannan and Quinn's criterion."""
        weight = 2 * math.log(math.log(self.observation_count))
        return weight * self.parameter_count - 2 * self.log_likelihood

    @property
    def posterior(self) -> Posterior:
        """What `filter` says about the observations by the fitted model."""
        return self._kept("posterior", self._filtered)

    @property
    def smoothed(self) -> Smoothed:
        """What `smooth` says about them."""
        return self._kept("smoothed", lambda: smooth(self.model, self.posterior))

    def _filtered(self) -> Posterior:
        seen = self.evidence
        with torch.no_grad():
            post = filter(self.model, seen.observations, collapse=seen.collapse, inputs=seen.inputs)
        return post.labeled(seen.labels)

    def _kept(self, name: str, compute: Any) -> Any:
        """Computed once; the fit itself is frozen."""
        found = vars(self).get(f"_{name}")
        if found is None:
            with torch.no_grad():
                found = compute()
            object.__setattr__(self, f"_{name}", found)
        return found

    def summary(self, names: ModeNames = None, *, level: float = 0.95) -> Summary:
        """Estimates, standard errors, intervals and criteria as a table.

        Print it for text; a notebook shows it as HTML; ``summary().table`` is a DataFrame.

        Args:
            names: of the modes of the fitted model, in its order. Ready models have their own.
            level: of the intervals.
        """
        from cumulant.filtering.summary import summarized

        return summarized(self, names, level)  # pyright: ignore[reportArgumentType]

    def plot(
        self,
        what: Literal["regimes", "states", "diagnostics"] = "regimes",
        path: str | os.PathLike[str] | None = None,
        *,
        names: ModeNames = None,
    ) -> Figure:
        """Draw the series with its regimes, its states with bands, or residual diagnostics.

        Args:
            what: ``"regimes"``, ``"states"`` or ``"diagnostics"``: standardized one-step residuals,
                their autocorrelations and quantiles.
            path: file to write, its format by suffix.
            names: of the modes of the fitted model.
        """
        from cumulant.filtering.plots import plot

        later = None if what == "diagnostics" else self.smoothed
        skip = self.evidence.given
        return plot(self.posterior, what, path, smoothed=later, names=names, skip=skip)
