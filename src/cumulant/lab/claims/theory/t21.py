"""T21: the capacity of a dense memory, the error of one update, and classes of heads."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Memory, memory
from cumulant.core.typed import linalg
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap

FLIPS = 0.1

CLAIM = Claim(
    id="T21",
    title="Capacity, retrieval and classes of heads",
    evidence="simulation",
    statement="The number of random patterns that a modern Hopfield network stores grows "
    "exponentially with the dimension, and one update ends within an explicit bound of the "
    "pattern. Heads fall into four classes by how many keys hold 0.90 of the weight.",
    source="proofs draft, section B; Ramsauer et al. (2021), Theorems 3 and 5",
    formula=r"\|f(\xi) - x_i\| \le 2 (N-1) M \exp\left(-\beta\left(\Delta_i"
    r" - 2 M \|\xi - x_i\|\right)\right), \qquad"
    r" \Delta_i = \min_{j \ne i} \langle x_i, x_i - x_j \rangle",
    bounds="Recall rates have a standard error of about 0.01, so 0.05 is five of them. If capacity "
    "grew as a power of d, each dimension would add fewer and fewer bits; nearest-pattern lookup "
    "with a tenth of the signs flipped adds 0.53 (1 minus the binary entropy of 0.1), slightly "
    "less at finite d: 0.45. The published constants have four decimals.",
    recorded="holds",
    tests=("tests/laws/test_hopfield.py", "tests/memory/test_dense_memory.py"),
    rules=table("""
      statement:
        bound_gap ≤ 1e-11: relative error of the bound against its formula
        worst_ratio ≤ 1.000000001: largest error of one update over its bound
        recall_gap ≤ 0.05: largest error of the recall rate against the closed form
        growth ≥ 0.45: bits of capacity that one more dimension adds
        published_gap ≤ 0.0001: the theorem's c against two published
        wrong_classes ≤ 0: counts of keys, or classes of heads, unlike the closed form for scores
            that fall in a straight line
      noted:
        vacuous: share of bounds above 2M, which are vacuous
    """),
    finding="The bound was never exceeded; {vacuous:.0%} of the bounds were vacuous. Each "
    "additional dimension multiplies the number of random patterns recalled by {factor:.2f}.",
    caption="Left: share of corrupted sign patterns recalled as more are stored, against the "
    "closed form of nearest-pattern lookup; the curves move right by the same distance for each "
    "step in d. Right: errors of single updates stay below the bound.",
)


def recalled(d: int, count: int) -> float:
    """Chance that none of the other random patterns is as near to the corrupted one as its own.

    With f signs flipped, another pattern lies at a distance of Binomial(d, 1/2) from the query. It
    does harm at distance f or less, unless it is the same pattern.
    """
    binomial: Any = import_module("scipy.stats").binom
    f = np.arange(d + 1)
    harmless = binomial.sf(f, d, 0.5) + 0.5**d
    return float((binomial.pmf(f, d, FLIPS) * harmless ** (count - 1)).sum())


def measured(trial: Trial, d: int, count: int, asked: int) -> float:
    """Share of patterns that one update of the library's memory recalls.

    One update and a cosine of 0.99, as the closed form counts: later updates can still decide a
    tie, and a blend of two near patterns is not the pattern.
    """
    seeds = range(1000 * trial.seed, 1000 * trial.seed + math.ceil(asked / min(count, 400)))
    runs = [
        memory.recall(
            lambda x: Memory(x, beta=8.0), d, [count], flips=FLIPS, overlap=0.99, steps=1,
            queries=400, seed=seed,
        ).rate[0]
        for seed in seeds
    ]  # fmt: skip
    return sum(runs) / len(runs)


def bounds(trial: Trial) -> tuple[Tensor, Tensor, Tensor, float]:
    """(error, bound as written, the library's bound, share of vacuous ones), pair by pair."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    vacuous: list[Tensor] = []
    for n in range(trial.size(40, 10)):
        x, beta = trial.normal(2 + n % 7, 3 + n % 10), 10 ** (1.5 * float(trial.uniform(1)) - 0.5)
        i = torch.arange(40) % len(x)
        xi = x[i] + 10 ** (-2 * trial.uniform(40, 1)) * trial.normal(40, x.shape[-1])
        network = Memory(x, beta=beta)
        gaps = (x * x).sum(-1)[:, None] - x @ x.mT
        separation = gaps.fill_diagonal_(math.inf).amin(-1)[i]
        M, r = linalg.vector_norm(x, dim=-1).max(), linalg.vector_norm(xi - x[i], dim=-1)
        bound = 2 * (len(x) - 1) * M * torch.exp(-beta * (separation - 2 * M * r))
        error = linalg.vector_norm(network.retrieve(xi).state - x[i], dim=-1)
        found.append((error, bound, network.error_bound(xi, i)))
        vacuous.append(bound > 2 * M)
    error, bound, ours = (torch.cat(x) for x in zip(*found, strict=True))
    return error, bound, ours, float(torch.cat(vacuous).double().mean())


def wrong_classes() -> int:
    """Heads whose count or class is not that of geometric weights.

    With scores −s j for j = 0, ..., N − 1 the k largest weights hold (1 − e^(−sk)) / (1 − e^(−sN))
    of the mass, so k90 is the least k above −log(1 − 0.9 (1 − e^(−sN))) / s.
    """
    n, steps = 128, torch.logspace(-4, 1, 60, dtype=torch.float64)
    key = -torch.arange(n, dtype=torch.float64)[:, None].expand(60, n, 1)
    found = memory.classify(steps[:, None, None], key, scale=1.0)
    held = 0.9 * -torch.expm1(-steps * n)
    k = (-torch.log1p(-held) / steps).ceil().long()
    number = 1 + sum((k / n <= edge).long() for edge in (1 / 2, 1 / 8, 1 / 32))
    return int((found.k90[:, 0] != k).sum()) + int((found.number != number).sum())


def crossing(x: list[float], rate: Tensor) -> float:
    """Where the line through the rates is one half."""
    slope, start = np.polyfit(x, rate.numpy(), 1)
    return float((0.5 - start) / slope)


def measure(trial: Trial) -> Found:
    """Random patterns of signs against a closed form; random networks against the bound."""
    error, bound, ours, vacuous = bounds(trial)
    dims = (12, 16, 20) if trial.quick else (12, 16, 20, 24)
    asked = trial.size(4800, 2400)
    counts = {d: [2 ** (round(0.59 * d) + k) for k in range(-2, 3)] for d in dims}
    rates = {d: torch.tensor([measured(trial, d, n, asked) for n in counts[d]]) for d in dims}
    closed = {d: torch.tensor([recalled(d, n) for n in counts[d]]) for d in dims}
    # Where the rate passes 1/2, by a line through it; then bits for each dimension.
    half = [crossing([math.log2(n) for n in counts[d]], rates[d]) for d in dims]
    slope = float(np.polyfit(dims, half, 1)[0])
    numbers = {
        "bound_gap": gap(ours / bound, 1),
        "worst_ratio": (error / bound).max(),
        "recall_gap": (max(gap(rates[d], closed[d]) for d in dims), 0.5 / math.sqrt(asked)),
        "growth": slope,
        "published_gap": max(
            abs(memory.capacity(20, radius=3.0).c - 3.1546),
            abs(memory.capacity(75, radius=1.0).c - 1.3718),
        ),
        "wrong_classes": wrong_classes(),
        "vacuous": vacuous,
    }
    return Found(numbers, factor=2**slope, bound=bound, counts=counts, error=error, rates=rates)


def draw(figure: Any, seen: Any) -> None:
    """Share recalled against what is stored; errors of updates against their bound."""
    left, right = figure.subplots(1, 2)
    for i, (d, counts) in enumerate(seen.counts.items()):
        bits = np.log2(counts)
        fine = np.linspace(float(bits[0]) - 1, float(bits[-1]) + 1, 40)
        curve = [recalled(d, int(2**x)) for x in fine]
        left.plot(fine, curve, color=series_color(i), linewidth=1.2, label=f"d = {d}")
        left.plot(bits, seen.rates[d], "o", color=series_color(i))
    left.set(xlabel="log₂ of stored patterns", ylabel="share recalled", ylim=(0, 1))
    left.set_title("measured (dots), closed form (lines)")
    left.legend()
    bound, error = seen.bound, seen.error
    there = (bound > 1e-12) & (bound < 1e6) & (error > 1e-12)
    right.loglog(bound[there], error[there], ".", color=series_color(0), markersize=3)
    right.loglog([1e-12, 10], [1e-12, 10], color=MUTED, linewidth=1)
    right.set(xlabel="bound", ylabel="error of one update", title="error never above bound")
