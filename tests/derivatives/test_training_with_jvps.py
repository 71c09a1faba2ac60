"""What `docs/training-with-jvps.md` says of a loss that contains a JVP, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointError, checkpoint

import cumulant as cm

DOUBLE = torch.float64


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, activation="gelu", batch_first=True, dtype=DOUBLE
    )


def data(dtype=DOUBLE):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, 5, 8, generator=generator, dtype=DOUBLE).to(dtype)


def loss_of(model, z, velocity):
    u, slope = jvp(model, (z,), (velocity,))
    return (u + slope - velocity).square().mean()


def gradient_of(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def truth():
    """The gradient of the loss, agreed on with finite differences along a random direction."""
    model, (z, velocity) = encoder(), data()
    named = dict(model.named_parameters())
    move = {n: torch.randn_like(p) for n, p in named.items()}

    def moved(step):
        weights = {n: p.detach() + step * move[n] for n, p in named.items()}
        return loss_of(lambda z: functional_call(model, weights, z), z, velocity)

    with cm.differentiable():
        gradient = gradient_of(model, loss_of(model, z, velocity))
        h = 1e-3
        slope = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h)
    along = (gradient * torch.cat([x.flatten() for x in move.values()])).sum()
    torch.testing.assert_close(along, slope, rtol=1e-7, atol=1e-9)
    return gradient


def test_torch_alone_is_wrong(truth):
    """If this fails, torch has mended layer_norm: say so in the page."""
    model = encoder()
    with cm.sdpa_replaced():
        gradient = gradient_of(model, loss_of(model, *data()))
    assert (gradient - truth).norm() > 0.05 * truth.norm()


def test_autocast(truth):
    model = encoder().float()
    with cm.differentiable(), torch.autocast("cpu", dtype=torch.bfloat16):
        gradient = gradient_of(model, loss_of(model, *data(torch.float32)))
    assert gradient.dtype == torch.float32
    assert (gradient - truth).norm() < 0.05 * truth.norm()


def test_bfloat16_weights(truth):
    model = encoder().bfloat16()
    with cm.differentiable():
        gradient = gradient_of(model, loss_of(model, *data(torch.bfloat16)))
    assert gradient.dtype == torch.bfloat16
    assert (gradient.double() - truth).norm() < 0.1 * truth.norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_refuses_a_checkpoint_inside(reentrant):
    model, (z, velocity) = encoder(), data()

    def inside(z):
        return checkpoint(model, z, use_reentrant=reentrant)

    with cm.differentiable(), pytest.raises((RuntimeError, CheckpointError)):
        loss_of(inside, z, velocity).backward()


def test_checkpoint_around(truth):
    model, (z, velocity) = encoder(), data()
    with cm.differentiable():
        u, slope = checkpoint(
            lambda z: jvp(model, (z,), (velocity,)), z.requires_grad_(), use_reentrant=False
        )
        gradient = gradient_of(model, (u + slope - velocity).square().mean())
    torch.testing.assert_close(gradient, truth)


def test_compiled_model(truth):
    model = encoder()
    with cm.differentiable():
        gradient = gradient_of(model, loss_of(torch.compile(model), *data()))
    torch.testing.assert_close(gradient, truth)


def test_compiled_product(truth):
    model = encoder()
    with cm.differentiable():
        loss = torch.compile(lambda z, velocity: loss_of(model, z, velocity))(*data())
        gradient = gradient_of(model, loss)
    torch.testing.assert_close(gradient, truth)


class Checkpointed(nn.Module):
    """A model that checkpoints its layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, z):
        return checkpoint(self.layer, z, use_reentrant=False)


def recipe(model, inner, z, velocity):
    """MeanFlow's loss: the JVP of the inner module without gradient, then one plain forward."""
    with torch.no_grad(), cm.sdpa_replaced():
        slope = jvp(inner, (z,), (velocity,))[1]
    return (model(z) + slope - velocity).square().mean()


@pytest.mark.parametrize("how", ["plain", "checkpoint", "compiled", "autocast"])
def test_the_recipe(how):
    """The same gradient as with the slope detached, whatever is around the model."""
    layer, (z, velocity) = encoder(), data()
    with cm.differentiable():
        u, slope = jvp(layer, (z,), (velocity,))
        expected = gradient_of(layer, (u + slope.detach() - velocity).square().mean())
    if how == "autocast":
        layer, z, velocity = layer.float(), z.float(), velocity.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            gradient = gradient_of(layer, recipe(layer, layer, z, velocity))
        error = (gradient.double() - expected).norm() / expected.norm()
        assert error < 0.05  # bfloat16 has three digits
        return
    torch._dynamo.reset()
    model = {"plain": layer, "checkpoint": Checkpointed(layer)}.get(how)
    if model is None:
        model = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradient = gradient_of(layer, recipe(model, layer, z, velocity))
    torch.testing.assert_close(gradient, expected)


def test_a_compiled_jvp_runs_the_product_eagerly():
    """The compiler leaves the whole product out, however deep; what follows is one graph."""
    (z, velocity), layers = data(), nn.Sequential(encoder(), encoder())

    def step(z, velocity):
        return jvp(layers, (z,), (velocity,))[1].square().mean()

    torch._dynamo.reset()
    with cm.sdpa_replaced():
        found = torch._dynamo.explain(step)(z, velocity)
        compiled = torch.compile(step, backend="aot_eager")(z, velocity)
        torch.testing.assert_close(compiled, step(z, velocity))
    assert found.graph_count == 1
    assert found.op_count < 5


def test_running_statistics_are_arguments():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()).double()
    z, v = torch.randn(2, 5, 6, dtype=DOUBLE)
    with cm.differentiable():
        with pytest.raises(RuntimeError, match="in-place"):
            jvp(model, (z,), (v,))

        def run(z):
            held = {n: b.clone() for n, b in model.named_buffers()}
            return functional_call(model, held, z), held

        _, slope, held = jvp(run, (z,), (v,), has_aux=True)
        slope.square().sum().backward()
        weight = model[0].weight
        found, values = weight.grad[1, 2].item(), []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                weight[1, 2] += step
                values.append(jvp(lambda z: run(z)[0], (z,), (v,))[1].square().sum())
                weight[1, 2] -= step
        assert found == pytest.approx((values[0] - values[1]).item() / 2e-4, rel=1e-6)
        model(z)  # which updates its own
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(held[name], buffer)


def test_torch_refuses_dual_numbers_through_softmax():
    x = torch.randn(3, dtype=DOUBLE, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(torch.softmax(dual, -1)).tangent
        with pytest.raises(RuntimeError, match="inplace operation"):
            tangent.square().sum().backward()
    jvp(lambda x: torch.softmax(x, -1), (x,), (torch.ones_like(x),))[1].square().sum().backward()


def test_average_of_weights():
    model, (z, velocity) = encoder(), data()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    with cm.differentiable():
        for _ in range(20):
            loss = loss_of(model, z, velocity)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            losses.append(loss.item())
        final = loss_of(average, z, velocity).item()
    assert losses[-1] < 0.8 * losses[0]
    assert final < losses[0]
