"""What a model and a series must be, and what people are told when they are not."""

import pickle
from copy import deepcopy

import pytest
import torch

import cumulant as cm
from switching import model, parameters

F = cm.filtering
D = torch.float64


def built(**change):
    given = parameters(2, 2, 1, 0, inputs=1)
    for name, x in change.items():
        given[name] = x
    return F.SwitchingLinearGaussian(**given)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"transition": torch.tensor([[0.9, 0.3], [0.1, 0.7]])}, "columns do.*transition.mT"),
        ({"transition": torch.tensor([[9.0, 1.0], [2.0, 8.0]])}, "row . sums to 10.*counts"),
        ({"transition": torch.tensor([[1.5, -0.5], [0.5, 0.5]])}, "smallest entry is -0.5"),
        ({"transition": torch.ones(2, 3) / 3}, r"square, \(..., M, M\), not \(2, 3\)"),
        ({"transition": torch.ones(3, 3) / 3}, "one probability for each of the 3 modes"),
        ({"initial": torch.tensor([0.5, 0.6])}, "probabilities that sum to one"),
        ({"dynamics": torch.ones(3, 2, 2)}, r"dynamics must have shape \(2, 2, 2\) for 2 modes"),
        ({"dynamics": torch.ones(2, 2, 3)}, r"dynamics must have shape \(2, 3, 3\)"),
        ({"dynamics": torch.ones(2)}, "dynamics must have at least 2 dimensions"),
        ({"dynamics_bias": torch.ones(2, 3)}, r"dynamics_bias must have shape \(2, 2\)"),
        ({"emission": torch.ones(2, 1, 3)}, r"emission must have shape \(2, 1, 2\)"),
        ({"emission_noise": torch.ones(2, 2, 2)}, r"emission_noise must have shape \(2, 1, 1\)"),
        ({"emission_noise": -torch.ones(2, 1, 1)}, "smallest eigenvalue is -1"),
        (
            {"dynamics_noise": torch.tensor([[1.0, 0.5], [0.0, 1.0]])},
            "dynamics_noise must be symmetric",
        ),
        ({"initial_covariance": torch.tensor([[1.0, 2.0], [2.0, 1.0]])}, "positive semi-definite"),
        ({"initial_mean": torch.ones(3)}, r"initial_mean must have shape \(2, 2\)"),
        ({"emission_bias": torch.tensor([[torch.nan], [1.0]])}, "emission_bias holds NaN"),
        ({"emission_bias": torch.tensor([[torch.inf], [1.0]])}, "emission_bias must be finite"),
        ({"emission_input": torch.ones(2, 1, 3)}, r"emission_input must have shape \(2, 1, 1\)"),
        ({"dynamics": "fast"}, "dynamics must be a tensor or a number, not str"),
        (
            {"dynamics": torch.ones(4, 2, 2, 2), "emission": torch.ones(5, 2, 1, 2)},
            "different numbers of steps: dynamics 4, emission 5",
        ),
    ],
)
def test_bad_models(change, match):
    with pytest.raises(cm.InputError, match=match):
        built(**change)


@pytest.mark.parametrize(
    ("y", "more", "match"),
    [
        (torch.zeros(4), {}, r"shape \(\*batch, T, 1\).*that is y\[..., None\]"),
        (torch.zeros(4, 2), {}, r"shape \(\*batch, T, 1\)"),
        (torch.zeros(0, 1), {}, "T >= 1"),
        (torch.full((4, 1), torch.nan), {}, "no observation at all"),
        (torch.full((4, 1), torch.inf), {}, "infinity; NaN marks what is missing"),
        (torch.zeros(4, 1, dtype=torch.complex64), {}, "real numbers"),
        ("abc", {}, "tensor or an array of numbers, not str"),
        (torch.zeros(2, 4, 1), {"lengths": torch.tensor([1, 5])}, "from 1 to T = 4"),
        (torch.zeros(2, 4, 1), {"lengths": torch.tensor([1, 0])}, "from 1 to T = 4"),
        (torch.zeros(2, 4, 1), {"lengths": torch.tensor([1, 2, 3])}, "one entry for each series"),
        (torch.zeros(4, 1), {"collapse": "gpb"}, "'gpb1', 'gpb2', 'imm', 'exact' or an integer"),
        (torch.zeros(4, 1), {"collapse": 0}, "k >= 1"),
        (torch.zeros(4, 1), {"collapse": True}, "k >= 1"),
        (torch.zeros(4, 1), {"inputs": torch.zeros(3, 1)}, r"inputs must have shape \(\*batch, 4"),
        (torch.zeros(4, 1), {"inputs": torch.full((4, 1), torch.nan)}, "inputs must be finite"),
        (torch.zeros(4, 1), {"inputs": None}, "takes 1 inputs at each step"),
        (
            torch.zeros(40, 1),
            {"collapse": "exact", "inputs": torch.zeros(40, 1)},
            "1.1e.12 histories",
        ),
    ],
)
def test_bad_series(y, more, match):
    with pytest.raises(cm.InputError, match=match):
        F.filter(built(), y, **{"inputs": torch.zeros(4, 1), **more})


def test_one_all_missing_series_is_named():
    y = torch.zeros(3, 4, 1)
    y[1] = torch.nan
    with pytest.raises(cm.InputError, match="series number 1 has no observation"):
        F.filter(model(2, 2, 1), y)


def test_other_mistakes():
    m, y = model(2, 2, 1), torch.zeros(4, 1)
    with pytest.raises(cm.InputError, match="no dynamics_input or emission_input"):
        F.filter(m, y, inputs=torch.zeros(4, 1))
    with pytest.raises(cm.InputError, match="not Tensor"):
        F.filter(y, y)
    post = F.filter(m, y)
    with pytest.raises(cm.InputError, match=r"next observation of each series, shape \(1,\)"):
        F.update(post, torch.zeros(2, 1))
    with pytest.raises(cm.InputError, match="infinity"):
        F.update(post, torch.tensor([torch.inf]))
    with pytest.raises(cm.InputError, match="made by another model"):
        F.smooth(model(2, 2, 1, 1), post)
    with pytest.raises(cm.InputError, match="forgotten its past"):
        F.smooth(m, post.latest())
    with pytest.raises(cm.InputError, match="steps must be an integer >= 1"):
        F.forecast(post, 0)
    with pytest.raises(cm.InputError, match="steps must be an integer"):
        F.sample(m, 2.5)
    with pytest.raises(cm.InputError, match=r"generator must be a torch\.Generator, not int"):
        F.sample(m, 2, generator=0)
    with pytest.raises(cm.InputError, match="sample: 'seed' is now 'generator'"):
        F.sample(m, 2, seed=0)
    with pytest.raises(AttributeError, match="state_dimension is now state_size"):
        _ = m.state_dimension
    with pytest.raises(cm.InputError, match="no parameter is called speed"):
        m.replace(speed=torch.ones(1))
    with pytest.raises(cm.InputError, match="each mode 0 to 1 once"):
        m.permute([0, 0])
    given = parameters(2, 2, 1)
    given["dynamics"] = given["dynamics"].expand(3, 1, 2, 2, 2)
    three = F.SwitchingLinearGaussian(**given)
    with pytest.raises(cm.InputError, match=r"batch dimensions must broadcast.*dynamics \(3,\)"):
        F.filter(three, torch.zeros(2, 4, 1))
    still = parameters(2, 2, 1)
    del still["initial"]
    still["transition"] = torch.eye(2, dtype=D)
    with pytest.raises(cm.InputError, match="give initial"):
        F.SwitchingLinearGaussian(**still)


def test_conjugate_models_are_for_filter_and_update():
    m = F.SwitchingConjugate(
        transition=torch.ones(1, 1),
        initial=torch.ones(1),
        prior=cm.Gamma(2.0, 1.0),
        likelihood=cm.Poisson,
    )
    post = F.filter(m, torch.tensor([1.0, 2.0]))
    F.update(post, torch.tensor(3.0))
    for call in (
        lambda: F.smooth(m, post),
        lambda: F.forecast(post, 2),
        lambda: F.sample(m, 2),
        lambda: F.fit(m, torch.zeros(3, 1)),
    ):
        with pytest.raises(cm.InputError, match=r"SwitchingConjugate.*for filter and update"):
            call()
    with pytest.raises(cm.InputError, match="takes no inputs"):
        F.filter(m, torch.tensor([1.0]), inputs=torch.zeros(1, 1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"embeddings": [torch.ones(2, 1), torch.ones(3, 1)]}, "one common n"),
        ({"embeddings": [torch.ones(2, 1), torch.zeros(2, 1)]}, "full column rank"),
        ({"dynamics": [torch.ones(1, 1)]}, "dynamics has 1 entries for 2"),
        ({"dynamics": [torch.ones(1, 1), torch.ones(2, 2)]}, r"mode 1 must be \(1, 1\)"),
    ],
)
def test_bad_embeddings(change, match):
    good = {
        "embeddings": [torch.ones(2, 1), torch.eye(2)[:, :1]],
        "dynamics": [torch.ones(1, 1)] * 2,
        "dynamics_noise": [torch.ones(1, 1)] * 2,
        "emission": [torch.ones(1, 1)] * 2,
        "transition": torch.ones(2, 2) / 2,
        "emission_noise": torch.eye(1),
        "initial_mean": torch.zeros(2),
        "initial_covariance": torch.eye(2),
    }
    F.SwitchingLinearGaussian.embedded(**good)
    with pytest.raises(cm.InputError, match=match):
        F.SwitchingLinearGaussian.embedded(**{**good, **change})


def test_precisions():
    m = model(2, 2, 1)
    y = torch.randn(4, 1, generator=torch.Generator().manual_seed(0))
    assert F.filter(m, y).mean.dtype == D
    assert F.filter(m.to(torch.float32), y).mean.dtype == torch.float32
    assert F.filter(m.to(torch.float32), y.double()).mean.dtype == D
    assert F.filter(m.to(torch.float16), y.half()).mean.dtype == torch.float32
    assert F.filter(m.to(torch.float32), [[1], [2]]).mean.dtype == torch.float32
    assert F.filter(m, torch.tensor([[1], [2]])).mean.dtype == D
    single, double = F.filter(m.to(torch.float32), y), F.filter(m, y)
    assert (single.mean - double.mean).abs().max() < 1e-4


def test_copies():
    m, y = model(2, 2, 1), torch.ones(3, 1, dtype=D)
    for again in (pickle.loads(pickle.dumps(m)), deepcopy(m)):
        assert torch.equal(F.filter(again, y).mean, F.filter(m, y).mean)
    post = pickle.loads(pickle.dumps(F.filter(m, y)))
    assert torch.equal(F.smooth(m, post).mean, F.smooth(m, F.filter(m, y)).mean)


def test_no_series_at_all():
    post = F.filter(model(2, 2, 1), torch.zeros(0, 4, 1))
    assert post.mean.shape == (0, 4, 2)
    assert F.smooth(post.model, post).covariance.shape == (0, 4, 2, 2)
    assert F.forecast(post, 2).mean.shape == (0, 2, 2)
