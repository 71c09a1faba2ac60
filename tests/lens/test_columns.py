"""Every column that a table has is defined once in the code, and again in docs/lens.md."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import BartConfig, BartModel

import cumulant as cm
from cumulant.lens.extras import EXTRAS

PAGE = (Path(__file__).parents[2] / "docs" / "lens.md").read_text("utf-8")
examine = partial(cm.lens.examine, extras="all")
TEXTS = ["Attention is a measure over keys, tilted by the query.", "To be, or not to be."]


def tiny_bart() -> BartModel:
    """An encoder-decoder, for the columns of cross-attention."""
    config = BartConfig(
        vocab_size=64,
        d_model=24,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )
    return BartModel(config).eval()


@pytest.fixture(scope="module")
def tables():
    """Table name to columns: all that `examine` makes of MiniLM, and all that `observe` can."""
    model, tokenizer, *_ = cm.lens.load()
    found = examine(model, tokenizer, TEXTS)
    columns = {name: set(table.columns) for name, table in found.tables.items()}
    columns["top"] = set(found._top_table().columns)
    bart = tiny_bart()
    with torch.no_grad(), cm.lens.observe(bart, energy=True, layers=True) as lens:
        bart(torch.randint(5, 60, (2, 8)), decoder_input_ids=torch.randint(5, 60, (2, 6)))
    columns["tokens"] |= set(lens.table().columns)
    columns["layers"] |= set(lens.layers().columns)
    columns["expansions"] |= set(lens.expansions().columns)
    return columns


def section(title: str) -> str:
    """What docs/lens.md says under a heading of the third level."""
    found = re.search(rf"^### {title}\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"docs/lens.md has no section {title}"
    return found[1]


def test_every_table_has_a_line_and_a_section(tables):
    assert set(tables) == set(cm.lens.TABLES)
    for name in tables:
        assert section(name.capitalize())


def test_every_column_of_a_table_is_defined(tables):
    for name, columns in tables.items():
        assert columns <= set(cm.lens.COLUMNS), f"{name}: {columns - set(cm.lens.COLUMNS)}"


def test_every_column_of_a_table_is_explained_in_its_section(tables):
    for name, columns in tables.items():
        text = section(name.capitalize())
        # the energy of a token is explained with that of its head
        missing = {c for c in columns if f"`{c}`" not in text} - {"energy_change"}
        assert not missing, f"docs/lens.md, {name}: {missing}"


@pytest.mark.parametrize("name", cm.lens.COLUMNS)
def test_every_column_is_documented(name):
    assert f"`{name}`" in PAGE


def test_definitions_are_sentences_with_numbers_of_the_theory():
    for name, column in cm.lens.COLUMNS.items():
        assert column.name == name
        assert column.definition
        assert re.fullmatch(r"(T\d+)?", column.theory)


def test_cross_attention_has_its_columns(tables):
    assert {"attention_expansion", "cross_attention_expansion"} <= tables["layers"]
    assert {"energy_change", "sink_logit_mass", "leading_eigenvalue"} <= tables["tokens"]


def test_documented_theory_numbers_are_those_of_the_columns():
    """Rows of the form | `a`, `b` | ... | T12 | name the number that COLUMNS gives."""
    checked = 0
    for line in PAGE.splitlines():
        cells = [x.strip() for x in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or not cells[0].startswith("`") or cells[0].strip("`") in EXTRAS:
            continue
        for name in re.findall(r"`(\w+)`", cells[0]):
            assert cm.lens.COLUMNS[name].theory == cells[2], name
            checked += 1
    assert checked >= 30
