"""Scores of heads: against a circuit made by hand, and against eager attention written out."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from induction_model import SCORE, InductionModel, Numbers

import cumulant as cm
from cumulant.lens.patterns import DISTANCES, PATTERNS, occurrences
from cumulant.lens.repeats import HALF, repeat_columns, repeated


def matched(keys):
    """The weight on one match among so many visible keys."""
    return 1 / (1 + (keys - 1) * math.exp(-SCORE))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def circuit():
    return InductionModel(80, 128).eval()


def test_the_standard_test_finds_the_heads_of_the_circuit(circuit):
    found = repeat_columns(circuit, Numbers(80), 128)
    (previous, uniform), (induction, same) = found.values()
    length = 1 + 2 * HALF
    second = range(1 + HALF, length)
    assert previous["repeat_previous"] == pytest.approx(
        mean(matched(i + 1) for i in range(1, length))
    )
    assert previous["repeat_induction"] == pytest.approx(0, abs=1e-12)
    assert induction["repeat_induction"] == pytest.approx(mean(matched(i + 1) for i in second))
    assert induction["repeat_induction"] > 0.999
    # a token and its copy have the same score: one half each
    assert same["repeat_duplicate"] == pytest.approx(0.5)
    assert same["repeat_induction"] == pytest.approx(0, abs=1e-12)
    assert uniform["repeat_previous"] == pytest.approx(mean(1 / (i + 1) for i in range(1, length)))
    for name in ("repeat_induction", "repeat_duplicate"):
        assert uniform[name] == pytest.approx(mean(1 / (i + 1) for i in second))


def test_a_short_text_by_hand(circuit):
    # x a b c a b b: tokens 4, 5, 6 have earlier copies, which b, c, c followed (and at 5 the query
    # itself, which does not count)
    ids = torch.tensor([[9, 5, 6, 7, 5, 6, 6]])
    with torch.no_grad(), cm.lens.observe(circuit) as lens:
        circuit(input_ids=ids)
    table = lens.table().set_index(["layer", "head", "token"])
    induction = table["induction_mass"]
    assert induction.loc[1, 0].isna().tolist() == [True] * 4 + [False] * 3
    # at token 6, induction matches keys 3 (after b at 2) and 6 (itself, after b at 5)
    assert induction.loc[1, 0].tolist()[4:] == pytest.approx([1, 1, 0.5], abs=1e-9)
    assert table["duplicate_mass"].loc[1, 1].tolist()[4:] == pytest.approx([1 / 2, 1 / 2, 2 / 3])
    assert table["previous_mass"].loc[0, 0].tolist()[1:] == pytest.approx([1] * 6, abs=1e-9)
    heads = lens.heads().set_index(["layer", "head"])
    assert heads.loc[(1, 0), "induction_mass"] == pytest.approx(2.5 / 3)
    assert "distance" not in heads  # six tokens have one before them: too few for a mean
    with torch.no_grad(), cm.lens.observe(circuit) as lens:
        circuit(input_ids=ids.expand(2, -1))
    heads = lens.heads().set_index(["layer", "head"])
    assert heads.loc[(0, 0), "distance"] == 1
    assert heads.loc[(0, 0), "distance_mass"] == pytest.approx(1)


def dense_masses(weights, ids, real):
    """Each pattern from matrices of weights (H, N, N), query by query."""
    out = {name: torch.full(weights.shape[:2], math.nan, dtype=torch.float64) for name in PATTERNS}
    for i in range(len(ids)):
        earlier = [j for j in range(i) if real[j] and ids[j] == ids[i]]
        after = [j + 1 for j in earlier if j + 1 < i]
        keys = {
            "previous_mass": [i - 1] if i and real[i - 1] else [],
            "duplicate_mass": earlier,
            "induction_mass": after,
        }
        for name, some in keys.items():
            if some:
                out[name][:, i] = weights[:, i, some].double().sum(-1)
    return out


def compare_with_eager(model, inputs):
    """Every pattern of every head and token, and the means of the heads."""
    with torch.no_grad():
        model.set_attn_implementation("eager")
        weights = model(**inputs, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        with cm.lens.observe(model, k90=False, spectrum=False) as lens:
            model(**inputs)
    table = lens.table().set_index(["input", "layer", "head", "token"])
    heads = lens.heads().set_index(["layer", "head"])
    real = inputs["attention_mask"].bool()
    for layer, own in enumerate(weights):
        sums = {name: [] for name in PATTERNS}
        for text, (ids, flags) in enumerate(zip(inputs["input_ids"].tolist(), real, strict=True)):
            dense = dense_masses(own[text], ids, flags.tolist())
            for name, expected in dense.items():
                expected = expected[:, flags]
                got = table[name].loc[text, layer].to_numpy(dtype=float, na_value=math.nan)
                torch.testing.assert_close(
                    torch.tensor(got).reshape(expected.shape),
                    expected,
                    rtol=1e-4,
                    atol=1e-6,
                    equal_nan=True,
                )
                sums[name].append(expected)
        for name, parts in sums.items():
            score = torch.cat(parts, 1).nanmean(1)
            got = heads[name].loc[layer].to_numpy(dtype=float)
            torch.testing.assert_close(torch.tensor(got), score, rtol=1e-4, atol=1e-6)
        offsets = {}
        for d in DISTANCES:
            cells = [
                own[t, :, i, i - d].double()
                for t in range(len(real))
                for i in range(real.shape[1])
                if 0 <= i - d < real.shape[1] and real[t, i] and real[t, i - d]
            ]
            if len(cells) >= 8:
                offsets[d] = torch.stack(cells).mean(0)
        best = torch.stack(list(offsets.values())).amax(0)
        got = torch.tensor(heads["distance_mass"].loc[layer].to_numpy(dtype=float))
        torch.testing.assert_close(got, best, rtol=1e-4, atol=1e-6)
    return heads


def test_minilm_against_eager():
    model, tokenizer, *_ = cm.lens.load()
    texts = ["the cat and the dog and the cat and the dog", "to be, or not to be, or to be"]
    compare_with_eager(model, dict(tokenizer(texts, return_tensors="pt", padding=True)))


def test_smollm2_against_eager_and_its_induction_heads():
    model, tokenizer, *_ = cm.lens.load("smollm2")
    [ids] = repeated(model, tokenizer, None).ids
    assert len(set(ids[:HALF])) == HALF
    assert ids[:HALF] == ids[HALF:]
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    heads = compare_with_eager(model, inputs)
    # The circuit of Olsson et al. in a trained model: previous-token heads below induction heads.
    assert heads["induction_mass"].max() > 0.5
    assert heads["previous_mass"].idxmax()[0] < heads["induction_mass"].idxmax()[0]


def test_occurrences_of_many_copies_are_the_nearest():
    ids = torch.tensor([[3] * 50 + [4], list(range(51))])
    found = occurrences(ids, most=32)
    assert found.shape == (2, 51, 32)
    assert found[0, 49].tolist() == list(range(48, 16, -1))
    assert found[0, 2].tolist() == [1, 0, *[-1] * 30]
    assert (found[0, 50] == -1).all()
    assert (found[1] == -1).all()
    assert occurrences(torch.tensor([[-1, -1]])).shape[-1] == 0


def test_no_test_where_the_vocabulary_or_the_context_is_too_small(circuit):
    assert repeated(circuit, Numbers(8)) is None
    assert repeated(circuit, Numbers(80), 12) is None
    assert repeat_columns(circuit, Numbers(8)) == {}
    short = repeated(circuit, Numbers(80), 41)
    assert {len(x) for x in short.ids} == {41}


def test_findings_name_the_heads_of_the_circuit(circuit, tmp_path):
    from cumulant.lens.report import findings

    found = cm.lens.examine(circuit, Numbers(80), "abcdefghij abcdefghij klm klm")
    told = [x.headline for x in findings(found.report_data())]
    assert told[0] == "Layer 1 head 0 is the strongest induction head: 1.00"
    assert told[1] == "Layer 0 head 0 is the strongest previous-token head: 1.00"
    assert "Layer 1 head 1 is the strongest duplicate-token head: 0.50" in told
    assert f"{told[0]}. It puts" in found._repr_html_()


def test_expensive_statistics_are_asked_for_by_name(circuit):
    from toy_texts import toy_model, toy_tokenizer

    text = "the cat sat on a mat and the dog ran"
    plain = cm.lens.examine(toy_model(), toy_tokenizer(), text)
    asked = cm.lens.examine(toy_model(), toy_tokenizer(), text, extras=("link", "spectrum"))
    missing = {"lipschitz", "link_exists"}
    assert "energy_change" not in asked.table().columns
    assert not len(asked.partition())
    assert missing <= set(asked.heads().columns)
    assert not missing & set(plain.heads().columns)
    assert "leading_eigenvalue" not in plain.table().columns
    assert "sensitivity_qk" not in asked.layers().columns
    shared = plain.heads().columns
    assert asked.heads()[shared].equals(plain.heads())
    with pytest.raises(cm.InputError, match="'links'; there are: energy, partition, spectrum"):
        cm.lens.examine(toy_model(), toy_tokenizer(), text, extras="links")


def test_token_strings_stand_beside_the_numbers(tmp_path):
    from toy_texts import toy_model, toy_tokenizer

    texts = ["the cat sat on the mat", "a dog ran"]
    cm.lens.examine(toy_model(), toy_tokenizer(), texts, folder=tmp_path)
    table = cm.lens.Examination.load(tmp_path).table()
    top = pd.read_parquet(tmp_path / "top.parquet")
    words = [["[CLS]", *text.split(), "[SEP]"] for text in texts]
    for row in table.to_dict("records"):
        assert row["token_text"] == words[row["input"]][row["token"]]
        assert row["top_key_text"] == words[row["input"]][row["top_key"]]
    for row in top.to_dict("records"):
        assert row["token_text"] == words[row["input"]][row["token"]]
        assert row["key_text"] == words[row["input"]][row["key"]]
    assert list(top.columns)[3:] == ["token", "token_text", "rank", "key", "key_text", "weight"]


def test_token_strings_of_both_sides_of_a_translation():
    from test_columns import tiny_bart
    from toy_texts import toy_tokenizer

    found = cm.lens.examine(tiny_bart(), toy_tokenizer(), "the cat sat")
    table, words = found.table(), ["[CLS]", "the", "cat", "sat", "[SEP]"]
    sides = {0: (words, words), 1: (["<start>", *words[:-1]],) * 2}
    sides[2] = (sides[1][0], words)  # encoder, decoder, cross
    for row in table.to_dict("records"):
        queries, keys = sides[row["layer"]]
        assert row["token_text"] == queries[row["token"]]
        assert row["top_key_text"] == keys[row["top_key"]]
    for row in found._top_table().to_dict("records"):
        queries, keys = sides[row["layer"]]
        assert row["token_text"] == queries[row["token"]]
        assert row["key_text"] == keys[row["key"]]
