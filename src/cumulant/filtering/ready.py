"""Ready models of time series: no matrix to write, every parameter named, regimes on request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cumulant.core.checks import whole
from cumulant.core.typed import functions
from cumulant.filtering.components import (
    FLAT,
    VAGUE,
    Build,
    Q,
    R,
    Regimes,
    Switching,
    companion,
    in_front,
    lagged,
    series_names,
)
from cumulant.filtering.structure import ReadyModel

__all__ = [
    "autoregression",
    "dynamic_factor",
    "local_level",
    "local_linear_trend",
    "seasonal",
    "switching_mean_variance",
]


def local_level(*, regimes: Regimes = 1, switching: Switching = None) -> ReadyModel:
    """A level that walks at random, seen through noise.

    level_t = level_{t-1} + N(0, level variance), y_t = level_t + N(0, noise variance).

    Args:
        regimes: how many, or their names.
        switching: what differs between regimes: ``"level"``, ``"noise"`` (their variances), or
            ``"variance"`` for both, the default.

    >>> import cumulant as cm
    >>> cm.filtering.local_level(regimes=2, switching="noise").names.modes
    ['regime 1', 'regime 2']
    """
    build = Build("local_level", "a local level", regimes, switching, ("level", "noise"))
    return build.model(
        dynamics=torch.eye(1),
        dynamics_noise=build.variances("level", 0.1)[..., None],
        emission=torch.ones(1, 1),
        emission_noise=build.variances("noise", 0.5)[..., None],
        initial_mean=torch.zeros(1),
        initial_covariance=VAGUE * torch.eye(1),
        states=("level",),
        labels={Q(0): "level variance", R(0): "noise variance"},
        free={"dynamics_noise": torch.tensor([0]), "emission_noise": torch.tensor([0])},
        given=1,
    )


def local_linear_trend(*, regimes: Regimes = 1, switching: Switching = None) -> ReadyModel:
    """A level with a slope, both of which walk at random, seen through noise.

    level_t = level_{t-1} + slope_{t-1} + N(0, level variance), slope_t = slope_{t-1} +
    N(0, slope variance), y_t = level_t + N(0, noise variance).

    Args:
        regimes: how many, or their names.
        switching: ``"level"``, ``"slope"``, ``"noise"``, or ``"variance"`` for all three, the
            default.

    >>> import cumulant as cm
    >>> cm.filtering.local_linear_trend().names.states
    ['level', 'slope']
    """
    build = Build(
        *("local_linear_trend", "a local linear trend", regimes, switching),
        able=("level", "slope", "noise"),
    )
    level, slope = build.variances("level", 0.1), build.variances("slope", 0.01)
    return build.model(
        dynamics=torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
        dynamics_noise=torch.cat(functions.broadcast_tensors(level, slope), -1).diag_embed(),
        emission=torch.tensor([[1.0, 0.0]]),
        emission_noise=build.variances("noise", 0.5)[..., None],
        initial_mean=torch.zeros(2),
        initial_covariance=VAGUE * torch.eye(2),
        states=("level", "slope"),
        labels={Q(0): "level variance", Q(1): "slope variance", R(0): "noise variance"},
        free={"dynamics_noise": torch.tensor([0, 1]), "emission_noise": torch.tensor([0])},
        given=2,
    )


def autoregression(order: int, *, regimes: Regimes = 1, switching: Switching = None) -> ReadyModel:
    """An autoregression around a mean: Hamilton's model, where the mean switches.

    y_t - m_t = a_1 (y_{t-1} - m_{t-1}) + ... + a_p (y_{t-p} - m_{t-p}) + N(0, variance), m_t the
    mean of the regime at time t (Hamilton 1989). The likelihood is that of the observations after
    the first p. Filters are exact with ``collapse=p + 1``, and ``"gpb2"`` comes close. Nothing is
    known of the state at the start; where coefficients switch, it has the variance of the series,
    since the first observation would otherwise favor regimes by their coefficients.

    Args:
        order: p, how many lags.
        regimes: how many, or their names.
        switching: ``"mean"`` (the default), ``"variance"``, ``"coefficients"``.

    >>> import cumulant as cm
    >>> model = cm.filtering.autoregression(2, regimes=2, switching=("mean", "variance"))
    >>> list(model.design.labels.values())
    ['mean', 'variance', 'ar.L1', 'ar.L2']
    """
    p = whole("autoregression", "order", order, 1)
    build = Build(
        *("autoregression", f"an autoregression of order {p}", regimes, switching),
        able=("mean", "variance", "coefficients"),
        default=("mean",),
    )
    first = torch.arange(p) == 0
    return build.model(
        dynamics=companion(build.spread("coefficients", 0.3, 0.1), p),
        dynamics_noise=in_front(build.variances("variance", 0.5), p),
        emission=first[None, :].double(),
        emission_noise=torch.zeros(1, 1),
        emission_bias=build.means(),
        initial_mean=torch.zeros(p),
        initial_covariance=(1.0 if "coefficients" in build.switching else FLAT) * torch.eye(p),
        states=lagged("deviation", p),
        labels={
            ("emission_bias", (0,)): "mean",
            Q(0): "variance",
            **{("dynamics", (0, k)): f"ar.L{k + 1}" for k in range(p)},
        },
        free={
            "emission_bias": True,
            "dynamics": first[:, None].expand(p, p),
            "dynamics_noise": torch.where(first, 0, -1),
        },
        given=p,
    )


def switching_mean_variance(
    regimes: Regimes = 2, *, switching: Switching = ("mean", "variance")
) -> ReadyModel:
    """A mean plus noise, one of several by a Markov chain: a Markov-switching regression.

    y_t = mean_j + N(0, variance_j) in regime j. There is no state, so nothing is approximated.

    Args:
        regimes: how many, or their names.
        switching: ``"mean"``, ``"variance"``, or both.

    >>> import torch, cumulant as cm
    >>> y = torch.tensor([0.1, -0.2, 0.0, 5.1, 4.9, 5.0, 5.2, 0.1, -0.1, 0.2])[:, None].double()
    >>> model = cm.filtering.switching_mean_variance(["low", "high"], switching="mean")
    >>> found = cm.filtering.fit(model, y)
    >>> found.model.names.modes, found.model.emission_bias.flatten()
    (['low', 'high'], tensor([0.0167, 5.0500], dtype=torch.float64))
    """
    build = Build(
        *("switching_mean_variance", "a mean plus noise", regimes, switching),
        able=("mean", "variance"),
    )
    return build.model(
        dynamics=torch.zeros(0, 0),
        dynamics_noise=torch.zeros(0, 0),
        emission=torch.zeros(1, 0),
        emission_noise=build.variances("variance", 0.5)[..., None],
        emission_bias=build.means(),
        initial_mean=torch.zeros(0),
        initial_covariance=torch.zeros(0, 0),
        states=(),
        labels={("emission_bias", (0,)): "mean", R(0): "variance"},
        free={"emission_bias": True, "emission_noise": torch.tensor([0])},
    )


def seasonal(period: int, *, regimes: Regimes = 1, switching: Switching = None) -> ReadyModel:
    """A seasonal that sums to noise over a period, to be added to a level or an autoregression.

    season_t = -season_{t-1} - ... - season_{t-period+1} + N(0, seasonal variance).

    Args:
        period: how many steps a year has, say: an integer >= 2.
        regimes: how many, or their names.
        switching: ``"variance"``, the default where there are regimes.

    >>> import cumulant as cm
    >>> (cm.filtering.local_level() + cm.filtering.seasonal(12)).state_size
    12
    """
    n = whole("seasonal", "period", period, 2) - 1
    build = Build(
        *("seasonal", f"a seasonal of period {n + 1}", regimes, switching), able=("seasonal",)
    )
    first = torch.arange(n) == 0
    return build.model(
        dynamics=companion(-torch.ones(n), n),
        dynamics_noise=in_front(build.variances("seasonal", 0.05), n),
        emission=first[None, :].double(),
        emission_noise=torch.zeros(1, 1),
        initial_mean=torch.zeros(n),
        initial_covariance=VAGUE * torch.eye(n),
        states=lagged("season", n),
        labels={Q(0): "seasonal variance"},
        free={"dynamics_noise": torch.where(first, 0, -1)},
        given=n,
    )


def dynamic_factor(
    series: int | Sequence[str],
    *,
    order: int = 1,
    regimes: Regimes = 1,
    switching: Switching = None,
) -> ReadyModel:
    """Several series that load on one factor, an autoregression, each with noise of its own.

    f_t = drift_j + a_1 f_{t-1} + ... + a_p f_{t-p} + N(0, 1), y_it = mean_i + loading_i f_t +
    N(0, noise variance_i). With regimes, each has its drift, and the means stay those of the
    series; with one, there is no drift.

    Args:
        series: how many, or their names.
        order: p, how many lags the factor has.
        regimes: how many, or their names.
        switching: ``"drift"``, the default where there are regimes.

    >>> import cumulant as cm
    >>> cm.filtering.dynamic_factor(["output", "jobs", "sales"], regimes=2)
    ReadyModel(modes=2, state_size=1, observation_size=3)
    """
    named = series_names(series)
    p, count = whole("dynamic_factor", "order", order, 1), len(named)
    build = Build(
        *("dynamic_factor", f"a factor of order {p} in {count} series", regimes, switching),
        able=("drift",),
    )
    first = torch.arange(p) == 0
    several = build.modes > 1
    loading = 0.5 * first.expand(count, p)
    return build.model(
        dynamics=companion(torch.tensor([0.5]), p),
        dynamics_noise=torch.diag(first.double()),
        dynamics_bias=build.spread("drift", 0.0, 1.0) * first if several else None,
        emission=loading,
        emission_noise=0.5 * torch.eye(count),
        emission_bias=torch.zeros(count),
        initial_mean=torch.zeros(p),
        initial_covariance=10.0 * torch.eye(p),
        states=lagged("factor", p),
        labels={
            **{("emission", (k, 0)): f"loading.{x}" for k, x in enumerate(named)},
            **{("emission_bias", (k,)): f"mean.{x}" for k, x in enumerate(named)},
            **{R(k): f"noise variance.{x}" for k, x in enumerate(named)},
            **{("dynamics", (0, k)): f"ar.L{k + 1}" for k in range(p)},
            ("dynamics_bias", (0,)): "drift",
        },
        free={
            "emission": first.expand(count, p),
            "emission_noise": torch.arange(count),
            "dynamics": first[:, None].expand(p, p),
            **({"dynamics_bias": first} if several else {"emission_bias": True}),
        },
        units="rows",
    )
