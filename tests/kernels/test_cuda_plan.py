"""What a call on CUDA would run, without a GPU: fake tensors, stand-ins for torch's operators, and
counts of launches on a second device.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode

import cumulant as cm
import other_device
from cumulant.core import precision
from cumulant.kernels import fused, fused_cuda, tiles
from cumulant.kernels.tiles import Band

CAUSAL = Band(upper=0)


@pytest.fixture
def an_a100(monkeypatch):
    """A machine whose torch has the operators."""
    backend = torch.backends.cuda
    monkeypatch.setattr(backend, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(backend, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


class Names(TorchDispatchMode):
    """The operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op._schema.name.removeprefix("aten::"))
        return op(*args, **(kwargs or {}))


def call(m=37, n=37, d=16, e=16, heads=(2, 3), key_heads=None, **more):
    key_heads = key_heads or heads
    shapes = {"query": (*heads, m, d), "key": (*key_heads, n, d), "value": (*key_heads, n, e)}
    return {name: torch.randn(*shape, device="cuda") for name, shape in shapes.items()} | more


# arguments, band, precision of the caller, the operator that takes the call
CALLS = [
    ({}, Band(), torch.float16, "flash"),
    ({}, CAUSAL, torch.bfloat16, "flash"),
    ({}, Band(), None, "efficient"),
    ({}, CAUSAL, None, "efficient"),
    ({"n": 50}, CAUSAL, torch.float16, "efficient"),  # flash would align it to the last key
    ({"e": 8}, Band(), torch.float16, "efficient"),
    ({"d": 12, "e": 12}, Band(), torch.float16, "efficient"),
    ({"heads": (2, 2, 3), "key_heads": (2, 2, 1)}, CAUSAL, torch.float16, "flash"),
    ({"d": 10, "e": 10}, Band(), None, None),
    ({}, Band(lower=-3, upper=0), torch.float16, None),
    ({"mask": 1}, Band(), torch.float16, None),
]


@pytest.mark.parametrize(("sizes", "band", "narrow", "operator"), CALLS)
@pytest.mark.usefixtures("an_a100")
def test_which_operator_takes_a_call(sizes, band, narrow, operator):
    with FakeTensorMode(), Names() as ran:
        given = call(**sizes)
        out = fused.forward(given, 0.3, band, narrow)
        if operator is None:
            assert out is None
            return
        assert f"_scaled_dot_product_{operator}_attention" in ran.names
        rows = given["query"].shape[:-1]
        assert [x.shape for x in out] == [(*rows, given["value"].shape[-1]), (*rows, 1)]
        assert {x.dtype for x in out} == {torch.float32}
        more = {"mean": out[0], "log_normalizer": out[1], "cotangent mean": out[0]}
        grads = fused.backward({**given, **more}, 0.3, band, narrow)
        assert f"_scaled_dot_product_{operator}_attention_backward" in ran.names
        assert {n: g.shape for n, g in grads.items()} == {n: x.shape for n, x in given.items()}
    assert "_local_scalar_dense" not in ran.names


def dense(q, k, v, causal, scale):
    s = scale * q @ k.mT
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


class StandIns:
    """torch's operators on CUDA as their documentation has them, written densely."""

    @staticmethod
    def _scaled_dot_product_efficient_attention(q, k, v, bias, lse, rate, causal, *, scale):
        mean, G = dense(q, k, v, causal, scale)
        return mean, torch.nn.functional.pad(G, (0, -G.shape[-1] % 32), value=math.nan), None, None

    @staticmethod
    def _scaled_dot_product_efficient_attention_backward(
        g, q, k, v, bias, out, lse, seed, offset, rate, wanted, causal, *, scale
    ):
        assert lse.shape[-1] % 32 == 0
        m = q.shape[-2]
        assert lse[..., m:].isinf().all()
        p = (scale * q @ k.mT - lse[..., :m, None]).exp()
        if causal:
            p = p.tril()
        ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ g, None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [False, True])
def test_the_arithmetic_around_the_operators(causal, groups, monkeypatch):
    """Layout, grouped heads, common parts, padding: against torch's gradient of dense attention."""
    generator = torch.Generator().manual_seed(0)
    heads, key_heads = ((2, 2, 3), (2, 2, 1)) if groups else ((2, 3), (2, 3))

    def normal(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    given = {
        "query": normal(*heads, 37, 16),
        "key": normal(*key_heads, 41, 16),
        "value": normal(*key_heads, 41, 16),
    }
    mean, G = dense(*given.values(), causal, 0.3)
    g = torch.randn(mean.shape, generator=generator)
    expected = torch.autograd.grad(mean, list(given.values()), g)
    # A part that all keys and values share, which the operators would round against.
    shifted = {n: x.detach() + (0 if n == "query" else 5.0) for n, x in given.items()}
    monkeypatch.setattr(
        fused_cuda, "_plan", lambda *_: fused_cuda._Plan(False, torch.float32, causal)
    )
    monkeypatch.setattr(torch.ops, "aten", StandIns)
    layout = fused_cuda.Heads(4, 3, 3) if groups else fused_cuda.Heads(2, 3, 1)
    band = CAUSAL if causal else Band()
    ours = fused_cuda.forward(shifted, layout, 0.3, band, None)
    torch.testing.assert_close(ours[0], mean.detach() + 5, rtol=1e-5, atol=1e-5)
    lifted = G.detach()[..., None] + 0.3 * 5 * given["query"].detach().sum(-1, keepdim=True)
    torch.testing.assert_close(ours[1], lifted, rtol=1e-5, atol=1e-5)
    more = {"mean": ours[0], "log_normalizer": ours[1], "cotangent mean": g}
    grads = fused_cuda.backward({**shifted, **more}, layout, 0.3, band, None, whole=True)
    torch.testing.assert_close(list(grads.values()), list(expected), rtol=1e-4, atol=1e-5)


def test_float64_where_it_is_fast(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode():
        x, y = (torch.empty(1, device="cuda", dtype=t) for t in (torch.float32, torch.float64))
    for capability, single in (((9, 0), torch.float64), ((8, 9), torch.float32)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert precision.widest(x) is single
        assert precision.widest(y) is torch.float64


def launches(size, monkeypatch):
    """Operators that a JVP runs on a device, views aside; on tensors without values."""
    count = 0
    original = other_device._run
    views = ("view", "slice", "expand", "transpose", "unsqueeze", "select", "detach", "alias")

    def run(op, args, kwargs):
        nonlocal count
        count += not any(v in op._schema.name for v in views)
        return original(op, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(other_device, "_run", run)
        x = [other_device.OtherTensor(torch.empty(*size, device="meta")) for _ in range(6)]
        jvp(cm.scaled_dot_product_attention, tuple(x[:3]), tuple(x[3:]))
    return count


def test_launches_of_a_jvp(monkeypatch):
    """Tiles of 2^24 pairs off the CPU: a JVP at 8 x 4096 takes a few hundred launches."""
    large = launches((1, 8, 4096, 64), monkeypatch)
    monkeypatch.setattr(tiles, "_LARGER", 1)
    small = launches((1, 8, 4096, 64), monkeypatch)
    assert large < 450
    assert 20 * large < small
