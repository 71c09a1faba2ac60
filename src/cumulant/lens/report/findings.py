"""The findings in sentences, each with its numbers, and valid for these texts only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from statistics import mean, median
from typing import TYPE_CHECKING

from cumulant.lens.report import naming
from cumulant.lens.report.finding import Finding
from cumulant.lens.report.numbers import column, has
from cumulant.pages import count, deviation, number, share

if TYPE_CHECKING:
    from cumulant.lens.report.page import ReportData

__all__ = ["Finding", "findings"]

CLASSES = ("I", "II", "III", "IV")
# From this value on, a score matrix counts as nearly symmetric or nearly positive.
NEARLY = 0.9
# Below this relative deviation, a partition function counts as nearly constant.
STEADY = 0.1


def findings(data: ReportData) -> list[Finding]:
    """The findings that have numbers: named heads first, then where weight goes, then theory.

    Kinds of heads that there are not come last.
    """
    found = [x for x in (question(data) for question in QUESTIONS) if x is not None]
    return sorted(found, key=lambda x: x.headline.startswith(f"{naming.NONE} "))


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


def _texts(data: ReportData) -> int:
    """Number of texts: after a long run, the tokens table has only the first ones."""
    known = data.run.get("texts")
    if isinstance(known, int):
        return known
    return int(data.tokens["input"].nunique()) if has(data.tokens, "input") else 0


def _inputs(data: ReportData) -> int:
    """Number of inputs (texts or windows of them), or 0 if unknown."""
    known = data.run.get("inputs")
    return known if isinstance(known, int) else 0


def _here(data: ReportData) -> str:
    texts = _texts(data)
    return "on this text" if texts == 1 else f"on these {texts:,} texts" if texts else "here"


def _first(data: ReportData) -> str:
    """For expensive statistics, which are computed for one text."""
    return "on the first text" if _texts(data) > 1 else _here(data)


def _classes(data: ReportData) -> Finding | None:
    kinds = [k for k in column(data.heads, "class") if k in CLASSES]
    if not kinds:
        return None
    counts = {k: kinds.count(k) for k in CLASSES}
    most = max(CLASSES, key=lambda k: counts[k])
    meaning = {
        "I": "on more than half of the keys",
        "II": "on one eighth to one half of the keys",
        "III": "on 1/32 to 1/8 of the keys",
        "IV": "on at most 1/32 of the keys",
    }[most]
    rest = ", ".join(f"{counts[k]} of class {k}" for k in CLASSES)
    return Finding(
        f"Class {most} is the most common: {counts[most]} of {count(len(kinds), 'head')}",
        f"{share(counts[most] / len(kinds))} of the heads put 90% of their weight "
        f"{meaning} for the median token {_here(data)}. In total: {rest}.{_short(data)}",
        "Share of the visible keys needed for 90% of the weight, median over tokens.",
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
    if has(data.tokens, "visible", "input") and data.tokens["input"].nunique() >= _inputs(data):
        visible = data.tokens["visible"]  # perhaps a million rows: pandas' own arithmetic
        spread = float((1 / visible[visible > 0]).mean())
        uniform = f" (uniform attention would put {share(spread)} there)"
    logits = data.tokens["sink_logit_mass"] if has(data.tokens, "sink_logit_mass") else None
    sinks = logits is not None and bool((logits > 0).any())
    what = "the first token or the sink logit" if sinks else "the first token"
    where = (
        f"the share exceeds one half in {_listed(heavy)}"
        if heavy
        else f"the largest share is {share(means[top])}, in layer {top}"
    )
    strongest = naming.ranked(data, "sink_mass")[0]
    return Finding(
        f"{share(everything)} of attention goes to the sink, most in {naming.said(strongest)} "
        f"({share(strongest.score)})",
        f"Averaged over heads and tokens, {share(everything)} of the weight is on {what} "
        f"{_here(data)}{uniform}; {where}.",
        "Mean of sink_mass over the tokens of each head, then over heads.",
        "maps",
        "sink_mass",
        (strongest.layer, strongest.head),
    )


def _expansion(data: ReportData) -> Finding | None:
    attention = _numbers(data, "layers", "attention_expansion")
    norm = _numbers(data, "layers", "norm_contraction")
    if not attention:
        return None
    middle, above = median(attention), sum(x > 1 for x in attention)
    verb = "pushes tokens apart" if middle > 1 else "does not push tokens apart"
    sentence = (
        f"Attention with its residual multiplies distances between tokens by {number(middle)} "
        f"(median over pairs and layers), and by more than 1 in {above} of "
        f"{count(len(attention), 'layer')}"
    )
    if norm:
        below = sum(x < 1 for x in norm)
        sentence += (
            f"; the normalizations of a layer together multiply them by {number(median(norm))}, "
            f"and by less than 1 in {below} of {count(len(norm), 'layer')}"
        )
    feed = _numbers(data, "layers", "feed_forward_expansion")
    if feed:
        sentence += f"; the feed-forward sublayer by {number(median(feed))}"
    return Finding(
        f"Attention {verb}: ×{number(middle)}",
        sentence + f", {_here(data)}.",
        "Ratios of distances after and before, for pairs of tokens of one text (T14, T15).",
        "depth",
    )


def _energy(data: ReportData) -> Finding | None:
    change = _numbers(data, "heads", "energy_change")
    if not change:
        return None
    falling = sum(x < 0 for x in change)
    rises = _numbers(data, "heads", "energy_rises")
    sentence = (
        f"One update from the query to the mean key lowers the mean Hopfield energy in "
        f"{falling} of {count(len(change), 'head')} {_here(data)}; the median change is "
        f"{number(median(change))}"
    )
    if rises:
        sentence += (
            f"; the energy rose for {share(mean(rises)) if any(rises) else 'none'} of the tokens"
        )
    return Finding(
        f"Energy falls in {falling} of {count(len(change), 'head')}",
        sentence + ".",
        "E(E[k]) − E(q) with the keys as patterns (T19); in theory never positive.",
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
        f"Only in such heads (symmetry and definiteness at least {NEARLY}) is the step close to "
        f"the gradient of G. Symmetry has median {number(middle)} and maximum {number(top)}.",
        "W_q W_kᵀ of each head; computed from the weights alone, so the same for every text.",
        "maps",
        "symmetry",
    )


def _shape(data: ReportData) -> Finding | None:
    p = _numbers(data, "layers", "gaussianity_p")
    if not p:
        return None
    rejected = sum(x < 0.05 for x in p)
    headline = f"Hidden states are not Gaussian in {rejected} of {count(len(p), 'layer')}"
    if rejected == 0:
        headline = "Hidden states are compatible with a Gaussian in every layer"
    sentence = (
        f"Normality is rejected at 5% in {rejected} of {count(len(p), 'layer')} {_here(data)}. The "
        "test assumes independent points, which tokens of one text are not"
    )
    residual = _numbers(data, "layers", "rank_residual")
    if len(residual) > 1:
        sentence += f". The rank residual goes from {number(residual[0])} to {number(residual[-1])}"
    return Finding(
        headline,
        sentence + ".",
        "Energy statistic on the leading principal directions, against its null distribution.",
        "shape",
    )


def _sensitivity(data: ReportData) -> Finding | None:
    pairs = [
        (float(a), float(b))
        for a, b in zip(
            column(data.layers, "sensitivity_qk"),
            column(data.layers, "sensitivity_vo"),
            strict=False,
        )
        if a is not None and b is not None
    ]
    if not pairs:
        return None
    second = sum(b > a for a, b in pairs)
    names = ["query and key weights", "value and output weights"]
    middle = [median(a for a, _ in pairs), median(b for _, b in pairs)]
    layers = len(pairs) - second
    if (2 * second, middle[1]) > (len(pairs), middle[0]):
        names, middle, layers = names[::-1], middle[::-1], second
    return Finding(
        f"The output depends more on {names[0]}: {layers} of {count(len(pairs), 'layer')}",
        f"A random 1% change in the {names[0]} of one layer moves the output by "
        f"{number(middle[0], 2)}%; in the {names[1]}, by {number(middle[1], 2)}% (medians over "
        f"layers, {_first(data)}). The former is larger in {layers} of "
        f"{count(len(pairs), 'layer')}.",
        "Gradients of the output, to first order in the change (T23).",
        "sensitivity",
    )


def _partition(data: ReportData) -> Finding | None:
    if not has(data.partition, "radius", "relative_sd"):
        return None
    plain, centered = _deviations(data, centered=False), _deviations(data, centered=True)
    rows = centered or plain
    if not rows:
        return None
    steady = max(takewhile(lambda r: rows[r] < STEADY, rows), default=None)
    headline = (
        f"The partition function is nearly constant up to radius {steady:g}"
        if steady is not None
        else f"The partition function is not constant, even at radius {min(rows):g}"
    )
    near = [r for r in rows if r <= 1] or [min(rows)]
    # Farther out, a few directions dominate, and the number reflects how many were drawn.
    far = [r for r in rows if 1 < r <= 4 and r > near[-1]]
    first, last = near[0], near[-1]
    span = f"radius {first:g}"
    values = deviation(rows[first])
    if last > first:
        span, values = f"radii {first:g} to {last:g}", f"{values} to {deviation(rows[last])}"
    about = " with the mean embedding removed" if centered else ""
    sentence = f"Over random directions, Z varies by {values} (relative sd) at {span}{about}"
    if far:
        sentence += f", and by {deviation(rows[far[-1]])} at radius {far[-1]:g}"
    if centered and last in plain:
        sentence += f"; with the mean left in, by {deviation(plain[last])} at radius {last:g}"
    return Finding(
        headline,
        sentence + ".",
        "Z(c) = sum over words of exp⟨v, c⟩ for input embeddings (T31); at radius 1 the scores "
        "⟨v, c⟩ have standard deviation 1.",
        "partition",
    )


def _deviations(data: ReportData, *, centered: bool) -> dict[float, float]:
    """Radius to relative deviation of Z, for plain or centered embeddings."""
    radii, spread = column(data.partition, "radius"), column(data.partition, "relative_sd")
    kinds = column(data.partition, "centered") or [False] * len(radii)
    rows = zip(radii, spread, kinds, strict=True)
    return dict(sorted((float(r), float(s)) for r, s, k in rows if s is not None and k == centered))


def _short(data: ReportData) -> str:
    """Class IV needs at least 32 keys."""
    if not has(data.tokens, "visible"):
        return ""
    most = int(data.tokens["visible"].max())
    return f" Class IV needs at least 32 keys (here {most})." if most < 32 else ""


def _points(data: ReportData) -> int:
    """Number of attention outputs the link was fitted to: at most 64, from the first text."""
    return min(64, len(data.texts[0].tokens)) if data.texts else 0


def _link(data: ReportData) -> Finding | None:
    linear = _numbers(data, "heads", "link_linear")
    trained = _numbers(data, "heads", "link_trained")
    if not linear:
        return None
    middle = median(linear)
    sentence = (
        f"The best linear map predicts the true link with a median cross-validated R² of "
        f"{number(middle)} over {count(len(linear), 'head')} {_first(data)}"
    )
    if trained:
        beaten = sum(x > 0 for x in trained)
        sentence += (
            f"; the trained map has a median R² of {number(median(trained))} and beats a constant "
            f"in {beaten} of {count(len(trained), 'head')}"
        )
    exists = _numbers(data, "heads", "link_exists")
    if exists:
        sentence += f"; a link exists for {share(mean(exists))} of the means tested"
    headline = f"The best linear map explains R² {number(middle)} of the link"
    if trained:  # as T29 judges: the trained weights, not the best map
        fit = number(median(trained))
        headline = f"The trained weights explain R² {fit} of the link"
    sentence += (
        ". That a linear map fits says little: it fits queries never trained for these keys as "
        "well (T29)"
    )
    points, size = _points(data), int(data.facts.get("head size") or 0)
    if points:
        sentence += f". The fit used {points} points in {size} dimensions; more would fit better"
        if points < 2 * size:
            headline = f"Too few tokens to judge the link ({points})"
    return Finding(
        headline,
        sentence + ".",
        "Natural parameters solved at attention outputs, against linear maps of the outputs (T29).",
        "link",
    )


QUESTIONS: tuple[Callable[[ReportData], Finding | None], ...] = (
    naming.induction,
    naming.previous,
    _sinks,
    naming.duplicate,
    naming.distance,
    _classes,
    _expansion,
    _energy,
    _potential,
    _link,
    _shape,
    _sensitivity,
    _partition,
)
