"""Message passing with switching modes: GPB and IMM filters (THEORY T25-T27)."""

from cumulant.filtering.filters import filter, update
from cumulant.filtering.model import SwitchingLinearGaussian
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.smoothing import Smoothed, smooth

__all__ = ["Posterior", "Smoothed", "SwitchingLinearGaussian", "filter", "smooth", "update"]
