"""The gradient of a model of modes alone, against enumeration, autograd and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cumulant as cm
from cumulant.filtering import modes_gradient
from cumulant.filtering.fitting import _problem
from cumulant.filtering.objective import _Arrays, _by_autograd, hessian, objective_of
from switching import exact, means, parameters, seeded

F = cm.filtering
D = torch.float64


@pytest.fixture(autouse=True)
def by_torch():
    with cm.engine("torch"):
        yield


def drawn(modes, p, inputs, steps, seed, *, missing=True, batch=(), initial=True):
    """A problem, and what its model was made of."""
    given = parameters(modes, 0, p, seed, inputs=inputs)
    given = {k: x for k, x in given.items() if k != "dynamics_input"}
    if not initial:
        del given["initial"]
    g = seeded(seed)
    y = 2 * torch.randn(*batch, steps, p, generator=g, dtype=D)
    if missing:
        gone = torch.rand(y.shape, generator=g) < 0.2
        gone[..., 0, 0] = False  # a series has at least one observation
        y[gone] = torch.nan
    u = torch.randn(steps, inputs, generator=g, dtype=D) if inputs else None
    model = F.SwitchingLinearGaussian(**given)
    return _problem(model, y, None, "gpb2", None, u), given


def at(problem, seed, count=3):
    start = problem.coordinates.vector(problem.coordinates.model)
    return (start + 0.3 * torch.randn(count, len(start), generator=seeded(seed), dtype=D)).numpy()


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize(("modes", "p", "inputs"), [(2, 1, 1), (3, 2, 0), (2, 3, 2)])
@pytest.mark.parametrize("steps", [1, 2, 7, 33])
def test_the_gradient_is_the_one_of_the_tape(modes, p, inputs, steps, initial):
    for batch in ((), (4,)):
        problem, _ = drawn(modes, p, inputs, steps, 5, batch=batch, initial=initial)
        points = at(problem, 1)
        found = objective_of(problem)
        assert isinstance(found, _Arrays)
        assert found.gradient is modes_gradient.gradient
        found.slowly = None  # it must not need the tape
        ours, tape = found(points), _by_autograd(problem)(points)
        np.testing.assert_allclose(ours.values, tape.values, rtol=1e-11)
        np.testing.assert_allclose(ours.slopes, tape.slopes, rtol=1e-8, atol=1e-9)


def test_the_value_is_the_one_of_enumeration():
    problem, given = drawn(3, 2, 0, 5, 8, missing=False)
    start = problem.coordinates.vector(problem.coordinates.model)
    (value,), _ = objective_of(problem)(start[None].numpy())
    assert abs(value - float(exact(given, problem.observations)["log_likelihood"])) < 1e-10


def test_second_derivatives_are_those_of_the_tape():
    problem, _ = drawn(2, 1, 1, 40, 3)
    vector = problem.coordinates.vector(problem.coordinates.model)
    x = vector.clone().requires_grad_()
    truth = torch.autograd.functional.hessian(problem.at, x)
    torch.testing.assert_close(hessian(problem, vector), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("far", [50.0, 2000.0])
def test_what_underflows_is_left_to_logarithms(far):
    """Evidence that no path of the chain explains well: left to right, first mode 1, then 0."""
    chain = [[1.0, 0.0], [1e-9, 1.0 - 1e-9]]
    y = torch.tensor([0.0, far, 0.0, far, 0.0], dtype=D)[:, None]
    model = means(chain, [0.0, far], [1.0, 1.0], initial=torch.tensor([0.5, 0.5]).double())
    problem = _problem(model, y, ["emission_bias", "emission_noise"], "gpb2", None, None)
    start = problem.coordinates.vector(problem.coordinates.model)[None].numpy()
    ours, tape = objective_of(problem)(start), _by_autograd(problem)(start)
    np.testing.assert_allclose(ours.values, tape.values, rtol=1e-12)
    np.testing.assert_allclose(ours.slopes, tape.slopes, rtol=1e-9, atol=1e-9)


def test_a_fit_without_the_compiled_library_is_the_same():
    chain = [[0.9, 0.1], [0.2, 0.8]]
    y = F.sample(means(chain, [1.5, -1.0], [0.3, 0.6]), 100, generator=seeded(2)).observations
    start = means(chain, [-0.5, 0.5], [1.0, 1.0])
    ours = F.fit(start, y)
    with cm.engine("native"):
        theirs = F.fit(start, y)
    assert abs(ours.log_likelihood - theirs.log_likelihood) < 1e-8
    for name, error in theirs.standard_errors.items():
        torch.testing.assert_close(ours.standard_errors[name], error, rtol=1e-4, atol=1e-6)
