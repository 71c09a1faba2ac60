"""From runs to a verdict: quantities by variant and seed, intervals over seeds, the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from cumulant.lab.claims.claim import OPEN, Measured, Rule, Verdict, verdict
from cumulant.lab.studies.running import Run
from cumulant.lab.studies.study import Judged, Study
from cumulant.lab.studies.tasks import objective_of

__all__ = ["Interval", "Judgment", "best", "interval", "judge", "judgments", "quantities", "table"]

Quantities = dict[str, dict[str, dict[int, float]]]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval (Student's t); unbounded for one seed."""

    mean: float
    half: float
    seeds: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """The mean of some seeds.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, half=2.484..., seeds=3)
    """
    x = np.array(values, dtype=float)
    if len(x) < 2:
        return Interval(float(x.mean()) if len(x) else math.nan, math.inf, len(x))
    spread = float(x.std(ddof=1)) / math.sqrt(len(x))
    quantile = float(_stats().t.ppf(0.975, len(x) - 1))
    return Interval(float(x.mean()), quantile * spread, len(x))


def _stats() -> Any:
    return import_module("scipy.stats")


def best(study: Study, runs: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """Rate and beta of each variant: the smallest mean validation over the search's seeds."""
    objective = objective_of(study.task)
    chosen: dict[str, tuple[float, float]] = {}
    for variant in study.variants:
        scores: dict[tuple[float, float], list[float]] = {}
        for run in _of(runs, variant, "tuning"):
            score = run.numbers.get("validation", run.numbers[objective])
            scores.setdefault((run.job.rate, run.job.beta), []).append(score)
        first = (study.tuning.rates[0], study.tuning.betas[0])
        chosen[variant] = min(scores, key=lambda x: float(np.mean(scores[x])), default=first)
    return chosen


def _of(runs: Sequence[Run], variant: str, stage: str) -> list[Run]:
    return [x for x in runs if x.job.variant == variant and x.job.stage == stage]


def quantities(study: Study, runs: Sequence[Run]) -> Quantities:
    """Value by quantity, variant and seed.

    Beside the numbers of final runs there are two of the search: `diverged`, the share of its runs
    that did, and `max_rate`, the log10 of the largest rate at which no run of the seed diverged and
    neither did any at a smaller one (the smallest rate less one step of the grid if all did).
    """
    found: Quantities = {}
    for variant in study.variants:
        for run in _of(runs, variant, "final"):
            for name, x in run.numbers.items():
                found.setdefault(name, {}).setdefault(variant, {})[run.job.seed] = x
        search = _of(runs, variant, "tuning")
        for seed in {x.job.seed for x in search}:
            mine = [x for x in search if x.job.seed == seed]
            share = sum(x.diverged is not None for x in mine) / len(mine)
            found.setdefault("diverged", {}).setdefault(variant, {})[seed] = share
            rates = sorted(study.tuning.rates)
            if len(rates) > 2:
                bad = {x.job.rate for x in mine if x.diverged is not None}
                fine = next((k for k, rate in enumerate(rates) if rate in bad), len(rates))
                top = rates[fine - 1] if fine else rates[0] ** 2 / rates[1]
                found.setdefault("max_rate", {}).setdefault(variant, {})[seed] = math.log10(top)
    return found


@dataclass(frozen=True)
class Judgment:
    """A line of the rule with what came of it.

    ``interval`` is that of the quantity, of the difference to the hardest rival (positive is
    better), or of the rank correlation.
    """

    rule: Judged
    interval: Interval
    measured: Measured
    rival: str = ""

    def as_dict(self) -> dict[str, Any]:
        told = {"name": self.rule.name, "says": self.rule.says, "form": self.rule.form}
        low, high = self.interval.low, self.interval.high
        numbers = {"mean": self.interval.mean, "low": low, "high": high}
        return {**told, **numbers, "rival": self.rival, "outcome": self.measured.outcome}


def judge(study: Study, found: Quantities, rule: Judged) -> Judgment:
    """One line of the rule: passed or failed if the interval lies on one side of the bound."""
    rival = ""
    if rule.ranks:
        x = _correlation(study, found, rule)
    elif rule.below or rule.above:
        x, rival = _hardest(found, rule)
    else:
        x = interval([*found.get(rule.quantity, {}).get(rule.variant, {}).values()])
    if rule.form == "noted":
        return Judgment(rule, x, Measured(rule.name, x.mean, Rule(rule.says)), rival)
    doubt = 2 * x.half  # the other end of the interval
    if rule.at_most is not None:
        refuted = rule.at_most + doubt
        made = Rule(rule.says, rule.form, high=rule.at_most, refuted=refuted)
        return Judgment(rule, x, _measured(rule.name, x.high, x, made), rival)
    bound = rule.by if rule.at_least is None else rule.at_least
    made = Rule(rule.says, rule.form, low=bound, refuted=bound - doubt)
    tie = rival and x.low == x.high == bound  # as when all runs diverged: nobody is ahead
    end = math.nextafter(bound, -math.inf) if tie else x.low
    return Judgment(rule, x, _measured(rule.name, end, x, made), rival)


def _measured(name: str, end: float, x: Interval, rule: Rule) -> Measured:
    if not math.isfinite(x.half) and math.isfinite(x.mean):  # one seed decides nothing
        bound = rule.low if rule.high is None else rule.high
        beside = (bound or 0.0) + (-1.0 if rule.high is None else 1.0)
        unbounded = replace(rule, refuted=-math.inf if rule.high is None else math.inf)
        return Measured(name, beside, unbounded)
    return Measured(name, end, rule, error=x.half / 1.96)


def _hardest(found: Quantities, rule: Judged) -> tuple[Interval, str]:
    """The difference to the rival that it beats by least, seed by seed."""
    table = found.get(rule.quantity, {})
    mine = table.get(rule.variant, {})
    rows: list[tuple[Interval, str]] = []
    for rival in rule.below or rule.above:
        theirs, sign = table.get(rival, {}), 1.0 if rule.below else -1.0
        pairs = [sign * (theirs[seed] - mine[seed]) for seed in mine if seed in theirs]
        rows.append((interval(pairs), rival))
    return min(rows, key=lambda row: row[0].low if math.isfinite(row[0].half) else row[0].mean)


def _correlation(study: Study, found: Quantities, rule: Judged) -> Interval:
    """Spearman's correlation over variants, one for each seed of the first quantity; the second
    enters by its mean over seeds."""
    first, second = found.get(rule.quantity, {}), found.get(rule.ranks, {})
    names = [n for n in study.variants if n in first and n in second]
    if len(names) < 3:
        return Interval(math.nan, math.inf, 0)
    other = [float(np.mean([*second[n].values()])) for n in names]
    seeds = sorted({seed for n in names for seed in first[n]})
    values: list[float] = []
    for seed in seeds:
        mine = [first[n].get(seed, math.nan) for n in names]
        rank: Any = _stats().spearmanr(mine, other)
        values.append(0.0 if math.isnan(rank.statistic) else float(rank.statistic))
    return interval(values)


def judgments(study: Study, runs: Sequence[Run]) -> tuple[list[Judgment], Verdict]:
    """Every line of the rule, and the verdict, by the rule of the ledger."""
    found = quantities(study, runs)
    made = [judge(study, found, rule) for rule in study.rules]
    return made, verdict([x.measured for x in made]) if made else OPEN


def table(study: Study, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each variant: what the search chose, divergences, means and half widths."""
    found = quantities(study, runs)
    rows: list[dict[str, Any]] = []
    for variant in study.variants:
        final, search = _of(runs, variant, "final"), _of(runs, variant, "tuning")
        row: dict[str, Any] = {"variant": variant}
        if final:
            row |= {"rate": final[0].job.rate, "beta": final[0].job.beta}
        row["diverged"] = _share([*search, *final])
        for name, by_variant in found.items():
            if name != "diverged" and variant in by_variant:
                x = interval([*by_variant[variant].values()])
                row[name] = [x.mean, x.half]
        rows.append(row)
    order: Mapping[str, None] = dict.fromkeys(n for row in rows for n in row)
    return [{n: row[n] for n in order if n in row} for row in rows]


def _share(runs: Sequence[Run]) -> str:
    return f"{sum(x.diverged is not None for x in runs)} of {len(runs)}"
