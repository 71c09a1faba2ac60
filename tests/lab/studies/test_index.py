"""What the index of recorded studies says in words is what the records say in numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cumulant.lab.studies.judging import interval, judgments, quantities
from cumulant.lab.studies.language import _encoded
from cumulant.lab.studies.recording import recorded
from cumulant.lab.workers import duration

DOCS = Path(__file__).parents[3] / "docs"


class Number(float):
    """With the minus sign of prose."""

    def __format__(self, spec: str) -> str:
        said = super().__format__(spec)
        said = f"{float(said):g}" if spec.endswith("g") else said  # 3400, not 3.4e+03
        return said.replace("-", "−").replace("%", " %")


class Means(dict[str, Number]):
    """Means over seeds by variant, and their differences, as in ``[vo-frozen less trained]``."""

    def __missing__(self, key: str) -> Number:
        more, less = key.split(" less ")
        return Number(self[more] - self[less])


def known(name: str) -> dict[str, Any]:
    """Means over seeds by quantity and variant, and the lines of the rule."""
    results = recorded()[name]
    found = quantities(results.study, results.runs)
    found["rate"] = {x.job.variant: {0: x.job.rate} for x in results.runs if x.job.stage == "final"}
    told: dict[str, Any] = {
        quantity: Means({v: Number(interval([*x.values()]).mean) for v, x in row.items()})
        for quantity, row in found.items()
    }
    for line in judgments(results.study, results.runs)[0]:
        x = line.interval
        told[line.rule.name] = {n: Number(getattr(x, n)) for n in ("mean", "low", "high")}
    return told


def plain(text: str) -> str:
    return " ".join(text.split())


def sections() -> dict[str, str]:
    parts = (DOCS / "studies" / "index.md").read_text().split("\n## ")
    return {part.split("\n")[0]: plain(part) for part in parts[1:]}


# Sentences of the index, by section, with the record that they read; `{bits[exp]}` is a mean over
# seeds, `{exp_ahead[low]}` an end of the interval of a rule's line.
SAID = {
    ("Why exponential", "why-exponential"): [
        "exp needs {bits[exp]:.2f} bits per character, the Taylor polynomial of degree 4 "
        "{bits[taylor4]:.2f}, of degree 2 {bits[taylor2]:.2f}, the sigmoid and exp of the cosine "
        "{bits[sigmoid]:.2f}, elu + 1 {bits[elu1]:.2f}, relu² {bits[relu2]:.2f} and plain "
        "averaging {bits[uniform]:.2f}",
        "the lead is {exp_ahead[mean]:.2f} bits (interval {exp_ahead[low]:.4f} to "
        "{exp_ahead[high]:.3f})",
        "degree 2, degree 4, exp give {bits[taylor2]:.2f}, {bits[taylor4]:.2f}, {bits[exp]:.2f} "
        "bits, and their largest weights are {top[taylor2]:.2f}, {top[taylor4]:.2f}, "
        "{top[exp]:.2f} at scores that vary equally (by {spread[taylor2]:.1f}, "
        "{spread[taylor4]:.1f} and {spread[exp]:.1f} within a row)",
        "relu² has the fewest effective keys ({effective[relu2]:.0f}, exp {effective[exp]:.0f})",
        "(rank correlation {sharper_is_better[mean]:.2f})",
        "picked the rate {rate[cosine]:g} for the cosine, elu + 1 and averaging, {rate[exp]:g}",
    ],
    ("Why exponential", "recall-capacity"): [
        "({capacity_16[exp]:.0f} patterns for exp and the cosine, {capacity_16[taylor4]:.0f} for "
        "degree 4, {capacity_16[taylor2]:.0f} for degree 2)",
        "elu + 1 recalls {capacity_16[elu1]:.0f} and is no worse than degree 2, relu² recalls "
        "{capacity_16[relu2]:.0f}",
        "exp recalls e^({growth_rate[exp]:.2f} d) patterns (interval {exp_rate_low[low]:.2f} to "
        "{exp_rate_low[high]:.2f}",
        "recalls d^{exponent[taylor2]:.2f}, relu² d^{exponent[relu2]:.2f}, the Taylor polynomial "
        "of degree 4 d^{exponent[taylor4]:.1f}. At d = 24 that is {capacity_24[exp]:.2g} patterns "
        "against {capacity_24[taylor2]:.0f}, {capacity_24[relu2]:.0f} and "
        "{capacity_24[taylor4]:.0f}",
    ],
    ("Why exponential", "random-features"): [
        "At |q||k| = 1, 256 features give {error_256[product-1]:.0%} error; at 4, 4096 features "
        "give {error_4096[product-4]:.0%}",
    ],
    ("Which weights", "which-weights"): [
        "the trained model needs {bits[trained]:.2f} bits per character. Freezing values and "
        "outputs at random costs {bits[vo-frozen less trained]:.2f} bits, taking the identity for "
        "them {bits[vo-identity less trained]:.2f}, tying them to queries and keys so that the "
        "head is a true gradient (T14) {bits[vo-tied less trained]:.2f}. Freezing queries and keys "
        "costs {bits[qk-frozen less trained]:.2f}, the identity "
        "{bits[qk-identity less trained]:.2f}, and attention without weights, the identity "
        "everywhere, {bits[all-identity less trained]:.2f}: that model ({bits[all-identity]:.2f} "
        "bits)",
        "a row spreads over {effective[qk-frozen]:.0f} of its 36 keys",
        "the largest weight is {top[qk-frozen]:.2f}; trained, over {effective[trained]:.0f}, "
        "largest {top[trained]:.2f}",
        "they look at {effective[vo-frozen]:.0f} or {effective[vo-identity]:.0f} keys",
        "where the trained model's vary by {spread[trained]:.1f}",
        "(log10 of the largest stable rate {values_make_it_unstable[mean]:.2f}, interval "
        "{values_make_it_unstable[low]:.2f} to {values_make_it_unstable[high]:.2f})",
        "{gradient_value_output[trained]:.2f} against {gradient_query_key[trained]:.2f} for "
        "queries and keys",
        "instead of {bits[vo-tied]:.2f} and {bits[all-frozen]:.2f}",
    ],
    ("Which weights", "which-weights-tuned"): [
        "train best at {rate[qk-frozen]:g}, not at 0.03, and end at {bits[qk-frozen]:.2f} bits. "
        "They then cost {bits[qk-frozen less trained]:.2f} bits and frozen values and outputs "
        "{bits[vo-frozen less trained]:.2f}, so queries and keys matter more by "
        "{query_key_matters_more[mean]:.2f} (interval {query_key_matters_more[low]:.2f} to "
        "{query_key_matters_more[high]:.2f})",
        "Attention without weights costs {weights_are_needed[mean]:.2f}.",
    ],
    ("Expansion and contraction", "expansion"): [
        "by e^{growth_start[none]:.2f} without normalization, e^{growth_start[pre-layer]:.2f} with "
        "a norm before each part, e^{growth_start[post-layer]:.2f} with layer norm after it, and "
        "e^{growth_start[post-sphere]:.1f} with the sphere after it",
        "is {expansion_predicts[mean]:.2f} (interval {expansion_predicts[low]:.2f} to "
        "{expansion_predicts[high]:.2f})",
        "({bits[none]:.2f}; norms before each part {bits[pre-rms]:.2f} and {bits[pre-layer]:.2f}, "
        "layer norm after it {bits[post-layer]:.2f})",
        "{bits[pre-sphere]:.2f} before, and {bits[post-sphere]:.2f} after each part",
        "where norms before each part have {gradient_query_key[pre-layer]:.2f}",
        "by e^{growth[pre-layer]:.1f}, without any by e^{growth[none]:.2f}",
    ],
    ("The link over training", "link-over-training"): [
        "to {bits[causal]:.2f} bits (causal) and {bits[bidirectional]:.2f} (bidirectional",
        "starts at {symmetry_start[causal]:.2f}, as random weights have it",
        "heads are at {symmetry[bidirectional]:.2f}, pairs from different heads at "
        "{null[bidirectional]:.2f}",
        "{bidirectional_symmetric[mean]:.2f} (interval {bidirectional_symmetric[low]:.2f} to "
        "{bidirectional_symmetric[high]:.2f})",
        "definiteness {bidirectional_positive[mean]:.2f} (interval "
        "{bidirectional_positive[low]:.2f} to {bidirectional_positive[high]:.2f})",
        "heads end at {symmetry[causal]:.2f}, mismatched pairs at {null[causal]:.2f}",
        "is {causal_symmetric[mean]:.2f} (interval {causal_symmetric[low]:.2f} to "
        "{causal_symmetric[high]:.2f})",
        "Definiteness is {causal_positive[mean]:.2f} ({causal_positive[low]:.2f} to "
        "{causal_positive[high]:.2f})",
    ],
    ("Dot product or cosine", "dot-or-cosine"): [
        "grows by a factor of {growth[dot]:.1f}",
        "the power {late[dot]:.2f} of the step",
        "stays where it was ({growth[cosine]:.2f})",
        "is {error[dot]:.1%} with dot products and {error[cosine]:.1%} with cosines",
        "did not stop the growth ({growth[dot-decay]:.1f},",
    ],
}

# Numbers that are no means of a record: of single seeds and rates, of earlier runs, of runs outside
# a rule, of other pages, of theory.
ELSEWHERE = {
    "Why exponential": [
        *("0.01", "2.40", "0.02", "2.48", "0.1", "0.2", "0.06", "0.11", "0.37", "0.29"),
    ],
    "Which weights": [
        *(
            "0.4",
            "0.7",
            "0.41",
            "0.002",
            "0.030",
            "0.03",
            "0.3",
            "−0.06",
            "−0.84",
            "0.72",
            "3.31",
            "2.91",
            "0.4",
            "0.53",
        ),
    ],
    "Expansion and contraction": [
        *("0.01", "0.3", "0.6", "1.2", "2.5", "−0.36", "−0.47", "0.3", "0.01", "0.3", "0.3"),
    ],
    "The link over training": [
        *("0.1", "0.12", "0.21", "−0.09", "0.02", "0.18", "0.68"),
        *("0.15", "0.09", "0.20", "0.08", "−0.16", "0.32"),  # of four seeds, below
        *("0.18", "0.04", "0.32", "0.01", "−0.12", "0.14"),
        *("0.04", "0.00", "0.08", "4.42"),
    ],
    "Dot product or cosine": ["0.1"],
}


@pytest.mark.parametrize("title", ELSEWHERE)
def test_numbers_of_the_index_are_those_of_the_records(title):
    text = sections()[title]
    for (section, name), sentences in SAID.items():
        if section == title:
            facts = known(name)
            for sentence in sentences:
                said = sentence.format(**facts)
                assert said in text
                text = text.replace(said, "")
    assert re.findall(r"−?\d+\.\d+", text) == ELSEWHERE[title]


def test_four_seeds_and_the_other_four_of_the_link():
    text = sections()["The link over training"]
    record = recorded()["link-over-training"]
    found = quantities(record.study, record.runs)["symmetry_excess"]

    def said(variant: str, seeds: range) -> str:
        x = interval([found[variant][seed] for seed in seeds])
        return f"{x.mean:.2f}, interval {x.low:.2f} to {x.high:.2f}".replace("-", "−")

    first = [said(x, range(4)) for x in ("bidirectional", "causal")]
    assert f"(bidirectional {first[0]}; causal {first[1]})" in text
    rest = [said(x, range(4, 8)).replace(", ", " (") + ")" for x in ("bidirectional", "causal")]
    assert f"alone they give {rest[0]} and {rest[1]}" in text
    ends = sorted(found["causal"].values())
    assert f"between {Number(ends[5]):.2f} and {Number(ends[7]):.2f}, the others" in text
    assert f"between {Number(ends[0]):.2f} and {Number(ends[4]):.2f}." in text
    assert min(found["bidirectional"].values()) > 0.1


def test_the_ledger_tells_of_the_longer_search():
    said = recorded()["which-weights"].study.claim["finding"]
    assert (
        "trained {bits[trained]:.2f}, v,o frozen {bits[vo-frozen]:.2f}, q,k frozen "
        "{bits[qk-frozen]:.2f}, all identity {bits[all-identity]:.2f}."
    ).format(**known("which-weights-tuned")) in said


def test_two_versions_differ_by_as_much_as_the_index_says():
    """Two studies have runs of the same settings and seeds, made with different code."""

    def bits(name: str, variant: str) -> dict[int, float]:
        final = [x for x in recorded()[name].runs if x.job.stage == "final"]
        return {x.job.seed: x.numbers["bits"] for x in final if x.job.variant == variant}

    most: list[float] = []
    for variant in ("trained", "vo-frozen"):
        first, again = bits("which-weights", variant), bits("which-weights-tuned", variant)
        most.append(max(abs(first[seed] - again[seed]) for seed in first))
    said = f"up to {most[0]:.3f} (trained) and {most[1]:.3f} (frozen values and outputs"
    assert said in sections()["Which weights"]


def test_the_table_of_the_index_says_the_verdicts_of_the_records():
    text = (DOCS / "studies" / "index.md").read_text()
    for name, results in recorded().items():
        assert re.search(rf"\({name}\.md\) \([T0-9, ]+\) \| {results.about['recorded']} \|", text)


def test_costs_of_the_studies_are_those_of_the_records():
    guide = (DOCS / "studies.md").read_text()
    for name, results in recorded().items():
        cost = duration(sum(x.seconds for x in results.runs))
        assert re.search(rf"\| `{name}` \| .* \| {cost} \|", guide), (name, cost)


def test_what_characters_cost():
    """Entropy of a character, and of a character given the one before, over the whole text."""
    text, symbols = _encoded("austen")
    pairs = np.bincount(text[:-1].numpy().astype(int) * symbols + text[1:].numpy())

    def bits(counts: Any) -> float:
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log2(p)).sum())

    alone = bits(np.bincount(text.numpy()))
    second = bits(pairs) - alone
    said = f"cost {alone:.2f} bits if only their frequencies are known and {second:.2f} if"
    assert said in plain((DOCS / "studies" / "index.md").read_text())
