"""What the numbers say, in sentences: each with its figures, and true of these texts only."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from cumulant.lens.report.numbers import column, count, has, number, share

if TYPE_CHECKING:
    from cumulant.lens.report.page import ReportData

__all__ = ["Finding", "findings"]

CLASSES = ("I", "II", "III", "IV")
# From here on we call a score matrix nearly symmetric, and nearly positive.
NEARLY = 0.9


class Finding(NamedTuple):
    """A headline, the sentence with the numbers, where they come from, and its section's name."""

    headline: str
    sentence: str
    evidence: str
    section: str


def findings(data: ReportData) -> list[Finding]:
    """The findings for which there are numbers, in the order of the page's sections."""
    found = (question(data) for question in QUESTIONS)
    return [finding for finding in found if finding is not None]


def _numbers(data: ReportData, table: str, name: str) -> list[float]:
    return [float(x) for x in column(getattr(data, table), name) if x is not None]


def _by_layer(data: ReportData, name: str) -> dict[int, list[float]]:
    """The heads' values of a column, layer by layer."""
    layers: dict[int, list[float]] = {}
    rows = zip(column(data.heads, "layer"), column(data.heads, name), strict=False)
    for layer, value in rows:
        if value is not None:
            layers.setdefault(int(layer), []).append(float(value))
    return layers


def _listed(layers: list[int]) -> str:
    """`layer 3`, `layers 1, 2 and 5`, `layers 1 to 4`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {', '.join(map(str, layers[:-1]))} and {layers[-1]}"


def _here(data: ReportData) -> str:
    texts = int(data.tokens["input"].nunique()) if has(data.tokens, "input") else 0
    return "on this text" if texts == 1 else f"on these {texts} texts" if texts else "here"


def _classes(data: ReportData) -> Finding | None:
    kinds = [k for k in column(data.heads, "class") if k in CLASSES]
    if not kinds:
        return None
    counts = {k: kinds.count(k) for k in CLASSES}
    most = max(CLASSES, key=lambda k: counts[k])
    meaning = {
        "I": "spread over more than half of the keys",
        "II": "over an eighth to a half of the keys",
        "III": "over a thirty-second to an eighth of the keys",
        "IV": "on few keys",
    }[most]
    rest = ", ".join(f"{counts[k]} of class {k}" for k in CLASSES)
    return Finding(
        f"Class {most} is the most frequent: {counts[most]} of {count(len(kinds), 'head')}",
        f"{share(counts[most] / len(kinds))} of the heads put 90% of their weight "
        f"{meaning} {_here(data)}; in all {rest}.",
        "Fewest keys holding 90% of the weight, median over tokens, against the keys in sight.",
        "classes",
    )


def _sinks(data: ReportData) -> Finding | None:
    layers = _by_layer(data, "sink_mass")
    if not layers:
        return None
    everything = mean(x for values in layers.values() for x in values)
    means = {layer: mean(values) for layer, values in layers.items()}
    heavy = sorted(layer for layer, value in means.items() if value > 0.5)
    top = max(means, key=lambda k: means[k])
    uniform = ""
    if has(data.tokens, "visible"):
        visible = data.tokens["visible"]  # perhaps a million rows: pandas' own arithmetic
        spread = float((1 / visible[visible > 0]).mean())
        uniform = f" (uniform attention would put {share(spread)} there)"
    where = (
        f"in {_listed(heavy)} it is more than half"
        if heavy
        else f"it is most in layer {top}, {share(means[top])}"
    )
    return Finding(
        f"{share(everything)} of attention rests on the sink",
        f"Averaged over heads and tokens, {share(everything)} of the weight sits on the first "
        f"token or the sink logit {_here(data)}{uniform}; {where}.",
        "Mean of sink_mass over the tokens of each head, then over heads.",
        "maps",
    )


def _expansion(data: ReportData) -> Finding | None:
    attention = _numbers(data, "layers", "attention_expansion")
    norm = _numbers(data, "layers", "norm_contraction")
    if not attention:
        return None
    middle, above = median(attention), sum(x > 1 for x in attention)
    verb = "pushes tokens apart" if middle > 1 else "does not push tokens apart"
    sentence = (
        f"Median distance ratio of token pairs across attention with its residual: "
        f"{number(middle)} (median of layers), above 1 in {above} of "
        f"{count(len(attention), 'layer')}"
    )
    if norm:
        below = sum(x < 1 for x in norm)
        sentence += (
            f"; normalization has a ratio of {number(median(norm))}, "
            f"below 1 in {below} of {count(len(norm), 'layer')}"
        )
    feed = _numbers(data, "layers", "feed_forward_expansion")
    if feed:
        sentence += f"; the feed-forward sublayer {number(median(feed))}"
    return Finding(
        f"Attention {verb}: ×{number(middle)}",
        sentence + f", {_here(data)}.",
        "Ratios of distances after and before, pairs of tokens of one text (T14, T15).",
        "depth",
    )


def _energy(data: ReportData) -> Finding | None:
    change = _numbers(data, "heads", "energy_change")
    if not change:
        return None
    falling = sum(x < 0 for x in change)
    rises = _numbers(data, "heads", "energy_rises")
    sentence = (
        f"One update from the query to the mean key lowers the Hopfield energy on average in "
        f"{falling} of {count(len(change), 'head')} {_here(data)}, median change "
        f"{number(median(change))}"
    )
    if rises:
        sentence += f"; it rose for {share(mean(rises))} of the tokens"
    return Finding(
        f"Energy falls in {falling} of {count(len(change), 'head')}",
        sentence + ".",
        "E(E[k]) − E(q) with the keys as patterns (T19); theory says never positive.",
        "energy",
    )


def _potential(data: ReportData) -> Finding | None:
    if not has(data.heads, "symmetry", "definiteness"):
        return None
    pairs = [
        (s, d)
        for s, d in zip(
            column(data.heads, "symmetry"), column(data.heads, "definiteness"), strict=True
        )
        if s is not None and d is not None
    ]
    if not pairs:
        return None
    good = sum(s >= NEARLY and d >= NEARLY for s, d in pairs)
    middle, top = median(s for s, _ in pairs), max(s for s, _ in pairs)
    return Finding(
        f"Nearly symmetric, positive scores: {good} of {count(len(pairs), 'head')}",
        f"Only there is G a potential of the step (symmetry and definiteness at least {NEARLY}); "
        f"symmetry has median {number(middle)} and reaches {number(top)}.",
        "W_q W_k' of each head, from the weights alone: the same for every text.",
        "maps",
    )


def _shape(data: ReportData) -> Finding | None:
    p = _numbers(data, "layers", "gaussianity_p")
    if not p:
        return None
    rejected = sum(x < 0.05 for x in p)
    headline = f"Hidden states are not Gaussian in {rejected} of {count(len(p), 'layer')}"
    if rejected == 0:
        headline = "No layer's hidden states are told from Gaussian"
    sentence = (
        f"Normality is rejected at 5% in {rejected} of {count(len(p), 'layer')} {_here(data)} "
        f"({number(0.05 * len(p))} expected by chance)"
    )
    residual = _numbers(data, "layers", "rank_residual")
    if len(residual) > 1:
        sentence += f"; the rank residual goes from {number(residual[0])} to {number(residual[-1])}"
    return Finding(
        headline,
        sentence + ".",
        "Energy statistic on leading principal directions against its own null.",
        "shape",
    )


def _partition(data: ReportData) -> Finding | None:
    if not has(data.partition, "radius", "relative_sd"):
        return None
    radii = column(data.partition, "radius")
    spread = column(data.partition, "relative_sd")
    rows = sorted((float(r), float(s)) for r, s in zip(radii, spread, strict=True) if s is not None)
    (small, low), (large, high) = rows[0], rows[-1]
    steady = "nearly constant" if low < 0.1 else "not constant"
    return Finding(
        f"The partition function is {steady} at radius {small:g}",
        f"Over random directions Z varies by {share(low)} (relative standard deviation) at radius "
        f"{small:g}, and by {share(high)} at radius {large:g}.",
        "Z(c) = sum over words of exp⟨v, c⟩ for input embeddings (T31).",
        "partition",
    )


def _link(data: ReportData) -> Finding | None:
    linear = _numbers(data, "heads", "link_linear")
    trained = _numbers(data, "heads", "link_trained")
    if not linear:
        return None
    middle = median(linear)
    sentence = (
        f"The best linear map explains a median of {number(middle)} (R², cross-validated) of the "
        f"true link over {count(len(linear), 'head')} {_here(data)}"
    )
    if trained:
        beaten = sum(x > 0 for x in trained)
        sentence += (
            f"; the trained map has median R² {number(median(trained))}, better than a constant "
            f"in {beaten} of {count(len(trained), 'head')}"
        )
    exists = _numbers(data, "heads", "link_exists")
    if exists:
        sentence += f"; a link exists at {share(mean(exists))} of the means tried"
    how = "close to linear" if middle > 0.9 else "partly linear" if middle > 0.5 else "not linear"
    return Finding(
        f"The link is {how}: R² {number(middle)}",
        sentence + ".",
        "Natural parameters solved at attention outputs, against linear maps of them (T29).",
        "link",
    )


QUESTIONS: tuple[Callable[[ReportData], Finding | None], ...] = (
    _classes,
    _sinks,
    _expansion,
    _energy,
    _potential,
    _link,
    _shape,
    _partition,
)
