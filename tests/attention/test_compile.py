"""`torch.compile` without a break: value and first gradient are those of eager code."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import cumulant as cm

KEYS = 7


def tensors(*, heads=4, key_heads=4, dtype=torch.float32):
    sizes = {"query": (heads, 5, 8), "key": (key_heads, KEYS, 8), "value": (key_heads, KEYS, 6)}
    return {n: torch.randn(2, *size, dtype=dtype) for n, size in sizes.items()}


# Keywords of the call, and those of its tensors whose gradient is compared too.
CALLS = {
    "plain": lambda: {},
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"window": (2, 1)},
    "mask": lambda: {"attn_mask": torch.rand(2, 1, 5, KEYS) > 0.4},
    "rows without keys": lambda: {"attn_mask": torch.arange(5)[:, None] > 2},
    "bias": lambda: {"attn_mask": torch.randn(4, 1, KEYS)},
    "large bias": lambda: {"attn_mask": torch.full((5, 1), torch.finfo(torch.float32).min / 2)},
    "scale": lambda: {"scale": torch.rand(4, 1, 1) + 0.5},
    "softcap": lambda: {"softcap": 2.0},
    "sink": lambda: {"sink": torch.randn(4)},
}


def fields(**given):
    a = cm.attend(given.pop("query"), given.pop("key"), given.pop("value"), **given)
    return a.entropy, a.mean.sin(), a.log_normalizer


def with_gradients(function, given):
    """The results, and the gradients of a sum of all in every real tensor."""
    leaves = {
        n: x.clone().requires_grad_()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for n, x in given.items()
    }
    out = function(**leaves)
    wanted = [x for x in leaves.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    finite = sum(x.masked_fill(x == -torch.inf, 0.0).square().sum() for x in out)
    return *out, *torch.autograd.grad(finite, wanted)


def compiled(function, **kwargs):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_fields_and_gradients(name):
    given = {**tensors(), **CALLS[name]()}
    found = with_gradients(compiled(fields), given)
    torch.testing.assert_close(found, with_gradients(fields, given))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_grouped_heads_in_other_precisions(dtype):
    def f(query, key, value):
        return (
            cm.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
        )

    given = tensors(key_heads=2, dtype=dtype)
    torch.testing.assert_close(with_gradients(compiled(f), given), with_gradients(f, given))


def test_one_pass_serves_all_fields():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(fields, fullgraph=True, backend=keep)(**tensors())
    ours = [x for x in graphs[0].graph.nodes if "cumulant" in str(x.target)]
    assert len(graphs) == len(ours) == 1


def test_one_graph_for_all_lengths():
    counter = CompileCounter()
    torch._dynamo.reset()
    f = torch.compile(fields, fullgraph=True, dynamic=True, backend=counter)
    for length in (6, 11, 40):  # a length that equals another size is compiled by itself
        x = torch.randn(2, 3, length, 4)
        given = {"query": x, "key": x[..., :-1, :], "value": x[..., 1:, :], "is_causal": True}
        torch.testing.assert_close(f(**given), fields(**given))
    assert counter.frame_count == 1


class Block(nn.Module):
    """Attention with a penalty on its entropy, a norm and a linear layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(12), nn.Linear(12, 36)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (3, 4)).mT.mT.transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        a = cm.attend(q, k, v, is_causal=True)
        entropy = a.entropy
        x = self.norm(x + a.mean.transpose(1, 2).flatten(-2))
        return x.square().mean() * 0.1 + (x[..., 0] - 1).square().mean() + 0.1 * entropy.mean()


def trained(module, compile_):
    step = compile_(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = torch.randn(3, 2, 9, 12, generator=torch.Generator().manual_seed(1))
    for x in data:
        optimizer.zero_grad()
        step(x).backward()
        optimizer.step()
    return list(module.parameters())


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    shutil.which("g++") is None, reason="inductor needs a C++ compiler"
                ),
            ],
        ),
    ],
)
def test_training_steps(backend):
    torch._dynamo.reset()
    module = Block()
    expected = trained(copy.deepcopy(module), lambda m: m)
    found = trained(module, lambda m: torch.compile(m, fullgraph=True, backend=backend))
    torch.testing.assert_close(found, expected)


def test_result_leaves_the_graph():
    """Fields that compiled code did not ask for are computed outside, gradients included."""
    given = tensors()
    query = given["query"].requires_grad_()
    found = compiled(lambda: cm.attend(query * 2, given["key"], given["value"]))()
    expected = cm.attend(query * 2, given["key"], given["value"])
    for field in ("entropy", "score_variance"):
        pair = [getattr(a, field) for a in (found, expected)]
        torch.testing.assert_close(*pair)
        grads = [torch.autograd.grad(x.sum(), query, retain_graph=True) for x in pair]
        torch.testing.assert_close(*grads)


def test_other_fields_break_the_graph():
    given = tensors()

    def f(query, key, value):
        a = cm.attend(query, key, value)
        return a.score_variance + a.entropy, a.value_variance

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(**given), f(**given))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cumulant runs this eagerly"):
        compiled(f)(**given)


def entropy(query, given):
    return cm.attend(query, given["key"], given["value"], is_causal=True).entropy


def tangent(query, given):
    return torch.func.jvp(lambda q: entropy(q, given), (query,), (query.cos(),))[1]


def dual_tangent(query, given):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, query.cos())
        return forward_ad.unpack_dual(entropy(dual, given)).tangent


def hessian_product(query, given):
    gradient = torch.func.grad(lambda q: entropy(q, given).sum())
    return torch.func.jvp(gradient, (query,), (query.cos(),))[1]


def mapped(query, given):
    return torch.func.vmap(lambda q, k: cm.attend(q, k).entropy)(query, given["key"])


@pytest.mark.parametrize("f", [tangent, dual_tangent, hessian_product, mapped])
def test_transforms_break_the_graph(f):
    given = tensors()
    torch._dynamo.reset()
    found = torch.compile(f, backend="aot_eager")(given["query"], given)
    torch.testing.assert_close(found, f(given["query"], given))


def test_tangent_of_a_compiled_function():
    given = tensors()
    query, direction = given["query"], torch.randn_like(given["query"])

    def slope(function):
        return torch.func.jvp(lambda q: function(q, given), (query,), (direction,))[1]

    torch._dynamo.reset()
    torch.testing.assert_close(slope(torch.compile(entropy, backend="aot_eager")), slope(entropy))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_recorded_graphs_compute(mode):
    """The graph that make_fx records is a function of its input, not of what was passed then."""
    given = tensors()
    graph = make_fx(lambda q: entropy(q, given) * 2, tracing_mode=mode, _allow_non_fake_inputs=True)
    other = torch.randn_like(given["query"])
    torch.testing.assert_close(graph(given["query"])(other), entropy(other, given) * 2)


def test_export():
    module, x = Block(), torch.randn(2, 9, 12)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), module(x))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shapes_without_values(device):
    """Tensors of a device that is not here can be traced: only shapes are asked for."""
    with FakeTensorMode():
        query, key = torch.empty(2, 4, 5, 8, device=device), torch.empty(2, 2, 7, 8, device=device)
        a = cm.attend(query, key, key.narrow(-1, 0, 6), enable_gqa=True, is_causal=True)
        assert a.entropy.shape == a.log_normalizer.shape == (2, 4, 5)
        assert a.mean.shape == (2, 4, 5, 6)
        assert a.mean.device.type == device


META_FIELDS = {
    **dict.fromkeys(("log_normalizer", "entropy", "score_variance", "score_max"), (2, 4, 5)),
    **dict.fromkeys(("mean", "value_variance"), (2, 4, 5, 6)),
    "key_mean": (2, 4, 5, 8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_meta_tensors_give_shapes(dtype):
    """On torch's meta device, where models are built without memory: shapes, no error."""
    made = {n: x.to("meta", dtype).requires_grad_() for n, x in tensors(key_heads=2).items()}
    a = cm.attend(*made.values(), enable_gqa=True, is_causal=True, sink=0.5, softcap=3.0)
    for name, shape in META_FIELDS.items():
        field = getattr(a, name)
        assert field.shape == shape, name
        assert field.device.type == "meta"
    assert a.top_keys(2).indices.shape == (2, 4, 5, 2)
    assert a.received().shape == (2, 4, KEYS)
    mask = torch.ones(5, KEYS, dtype=torch.bool, device="meta")
    out = cm.scaled_dot_product_attention(*made.values(), attn_mask=mask, enable_gqa=True)
    grads = torch.autograd.grad(out.sum(), list(made.values()), create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in grads), list(made.values()))
    given = tuple(x.detach() for x in made.values())
    value, tangent = torch.func.jvp(
        lambda *x: cm.scaled_dot_product_attention(*x, enable_gqa=True), given, given
    )
    assert [x.shape for x in (*grads, *second)] == [x.shape for x in made.values()] * 2
    assert value.shape == tangent.shape == out.shape
    assert {x.dtype for x in (out, *grads, *second, value, tangent)} == {dtype}


def test_graphs_for_cuda_without_cuda():
    """Value and gradient of a call on CUDA are one operator each; torch's engine needs CUDA to run
    the second, so its graph is recorded by itself."""
    with FakeTensorMode() as mode:
        query, key = (torch.empty(2, 4, n, 8, device="cuda", dtype=torch.float16) for n in (5, 7))
        wide = [x.float() for x in (query, key, key)]
        rows = [torch.empty(2, 4, 5, n, device="cuda") for n in (8, 1, 8)]

    def value(query, key):
        return cm.scaled_dot_product_attention(query, key, key, is_causal=True)

    def gradient(query, key, value, mean, normalizer, cotangent):
        return torch.ops.cumulant.attention_gradient(
            *("query,key,value,mean,log_normalizer", [query, key, value, mean, normalizer]),
            *("mean", [cotangent], "query,key,value", 0.3, None, 0, 0.0, False, torch.float16),
        )

    with mode:
        graphs = [make_fx(value)(query, key), make_fx(gradient)(*wide, *rows)]
    for graph, name in zip(graphs, ("attention", "attention_gradient"), strict=True):
        ours = [n for n in graph.graph.nodes if "cumulant" in str(n.target)]
        assert [str(n.target) for n in ours] == [f"cumulant.{name}.default"]
        assert ours[0].args[-1] == torch.float16  # for which torch's flash operator is planned
        made = [n.meta["val"] for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
        assert {x.device.type for x in made} == {"cuda"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_for_cuda_without_cuda(dtype):
    """`torch.compile` of a call on fake CUDA tensors: one operator, no break."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    def value(query, key):
        return cm.scaled_dot_product_attention(query, key, key, is_causal=True).sin()

    torch._dynamo.reset()
    with FakeTensorMode():
        query, key = (torch.empty(2, 4, n, 8, device="cuda", dtype=dtype) for n in (5, 7))
        out = torch.compile(value, fullgraph=True, backend=keep)(query, key)
    assert (out.shape, out.dtype, out.device.type) == (query.shape, dtype, "cuda")
    ours = [n for n in graphs[0].graph.nodes if "cumulant" in str(n.target)]
    assert len(graphs) == len(ours) == 1


def jvp_step(model, query, key):
    """A loss with a product in it: what is around the product compiles."""
    out, slope = torch.func.jvp(lambda q: model(q.sin(), key, key), (query.exp(),), (query.cos(),))
    return (out + slope).square().mean()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_jvp_step_has_one_break(device):
    """docs/training-with-jvps.md: the product runs eagerly between two graphs, and says why."""
    query, key = (torch.randn(2, 4, n, 8, device=device) for n in (5, 7))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounter()
    step = torch.compile(jvp_step, backend=counter)
    found = step(cm.scaled_dot_product_attention, query, key)
    expected = jvp_step(cm.scaled_dot_product_attention, query, key)
    if device == "cpu":
        torch.testing.assert_close(found, expected)
    assert found.shape == expected.shape == ()
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert sum(breaks.values()) == 1
    assert "cumulant runs this eagerly" in next(iter(breaks))
    assert counter.frame_count == 2


def test_operations_are_counted():
    """Where a mode counts torch's operations they are torch's: two products of M x N x features."""
    given = tensors()
    with FlopCounterMode(display=False) as counter:
        _ = cm.attend(*given.values()).entropy
    assert counter.get_total_flops() == 2 * 8 * 5 * KEYS * (8 + 6)


def test_operators_keep_torchs_rules():
    """Schema, fake implementation and autograd, by torch's own checker."""
    given = [x.requires_grad_() for x in tensors(dtype=torch.float64).values()]
    mask = torch.rand(2, 1, 5, KEYS) > 0.3
    arguments = "query,key,value,mask", [*given, mask], 0.3, None, 1, 0.0
    for entropy_too in (False, True):
        torch.library.opcheck(torch.ops.cumulant.attention.default, (*arguments, entropy_too, None))
