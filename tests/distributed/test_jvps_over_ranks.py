"""A loss that contains a JVP, trained on several ranks: the gradient of a single process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.func import jvp
from torch.nn.parallel import DistributedDataParallel

import cumulant as cm

DOUBLE = torch.float64


class Loss(nn.Module):
    """The residual of u + du/dt = v."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, z, velocity):
        u, slope = jvp(self.model, (z,), (velocity,))
        return (u + slope - velocity).square().mean()


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=DOUBLE)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, 5, 8, generator=generator, dtype=DOUBLE)


def gradient_on_a_rank(group, rank, size, how):
    model = encoder()
    if how == "FSDP2":
        loss = Loss(fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu")))
    elif how == "DDP":
        loss = Loss(DistributedDataParallel(model, process_group=group))
    else:
        loss = DistributedDataParallel(Loss(model), process_group=group)
    with cm.differentiable():
        loss(*(x[rank::size] for x in data())).backward()
    gradients = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return torch.cat([g.flatten() for g in whole])


@pytest.mark.parametrize("how", ["DDP", "DDP around the loss", "FSDP2"])
def test_gradient_of_a_single_process(crew, how):
    model = encoder()
    with cm.differentiable():
        Loss(model)(*data()).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for gradient in crew.run(gradient_on_a_rank, 2, how):
        torch.testing.assert_close(gradient, expected)


def recipe(model, inner, z, velocity):
    """The JVP of the inner module without gradient, then one plain forward for the primal."""
    with torch.no_grad(), cm.sdpa_replaced():
        slope = jvp(inner, (z,), (velocity,))[1]
    return (model(z) + slope - velocity).square().mean()


def recipe_on_a_rank(group, rank, size, how):
    inner = encoder()
    if how == "FSDP2":
        model = inner = fully_shard(inner, mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        model = DistributedDataParallel(inner, process_group=group)
    recipe(model, inner, *(x[rank::size] for x in data())).backward()
    gradients = [p.grad for p in inner.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return torch.cat([g.flatten() for g in whole])


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_the_recipe_over_ranks(crew, how):
    model, (z, velocity) = encoder(), data()
    with cm.differentiable():
        u, slope = jvp(model, (z,), (velocity,))
        (u + slope.detach() - velocity).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for gradient in crew.run(recipe_on_a_rank, 2, how):
        torch.testing.assert_close(gradient, expected)
