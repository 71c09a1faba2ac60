"""Expansion, contraction and shape of hidden states. Oracles: sublayers written out by hand from
`output_hidden_states` and the branches' outputs; closed forms of LayerNorm; brute force."""

from __future__ import annotations

import io
import math

import pytest
import torch
import transformers
from torch import nn

import cumulant as cm
from cumulant.lens import layers as module_under_test
from cumulant.lens.clouds import Cloud
from cumulant.lens.hidden import Reservoir, some_pairs
from cumulant.lens.layers import LayerProbe

LEVELS = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
NAMES = ("q05", "q25", "median", "q75", "q95")
SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}


def tell(model, probe, cores, real, sink, *, trigger=None):
    """The recorder's stand-in: numbers calls in order of execution, tells the probe of each."""
    count = [0]

    def hook(core, cross):
        def told(*_):
            probe.attention(core, count[0], cross, real, sink)
            count[0] += 1

        return told

    handles = []
    for name, core in list(model.named_modules()):
        if name.endswith(cores):
            at = core if trigger is None else getattr(core, trigger)
            cross = name.endswith(("EncDecAttention", "multihead_attn"))
            handles.append(at.register_forward_hook(hook(core, cross)))
    return handles


def run(model, cores, forward, real, *, sink=None, probe=None, trigger=None, **options):
    sink = torch.zeros_like(real) if sink is None else sink
    with torch.no_grad(), (probe or LayerProbe(model, **options)).attached() as probe:
        handles = tell(model, probe, cores, real, sink, trigger=trigger)
        forward()
        for handle in handles:
            handle.remove()
    return probe


def catch(model, *suffixes):
    """Outputs of submodules, by name, as they come."""
    kept = {}

    def hook(name):
        def keep(module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            kept.setdefault(name, []).append(output.clone())

        return keep

    for name, module in model.named_modules():
        if name.endswith(suffixes):
            module.register_forward_hook(hook(name))
    return kept


def ratios(before, after, real=None, keep=None):
    """All pairs of real tokens of each text, by torch's own distances."""
    found = []
    for b in range(len(before)):
        use = torch.ones(before.shape[1]).bool() if real is None else real[b]
        use = use if keep is None else use & keep[b]
        x, y = (torch.pdist(z[b][use].double()) for z in (before, after))
        found.append((y / x)[x > 0])
    return torch.cat(found)


def row_of(probe, layer, sublayer, name="", tokens="all"):
    rows = [
        r
        for r in probe.expansions()
        if (r["layer"], r["sublayer"], r["name"], r["tokens"]) == (layer, sublayer, name, tokens)
    ]
    assert len(rows) == 1, [(r["layer"], r["sublayer"], r["name"]) for r in probe.expansions()]
    return rows[0]


def assert_row(row, expected, rtol=1e-5):
    assert row["pairs"] == len(expected)
    ours = torch.tensor([row[n] for n in NAMES], dtype=torch.float64)
    torch.testing.assert_close(ours, expected.quantile(LEVELS), rtol=rtol, atol=0)


def build(name, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}Model")(config).double().eval()
    for p in model.parameters():  # Hugging Face starts so small that blocks do almost nothing
        p.data.mul_(8) if p.ndim >= 2 else p.data.add_(0.1 * torch.randn_like(p))
    return model


def tokens(batch=2, length=7):
    return torch.stack([torch.randperm(40)[:length] for _ in range(batch)])


EVERY = torch.ones(2, 7).bool()

# name: options, attention modules, blocks, branch of attention, branch of feed-forward, norms and
# whether each acts on the block's input ("start"), the stream between ("middle") or a branch
PRE_NORM = {
    "GPT2": (
        {
            "n_embd": 16,
            "n_layer": 3,
            "n_head": 2,
            "vocab_size": 40,
            "attn_pdrop": 0,
            "resid_pdrop": 0,
        },
        *(".attn", "h.{}", ".attn", ".mlp", {"ln_1": "start", "ln_2": "middle"}),
    ),
    "Llama": (
        SMALL | GROUPED,
        *(".self_attn", "layers.{}", ".self_attn", ".mlp"),
        {"input_layernorm": "start", "post_attention_layernorm": "middle"},
    ),
    "Gemma2": (
        SMALL | GROUPED | {"head_dim": 4},
        *(".self_attn", "layers.{}", ".post_attention_layernorm", ".post_feedforward_layernorm"),
        {
            "input_layernorm": "start",
            "post_attention_layernorm": ".self_attn",
            "pre_feedforward_layernorm": "middle",
            "post_feedforward_layernorm": ".mlp",
        },
    ),
    "Qwen3": (  # norms of queries and keys inside attention
        SMALL | GROUPED | {"head_dim": 4},
        *(".self_attn", "layers.{}", ".self_attn", ".mlp"),
        {"input_layernorm": "start", "post_attention_layernorm": "middle"},
    ),
    "Olmo2": (  # no norm on the stream; norms of all queries and keys, as wide as the stream
        SMALL | {"num_attention_heads": 4, "num_key_value_heads": 4},
        *(".self_attn", "layers.{}", ".post_attention_layernorm", ".post_feedforward_layernorm"),
        {"post_attention_layernorm": ".self_attn", "post_feedforward_layernorm": ".mlp"},
    ),
    "OPT": (  # the feed-forward sees a flattened view
        {"vocab_size": 40, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 3, "dropout": 0.0}
        | {"num_attention_heads": 2, "word_embed_proj_dim": 16},
        *(".self_attn", "decoder.layers.{}", ".self_attn", ".fc2"),
        {"self_attn_layer_norm": "start", "final_layer_norm": "middle"},
    ),
    "Bloom": (  # attention and feed-forward add the residual themselves
        {"vocab_size": 40, "hidden_size": 16, "n_layer": 3, "n_head": 2},
        *(".self_attention", "h.{}", ".self_attention.dense", ".mlp.dense_4h_to_h"),
        {"input_layernorm": "start", "post_attention_layernorm": "middle"},
    ),
}


@pytest.mark.parametrize("name", list(PRE_NORM))
def test_pre_norm_blocks(name):
    options, cores, block, attention, feed_forward, norms = PRE_NORM[name]
    model = build(name, **options)
    kept = catch(model, attention, feed_forward, ".self_attn", ".mlp", *norms)
    ids, out = tokens(), []
    probe = run(model, cores, lambda: out.append(model(ids, output_hidden_states=True)), EVERY)
    assert probe.skipped == {}
    assert [r["layer"] for r in probe.layers()] == [0, 1, 2]
    for layer in range(2):  # the last hidden state is behind the final norm
        start, end = out[0].hidden_states[layer : layer + 2]
        here = block.format(layer)
        middle = start + kept[here + attention][0]
        again = middle + kept[here + feed_forward][0].reshape(end.shape)
        torch.testing.assert_close(again, end)
        assert_row(row_of(probe, layer, "attention"), ratios(start, middle))
        assert_row(row_of(probe, layer, "feed_forward"), ratios(middle, end))
        assert_row(row_of(probe, layer, "block"), ratios(start, end))
        pooled = []
        for norm, on in norms.items():
            before = {"start": start, "middle": middle}.get(on)
            before = kept[here + on][0] if before is None else before
            expected = ratios(before, kept[f"{here}.{norm}"][0].reshape(end.shape))
            assert_row(row_of(probe, layer, "norm", norm), expected)
            pooled.append(expected)
        mine = [r for r in probe.expansions() if r["layer"] == layer and r["tokens"] == "all"]
        assert len(mine) == 3 + len(norms)
        row = probe.layers()[layer]
        assert row["module"] == here
        assert row["norm_contraction"] == pytest.approx(float(torch.cat(pooled).quantile(0.5)))
        assert row["attention_expansion"] == row_of(probe, layer, "attention")["median"]
        assert row["cross_attention_expansion"] is None


def normalized(norm, x):
    return nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def test_post_norm_blocks_of_bert():
    model = build("Bert", **SMALL, **HEADS, **QUIET)
    kept = catch(model, ".dense")
    out, ids = [], tokens()
    probe = run(
        *(model, ".attention.self"),
        lambda: out.append(model(ids, output_hidden_states=True)),
        EVERY,
    )
    for layer, block in enumerate(model.encoder.layer):
        here = f"encoder.layer.{layer}"
        start, end = out[0].hidden_states[layer : layer + 2]
        summed = start + kept[f"{here}.attention.output.dense"][0]
        middle = normalized(block.attention.output.LayerNorm, summed)
        last = middle + kept[f"{here}.output.dense"][0]
        torch.testing.assert_close(normalized(block.output.LayerNorm, last), end)
        assert_row(row_of(probe, layer, "attention"), ratios(start, summed))
        assert_row(
            row_of(probe, layer, "norm", "attention.output.LayerNorm"), ratios(summed, middle)
        )
        assert_row(row_of(probe, layer, "feed_forward"), ratios(middle, last))
        assert_row(row_of(probe, layer, "norm", "output.LayerNorm"), ratios(last, end))
        assert_row(row_of(probe, layer, "block"), ratios(start, end))
        assert probe.layers()[layer]["module"] == here


def test_a_shared_block_is_a_layer_each_time():
    """ALBERT: one set of weights, a norm and the residual inside the attention module."""
    model = build(
        "Albert", **SMALL, **HEADS, embedding_size=8, classifier_dropout_prob=0.0, **QUIET
    )
    kept = catch(model, ".dense", ".ffn_output")
    here = "encoder.albert_layer_groups.0.albert_layers.0"
    out, ids = [], tokens()
    probe = run(
        *(model, "albert_layers.0.attention"),
        lambda: out.append(model(ids, output_hidden_states=True)),
        EVERY,
        trigger="dense",
    )
    block = model.get_submodule(here)
    for layer in range(3):
        start, end = out[0].hidden_states[layer : layer + 2]
        summed = start + kept[f"{here}.attention.dense"][layer]
        middle = normalized(block.attention.LayerNorm, summed)
        last = middle + kept[f"{here}.ffn_output"][layer]
        torch.testing.assert_close(normalized(block.full_layer_layer_norm, last), end)
        assert_row(row_of(probe, layer, "attention"), ratios(start, summed))
        assert_row(row_of(probe, layer, "feed_forward"), ratios(middle, last))
        assert probe.layers()[layer]["module"] == here
    assert [r["layer"] for r in probe.inputs()] == [0]


def test_encoder_and_decoder_of_t5():
    options = {
        "vocab_size": 40,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
    }
    model = build("T5", **options, dropout_rate=0.0)
    kept = catch(model, "Attention", "DenseReluDense")
    ids, out = tokens(), []
    probe = run(
        *(model, ("SelfAttention", "EncDecAttention")),
        lambda: out.append(
            model(ids, decoder_input_ids=ids.flip(0), output_hidden_states=True, use_cache=False)
        ),
        EVERY,
    )
    # two encoder blocks, two decoder blocks of two attention calls each
    assert [(r["layer"], r["module"]) for r in probe.layers()] == [
        (0, "encoder.block.0"),
        (1, "encoder.block.1"),
        (2, "decoder.block.0"),
        (4, "decoder.block.1"),
    ]
    start, end = out[0].encoder_hidden_states[:2]
    middle = start + kept["encoder.block.0.layer.0.SelfAttention"][0]
    assert_row(row_of(probe, 0, "attention"), ratios(start, middle))
    assert_row(row_of(probe, 0, "feed_forward"), ratios(middle, end))
    start, end = out[0].decoder_hidden_states[:2]
    middle = start + kept["decoder.block.0.layer.0.SelfAttention"][0]
    crossed = middle + kept["decoder.block.0.layer.1.EncDecAttention"][0]
    assert_row(row_of(probe, 2, "attention"), ratios(start, middle))
    assert_row(row_of(probe, 2, "cross_attention"), ratios(middle, crossed))
    assert_row(row_of(probe, 2, "feed_forward"), ratios(crossed, end))
    # T5's norm has no mean and here no bias: x / rms(x) * weight
    weight = model.decoder.block[0].layer[1].layer_norm.weight
    scaled = middle / (middle.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert_row(row_of(probe, 2, "norm", "layer.1.layer_norm"), ratios(middle, scaled), rtol=1e-4)
    assert [r["module"] for r in probe.inputs()] == ["encoder.block.0", "decoder.block.0"]


def test_parallel_blocks_have_no_sublayers():
    model = build("GPTNeoX", **SMALL, **HEADS, use_parallel_residual=True)
    ids, out = tokens(), []
    probe = run(
        *(model, ".attention"), lambda: out.append(model(ids, output_hidden_states=True)), EVERY
    )
    start, end = out[0].hidden_states[:2]
    assert_row(row_of(probe, 0, "block"), ratios(start, end))
    assert {r["sublayer"] for r in probe.expansions()} == {"norm", "block"}
    assert {r["name"] for r in probe.expansions()} == {
        *("", "input_layernorm", "post_attention_layernorm")
    }


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_encoder(norm_first, batch_first):
    options = {"norm_first": norm_first, "batch_first": batch_first, "dtype": torch.float64}
    layer = nn.TransformerEncoderLayer(8, 2, 12, **options)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(5, 5, 8, dtype=torch.float64)  # as many texts as tokens
    real = torch.ones(5, 5).bool()
    real[1, 3:] = False
    given = x if batch_first else x.transpose(0, 1)
    probe = run(*(model, ".self_attn"), lambda: model(given, src_key_padding_mask=~real), real)
    one = model.layers[0]
    with torch.no_grad():
        turn = (lambda z: z) if batch_first else (lambda z: z.transpose(0, 1))
        look = lambda z: turn(one.self_attn(turn(z), turn(z), turn(z), key_padding_mask=~real)[0])
        feed = lambda z: one.linear2(torch.relu(one.linear1(z)))
        if norm_first:
            summed = x + look(normalized(one.norm1, x))
            middle, last = summed, summed + feed(normalized(one.norm2, summed))
        else:
            summed = x + look(x)
            middle = normalized(one.norm1, summed)
            last = middle + feed(middle)
    assert_row(row_of(probe, 0, "attention"), ratios(x, summed, real))
    assert_row(row_of(probe, 0, "feed_forward"), ratios(middle, last, real))
    assert_row(
        row_of(probe, 0, "norm", "norm2"),
        ratios(
            last if not norm_first else middle,
            normalized(one.norm2, last if not norm_first else middle),
            real,
        ),
    )


def test_cross_attention_of_torchs_decoder():
    layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True, dtype=torch.float64)
    model = nn.TransformerDecoder(layer, 1).eval()
    x, memory = torch.randn(2, 7, 8).double(), torch.randn(2, 4, 8).double()
    probe = run(model, ("self_attn", "multihead_attn"), lambda: model(x, memory), EVERY)
    one = model.layers[0]
    with torch.no_grad():
        middle = normalized(one.norm1, x + one.self_attn(x, x, x)[0])
        crossed = middle + one.multihead_attn(middle, memory, memory)[0]
    assert_row(row_of(probe, 0, "cross_attention"), ratios(middle, crossed))
    assert probe.layers()[0]["cross_attention_expansion"] == pytest.approx(
        float(ratios(middle, crossed).quantile(0.5))
    )


class InPlace(nn.Module):
    """A pre-norm block that writes the residual into its branches and into the stream."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        y = self.norm1(x)
        branch = self.attn(y, y, y)[0]
        branch += x
        branch += self.mlp(self.norm2(branch))
        return branch


def test_residuals_added_in_place():
    model = nn.Sequential(InPlace(), InPlace()).double().eval()
    x = torch.randn(2, 7, 8).double()
    probe = run(model, ".attn", lambda: model(x), EVERY)
    one = model[0]
    with torch.no_grad():
        y = one.norm1(x)
        middle = x + one.attn(y, y, y)[0]
        end = middle + one.mlp(one.norm2(middle))
    assert_row(row_of(probe, 0, "attention"), ratios(x, middle))
    assert_row(row_of(probe, 0, "feed_forward"), ratios(middle, end))


def encoder(**options):
    options = {"batch_first": True, "dtype": torch.float64, **options}
    layer = nn.TransformerEncoderLayer(8, 2, 12, norm_first=True, **options)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


def test_layer_norm_contracts_by_its_jacobian():
    """On a sphere of radius R about a constant vector LayerNorm is sqrt(d) / R times the identity,
    the singular value of its Jacobian (T15); off it, sqrt(d) over the smallest radius bounds it."""
    model, d = encoder(layer_norm_eps=0.0), 8
    x = torch.randn(2, 7, d).double()
    away = x - x.mean(-1, keepdim=True)
    radius = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
    probe = run(model, ".self_attn", lambda: model(3.0 + 5 * away / radius), EVERY)
    row = row_of(probe, 0, "norm", "norm1")
    assert [row[n] for n in NAMES] == pytest.approx([math.sqrt(d) / 5] * 5)
    # convex: keep all tokens in one half space at distance c, so that segments stay outside c
    away[..., 0] += 4 * radius.max() + 1
    away = away - away.mean(-1, keepdim=True)
    axis = torch.eye(d).double()[0] - 1 / d
    c = float((away @ axis).min() / axis.norm())
    probe = run(model, ".self_attn", lambda: model(away), EVERY)
    assert row_of(probe, 0, "norm", "norm1")["q95"] <= math.sqrt(d) / c


def test_padding_changes_nothing():
    model = build("Bert", **SMALL, **HEADS, **QUIET)
    first, second = torch.randperm(40)[:9], torch.randperm(40)[:5]
    for pairs in (2048, 7):  # all pairs, and a random sample of a random sample
        alone = LayerProbe(model, pairs=pairs)
        for ids in (first, second):
            every = torch.ones(1, len(ids)).bool()
            run(model, ".attention.self", lambda ids=ids: model(ids[None]), every, probe=alone)
        ids = torch.zeros(2, 9, dtype=torch.long)
        ids[0], ids[1, :5] = first, second
        real = torch.ones(2, 9).bool()
        real[1, 5:] = False
        padded = run(
            *(model, ".attention.self"),
            lambda ids=ids, real=real: model(ids, attention_mask=real.long()),
            real,
            pairs=pairs,
        )
        assert len(alone.expansions()) == len(padded.expansions()) == 3 * 5 * 2
        for rows in ("expansions", "layers"):
            for a, b in zip(getattr(alone, rows)(), getattr(padded, rows)(), strict=True):
                for column, value in a.items():
                    near = isinstance(value, float)
                    assert b[column] == (pytest.approx(value, rel=1e-6) if near else value)


def test_pairs_without_sinks():
    model, x = encoder(), torch.randn(2, 7, 8).double()
    sink = torch.zeros(2, 7).bool()
    sink[0, 0] = sink[1, 3] = True
    probe = run(model, ".self_attn", lambda: model(x), EVERY, sink=sink)
    expected = ratios(x, model.layers[0].norm1(x).detach(), keep=~sink)
    assert_row(row_of(probe, 0, "norm", "norm1", "without_sinks"), expected)
    assert row_of(probe, 0, "norm", "norm1")["pairs"] == 42
    assert len(expected) == 30


def test_coinciding_tokens_are_left_out():
    model, x = encoder(), torch.randn(1, 4, 8).double()
    x[0, 1] = x[0, 0]
    probe = run(model, ".self_attn", lambda: model(x), torch.ones(1, 4).bool())
    assert row_of(probe, 0, "attention")["pairs"] == 5


def test_half_precision_and_inference_mode():
    model, x = encoder(dtype=torch.bfloat16), torch.randn(2, 7, 8).bfloat16()
    probe = LayerProbe(model)
    for mode in (torch.inference_mode, torch.no_grad):  # a second run, outside inference mode
        with probe.attached(), mode():
            handles = tell(model, probe, ".self_attn", EVERY, ~EVERY)
            model(x)
            for handle in handles:
                handle.remove()
    assert row_of(probe, 0, "attention")["pairs"] == 84
    with torch.no_grad():
        one = model.layers[0]
        y = one.norm1(x)
        middle = x + one.self_attn(y, y, y)[0]
    twice = ratios(x, middle).repeat(2)
    assert_row(row_of(probe, 0, "attention"), twice, rtol=1e-2)


def test_a_run_that_resumes_ends_the_same():
    model = build("GPT2", **PRE_NORM["GPT2"][0])
    texts = [tokens(1, n) for n in (9, 12, 5, 8)]
    sizes = {"pairs": 40, "tokens": 20, "seed": 3}

    def read(probe, some):
        for ids in some:
            every = torch.ones(1, ids.shape[1]).bool()
            run(model, ".attn", lambda ids=ids: model(ids), every, probe=probe)
        return probe

    whole = read(LayerProbe(model, **sizes), texts)
    saved = io.BytesIO()
    torch.save(read(LayerProbe(model, **sizes), texts[:2]).state(), saved)
    saved.seek(0)
    resumed = LayerProbe(model, **sizes)
    resumed.merge_state(torch.load(saved, weights_only=True))
    read(resumed, texts[2:])
    assert resumed.expansions() == whole.expansions()
    assert resumed.layers() == whole.layers()
    assert resumed.inputs() == whole.inputs()
    assert max(r["pairs"] for r in whole.expansions() if r["sublayer"] != "norm") == 40
    assert all(len(b["states"]["sample"]["key"]) == 20 for b in whole.state()["blocks"])


def test_states_of_other_sizes_are_refused():
    model = encoder()
    with pytest.raises(cm.InputError, match="same sizes"):
        LayerProbe(model, pairs=10).merge_state(LayerProbe(model).state())
    with pytest.raises(cm.InputError, match="torch module"):
        LayerProbe(lambda x: x)
    with pytest.raises(cm.InputError, match="pairs"):
        LayerProbe(model, pairs=0)


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_go_even_when_the_model_fails():
    model = encoder()
    probe = LayerProbe(model)

    def fail():
        with probe.attached():
            assert hooks(model) > 0
            model(torch.randn(1, 4, 9).double())

    with pytest.raises(RuntimeError):
        fail()
    assert hooks(model) == 0
    assert probe._stack == []


def test_a_failed_text_does_not_spoil_the_next():
    model, x = encoder(), torch.randn(2, 7, 8).double()
    broken = model.layers[0].linear1.register_forward_hook(lambda *_: 1 / 0)
    with LayerProbe(model).attached() as probe, torch.no_grad():
        tell(model, probe, ".self_attn", EVERY, ~EVERY)
        with pytest.raises(ZeroDivisionError):
            model(x)
        broken.remove()
        assert probe._stack == []
        assert probe.expansions() == []
        model(x)
    assert row_of(probe, 1, "attention")["pairs"] == 42


def test_trouble_in_the_probe_does_not_reach_the_model(monkeypatch):
    model, x = encoder(), torch.randn(2, 7, 8).double()
    expected = model(x)
    monkeypatch.setattr(module_under_test, "maps_of", lambda *_: 1 / 0)
    out = []
    probe = run(model, ".self_attn", lambda: out.append(model(x)), EVERY)
    torch.testing.assert_close(out[0], expected)
    assert probe.expansions() == []
    assert "ZeroDivisionError" in probe.skipped["layers.0"]


def test_single_tokens_and_strange_shapes_are_skipped():
    model = encoder()
    one = run(model, ".self_attn", lambda: model(torch.randn(2, 1, 8).double()), EVERY[:, :1])
    odd = run(model, ".self_attn", lambda: model(torch.randn(2, 5, 8).double()), EVERY)
    for probe in (one, odd):
        assert probe.layers() == []
        assert list(probe.skipped) == ["layers.0"]


def test_generation_measures_the_prompt():
    options = {**PRE_NORM["GPT2"][0], "bos_token_id": 0, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)).eval()
    ids = tokens()
    probe = LayerProbe(model)
    count = [0]
    with probe.attached():
        for i, block in enumerate(model.transformer.h):

            def told(core, args, output, i=i):
                n = output[0].shape[1]
                probe.attention(core, i, False, torch.ones(2, n).bool(), torch.zeros(2, n).bool())
                count[0] += 1

            block.attn.register_forward_hook(told)
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert count[0] == 9
    assert row_of(probe, 0, "attention")["pairs"] == 42


# Samples and shapes


def shape_of(states, sink=None, seed=0):
    """The shape of one text."""
    cloud = Cloud(4096, seed)
    sink = torch.zeros(len(states)).bool() if sink is None else sink
    cloud.add(states, real=torch.ones(1, len(states)).bool(), sink=sink[None])
    return cloud.shape()


def test_the_sample_is_uniform_however_it_comes():
    kept = torch.zeros(60)
    for seed in range(400):
        reservoir, at = Reservoir(15, seed), 0
        for counts in ([10], [20, 5], [25]):
            draw = reservoir.offer(counts)
            reservoir.add(draw.key, {"item": (at + draw.item).double()})
            at += sum(counts)
        items = reservoir.columns["item"].long()
        assert len(items) == 15 == len(set(items.tolist()))
        kept[items] += 1
    # chi-square with 59 degrees of freedom: 0.999 quantile 98 (less, as sizes are fixed)
    assert float(((kept - 100) ** 2 / 75).sum()) < 98


def test_random_pairs_are_pairs():
    pairs = some_pairs(50, limit=200, seed=0, position=0)
    assert pairs.shape == (200, 2)
    assert bool((pairs[:, 0] != pairs[:, 1]).all())
    assert int(pairs.min()) >= 0
    assert int(pairs.max()) < 50
    assert len(some_pairs(5, limit=10, seed=0, position=0).unique(dim=0)) == 10


def test_shape_by_brute_force():
    x = torch.randn(30, 6).double() * torch.arange(1, 7) + 2
    shape = shape_of(x)
    cosines = nn.functional.cosine_similarity(x[:, None], x[None], dim=-1)
    off = cosines[~torch.eye(30).bool()]
    values = torch.linalg.eigvalsh(torch.cov(x.T))
    assert shape.anisotropy == pytest.approx(float(off.mean()))
    assert shape.participation_ratio == pytest.approx(
        float(values.sum() ** 2 / values.square().sum())
    )
    # the nearest matrix with equal rows is that of the mean
    c = x.mean(0).expand_as(x)
    assert shape.rank_residual == pytest.approx(float((x - c).norm() / x.norm()))
    assert shape_of(torch.ones(9, 4)).rank_residual == 0
    assert shape_of(x[:1]) == (None,) * 6


def test_p_values_of_gaussian_states_are_uniform():
    """More dimensions than tokens, a spectrum over four decades: the null must not notice."""
    scales = torch.logspace(0, -4, 200, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    p = []
    for seed in range(80):
        x = torch.randn(132, 200, dtype=torch.float64, generator=generator) * scales
        p.append(shape_of(x, seed=seed).gaussianity_p)
    p = torch.tensor(p).sort().values
    grid = torch.arange(1, 81) / 80
    assert float((p - grid).abs().max()) < 0.18  # Kolmogorov-Smirnov at 0.01


def test_sinks_are_left_out_of_gaussianity_only():
    x = torch.randn(400, 10, generator=torch.Generator().manual_seed(1)).double()
    sink = torch.zeros(400).bool()
    sink[:20] = True
    x[:20, 0] += 300
    plain, aware = shape_of(x), shape_of(x, sink)
    assert plain.gaussianity_p == pytest.approx(1 / 200)
    assert aware.gaussianity_p > 0.05
    assert aware.gaussianity < aware.gaussianity_null < plain.gaussianity
    assert plain[:3] == aware[:3]


def test_two_clusters_are_not_gaussian():
    x = torch.randn(200, 10).double()
    x[::2, 3] += 8
    shape = shape_of(x)
    assert shape.gaussianity > shape.gaussianity_null
    assert shape.gaussianity_p < 0.01


def test_layers_hold_the_shape_of_states_after_the_block():
    model, x = encoder(), torch.randn(2, 7, 8).double()
    out = []
    probe = run(model, ".self_attn", lambda: out.append(model(x)), EVERY)
    after, before = out[0].reshape(14, 8), x.reshape(14, 8)
    for row, states in ((probe.layers()[0], after), (probe.inputs()[0], before)):
        assert row["participation_ratio"] == pytest.approx(
            float(cm.dynamics.participation_ratio(states))
        )
        texts = states.unflatten(0, (2, 7))
        away = (texts - texts.mean(1, keepdim=True)).norm(dim=(1, 2)) / texts.norm(dim=(1, 2))
        assert row["rank_residual"] == pytest.approx(float(away.mean()))
        assert row["gaussianity_p"] is None  # fourteen tokens are too few
