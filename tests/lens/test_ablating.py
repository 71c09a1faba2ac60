"""Parts of a model replaced: against models whose weights were changed by hand."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel, LlamaConfig, LlamaModel

import cumulant as cm
from cumulant.attention.calls import AttentionCall
from cumulant.lens.ablating import PARTS, TEMPERATURES
from cumulant.lens.standing_in import continuous

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
INPUTS = {"input_ids": torch.tensor([[1, 5, 7, 2, 9, 30, 12, 3]])}


def shaken(model):
    """With weights large enough to matter."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model.eval().double()


@pytest.fixture(scope="module")
def bert():
    return shaken(BertModel(BertConfig(num_attention_heads=4, **SIZES)))


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SIZES)
    return shaken(LlamaModel(config))


@pytest.fixture(scope="module")
def albert():
    return shaken(AlbertModel(AlbertConfig(num_attention_heads=4, embedding_size=8, **SIZES)))


@torch.no_grad()
def run(model, **inputs):
    return model(**(inputs or INPUTS)).last_hidden_state


@torch.no_grad()
def set_to(linear, matrix):
    linear.weight.copy_(matrix)
    if linear.bias is not None:
        linear.bias.zero_()


def by_hand(model, layer, change):
    other = copy.deepcopy(model)
    blocks = other.encoder.layer if hasattr(other, "encoder") else other.layers
    change(blocks[layer])
    return run(other)


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("bert", "attention", lambda b: set_to(b.attention.output.dense, torch.zeros(16, 16))),
        ("llama", "attention", lambda b: set_to(b.self_attn.o_proj, torch.zeros(16, 16))),
        ("bert", "feed_forward", lambda b: set_to(b.output.dense, torch.zeros(16, 32))),
        ("llama", "feed_forward", lambda b: set_to(b.mlp.down_proj, torch.zeros(16, 32))),
        ("bert", "uniform", lambda b: set_to(b.attention.self.query, torch.zeros(16, 16))),
        ("llama", "uniform", lambda b: set_to(b.self_attn.q_proj, torch.zeros(16, 16))),
    ],
)
def test_removed_parts_are_zero_weights(name, part, change, request):
    model = request.getfixturevalue(name)
    truth = by_hand(model, 1, change)
    with cm.lens.ablate(model, part, layers=[1]):
        torch.testing.assert_close(run(model), truth)
    assert not torch.allclose(run(model), truth)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("part", ["attention", "uniform"])
def test_removed_heads_are_zero_weights_of_these_heads(name, part, request):
    """Heads 0 and 2 of four, of width 4: columns of the output or rows of the query projection."""
    model = request.getfixturevalue(name)
    own = [0, 1, 2, 3, 8, 9, 10, 11]

    @torch.no_grad()
    def change(block):
        linears = {
            ("bert", "attention"): lambda: block.attention.output.dense,
            ("bert", "uniform"): lambda: block.attention.self.query,
            ("llama", "attention"): lambda: block.self_attn.o_proj,
            ("llama", "uniform"): lambda: block.self_attn.q_proj,
        }
        linear = linears[name, part]()
        if part == "attention":
            linear.weight[:, own] = 0
            return
        linear.weight[own] = 0
        if linear.bias is not None:
            linear.bias[own] = 0

    truth = by_hand(model, 1, change)
    before = run(model)
    with cm.lens.ablate(model, part, layers=np.int64(1), heads=[np.int64(0), 2]):
        torch.testing.assert_close(run(model), truth)
    assert not torch.allclose(before, truth)
    assert torch.equal(run(model), before)


def test_heads_that_cannot_be_ablated(bert):
    for part, heads, why in (
        ("uniform", 4, "have heads 0 to 3, not 4"),
        ("uniform", [-1], "a head must be an integer >= 0"),
        ("uniform", [], "heads is empty"),
        ("feed_forward", 1, "is of whole layers"),
    ):
        with pytest.raises(cm.InputError, match=why):
            cm.lens.ablate(bert, part, layers=1, heads=heads)


def test_identity_of_queries_and_keys_is_the_identity_matrix(bert):
    def change(temperature):
        def inner(block):
            own = block.attention.self
            set_to(own.query, temperature * torch.eye(16))
            set_to(own.key, torch.eye(16))

        return inner

    with cm.lens.ablate(bert, "query_key", layers=2, fit=INPUTS):
        ours = run(bert)
    # One temperature a head: each is the best of its grid for that head's own output.
    outputs = []

    def keep(module, args, output):
        outputs.append(output[0].unflatten(-1, (4, 4)))

    handle = bert.encoder.layer[2].attention.self.register_forward_hook(keep)
    truth = run(bert) is not None and outputs.pop()
    handle.remove()
    errors = []
    for t in TEMPERATURES:
        other = copy.deepcopy(bert)
        change(t)(other.encoder.layer[2])
        handle = other.encoder.layer[2].attention.self.register_forward_hook(keep)
        run(other)
        errors.append((outputs.pop() - truth).square().sum((0, 1, 3)))
    best = torch.tensor(TEMPERATURES)[torch.stack(errors).argmin(0)].double()
    other = copy.deepcopy(bert)
    change(1.0)(other.encoder.layer[2])
    set_to(other.encoder.layer[2].attention.self.query, best.repeat_interleave(4).diag())
    torch.testing.assert_close(ours, run(other))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_identity_of_values_and_outputs_has_the_best_gain(name, request):
    model = request.getfixturevalue(name)

    def changed(gain):
        def inner(block):
            own = block.attention.self if name == "bert" else block.self_attn
            out = block.attention.output.dense if name == "bert" else own.o_proj
            if name == "bert":
                set_to(own.value, torch.eye(16))
            set_to(out, gain * torch.eye(16))

        return inner

    with cm.lens.ablate(model, "value_output", layers=0, fit=INPUTS):
        ours = run(model)
    if name == "llama":  # fewer value heads than heads: no matrix does the same
        assert not torch.allclose(ours, run(model))
        return
    seen = bert_parts(model)
    gain = float((seen["ours"] * seen["truth"]).sum() / seen["ours"].square().sum())
    torch.testing.assert_close(ours, by_hand(model, 0, changed(gain)))


@torch.no_grad()
def bert_parts(model):
    """Output of the first attention sublayer, and what it is with slices of the state as values."""
    block = model.encoder.layer[0].attention
    x = model.embeddings(INPUTS["input_ids"])[0]
    q, k = (f(x).unflatten(-1, (4, 4)).transpose(0, 1) for f in (block.self.query, block.self.key))
    p = (q @ k.mT / 2).softmax(-1)
    v = block.self.value(x).unflatten(-1, (4, 4)).transpose(0, 1)
    truth = block.output.dense((p @ v).transpose(0, 1).flatten(1))
    own = x.unflatten(-1, (4, 4)).transpose(0, 1)
    return {"truth": truth, "ours": (p @ own).transpose(0, 1).flatten(1)}


def test_one_head_has_the_mean_weights(bert):
    eager = copy.deepcopy(bert)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(**INPUTS, output_attentions=True).attentions[0][0]
    block = eager.encoder.layer[0].attention
    with torch.no_grad():
        x = eager.embeddings(INPUTS["input_ids"])[0]
        mixed = weights.mean(0) @ block.self.value(x)
        truth = block.output(mixed, x)
    seen = []
    handle = bert.encoder.layer[0].attention.register_forward_hook(
        lambda m, a, o: seen.append(o[0])
    )
    with cm.lens.ablate(bert, "one_head", layers=0):
        run(bert)
    handle.remove()
    torch.testing.assert_close(seen[0][0], truth)


def test_a_gaussian_head_adds_the_covariance_of_value_and_key():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 7, 4))
    truth = v.mean(0) + (0.6 * q @ (k - k.mean(0)).T) @ (v - v.mean(0)) / 7
    call = AttentionCall(*(torch.tensor(x)[None, None] for x in (q, k, v)), scale=0.6)
    np.testing.assert_allclose(continuous(call)[0, 0], truth)
    # Causal: the law of the keys seen so far.
    causal = AttentionCall(call.query, call.key, call.value, scale=0.6, causal=True)
    seen, eta = slice(0, 4), 0.6 * q[3]
    early = v[seen].mean(0) + (k[seen] - k[seen].mean(0)) @ eta @ (v[seen] - v[seen].mean(0)) / 4
    np.testing.assert_allclose(continuous(causal)[0, 0, 3], early)


def test_a_mixture_is_the_tilted_mean_of_the_librarys_own():
    torch.manual_seed(1)
    centers = torch.tensor([[0.0, 0, 0], [4, 0, 0], [0, 4, 4]]).double()
    groups = [c + 0.3 * torch.randn(8, 3).double() for c in centers]
    key, eta = torch.cat(groups), torch.randn(5, 3).double()
    law = cm.GaussianMixture(
        torch.stack([g.mean(0) for g in groups]),
        torch.stack([torch.cov(g.T, correction=0) for g in groups]),
    )
    # Lloyd's algorithm from some start finds these groups; values are the keys themselves.
    call = AttentionCall(eta[None, None], key[None, None], key[None, None])
    found = [continuous(call, 3, seed=seed)[0, 0] for seed in range(20)]
    gaps = [float((x - law.mean(eta)).abs().max()) for x in found]
    assert min(gaps) < 1e-10


@pytest.mark.parametrize("name", ["bert", "llama", "albert"])
@pytest.mark.parametrize("part", PARTS)
def test_afterwards_the_model_is_bit_for_bit_what_it_was(name, part, request):
    model = request.getfixturevalue(name)
    before, weights = run(model), copy.deepcopy(model.state_dict())
    with cm.lens.ablate(model, part, layers=[0, 2], fit=INPUTS):
        assert not torch.allclose(run(model), before)
    assert torch.equal(run(model), before)
    assert all(torch.equal(x, weights[n]) for n, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_shared_layers_are_replaced_one_pass_at_a_time(albert):
    with cm.lens.ablate(albert, "attention", layers=0):
        first = run(albert)
    with cm.lens.ablate(albert, "attention", layers=1):
        second = run(albert)
    assert not torch.allclose(first, second)


def test_contexts_nest(bert):
    def both(first, second):
        def change(block):
            set_to(block.attention.output.dense, torch.zeros(16, 16))

        other = copy.deepcopy(bert)
        for layer in (first, second):
            change(other.encoder.layer[layer])
        return run(other)

    with cm.lens.ablate(bert, "attention", layers=0), cm.lens.ablate(bert, "attention", layers=2):
        torch.testing.assert_close(run(bert), both(0, 2))
    with cm.lens.ablate(bert, "uniform"), cm.lens.ablate(bert, "gaussian"):
        inner = run(bert)
    with cm.lens.ablate(bert, "gaussian"):
        torch.testing.assert_close(run(bert), inner)


def test_errors_say_what_there_is(bert):
    with pytest.raises(cm.InputError, match=r"no part 'heads'; the parts are query_key, uniform"):
        cm.lens.ablate(bert, "heads")
    with pytest.raises(cm.InputError, match="Linear has no attention layers; pass a Hugging Face"):
        cm.lens.ablate(torch.nn.Linear(3, 3), "uniform")
    with pytest.raises(cm.InputError, match="a layer must be an integer, not True"):
        cm.lens.ablate(bert, "uniform", True)
    with pytest.raises(cm.InputError, match="layers 0 to 2, not 3, 7"):
        cm.lens.ablate(bert, "uniform", layers=[0, 3, 7])
    with pytest.raises(cm.InputError, match="pass fit="):
        cm.lens.ablate(bert, "query_key")
    strange = torch.nn.Linear(3, 3)
    strange.config = SimpleNamespace(num_hidden_layers=1)
    with (
        pytest.raises(cm.InputError, match="unknown names"),
        cm.lens.ablate(strange, "feed_forward"),
    ):
        pass


def test_padding_does_not_enter_the_fit(bert):
    ids = torch.tensor([[1, 5, 7, 2, 9, 30, 12, 3], [4, 4, 8, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[1] * 8, [1] * 3 + [0] * 5])
    other = ids.clone()
    other[1, 3:] = 17
    for part in ("query_key", "value_output"):
        found = []
        for given in (ids, other):
            with cm.lens.ablate(bert, part, fit={"input_ids": given, "attention_mask": mask}):
                found.append(run(bert))
        torch.testing.assert_close(*found)


def test_the_table_of_laws_ends_at_the_softmax():
    torch.manual_seed(0)
    model = shaken(BertModel(BertConfig(num_attention_heads=4, **SIZES)))
    table = cm.lens.laws(model, [INPUTS], (1, 8))
    assert table.equals(cm.lens.laws(model, INPUTS, (1, 8)))
    assert len(table) == 3 * 4 * 2
    exact = table[table["components"] == 8]
    assert exact["error"].max() < 1e-10
    assert (table[table["components"] == 1]["error"] > 1e-3).all()
