"""T39: expansion by attention and contraction by normalization in trained models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, Value, table
from cumulant.lab.claims.measuring import median, pair_ratios, standard_error
from cumulant.lab.claims.remembering import remembered
from cumulant.lab.claims.subjects import (
    MODELS,
    NEEDS,
    Subject,
    mixed,
    records,
    reseeded,
    subject,
)
from cumulant.lens import observe

QUICK = ("minilm", "rxnmapper")
Table: TypeAlias = list[dict[str, Any]]
KINDS = ("attention", "feed_forward", "norm", "block")

CLAIM = Claim(
    id="T39",
    title="Expansion balanced by contraction, in trained models",
    evidence="empirical",
    statement="Attention drives tokens apart and normalization pulls them together; in a "
    "transformer the two balance.",
    correction="It is so if sink tokens are left out.",
    source="abstract of the paper",
    formula=r"\frac{\lVert f(x_i) - f(x_j) \rVert}{\lVert x_i - x_j \rVert}",
    bounds="Ratios are medians over pairs of tokens of one text, geometric means over layers; "
    "every model must agree. Above 1 is expansion, below 1 contraction. They balance if distances "
    "change by less than a factor of two over the whole depth: a factor of two in every layer "
    "would be 64 over six. The lens samples pairs, which moves a median by a few percent: 0.1. "
    "Errors are over four parts of the texts; they were added after the numbers were seen and "
    "decide nothing.",
    recorded="does not hold in general",
    tests=("tests/lens/test_layers.py",),
    needs=NEEDS,
    rules=table("""
      statement:
        attention ≥ 1: ratio over attention with its residual, the model with the least
        norm ≤ 1: ratio over a normalization, the model with the largest
        depth ≤ 1: factors of two by which distances change over the whole depth, the model with
            the most
      correction:
        attention_bare ≥ 1: the same without sink tokens
        norm_bare ≤ 1: the same without sink tokens
        depth_bare ≤ 1: the same without sink tokens
      control:
        lens_gap ≤ 0.1: ratios over blocks of MiniLM by the lens against all pairs, relative
      noted:
        attention_most: ratio over attention, the model with the largest
        norm_least: ratio over a normalization, the model with the least
        feed_forward_least: ratio over feed-forward layers, the model with the least
        feed_forward_most: the same, the model with the largest
        random_attention: ratio over attention with random weights, the model with the least
        random_norm: ratio over a normalization with random weights, the model with the largest
        mixed_attention: ratio over attention with the tokens of each text in random order, the
            model with the least
    """),
    finding="Ratio over attention, over feed-forward, over a norm, and over the whole depth: "
    "{told}. With random weights attention has {random_attention:.2f} at the least and norms "
    "{random_norm:.2f} at the most; with tokens in random order attention has "
    "{mixed_attention:.2f}.",
    caption="Median ratio of distances over each sublayer, layer by layer: attention with its "
    "residual, feed-forward with its residual, normalizations. Above the line tokens move apart.",
    size=(7.0, 3.4),
)


def rows_of(one: Subject) -> Table:
    """The lens' table of expansions."""
    with observe(one.model, layers=True, spectrum=False) as lens:
        one.run()
    return records(lens.expansions())


def ratios(rows: Table, kind: str, tokens: str = "all") -> list[float]:
    """Of each layer, the geometric mean of the medians of its maps of a kind."""
    layers: dict[int, list[float]] = {}
    for row in rows:
        if row["sublayer"] == kind and row["tokens"] == tokens:
            layers.setdefault(row["layer"], []).append(math.log(row["median"]))
    return [math.exp(sum(x) / len(x)) for _, x in sorted(layers.items())]


def typical(rows: Table, kind: str, tokens: str = "all") -> float:
    """The geometric mean over layers."""
    found = ratios(rows, kind, tokens)
    return math.exp(sum(map(math.log, found)) / len(found))


def depth(rows: Table, tokens: str = "all") -> float:
    """log2 of the product of the blocks' ratios."""
    return sum(map(math.log2, ratios(rows, "block", tokens)))


def apart(one: Subject) -> list[Table]:
    """The lens' table for each batch by itself."""
    return [rows_of(replace(one, batches=(batch,))) for batch in one.batches]


def judged(found: dict[str, Table], parts: dict[str, list[Table]]) -> dict[str, Value]:
    """The numbers of the rules from the tables of some models, errors from parts of the texts."""
    numbers: dict[str, Value] = {}
    tables = found.values()

    def decided(figure: Callable[[Table], float], choose: Callable[..., Any]) -> Value:
        value, key = choose((figure(rows), key) for key, rows in found.items())
        each = torch.tensor([figure(rows) for rows in parts[key]], dtype=torch.float64)
        return value, standard_error(each)

    for suffix, tokens in (("", "all"), ("_bare", "without_sinks")):
        attention = partial(typical, kind="attention", tokens=tokens)
        norm = partial(typical, kind="norm", tokens=tokens)
        numbers[f"attention{suffix}"] = decided(attention, min)
        numbers[f"norm{suffix}"] = decided(norm, max)
        numbers[f"depth{suffix}"] = decided(lambda x, own=tokens: abs(depth(x, own)), max)
    return numbers | {
        "attention_most": max(typical(x, "attention") for x in tables),
        "norm_least": min(typical(x, "norm") for x in tables),
        "feed_forward_least": min(typical(x, "feed_forward") for x in tables),
        "feed_forward_most": max(typical(x, "feed_forward") for x in tables),
    }


def lens_gap(one: Subject, rows: Table) -> float:
    """The lens' ratios over blocks against all pairs of all texts, relative."""
    pairs: dict[int, list[torch.Tensor]] = {}
    for batch in one.batches:
        states = one.model(**batch, output_hidden_states=True).hidden_states
        for layer, (before, after) in enumerate(pairwise(states)):
            for text, mask in enumerate(batch["attention_mask"].bool()):
                own = pair_ratios(before[text, mask], after[text, mask])
                pairs.setdefault(layer, []).append(own)
    truth = [median(torch.cat(x)) for x in pairs.values()]
    ours = ratios(rows, "block")
    return max(abs(a / b - 1) for a, b in zip(ours, truth, strict=True))


@torch.no_grad()
def measure(trial: Trial) -> Found:
    """Ratios of distances in every sublayer of the real models, and in two controls."""
    count = trial.size(16, 4)
    found: dict[str, Table] = {}
    parts: dict[str, list[Table]] = {}
    random: list[Table] = []
    order: list[Table] = []
    for key in QUICK if trial.quick else MODELS:
        one, few = subject(key, count), subject(key, 4)
        found[key] = remembered(one.digest, {"T39": "own"}, partial(rows_of, one), source=__file__)
        some = subject(key, count, count // 4)
        parts[key] = remembered(
            some.digest, {"T39": "parts"}, partial(apart, some), source=__file__
        )
        for name, rows, make in (("random", random, reseeded), ("order", order, mixed)):
            settings = {"T39": name, "seed": trial.seed}
            rows.append(
                remembered(
                    few.digest,
                    settings,
                    lambda make=make, few=few: rows_of(make(few, trial.seed)),
                    source=__file__,
                )
            )
    numbers = judged(found, parts) | {
        "lens_gap": lens_gap(subject("minilm", count), found["minilm"]),
        "random_attention": min(typical(x, "attention") for x in random),
        "random_norm": max(typical(x, "norm") for x in random),
        "mixed_attention": min(typical(x, "attention") for x in order),
    }
    names = {key: MODELS[key][2] for key in found}
    told = "; ".join(
        f"{names[key]} "
        + ", ".join(f"{typical(rows, kind):.2f}" for kind in KINDS[:3])
        + f", {float(f'{2 ** depth(rows):.2g}'):g}"
        for key, rows in found.items()
    )
    return Found(numbers, told=told, found=found, names=names)


def draw(figure: Any, seen: Any) -> None:
    """Ratios by layer, one panel for each model."""
    panels = figure.subplots(1, len(seen.found), sharey=True)
    for axes, (key, rows) in zip(panels, seen.found.items(), strict=True):
        for i, kind in enumerate(KINDS[:3]):
            values = ratios(rows, kind)
            axes.plot(values, "o-", ms=3, color=series_color(i), label=kind.replace("_", "-"))
        axes.axhline(1, color=MUTED, lw=1)
        axes.set(title=seen.names[key], xlabel="layer", yscale="log")
    panels[0].set_ylabel("ratio of distances")
    panels[0].legend(loc="lower left")
