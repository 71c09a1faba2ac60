"""Fields that wait: what is kept belongs to the mode it was made in, in every lazy result."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.func import jvp, vmap

import cumulant as cm
from cumulant.core.lazy import Lazy, kept, known

DOUBLE = torch.float64


class Doubled(Lazy):
    def __init__(self, x):
        self.x = x
        self.times = 0

    @kept
    def twice(self):
        self.times += 1
        return 2 * self.x


class TestKept:
    def test_once_in_each_mode(self):
        a = Doubled(torch.ones(2, requires_grad=True))
        assert known(a, "twice") is None
        assert a.twice is a.twice
        assert known(a, "twice") is a.twice
        with torch.inference_mode():
            assert a.twice.is_inference()
            assert a.twice is a.twice
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert a.twice is a.twice
        assert a.times == 3

    def test_first_without_a_gradient_then_with(self):
        a = Doubled(torch.ones(2, requires_grad=True))
        with torch.no_grad():
            assert not a.twice.requires_grad
        assert a.twice.requires_grad

    def test_made_without_a_gradient(self):
        with torch.no_grad():
            a = Doubled(torch.ones(2, requires_grad=True))
        assert not a.twice.requires_grad

    def test_nothing_is_kept_for_another_transform(self):
        a = Doubled(torch.ones(2))
        one = torch.ones(())
        vmap(lambda s: s * a.twice)(torch.ones(3))
        jvp(lambda s: s * a.twice, (one,), (one,))
        assert a.times == 2
        assert not a._kept

    def test_an_object_made_inside_a_transform_keeps_its_own(self):
        made = []

        def inside(x):
            made.append(Doubled(x))
            return made[0].twice + made[0].twice

        out = vmap(inside)(torch.ones(3, 2))
        assert made[0].times == 1
        assert (out == 4).all()

    def test_an_error_is_not_kept(self):
        class Fails(Lazy):
            tries = 0

            @kept
            def field(self):
                self.tries += 1
                if self.tries == 1:
                    raise ValueError("once")
                return self.tries

        a = Fails()
        with pytest.raises(ValueError, match="once"):
            _ = a.field
        assert a.field == 2


def filtered(scale):
    eye = torch.eye(1, dtype=DOUBLE)
    model = cm.filtering.SwitchingLinearGaussian(
        transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=DOUBLE),
        dynamics=scale * eye,
        emission=eye,
        dynamics_noise=torch.stack([0.1 * eye, 2.0 * eye]),
        emission_noise=eye,
        initial_mean=torch.zeros(1, dtype=DOUBLE),
        initial_covariance=eye,
    )
    y = torch.linspace(-1, 2, 6, dtype=DOUBLE)[:, None].sin()
    return model, cm.filtering.filter(model, y, collapse="gpb2")


def posterior(scale):
    return filtered(scale)[1]


def smoothed(scale):
    return cm.filtering.smooth(*filtered(scale))


def retrieval(scale):
    patterns = torch.randn(5, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    state = scale * torch.linspace(-1, 1, 6, dtype=DOUBLE).reshape(2, 3)
    return cm.Memory(patterns, beta=2.0).retrieve(state, steps=2)


def association(scale):
    torch.manual_seed(0)
    layer = cm.nn.Hopfield(4, heads=2).double()
    return layer.associate(*(scale * torch.randn(1, n, 4, dtype=DOUBLE) for n in (3, 5, 5)))


RESULTS = {
    posterior: (
        *("mean", "covariance", "mode_means", "mode_covariances", "mode_probabilities"),
        *("log_likelihood", "step_log_likelihood", "predicted_mode_probabilities"),
        *("predicted_mean", "predicted_covariance"),
        *("observation_mean", "observation_covariance"),
    ),
    smoothed: ("mean", "covariance", "mode_probabilities", "mode_means", "initial_mean"),
    retrieval: ("energy", "value", "state"),
    association: ("energy", "state", "output"),
}


@pytest.mark.parametrize("make", RESULTS, ids=lambda f: f.__name__)
def test_looking_without_gradients_leaves_them_to_others(make):
    step = 1e-5
    low, high = (make(torch.tensor(0.8 + d, dtype=DOUBLE)) for d in (-step, step))
    for seen in RESULTS[make]:
        scale = torch.tensor(0.8, dtype=DOUBLE, requires_grad=True)
        a = make(scale)
        with torch.no_grad():
            getattr(a, seen)
        for name in RESULTS[make]:
            x = getattr(a, name).sin().sum()
            (ours,) = torch.autograd.grad(x, scale, retain_graph=True)
            both = (getattr(b, name).sin().sum() for b in (high, low))
            slope = (next(both) - next(both)) / (2 * step)
            torch.testing.assert_close(ours, slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", RESULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_hold_numbers(make, how):
    a = make(torch.tensor(0.8, dtype=DOUBLE, requires_grad=True))
    first, *_ = RESULTS[make]
    getattr(a, first)
    b = how(a)
    for name in RESULTS[make]:
        torch.testing.assert_close(getattr(b, name), getattr(a, name).detach(), rtol=0, atol=0)
        assert not getattr(b, name).requires_grad
    assert type(b).__name__ in repr(b)
    assert " at 0x" not in repr(b)
