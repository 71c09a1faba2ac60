"""Message passing with switching modes: GPB and IMM filters (docs/theory.md, T25-T27)."""

from cumulant.filtering.attention_imm import AttentionMessages, attention_as_imm
from cumulant.filtering.conjugate import SwitchingConjugate
from cumulant.filtering.continuous import Discretized, discretize, intervals
from cumulant.filtering.doubly_stochastic import sinkhorn, sinkhorn_attention
from cumulant.filtering.filters import filter, update
from cumulant.filtering.fitting import Fit, fit
from cumulant.filtering.forecasting import Sample, forecast, sample
from cumulant.filtering.maps import Flip, Linear, Merge, Permute, Renew, Scale, push
from cumulant.filtering.mixing import InducedTransition, transition_from_mixing
from cumulant.filtering.model import SwitchingLinearGaussian
from cumulant.filtering.model_files import read_model
from cumulant.filtering.natural import ConjugatePosterior
from cumulant.filtering.nonlinear import SwitchingNonlinear
from cumulant.filtering.paths import ModePath, most_likely_path
from cumulant.filtering.picture import picture
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.predictive import residuals
from cumulant.filtering.ready import (
    autoregression,
    dynamic_factor,
    local_level,
    local_linear_trend,
    seasonal,
    switching_mean_variance,
)
from cumulant.filtering.selection import RegimeComparison, compare_regimes
from cumulant.filtering.series import read_series
from cumulant.filtering.smoothing import Smoothed, smooth
from cumulant.filtering.structure import ReadyModel
from cumulant.filtering.summary import Summary
from cumulant.filtering.tracking import constant_velocity, coordinated_turn

__all__ = [
    "AttentionMessages",
    "ConjugatePosterior",
    "Discretized",
    "Fit",
    "Flip",
    "InducedTransition",
    "Linear",
    "Merge",
    "ModePath",
    "Permute",
    "Posterior",
    "ReadyModel",
    "RegimeComparison",
    "Renew",
    "Sample",
    "Scale",
    "Smoothed",
    "Summary",
    "SwitchingConjugate",
    "SwitchingLinearGaussian",
    "SwitchingNonlinear",
    "attention_as_imm",
    "autoregression",
    "compare_regimes",
    "constant_velocity",
    "coordinated_turn",
    "discretize",
    "dynamic_factor",
    "filter",
    "fit",
    "forecast",
    "intervals",
    "local_level",
    "local_linear_trend",
    "most_likely_path",
    "picture",
    "push",
    "read_model",
    "read_series",
    "residuals",
    "sample",
    "seasonal",
    "sinkhorn",
    "sinkhorn_attention",
    "smooth",
    "switching_mean_variance",
    "transition_from_mixing",
    "update",
]
