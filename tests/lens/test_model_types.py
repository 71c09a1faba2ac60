"""attn_implementation="cumulant" in models of many types: right, or refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import cumulant as cm
from cumulant.attention.calls import additive_parts
from cumulant.integrations.transformers import refusal
from fuzz.model_types import AGREES, REFUSED, counted, examine
from lens.tiny_models import LENGTHS, build, padding, randomize, tiny_config, tokens

TAKEN = """
    albert bart bert bigbird_pegasus clip cohere2 deepseek_v3 deepseek_v32 deepseek_v4 dinov2
    distilbert electra gemma gemma2 gemma3_text gpt2 gpt_neox gpt_oss jina_embeddings_v3 llama llava
    mbart mistral mixtral modernbert olmo2 opt paligemma pegasus phi3 qwen2 qwen2_vl qwen3 qwen3_moe
    roberta siglip starcoder2 t5 umt5 vit wav2vec2 whisper xlm-roberta
"""
WRITTEN_OUT = {
    "big_bird": "BigBirdModel",
    "bloom": "BloomModel",
    "codegen": "CodeGenModel",
    "deberta-v2": "DebertaV2Model",
    "falcon": "FalconModel",
    "git": "GitModel",
    "gptj": "GPTJModel",
    "led": "LEDModel",
    "longformer": "LongformerModel",
    "mpnet": "MPNetModel",
    "mpt": "MptModel",
    "rembert": "RemBertModel",
    "roformer": "RoFormerModel",
    "sam_vision_model": "SamVisionModel",
    "xglm": "XGLMModel",
}
REASON = r'attn_implementation="cumulant" cannot run in '


@pytest.fixture(autouse=True)
def _registered():
    cm.lens.register()


# ------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", TAKEN.split())
def test_a_model_computes_what_eager_attention_computes(name):
    """Padding on either side, causality, a cache; in the whole model, and by our attention."""
    outcome, detail = examine(name)
    assert outcome == AGREES, detail


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_attention_that_is_written_out_is_refused_by_name(name):
    assert examine(name) == (REFUSED, WRITTEN_OUT[name])


@pytest.mark.parametrize("name", ["bloom", "codegen", "mpt", "rembert", "xglm"])
def test_attention_that_is_written_out_gets_masks_that_it_can_add(name):
    """Even where the check is gone around, by writing into the configuration."""
    model, given = build(name)
    with torch.no_grad():
        expected = model(**given)[0]
        model.config._attn_implementation_internal = "cumulant"
        found = model(**given)[0]
    tokens = given["attention_mask"].bool()
    torch.testing.assert_close(found[tokens], expected[tokens], rtol=1e-5, atol=1e-5)


def test_prefixes_that_see_each_other():
    """PaliGemma's mask is causal, or within the prefix: one mask laid over another."""
    model, given = build("paligemma")
    given["token_type_ids"] = (torch.arange(max(LENGTHS)) >= 5).long().expand(3, -1)
    seen = given["attention_mask"].bool()
    other = {**given, "input_ids": given["input_ids"].clone()}
    other["input_ids"][:, 3] += 1  # in the prefix, after the first token
    results = []
    with torch.no_grad():
        for implementation in ("eager", "cumulant"):
            model.set_attn_implementation(implementation)
            results.append([model(**given)[0], model(**other)[0]])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours[seen], theirs[seen], rtol=1e-4, atol=1e-4)
    assert (results[1][0][:, 0] - results[1][1][:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("LlamaForCausalLM", "dynamic"),
        ("LlamaForCausalLM", "static"),
        ("Gemma2ForCausalLM", "dynamic"),
        ("DeepseekV32ForCausalLM", "dynamic"),
        ("BartForConditionalGeneration", "dynamic"),
    ],
)
def test_generation_from_padded_prompts(kind, cache):
    kind = getattr(hf, kind)
    config = tiny_config(kind.config_class, num_key_value_heads=4)
    model = kind._from_config(config, attn_implementation="eager").eval()
    randomize(model)
    mask = padding(LENGTHS, "left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    expected = model.generate(tokens(LENGTHS), attention_mask=mask, **options)
    model.set_attn_implementation("cumulant")
    with counted() as found:
        ours = model.generate(tokens(LENGTHS), attention_mask=mask, **options)
    assert found.ours > 6
    assert torch.equal(ours, expected)


def test_vmap_over_padded_texts():
    """Where entries of a mask are hidden, a text alone and in a batch have one output."""
    model, given = build("llama")
    model.set_attn_implementation("cumulant")
    mask = given["attention_mask"]
    x = model.get_input_embeddings()(given["input_ids"]).detach()

    def one(x, mask):
        out = model(inputs_embeds=x[None], attention_mask=mask[None], use_cache=False)
        return out.last_hidden_state[0]

    with torch.no_grad():
        together = model(inputs_embeds=x, attention_mask=mask).last_hidden_state
        mapped = torch.func.vmap(one)(x, mask)
    torch.testing.assert_close(mapped[mask.bool()], together[mask.bool()], rtol=1e-5, atol=1e-5)


def test_parts_of_an_added_mask():
    low = torch.finfo(torch.float32).min
    added = torch.tensor([[0.0, low], [0.0, 0.0]])
    seen, bias = additive_parts(added)
    assert seen.tolist() == [[True, False], [True, True]]
    assert bias is None
    assert additive_parts(torch.zeros(2, 2)) == (None, None)
    seen, bias = additive_parts(added + torch.tensor([0.5, 0.0]))
    assert seen.tolist() == [[True, False], [True, True]]
    assert bias.tolist() == [[0.5, 0.0], [0.5, 0.0]]
    seen, bias = additive_parts(torch.full((1, 2), 0.5))
    assert seen is None
    assert bias.tolist() == [[0.5, 0.5]]


# ------------------------------------------------------------------------------ refusals


def test_loading_is_refused(tmp_path):
    model, _ = build("mpt")
    model.save_pretrained(tmp_path)
    with pytest.raises(cm.InputError, match=REASON + "MptModel: .*eager"):
        hf.AutoModel.from_pretrained(tmp_path, attn_implementation="cumulant")
    assert hf.AutoModel.from_pretrained(tmp_path).config._attn_implementation == "eager"


def test_a_refusal_changes_nothing():
    """GIT's text side is written out, its image side is not; neither changes."""
    model, _ = build("git")
    vision = model.image_encoder.config
    with pytest.raises(cm.InputError, match=REASON + "GitModel"):
        model.set_attn_implementation("cumulant")
    assert model.config._attn_implementation == vision._attn_implementation == "eager"


def test_a_part_can_be_named_alone():
    """GOT-OCR writes its image side out; its text side is Qwen2."""
    model, given = build("got_ocr2")
    expected = model(**given)[0]
    with pytest.raises(cm.InputError, match=REASON + "GotOcr2Model"):
        model.set_attn_implementation("cumulant")
    with pytest.raises(cm.InputError, match=REASON + "GotOcr2Vision"):
        model.set_attn_implementation({"vision_config": "cumulant"})
    model.set_attn_implementation({"text_config": "cumulant"})
    config = copy.deepcopy(model.config)
    parts = {"": "eager", "vision_config": "eager", "text_config": "cumulant"}
    built = type(model)._from_config(config, attn_implementation=parts).eval()
    built.load_state_dict(model.state_dict())
    seen = given["attention_mask"].bool()
    for each in (model, built):
        with counted() as found:
            out = each(**given)[0]
        assert found.ours == 2
        torch.testing.assert_close(out[seen], expected[seen], rtol=1e-4, atol=1e-4)


def test_other_implementations_are_not_asked_twice():
    """Registering again wraps nothing again, and leaves other implementations alone."""
    base = hf.PreTrainedModel
    before = base.get_correct_attn_implementation, base.set_attn_implementation
    cm.lens.register()
    assert (base.get_correct_attn_implementation, base.set_attn_implementation) == before
    model, _ = build("mpt")
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


class _Derived(hf.LlamaModel):
    """A model of somebody's own, on attention that asks."""


def test_classes_of_ones_own():
    assert refusal(_Derived, "cumulant") is None
    unreadable = type("Unreadable", (hf.PreTrainedModel,), {"__module__": "nowhere"})
    assert refusal(unreadable, "cumulant") is None
    assert "Mine" in refusal(type("Mine", (hf.MptModel,), {"__module__": "nowhere"}), "cumulant")


def test_a_selection_of_blocks_is_refused():
    """MiniMax M3 selects blocks of keys, and tells only "eager" and "sdpa" by a mask."""
    assert examine("minimax_m3_vl_text") == (REFUSED, "MiniMaxM3VLAttention, at its first call")
    model, given = build("minimax_m3_vl_text")
    with torch.no_grad(), cm.lens.observe(model) as lens:
        model(**given)
    visible = lens.table().groupby("layer")["visible"].max()
    assert visible[1] < visible[0] == max(LENGTHS)
