"""What is a matter of each text is computed text by text: the rank residual (Dong et al., 2021)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cumulant import InputError
from cumulant.lens.clouds import Cloud, _leading
from cumulant.lens.layers import LayerProbe


def cloud_of(states, real, tokens=4096, sink=None):
    cloud = Cloud(tokens, seed=0)
    sink = torch.zeros_like(real) if sink is None else sink
    cloud.add(states.flatten(0, 1), real=real, sink=sink)
    return cloud


def padded(lengths, d=6, seed=0):
    """Texts of these lengths, in turn padded left and right, and what is no padding."""
    rng = np.random.default_rng(seed)
    states = np.full((len(lengths), max(lengths), d), np.nan)
    real = np.zeros(states.shape[:2], dtype=bool)
    for b, n in enumerate(lengths):
        at = slice(0, n) if b % 2 else slice(max(lengths) - n, None)
        states[b, at] = rng.normal(size=(n, d)) * rng.uniform(0.1, 2) + rng.normal(size=d)
        real[b, at] = True
    return states, real


def by_numpy(states, real):
    found = []
    for x, mine in zip(states, real, strict=True):
        x = x[mine]
        if len(x) > 1:
            found.append(np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x))
    return np.mean(found)


def test_texts_that_have_each_collapsed_have_no_residual():
    """Each text is one point, the two points differ: pooled, that would be 0.58 or so."""
    points = torch.tensor([[3.0, 4.0, 0.1], [0.3, -2.0, 1.0]])
    states = points[:, None].expand(2, 9, 3)
    shape = cloud_of(states, torch.ones(2, 9).bool()).shape()
    assert shape.rank_residual == 0
    assert shape.participation_ratio == pytest.approx(1)  # one direction: from point to point
    assert shape.anisotropy < 0.9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_residual_is_the_mean_over_texts_of_different_length(dtype):
    states, real = padded([5, 2, 17, 1, 9])
    given = torch.from_numpy(states).to(dtype)
    expected = by_numpy(given.double().numpy(), real)
    # far fewer tokens are sampled than there are: the residual takes all of them
    shape = cloud_of(given, torch.from_numpy(real), tokens=4).shape()
    assert shape.rank_residual == pytest.approx(expected, rel=1e-12)


def test_the_residual_does_not_depend_on_batches():
    states, real = padded([5, 2, 17, 8, 9])
    states, real = torch.from_numpy(states), torch.from_numpy(real)
    whole = cloud_of(states, real)
    first, second = cloud_of(states[:2], real[:2]), cloud_of(states[2:], real[2:])
    first.merge(second.state())
    assert first.shape().rank_residual == pytest.approx(whole.shape().rank_residual, rel=1e-14)


def test_texts_without_a_residual_are_left_out():
    real = torch.ones(3, 4).bool()
    states = torch.randn(3, 4, 2).double()
    states[0], real[1] = 0.0, torch.tensor([True, False, False, False])
    shape = cloud_of(states, real).shape()
    assert shape.rank_residual == pytest.approx(by_numpy(states[2:].numpy(), real[2:].numpy()))
    alone = cloud_of(states[:, :1], torch.ones(3, 1).bool()).shape()
    assert alone.rank_residual is None
    assert alone.anisotropy is not None


def test_a_token_that_is_not_finite_is_left_out():
    states = torch.randn(1, 6, 3).double()
    expected = by_numpy(states[:, 1:].numpy(), np.ones((1, 5), dtype=bool))
    states[0, 0, 1] = float("inf")
    shape = cloud_of(states, torch.ones(1, 6).bool()).shape()
    assert shape.rank_residual == pytest.approx(expected)


def test_a_state_of_another_version_is_refused():
    with pytest.raises(InputError, match="another version"):
        Cloud(4, seed=0).merge({"seen": 0, "key": torch.empty(0), "columns": {}})


def test_a_model_that_collapses_each_text():
    """A block whose output is the mean of its text: two texts, one residual of zero."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Linear(4, 4)
            self.feed_forward = nn.Linear(4, 4)

        def forward(self, x):
            x = self.attention(x)
            return self.feed_forward(x).mean(1, keepdim=True).expand_as(x)

    model = nn.Sequential(nn.ModuleList([Mean()]))
    block = model[0][0]
    every, none = torch.ones(2, 5).bool(), torch.zeros(2, 5).bool()
    x = torch.randn(2, 5, 4)
    with LayerProbe(model).attached() as probe:
        block.attention.register_forward_hook(
            lambda module, _, __: probe.attention(module, 0, cross=False, real=every, sink=none)
        )
        y = block(x)
    assert not torch.equal(y[0], y[1])
    (after,), (before,) = probe.layers(), probe.inputs()
    assert after["rank_residual"] == 0
    assert before["rank_residual"] == pytest.approx(by_numpy(x.double().numpy(), every.numpy()))


@pytest.mark.parametrize("tokens", [40, 300, 700])
def test_leading_directions_are_those_of_all_singular_vectors(tokens):
    """By a search in a small space where there are many dimensions; all of them are the oracle."""
    generator = torch.Generator().manual_seed(tokens)
    scale = torch.arange(1, 513, dtype=torch.float64) ** -0.7
    turn = torch.randn(512, 512, generator=generator, dtype=torch.float64)
    X = torch.randn(tokens, 512, generator=generator, dtype=torch.float64) * scale
    X = X @ torch.linalg.qr(turn).Q
    wanted = torch.linalg.svd(X, full_matrices=False).Vh[:4]
    found = _leading(X, 4)
    torch.testing.assert_close(found.T @ found, wanted.T @ wanted, rtol=0, atol=1e-5)
