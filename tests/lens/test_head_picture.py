"""One head's attention as a picture, against eager attention written out."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from toy_texts import toy_model, toy_tokenizer

import cumulant as cm


def eager(model, inputs, layer, head):
    with torch.no_grad():
        model.set_attn_implementation("eager")
        weights = model(**inputs, output_attentions=True).attentions[layer][0, head]
        model.set_attn_implementation("sdpa")
    return weights


@pytest.fixture(scope="module")
def minilm():
    model, tokenizer, *_ = cm.lens.load()
    texts = {"pets": "the cat and the dog and the cat", "bard": "to be, or not to be: that is it"}
    return model, tokenizer, texts, cm.lens.examine(model, tokenizer, texts)


@pytest.mark.parametrize(("text", "name"), [(0, "pets"), (1, "bard"), ("bard", "bard")])
def test_weights_and_tokens_of_an_encoder(minilm, text, name):
    model, tokenizer, texts, found = minilm
    picture = found.head(4, 7, text)
    inputs = tokenizer(texts[name], return_tensors="pt")
    torch.testing.assert_close(picture.weights, eager(model, inputs, 4, 7), rtol=1e-4, atol=1e-6)
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    assert list(picture.query_tokens) == list(picture.key_tokens) == tokens
    assert repr(picture) == (
        f"HeadAttention(layer 4 head 7, {name!r}: {len(tokens)} queries, {len(tokens)} keys)"
    )


def test_grouped_causal_heads_of_smollm2_and_blocks():
    model, tokenizer, *_ = cm.lens.load("smollm2")
    text = "the quick brown fox jumps over the lazy dog and the quick brown fox"
    found = cm.lens.examine(model, tokenizer, text)
    weights = eager(model, tokenizer(text, return_tensors="pt"), 17, 5)
    torch.testing.assert_close(found.head(17, 5).weights, weights, rtol=1e-4, atol=1e-6)
    n = len(weights)
    pooled = found.head(17, 5, cells=5)
    block = pooled.block
    assert block == -(-n // 5)
    assert f"in blocks of {block} tokens" in repr(pooled)
    for i in range(len(pooled.weights)):
        for j in range(len(pooled.weights)):
            cell = weights[i * block : (i + 1) * block, j * block : (j + 1) * block]
            expected = cell.sum(-1).mean()
            assert pooled.weights[i, j].item() == pytest.approx(expected.item(), abs=1e-6)
    assert pooled.weights.sum(-1).tolist() == pytest.approx([1.0] * len(pooled.weights), abs=1e-5)


def test_the_strongest_weights_have_their_strings(minilm):
    *_, found = minilm
    picture = found.head(2, 3)
    for apart in (True, False):
        entries = picture.strongest(4, apart=apart)
        weights = picture.weights.clone()
        if apart:
            weights[:, 0] = 0
            weights.fill_diagonal_(0)
        assert [x.weight for x in entries] == weights.flatten().sort().values.flip(0)[:4].tolist()
        for x in entries:
            assert picture.weights[x.query, x.key].item() == x.weight
            assert x.query_text == picture.query_tokens[x.query]
            assert x.key_text == picture.key_tokens[x.key]


def test_files_and_cards(minilm, tmp_path):
    *_, found = minilm
    picture = found.head(0, 0)
    for name in ("head.png", "head.svg"):
        assert picture.save(tmp_path / name).stat().st_size > 1000
    with pytest.raises(cm.InputError, match="suffixes are"):
        picture.save(tmp_path / "head.mp7")
    html = picture._repr_html_()
    assert "layer 0 head 0" in html
    assert "<svg" in html
    assert "<script" not in html


def test_both_sides_of_a_translation():
    from test_columns import tiny_bart

    model = tiny_bart()
    found = cm.lens.examine(model, toy_tokenizer(), "the cat sat")
    words = ["[CLS]", "the", "cat", "sat", "[SEP]"]
    target = ["<start>", *words[:-1]]
    for layer, (queries, keys) in enumerate([(words, words), (target, target), (target, words)]):
        picture = found.head(layer, 0)
        assert list(picture.query_tokens) == queries
        assert list(picture.key_tokens) == keys


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ((6, 0), "layers are 0 to 5, not 6"),
        ((-1, 0), "layers are 0 to 5, not -1"),
        ((0, 12), "layer 0 has heads 0 to 11, not 12"),
        ((0, "x"), "the head must be an integer, not 'x'"),
        ((0.5, 0), "the layer must be an integer, not 0.5"),
        ((0, 0, 2), r"text 2 is not among those kept: 0 \(pets\), 1 \(bard\)"),
        ((0, 0, "prose"), "text 'prose' is not among those kept"),
    ],
)
def test_errors_say_the_range(minilm, where, said):
    *_, found = minilm
    with pytest.raises(cm.InputError, match=said):
        found.head(*where)


def test_without_a_model_there_is_no_picture(tmp_path):
    model = toy_model()
    found = cm.lens.examine(model, toy_tokenizer(), "the cat sat on the mat", folder=tmp_path)
    assert found.head(0, 0).weights.shape == (8, 8)
    for other in (
        cm.lens.Examination.load(tmp_path),
        pickle.loads(pickle.dumps(found)),
        copy.deepcopy(found),
    ):
        with pytest.raises(cm.InputError, match="examine the text again in this process"):
            other.head(0, 0)
    del model
    gc.collect()
    with pytest.raises(cm.InputError, match="keep the model in a variable"):
        found.head(0, 0)
