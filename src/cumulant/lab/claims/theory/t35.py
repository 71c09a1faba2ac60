"""T35: whether W_q W_kᵀ is the canonical link of a Gaussian, decided from the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cumulant.core.typed import linalg
from cumulant.figures import COLORS, MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import median
from cumulant.lab.claims.remembering import remembered
from cumulant.lab.claims.subjects import MODELS, NEEDS, Subject, records, reseeded, subject
from cumulant.lens import observe
from cumulant.lens.forms import form_rows
from cumulant.lens.weights import Projections

DISTANCES = (0, 4, 64)  # of rotary positions
QUICK = ("minilm", "rxnmapper", "antiberty")

CLAIM = Claim(
    id="T35",
    title="The link conjecture, from the weights",
    evidence="empirical",
    statement="The query and key matrices of a trained head are a linear approximation of the "
    "canonical link. Near a Gaussian law that link is Σ⁻¹(μ − m), so W_q W_kᵀ, in coordinates "
    "where the head's hidden states are white, is symmetric and positive.",
    correction="Heads lean toward the link without reaching it: their forms are more symmetric and "
    "more positive than those of queries and keys taken from two heads of the same layer.",
    source="message passing draft, eq. (15)",
    formula=r"S = \Sigma^{1/2} W_q W_k^\top \Sigma^{1/2}, \qquad "
    r"\frac{\operatorname{tr} S S}{\lVert S \rVert^2}, \qquad "
    r"\frac{\sum \lambda^+ - \sum \lambda^-}{\sum |\lambda|}",
    bounds="The link itself gives 1 and 1. At a symmetry of 0.5 the symmetric part holds three "
    "quarters of the form's square, and at a definiteness of 0.5 positive eigenvalues outweigh "
    "negative ones three to one: less is no approximation of a symmetric, positive form. The "
    "lesser claim needs an excess over mismatched pairs whose 95 % interval, by the spread over "
    "layers (over heads where layers share weights), stays above 0.02 in every model: heads of one "
    "layer share inputs and are no independent cases. Random weights must show none of it.",
    recorded="holds with a correction",
    systems=("link conjecture",),
    tests=("tests/lens/test_forms.py", "tests/lens/test_weights.py"),
    needs=NEEDS,
    rules=table("""
      statement:
        symmetry ≥ 0.5: in white coordinates, median over heads, the model with the least
        definiteness ≥ 0.5: the same for the definiteness
      correction:
        symmetry_excess ≥ 0.02: lower end of the 95 % interval of the excess over mismatched pairs,
            the model with the least
        definiteness_excess ≥ 0.02: the same for the definiteness
      control:
        gaussian_head ≥ 0.999: symmetry and definiteness of a head that is the link, the lesser
        random_excess ≤ 0.05: excess of random weights in the same architectures, the largest
      noted:
        raw_symmetry: in the model's own coordinates, median over heads, the largest of the models
        mismatched: white symmetry of mismatched pairs, median, the largest of the models
    """),
    finding="White symmetry, median over heads: {told}. Mismatched pairs: at most "
    "{mismatched:.2f}; the model's own coordinates: at most {raw_symmetry:.2f}. The least "
    "definiteness of a model is {definiteness:.2f}.{rotary}",
    caption="Left: every head in coordinates where its hidden states are white (dots), and queries "
    "with another head's keys (gray). Right: definiteness of the same.",
    size=(7.0, 3.2),
)


def rows_of(one: Subject, distances: Sequence[float] = (0,)) -> list[dict[str, Any]]:
    """The lens' table of forms: symmetry and definiteness, raw, white and mismatched."""
    with observe(one.model, layers=True, spectrum=False) as lens:
        one.run()
    return records(lens.forms(distances))


def gaussian_head(trial: Trial) -> float:
    """The lesser of both figures for W_q = Σ⁻¹, W_k = 1 on states that are N(m, Σ): the link."""
    d = 12
    root = trial.normal(d, d)
    states = trial.normal(4000, d) @ root + trial.normal(d)
    away = states - states.mean(0)
    precision = linalg.inv(away.mT @ away / (len(away) - 1))
    eye = torch.eye(d, dtype=torch.float64)[None]
    head = Projections(precision[None], eye, eye, None, (), ())
    [row] = form_rows(head, states, None, (0.0,))
    return min(row["whitened_symmetry"], row["whitened_definiteness"])


def excess(rows: Sequence[dict[str, Any]], kind: str, shared: bool) -> tuple[float, float]:
    """(mean, half its 95 % interval) of white minus mismatched at distance 0.

    By layer, or where all layers have the same weights by head.
    """
    groups: dict[int, list[float]] = {}
    for row in rows:
        if row["distance"] == 0:
            gain = row[f"whitened_{kind}"] - row[f"mismatched_{kind}"]
            groups.setdefault(row["head" if shared else "layer"], []).append(gain)
    means = torch.tensor([sum(x) / len(x) for x in groups.values()], dtype=torch.float64)
    quantile = float(import_module("scipy.stats").t.ppf(0.975, len(means) - 1))
    return float(means.mean()), quantile * float(means.std()) / math.sqrt(len(means))


def middle(rows: Sequence[dict[str, Any]], column: str, distance: float = 0) -> float:
    """The median over heads."""
    return median([row[column] for row in rows if row["distance"] == distance])


def judged(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The numbers of the rules from the tables of some models."""
    gains = {
        kind: [excess(rows, kind, key == "rxnmapper") for key, rows in found.items()]
        for kind in ("symmetry", "definiteness")
    }
    return {
        "symmetry": min(middle(rows, "whitened_symmetry") for rows in found.values()),
        "definiteness": min(middle(rows, "whitened_definiteness") for rows in found.values()),
        "symmetry_excess": min(mean - half for mean, half in gains["symmetry"]),
        "definiteness_excess": min(mean - half for mean, half in gains["definiteness"]),
        "raw_symmetry": max(middle(rows, "symmetry") for rows in found.values()),
        "mismatched": max(middle(rows, "mismatched_symmetry") for rows in found.values()),
    }


@torch.no_grad()
def measure(trial: Trial) -> Found:
    """Every head of the real models; the same architectures with random weights."""
    count = trial.size(16, 4)
    found: dict[str, list[dict[str, Any]]] = {}
    random: list[float] = []
    for key in MODELS if not trial.quick else QUICK:
        one = subject(key, count)
        far = DISTANCES if key == "smollm2" else (0,)
        compute = partial(rows_of, one, far)
        found[key] = remembered(one.digest, {"T35": far}, compute, source=__file__)
        if key in ("minilm", "rxnmapper"):
            untrained = remembered(
                one.digest,
                {"T35": "random", "seed": trial.seed},
                lambda one=one: rows_of(reseeded(one, trial.seed)),
                source=__file__,
            )
            random.append(excess(untrained, "symmetry", False)[0])
    rotary = ""
    if "smollm2" in found:
        far = middle(found["smollm2"], "whitened_symmetry", DISTANCES[-1])
        rotary = f" At a rotary distance of {DISTANCES[-1]}, SmolLM2's symmetry is {far:.2f}."
    numbers = judged(found) | {
        "gaussian_head": gaussian_head(trial),
        "random_excess": max(random),
    }
    names = {key: MODELS[key][2] for key in found}
    told = ", ".join(
        f"{names[key]} {middle(rows, 'whitened_symmetry'):.2f}" for key, rows in found.items()
    )
    return Found(numbers, told=told, rotary=rotary, found=found, names=names)


def draw(figure: Any, seen: Any) -> None:
    """Heads of every model, white and mismatched."""
    for axes, kind in zip(
        figure.subplots(1, 2, sharey=True), ("symmetry", "definiteness"), strict=True
    ):
        for i, rows in enumerate(seen.found.values()):
            for column, shift, color in (
                (f"mismatched_{kind}", 0.18, MUTED),
                (f"whitened_{kind}", -0.18, series_color(i)),
            ):
                values = torch.tensor([r[column] for r in rows if r["distance"] == 0])
                _dots(axes, i + shift, values, color)
        axes.axhline(0, color=MUTED, lw=0.8)
        axes.axhline(1, color=COLORS[0], lw=0.8, ls=":")
        axes.set_xticks(range(len(seen.found)), list(seen.names.values()))
        axes.set(title=f"{kind}, states white", ylim=(-0.75, 1.05))


def _dots(axes: Any, place: float, values: Tensor, color: str) -> None:
    spread = torch.linspace(-0.12, 0.12, len(values))
    axes.plot(place + spread, values, ".", ms=2.5, color=color)
    axes.plot([place - 0.15, place + 0.15], [median(values)] * 2, color=color, lw=2)
