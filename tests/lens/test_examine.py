"""Texts through a model: tables that agree with each other, files, resuming, comparing."""

from __future__ import annotations

import json
import math
from functools import partial
from importlib import import_module

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from toy_texts import toy_model, toy_sentences, toy_tokenizer

import cumulant as cm
from cumulant.core.journal import Journal
from cumulant.lens.columns import COLUMNS
from cumulant.lens.pairs import Pairs
from cumulant.lens.report.payload import payload
from cumulant.lens.texts import Text

examine = partial(cm.lens.examine, extras="all")
TEXTS = toy_sentences(11)
run_module = import_module("cumulant.lens.examining")


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(run_module, "CHUNK", 3)


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


@pytest.fixture(scope="module")
def whole(model, tokenizer):
    return examine(model, tokenizer, TEXTS)


def test_heads_are_means_of_tokens(whole):
    tokens, heads = whole.table(), whole.heads()
    groups = tokens.groupby(["layer", "head"])
    for name in ("entropy", "effective_keys", "log_normalizer", "self_mass", "energy_change"):
        expected = groups[name].mean().to_numpy()
        assert heads[name].to_numpy() == pytest.approx(expected, rel=1e-5)
    share = tokens.assign(share=tokens["k90"] / tokens["visible"])
    median = share.groupby(["layer", "head"])["share"].median().to_numpy()
    assert heads["k90_fraction"].to_numpy() == pytest.approx(median, abs=0.1)  # few tokens
    largest = groups["leading_eigenvalue"].max().to_numpy()
    assert heads["lipschitz"].to_numpy() == pytest.approx(largest / 8**0.5, rel=1e-5)
    assert (heads["energy_rises"] == 0).all()


def test_classes_of_heads_follow_the_median(whole):
    edges = [(0.5, "I"), (0.125, "II"), (1 / 32, "III"), (0.0, "IV")]
    for _, row in whole.heads().iterrows():
        assert row["class"] == next(name for edge, name in edges if row["k90_fraction"] > edge)


def test_every_text_is_there_once(whole, tokenizer):
    lengths = [len(tokenizer(t)["input_ids"]) for t in TEXTS]
    assert whole.inputs()["tokens"].tolist() == lengths
    rows = whole.table().groupby("input").size()
    assert rows.tolist() == [4 * n for n in lengths]  # 2 layers of 2 heads
    assert not whole.table().duplicated(["input", "layer", "head", "token"]).any()


def test_batches_do_not_matter(whole, model, tokenizer):
    single = examine(model, tokenizer, TEXTS, batch_size=1)
    a, b = whole.table(), single.table()
    for name in a.columns:
        if a[name].dtype.kind == "f":
            mine, theirs = (x[name].to_numpy(dtype=float, na_value=math.nan) for x in (a, b))
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)
    pd.testing.assert_frame_equal(whole.heads(), single.heads(), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("small_chunks")
def test_folder_is_the_same_as_memory(whole, model, tokenizer, tmp_path):
    found = examine(model, tokenizer, iter(TEXTS), folder=tmp_path)
    pd.testing.assert_frame_equal(found.table(), whole.table(), check_dtype=False)
    assert len(list((tmp_path / "tokens.parquet").iterdir())) == 4
    assert not (tmp_path / ".cumulant-partial").exists()
    again = cm.lens.Examination.load(tmp_path)
    for name in ("heads", "layers", "expansions", "partition", "inputs"):
        pd.testing.assert_frame_equal(getattr(again, name)(), getattr(found, name)())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("after", [1, 2, 4])
def test_interrupted_work_goes_on(whole, model, tokenizer, tmp_path, after):
    seen = []

    def stop(progress):
        seen.append(progress.done)
        if len(seen) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(model, tokenizer, TEXTS, folder=tmp_path, progress=stop)
    assert not (tmp_path / "examination.json").exists()
    rest = []
    found = examine(
        model, tokenizer, TEXTS, folder=tmp_path, progress=lambda p: rest.append(p.done)
    )
    assert rest == [n for n in (3, 6, 9, 11) if n > seen[-1]]
    pd.testing.assert_frame_equal(found.table(), whole.table(), check_dtype=False)
    pd.testing.assert_frame_equal(found.heads(), whole.heads())
    straight = examine(model, tokenizer, TEXTS)  # in chunks of three, uninterrupted
    pd.testing.assert_frame_equal(found.expansions(), straight.expansions())
    pd.testing.assert_frame_equal(found.layers(), straight.layers())
    assert found.shown == whole.shown
    assert found.top == whole.top


@pytest.mark.usefixtures("small_chunks")
def test_a_part_that_was_written_but_not_counted(whole, model, tokenizer, tmp_path, monkeypatch):
    append, calls = Journal.append, []

    def crash(self, content):
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError
        append(self, content)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", crash)
        with pytest.raises(MemoryError):
            examine(model, tokenizer, TEXTS, folder=tmp_path)
    parts = tmp_path / ".cumulant-partial" / "tokens.parquet"
    assert len(list(parts.iterdir())) == 3
    found = examine(model, tokenizer, TEXTS, folder=tmp_path)
    pd.testing.assert_frame_equal(found.table(), whole.table(), check_dtype=False)


@pytest.mark.usefixtures("small_chunks")
def test_other_texts_or_models_do_not_continue(model, tokenizer, tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(model, tokenizer, TEXTS, folder=tmp_path, progress=stop)
    with pytest.raises(cm.InputError, match="other texts"):
        examine(model, tokenizer, ["the dog", *TEXTS], folder=tmp_path)
    other = toy_model(num_hidden_layers=1)
    with pytest.raises(cm.InputError, match="another model"):
        examine(other, tokenizer, TEXTS, folder=tmp_path)


def test_files_say_what_they_hold(whole, tmp_path):
    whole.save(tmp_path / "out")
    for name in ("heads", "layers", "expansions", "partition", "inputs"):
        schema = pq.read_schema(tmp_path / "out" / f"{name}.parquet")
        for field in schema:
            assert field.metadata[b"definition"].decode() == COLUMNS[field.name].definition
    about = json.loads((tmp_path / "out" / "examination.json").read_text())
    assert about["definitions"]["entropy"]["unit"] == "nats"
    assert about["run"]["seconds"] > 0
    assert about["run"]["peak_memory_mb"] > 0
    assert len(about["heads"]) == 4
    text = (tmp_path / "out" / "examination.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_no_table_holds_nan(whole):
    for table in whole.tables.values():
        for column in table.columns:
            if table[column].dtype.kind == "f":
                missing = pd.isna(table[column])
                assert all(x is pd.NA for x in table[column][missing])


def test_comparing_two_texts_and_two_models(whole, model, tokenizer):
    other = examine(model, tokenizer, toy_sentences(4, seed=1))
    table = cm.lens.compare(whole, other)
    row = table[(table.layer == 1) & (table["head"] == 0) & (table.statistic == "entropy")]
    ours, theirs = (x.heads().query("layer == 1 and head == 0") for x in (whole, other))
    expected = float(theirs["entropy"].iloc[0] - ours["entropy"].iloc[0])
    assert float(row["difference"].iloc[0]) == pytest.approx(expected)
    deep = examine(toy_model(num_hidden_layers=8), tokenizer, TEXTS[:2])
    table = cm.lens.compare(whole, deep)
    assert set(table.columns) == {"quarter", "statistic", "first", "second", "difference"}
    first = whole.heads().query("layer == 0")["entropy"].median()
    row = table[(table.quarter == 1) & (table.statistic == "entropy")]
    assert float(row["first"].iloc[0]) == pytest.approx(first)


def test_top_keys_are_the_largest_weights(model, tokenizer, whole):
    ids = tokenizer(TEXTS[0], return_tensors="pt")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for layer, w in enumerate(weights):
        best = w[0].topk(min(5, w.shape[-1]))
        for head in range(2):
            for token, pairs in enumerate(whole.top[0][layer][head]):
                mass = [x for _, x in pairs]
                assert mass == pytest.approx(best.values[head, token].tolist(), abs=2e-5)
                for j, x in pairs:
                    assert float(w[0, head, token, j]) == pytest.approx(x, abs=2e-5)


def test_windows_and_truncation(model, tokenizer):
    long = " ".join(["the cat sat"] * 20)
    cut = examine(model, tokenizer, long)
    assert cut.inputs()["tokens"].tolist() == [24]
    assert any("24" in note for note in cut.notes)
    windows = examine(model, tokenizer, long, windows=True)
    assert windows.inputs()["tokens"].sum() == 60 + 2 * len(windows.inputs())


@pytest.mark.parametrize("texts", [[], [""], "  ", ["a cat", 3]])
def test_texts_that_are_none(model, tokenizer, texts):
    with pytest.raises(cm.InputError):
        examine(model, tokenizer, texts)


def test_texts_have_names(model, tokenizer):
    found = examine(model, tokenizer, [Text("felix", "the cat")])
    assert found.inputs()["text"].tolist() == ["felix"]
    assert found.shown[0][0] == "felix"


def test_the_report_is_one_file(whole, tmp_path):
    page = whole.report(tmp_path / "deep" / "report.html")
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert [p.name for p in page.parent.iterdir()] == ["report.html"]


def test_the_report_asks_for_the_pairs_of_a_head_once(model, tokenizer, monkeypatch):
    """For each token they would take time quadratic in the length: minutes for 300 tokens."""
    found = examine(model, tokenizer, TEXTS[0])
    asked, made = [], Pairs.flat

    def counted(self, head, *rest, **named):
        asked.append(head)
        return made(self, head, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Pairs, "flat", counted)
        patched.delattr(Pairs, "__getitem__")  # which makes the pairs of all tokens
        shown = payload(found.report_data())["texts"][0]["calls"]
    assert asked == [0, 1, 0, 1]  # 2 layers of 2 heads
    for layer, head, token in ((0, 0, 0), (1, 1, 3)):
        pairs = found.top[0][layer][head][token]
        flat = shown[str(layer)]["top"][head][token]
        assert flat[::2] == [key for key, _ in pairs]
        assert flat[1::2] == pytest.approx([weight for _, weight in pairs], abs=6e-5)


def test_a_model_without_a_name_goes_by_its_type(tokenizer):
    model = toy_model()
    model.config._name_or_path = None  # as transformers leaves it for a .gguf file
    found = cm.lens.examine(model, tokenizer, TEXTS[0])
    assert found.facts["name"] == type(model).__name__
    card = found._repr_html_()
    assert "None" not in card


def test_names_by_a_dictionary(model, tokenizer):
    found = examine(model, tokenizer, {"felix": "the cat", "rex": "the dog ran"})
    assert found.inputs()["text"].tolist() == ["felix", "rex"]
    assert found.inputs()["tokens"].tolist() == [4, 5]
    assert any("first text, which has 4 tokens" in note for note in found.notes)


def test_compare_takes_examinations(whole, tmp_path):
    with pytest.raises(cm.InputError, match=r"Examination\.load"):
        cm.lens.compare(whole, str(tmp_path))


def test_heads_of_an_observation(model, tokenizer, whole):
    with torch.no_grad(), cm.lens.observe(model) as lens:
        for text in TEXTS:
            model(**tokenizer(text, return_tensors="pt"))
    heads = lens.heads()
    for name in ("entropy", "sink_mass", "lipschitz", "k90_fraction"):
        assert heads[name].to_numpy() == pytest.approx(whole.heads()[name].to_numpy(), rel=1e-4)
    assert heads["class"].tolist() == whole.heads()["class"].tolist()
