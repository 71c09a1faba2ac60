"""The Triton engine as it runs on a GPU: off the CPU, with backward passes in another thread.

Tensors lie on the device of `other_device`, kernels run in Triton's interpreter on their values,
and whatever makes the host wait is counted, in `answers.py` as everywhere. `test_triton.py` runs
this file in a process of its own.
"""

from __future__ import annotations

import pytest
import test_synchronizations as device
import torch

import cumulant as cm
from cumulant.kernels.triton import answers
from cumulant.kernels.triton.blocks import Blocks
from cumulant.kernels.triton.tile import View
from other_device import OtherTensor, to_host

QUESTIONS = ("forward", "tangent", "gradient", "curvature")


def values(x):
    """The kernel's arguments with the host's tensors."""
    if isinstance(x, View):
        return x._replace(data=to_host(x.data))
    return type(x)(*map(values, x)) if hasattr(x, "_fields") else x


@pytest.fixture
def asked(monkeypatch):
    """The questions; the kernels answer every one, but those that they leave to the tiles."""
    kept, launch = [], answers.launch
    tile = Blocks(64, 64, 32, 4, 1, "ieee")
    monkeypatch.setattr(answers, "_PLAIN", (OtherTensor, torch.Tensor, torch.nn.Parameter))
    monkeypatch.setattr(answers, "choose", lambda *_, **__: tile)
    monkeypatch.setattr(
        answers,
        "launch",
        lambda kernel, grid, given, **more: launch(kernel, grid, [*map(values, given)], **more),
    )
    for name in QUESTIONS:

        def counted(arguments, *more, _name=name, _ask=getattr(answers, name), **named):
            given = more[0] if more else arguments
            out = _ask(arguments, *more, **named)
            left = "cap" in given and _name == "curvature"
            left |= any(x.dtype == torch.float64 for x in given.values())  # the value variance
            kept.append((_name, out is not None or left))
            return out

        monkeypatch.setattr(answers, name, counted)
    with cm.engine("triton"):
        yield lambda: {name for name, _ in kept}
    assert all(answered for _, answered in kept), kept


CALLS = [
    ("plain", "attend", "forward"),
    ("causal", "gradient", "gradient"),
    ("window", "hvp", "curvature"),
    ("padding", "jvp", "tangent"),
    ("boolean", "hvp", "curvature"),
    ("additive", "gradient", "gradient"),
    ("sink", "fields", "forward"),
    ("softcap", "jvp", "tangent"),
]


@pytest.mark.parametrize(("kind", "name", "question"), CALLS)
def test_attention_never_waits(kind, name, question, asked):
    device.test_attention_never_waits(kind, name)
    assert question in asked()


@pytest.mark.parametrize(("kind", "what"), [("causal", torch.nan), ("additive", torch.inf)])
def test_hidden_garbage_stays_hidden(kind, what, asked):
    device.test_hidden_garbage_stays_hidden_without_asking(kind, what)
    assert asked() == {"forward", "tangent"}


def test_gradients_where_nobody_sees_garbage(asked):
    device.test_gradients_where_nobody_sees_garbage(torch.nan)
    assert asked() == set(QUESTIONS)


def test_torch_s_signature(asked):
    device.test_torch_s_signature_never_waits()
    assert asked() == {"forward", "gradient"}
