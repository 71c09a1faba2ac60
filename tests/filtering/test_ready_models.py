"""Ready models against statsmodels' own, matrix exponentials, and each other."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.integrate import quad_vec
from scipy.linalg import expm
from statsmodels.datasets import macrodata
from statsmodels.tsa.api import (
    AutoReg,
    DynamicFactor,
    MarkovAutoregression,
    MarkovRegression,
    UnobservedComponents,
)

import cumulant as cm
from cumulant.filtering.parameters import coordinates
from switching import seeded

F = cm.filtering
ROOT = Path(__file__).parents[2]
D = torch.float64


@pytest.fixture(scope="module")
def series():
    """Quarterly, with a level, a season and two regimes of noise; no gaps."""
    rng = np.random.default_rng(4)
    loud = np.arange(48) % 24 >= 12
    walk = 20 + np.cumsum(rng.normal(size=48))
    return walk + np.tile([2.0, -1.0, 0.5, -1.5], 12) + rng.normal(size=48) * np.where(loud, 2, 0.4)


def conditional(model, y, given, collapse="gpb2"):
    """The log-likelihood of all but the first steps."""
    post = F.filter(model, torch.as_tensor(y, dtype=D)[:, None], collapse=collapse)
    return float(post.step_log_likelihood[given:].sum())


def variances(model, **given):
    """A structural model with these variances on the diagonals."""
    noise = model.dynamics_noise.clone()
    for k, x in given.get("states", {}).items():
        noise[..., k, k] = x
    return model.replace(
        dynamics_noise=noise, emission_noise=torch.full((1, 1), given["noise"], dtype=D)
    )


COMPONENTS = {
    "local level": (lambda: F.local_level(), {0: 0.7}, [1.3, 0.7], {"level": "llevel"}),
    "trend": (
        lambda: F.local_linear_trend(),
        {0: 0.7, 1: 0.05},
        [1.3, 0.7, 0.05],
        {"level": "lltrend"},
    ),
    "level and season": (
        lambda: F.local_level() + F.seasonal(4),
        {0: 0.7, 1: 0.02},
        [1.3, 0.7, 0.02],
        {"level": "llevel", "seasonal": 4},
    ),
    "trend and season": (
        lambda: F.local_linear_trend() + F.seasonal(4),
        {0: 0.7, 1: 0.05, 2: 0.02},
        [1.3, 0.7, 0.05, 0.02],
        {"level": "lltrend", "seasonal": 4},
    ),
}


@pytest.mark.parametrize("kind", COMPONENTS)
def test_structural_models_are_those_of_statsmodels(series, kind):
    """statsmodels leaves out as many observations as it has diffuse states; so does a fit."""
    make, states, at, how = COMPONENTS[kind]
    model = make()
    theirs = UnobservedComponents(series, **how)
    assert theirs.loglikelihood_burn == model.design.given == model.state_size
    ours = variances(model.started(series[:, None]), states=states, noise=1.3)
    assert conditional(ours, series, model.design.given) == pytest.approx(
        theirs.loglike(at), abs=2e-3
    )


@pytest.mark.parametrize(
    ("order", "switching"),
    [
        (1, ("mean",)),
        (2, ("mean",)),
        (1, ("mean", "variance")),
        (2, ("mean", "coefficients")),
        (1, ("variance", "coefficients")),
    ],
)
def test_autoregressions_are_those_of_statsmodels(series, order, switching):
    growth = np.diff(series)
    theirs = MarkovAutoregression(
        *(growth, 2, order),
        trend="c",
        switching_trend="mean" in switching,
        switching_ar="coefficients" in switching,
        switching_variance="variance" in switching,
    )
    value = {"p[0->0]": 0.9, "p[1->0]": 0.2, "const": 0.1, "const[0]": -1.0, "const[1]": 0.7}
    value |= {"sigma2": 2.0, "sigma2[0]": 0.5, "sigma2[1]": 4.0}
    value |= {"ar.L1": 0.4, "ar.L2": -0.2, "ar.L1[0]": 0.4, "ar.L1[1]": -0.3}
    value |= {"ar.L2[0]": -0.2, "ar.L2[1]": 0.1}
    model = F.autoregression(order, regimes=2, switching=switching).started(growth[:, None])
    now = {n: x.clone() for n, x in model.parameters.items()}
    now["transition"] = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=D)
    for name, x in value.items():
        if name not in theirs.param_names or name.startswith("p["):
            continue
        what, _, regime = name.partition("[")
        mode = () if not regime else (int(regime[0]),)
        lag = int(what[-1]) - 1 if what.startswith("ar") else 0
        parameter = {"const": "emission_bias", "sigma2": "dynamics_noise"}.get(what, "dynamics")
        place = (0,) if parameter == "emission_bias" else (0, lag)
        now[parameter][(*mode, *place)] = x
    at = [value[name] for name in theirs.param_names]
    # Where coefficients switch, the first observations say something about their regimes.
    skip = 35 if "coefficients" in switching else order
    ours = conditional(model.replace(**now), growth, skip, collapse=order + 1)
    assert ours == pytest.approx(theirs.loglikeobs(at)[skip - order :].sum(), abs=1e-4)


def test_hamiltons_estimates_and_standard_errors_are_as_published():
    """Stata's manual of mswitch, example 5; the search starts there and has nowhere to go."""
    y = F.read_series(ROOT / "examples" / "data" / "us_gnp_growth.csv").values
    model = F.autoregression(4, regimes=2)
    dynamics, noise = model.dynamics.clone(), torch.zeros(4, 4, dtype=D)
    dynamics[0] = torch.tensor([0.013486, -0.057521, -0.246983, -0.212923])
    noise[0, 0] = np.exp(-0.262658) ** 2
    p, q = 0.754673, 0.095915
    published = model.started(y).replace(
        transition=torch.tensor([[p, 1 - p], [q, 1 - q]], dtype=D),
        emission_bias=torch.tensor([[-0.358811], [1.163516]], dtype=D),
        dynamics=dynamics,
        dynamics_noise=noise,
    )
    found = F.fit(published, y, collapse=5)
    assert found.log_likelihood == pytest.approx(-181.26339, abs=1e-5)
    table = {(x.regime, x.label): x for x in found.summary().estimates}
    for (regime, label), (value, error) in {
        ("regime 1", "mean"): (-0.358811, 0.2645396),
        ("regime 2", "mean"): (1.163516, 0.0745187),
        ("", "ar.L1"): (0.013486, 0.1199942),
        ("", "ar.L2"): (-0.057521, 0.137663),
        ("", "ar.L3"): (-0.246983, 0.1069103),
        ("", "ar.L4"): (-0.212923, 0.1105311),
        ("", "P(regime 1 -> regime 1)"): (p, 0.0965189),
        ("", "P(regime 2 -> regime 1)"): (q, 0.0377362),
    }.items():
        row = table[regime, label]
        assert row.value == pytest.approx(value, abs=1e-4)
        assert row.error == pytest.approx(error, abs=1e-4)


def test_an_autoregression_is_least_squares(series):
    """Given the first observations, the most likely coefficients are those of a regression."""
    growth = np.diff(series)
    theirs = AutoReg(growth, 2).fit()
    found = F.fit(F.autoregression(2), pd.Series(growth), tol=1e-8)
    const, *lags = theirs.params
    coefficients = found.model.dynamics[0]
    assert coefficients.tolist() == pytest.approx(lags, abs=1e-4)
    mean = const / (1 - sum(lags))
    assert float(found.model.emission_bias) == pytest.approx(mean, abs=1e-4)
    assert float(found.model.dynamics_noise[0, 0]) == pytest.approx(theirs.sigma2, rel=1e-4)
    assert found.log_likelihood == pytest.approx(theirs.llf, abs=1e-4)
    assert found.observation_count == theirs.nobs == len(growth) - 2
    assert found.standard_errors["dynamics"][0].tolist() == pytest.approx(theirs.bse[1:], rel=0.05)


def test_a_level_that_wanders_far_is_fitted_as_by_statsmodels():
    """Variances are a millionth of the series' own, as those of output in levels are."""
    rng = np.random.default_rng(2)
    y = 5000 + 30 * np.arange(50) + np.cumsum(rng.normal(size=50)) + 0.5 * rng.normal(size=50)
    theirs = UnobservedComponents(y, "llevel").fit(disp=False, maxiter=200)
    found = F.fit(F.local_level(), torch.tensor(y)[:, None], throw=False)
    assert found.log_likelihood > theirs.llf - 0.01
    params = [float(found.model.emission_noise), float(found.model.dynamics_noise)]
    reached = UnobservedComponents(y, "llevel").loglike(params)
    assert found.log_likelihood == pytest.approx(reached, abs=0.01)


def test_means_and_variances_are_fitted_as_by_statsmodels():
    growth = 100 * np.diff(np.log(macrodata.load_pandas().data["realgdp"].to_numpy()))
    np.random.seed(0)
    theirs = MarkovRegression(growth, 2, switching_variance=True).fit(search_reps=10)
    found = F.fit(F.switching_mean_variance(2), torch.tensor(growth)[:, None], starts=4)
    assert found.log_likelihood == pytest.approx(theirs.llf, abs=1e-3)
    order = np.argsort(theirs.params[2:4])
    assert found.model.emission_bias[:, 0].tolist() == pytest.approx(
        theirs.params[2:4][order], abs=0.01
    )
    assert found.model.emission_noise.flatten().tolist() == pytest.approx(
        theirs.params[4:6][order], rel=0.01
    )


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.3, -2.0])
def test_a_coordinated_turn_is_a_matrix_exponential(rate):
    step = 0.7
    flow = np.array([[0, 1, 0, 0], [0, 0, 0, -rate], [0, 0, 0, 1], [0, rate, 0, 0]])
    model = F.coordinated_turn([rate, 5.0], step=step)
    assert model.dynamics[0].numpy() == pytest.approx(expm(step * flow), abs=1e-12)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_constant_velocity_has_the_noise_of_white_acceleration(dimensions):
    step, q = 0.7, 2.5
    flow = np.kron(np.eye(dimensions), [[0.0, 1.0], [0.0, 0.0]])
    drive = np.kron(np.eye(dimensions), [[0.0, 0.0], [0.0, q]])
    noise, _ = quad_vec(lambda s: expm(s * flow) @ drive @ expm(s * flow).T, 0, step)
    model = F.constant_velocity(step=step, acceleration=q, noise=3.0, dimensions=dimensions)
    assert model.dynamics.numpy() == pytest.approx(expm(step * flow))
    assert model.dynamics_noise.numpy() == pytest.approx(noise)
    assert model.emission_noise.numpy() == pytest.approx(9.0 * np.eye(dimensions))
    assert model.names.states[:2] == ["x", "vx"]


def test_steps_of_any_length_are_as_many_models():
    """Half a step and half a step are a step, where nothing is seen in between."""
    for make in (
        lambda s: F.constant_velocity(step=s, acceleration=[0.1, 3.0], noise=0.5),
        lambda s: F.coordinated_turn([0.0, 0.4], step=s, noise=0.5),
        lambda s: F.constant_velocity(step=s, acceleration=2.0, dimensions=1),
    ):
        whole, halves = make(1.0), make([0.5] * 20)
        assert halves.dynamics.shape == (20, whole.modes, whole.state_size, whole.state_size)
        first, second = halves.dynamics[0], halves.dynamics[1]
        assert torch.allclose(second @ first, whole.dynamics.expand_as(first))
        noise = second @ halves.dynamics_noise[0] @ second.mT + halves.dynamics_noise[1]
        if whole.modes == 1 or whole.dynamics.ndim == 2:
            assert torch.allclose(noise, whole.dynamics_noise.expand_as(noise))
    one = F.constant_velocity(step=[0.3, 1.2, 0.7], dimensions=1)
    y = torch.tensor([[0.1], [1.0], [2.2]], dtype=D)
    found = F.fit(one, y, throw=False, max_steps=2, standard_errors=False)
    ratio = found.model.dynamics_noise / one.dynamics_noise
    assert torch.allclose(ratio, ratio[0, 0, 0, 0].expand_as(ratio))  # one scale for all times
    assert found.parameter_count == 2
    assert len(found.summary().table) == 2


def test_a_factor_is_that_of_statsmodels():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 3))
    theirs = DynamicFactor(y, k_factors=1, factor_order=2)
    at = np.r_[0.8, -0.3, 0.5, 0.4, 0.6, 0.7, 0.5, -0.2]  # loadings, variances, factor
    given = dict(zip(theirs.param_names, at, strict=True))
    model = F.dynamic_factor(3, order=2)
    dynamics, emission = model.dynamics.clone(), torch.zeros(3, 2, dtype=D)
    dynamics[0] = torch.tensor([given["L1.f1.f1"], given["L2.f1.f1"]])
    emission[:, 0] = torch.tensor(at[:3])
    ours = model.replace(
        dynamics=dynamics, emission=emission, emission_noise=torch.diag(torch.tensor(at[3:6]))
    )
    # Their start is at the first observation, ours one step before.
    W, P = dynamics.numpy(), ours.initial_covariance.numpy()
    theirs.ssm.initialize_known(np.zeros(2), W @ P @ W.T + ours.dynamics_noise.numpy())
    found = F.filter(ours, torch.tensor(y))
    assert float(found.log_likelihood) == pytest.approx(theirs.loglike(at), abs=1e-8)
    labels = ours.design.labels
    assert labels["emission", (1, 0)] == "loading.y2"
    assert labels["dynamics", (0, 1)] == "ar.L2"


def test_a_factor_with_regimes_is_fitted():
    """Three series share a factor whose drift switches; the regimes are found again."""
    truth = F.dynamic_factor(["a", "b", "c"], regimes=["slump", "boom"])
    drift = torch.tensor([[-3.0], [3.0]], dtype=D)
    drawn = F.sample(truth.replace(dynamics_bias=drift), 60, generator=seeded(2))
    found = F.fit(truth, 50 + 10 * drawn.observations, throw=False, max_steps=25)
    told = found.smoothed.mode_probabilities.argmax(-1)
    assert float((told == drawn.modes).double().mean()) > 0.9
    assert found.model.names.modes == ["slump", "boom"]
    assert float(found.model.dynamics_noise) == 1.0  # the factor keeps its units
    assert found.model.dynamics_bias[0, 0] < 0 < found.model.dynamics_bias[1, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: F.local_level(regimes=2) + F.seasonal(4),
        lambda: F.autoregression(2, regimes=2, switching=("mean", "variance", "coefficients")),
        lambda: F.switching_mean_variance(3),
        lambda: F.local_linear_trend(regimes=2, switching="slope"),
        lambda: F.dynamic_factor(2, regimes=2),
    ],
)
def test_starting_values_follow_the_units_of_the_series(series, make):
    """A + B y has the density of y over B, whatever the units."""
    model = make()
    y = torch.tensor(series)[:, None].expand(-1, model.observation_size)
    y = y + torch.arange(y.numel()).reshape(y.shape).sin()
    y[5] = torch.nan
    plain, scaled = model.started(y), model.started(1e6 + 1e4 * y)
    values = [
        F.filter(plain, y).log_likelihood,
        F.filter(scaled, 1e6 + 1e4 * y).log_likelihood,
    ]
    count = int((~y.isnan()).sum())
    assert float(values[1] - values[0]) == pytest.approx(-count * np.log(1e4), rel=1e-5)


def test_sums_have_the_states_of_both_and_observe_their_sum():
    model = F.autoregression(1, regimes=["low", "high"]) + F.seasonal(4) + F.local_level()
    assert model.names.modes == ["low", "high"]
    assert model.names.states[0] == "deviation"
    assert model.state_size == 1 + 3 + 1
    assert model.design.given == 5
    assert torch.equal(model.emission, torch.tensor([[1.0, 1, 0, 0, 1]], dtype=D))
    assert model.dynamics[1:4, 1:4].tolist() == F.seasonal(4).dynamics.tolist()
    assert set(model.design.labels.values()) == {
        *("mean", "variance", "ar.L1", "seasonal variance", "level variance", "noise variance")
    }
    free = coordinates(model.started(torch.randn(30, 1, generator=seeded(0)).double()))
    # a chain, two means, one coefficient, three variances of states, one of noise
    assert sum(block.size for block in free.blocks) == 2 + 2 + 1 + 3 + 1
    twice = F.local_level() + F.local_level()
    assert twice.names.states == ["level", "level (2)"]
    assert "level variance (2)" in twice.design.labels.values()


def test_scales_keep_the_structure_of_a_covariance():
    shape = torch.tensor([[2.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 0.0]], dtype=D)
    model = F.SwitchingLinearGaussian(
        transition=torch.eye(2, dtype=D) * 0.8 + 0.1,
        dynamics=torch.eye(3, dtype=D),
        dynamics_noise=torch.stack([shape, 4 * shape]),
        emission=torch.ones(1, 3, dtype=D),
        emission_noise=torch.eye(1, dtype=D),
        initial_mean=torch.zeros(3, dtype=D),
        initial_covariance=torch.eye(3, dtype=D),
    )
    found = coordinates(model, {"dynamics_noise": torch.tensor([1, 0, -1])})
    v = torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=D)  # two groups in each of two modes
    value = found.values(v)["dynamics_noise"]
    for j, (s, t) in enumerate([(0.3, -0.2), (0.1, 0.5)]):
        scale = torch.diag(torch.tensor([s, t, 9.0], dtype=D).exp())
        expected = scale @ model.dynamics_noise[j] @ scale
        assert torch.allclose(value[j], expected)
    assert torch.allclose(found.vector(model.unchecked({"dynamics_noise": value})), v)
    assert torch.equal(found.blocks[0].value(torch.stack([v, v]))[1], value)  # a batch of points
    together = coordinates(model, {"dynamics_noise": torch.zeros(3, dtype=torch.long)})
    assert together.blocks[0].size == 2
    with pytest.raises(cm.InputError, match="no variance in group 0"):
        coordinates(model, {"dynamics_noise": torch.tensor([-1, -1, 0])})
    with pytest.raises(cm.InputError, match="number the groups"):
        coordinates(model, {"dynamics_noise": torch.tensor([0, 2, -1])})


def test_names_go_in_rising_order_and_stay_with_their_regimes():
    """Low means with large noise: the regimes of a start with low noise at low means."""
    rng = np.random.default_rng(1)
    low = np.arange(120) % 40 < 15
    y = np.where(low, rng.normal(-2, 3, 120), rng.normal(2, 0.5, 120))
    index = pd.period_range("1990Q1", periods=120, freq="Q")
    found = F.fit(F.switching_mean_variance(["bear", "bull"]), pd.Series(y, index, name="r"))
    assert found.model.names.modes == ["bear", "bull"]
    assert found.order == (0, 1)
    assert found.model.emission_bias[0] < found.model.emission_bias[1]
    assert found.model.emission_noise[0] > found.model.emission_noise[1]
    for told in (found.posterior.to_pandas(), found.smoothed.to_pandas()):
        assert told.index.equals(index)
        assert ((told["P(bear)"] > 0.5) == low).mean() > 0.9
    table = found.summary().table
    assert table.loc[("bear", "mean"), "coef"] == float(found.model.emission_bias[0, 0])
    ahead = F.forecast(found.posterior, 3).to_pandas()
    assert ahead.index.equals(pd.period_range("2020Q1", periods=3, freq="Q"))
    assert list(ahead.columns[:2]) == ["P(bear)", "P(bull)"]
    again = pickle.loads(pickle.dumps(found))
    assert again.model.names.modes == ["bear", "bull"]
    # Numbers that the user gives keep their names, wherever the fit sorts them.
    other = found.model.permute([1, 0])
    assert other.names.modes == ["bull", "bear"]
    refound = F.fit(other, pd.Series(y, index, name="r"))
    assert refound.order == (1, 0)
    assert refound.model.names.modes == ["bear", "bull"]


def test_a_gap_at_the_beginning_is_not_taken_as_given():
    y = torch.randn(30, 1, generator=seeded(3)).double().cumsum(0)
    y[0] = y[1] = torch.nan
    found = F.fit(F.local_level(), y, max_steps=1, throw=False, standard_errors=False)
    assert found.evidence.given == 3
    assert found.observation_count == 27


def test_bad_input():
    with pytest.raises(cm.InputError, match="switching must name some of mean, variance"):
        F.switching_mean_variance(2, switching="slope")
    with pytest.raises(cm.InputError, match="switching must name some of level, noise, variance"):
        F.local_level(regimes=2, switching=())
    with pytest.raises(cm.InputError, match="integer >= 1 or a list of different names"):
        F.local_level(regimes=["a", "a"])
    with pytest.raises(cm.InputError, match="regimes must be"):
        F.local_level(regimes=0)
    with pytest.raises(cm.InputError, match="do not add up: modes is 2 and 3"):
        F.local_level(regimes=2) + F.seasonal(4, regimes=3)
    with pytest.raises(cm.InputError, match="regimes are called"):
        F.local_level(regimes=["a", "b"]) + F.seasonal(4, regimes=["c", "d"])
    with pytest.raises(cm.InputError, match="observation_size is 1 and 2"):
        F.local_level() + F.constant_velocity()
    with pytest.raises(TypeError):
        F.local_level() + 1
    with pytest.raises(cm.InputError, match="rates must be different"):
        F.coordinated_turn([0.1, 0.1])
    with pytest.raises(cm.InputError, match="there are 2 modes"):
        F.constant_velocity(acceleration=[1.0, 2.0], regimes=["a"])
    with pytest.raises(cm.InputError, match="needs 3 observations before it knows its state"):
        F.fit(F.seasonal(4), torch.zeros(3, 1).double())
    with pytest.raises(cm.InputError, match="EM counts every observation"):
        F.fit(F.local_level(), torch.randn(9, 1).double(), method="em")
