"""A recorded study as a claim of the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from cumulant.figures import COLORS, INK
from cumulant.lab.claims.claim import Claim, Found, Trial, Verdict
from cumulant.lab.studies.judging import interval, judgments, quantities
from cumulant.lab.studies.recording import recorded
from cumulant.lab.studies.results import Results
from cumulant.lab.studies.tasks import objective_of

# What the axis of the picture says of a quantity.
_LABELS = {
    "bits": "bits per character, test",
    "growth": "norm after training over norm before",
    "max_rate": "log10 of the largest stable learning rate",
    "symmetry": "symmetry, whitened",
    "exponent": "fitted exponent of the dimension",
    "error_256": "relative error of the output, 256 features",
}

__all__ = ["StudyClaim", "study_claim", "study_claims"]


class StudyClaim(NamedTuple):
    """What a module of the ledger has."""

    claim: Claim
    measure: Callable[[Trial], Found]
    draw: Callable[[Any, Any], None]


def study_claims() -> list[StudyClaim]:
    """A claim for each recorded study whose file says one and whose controls passed.

    Without its controls an experiment means nothing, and the ledger would call it a departure.
    """
    return [study_claim(x) for x in recorded().values() if x.study.claim and _sound(x)]


def _sound(results: Results) -> bool:
    lines, _ = judgments(results.study, results.runs)
    return all(x.measured.outcome == "passed" for x in lines if x.rule.form == "control")


def study_claim(results: Results) -> StudyClaim:
    """The claim that a study decides, read from its recorded runs: nothing is trained again.

    Its sentences are the table ``[claim]`` of the study's file: statement, source, formula and
    finding, which may name ``{bits[exp]}`` and the like, means over seeds; ``quantity`` is what the
    picture shows, by default the objective; ``theory`` is the section it belongs to. The verdict is
    the one that was recorded.
    """
    study, says = results.study, results.study.claim
    lines, _ = judgments(study, results.runs)
    shown = says.get("quantity") or objective_of(study.task)
    claim = Claim(
        id=study.name,
        title=study.title,
        evidence="simulation" if study.task in ("recall", "features") else "empirical",
        statement=says["statement"],
        source=says["source"],
        formula=says["formula"],
        recorded=cast(Verdict, results.about["recorded"]),
        rules={x.measured.name: x.measured.rule for x in lines},
        finding=says["finding"],
        bounds=f"Read from the recorded runs of `cumulant study {study.name}`, quick or not; "
        "nothing is trained again. Each number is the end of a 95 % interval over seeds that is "
        "nearest to failing; the rules were fixed before the runs.",
        caption="Means over seeds and their 95 % intervals.",
        size=(6.0, 0.9 + 0.32 * len(study.variants)),
        theory=says.get("theory", ""),
        tests=("tests/lab/studies/test_recorded.py",),
        file=f"src/cumulant/lab/studies/files/{study.name}.toml",
        again=f"cumulant study {study.name} -o {study.name}",
    )

    def measure(trial: Trial) -> Found:
        again, _ = judgments(study, results.runs)
        found = quantities(study, results.runs)
        means = {
            n: {v: interval([*x.values()]).mean for v, x in row.items()} for n, row in found.items()
        }
        numbers = {x.measured.name: x.measured.value for x in again}
        return Found(numbers, **{n: x for n, x in means.items() if n not in numbers})

    def draw(figure: Any, seen: Any) -> None:
        axes = figure.subplots()
        rows = quantities(study, results.runs)[shown]
        for k, values in enumerate(rows.values()):
            x = interval([*values.values()])
            half = x.half if math.isfinite(x.half) else 0.0
            color = COLORS[k % len(COLORS)]
            axes.errorbar([x.mean], [k], xerr=[half], fmt="o", color=color, capsize=3, markersize=4)
        axes.set_yticks(range(len(rows)), list(rows), color=INK)
        axes.invert_yaxis()
        axes.set(xlabel=_LABELS.get(shown, shown.replace("_", " ")))

    return StudyClaim(claim, measure, draw)
