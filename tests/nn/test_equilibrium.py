"""`Equilibrium` against unrolled layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cumulant as cm

DOUBLE = torch.float64


class Injected(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.inner = nn.Linear(d, d, dtype=DOUBLE)
        nn.init.orthogonal_(self.inner.weight, gain=0.6)

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + x)


def unrolled(layer, x, rounds=200):
    z = torch.zeros_like(x)
    for _ in range(rounds):
        z = layer(z, x)
    return z


def test_two_inputs():
    layer, x = Injected(5), torch.randn(7, 5, dtype=DOUBLE, requires_grad=True)
    deep = cm.nn.Equilibrium(layer, tol=1e-13)
    z = deep(x)
    torch.testing.assert_close(z, unrolled(layer, x), atol=1e-11, rtol=0)
    wanted = (x, *layer.parameters())
    ours = torch.autograd.grad(z.square().sum(), wanted)
    theirs = torch.autograd.grad(unrolled(layer, x).square().sum(), wanted)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)
    assert deep.solution.status == "converged"
    assert deep.solution.steps.shape == (7,)


def test_gradgradcheck():
    layer = Injected(3)
    deep = cm.nn.Equilibrium(layer, tol=1e-13)
    x = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(deep, (x,))
    assert torch.autograd.gradgradcheck(deep, (x,))


def test_one_input_is_added():
    layer = nn.Sequential(nn.Linear(4, 4, dtype=DOUBLE), nn.Tanh())
    nn.init.orthogonal_(layer[0].weight, gain=0.5)
    x = torch.randn(3, 4, dtype=DOUBLE)
    z = cm.nn.Equilibrium(layer)(x)
    torch.testing.assert_close(z, layer(z + x), atol=1e-9, rtol=0)


def test_a_transformer_layer_has_an_equilibrium():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=DOUBLE)
    for p in layer.parameters():
        p.data *= 0.5
    x = torch.randn(2, 5, 8, dtype=DOUBLE)
    deep = cm.nn.Equilibrium(layer, max_steps=500, tol=1e-9)
    with cm.sdpa_replaced():
        z = deep(x)
        torch.testing.assert_close(z, layer(z + x), atol=1e-8, rtol=0)
        z.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_it_trains():
    torch.manual_seed(0)
    deep = cm.nn.Equilibrium(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x, y = torch.randn(64, 4), torch.randn(64, 4).tanh() / 2
    optimizer = torch.optim.Adam(deep.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = (deep(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_parameters_and_state_are_the_layers():
    layer = Injected(3)
    deep = cm.nn.Equilibrium(layer)
    assert set(deep.state_dict()) == {f"layer.{n}" for n in layer.state_dict()}
    assert "anderson" in repr(deep)


def test_failure_says_so():
    deep = cm.nn.Equilibrium(lambda z, x: z + x)
    with pytest.raises(cm.ConvergenceError, match="stalled"):
        deep(torch.ones(2, 3))
    quiet = cm.nn.Equilibrium(lambda z, x: z + x, throw=False)
    quiet(torch.ones(2, 3))
    assert quiet.solution.status == "stalled"
    with pytest.raises(cm.InputError, match="callable"):
        cm.nn.Equilibrium(3)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_models(kind):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    nn.init.orthogonal_(layer[0].weight, gain=0.5)
    x = torch.randn(3, 4)
    exact = cm.nn.Equilibrium(layer)(x)
    z = cm.nn.Equilibrium(layer.to(kind))(x.to(kind))
    assert z.dtype == kind
    torch.testing.assert_close(z.float(), exact, atol=0.1, rtol=0)
    z.sum().backward()
    assert layer[0].weight.grad.isfinite().all()
