"""Changes of heads against chance: models with one head changed, and with none."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_texts import toy_model, toy_sentences, toy_tokenizer

import cumulant as cm
from cumulant.lens.comparing import _shuffles, _signs, chance

TEXTS = toy_sentences(24)


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def sharper(model):
    """Head 0 of the last layer with forty times the queries; nothing else changes."""
    other = copy.deepcopy(model)
    own = other.encoder.layer[1].attention.self.query
    with torch.no_grad():
        own.weight[:8] *= 40
        own.bias[:8] *= 40
    return other


@pytest.mark.parametrize("count", [1, 24], ids=["pieces of one text", "texts"])
def test_the_head_that_was_changed_comes_first(model, sharper, count):
    texts = [" ".join(TEXTS)[:100]] if count == 1 else TEXTS
    both = [cm.lens.examine(m, toy_tokenizer(), texts) for m in (model, sharper)]
    table = cm.lens.compare(*both)
    first = table.iloc[0]
    assert (first["layer"], first["head"]) == (1, 0)
    assert first["p"] < 0.05
    changed = table[table["p"] < 0.05]
    assert set(zip(changed["layer"], changed["head"], strict=True)) == {(1, 0)}
    same = table[(table["layer"] == 0) & table["p"].notna()]
    assert len(same)
    assert (same["p"] == 1).all()
    assert table.loc[table["statistic"] == "symmetry", "p"].isna().all()


def test_other_texts_of_the_same_kind_are_no_change(model):
    """Random halves of the same texts: at 5 %, about one split in twenty passes."""
    whole = cm.lens.examine(model, toy_tokenizer(), toy_sentences(32))
    passed = 0
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(32)
        table = chance(only(whole, order[:16]), only(whole, order[16:]))
        passed += bool((table[table["statistic"] == "entropy"]["p"] < 0.05).any())
    assert passed <= 4  # the binomial exceeds it once in four hundred


def only(whole, inputs):
    """The examination of some inputs."""
    tables = {
        n: whole.tables[n][whole.tables[n]["input"].isin(inputs)] for n in ("tokens", "inputs")
    }
    return replace(whole, tables={**whole.tables, **tables})


def test_noise_is_that_of_normal_units():
    generator = np.random.default_rng(0)
    change = generator.normal(size=(400, 30))
    observed, drawn = _signs(change, generator)
    assert observed == pytest.approx(change.mean(0))
    assert drawn.std(0) == pytest.approx(np.full(30, 1 / 20), rel=0.2)
    a, b = generator.normal(size=(100, 30)), 3 + generator.normal(size=(300, 30))
    observed, drawn = _shuffles(a, a[:50] + 0, generator)
    assert observed == pytest.approx(a[:50].mean(0) - a.mean(0))
    observed, drawn = _shuffles(a, b, generator)
    assert observed == pytest.approx(b.mean(0) - a.mean(0))
    spread = np.concatenate([a, b]).std(0) * (1 / 100 + 1 / 300) ** 0.5
    assert drawn.std(0) == pytest.approx(spread, rel=0.2)
