"""Generation step by step: the same inputs, the same numbers as one pass over the whole text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, build, inputs, padding, tokens, use
from dense_lens import KEYS, assert_equal_tables, seen_while
from transformers import DynamicCache

import cumulant as cm


@pytest.fixture(autouse=True, scope="module")
def _registered():
    cm.lens.register()


NEW = 6
GREEDY = {
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": 0,
    "num_beams": 1,
}
STATIC = {"cache_implementation": "static", "disable_compile": True}
GENERATING = [
    *[(name, "eager") for name in ("gpt2", "llama", "gemma2", "gptoss", "t5", "bart", "marian")],
    *[("llama", "sdpa"), ("t5", "sdpa"), ("gemma2", "cumulant"), ("gptoss", "cumulant")],
]
# lengths of the prompts, options of `generate`
SETTINGS = {
    "alone": ((9,), {}),
    "padded": ((7, 3), {}),
    "static": ((7, 3), STATIC),
    "alone, static": ((9,), STATIC),  # masks are then left to a flag
}


def generated(model, lengths, side, **options):
    """(what the lens saw of a generation, of one pass over all tokens)."""
    ids, mask = tokens(lengths, side), padding(lengths, side)
    with torch.no_grad(), cm.lens.observe(model) as lens:
        out = model.generate(ids, attention_mask=mask, **GREEDY, **options)[:, :-1]
    if model.config.is_encoder_decoder:
        whole = seen_while(model, input_ids=ids, attention_mask=mask, decoder_input_ids=out)
    else:
        mask = F.pad(mask, (0, NEW - 1), value=1)
        position = (mask.cumsum(-1) - 1).clamp_min(0)
        whole = seen_while(model, input_ids=out, attention_mask=mask, position_ids=position)
    return lens.table(), whole.table()


@pytest.mark.parametrize(
    ("name", "implementation", "setting"),
    [
        *[(*case, setting) for case in GENERATING for setting in ("alone", "padded", "static")],
        *[(*case, "alone, static") for case in (("llama", "sdpa"), ("gemma2", "cumulant"))],
    ],
)
def test_generation_continues_its_inputs(name, implementation, setting):
    """Step by step with a cache, the numbers are those of one pass over the finished text."""
    lengths, options = SETTINGS[setting]
    model = use(build(name, generates=True), implementation)
    side = "right" if ARCHITECTURES[name].two_stacks else "left"
    steps, whole = generated(model, lengths, side, **options)
    assert sorted(steps["input"].unique()) == list(range(len(lengths)))
    assert not steps.duplicated(KEYS).any()
    tolerance = max(ARCHITECTURES[name].tolerance, 1e-8)
    assert_equal_tables(steps, whole, tolerance)
    clear = whole["top_weight"] > 0.51
    assert steps["top_key"][clear].tolist() == whole["top_key"][clear].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_filled_in_pieces(name):
    """Chunks longer than one token; Gemma's window is shorter than a chunk."""
    model, ids = use(build(name, generates=True), "eager"), tokens((14,))
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), cm.lens.observe(model) as lens:
        for piece in ids.split([5, 6, 1, 2], 1):
            model(piece, past_key_values=cache)
    assert_equal_tables(lens.table(), seen_while(model, ids).table(), 2e-4)


def test_two_generations_are_two_inputs():
    for name in ("gpt2", "bart"):
        model = use(build(name, generates=True), "sdpa")
        with torch.no_grad(), cm.lens.observe(model) as lens:
            for number in (0, 1):
                ids = tokens((6,), first=number)
                model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        table = lens.table()
        assert sorted(table["input"].unique()) == [0, 1]
        assert not table.duplicated(KEYS).any()
        assert (table["input"] == 0).sum() == (table["input"] == 1).sum()


def test_generation_without_a_cache_repeats_itself():
    """Every step is a pass over the whole text so far, hence an input of its own."""
    model = use(build("gpt2", generates=True), "sdpa")
    ids = tokens((5,))
    with torch.no_grad(), cm.lens.observe(model) as lens:
        model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **GREEDY)
    lengths = lens.table().groupby("input")["token"].nunique()
    assert lengths.tolist() == [5 + step for step in range(NEW)]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_same_decoder_on_other_encoder_outputs(name):
    """Given encoder outputs continue a text only right after its encoder ran."""
    model, given = use(build(name), "eager"), inputs(name)
    rest = {k: x for k, x in given.items() if k != "input_ids"}
    with torch.no_grad():
        outputs = [
            model.encoder(input_ids=ids, attention_mask=given["attention_mask"])
            for ids in (given["input_ids"], 63 - given["input_ids"])
        ]
        with cm.lens.observe(model) as lens:
            for encoded in outputs:
                model(encoder_outputs=encoded, **rest)
    table = lens.table()
    assert sorted(table["input"].unique()) == list(range(6))
    assert not table.duplicated(KEYS).any()
    with torch.no_grad(), cm.lens.observe(model) as lens:
        encoded = model.encoder(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"]
        )
        model(encoder_outputs=encoded, **rest)
    assert_equal_tables(lens.table(), seen_while(model, **given).table(), 1e-9)


@pytest.mark.parametrize(("name", "same"), [("llama", False), ("gpt2", True), ("t5", False)])
def test_what_is_fed_after_the_end_is_padding(name, same):
    """A text that ends early is fed padding until the others end: no row of the table."""
    model = build(name, generates=True)
    ids, mask = tokens((5, 5), "left"), padding((5, 5), "left")
    free = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1}
    open_end = model.generate(ids, attention_mask=mask, **free, pad_token_id=0, eos_token_id=None)
    start = 1 if model.config.is_encoder_decoder else 5
    first, second = open_end[:, start:].tolist()
    end = next(k for k in range(1, NEW - 1) if first[k] not in second and first[k] not in first[:k])
    model.generation_config.eos_token_id = first[end]
    fill = first[end] if same else 0
    with torch.no_grad(), cm.lens.observe(model) as lens:
        out = model.generate(ids, attention_mask=mask, **free, pad_token_id=fill)
    assert out[0, start + end + 1 :].tolist() == [fill] * (NEW - end - 1)
    table = lens.table()
    last = table[table.layer == table.layer.max()].groupby("input")["token"].max()
    assert last.tolist() == [start + end, start + NEW - 2]  # the end itself is the last one fed
