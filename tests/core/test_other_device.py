"""The second device of the tests does what a device does."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.func import jvp
from torch.utils.checkpoint import checkpoint

import cumulant as cm
import other_device
from cumulant.core.context import Carried
from cumulant.kernels import calculus, engines
from other_device import OtherTensor, counted, moved, to_host, to_other


def test_values_and_gradients_are_real():
    x = torch.randn(3, 4, requires_grad=True)
    y = to_other(x)
    (y.exp() @ y.mT).sum().backward()
    (x.exp() @ x.mT).sum().backward()
    assert {y.device.type, y.grad.device.type} == {"other"}
    torch.testing.assert_close(to_host(y.grad), x.grad)


def test_devices_do_not_mix():
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices meet in add"):
        to_other(x) + x
    assert to_host(to_other(x) + torch.tensor(1.0)).sum() == 6  # numbers may


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.tolist(),
        lambda x: torch.equal(x, x),
        lambda x: torch.ones(3).to(x.device),
        lambda x: torch.ones(3).copy_(x),
    ],
)
def test_waiting_is_counted(wait):
    x = to_other(torch.randn(3))
    with counted() as waits:
        wait(x)
    assert sum(waits.values()) == 1
    with counted() as waits:
        torch.where(x > 0, x, 0.0).sum().nan_to_num().masked_fill(x[0] == 0, 1.0)
    assert not waits


def test_a_forgotten_device_is_found():
    """Tests make tensors on the device, the package where it says: there a forgotten one raises."""
    with moved():
        x = torch.randn(3)
        assert type(x) is type(torch.tensor([1.0])) is OtherTensor
        forgetful = {"torch": torch}
        exec(compile("made = torch.zeros(3)", "package.py", "exec"), forgetful)
        assert not isinstance(forgetful["made"], OtherTensor)
        with pytest.raises(RuntimeError, match="two devices"):
            x + forgetful["made"]
    assert x.device == other_device.DEVICE


class Noted(torch.autograd.Function):
    """Its backward pass notes what `ask` says there, and in which thread."""

    @staticmethod
    def forward(ctx, x, ask, notes):
        ctx.ask, ctx.notes = ask, notes
        return x * 1

    @staticmethod
    def backward(ctx, g):
        ctx.notes.append((ctx.ask(), threading.get_ident()))
        return g, None, None


def in_backward(x, ask):
    notes = []
    Noted.apply(x.clone().requires_grad_(), ask, notes).sum().backward()
    (note,) = notes
    return note


@pytest.mark.parametrize("move", [to_other, lambda x: x])
def test_contexts_reach_backward_passes(move):
    """In the device's own thread, as on a GPU, and in the caller's, as on the CPU."""
    x, word = move(torch.ones(2)), Carried("a word", "none")
    here = threading.get_ident()
    assert in_backward(x, word.get)[0] == "none"
    outer = word.set("outer")
    inner = word.set("inner")
    found, thread = in_backward(x, word.get)
    assert found == "inner"
    assert (thread == here) == (x.device.type == "cpu")
    word.reset(inner)
    assert in_backward(x, word.get)[0] == word.get() == "outer"
    word.reset(outer)
    assert in_backward(x, word.get)[0] == word.get() == "none"


def test_contexts_do_not_reach_other_threads():
    word = Carried("another word", "none")
    token, found = word.set("mine"), []
    started = threading.Thread(target=lambda: found.append(word.get()))
    started.start()
    started.join(60)
    word.reset(token)
    assert found == ["none"]


def test_the_engine_that_was_asked_for_differentiates(monkeypatch):
    asked = []

    def noted(device=None):
        asked.append(engines._asked.get())
        return engines.compiled(device)

    monkeypatch.setattr(calculus, "compiled", noted)
    x = to_other(torch.randn(5, 4)).requires_grad_()
    with cm.engine("torch"):
        cm.attend(x, x).log_normalizer.sum().backward()
    assert set(asked) == {"torch"}


@pytest.mark.parametrize("move", [to_other, lambda x: x])
def test_a_checkpoint_around_a_jvp(move):
    """Its second forward pass runs inside the backward pass, and needs our attention there."""
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(2, 5, 4, generator=generator) for _ in range(2)]
    x, direction = (move(h) for h in host)

    def attention(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def product(x, direction):
        return jvp(attention, (x,), (direction,))

    def loss(made):
        return sum((y * y).sum() for y in made)

    leaf = x.clone().requires_grad_()
    with cm.sdpa_replaced():
        made = loss(checkpoint(product, leaf, direction, use_reentrant=False))
        (found,) = torch.autograd.grad(made, leaf)

    def written(x):
        s = (x @ x.mT / 2).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        return s.softmax(-1) @ x

    leaf = host[0].double().requires_grad_()
    made = loss(jvp(written, (leaf,), (host[1].double(),)))
    (expected,) = torch.autograd.grad(made, leaf)
    torch.testing.assert_close(to_host(found).double(), expected, rtol=1e-4, atol=1e-5)
