"""Sentences and formulas of pages: indices, exponents and code, piece by piece."""

from __future__ import annotations

import pytest

from cumulant.pages import typeset


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("run `claims --only T_1` twice", ["run ", "<code>claims --only T_1", " twice"]),
        ("W_q and e^G", ["W", "<sub>q", " and e", "<sup>G"]),
        ("x^(-1) of feed_forward", ["x", "<sup>−1", " of feed_forward"]),
        ("a ` alone", ["a ` alone"]),
    ],
)
def test_sentences(text, pieces):
    found = [f"<{kind}>{part}" if kind else part for kind, part in typeset(text, signs=False)]
    assert found == pieces
