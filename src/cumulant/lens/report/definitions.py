"""How the columns are named on the page, and where their definitions come from."""

from __future__ import annotations

from typing import NamedTuple

from cumulant.lens.columns import COLUMNS, Column

__all__ = ["HEADS", "SUBLAYERS", "TOKENS", "Shown", "definitions"]


class Shown(NamedTuple):
    """A statistic that can be chosen: its column, its name on the page, how to color and write it.

    ``kind`` is "share" (0 to 1), "signed" (-1 to 1, zero in the middle), "number", "log" (spread
    over decades) or "class".
    """

    column: str
    label: str
    kind: str


HEADS = (
    Shown("entropy", "Entropy (nats)", "number"),
    Shown("effective_keys", "Effective keys", "log"),
    Shown("k90_fraction", "Share of keys holding 90%", "share"),
    Shown("class", "Class I–IV", "class"),
    Shown("log_normalizer", "Log-normalizer G", "number"),
    Shown("score_variance", "Score variance", "log"),
    Shown("self_mass", "Mass on itself", "share"),
    Shown("sink_mass", "Mass on the sink", "share"),
    Shown("lipschitz", "Lipschitz bound", "log"),
    Shown("energy_change", "Energy change", "number"),
    Shown("energy_rises", "Tokens whose energy rose", "share"),
    Shown("symmetry", "Symmetry of the scores", "signed"),
    Shown("definiteness", "Definiteness of the scores", "signed"),
    Shown("value_alignment", "Values aligned with scores", "signed"),
    Shown("link_linear", "Link: best linear map, R²", "signed"),
    Shown("link_trained", "Link: trained map, R²", "signed"),
    Shown("link_exists", "Link exists", "share"),
)

TOKENS = (
    Shown("entropy", "Entropy (nats)", "number"),
    Shown("effective_keys", "Effective keys", "log"),
    Shown("k90", "Keys holding 90%", "log"),
    Shown("log_normalizer", "Log-normalizer G", "number"),
    Shown("score_variance", "Score variance", "log"),
    Shown("self_mass", "Mass on itself", "share"),
    Shown("sink_mass", "Mass on the sink", "share"),
    Shown("top_weight", "Largest weight", "share"),
    Shown("fisher_trace", "Trace of Cov[k]", "log"),
    Shown("leading_eigenvalue", "Leading eigenvalue of Cov[k]", "log"),
)

SUBLAYERS = (
    ("attention", "Attention"),
    ("cross_attention", "Cross-attention"),
    ("feed_forward", "Feed-forward"),
    ("block", "Parallel block"),
    ("norm", "Normalization"),
)


def definitions(shown: set[str]) -> list[Column]:
    """The columns that the tables of this report have, with unit, definition and theory."""
    return [column for name, column in COLUMNS.items() if name in shown]
