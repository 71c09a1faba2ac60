"""Tiny random models of twelve architectures, and which keys their queries may see."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import transformers as hf

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 24, 4, 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
}
# A layer that slides sees the key itself and three before it.
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
TWO_STACKS = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SPECIAL = {
    "pad_token_id": 0,
    **{f"{name}_token_id": 1 for name in ("bos", "cls")},
    **{f"{name}_token_id": 2 for name in ("eos", "sep")},
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
Window = tuple[int, int] | None


@dataclass(frozen=True)
class Architecture:
    """How to build a model, and the facts about its attention that a test needs.

    Attributes:
        config, options, model: names in transformers, and what the configuration is made of.
        causal: query i sees no key j > i.
        windows: for each layer how far back and ahead it sees, None for everything.
        two_stacks: an encoder, and a decoder with cross-attention.
        dtype: float64 where the eager model computes its softmax in it.
        sdpa: whether the model supports attn_implementation="sdpa".
        tolerance: how far two implementations of the model may be apart.
        generates: the class that has `generate`.
    """

    config: str
    options: dict
    model: str
    causal: bool = False
    windows: tuple[Window, ...] = (None,) * LAYERS
    two_stacks: bool = False
    dtype: torch.dtype = torch.float64
    sdpa: bool = True
    tolerance: float = 1e-9
    generates: str | None = None


SINGLE = {"dtype": torch.float32, "tolerance": 2e-4}
SLIDING = ((3, 0), None, (3, 0))

ARCHITECTURES = {
    "bert": Architecture("BertConfig", SIZES, "BertModel"),
    "albert": Architecture("AlbertConfig", {**SIZES, "embedding_size": 16}, "AlbertModel"),
    "distilbert": Architecture(
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 3, "n_heads": HEADS, "hidden_dim": 32},
        "DistilBertModel",
    ),
    "gpt2": Architecture(
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": HEADS, **ENDS},
        "GPT2Model",
        causal=True,
        generates="GPT2LMHeadModel",
    ),
    "llama": Architecture(
        "LlamaConfig",
        {**SIZES, "num_key_value_heads": 2},
        "LlamaModel",
        causal=True,
        generates="LlamaForCausalLM",
        **SINGLE,
    ),
    "gemma2": Architecture(
        "Gemma2Config",
        {**GROUPED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
        "Gemma2Model",
        causal=True,
        windows=SLIDING,
        sdpa=False,
        generates="Gemma2ForCausalLM",
        **SINGLE,
    ),
    "gptoss": Architecture(
        "GptOssConfig",
        {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1},
        "GptOssModel",
        causal=True,
        windows=SLIDING,
        sdpa=False,
        generates="GptOssForCausalLM",
        **SINGLE,
    ),
    "t5": Architecture(
        "T5Config",
        {
            **{"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 6, "d_ff": 32},
            **{"num_layers": 2, "num_heads": HEADS, "decoder_start_token_id": 0},
        },
        "T5Model",
        two_stacks=True,
        tolerance=2e-5,  # its normalization is computed in float32
        generates="T5ForConditionalGeneration",
    ),
    "bart": Architecture(
        "BartConfig",
        TWO_STACKS,
        "BartModel",
        two_stacks=True,
        generates="BartForConditionalGeneration",
    ),
    "marian": Architecture(
        "MarianConfig",
        {**TWO_STACKS, "decoder_vocab_size": VOCABULARY},
        "MarianModel",
        two_stacks=True,
        generates="MarianMTModel",
    ),
    "vit": Architecture(
        "ViTConfig",
        {**{k: x for k, x in SIZES.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 2},
        "ViTModel",
        tolerance=2e-5,  # softmax in float32
    ),
    "modernbert": Architecture(
        "ModernBertConfig",
        {**SIZES, **SPECIAL, "local_attention": 4, "global_attn_every_n_layers": 3},
        "ModernBertModel",
        windows=(None, (2, 2), (2, 2)),
        **SINGLE,
    ),
}
NAMES = list(ARCHITECTURES)
DECODERS = [n for n, x in ARCHITECTURES.items() if x.causal]
TEXTS = [n for n in NAMES if n != "vit"]


@cache
def build(name, *, generates=False, dropout=None, dtype=None):
    """A model with weights large enough for attention to be uneven; one for the whole session."""
    torch.manual_seed(0)
    it = ARCHITECTURES[name]
    config = getattr(hf, it.config)(**it.options)
    if dropout is not None:
        for key in vars(config):
            if "dropout" in key and isinstance(getattr(config, key), int | float):
                setattr(config, key, dropout)
        for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_probs_dropout_prob"):
            if hasattr(config, key):
                setattr(config, key, dropout)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    kind = getattr(hf, it.generates if generates else it.model)
    pools = not generates and name in ("bert", "albert", "vit")
    model = kind(config, add_pooling_layer=False) if pools else kind(config)
    for label, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        elif label.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.to(dtype or it.dtype).eval()


def use(model, implementation):
    """The same model with another implementation of attention."""
    model.set_attn_implementation(implementation)
    model.eval()
    return model


def implementations(name):
    return ["eager", *(["sdpa"] if ARCHITECTURES[name].sdpa else []), "cumulant"]


LENGTHS = (9, 5, 1)
DECODED = (4, 6, 3)


def padding(lengths, side="right", width=None):
    width = width or max(lengths)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, n in zip(mask, lengths, strict=True):
        row[slice(0, n) if side == "right" else slice(width - n, width)] = 1
    return mask


def inputs(name, lengths=LENGTHS, side="right", *, decoded=DECODED):
    """What the model is called with; the tokens of a text do not depend on its padding."""
    it = ARCHITECTURES[name]
    if name == "vit":
        generator = torch.Generator().manual_seed(1)
        shape = (len(lengths), 3, 8, 8)
        return {"pixel_values": torch.randn(shape, generator=generator, dtype=it.dtype)}
    out = {"input_ids": tokens(lengths, side), "attention_mask": padding(lengths, side)}
    if it.causal and side == "left":
        out["position_ids"] = (out["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    if it.two_stacks:
        out["decoder_input_ids"] = tokens(decoded, "right", first=100)
        out["decoder_attention_mask"] = padding(decoded)
    return out


def tokens(lengths, side="right", first=0):
    mask = padding(lengths, side)
    out = torch.full(mask.shape, 3)
    for number, (row, seen, n) in enumerate(zip(out, mask.bool(), lengths, strict=True)):
        generator = torch.Generator().manual_seed(first + number)
        row[seen] = torch.randint(4, VOCABULARY, (200,), generator=generator)[:n]
    return out


def one(given, text, side="right"):
    """The inputs of a single text, without its padding."""
    out = {}
    for key, x in given.items():
        mask = {"decoder": "decoder_attention_mask"}.get(key.split("_")[0], "attention_mask")
        out[key] = x[text : text + 1]
        if mask in given:
            out[key] = out[key][:, given[mask][text].bool()]
    return out


def seen_by(it, layer, m, n):
    """Which keys the queries of a layer with self-attention may see, padding aside."""
    offset = torch.arange(n)[None, :] - torch.arange(m)[:, None]
    seen = torch.ones(m, n, dtype=torch.bool)
    if it.causal:
        seen &= offset <= 0
    window = it.windows[layer]
    return seen if window is None else seen & (offset >= -window[0]) & (offset <= window[1])


@dataclass(frozen=True)
class Captured:
    """One call of a model's own eager attention."""

    query: torch.Tensor
    key: torch.Tensor
    scale: float
    cap: float | None
    sinks: torch.Tensor | None
    bias: torch.Tensor | None


@contextmanager
def captured(model):
    """Every call of `eager_attention_forward`, in the order of execution."""
    found: list[Captured] = []
    modeling = importlib.import_module(type(model).__module__)
    original: Callable = modeling.eager_attention_forward

    def eager_attention_forward(module, query, key, value, attention_mask, *args, **kwargs):
        assert not args or isinstance(args[0], float)
        scale = kwargs.get("scaling", args[0] if args else None)
        found.append(
            Captured(
                query.detach(),
                key.detach(),
                query.shape[-1] ** -0.5 if scale is None else scale,
                kwargs.get("softcap"),
                getattr(module, "sinks", None),
                kwargs.get("position_bias"),
            )
        )
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    modeling.eager_attention_forward = eager_attention_forward
    try:
        yield found
    finally:
        modeling.eager_attention_forward = original
