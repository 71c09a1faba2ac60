"""Edits of single attention calls and of whole blocks, against models changed by hand."""

from __future__ import annotations

import copy

import pytest
import torch

import cumulant as cm
from cumulant.lens.editing import edited


@pytest.fixture(scope="module")
def bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertModel(BertConfig(vocab_size=40, num_hidden_layers=3, **sizes)).eval().double()


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=40, num_hidden_layers=3, intermediate_size=32, **sizes)
    return LlamaModel(config).eval().double()


IDS = torch.tensor([[1, 5, 7, 2, 9, 30]])


def run(model):
    with torch.no_grad():
        return model(input_ids=IDS).last_hidden_state


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_answering_with_our_attention_changes_nothing(name, request):
    model = request.getfixturevalue(name)
    before, layers = run(model), []

    def answer(layer, call):
        layers.append(layer)
        return call.attend().mean

    with edited(model, answer):
        torch.testing.assert_close(run(model), before)
        run(model)
    assert layers == [0, 1, 2, 0, 1, 2]  # counted anew in each pass
    assert torch.equal(run(model), before)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("skipped", [{0}, {1, 2}])
def test_a_skipped_block_is_a_model_without_it(name, skipped, request):
    model = request.getfixturevalue(name)
    shorter = copy.deepcopy(model)
    owner, where = (shorter.encoder, "layer") if name == "bert" else (shorter, "layers")
    blocks = getattr(owner, where)
    kept = torch.nn.ModuleList([x for i, x in enumerate(blocks) if i not in skipped])
    setattr(owner, where, kept)
    if name == "llama":
        shorter.config.num_hidden_layers = len(kept)
        for i, block in enumerate(kept):
            block.self_attn.layer_idx = i
    with edited(model, lambda *_: None, skipped=skipped):
        torch.testing.assert_close(run(model), run(shorter))


def test_a_lens_sees_the_call_as_the_model_made_it(bert):
    with cm.lens.observe(bert) as plain:
        run(bert)
    with edited(bert, lambda _, call: 0 * call.attend().mean), cm.lens.observe(bert) as lens:
        run(bert)
    both = [x.table()[lambda t: t["layer"] == 0]["entropy"].to_numpy() for x in (plain, lens)]
    assert (both[0] == both[1]).all()
    later = [x.table()[lambda t: t["layer"] == 2]["entropy"].to_numpy() for x in (plain, lens)]
    assert (later[0] != later[1]).any()


def test_other_models_are_left_alone(bert, llama):
    before = run(llama)
    with edited(bert, lambda _, call: 0 * call.attend().mean):
        assert torch.equal(run(llama), before)
