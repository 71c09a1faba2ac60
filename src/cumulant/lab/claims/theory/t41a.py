"""T41a: one layer applied again and again, in a model that does so and in layers of others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cumulant.core.typed import linalg
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import median, relative
from cumulant.lab.claims.remembering import remembered
from cumulant.lab.claims.subjects import NEEDS, Subject, copied, subject

SETTLED = 1e-3  # relative distance between iterates
PERIODS = (2, 3, 4)

CLAIM = Claim(
    id="T41a",
    title="One layer, applied again",
    evidence="empirical",
    statement="A deep model that applies one layer again and again approaches a fixed point of "
    "that layer, as a deep equilibrium model does.",
    source="paper, section 3.1 (deep equilibrium models)",
    formula=r"x_{n+1} = f(x_n), \qquad \frac{\lVert x_{n+1} - x_n \rVert}{\lVert x_n \rVert}, "
    r"\qquad \rho(f'(x))",
    bounds="An iteration has settled where a step changes the state by less than a thousandth, the "
    "precision to which a trained model could use it. The claim holds if nine of ten inputs settle "
    "and is refuted if fewer than half do. At a fixed point that attracts, the spectral radius is "
    "below 1. The model's own states up to its depth must come out of the same iteration.",
    recorded="does not hold in general",
    tests=("tests/dynamics/test_fixed_point.py",),
    needs=NEEDS,
    rules=table("""
      statement:
        settles ≥ 0.9 (refuted at 0.5): share of reactions at which ALBERT's layer settles
        radius ≤ 1: spectral radius of the layer at the last iterate, median over reactions
      control:
        own_states ≤ 0.0001: the iteration against the model's own last states, relative
        known_radius ≤ 0.01: spectral radius of a linear map by the same method, relative error
      noted:
        at_depth: relative distance between iterates at the model's own depth, median
        at_end: the same at the last iterate
        cycles: share of reactions whose last states repeat with a period of 2 to 4
        at_depth_radius: spectral radius at the model's own depth, median
        others_settle: share of layers of MiniLM and AntiBERTy that settle when applied again
        others_radius: spectral radius of those layers at their last iterate, median
    """),
    finding="ALBERT's layer, trained for 12 passes, settles at {settles:.0%} of the reactions "
    "({last} passes, {cycles:.0%} in a cycle); a step changes the state by {at_depth:.1%} at its "
    "depth and by {at_end:.1%} at the end. The spectral radius is {at_depth_radius:.2f} at its "
    "depth and {radius:.2f} at the end. Of the layers of MiniLM and AntiBERTy, never trained to be "
    "repeated, {others_settle:.0%} settle.",
    caption="Relative distance between iterates of one layer: ALBERT's, which is trained to be "
    "applied 12 times (dashed), and single layers of two other models.",
    size=(7.0, 3.2),
)


def iterate(layer: Callable[[Tensor], Tensor], x: Tensor, passes: int) -> list[Tensor]:
    """x, f(x), f(f(x)), ..."""
    states = [x]
    for _ in range(passes):
        states.append(layer(states[-1]))
    return states


def steps_of(states: list[Tensor]) -> list[float]:
    """Relative distances between iterates."""
    return [relative(b, a) for a, b in pairwise(states)]


def repeats(states: list[Tensor]) -> bool:
    """Whether the last states repeat with a short period, and are not at rest."""
    moving = relative(states[-2], states[-1]) > SETTLED
    return moving and any(relative(states[-1 - p], states[-1]) < SETTLED for p in PERIODS)


def radius(layer: Callable[[Tensor], Tensor], x: Tensor, rounds: int = 40) -> float:
    """The growth rate of small perturbations, by power iteration on differences."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    size, growth = 1e-4 * float(linalg.vector_norm(x)), list[float]()
    for _ in range(rounds):
        u = u / linalg.vector_norm(u)
        u = (layer(x + size * u) - layer(x - size * u)) / (2 * size)
        growth.append(float(linalg.vector_norm(u)))
    tail = torch.tensor(growth[-10:], dtype=torch.float64)
    return float(tail.log().mean().exp())  # a complex pair makes single rounds swing


def of_layer(layer: Callable[[Tensor], Tensor], x: Tensor, passes: int) -> dict[str, Any]:
    """What becomes of one start."""
    states = iterate(layer, x, passes)
    steps = steps_of(states)
    settled = next((n for n, step in enumerate(steps) if step < SETTLED), None)
    if steps[-1] >= SETTLED:
        settled = None
    return {
        "steps": steps,
        "settled": settled,
        "cycle": repeats(states),
        "radius": radius(layer, states[-1]),
    }


def applied(layer: Any) -> Callable[[Tensor], Tensor]:
    """A layer of a Hugging Face model, on a text without padding."""

    def apply(x: Tensor) -> Tensor:
        out: Any = layer(x, attention_mask=None)
        return out if isinstance(out, Tensor) else out[0]

    return apply


def own_text(one: Subject, number: int) -> Tensor:
    """One input ``(1, N)`` without padding."""
    rows = [row for batch in one.batches for row in zip(*batch.values(), strict=True)]
    ids, mask = rows[number]
    return ids[None, : int(mask.sum())]


def albert(one: Subject, count: int, passes: int) -> list[dict[str, Any]]:
    """Iterations from ``count`` inputs, and how far they are from the model's own states."""
    model = copied(one).model.double()
    found: list[dict[str, Any]] = []
    for number in range(count):
        ids = own_text(one, number)
        layer = applied(model.encoder.albert_layer_groups[0].albert_layers[0])
        x = model.encoder.embedding_hidden_mapping_in(model.embeddings(ids))
        depth = model.config.num_hidden_layers
        at_depth = iterate(layer, x, depth)[-1]
        own = model(ids).last_hidden_state
        row = of_layer(layer, x, passes)
        row["gap"] = relative(at_depth, own)
        row["depth_radius"] = radius(layer, at_depth)
        found.append(row)
    return found


def others(one: Subject, passes: int, every: int) -> list[dict[str, Any]]:
    """Single layers of a BERT applied again, from what they are given in the model."""
    model = copied(one).model.double()
    ids = own_text(one, 0)
    states = model(ids, output_hidden_states=True).hidden_states
    layers = range(0, model.config.num_hidden_layers, every)
    return [of_layer(applied(model.encoder.layer[n]), states[n], passes) for n in layers]


def known_radius() -> float:
    """The method on a linear map with a known radius, relative error."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.mT
    truth = float(linalg.eigvalsh(matrix).abs().max())
    start = torch.randn(1, 12, generator=generator, dtype=torch.float64)
    return abs(radius(lambda x: x @ matrix, start, 200) / truth - 1)


def judged(rows: list[dict[str, Any]], depth: int = 12) -> dict[str, float]:
    """The numbers of the rules from the iterations of one layer."""
    settled = [row["settled"] for row in rows if row["settled"] is not None]
    return {
        "settles": len(settled) / len(rows),
        "radius": median([row["radius"] for row in rows]),
        "at_depth": median([row["steps"][min(depth, len(row["steps"])) - 1] for row in rows]),
        "at_end": median([row["steps"][-1] for row in rows]),
        "cycles": sum(row["cycle"] for row in rows) / len(rows),
    }


@torch.no_grad()
def measure(trial: Trial) -> Found:
    """ALBERT's layer from several reactions; layers of two other models from one text each."""
    count, passes = trial.size(12, 3), trial.size(200, 60)
    one = subject("rxnmapper", 16)
    compute = partial(albert, one, count, passes)
    rows = remembered(one.digest, {"T41a": [count, passes]}, compute, source=__file__)
    controls: list[dict[str, Any]] = []
    for key in ("minilm",) if trial.quick else ("minilm", "antiberty"):
        other, every = subject(key, 4), trial.size(1, 5)
        run = partial(others, other, passes // 2, every)
        settings = {"T41a": [passes, every]}
        controls += remembered(other.digest, settings, run, source=__file__)
    apart = judged(controls)
    numbers = judged(rows) | {
        "own_states": max(row["gap"] for row in rows),
        "known_radius": known_radius(),
        "at_depth_radius": median([row["depth_radius"] for row in rows]),
        "others_settle": apart["settles"],
        "others_radius": apart["radius"],
    }
    return Found(numbers, last=passes, rows=rows, controls=controls)


def draw(figure: Any, seen: Any) -> None:
    """Distances between iterates."""
    axes = figure.subplots()
    for i, (rows, label) in enumerate(
        ((seen.controls, "single layers of other models"), (seen.rows, "ALBERT's layer"))
    ):
        for n, row in enumerate(rows):
            steps = [max(x, 1e-9) for x in row["steps"]]
            color = MUTED if i == 0 else series_color(0)
            axes.semilogy(steps, color=color, lw=0.9, label=label if n == 0 else None)
    axes.axvline(12, color=MUTED, lw=1, ls="--")
    axes.set(xlabel="passes", ylabel="relative change by a pass")
    axes.legend()
