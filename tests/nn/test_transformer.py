"""`Transformer` against plain torch modules, and each switch against its formula."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cumulant as cm
from cumulant.kernels.weighted import associative_sums, weighted_sums
from cumulant.nn.similarity import NAMES, similarity


def pairs(layer: nn.TransformerEncoderLayer, block: nn.Module):
    """torch's parameters of a layer, each with ours; ours of its packed maps in one row."""
    attention, ff = block.parts
    yield layer.self_attn.in_proj_weight, [attention.query, attention.key, attention.value]
    yield layer.self_attn.out_proj.weight, [attention.output]
    mine = [ff[0], ff[2], *block.contractions]
    for theirs, ours in zip(
        (layer.linear1, layer.linear2, layer.norm1, layer.norm2), mine, strict=True
    ):
        yield theirs.weight, [ours]
        yield theirs.bias, [ours.bias]


def stacked(ours: list) -> list[torch.Tensor]:
    return [x if isinstance(x, torch.Tensor) else x.weight for x in ours]


def of_torch(model: cm.nn.Transformer, first: bool) -> nn.ModuleList:
    """torch's own encoder layers with the same weights."""
    width, layers = model.embedding.embedding_dim, nn.ModuleList()
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            width, block.parts[0].heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=first
        )
        layer.self_attn.in_proj_bias.data.zero_(), layer.self_attn.out_proj.bias.data.zero_()
        for theirs, ours in pairs(layer, block):
            theirs.data.copy_(torch.cat(stacked(ours)))
        layers.append(layer)
    return layers


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_equals_torchs_modules(place, causal, checkpoint):
    """Values, and the gradient of every parameter relative to its norm, to 1e-5."""
    model = cm.nn.Transformer(
        29, width=32, context=40, place=place, causal=causal, checkpoint=checkpoint
    )
    for norm in (x for block in model.blocks for x in block.contractions):
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    theirs = of_torch(model, place == "before")
    tokens = torch.randint(29, (3, 37))
    mask = nn.Transformer.generate_square_subsequent_mask(37) if causal else None

    ours = model(tokens)
    x = F.embedding(tokens, model.embedding.weight) + model.position[:37]
    for layer in theirs:
        x = layer(x, src_mask=mask, is_causal=causal)
    last = model.contraction.bias if place == "before" else None  # a norm ends the stack
    x = x if last is None else F.layer_norm(x, (32,), model.contraction.weight, last)
    plain = F.linear(x, model.readout.weight)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)

    cotangent = torch.randn_like(plain) / plain.numel() ** 0.5
    shared = [model.embedding.weight, model.position, model.readout.weight]
    matched = [y for x in zip(theirs, model.blocks, strict=True) for y in pairs(*x)]
    inner = [stacked(ours) for _, ours in matched]
    mine = torch.autograd.grad((ours * cotangent).sum(), [*shared, *(y for x in inner for y in x)])
    wanted = torch.autograd.grad((plain * cotangent).sum(), [*shared, *(x for x, _ in matched)])
    rows = iter(mine)
    joined = [torch.cat([next(rows) for _ in x]) for x in [*([y] for y in shared), *inner]]
    for a, b in zip(joined, wanted, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


WEIGHTS = {
    "exp": torch.exp,
    "taylor2": lambda s: 1 + s + s**2 / 2,
    "taylor4": lambda s: 1 + s + s**2 / 2 + s**3 / 6 + s**4 / 24,
    "relu2": lambda s: s.clamp_min(0) ** 2,
    "uniform": torch.ones_like,
}


def dense(name, q, k, v, causal):
    """The formula with its matrix of weights."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if name == "cosine":
        w = F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1).exp()
    elif name == "elu1":
        w = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    elif name == "sigmoid":
        w = 1 / (1 + k.shape[-2] * torch.exp(-s))
    else:
        w = WEIGHTS[name](s)
    if causal:
        w = w * torch.ones_like(w).tril()
    if name == "sigmoid":
        return w @ v
    floor = 1e-6 if name == "relu2" else 0.0
    total = w.sum(-1, keepdim=True) + floor
    return (w @ v) / total


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "taylor4"])
def test_kernels_are_their_formulas(name, causal, small_tiles):
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    ours = similarity(name)(q, k, v, is_causal=causal)
    theirs = dense(name, q, k, v, causal)
    torch.testing.assert_close(ours, theirs)
    cotangent = torch.randn_like(ours)
    wanted = (v,) if name == "uniform" else (q, k, v)
    mine = torch.autograd.grad(ours, wanted, cotangent)
    torch.testing.assert_close(mine, torch.autograd.grad(theirs, wanted, cotangent))


@pytest.mark.parametrize("name", ["exp", "cosine", "relu2"])
def test_temperature_is_a_factor_of_the_score(name):
    q, k, v = (torch.randn(2, 5, 4) for _ in range(3))
    if name == "cosine":
        w = (3 * F.cosine_similarity(q[:, :, None], k[:, None], dim=-1)).exp()
    else:
        w = WEIGHTS[name](3 * (q @ k.mT) / 2)
    expected = w @ v / w.sum(-1, keepdim=True)
    torch.testing.assert_close(similarity(name)(q, k, v, beta=3.0), expected, atol=1e-5, rtol=1e-5)
    layer = cm.nn.Attention(8, 2, kernel=name, beta=3.0, learn_beta=True)
    layer(torch.randn(1, 4, 8)).sum().backward()
    assert layer.beta.grad.abs().max() > 0


def test_a_function_is_a_kernel():
    q, k, v = (torch.randn(2, 5, 4) for _ in range(3))
    kernel = similarity(lambda s: 1 / (1 + s * s))
    w = 1 / (1 + (q @ k.mT / 2) ** 2)
    torch.testing.assert_close(kernel(q, k, v), w @ v / w.sum(-1, keepdim=True))
    torch.testing.assert_close(kernel.weights(q, k), w / w.sum(-1, keepdim=True))


def test_sums_of_chunks_and_strips():
    a, b = (torch.rand(2, 150, 3, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, 150, 5, dtype=torch.float64)
    expected = (a @ b.mT).tril() @ v
    torch.testing.assert_close(associative_sums(a, b, v, is_causal=True), expected)
    streamed = weighted_sums(a, b, v, lambda s: s, is_causal=True)
    torch.testing.assert_close(streamed, expected)


@pytest.mark.parametrize("kernel", [*NAMES, "taylor4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_causal_tokens_do_not_see_later_ones(kernel, bad, small_tiles):
    """Not a bit, even if later tokens are no numbers; those who see such a token are told."""
    layer = cm.nn.Attention(8, 2, kernel=kernel)
    x = torch.randn(2, 150, 8)
    for at in (70, 127):
        later, garbage = x.clone(), x.clone()
        later[:, at:] = 1e4 * torch.randn(2, 150 - at, 8)
        garbage[0, at] = bad
        assert torch.equal(layer(x)[:, :at], layer(later)[:, :at])
        spoiled = layer(garbage).isnan().any(-1)
        assert spoiled[0, at:].all()
        assert not spoiled[0, :at].any()
        assert not spoiled[1].any()


@pytest.mark.parametrize("kernel", [x for x in [*NAMES, "taylor4"] if x != "sigmoid"])
def test_a_prefix_gives_what_it_gives_in_the_whole(kernel):
    """So that a causal model can be read token by token; the sigmoid counts all keys."""
    layer = cm.nn.Attention(8, 2, kernel=kernel).double()
    x = torch.randn(2, 90, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x[:, :70]), layer(x)[:, :70])


@pytest.mark.parametrize("kernel", [*NAMES, "taylor4"])
@pytest.mark.parametrize("causal", [True, False])
def test_shapes_without_content_and_half_precision(kernel, causal):
    model = cm.nn.Transformer(11, width=16, heads=2, kernel=kernel, causal=causal)
    for shape in ((0, 5), (2, 0), (1,), (2, 3, 4)):
        assert model(torch.zeros(shape, dtype=torch.long)).shape == (*shape, 11)
    tokens = torch.randint(11, (2, 60))
    exact = model(tokens)
    for dtype, bound in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        half = copy.deepcopy(model).to(dtype)(tokens)
        assert half.dtype == dtype
        assert (half - exact).norm() < bound * exact.norm()
        with torch.autocast("cpu", dtype):
            assert (model(tokens) - exact).norm() < bound * exact.norm()


def test_a_row_without_weight_is_zero_and_so_is_its_gradient():
    q = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    k = torch.tensor([[[-1.0, 0.0]]])
    out = similarity("relu2")(q, k, torch.ones(1, 1, 3))
    out.sum().backward()
    assert out.abs().max() == 0
    assert q.grad.abs().max() == 0


@pytest.mark.parametrize("query_key", ["trained", "identity"])
def test_tied_attention_is_the_gradient_of_its_log_normalizers(query_key):
    layer = cm.nn.Attention(12, 3, causal=False, query_key=query_key, value_output="tied").double()
    x = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    keys = layer.key(x).detach().unflatten(-1, (3, 4))  # the measure is frozen during a step
    queries = layer.query(x).unflatten(-1, (3, 4))
    scores = torch.einsum("ihd,jhd->hij", queries, keys) / 2
    (gradient,) = torch.autograd.grad(2 * scores.logsumexp(-1).sum(), x)
    torch.testing.assert_close(layer(x), gradient)


def test_weights_that_are_not_trained_get_no_gradient():
    model = cm.nn.Transformer(11, query_key="frozen", value_output="identity", context=8)
    model(torch.randint(11, (2, 8))).square().mean().backward()
    attention = model.blocks[0].parts[0]
    assert attention.query.weight.grad is None
    assert not list(attention.value.parameters())
    assert model.blocks[0].parts[1][0].weight.grad.abs().max() > 0


def test_contractions_steps_and_passes():
    x = torch.randn(2, 6, 16)
    sphere = cm.nn.Transformer(None, width=16, contraction="sphere", place="after")
    torch.testing.assert_close(sphere(x).norm(dim=-1), torch.ones(2, 6))

    shared = cm.nn.Transformer(None, width=16, layers=1, passes=3, contraction="none")
    block = shared.blocks[0]
    torch.testing.assert_close(shared(x), block(block(block(x))))

    learned = cm.nn.Transformer(None, width=16, layers=1, step="learned", contraction="rms")
    with torch.no_grad():
        for step in learned.blocks[0].steps:
            step.size.zero_()
    torch.testing.assert_close(learned.states(x), x)
    gated = cm.nn.Transformer(None, width=16, layers=1, step="gated")
    for step in gated.blocks[0].steps:
        nn.init.constant_(step.gate.bias, -100.0)
    torch.testing.assert_close(gated.states(x), x)


def test_moment_heads_know_the_variance():
    layer = cm.nn.Attention(8, 2, moments=True, causal=False).double()
    moments = cm.nn.MomentAttention(8, 2, bias=False).double()
    with torch.no_grad():
        for mine, theirs in (("query", "query"), ("key", "key"), ("value", "value")):
            getattr(moments, f"project_{theirs}").weight.copy_(getattr(layer, mine).weight)
        moments.project_output.weight.copy_(torch.eye(8))
        deviations = torch.cat([torch.zeros(4, 4), torch.eye(4)], -1)  # of each head
        layer.output.weight.copy_(torch.block_diag(deviations, deviations))
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x).square(), moments(x).covariance, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kernel", NAMES)
def test_compiles(kernel):
    """Values and gradients; kernels that stream over tiles break the graph, others do not."""
    model = cm.nn.Transformer(17, width=16, heads=2, layers=1, context=12, kernel=kernel)
    tokens = torch.randint(17, (2, 12))
    whole = kernel in ("exp", "cosine", "elu1", "uniform")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
    trained = [p for n, p in model.named_parameters() if kernel != "uniform" or "parts.0" not in n]
    ours, theirs = compiled(tokens), model(tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(ours.square().mean(), trained)
    wanted = torch.autograd.grad(theirs.square().mean(), trained)
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", [*NAMES, "taylor4"])
def test_a_model_can_be_saved_whole(kernel, tmp_path):
    model = cm.nn.Transformer(17, width=16, heads=2, context=12, kernel=kernel)
    tokens = torch.randint(17, (2, 12))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kernel": "gauss"}, "exp, cosine, taylor2"),
        ({"kernel": "taylor3"}, "even degree"),
        ({"heads": 5}, "heads must divide width"),
        ({"query_key": "learned"}, "trained, frozen, identity"),
        ({"contraction": "batch"}, "layer, rms, sphere, none"),
        ({"step": "half"}, "one, learned, gated"),
        ({"passes": 0}, "passes"),
        ({"kernel": "taylor1000000000"}, "even degree"),
        ({"vocabulary": 0}, "vocabulary must be an integer >= 1"),
        ({"kernel": "sigmoid", "moments": True}, "normalized kernel"),
    ],
)
def test_wrong_choices_list_the_known_ones(wrong, says):
    with pytest.raises(cm.InputError, match=says):
        cm.nn.Transformer(**{"vocabulary": 9, **wrong})


@pytest.mark.parametrize(
    ("vocabulary", "x", "says"),
    [
        (9, torch.zeros(1, 5, dtype=torch.long), "5 tokens, but context is 4"),
        (9, torch.zeros(1, 3), r"tokens \(..., N\) from 0 to 8, not torch.float32 \(1, 3\)"),
        (9, torch.tensor(3), r"expected tokens \(..., N\) from 0 to 8, not torch.int64 \(\)"),
        (9, torch.tensor([[9]]), "from 0 to 8; some are outside"),
        (9, torch.tensor([[-1]]), "from 0 to 8; some are outside"),
        (None, torch.randn(2, 5, 8), r"vectors \(..., N, 64\), not torch.float32 \(2, 5, 8\)"),
        (None, torch.randn(64), r"expected vectors \(..., N, 64\)"),
        (None, torch.zeros(2, 64, dtype=torch.long), r"vectors .*, not torch.int64 \(2, 64\)"),
    ],
)
def test_inputs_that_do_not_fit(vocabulary, x, says):
    with pytest.raises(cm.InputError, match=says):
        cm.nn.Transformer(vocabulary, context=4)(x)


def test_parts_refuse_what_they_do_not_know():
    with pytest.raises(cm.InputError, match="query_key must be one of trained, frozen, identity"):
        cm.nn.Attention(8, 2, query_key="tied")
    with pytest.raises(cm.InputError, match="heads must divide width, but 3 does not 8"):
        cm.nn.Attention(8, 3)
    with pytest.raises(cm.InputError, match="place must be one of before, after"):
        cm.nn.Block(cm.nn.Attention(8, 2), 8, place="between")
    identity = cm.nn.Attention(8, 2, query_key="identity", value_output="identity")
    with pytest.raises(cm.InputError, match=r"Attention: expected vectors \(..., N, 8\)"):
        identity(torch.randn(2, 5, 6))


@pytest.mark.parametrize("kernel", [lambda s: s.sum(-1, keepdim=True), lambda s: 1.0])
def test_a_kernel_that_is_not_elementwise_is_refused(kernel):
    q = torch.randn(2, 5, 4)
    with pytest.raises(cm.InputError, match="must map each score to a weight, but of scores"):
        similarity(kernel)(q, q, q)
