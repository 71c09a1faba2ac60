"""Random switching models with missing data: the compiled recursion against the torch recursion.

    python tests/fuzz/filters.py --rounds 500 --seed 0

Every field of the posterior and of the smoother, and the gradient of a random combination of the
former in every parameter and the observations, by both. Models have 1 to 4 modes, 0 to 5 states and
1 to 3 observations; parameters are shared, by mode, by step or by series; some take inputs, some
see states exactly.
In half of the rounds the second derivatives are compared as well.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import torch

import cumulant as cm
from fuzz import driver

D = torch.float64
BOUND = 1e-9
FIELDS = (
    *("step_log_likelihood", "mode_probabilities", "predicted_mode_probabilities"),
    *("mean", "covariance", "mode_means", "mode_covariances", "predicted_mean"),
    *("predicted_covariance", "observation_mean", "observation_covariance"),
)
SMOOTHED = (
    *("mode_probabilities", "transition_probabilities", "mean", "covariance", "mode_means"),
    *("mode_covariances", "initial_mode_probabilities", "initial_mean", "initial_covariance"),
)


class Case(NamedTuple):
    """A model's parameters, a series, inputs, and how to filter."""

    given: dict[str, torch.Tensor]
    y: torch.Tensor
    inputs: torch.Tensor | None
    collapse: str | int


def draw(seed: int) -> Case:
    """A random model with a series that has about a fifth of its values missing."""
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    M, n, p = (int(rng.integers(*r)) for r in ((1, 5), (0, 6), (1, 4)))
    batch = [(), (2,), (9,), (2, 3)][rng.integers(4)]
    collapse = ["gpb1", "gpb2", "imm", 3, "exact"][rng.integers(5)]
    T = int(rng.integers(1, 5 if collapse in ("exact", 3) else 13))

    def lead(may_change: bool) -> tuple[int, ...]:
        """Shared by modes, by mode, by step, or by series and step."""
        kind = rng.integers(6)
        if kind == 0:
            return ()
        if kind < 4 or not may_change:
            return (M,)
        return (T, M) if kind == 4 else (*batch, 1, M)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=D)

    def covariance(k: int, may_change: bool = True) -> torch.Tensor:
        x = normal(*lead(may_change), k, k)
        return x @ x.mT + 0.2 * torch.eye(k, dtype=D)

    transition = (2 * normal(*(lead(True) or (M,))[:-1], M, M)).softmax(-1)
    if rng.random() < 0.3 and M > 1:  # an impossible transition
        transition[..., 0, -1] = 0.0
        transition = transition / transition.sum(-1, keepdim=True)
    given = {
        "transition": transition,
        "initial": normal(M).softmax(-1),
        "dynamics": 0.6 * normal(*lead(True), n, n),
        "dynamics_noise": covariance(n),
        "emission": normal(*lead(True), p, n),
        "emission_noise": covariance(p),
        "initial_mean": normal(*lead(False), n),
        "initial_covariance": covariance(n, may_change=False),
    }
    if rng.random() < 0.7:
        given["dynamics_bias"] = normal(*lead(True), n)
        given["emission_bias"] = normal(*lead(True), p)
    if rng.random() < 0.25 and 0 < p <= n:  # the first states are seen as they are
        given["emission"] = torch.eye(p, n, dtype=D)
        given["emission_noise"] = torch.zeros(p, p, dtype=D)
    inputs = None
    if rng.random() < 0.3:
        given["dynamics_input"] = normal(*lead(True), n, 2)
        given["emission_input"] = normal(M, p, 2)
        inputs = normal(T, 2)
    y = 2 * normal(*batch, T, p)
    y[torch.rand(y.shape, generator=g) < 0.2] = torch.nan
    y[..., 0, 0] = 0.5  # a series must have some observation
    return Case(given, y, inputs, collapse)


def answers(case: Case, engine: str, seed: int, second: bool) -> list[torch.Tensor]:
    """Fields, then gradients, then gradients of a combination of the gradients."""
    leaves = {name: x.clone().requires_grad_() for name, x in case.given.items()}
    y = case.y.clone().requires_grad_()
    at, g = [*leaves.values(), y], torch.Generator().manual_seed(seed)

    def mixed(xs):
        return sum((x * torch.randn(x.shape, generator=g, dtype=D)).sum() for x in xs)

    def slopes(value, **how):
        return torch.autograd.grad(value, at, allow_unused=True, materialize_grads=True, **how)

    with cm.engine(engine):
        model = cm.filtering.SwitchingLinearGaussian(**leaves)
        post = cm.filtering.filter(model, y, collapse=case.collapse, inputs=case.inputs)
        fields = [getattr(post, name) for name in FIELDS]
        first = slopes(mixed(fields), create_graph=second)
        out = [*fields, *first]
        return [x.detach() for x in (*out, *(slopes(mixed(first)) if second else ()))]


def smoothed(case: Case, engine: str) -> list[torch.Tensor]:
    """Every field of the smoother."""
    with cm.engine(engine), torch.no_grad():
        model = cm.filtering.SwitchingLinearGaussian(**case.given)
        post = cm.filtering.filter(model, case.y, collapse=case.collapse, inputs=case.inputs)
        found = cm.filtering.smooth(model, post)
        return [getattr(found, name) for name in SMOOTHED]


def once(seed: int) -> float:
    """The largest difference of a round, relative to the size of what differs."""
    case, second = draw(seed), seed % 2 == 0
    engines = ("torch", "native")
    pairs = [
        *zip(*(answers(case, e, seed, second) for e in engines), strict=True),
        *zip(*(smoothed(case, e) for e in engines), strict=True),
    ]
    worst = 0.0
    for a, b in pairs:
        if a.numel():
            found = float((a - b).abs().max() / (1 + a.abs().max()))
            worst = found if not found <= worst else worst  # keeps NaN
    return worst


def check(seed: int) -> str | None:
    """What is wrong with a round, if anything."""
    found = once(seed)
    return None if found <= BOUND else f"differs by {found:.2g}\n{draw(seed)}"


if __name__ == "__main__":
    sys.exit(driver.main(check, "filters", __doc__, rounds=200))
