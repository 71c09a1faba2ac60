"""The documentation tells what the ledger and the recorded studies have, not what they once had."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from cumulant.lab.claims import claims, run
from cumulant.lab.claims.ledger import plain_number
from cumulant.lab.claims.record import markdown
from cumulant.lab.studies.recording import FOLDER, recorded

DOCS = Path(__file__).parents[3] / "docs"
LEDGER = json.loads((DOCS / "claims" / "claims.json").read_text(encoding="utf-8"))
ROWS = {row["id"]: row for row in LEDGER["claims"]}
ANSWERS = " ".join((DOCS / "answers.md").read_text(encoding="utf-8").split())


def test_the_ledger_in_the_documentation_is_complete():
    assert list(ROWS) == list(claims())
    assert (LEDGER["seed"], LEDGER["quick"], LEDGER["complete"]) == (0, False, True)
    assert (DOCS / "claims" / "ledger.md").read_text(encoding="utf-8") == markdown(LEDGER)
    drawn = {path.stem for path in (DOCS / "claims" / "figures").glob("*.svg")}
    assert drawn == {name for name, row in ROWS.items() if row["caption"]}
    assert not any(row["departs"] or row["crash"] or row["not_run"] for row in ROWS.values())


@pytest.mark.parametrize("name", claims())
def test_an_entry_in_the_documentation_is_of_the_claim_as_it_is(name):
    """Otherwise: cumulant claims -o docs/claims --update --only NAME."""
    claim, row = claims()[name], ROWS[name]
    assert row["verdict"] == claim.recorded
    told = (row["title"], row["evidence"], row["statement"], row["correction"], row["bounds"])
    assert told == (claim.title, claim.evidence, claim.statement, claim.correction, claim.bounds)
    rules = {x["name"]: (x["says"], x["form"], x["low"], x["high"]) for x in row["numbers"]}
    assert rules == {n: (r.says, r.form, r.low, r.high) for n, r in claim.rules.items()}
    if name in recorded():  # read, not trained: cheap enough to do again
        again = [plain_number(x) for x in run(claim).numbers]
        for x, y in zip(again, row["numbers"], strict=True):
            assert x["value"] == pytest.approx(y["value"], rel=1e-6)


def number(name: str, key: str) -> float:
    return ROWS[name]["measured"][key]


def mean(study: str, variant: str, quantity: str) -> float:
    table = json.loads((FOLDER / f"{study}.json").read_text(encoding="utf-8"))["table"]
    return next(row[quantity][0] for row in table if row["variant"] == variant)


def ends(study: str, rule: str) -> tuple[float, float, float]:
    rules = json.loads((FOLDER / f"{study}.json").read_text(encoding="utf-8"))["rules"]
    found = next(x for x in rules if x["name"] == rule)
    return found["mean"], found["low"], found["high"]


def excess(name: str) -> str:
    middle, low, high = ends("link-over-training", f"{name}_symmetric")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})".replace("-", "−")


def depth() -> str:
    """By how many times distances change over the depth: ... 0.32; ... 1.7e+02; ..."""
    parts = ROWS["T39"]["finding"].partition(": ")[2].split(". With")[0].split("; ")
    told = {x.split()[0]: float(x.split()[-1]) for x in parts}
    assert max(told, key=lambda k: abs(math.log(told[k]))) == "SmolLM2"
    rest = max(abs(math.log(x)) for name, x in told.items() if name != "SmolLM2")
    assert f"within a factor of {math.exp(rest):.1f} where norms sit" in ANSWERS
    return f"{2 ** number('T39', 'depth'):.2g}".replace("1.7e+02", "170")


def bits(study: str, variant: str) -> str:
    return f"{mean(study, variant, 'bits'):.2f}"


def lost(variant: str) -> float:
    """Bits that a variant of which-weights costs."""
    return mean("which-weights", variant, "bits") - mean("which-weights", "trained", "bits")


def quoted() -> dict[str, str]:
    """Sentences of the answers with their numbers, from the ledger and the studies."""
    t39 = {k: number("T39", k) for k in ROWS["T39"]["measured"]}
    link, even = excess("bidirectional").partition(" ")[::2]
    causal = excess("causal")
    laws = [float(x) for x in re.findall(r"(\d+)% in", ROWS["T40"]["finding"])]
    exp, degree = "why-exponential", "taylor"
    return {
        "T39 attention": f"by {t39['attention'] - 1:.0%} to "
        f"{t39['attention_most'] - 1:.0%} a layer",
        "T39 feed-forward": f"({t39['feed_forward_least'] - 1:.0%} to "
        f"{t39['feed_forward_most'] - 1:.0%})",
        "T39 depth": f"grow {depth()}-fold where they do not",
        "expansion": f"({bits('expansion', 'none')} bits per character against "
        f"{bits('expansion', 'pre-rms')})",
        "T35": f"median symmetry is {number('T35', 'symmetry'):.2f} to 0.68, where the link has 1",
        "link, bidirectional": f"are {link} more symmetric than mismatched pairs (95 % interval "
        f"{even[1:-1]}",
        "link, causal": f"In a causal one {causal}",
        "T37a": f"keeps {number('T37a', 'one_head'):.0%} of its retrieval with one set of "
        f"attention weights for all heads, but only {number('T37a', 'query_key'):.0%} with the "
        "identity",
        "frozen values": f"freezing values and outputs {lost('vo-frozen'):.2f}",
        "identity": f"the identity for all weights costs {lost('all-identity'):.2f}",
        "capacity": f"(e^({mean('recall-capacity', 'exp', 'growth_rate'):.2f} d))",
        "exp": f"the exponential needs {bits(exp, 'exp')} bits per character, its Taylor "
        f"polynomial of degree 4 needs {bits(exp, degree + '4')} (just outside the uncertainty), "
        f"that of degree 2 needs {bits(exp, degree + '2')}",
        "averaging": f"plain averaging {bits(exp, 'uniform')}",
        "T40": f"leaves {min(laws):.0f} to {max(laws):.0f} % of the error of uniform attention",
        "T40 mixture": f"in only {number('T40', 'mixture_heads'):.0%} of SmolLM2's heads",
        "T41a": f"a spectral radius of {number('T41a', 'radius'):.1f}",
        "T41a end": f"by {number('T41a', 'at_end'):.0%} at pass 200",
        "T41b": f"At {number('T41b', 'averages'):.0%} of the fixed points no key holds even half",
        "T38": f"contexts keep {number('T38', 'slow_spread'):.0%} of their true spread",
    }


@pytest.mark.parametrize("name", quoted())
def test_numbers_of_the_answers_are_those_of_the_ledger_and_the_studies(name):
    words = re.sub(r" ?%", " %", quoted()[name])
    assert words.replace(" % to ", " to ") in ANSWERS
