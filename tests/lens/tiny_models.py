"""A tiny random model of any type that transformers knows, and inputs for it.

One rule makes all of them: a configuration is its class' default with every number that has a known
name made small. What does not fit that rule is left out, with the reason.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING

VOCABULARY, WIDTH, HEADS, LAYERS, IMAGE, PATCH = 99, 32, 4, 2, 16, 4
LENGTHS = (11, 6, 4)
DECODED = (7, 5, 3)


def _named(value, names):
    return dict.fromkeys(names.split(), value)


NUMBERS = {
    **_named(VOCABULARY, "vocab_size n_vocab n_words decoder_vocab_size text_vocab_size"),
    **_named(
        WIDTH,
        "hidden_size d_model n_embd dim dim_model emb_dim embed_dim d_embed embedding_size n_state "
        "embedding_dim projection_dim out_hidden_size encoder_hidden_size "
        "hidden_dim_size text_hidden_size hidden_size_global vision_hidden_size "
        "projection_hidden_size cross_attention_hidden_size output_dim codebook_dim "
        "decoder_hidden_size encoder_hidden_dim embed_proj_dim word_embed_proj_dim lm_head_dim "
        "d_kv_input projector_hidden_size image_text_hidden_size attention_dim output_hidden_size "
        "audio_embed_dim vision_embed_dim",
    ),
    **_named(
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads heads "
        "decoder_num_attention_heads encoder_num_attention_heads num_self_attention_heads "
        "num_cross_attention_heads attention_head_count index_n_heads num_global_attention_heads "
        "linear_num_value_heads mamba_n_heads mamba_num_heads swa_num_attention_heads",
    ),
    **_named(
        2,
        "num_key_value_heads n_head_kv num_kv_heads encoder_num_key_value_heads n_kv_heads "
        "decoder_num_key_value_heads num_global_key_value_heads linear_num_key_heads "
        "swa_num_key_value_heads",
    ),
    **_named(
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
        "num_encoder_layers num_decoder_layers encoder_num_hidden_layers "
        "decoder_num_hidden_layers num_hidden_layers_patcher cross_num_hidden_layers "
        "depth_double_projection memory_attention_num_layers num_encoder_blocks "
        "encoder_num_layers decoder_num_layers max_window_layers vision_layers text_layers "
        "num_conformer_layers attention_layers",
    ),
    **_named(
        2 * WIDTH,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner ffn_hidden "
        "hidden_dim mlp_dim moe_intermediate_size dim_ff shared_expert_intermediate_size "
        "intermediate_size_mlp ffn_hidden_size ffn_inner_hidden_size decoder_intermediate_size "
        "feedforward_dim linear_units encoder_intermediate_size shared_intermediate_size",
    ),
    **_named(
        8,
        "head_dim d_kv d_head kv_channels dim_head attention_head_dim swa_head_dim v_head_dim "
        "qk_rope_head_dim qk_nope_head_dim index_head_dim global_head_dim linear_key_head_dim "
        "linear_value_head_dim qk_head_dim query_pre_attn_scalar attention_head_size rotary_dim "
        "mamba_head_dim",
    ),
    **_named(16, "kv_lora_rank q_lora_rank o_lora_rank"),
    **_named(4, "sliding_window attention_window local_attention window index_topk"),
    **_named(
        128,
        "max_position_embeddings n_positions max_seq_len max_source_positions max_sequence_length "
        "max_target_positions max_seq_length",
    ),
    **_named(
        4, "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_layer"
    ),
    **_named(2, "num_experts_per_tok moe_topk moe_k top_k_experts experts_per_token"),
    **_named(1, "n_group topk_group first_k_dense_replace n_shared_experts"),
    **_named(IMAGE, "image_size input_size pretrain_image_size img_size"),
    **_named(PATCH, "patch_size"),
    **_named(8, "hidden_size_per_layer_input"),
    **_named(VOCABULARY, "vocab_size_per_layer_input"),
    **_named(0, "pad_token_id"),
    **_named(1, "bos_token_id decoder_start_token_id cls_token_id"),
    **_named(2, "eos_token_id sep_token_id"),
}
IDS = ("pad_token_id",)  # given even where the default is None
LISTED = {  # numbers that some types have one of for each stage
    "depths": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "depth": 1,
    "encoder_layers": 1,
}
# What turns on the parts of an architecture that short texts and few layers would not reach.
OWN = {
    "DeepseekV4Config": {
        "num_hidden_layers": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 2,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "Sam3LiteTextTextConfig": {"num_hidden_layers": 4},
    "MiniMaxM3VLTextConfig": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        **{"index_block_size": 2, "index_topk_blocks": 2, "index_local_blocks": 1},
    },
}


def types():
    """The names of all model types with a base model, in alphabetical order."""
    known = {config.__name__ for config in MODEL_MAPPING}
    return sorted(name for name, kind in CONFIG_MAPPING_NAMES.items() if kind in known)


def config_class(name):
    return getattr(hf, CONFIG_MAPPING_NAMES[name])


def default_of(field):
    if field.default is not dataclasses.MISSING:
        return field.default
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else factory()


def tiny_config(kind, *, fill=False, **changes):
    """An instance of a class of configurations with every known number made small.

    With `fill`, numbers that are None by default are given too; `changes` replace the numbers.
    """
    numbers, given, default = {**NUMBERS, **changes}, {}, None
    for field in dataclasses.fields(kind):
        name, value = field.name, default_of(field)
        if name in kind.sub_configs:
            sub = kind.sub_configs[name]
            if sub is hf.AutoConfig:
                default = default or kind()
                if getattr(default, name) is None:
                    continue
                sub = type(getattr(default, name))
            given[name] = tiny_config(sub, fill=fill, **changes)
        elif isinstance(value, list | tuple) and name in LISTED:
            given[name] = type(value)([LISTED[name]] * len(value))
        elif name in numbers and (type(value) is int or (value is None and (fill or name in IDS))):
            given[name] = numbers[name]
    return kind(**{**given, **OWN.get(kind.__name__, {})})


ATTEMPTS = [
    {},
    {"fill": True},
    {"num_key_value_heads": HEADS},
    {"num_key_value_heads": HEADS, "num_hidden_layers": 4},
    {"num_experts_per_tok": 1, "num_hidden_layers": 4, "num_experts": 8, "n_routed_experts": 8},
    {"hidden_size": 512, "head_dim": 128},  # rotary sections of 16, 24 and 24
]

KINDS = [("text",), ("text", "image"), ("image",), ("text", "sound"), ("text", "frames")]


def build(name, *, limit=40_000_000):
    """A tiny model of a type under eager attention and inputs that it runs on.

    Raises:
        Exception: what the first attempt failed with.
    """
    failure = None
    for attempt in ATTEMPTS:
        try:
            model = _build(name, attempt, limit)
        except ImportError:
            raise
        except Exception as error:
            failure = failure or error
            continue
        tried = []
        for kinds in KINDS:
            given = inputs(model, kinds=kinds)
            if not given or any(_same(given, x) for x in tried):
                continue
            tried.append(given)
            try:
                with torch.no_grad():
                    model(**given)
                return model, given
            except Exception as error:
                failure = failure or error
    raise failure or ValueError("no argument of its forward is known")


def _same(first, second):
    return {k: x.shape for k, x in first.items()} == {k: x.shape for k, x in second.items()}


def _build(name, attempt, limit):
    config = tiny_config(config_class(name), **attempt)
    kind = MODEL_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    with torch.device("meta"):
        size = sum(x.numel() for x in kind._from_config(config).parameters())
    if size > limit:
        raise ValueError(f"{size / 1e6:.0f} million parameters, which is not tiny")
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager")
    randomize(model)
    return model.eval()


def randomize(model):
    """Weights that make attention uneven and deep sums finite; the same for the same names."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.is_floating_point() and (x.ndim > 1 or "sink" in name):
                size = min(0.5, 2 / math.sqrt(x.shape[-1])) if x.ndim > 1 else 1
                x.copy_(torch.randn(x.shape, generator=generator) * size)


# ------------------------------------------------------------------------------------ inputs


def padding(lengths, side="right"):
    """The mask (texts, tokens) of texts padded to one length; 1 = token."""
    where = torch.arange(max(lengths))[None, :]
    ends = torch.tensor(lengths)[:, None]
    return (where < ends if side == "right" else where >= max(lengths) - ends).long()


def tokens(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Above the special tokens, and below the largest ones, which some types give a meaning.
    return torch.randint(5, 60, (len(lengths), max(lengths)), generator=generator)


def inputs(model, lengths=LENGTHS, *, kinds=("text",)):
    """What the model's forward needs, as far as the names of its arguments tell."""
    names = inspect.signature(model.forward).parameters
    config, generator, count, out = model.config, torch.Generator().manual_seed(2), len(lengths), {}

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    if "text" in kinds and "input_ids" in names:
        out["input_ids"] = tokens(lengths)
        if "attention_mask" in names:
            out["attention_mask"] = padding(lengths)
        if "bbox" in names:
            out["bbox"] = torch.randint(0, 50, (*out["input_ids"].shape, 4)).sort(-1).values
    if "text" in kinds and "decoder_input_ids" in names:
        out["decoder_input_ids"] = tokens(DECODED, seed=5)
        if "decoder_attention_mask" in names:
            mask = padding(DECODED)
            if not config.is_encoder_decoder:  # one cache for both, as in Diffusion Gemma
                mask = torch.cat([padding(lengths), torch.ones_like(mask)], 1)
            out["decoder_attention_mask"] = mask
    if "image" in kinds:
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or IMAGE
        size = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
        if "grid_thw" in names:
            grid = torch.tensor([[1, 4, 4]] * count)
            pixels = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
            first = "hidden_states" if "hidden_states" in names else "pixel_values"
            out |= {first: random(16 * count, pixels), "grid_thw": grid}
        elif "pixel_values" in names:
            frames = getattr(vision, "num_frames", None)
            out["pixel_values"] = random(count, *([frames] if frames else []), channels, *size)
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_dim", None) or 80
    if ("sound" in kinds or "frames" in kinds) and "input_values" in names:
        out["input_values"] = random(count, 4000)
    elif ("sound" in kinds or "frames" in kinds) and "input_features" in names:
        shape = (bins, 256) if "sound" in kinds else (256, bins)
        out["input_features"] = random(count, *shape)
    return out
