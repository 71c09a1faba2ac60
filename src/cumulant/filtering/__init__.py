"""Message passing with switching modes: GPB and IMM filters (docs/theory.md, T25-T27)."""

from cumulant.filtering.attention_imm import AttentionMessages, attention_as_imm
from cumulant.filtering.conjugate import SwitchingConjugate
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
from cumulant.filtering.picture import picture
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.series import read_series
from cumulant.filtering.smoothing import Smoothed, smooth

__all__ = [
    "AttentionMessages",
    "ConjugatePosterior",
    "Fit",
    "Flip",
    "InducedTransition",
    "Linear",
    "Merge",
    "Permute",
    "Posterior",
    "Renew",
    "Sample",
    "Scale",
    "Smoothed",
    "SwitchingConjugate",
    "SwitchingLinearGaussian",
    "SwitchingNonlinear",
    "attention_as_imm",
    "filter",
    "fit",
    "forecast",
    "picture",
    "push",
    "read_model",
    "read_series",
    "sample",
    "sinkhorn",
    "sinkhorn_attention",
    "smooth",
    "transition_from_mixing",
    "update",
]
