"""Maximum likelihood: simulated truth, other optimizers, EM that climbs, standard errors."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize

import cumulant as cm
from cumulant.filtering.em import expectation_maximization
from cumulant.filtering.parameters import coordinates
from cumulant.filtering.recursion import scheme_of
from switching import covariance, means, model, parameters, seeded

F = cm.filtering
D = torch.float64


def level(q, r, modes=1):
    one = torch.ones(modes, 1, 1, dtype=D)
    stay = 0.9 if modes > 1 else 1.0
    eye = torch.eye(modes, dtype=D)
    return F.SwitchingLinearGaussian(
        transition=stay * eye + (1 - stay) * (1 - eye),
        initial=torch.full((modes,), 1 / modes, dtype=D),
        dynamics=one,
        dynamics_noise=torch.tensor(q, dtype=D).reshape(-1, 1, 1),
        emission=one,
        emission_noise=torch.tensor(r, dtype=D).reshape(-1, 1, 1),
        initial_mean=torch.zeros(1, dtype=D),
        initial_covariance=torch.eye(1, dtype=D),
    )


def test_the_truth_is_found_within_standard_errors():
    truth = means([[0.95, 0.05], [0.1, 0.9]], [-1.0, 2.0], [0.5, 1.5])
    y = F.sample(truth, 400, (5,), generator=seeded(0)).observations
    found = F.fit(means([[0.7, 0.3], [0.3, 0.7]], [0.0, 1.0], [1.0, 1.0]), y)
    assert found.converged
    assert found.parameter_count == 6
    assert found.observation_count == 2000
    for name in ("transition", "emission_bias", "emission_noise"):
        off = (found.model.parameters[name] - truth.parameters[name]).abs()
        assert (off < 4 * found.standard_errors[name]).all()
        assert (found.standard_errors[name] < 0.2).all()
    best = float(F.filter(truth, y).log_likelihood.sum())
    assert best < found.log_likelihood < best + 12
    assert math.isclose(found.aic, 12 - 2 * found.log_likelihood)
    assert math.isclose(found.bic, 6 * math.log(2000) - 2 * found.log_likelihood)


def test_another_optimizer_agrees_on_a_model_with_states():
    """scipy's Nelder-Mead on three logarithms, with its own parametrization."""
    y = F.sample(level([0.4], [1.0]), 120, generator=seeded(2)).observations

    def loss(v):
        with torch.no_grad():
            return -float(F.filter(level([math.exp(v[0])], [math.exp(v[1])]), y).log_likelihood)

    theirs = optimize.minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-6})
    ours = F.fit(level([1.0], [1.0]), y, tol=1e-8)
    assert abs(ours.log_likelihood + theirs.fun) < 1e-5
    assert abs(math.log(float(ours.model.dynamics_noise)) - theirs.x[0]) < 1e-3
    # Standard errors from finite differences of the same likelihood, in the variances themselves.
    at = np.array([float(ours.model.dynamics_noise), float(ours.model.emission_noise)])

    def plain(v):
        with torch.no_grad():
            return -float(F.filter(level([v[0]], [v[1]]), y).log_likelihood)

    h, H = 1e-3 * at, np.zeros((2, 2))
    for a in range(2):
        for b in range(2):
            e, g = np.eye(2)[a] * h, np.eye(2)[b] * h
            H[a, b] = (
                plain(at + e + g) - plain(at + e - g) - plain(at - e + g) + plain(at - e - g)
            ) / (4 * h[a] * h[b])
    errors = np.sqrt(np.linalg.inv(H).diagonal())
    assert abs(float(ours.standard_errors["dynamics_noise"]) / errors[0] - 1) < 1e-2
    assert abs(float(ours.standard_errors["emission_noise"]) / errors[1] - 1) < 1e-2


def climb(start, y, free, steps=8, collapse="exact", inputs=None):
    found = coordinates(start, free)
    masks = {b.name: b.mask for b in found.blocks}
    values, m = [], start
    with torch.no_grad():
        for _ in range(steps):
            value, m = expectation_maximization(m, y, inputs, scheme_of("test", collapse), masks)
            values.append(value)
    return values, m


def test_em_never_descends_where_the_smoother_is_exact():
    """Every parameter of a switching model at once, by full enumeration, with gaps in the data."""
    truth = model(2, 2, 2, 3, inputs=1)
    u = torch.randn(6, 1, dtype=D, generator=torch.Generator().manual_seed(0))
    y = F.sample(truth, 6, (10,), inputs=u, generator=seeded(1)).observations
    y[0, 2, 1] = y[3, 4] = y[5, 1, 0] = torch.nan
    start = F.SwitchingLinearGaussian(**parameters(2, 2, 2, 8, inputs=1))
    names = ["transition", "initial", "initial_mean", "initial_covariance"]
    for which in ("dynamics", "emission"):
        names += [which, f"{which}_bias", f"{which}_input", f"{which}_noise"]
    values, _ = climb(start, y, names, 10, inputs=u)
    assert all(b > a - 1e-9 for a, b in itertools.pairwise(values))
    assert values[-1] > values[0] + 5
    for name in names:  # and each by itself
        each, _ = climb(start, y, [name], 3, inputs=u)
        assert each[0] < each[1] < each[2], name


def test_em_with_shared_parameters_never_descends():
    given = parameters(2, 1, 1, 5)
    for name in ("emission", "emission_bias", "emission_noise", "dynamics_noise"):
        given[name] = given[name][0]
    start = F.SwitchingLinearGaussian(**given)
    y = F.sample(model(2, 1, 1, 6), 6, (10,), generator=seeded(1)).observations
    free = ["emission", "emission_bias", "emission_noise", "dynamics_noise", "dynamics"]
    values, m = climb(start, y, free, 8)
    assert all(b > a - 1e-9 for a, b in itertools.pairwise(values))
    assert m.emission.shape == (1, 1)
    assert m.dynamics_noise.shape == (1, 1)
    assert m.dynamics.shape == (2, 1, 1)


def test_em_and_gradients_meet():
    y = F.sample(level([0.4], [1.0]), 100, generator=seeded(3)).observations
    y[30:50] = torch.nan
    climbed = F.fit(level([1.0], [0.3]), y, method="em", max_steps=2000, tol=1e-9)
    pulled = F.fit(level([1.0], [0.3]), y, tol=1e-8)
    assert climbed.converged
    assert abs(climbed.log_likelihood - pulled.log_likelihood) < 1e-3
    ratio = climbed.standard_errors["emission_noise"] / pulled.standard_errors["emission_noise"]
    assert 0.95 < float(ratio) < 1.05


def test_regimes_come_back_in_order():
    y = F.sample(
        means([[0.9, 0.1], [0.1, 0.9]], [0.0, 3.0], [0.5, 0.5]), 200, generator=seeded(4)
    ).observations
    start = means([[0.8, 0.2], [0.2, 0.8]], [2.0, 1.0], [1.0, 1.0])
    found = F.fit(start, y)
    assert found.model.emission_bias[0] < found.model.emission_bias[1]
    kept = F.fit(start, y, order_by=False)
    assert kept.model.emission_bias[0] > kept.model.emission_bias[1]
    assert torch.allclose(found.model.transition, kept.model.permute([1, 0]).transition)
    swapped = {n: x.flip(0) for n, x in kept.standard_errors.items()}
    assert torch.allclose(found.standard_errors["emission_bias"], swapped["emission_bias"])
    other = F.fit(start, y, order_by=lambda m: -m.emission_bias[:, 0])
    assert other.model.emission_bias[0] > other.model.emission_bias[1]
    # A fixed parameter that tells the modes apart keeps their order.
    given = parameters(2, 1, 1, 7)
    told = F.SwitchingLinearGaussian(**given)
    seen = F.sample(told, 40, generator=seeded(0)).observations
    how = {"max_steps": 3, "standard_errors": False, "throw": False}
    free = F.fit(told, seen, free=["dynamics_noise"], **how)
    assert torch.equal(free.model.dynamics, told.dynamics)
    assert free.order == (0, 1)


def test_several_starts():
    """Three clusters of means; a start in which modes are the same stays there, others get out."""
    truth = means(
        [[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.05, 0.05, 0.9]], [-4, 0, 4], [0.2, 0.2, 0.2]
    )
    y = F.sample(truth, 150, generator=seeded(5)).observations
    even = [1 / 3] * 3
    start = means([even, even, even], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    one = F.fit(start, y, standard_errors=False)
    many = F.fit(start, y, starts=8, spread=4.0, standard_errors=False)
    assert len(many.starts) == 8
    assert many.starts[0] == pytest.approx(one.log_likelihood, abs=1e-6)
    assert many.log_likelihood == max(many.starts)
    assert many.log_likelihood > one.log_likelihood + 10
    assert 1 <= many.agreed < 8
    assert one.agreed == 1
    again = F.fit(start, y, starts=8, spread=4.0, standard_errors=False)
    assert again.starts == many.starts


def test_what_may_move():
    given = parameters(2, 2, 2, 9)
    given["emission_noise"] = torch.diag_embed(torch.rand(2, 2, dtype=D) + 0.5)
    given["transition"] = torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=D)
    start = F.SwitchingLinearGaussian(**given)
    y = F.sample(start, 12, generator=seeded(0)).observations
    mask = torch.tensor([[True, False], [False, False]])
    found = F.fit(
        start,
        y,
        free={"dynamics": mask, "emission_noise": True, "transition": True},
        max_steps=4,
        standard_errors=False,
        order_by=False,
        throw=False,
    )
    assert found.parameter_count == 2 + 4 + 1
    moved = found.model.dynamics != start.dynamics
    assert torch.equal(moved, mask.expand(2, 2, 2))
    noise = found.model.emission_noise
    assert torch.equal(noise, torch.diag_embed(noise.diagonal(dim1=-2, dim2=-1)))
    assert found.model.transition[1, 0] == 0
    dense = coordinates(start, {"emission_noise": "dense"})
    assert dense.blocks[0].size == 6
    usual = {b.name for b in coordinates(start).blocks}
    assert usual == {
        *("transition", "dynamics_bias", "dynamics_noise"),
        *("emission_bias", "emission_noise"),
    }


def test_coordinates_there_and_back():
    given = parameters(3, 2, 2, 10)
    m = F.SwitchingLinearGaussian(**given)
    names = ["transition", "initial", "dynamics_noise", "emission", "initial_covariance"]
    c = coordinates(m, names)
    again = c.at(c.vector(m))
    for name in names:
        assert torch.allclose(again.parameters[name], given[name], atol=1e-12)
    moved = c.at(c.vector(m) + 0.3)
    F.SwitchingLinearGaussian(**moved.parameters)  # valid wherever it goes


def test_interrupted_and_stopped():
    y = F.sample(level([0.4], [1.0]), 30, generator=seeded(6)).observations

    def stop(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    for method in ("lbfgs", "em"):
        how = {"method": method, "progress": stop, "tol": 1e-12}
        found = F.fit(level([5.0], [5.0]), y, **how, throw=False)
        assert not found.converged
        assert found.status == "interrupted"
        assert "interrupted" in found.message
        assert found.log_likelihood > float(F.filter(level([5.0], [5.0]), y).log_likelihood)
    seen = []
    F.fit(level([5.0], [5.0]), y, progress=lambda x: seen.append((x.done, x.value)))
    assert [s for s, _ in seen] == list(range(1, len(seen) + 1))
    assert all(b >= a for (_, a), (_, b) in itertools.pairwise(seen))


def test_what_is_not_identified_has_no_standard_errors():
    """Two states that only their sum shows: one direction does not matter."""
    flat = means([[0.5, 0.5], [0.5, 0.5]], [1.0, 1.0], [1.0, 1.0])
    y = torch.randn(40, 1, dtype=D, generator=torch.Generator().manual_seed(0))
    found = F.fit(flat, y)
    assert found.standard_errors is None
    assert "the data do not identify some parameter" in found.message


def test_nonlinear_models_learn_their_noise():
    truth = level([0.4], [1.0])
    y = F.sample(truth, 60, generator=seeded(7)).observations
    curved = F.SwitchingNonlinear(
        **{k: v for k, v in truth.parameters.items() if k not in ("dynamics", "emission")},
        dynamics=lambda x: x,
        emission=lambda x: x,
    )
    ours, linear = F.fit(curved, y, tol=1e-7), F.fit(truth, y, tol=1e-7)
    assert abs(ours.log_likelihood - linear.log_likelihood) < 1e-5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"free": ["speed"]}, "no parameter 'speed' to free; it has transition"),
        ({"free": {"dynamics": torch.ones(3, dtype=torch.bool)}}, "boolean mask of shape"),
        ({"free": {"transition": "dense"}}, "transition is free as a whole"),
        ({"free": {"dynamics_noise": "round"}}, "'diagonal' or 'dense'"),
        ({"free": []}, "nothing is free"),
        ({"method": "newton"}, "method must be 'lbfgs' or 'em'"),
        ({"starts": 0}, "starts must be an integer >= 1"),
        ({"max_steps": 0}, "max_steps must be an integer >= 1"),
        ({"tol": -1.0}, "tol must be finite and at least 0"),
        ({"order_by": "speed"}, "order_by must be a function of the model, False, or one of"),
        ({"order_by": lambda m: torch.zeros(5)}, "one number for each of the 2 modes"),
        ({"method": "em", "free": {"dynamics": torch.eye(1, dtype=torch.bool)[0] * False}}, "free"),
    ],
)
def test_bad_input(change, match):
    y = torch.zeros(5, 1, dtype=D)
    with pytest.raises(cm.InputError, match=match):
        F.fit(level([1.0, 2.0], [1.0, 1.0], 2), y, **{"max_steps": 1, **change})


def test_bad_starts():
    y = torch.zeros(5, 1, dtype=D)
    singular = level([0.0], [1.0])
    with pytest.raises(cm.InputError, match="positive definite start"):
        F.fit(singular, y, free=["dynamics_noise"])
    assert "dynamics_noise" not in {b.name for b in coordinates(singular).blocks}
    given = parameters(2, 1, 1, 0)
    given["emission_bias"] = given["emission_bias"][0]
    with pytest.raises(cm.InputError, match="EM shares emission_bias between modes only if"):
        F.fit(F.SwitchingLinearGaussian(**given), y, method="em", free=["emission_bias"])
    lead = parameters(2, 1, 1, 0, lead=(5,))
    with pytest.raises(cm.InputError, match="EM learns parameters that are constant"):
        F.fit(F.SwitchingLinearGaussian(**lead), y, method="em", free=["dynamics"])
    assert covariance(1, 1).shape == (1, 1, 1)
