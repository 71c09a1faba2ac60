"""Parts of a made-up report: every verdict, a figure in every color, a model, a series, ratios."""

from __future__ import annotations

import math
from typing import Any

from cumulant.figures import COLORS, INK, MUTED, as_svg
from cumulant.lab.report import Parts
from report_data import made_up

NUMBER: dict[str, Any] = {
    **{"name": "gap", "value": 3.2e-13, "says": "largest error against quadrature"},
    **{"form": "statement", "low": None, "high": 1e-8, "refuted": None, "error": None},
    "outcome": "passed",
}


def entry(name: str, verdict: str, **changes: Any) -> dict[str, Any]:
    plain = {
        **{"id": name, "title": f"Title of {name}", "statement": f"What {name} states."},
        **{"source": "proofs draft, eq. (3)", "formula": r"\nabla G(\eta) = \operatorname{E}[x]"},
        **{"correction": "", "systems": [], "tests": ["tests/laws/test_duality.py"]},
        **{"theory": name if name[0] == "T" else "", "again": f"cumulant claims --only {name}"},
        **{"verdict": verdict, "recorded": verdict, "departs": False, "evidence": "identity"},
        **{"finding": f"Found of {name}: agreement to 2e-15.", "measured": {"gap": 3.2e-13}},
        **{"numbers": [NUMBER], "caption": None, "seconds": 0.31, "crash": None, "not_run": None},
    }
    return plain | changes


def ledger() -> dict[str, Any]:
    failed = NUMBER | {"name": "drafted", "value": 1.71, "outcome": "failed"}
    mended = NUMBER | {"name": "mended", "form": "correction"}
    sampled = NUMBER | {
        **{"name": "slope", "value": 0.42, "says": "slope of the fit", "low": 0.9, "high": None},
        **{"refuted": 0.3, "error": 0.015, "outcome": "undecided"},
    }
    remark = NUMBER | {"name": "points", "value": 4096, "form": "noted", "outcome": "noted"}
    return {
        "version": "1.2.3",
        "seed": 0,
        "quick": True,
        "claims": [
            entry("T1", "holds", caption="G and its gradient.", systems=["kernel regression"])
            | {"slips": ["Eq. (1) prints b."], "bounds": "Rounding."},
            entry(
                *("T4", "holds with a correction"),
                **{"numbers": [failed, mended], "correction": "The weights stay."},
                caption="With and without the weights.",
            ),
            entry(
                "T17", "does not hold in general", caption="Gaussianity decays.", numbers=[failed]
            ),
            entry("T29", "open", numbers=[sampled, remark], evidence="empirical"),
            entry("simclr", "holds"),
            entry("T30", "open", recorded="holds", departs=True, numbers=[], finding="")
            | {"crash": "ValueError: no"},
            entry("T31", "open", numbers=[], finding="", not_run="needs transformers"),
            entry("T32", "open", recorded="holds", departs=True),
        ],
    }


def figure(name: str) -> str:
    """A chart in every color of the house, with text, clipping and a ramp's color in between."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, color in enumerate((*COLORS, INK, MUTED)):
            axes.plot([0, 1], [i, i + 1], color=color, label=f"line {i}")
        axes.scatter([0.5], [2.0], color="#5050a0")
        axes.legend()

    return as_svg(draw, (7.0, 3.0), name)


def series(steps: int = 24) -> dict[str, Any]:
    wave = [math.sin(k / 3) for k in range(steps)]
    calm = [0.5 + 0.4 * x for x in wave]
    return {
        **{"title": "A made-up series", "source": "Made up", "modes": ["calm", "restless"]},
        "dates": [f"{1990 + k // 4}Q{k % 4 + 1}" for k in range(steps)],
        "observed": [None if k == 3 else x + 0.1 * (-1) ** k for k, x in enumerate(wave)],
        **{"mean": wave, "low": [x - 0.3 for x in wave], "high": [x + 0.3 for x in wave]},
        "probabilities": [calm, [1 - x for x in calm]],
        **{"log_likelihood": -412.534, "sentences": ["It was calm at first.", "Then it was not."]},
    }


def benchmarks() -> dict[str, Any]:
    ratios = {"attention": (0.25, 1.0, 3.5), "filters": (0.0097, 41.7)}
    rows = [
        {
            **{"bench": bench, "shape": f"{2**k} x 64", "quantity": f"step {k}"},
            **{"against": "plain torch", "amount": 4.0 * ratio, "baseline": 4.0},
            **{"ratio": ratio, "recorded": 0.9 * ratio, "unit": "ms"},
        }
        for bench, found in ratios.items()
        for k, ratio in enumerate(found)
    ]
    return {"machine": "A made-up machine", "rows": rows}


def made_parts(**changes: Any) -> Parts:
    parts: dict[str, Any] = {
        "ledger": ledger(),
        "figures": {name: figure(name) for name in ("T1", "T4", "T17")},
        "lens": made_up(layers=3, heads=4, tokens=24),
        **{"series": series(), "benchmarks": benchmarks()},
        "run": {"version": "1.2.3", "seconds": 12, "versions": {"torch": "2.13"}},
        "notes": ["One bench is left out."],
    }
    return Parts(**(parts | changes))
