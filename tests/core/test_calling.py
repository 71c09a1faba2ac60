"""`Function` skips torch's inspection of signatures, and autograd where nothing is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cumulant.core.calling import Function


class Cube(Function):
    """x^3, with all that a Function may define."""

    @staticmethod
    def forward(power: int, x: Tensor) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.power = inputs[0]
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, ctx.power * x ** (ctx.power - 1) * grad

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.power * x ** (ctx.power - 1) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: Any, power: int, x: Tensor) -> Any:
        return Cube.apply(power, x), in_dims[1]


def cube(x: Tensor) -> Tensor:
    return Cube.apply(3, x)


X = torch.tensor([0.5, -2.0], dtype=torch.float64)


def test_gradients_of_every_order():
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(cube, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(cube, x)


def test_nothing_is_recorded_without_gradients():
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not cube(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(cube(X), X**3)


@pytest.mark.parametrize("grad", [True, False])
def test_tangents_and_transforms_do_not_need_gradient_mode(grad):
    with torch.set_grad_enabled(grad):
        value, tangent = torch.func.jvp(cube, (X,), (torch.ones_like(X),))
        assert torch.allclose(value, X**3)
        assert torch.allclose(tangent, 3 * X**2)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
            found = torch.autograd.forward_ad.unpack_dual(cube(dual))
            assert torch.allclose(found.tangent, 3 * X**2)
        assert torch.allclose(torch.func.grad(lambda x: cube(x).sum())(X), 3 * X**2)
        assert torch.allclose(torch.func.vmap(torch.func.grad(cube))(X), 3 * X**2)
