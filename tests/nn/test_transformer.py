"""`Transformer` against plain torch modules, and each switch against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cumulant as cm
from cumulant.kernels.weighted import associative_sums, weighted_sums
from cumulant.nn.similarity import NAMES, similarity


def of_torch(model: cm.nn.Transformer, first: bool) -> nn.Module:
    """torch's own encoder with the same weights."""
    width, layers = model.embedding.embedding_dim, []
    for block in model.blocks:
        attention, ff = block.parts
        layer = nn.TransformerEncoderLayer(
            width, attention.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=first
        )
        mine = layer.self_attn
        with torch.no_grad():
            maps = (attention.query, attention.key, attention.value)
            mine.in_proj_weight.copy_(torch.cat([x.weight for x in maps]))
            mine.out_proj.weight.copy_(attention.output.weight)
            mine.in_proj_bias.zero_(), mine.out_proj.bias.zero_()
        layer.linear1.load_state_dict(ff[0].state_dict())
        layer.linear2.load_state_dict(ff[2].state_dict())
        layer.norm1.load_state_dict(block.contractions[0].state_dict())
        layer.norm2.load_state_dict(block.contractions[1].state_dict())
        layers.append(layer)
    return nn.ModuleList(layers)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_equals_torchs_modules(place, causal, checkpoint):
    model = cm.nn.Transformer(
        29, width=32, context=40, place=place, causal=causal, checkpoint=checkpoint
    )
    theirs = of_torch(model, place == "before")
    tokens = torch.randint(29, (3, 37))
    mask = nn.Transformer.generate_square_subsequent_mask(37) if causal else None

    ours = model(tokens)
    x = F.embedding(tokens, model.embedding.weight) + model.position[:37]
    for layer in theirs:
        x = layer(x, src_mask=mask, is_causal=causal)
    plain = model.readout(model.contraction(x))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)

    cotangent = torch.randn_like(plain) / plain.numel() ** 0.5
    shared = [model.embedding.weight, model.position, model.readout.weight]
    inner = [model.blocks[0].parts[0].query.weight, model.blocks[0].parts[0].value.weight]
    mine = torch.autograd.grad((ours * cotangent).sum(), [*shared, *inner])
    packed = theirs[0].self_attn.in_proj_weight
    *rest, stacked = torch.autograd.grad((plain * cotangent).sum(), [*shared, packed])
    query, _, value = stacked.chunk(3)
    for a, b in zip(mine, [*rest, query, value], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


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
        ({"kernel": "sigmoid", "moments": True}, "normalized kernel"),
    ],
)
def test_wrong_choices_list_the_known_ones(wrong, says):
    with pytest.raises(cm.InputError, match=says):
        cm.nn.Transformer(9, **wrong)


def test_too_many_tokens():
    with pytest.raises(cm.InputError, match="context is 4"):
        cm.nn.Transformer(9, context=4)(torch.zeros(1, 5, dtype=torch.long))
