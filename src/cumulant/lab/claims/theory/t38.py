"""T38: inference in the walk of contexts by mean field, against quadrature and particles.

Shape legend: T contexts, d dimensions, V words, K points of a rule on the sphere, P particles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from cumulant import Empirical, VonMisesFisher, dynamics
from cumulant.core.typed import functions, linalg
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, standard_error

CLAIM = Claim(
    id="T38",
    title="Arora's walk and McBal's mean field",
    evidence="simulation",
    statement="The random walk of a context vector may be equivalent to the mean-field reading of "
    "transformers: naive mean-field inference of contexts and unseen words alternates attention "
    "over the vocabulary and normalization, and finds what the exact posterior has.",
    correction="The equations are attention and normalization, but what they find is the posterior "
    "only where couplings are weak beside the spread of contexts and words, and the second-order "
    "term of the free energy, which needs no exact posterior, tells where. The walk the authors "
    "mean is slow, and there mean field is off.",
    source="proofs draft, last sentence; Arora et al. 2016; McBal's mean field",
    formula=r"m_w = \nabla G_{\mathrm{words}}(m_c), \qquad m_c = A_d(\|\eta\|) "
    r"\frac{\eta}{\|\eta\|}, \quad \eta_t = \kappa (m_{t-1} + m_{t+1}) + \sum v_{\mathrm{seen}} "
    r"+ m_w, \qquad F \ge -\log Z",
    bounds="Models have 12 contexts, a word each, every second one seen and drawn from the walk "
    "itself; stiffness κ from d/8 (no walk to speak of) to 8 d (slow), word vectors of mean square "
    "length from d/8 to 2 d. Free energies agree if they differ by less than 0.1 nats for each "
    "context, a tenth of a word's perplexity, and differ if by 0.5; contexts agree within a tenth "
    "of the sphere's radius, and differ at 0.3, in the worst model. A model counts as weak if its "
    "second-order term is at most 0.05 nats for each context, half of what may be missing.",
    recorded="holds with a correction",
    systems=("random walk of a context vector, by mean field",),
    tests=("tests/laws/test_walk.py",),
    rules=table("""
      statement:
        equations_gap ≤ 1e-9: contexts and words found against torch's attention and ratios of
            Bessel functions
        free_energy_gap ≤ 0.1 (refuted at 0.5): F + log Z for each context in nats, largest over all
            models
        context_error ≤ 0.1 (refuted at 0.3): distance of contexts from the exact means, root mean
            square over places, largest over all models
      correction:
        weak_free_energy ≤ 0.1 (refuted at 0.5): F + log Z for each context, largest over weak
            models
        weak_context ≤ 0.1 (refuted at 0.3): distance of contexts from the exact means, largest over
            weak models
      control:
        bound_broken ≤ 1e-6: how far −F is above log Z, largest: it is a lower bound
        quadrature_gap ≤ 1e-6: log Z by a rule of half as many points more, largest difference
        particles_gap ≤ 4: log Z by particles against quadrature in d = 3, in standard errors
      noted:
        weak_share: share of models that are weak
        slow_free_energy: F + log Z for each context, mean over models with κ at least 4 d
        slow_context: distance of contexts, mean over the same
        slow_spread: 1 − |m|² of mean field over the exact one, mean over the same: below 1 it is
            overconfident
        second_order_share: second-order term over F + log Z, median over weak models
        word_error: largest change of an unseen word's probabilities (total variation)
        constant_normalizer: what the walk's own P(w|c) = e^⟨v,c⟩ / Z(c) changes in log Z beyond a
            constant, nats for each context, largest: it is not a product of couplings
        wide_free_energy: F + log Z for each context in d = 12 by particles, κ = 4 d
        wide_error: distance of contexts there
    """),
    finding="The mean-field equations are attention over the vocabulary and the sphere's "
    "normalization, to {equations_gap:.0e}. Their free energy lies above −log Z by up to "
    "{free_energy_gap:.2f} nats for each context and their contexts are off by up to "
    "{context_error:.2f}; in the weak ones ({weak_count} of {models} models) by up to "
    "{weak_free_energy:.2f} and {weak_context:.2f}. In slow walks the gap is "
    "{slow_free_energy:.2f} nats, contexts are off by {slow_context:.2f}, and mean field leaves "
    "them {slow_spread:.2f} of their true spread. In 12 dimensions (κ = 4 d, particles) the gap is "
    "{wide_free_energy:.2f} and contexts are off by {wide_error:.2f}.",
    caption="Left: what the free energy of mean field lacks for each context, against the "
    "stiffness of the walk; dashed, 0.1 nats. Right: distance of its contexts from the exact "
    "means. One line for each mean square length of word vectors, mean over models in d = 2 and 3.",
    size=(7.4, 3.2),
)

PLACES, WORDS = 12, 40
STIFFNESS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # times d
LENGTHS = (0.125, 0.5, 2.0)  # mean square of word vectors, times d
WEAK, SLOW = 0.05, 4.0


@dataclass(frozen=True)
class Model:
    """A vocabulary ``(V, d)``, vectors seen ``(T, d)``, words not seen ``(T,)``, a stiffness."""

    words: Tensor
    seen: Tensor
    unseen: Tensor
    stiffness: float

    @property
    def dimension(self) -> int:
        return self.words.shape[1]


def model(trial: Trial, d: int, stiffness: float, length: float) -> Model:
    """Words of a walk of the model's kind; every second one is seen."""
    words = math.sqrt(length) * trial.normal(WORDS, d)
    context, seen = normalize(trial.normal(d), dim=-1), list[Tensor]()
    for place in range(PLACES):
        if place:
            step = VonMisesFisher(context, stiffness * d)
            context = step.sample(n=1, generator=trial.generator).reshape(d)
        picked = int(torch.multinomial((words @ context).softmax(-1), 1, generator=trial.generator))
        seen.append(words[picked])
    unseen = (torch.arange(PLACES) % 2).double()
    return Model(words, torch.stack(seen) * (1 - unseen)[:, None], unseen, stiffness * d)


def inferred(one: Model) -> dynamics.WalkMeanField:
    """Contexts by mean field: damped steps downhill, then the same solution precisely."""
    given: Any = {"unseen": one.unseen, "stiffness": one.stiffness}
    words = Empirical(one.words)
    rough = dynamics.walk_mean_field(words, one.seen, tol=1e-2, **given)
    given |= {"start": rough.context.detach(), "tol": 1e-11}
    for solver in ("anderson", "broyden"):  # fast, but they may leave for another solution
        found = dynamics.walk_mean_field(words, one.seen, solver=solver, throw=False, **given)
        if bool(found.solution.status.converged) and found.free_energy <= rough.free_energy:
            return found
    return dynamics.walk_mean_field(words, one.seen, max_steps=200_000, **given)


def equations_gap(one: Model, found: dynamics.WalkMeanField) -> float:
    """What was found against attention and normalization, by torch and numpy."""
    m, v, d = found.context, one.words, one.dimension
    attended = scaled_dot_product_attention(m[None], v[None], v[None], scale=1.0)[0]
    beside = torch.stack(
        [sum((m[s] for s in (t - 1, t + 1) if 0 <= s < PLACES), 0 * m[0]) for t in range(PLACES)]
    )
    eta = one.stiffness * beside + one.seen + one.unseen[:, None] * attended
    size = linalg.vector_norm(eta, dim=-1, keepdim=True)
    special: Any = import_module("scipy.special")
    k = size.numpy()
    length = functions.from_numpy(special.ive(d / 2, k) / special.ive(d / 2 - 1, k))
    return max(gap(found.word, attended), gap(m, length * eta / size))


def rule(d: int, points: int) -> tuple[Tensor, Tensor]:
    """Points ``(K, d)`` on the circle or the sphere, and weights that sum to 1."""
    angle = 2 * math.pi * torch.arange(2 * points, dtype=torch.float64) / (2 * points)
    ring = torch.stack([angle.cos(), angle.sin()], -1)
    if d == 2:
        return ring, torch.full((len(ring),), 1 / len(ring), dtype=torch.float64)
    height, weight = (functions.from_numpy(x) for x in np.polynomial.legendre.leggauss(points))
    around = (1 - height.square()).sqrt()[:, None, None] * ring
    up = height[:, None, None].expand(-1, len(ring), 1)
    weights = (weight / 2)[:, None].expand(-1, len(ring)) / len(ring)
    return torch.cat([around, up], -1).flatten(0, 1), weights.flatten()


@dataclass(frozen=True)
class Exact:
    """log Z, the means of contexts, and the laws ``(T, V)`` of a word at each place."""

    log_z: float
    context: Tensor
    word: Tensor


def exact(one: Model, points: int, normalized: bool = False) -> Exact:
    """By quadrature, forwards and backwards along the walk.

    With ``normalized`` words have their own P(w | c), as the walk's authors define it.
    """
    c, weight = rule(one.dimension, points)
    score = c @ one.words.mT
    total = score.logsumexp(-1)
    pull = one.seen @ c.mT + one.unseen[:, None] * total  # (T, K)
    if normalized:
        pull = pull - total
    top = pull.amax(-1, keepdim=True)
    pull = (pull - top).exp()
    pass_on = (one.stiffness * (c @ c.mT - 1)).exp()
    log_z = float(top.sum()) + (PLACES - 1) * one.stiffness
    forward: list[Tensor] = []
    for place in range(PLACES):
        state = pull[place] * (pass_on @ (weight * forward[-1]) if place else 1.0)
        log_z += float((weight * state).sum().log())
        forward.append(state / (weight * state).sum())
    backward = [torch.ones_like(weight)]
    for place in range(PLACES - 1, 0, -1):
        state = pass_on @ (weight * pull[place] * backward[-1])
        backward.append(state / state.amax())
    both = weight * torch.stack(forward) * torch.stack(backward[::-1])
    both = both / both.sum(-1, keepdim=True)
    return Exact(log_z, both @ c, both @ score.softmax(-1))


def by_particles(trial: Trial, one: Model, count: int, runs: int) -> tuple[Tensor, Tensor]:
    """Estimates of log Z, one for each run, and the means of contexts over runs ``(T, d)``."""
    d, measure = one.dimension, Empirical(one.words)
    step = VonMisesFisher(torch.eye(d, dtype=torch.float64)[0], 0.0)
    log_z, means = list[float](), list[Tensor]()
    for _ in range(runs):
        paths, total = torch.empty(count, 0, d, dtype=torch.float64), 0.0
        for place in range(PLACES):
            if place:
                eta = one.stiffness * paths[:, -1]
                total += float(step.log_normalizer(eta[:1]))
                c = step.sample(eta, generator=trial.generator)[0]
            else:
                c = normalize(trial.normal(count, d), dim=-1)
            pull = c @ one.seen[place]
            if one.unseen[place]:
                pull = pull + one.unseen[place] * measure.log_normalizer(c)
            total += float(pull.logsumexp(0)) - math.log(count)
            kept = torch.multinomial(pull.softmax(0), count, True, generator=trial.generator)
            paths = torch.cat([paths, c[:, None]], 1)[kept]
        log_z.append(total)
        means.append(paths.mean(0))
    return torch.tensor(log_z, dtype=torch.float64), torch.stack(means).mean(0)


def away(ours: Tensor, truth: Tensor) -> float:
    """The root mean square over places of the distance between contexts."""
    return float((ours - truth).square().sum(-1).mean().sqrt())


def compared(one: Model, points: int) -> dict[str, float]:
    """Mean field beside quadrature, and quadrature beside a finer one."""
    found, truth = inferred(one), exact(one, points)
    ours = (found.context @ one.words.mT).softmax(-1)
    hidden = one.unseen > 0
    own = exact(one, points, normalized=True).log_z - truth.log_z
    steady = float(one.words.square().sum(-1).mean()) / (2 * one.dimension) + math.log(WORDS)
    spread = [1 - x.square().sum(-1) for x in (found.context, truth.context)]
    return {
        "stiffness": one.stiffness / one.dimension,
        "equations": equations_gap(one, found),
        "gap": (float(found.free_energy) + truth.log_z) / PLACES,
        "second": float(found.second_order) / PLACES,
        "away": away(found.context, truth.context),
        "spread": float((spread[0] / spread[1]).mean()),
        "word": float((ours - truth.word)[hidden].abs().sum(-1).max()) / 2,
        "finer": abs(exact(one, points + points // 2).log_z - truth.log_z),
        "normalizer": abs(own / PLACES + steady),
    }


def measure(trial: Trial) -> Found:
    """All stiffnesses and lengths in two and three dimensions; twelve dimensions by particles."""
    draws, ratios = trial.size(2, 1), STIFFNESS[::3] if trial.quick else STIFFNESS
    points = {2: 64} if trial.quick else {2: 96, 3: 28}
    rows: dict[tuple[int, float, float], list[dict[str, float]]] = {
        (d, ratio, length): [
            compared(model(trial, d, ratio, length), points[d]) for _ in range(draws)
        ]
        for d in points
        for ratio in ratios
        for length in LENGTHS
    }
    every = [row for each in rows.values() for row in each]
    weak = [row for row in every if row["second"] <= WEAK]
    slow = [row for row in every if row["stiffness"] >= SLOW]
    size, runs = trial.size(4000, 1000), trial.size(8, 4)
    checked = model(trial, 3, 0.5, 0.5)
    log_z, _ = by_particles(trial, checked, size, runs)
    off = (float(log_z.mean()) - exact(checked, 20).log_z) / standard_error(log_z)
    wide = [model(trial, 12, SLOW, 0.5) for _ in range(draws)]
    seen = [(inferred(one), *by_particles(trial, one, size, runs)) for one in wide]

    def largest(name: str, rows: list[dict[str, float]]) -> float:
        return max((row[name] for row in rows), default=math.nan)

    def mean(name: str, rows: list[dict[str, float]]) -> float:
        return sum(row[name] for row in rows) / max(1, len(rows))

    shares = sorted(row["second"] / row["gap"] for row in weak)
    numbers = {
        "equations_gap": largest("equations", every),
        "free_energy_gap": largest("gap", every),
        "context_error": largest("away", every),
        "weak_free_energy": largest("gap", weak),
        "weak_context": largest("away", weak),
        "bound_broken": max(0.0, max(-row["gap"] for row in every)),
        "quadrature_gap": largest("finer", every),
        "particles_gap": abs(off),
        "weak_share": len(weak) / len(every),
        "slow_free_energy": mean("gap", slow),
        "slow_context": mean("away", slow),
        "slow_spread": mean("spread", slow),
        "second_order_share": float(np.median(shares)) if shares else math.nan,
        "word_error": largest("word", every),
        "constant_normalizer": largest("normalizer", every),
        "wide_free_energy": sum(float(f.free_energy) + float(z.mean()) for f, z, _ in seen)
        / (PLACES * len(seen)),
        "wide_error": sum(away(f.context, c) for f, _, c in seen) / len(seen),
    }
    counts = {"weak_count": len(weak), "models": len(every)}
    return Found(numbers, rows=rows, ratios=ratios, dimensions=tuple(points), **counts)


def draw(figure: Any, seen: Any) -> None:
    """Gap of the free energy and distance of contexts against the stiffness."""
    left, right = figure.subplots(1, 2)
    for axes, name in ((left, "gap"), (right, "away")):
        for i, length in enumerate(LENGTHS):
            means = [
                np.mean([row[name] for d in seen.dimensions for row in seen.rows[d, ratio, length]])
                for ratio in seen.ratios
            ]
            label = f"|v|² = {length:g} d"
            axes.plot(seen.ratios, means, "o-", ms=4, color=series_color(i), label=label)
        axes.axhline(0.1, color=MUTED, lw=1, ls="--")
        axes.set(xscale="log", yscale="log", xlabel="stiffness κ / d")
        axes.set_xticks(seen.ratios, [f"{x:g}" for x in seen.ratios])
        axes.minorticks_off()
    left.set(ylabel="F + log Z, nats for each context")
    right.set(ylabel="distance of contexts")
    left.legend()
