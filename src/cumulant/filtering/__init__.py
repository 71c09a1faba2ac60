"""Message passing with switching modes: GPB and IMM filters (THEORY T25-T27)."""

from cumulant.filtering.filters import filter, update
from cumulant.filtering.fitting import Fit, fit
from cumulant.filtering.forecasting import Sample, forecast, sample
from cumulant.filtering.model import SwitchingLinearGaussian
from cumulant.filtering.nonlinear import SwitchingNonlinear
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.smoothing import Smoothed, smooth

__all__ = [
    "Fit",
    "Posterior",
    "Sample",
    "Smoothed",
    "SwitchingLinearGaussian",
    "SwitchingNonlinear",
    "filter",
    "fit",
    "forecast",
    "sample",
    "smooth",
    "update",
]
