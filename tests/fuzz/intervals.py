"""Intervals of `Fit.summary` hold what they promise: coverage over series from known models.

python tests/fuzz/intervals.py --rounds 500 --seed 7
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from scipy import stats

import cumulant as cm
from cumulant.filtering.summary import Estimate
from fuzz import driver

F = cm.filtering
LEVELS = (0.9, 0.95)


def two_means() -> tuple[cm.filtering.ReadyModel, int]:
    """Means and a shared variance, well apart; 200 steps."""
    return (
        F.switching_mean_variance(["low", "high"], switching="mean").replace(
            transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64),
            emission_bias=torch.tensor([[-1.0], [2.0]], dtype=torch.float64),
            emission_noise=torch.full((1, 1), 0.8, dtype=torch.float64),
        ),
        200,
    )


def two_variances() -> tuple[cm.filtering.ReadyModel, int]:
    """Means and variances that switch; 300 steps."""
    return (
        F.switching_mean_variance(["low", "high"]).replace(
            transition=torch.tensor([[0.95, 0.05], [0.1, 0.9]], dtype=torch.float64),
            emission_bias=torch.tensor([[0.0], [1.5]], dtype=torch.float64),
            emission_noise=torch.tensor([[[0.25]], [[4.0]]], dtype=torch.float64),
        ),
        300,
    )


MODELS: dict[str, Callable[[], tuple[cm.filtering.ReadyModel, int]]] = {
    "two means": two_means,
    "two variances": two_variances,
}


def covered(name: str, rounds: int, seed: int) -> dict[tuple[str, str, float], int]:
    """How often the interval of each parameter holds the truth."""
    model, steps = MODELS[name]()
    draws = torch.Generator().manual_seed(seed)
    found: dict[tuple[str, str, float], int] = {}
    for _ in range(rounds):
        y = F.sample(model, steps, generator=draws).observations
        fit = F.fit(model, y, throw=False)
        truth = {(x.regime, x.label): x.value for x in _true(fit, model)}
        for level in LEVELS:
            for x in fit.summary(level=level).estimates:
                low, high = x.interval(level)
                key = (x.regime, x.label, level)
                inside = low <= truth[x.regime, x.label] <= high
                found[key] = found.get(key, 0) + int(inside)
    return found


def _true(fit: cm.filtering.Fit, model: cm.filtering.ReadyModel) -> list[Estimate]:
    """The true numbers in the places of the fitted ones."""
    from dataclasses import replace

    return list(replace(fit, model=model).summary().estimates)


def check(rounds: int, seed: int) -> str | None:
    """The first parameter whose coverage is off by more than chance; None if none is."""
    for name in MODELS:
        for (regime, label, level), inside in covered(name, rounds, seed).items():
            test = stats.binomtest(inside, rounds, level).pvalue
            told = f"{name}, {regime} {label}: {inside} of {rounds} at {level:.0%}"
            sys.stdout.write(f"{told} (p = {test:.3f})\n")
            if test < 1e-3:
                return told
    return None


def main() -> int:
    """The command: exit code 1 if an interval holds the truth too rarely or too often."""
    given = driver.options(__doc__, rounds=200)
    wrong = check(given.rounds, given.seed)
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
