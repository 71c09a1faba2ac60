"""What attacks on `observe` found: masks of all kinds, caches, towers, threads, copies."""

from __future__ import annotations

import copy
import math
import threading

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import cumulant as cm

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


class Plain(nn.Module):
    """Attention as people call it."""

    def forward(self, query, key=None, **options):
        key = query if key is None else key
        return F.scaled_dot_product_attention(query, key, key, **options)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def entropy(query, key, mask=None):
    """By softmax, in double precision."""
    s = query.double() @ key.double().mT / query.shape[-1] ** 0.5
    s = s if mask is None else s.masked_fill(~mask, -math.inf)
    p = s.softmax(-1)
    return -(p * p.clamp_min(1e-300).log()).sum(-1)


def seen(model, *args, **kwargs):
    with torch.no_grad(), cm.lens.observe(model) as lens:
        out = model(*args, **kwargs)
    return out, lens.table()


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("heads", [1, 2])
def test_causal_biases(bias, heads):
    model, q, k = Plain(), random(1, heads, 4, 8), random(1, heads, 6, 8, seed=1)
    out, table = seen(model, q, k, attn_mask=bias(4, 6))
    assert torch.equal(out, model(q, k, attn_mask=bias(4, 6)))
    corner = 2 if bias is causal_lower_right else 0
    mask = torch.ones(4, 6, dtype=torch.bool).tril(corner)
    expected = entropy(q, k, mask).flatten().tolist()
    assert table["entropy"].tolist() == pytest.approx(expected, abs=1e-5)
    assert table["visible"].tolist() == mask.sum(-1).tolist() * heads


def test_masks_by_keyword():
    """Some models name the mask they pass to the interface."""
    from transformers import AttentionInterface

    class Layer(nn.Module):
        def forward(self, x):
            function = AttentionInterface().get_interface("sdpa", None)
            mask = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
            return function(self, x, x, x, attention_mask=mask, scaling=1.0, dropout=0.0)[0]

    out, table = seen(Layer(), random(1, 2, 4, 8))
    assert out.shape == (1, 4, 2, 8)
    assert table["visible"].tolist() == [1, 2, 3, 4] * 2


def test_encoders_stay_bidirectional_under_our_implementation():
    """Splinter passes no mask and does not say that it is not causal."""
    cm.lens.register()
    config = transformers.SplinterConfig(**SMALL, attn_implementation="eager")
    model = transformers.SplinterModel(config).eval()
    ids = torch.arange(5, 14)[None]
    with torch.no_grad():
        expected = model(ids)[0]
        model.set_attn_implementation("cumulant")
        torch.testing.assert_close(model(ids)[0], expected, rtol=1e-5, atol=1e-5)
    _, table = seen(model, ids)
    assert (table["visible"] == 9).all()


def test_generation_through_the_bare_function():
    """Falcon calls torch's function itself: a step with a cache is still self-attention."""
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.FalconForCausalLM(config).eval()
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.3)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(5, 11)[None]
    with torch.no_grad(), cm.lens.observe(model) as lens:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    _, whole = seen(model, out[:, :-1])
    steps = lens.table()
    assert len(steps) == len(whole)
    assert steps["self_mass"].tolist() == pytest.approx(whole["self_mass"].tolist(), abs=1e-5)
    assert (steps["attention"] == "self").all()


def test_towers_have_inputs_of_their_own():
    torch.manual_seed(0)
    text = {**SMALL, "max_position_embeddings": 16, "eos_token_id": 2, "num_hidden_layers": 1}
    image = {**SMALL, "image_size": 8, "patch_size": 4, "num_hidden_layers": 1}
    image.pop("vocab_size")
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    model = transformers.CLIPModel(config).eval()
    ids = torch.randint(3, 40, (3, 5))
    _, table = seen(model, input_ids=ids, pixel_values=random(2, 3, 8, 8))
    sizes = table.groupby("layer")["input"].nunique().tolist()
    assert sorted(sizes) == [2, 3]
    assert sorted(table["input"].unique()) == [0, 1, 2, 3, 4]


def test_threads_do_not_meet():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    other, inputs = Plain(), [random(1, n, 16, seed=n) for n in range(3, 11)]
    problems = []

    def run(x):
        try:
            with torch.no_grad():
                model(x)
                other(random(7, 3, 9, 8))
        except Exception as error:
            problems.append(error)

    with cm.lens.observe(model) as lens:
        threads = [threading.Thread(target=run, args=(x,)) for x in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []
    table = lens.table()
    assert lens.modules().shape[0] == 3
    lengths = table.groupby("input")["token"].max() + 1
    assert sorted(lengths) == list(range(3, 11))
    assert not table.duplicated(["input", "layer", "head", "token"]).any()


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()


def test_caches_know_their_texts():
    model, prefix = llama(), torch.arange(5, 9)[None]
    with torch.no_grad():
        shared = model(prefix, use_cache=True).past_key_values
        with cm.lens.observe(model) as lens:  # two texts go on from one prefix
            for token in (11, 12):
                model(torch.tensor([[token]]), past_key_values=copy.deepcopy(shared))
        table = lens.table()
        assert table["input"].unique().tolist() == [0, 1]
        assert (table["token"] == 4).all()
        with cm.lens.observe(model) as lens:  # two texts in turn
            first = model(prefix, use_cache=True).past_key_values
            second = model(prefix + 10, use_cache=True).past_key_values
            model(torch.tensor([[11]]), past_key_values=first)
            model(torch.tensor([[12]]), past_key_values=second)
    table = lens.table()
    assert table.groupby("input")["token"].max().tolist() == [4, 4]
    assert not table.duplicated(["input", "layer", "head", "token"]).any()


def test_masks_of_sound_are_not_masks_of_frames():
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        **SMALL,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(5, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
    )
    model = transformers.Wav2Vec2Model(config).eval()
    mask = torch.ones(2, 360, dtype=torch.long)
    mask[1, 120:] = 0
    _, table = seen(model, random(2, 360), attention_mask=mask)
    frames = model._get_feat_extract_output_lengths(mask.sum(-1)).tolist()
    assert (table.groupby("input")["token"].max() + 1).tolist() == frames


@pytest.mark.parametrize("options", [{"add_zero_attn": True}, {"add_bias_kv": True}])
def test_extra_keys_of_multihead_attention(options):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True, **options).eval()
    x, causal = random(1, 5, 16), torch.ones(5, 5, dtype=torch.bool).triu(1)
    asked = {"attn_mask": causal, "is_causal": True, "average_attn_weights": False}
    (_, weights), table = seen(model, x, x, x, **asked)
    expected = (weights * -weights.clamp_min(1e-30).log()).sum(-1).flatten().tolist()
    assert table["entropy"].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_every_way_to_write_hidden(low):
    q, keep = random(2, 2, 6, 8), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]]).bool()
    added = torch.where(keep, 0.0, low)[:, None, None, :]
    _, table = seen(Plain(), q, attn_mask=added)
    assert len(table) == 2 * (6 + 3)
    assert table.groupby("input")["visible"].max().tolist() == [6, 3]


def test_more_queries_than_keys():
    q, k = random(1, 1, 4, 8), random(1, 1, 2, 8, seed=1)
    _, table = seen(Plain(), q, k, is_causal=True)
    p = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(4, 2).tril().bool(), -math.inf).softmax(-1)
    assert table["sink_mass"].tolist() == pytest.approx(p[0, 0, :, 0].tolist(), abs=1e-6)
    assert table["top_key"].tolist() == p[0, 0].argmax(-1).tolist()


@pytest.mark.parametrize("shape", [(2, 1, 1, 5, 5), (3, 1, 5, 5), (5, 5)])
def test_masks_beside_more_dimensions(shape):
    q, mask = random(2, 3, 4, 5, 8), torch.ones(shape).tril().bool()
    out, table = seen(Plain(), q, attn_mask=mask)
    assert torch.equal(out, Plain()(q, attn_mask=mask))
    assert table["visible"].tolist() == [1, 2, 3, 4, 5] * 24


def test_no_tokens_at_all():
    model = Plain()
    with cm.lens.observe(model) as lens:
        model(random(2, 2, 0, 8))
        model(random(1, 2, 3, 8))
    assert len(lens.table()) == 6


def test_a_query_without_keys_in_one_head():
    mask = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    mask[0, 0, 1] = False
    _, table = seen(Plain(), random(1, 2, 4, 8), attn_mask=mask)
    assert table.groupby("head").size().tolist() == [3, 4]


def test_scripted_models_are_refused():
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(cm.InputError, match="cannot look inside"), cm.lens.observe(scripted):
        pass


def test_copies_made_meanwhile_are_free():
    model = llama()
    ids = torch.arange(5, 9)[None]
    with torch.no_grad(), cm.lens.observe(model) as lens:
        twin = copy.deepcopy(model)
        model(ids)
        twin(ids)
    assert lens.table()["input"].nunique() == 1
    with torch.no_grad():
        twin(ids)


def test_interrupted_passes_leave_no_traces():
    model, ids = llama(), torch.arange(5, 9)[None]

    def stop(*_):
        raise KeyboardInterrupt

    with torch.no_grad(), cm.lens.observe(model) as lens:
        handle = model.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(ids)
        handle.remove()
        model(ids)
        model(ids + 1)
    assert lens.modules().shape[0] == 2
    assert lens.table()["input"].nunique() == 3


def test_a_module_that_generates():
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama()

        def forward(self, ids):
            return self.inner.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    model = Writer()
    with torch.no_grad(), cm.lens.observe(model) as lens:
        model(torch.arange(5, 9)[None])
    assert lens.modules().shape[0] == 2
    assert lens.table().groupby("input")["token"].max().tolist() == [6]


def test_paged_caches_are_refused():
    from cumulant.integrations.transformers import call_of

    x = random(1, 2, 4, 8)
    with pytest.raises(cm.InputError, match="continuous batching"):
        call_of(nn.Identity(), x, x, x, None, eager=False, cross=False, given={"cache": object()})


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_a_query_that_a_mask_of_numbers_hides_from_all_keys_has_no_row(low):
    """Such rows are padded queries; `attend`, which has no padding, adds the numbers instead."""
    added = torch.zeros(1, 1, 4, 4)
    added[..., 1, :] = low
    _, table = seen(Plain(), random(1, 2, 4, 8), attn_mask=added)
    assert table["token"].tolist() == [0, 2, 3] * 2
    assert (table["visible"] == 4).all()
