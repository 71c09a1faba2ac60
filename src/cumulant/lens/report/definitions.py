"""Names of the columns on the page, and their definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cumulant.lens.columns import COLUMNS, TABLES, Column
from cumulant.lens.report.numbers import Frame, has

__all__ = ["HEADS", "SUBLAYERS", "TOKENS", "Defined", "Shown", "definitions"]


class Shown(NamedTuple):
    """A selectable statistic: its column, its label, and how to color and format it.

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
    Shown("repeat_induction", "Induction (repeated random tokens)", "share"),
    Shown("induction_mass", "Induction (in the texts)", "share"),
    Shown("repeat_previous", "Previous token (repeated random tokens)", "share"),
    Shown("previous_mass", "Previous token (in the texts)", "share"),
    Shown("repeat_duplicate", "Duplicate token (repeated random tokens)", "share"),
    Shown("duplicate_mass", "Duplicate token (in the texts)", "share"),
    Shown("distance_mass", "Fixed distance", "share"),
    Shown("lipschitz", "Lipschitz bound", "log"),
    Shown("energy_change", "Energy change", "number"),
    Shown("energy_rises", "Tokens whose energy rose", "share"),
    Shown("symmetry", "Symmetry of the scores", "signed"),
    Shown("definiteness", "Definiteness of the scores", "signed"),
    Shown("whitened_symmetry", "Symmetry, states white", "signed"),
    Shown("whitened_definiteness", "Definiteness, states white", "signed"),
    Shown("value_alignment", "Values aligned with scores", "signed"),
    Shown("link_linear", "Link: best linear map, R²", "signed"),
    Shown("link_trained", "Link: trained map, R²", "signed"),
    Shown("link_exists", "Link exists", "share"),
)

TOKENS = (
    Shown("received", "Received mass", "share"),
    Shown("entropy", "Entropy (nats)", "number"),
    Shown("effective_keys", "Effective keys", "log"),
    Shown("k90", "Keys holding 90%", "log"),
    Shown("log_normalizer", "Log-normalizer G", "number"),
    Shown("score_variance", "Score variance", "log"),
    Shown("self_mass", "Mass on itself", "share"),
    Shown("sink_mass", "Mass on the sink", "share"),
    Shown("top_weight", "Largest weight", "share"),
    Shown("previous_mass", "Mass on the previous token", "share"),
    Shown("duplicate_mass", "Mass on the same token before", "share"),
    Shown("induction_mass", "Mass on what followed it (induction)", "share"),
    Shown("fisher_trace", "Trace of Cov[k]", "log"),
    Shown("leading_eigenvalue", "Leading eigenvalue of Cov[k]", "log"),
)

SUBLAYERS = (
    ("attention", "Attention"),
    ("cross_attention", "Cross-attention"),
    ("feed_forward", "Feed-forward"),
    ("norm", "Normalization"),
    ("block", "Whole block"),
)


class Defined(NamedTuple):
    """A table: its name, what a row is, its new columns, and the names of those defined above."""

    table: str
    about: str
    columns: list[Column]
    again: list[str]


def definitions(tables: Mapping[str, Frame | None]) -> list[Defined]:
    """The nonempty columns by table; each is defined where it first appears."""
    said: set[str] = set()
    found: list[Defined] = []
    for table, frame in tables.items():
        names = [name for name in COLUMNS if has(frame, name)]
        new = [COLUMNS[name] for name in names if name not in said]
        if names:
            again = [name for name in names if name in said]
            found.append(Defined(table, TABLES.get(table, ""), new, again))
        said.update(names)
    return found
