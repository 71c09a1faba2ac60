"""One outcome type: codes per problem, diagnoses, errors that carry the result, vmap."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.func import grad, jvp, vmap

import cumulant as cm
from cumulant.core.outcome import DIAGNOSES, Code, Outcome, Solution


def status(*codes: Code) -> Outcome:
    return Outcome(torch.tensor([int(c) for c in codes]))


def test_each_code_has_a_flag_and_a_diagnosis():
    for kind in Code:
        word = kind.name.lower()
        flags = getattr(status(kind, Code.CONVERGED), word)
        assert flags.tolist() == [True, kind == Code.CONVERGED]
        assert status(kind) == word
        assert kind == Code.CONVERGED or all(DIAGNOSES[kind])
        assert str(status(kind)).startswith(word)


def test_a_word_holds_for_the_whole_batch():
    mixed = status(Code.CONVERGED, Code.STALLED)
    assert mixed != "converged"
    assert mixed != "stalled"
    assert mixed == status(Code.CONVERGED, Code.STALLED)
    assert mixed != status(Code.CONVERGED, Code.CONVERGED)
    assert mixed != "no such word"
    assert "1 of 2 converged; 1 of 2 stalled: the residual stopped falling" in str(mixed)
    assert str(Outcome(torch.zeros(0))) == "nothing to solve"


def test_a_condition_becomes_an_outcome():
    assert Outcome.of(torch.tensor([True, False])).unfinished.tolist() == [False, True]
    assert Outcome.of(False, Code.STALLED) == "stalled"
    assert Outcome.of(True) == "converged"


def test_check_returns_what_converged():
    result = Solution(torch.ones(2), status(Code.CONVERGED, Code.CONVERGED))
    assert result.status.check("solve", result) is result


def test_check_raises_with_the_result():
    result = Solution(torch.ones(2), status(Code.CONVERGED, Code.UNFINISHED))
    match = r"^solve: .*1 of 2 unfinished: .* \(tol 1e-3\)\. throw=False"
    with pytest.raises(cm.ConvergenceError, match=match) as caught:
        result.status.check("solve", result, "tol 1e-3")
    assert caught.value.result is result
    assert not isinstance(caught.value, cm.InputError)


@pytest.mark.parametrize("kind", [Code.OUTSIDE, Code.BOUNDARY])
@pytest.mark.parametrize("error", [cm.NoSolutionError, cm.InputError, cm.ConvergenceError])
def test_no_solution_is_wrong_input_and_no_convergence(kind, error):
    """Also where another problem of the batch failed in another way."""
    result = Solution(torch.ones(2), status(kind, Code.STALLED))
    with pytest.raises(error) as caught:
        result.status.check("link", result)
    assert caught.value.result is result


def test_an_error_survives_pickling():
    error = cm.NoSolutionError("no", torch.ones(2))
    assert torch.equal(pickle.loads(pickle.dumps(error)).result, torch.ones(2))


def double(x, throw=True):
    """2x, where x is positive."""
    found = Solution(2 * x, Outcome.of(x > 0, Code.STALLED))
    return found.status.check("double", found) if throw else found


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: vmap(f, in_dims=1, out_dims=1)])
def test_inside_vmap(wrap):
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = wrap(vmap(double))(x)
    assert torch.equal(found.value, 2 * x)
    assert found.status == "converged"
    x[1, 0] = -1
    quiet = wrap(vmap(lambda y: double(y, throw=False)))(x)
    assert quiet.status.stalled.tolist() == (x < 0).tolist()
    with pytest.raises(cm.ConvergenceError, match=r"1 of \d+ stalled") as caught:
        wrap(vmap(double))(x)
    assert sorted(caught.value.result.value.flatten().tolist()) == sorted(
        (2 * x).flatten().tolist()
    )


def test_derivatives_pass_through_the_check():
    x = torch.tensor([1.0, 2.0])
    assert vmap(grad(lambda y: double(y).value))(x).tolist() == [2.0, 2.0]
    moved = vmap(lambda y: jvp(lambda z: double(z).value, (y,), (y,))[1])(x)
    assert moved.tolist() == [2.0, 4.0]
    with pytest.raises(cm.ConvergenceError):
        vmap(grad(lambda y: double(y).value))(-x)


def test_an_outcome_prints_inside_vmap():
    seen = []

    def look(x):
        seen.append(str(Outcome.of(x > 0)))
        return x

    vmap(look)(torch.ones(2))
    assert seen[0].startswith("Outcome(code=")
