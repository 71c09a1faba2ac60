"""Projections of real architectures, checked against what the modules compute; forms, densely."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import nn

from cumulant.lens.weights import Projections, bilinear, projections

WIDTH, HEADS = 24, 4

TINY = {
    "vocab_size": 20,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "intermediate_size": 16,
}
GPT2 = {"vocab_size": 20, "n_embd": WIDTH, "n_layer": 1, "n_head": HEADS}
T5 = {"vocab_size": 20, "d_model": WIDTH, "num_layers": 1, "num_heads": HEADS, "d_kv": 5}
DISTILBERT = {"vocab_size": 20, "dim": WIDTH, "n_layers": 1, "n_heads": HEADS, "hidden_dim": 16}
FALCON = {**TINY, "num_kv_heads": 2, "new_decoder_architecture": True}
VIT = {"image_size": 8, "patch_size": 4, **{k: TINY[k] for k in list(TINY)[1:]}}

# name of the configuration, its options, where the attention module is, its key heads
MODELS = {
    "Llama": (TINY | {"num_key_value_heads": 2}, "layers.0.self_attn", 2),
    "Bert": (TINY, "encoder.layer.0.attention.self", HEADS),
    "Albert": (TINY | {"embedding_size": 8}, None, HEADS),
    "GPT2": (GPT2, "h.0.attn", HEADS),
    "DistilBert": (DISTILBERT, "transformer.layer.0.attention", HEADS),
    "GPTNeoX": (TINY, "layers.0.attention", HEADS),
    "ModernBert": (TINY | {"pad_token_id": 0}, "layers.0.attn", HEADS),
    "Phi3": (TINY | {"num_key_value_heads": 2, "pad_token_id": 0}, "layers.0.self_attn", 2),
    "Falcon": (FALCON, "h.0.self_attention", HEADS),  # it repeats keys before they attend
    "GPTBigCode": (GPT2 | {"multi_query": False}, "h.0.attn", HEADS),
    "T5Encoder": (T5, "encoder.block.0.layer.0.SelfAttention", HEADS),
    "OPT": (
        TINY | {"ffn_dim": 16, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 32},
        "decoder.layers.0.self_attn",
        HEADS,
    ),
    "ViT": (VIT, None, HEADS),
}


def build(name):
    torch.manual_seed(0)
    options, path, key_heads = MODELS[name]
    config = {"T5Encoder": "T5"}.get(name, name)
    config = getattr(transformers, f"{config}Config")(**options)
    model = getattr(transformers, f"{name}Model")(config)._from_config(
        config, attn_implementation="sdpa"
    )
    model = model.double().eval()
    for parameter in model.parameters():  # biases away, everything else far from symmetric
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=0.3)
    return model, path, key_heads


def attention_input(name):
    if name == "ViT":
        return {"pixel_values": torch.randn(1, 3, 8, 8, dtype=torch.float64)}
    return {"input_ids": torch.tensor([[3]])}


class Spy:
    """What attention is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, query, key, value, *args, **options):
        self.calls.append((query, key, value))
        return self.original(query, key, value, *args, **options)

    def __enter__(self):
        self.original = nn.functional.scaled_dot_product_attention
        nn.functional.scaled_dot_product_attention = self
        return self

    def __exit__(self, *_):
        nn.functional.scaled_dot_product_attention = self.original


def locate(model, path):
    if path is not None:
        return model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    for name, module in model.named_modules():
        if projections(module, heads=HEADS, key_heads=HEADS) is not None:
            return module, model.get_submodule(name.rpartition(".")[0])
    raise AssertionError("no attention module found")


@pytest.mark.parametrize("name", MODELS)
def test_projections_reproduce_the_module(name):
    """Queries, keys and values that attention is called with, from the module's input.

    One token, at position 0, which rotary positions leave as it is.
    """
    model, path, key_heads = build(name)
    module, parent = locate(model, path)
    found = projections(module, heads=HEADS, key_heads=key_heads, parent=parent)
    assert found is not None
    assert found.output is not None
    own = key_heads if name != "Falcon" else 2
    assert found.query.shape[0] == HEADS
    assert found.key.shape[0] == found.value.shape[0] == own

    seen = {}
    keep = module.register_forward_hook(
        lambda m, args, kwargs, out: seen.update(
            x=args[0] if args else next(iter(kwargs.values()))
        ),
        with_kwargs=True,
    )
    with torch.no_grad(), Spy() as spy:
        model(**attention_input(name))
    keep.remove()
    x = seen["x"]
    query, key, value = spy.calls[0]
    wide = found.value.repeat_interleave(key.shape[1] // own, 0)
    torch.testing.assert_close(value, torch.einsum("bnD,hDe->bhne", x, wide))
    wide = found.key.repeat_interleave(key.shape[1] // own, 0)
    torch.testing.assert_close(key, torch.einsum("bnD,hDe->bhne", x, wide))
    torch.testing.assert_close(query, torch.einsum("bnD,hDe->bhne", x, found.query))


def test_output_projection_of_a_whole_module():
    """MultiheadAttention over one token returns sum over heads of x W_v W_o."""
    for options in ({}, {"kdim": 10, "vdim": 6}):
        attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True, **options)
        found = projections(attention, heads=HEADS, key_heads=HEADS)
        key = torch.randn(1, 1, options.get("kdim", WIDTH))
        value = torch.randn(1, 1, options.get("vdim", WIDTH))
        theirs = attention(torch.randn(1, 1, WIDTH), key, value)[0][0]
        ours = torch.einsum("nD,hDe,heF->nF", value[0], found.value, found.output)
        torch.testing.assert_close(ours, theirs)
        assert found.key.shape == (HEADS, options.get("kdim", WIDTH), WIDTH // HEADS)


@pytest.mark.parametrize("name", ["Llama", "Bert", "GPT2", "GPTNeoX", "ModernBert", "T5Encoder"])
def test_output_weights_of_models(name):
    """With one token, the module (BERT: and its output sibling) returns x W_v W_o."""
    model, path, key_heads = build(name)
    module, parent = locate(model, path)
    found = projections(module, heads=HEADS, key_heads=key_heads, parent=parent)
    seen = {}
    last = parent.output.dense if name == "Bert" else module
    first = module.register_forward_hook(
        lambda m, a, k, out: seen.update(x=a[0] if a else next(iter(k.values()))), with_kwargs=True
    )
    second = last.register_forward_hook(
        lambda m, a, out: seen.update(y=out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(input_ids=torch.tensor([[3]]))
    first.remove(), second.remove()
    wide = found.value.repeat_interleave(HEADS // len(found.value), 0)
    ours = torch.einsum("bnD,hDe,heF->bnF", seen["x"], wide, found.output)
    torch.testing.assert_close(ours, seen["y"].reshape(ours.shape))


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX", "Bert"])
def test_blocks_name_the_weights(name):
    """Zeroing the q,k blocks in the parameters zeroes W_q and W_k and nothing else."""
    model, path, key_heads = build(name)
    module, parent = locate(model, path)

    def look():
        return projections(module, heads=HEADS, key_heads=key_heads, parent=parent)

    found = look()
    copies = [x.clone() for x in (found.query, found.key, found.value, found.output)]
    before = Projections(*copies, found.query_key, found.value_output)
    sizes = [b.take().numel() for b in before.query_key]
    assert sizes == [before.query.numel(), before.key.numel()]
    with torch.no_grad():
        for block in before.query_key:
            blank = torch.ones_like(block.parameter)
            view = blank.mT if block.transposed else blank
            view[slice(None) if block.outputs is None else block.outputs] = 0
            block.parameter.mul_(blank)
    after = look()
    assert not after.query.any()
    assert not after.key.any()
    torch.testing.assert_close(after.value, before.value)
    torch.testing.assert_close(after.output, before.output)


def test_what_is_not_attention_is_none():
    assert projections(nn.Linear(4, 4), heads=2, key_heads=2) is None
    module = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(module, name, nn.Linear(8, 16 if name == "q_proj" else 8))
    assert projections(module, heads=2, key_heads=2) is None  # a gate beside the queries
    assert projections(module, heads=3, key_heads=2) is None


def random_projections(h=3, hk=3, width=20, d=4, e=5):
    shapes = (h, width, d), (hk, width, d), (hk, width, e), (h, e, width)
    return Projections(*(torch.randn(s, dtype=torch.float64) for s in shapes), (), ())


@pytest.mark.parametrize(("h", "hk", "width", "d"), [(3, 3, 20, 4), (4, 2, 20, 4), (2, 2, 6, 5)])
def test_bilinear_against_the_matrices(h, hk, width, d):
    found = random_projections(h, hk, width, d)
    result = bilinear(found)
    for head in range(h):
        k = head // (h // hk)
        A = found.query[head] @ found.key[k].mT
        S, N = (A + A.mT) / 2, (A - A.mT) / 2
        symmetry = (S.norm() ** 2 - N.norm() ** 2) / A.norm() ** 2
        values = torch.linalg.eigvalsh(S)
        V = found.value[k] @ found.output[head]
        alignment = (V * A.mT).sum() / V.norm() / A.norm()
        expected = torch.stack([symmetry, values.sum() / values.abs().sum(), alignment])
        torch.testing.assert_close(torch.stack([x[head] for x in result]), expected)


def test_bilinear_extremes():
    q = torch.randn(1, 12, 3, dtype=torch.float64)
    v, o = torch.randn(1, 12, 3, dtype=torch.float64), torch.randn(1, 3, 12, dtype=torch.float64)
    one = bilinear(Projections(q, q, q, q.mT, (), ()))
    torch.testing.assert_close(torch.stack(one), torch.ones(3, 1, dtype=torch.float64))
    minus = bilinear(Projections(q, -q, v, o, (), ()))
    assert (minus.symmetry, minus.definiteness) == (1, -1)
    basis = torch.eye(12, dtype=torch.float64)
    anti_q, anti_k = basis[None, :, [0, 1]], basis[None, :, [1, 0]] * torch.tensor([1.0, -1.0])
    anti = bilinear(Projections(anti_q, anti_k, v, o, (), ()))
    assert anti.symmetry == -1
    other = bilinear(Projections(q, v[:, :8], v[:, :8], o, (), ()))
    assert other.symmetry is None
    assert other.definiteness is None
    assert other.value_alignment.shape == (1,)


def test_value_alignment_is_the_gradient_condition():
    """T14: with W_v W_o = A' attention adds the gradient of G in x, and no pair gets closer."""
    x = torch.randn(9, 6, dtype=torch.float64)
    wq, wk = torch.randn(2, 6, 2, dtype=torch.float64)
    found = Projections(wq[None], wk[None], wk[None], wq.mT[None], (), ())
    assert math.isclose(float(bilinear(found).value_alignment), 1.0)

    def potential(y):
        return torch.logsumexp(y @ wq @ (x @ wk).mT, -1).sum()

    gradient = torch.func.grad(potential)(x)
    added = ((x @ wq) @ (x @ wk).mT).softmax(-1) @ x @ wk @ wq.mT
    torch.testing.assert_close(gradient, added)
