"""Draws come from the generator that was passed, and leave torch's own alone."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm

D = cm.dynamics


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


GAUSSIAN = cm.Gaussian(torch.zeros(2), torch.eye(2))
CALLS = {
    "gaussian": lambda g: GAUSSIAN.sample(None, 5, generator=g),
    "gamma": lambda g: cm.Gamma(2.0, 1.0).sample(None, 5, generator=g),
    "points": lambda g: cm.Empirical(X).sample(None, 20, generator=g),
    "mixture": lambda g: cm.Mixture(cm.Poisson(torch.tensor([1.0, 9.0]))).sample(
        None, 9, generator=g
    ),
    "sphere": lambda g: cm.VonMisesFisher(torch.eye(3)[0], 2.0).sample(None, 5, generator=g),
    "project": lambda g: (
        cm.project(
            torch.distributions.LogNormal(0.0, 1.0), cm.Gamma, samples=50, generator=g
        ).expectation
    ),
    "cloud": lambda g: D.initial_cloud("sphere", 5, 3, generator=g),
    "null": lambda g: D.gaussianity(X, draws=19, generator=g).null_quantiles,
    "alternate": lambda g: D.alternate(GAUSSIAN, torch.eye(2), 5, generator=g).index.float(),
    "block": lambda g: D.block_gibbs(torch.eye(3), 5, generator=g).states,
    "pairs": lambda g: D.expansion(X, 2 * X + X**2, pairs=7, generator=g).ratios,
}
X = torch.randn(40, 2, generator=seeded())


@pytest.mark.parametrize("name", CALLS)
def test_the_generator_decides(name):
    call = CALLS[name]
    first, again, other = call(seeded(1)), call(seeded(1)), call(seeded(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", CALLS)
def test_torchs_generator_is_left_alone(name):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    CALLS[name](seeded())
    assert torch.equal(torch.rand(3), expected)


def test_two_draws_from_one_generator_differ():
    random = seeded()
    assert not torch.equal(
        *(cm.Gamma(2.0, 1.0).sample(None, 5, generator=random) for _ in range(2))
    )


def test_a_seed_is_not_a_generator():
    for call in (
        lambda: GAUSSIAN.sample(None, 5, generator=0),
        lambda: D.initial_cloud("sphere", 5, 3, generator=0),
    ):
        with pytest.raises(cm.InputError, match=r"torch\.Generator\(\)\.manual_seed"):
            call()


def test_the_default_is_torchs_own():
    torch.manual_seed(3)
    first = cm.Gamma(2.0, 1.0).sample(None, 5)
    torch.manual_seed(3)
    assert torch.equal(first, cm.Gamma(2.0, 1.0).sample(None, 5))
