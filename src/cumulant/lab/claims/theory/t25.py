"""T25: switching linear-Gaussian filters, against the enumeration of all paths of modes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.figures import INK, series_color
from cumulant.filtering import SwitchingLinearGaussian, filter, sample
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, standard_error

# Two modes that the observations leave open; dynamics W, b, Q and emission C, R of each.
TRANSITION = torch.tensor([[0.85, 0.15], [0.35, 0.65]], dtype=torch.float64)
INITIAL = torch.tensor([0.6, 0.4], dtype=torch.float64)
DRAWS = 10  # sets of series, whose spread is the error
W, B, Q, C, R = torch.tensor(
    [[0.9, -0.5], [0.5, -1.5], [0.2, 1.5], [1.0, 0.8], [1.0, 2.0]], dtype=torch.float64
)

CLAIM = Claim(
    id="T25",
    title="Message passing with collapsed Gaussians",
    evidence="identity",
    statement="In a switching linear-Gaussian model, messages collapsed by M-projection carry "
    "modes and states: GPB1 keeps one Gaussian, GPB2 one per mode, and IMM mixes before it "
    "predicts.",
    correction="The mixture for mode k has the weights P(k|i) πᵢ, not πᵢ as in eq. (8); with an "
    "observation its likelihood under each pair of modes enters these weights and the mode "
    "message; eq. (5) omits it.",
    slips=("The last k modes, on which GPB(k) conditions, are A^(t−k+2:t+1), not A^(t−k:t+1).",),
    source="message passing draft, eqs. (5) to (8)",
    formula=r"P(A_t = i \mid A_{t+1} = k, o) \propto \pi_i \, P(k \mid i)\, L_{ik}(o), \qquad "
    r"P(A_{t+1} = k \mid o) \propto \sum_i \pi_i \, P(k \mid i)\, L_{ik}(o)",
    recorded="holds with a correction",
    systems=("GPB1", "GPB2", "IMM"),
    tests=("tests/laws/test_message_passing.py", "tests/filtering/test_filters.py"),
    rules=table("""
      statement:
        drafted_weights ≤ 1e-11: largest error of E[x₂ | mode 2] with the weights πᵢ of eq. (8)
        drafted_modes ≤ 1e-11: largest error of the mode probabilities without the likelihood, eq.
            (5)
      correction:
        corrected_weights ≤ 1e-11: the same with transition[i, k] πᵢ: moments of the library's GPB2
            after two steps
        corrected_modes ≤ 1e-11: the same with the pairwise likelihood: modes of GPB2 after two
            observations
        exact_scheme ≤ 1e-11: E[x] and log-likelihood of the filter that collapses nothing
      control:
        written_out ≤ 1e-11: E[x] of the library's GPB1 and IMM at all steps, against their
            recursions in plain torch
        long_memory ≤ 1e-11: E[x] by GPB(k) up to step k, for k = 3 and the length of the series
      noted:
        gpb1_error: rms error of E[x] by GPB1 at the last step
        imm_error: rms error of E[x] by IMM at the last step
        gpb2_error: rms error of E[x] by GPB2 at the last step
        gpb3_error: rms error of E[x] by GPB3 at the last step
    """),
    finding="With the weights πᵢ of eq. (8) the conditional means are off by up to "
    "{drafted_weights:.2f}, and without the likelihood the mode probabilities by up to "
    "{drafted_modes:.2f}; corrected, GPB2 agrees with enumeration over two steps. After {steps} "
    "steps it is off by {gpb2_error:.3f} rms, IMM by {imm_error:.3f}, GPB1 by {gpb1_error:.3f}, "
    "GPB(3) by {gpb3_error:.4f}; GPB(k) is exact up to step k.",
    caption="Left: the probability of the second mode; without the likelihood it ignores the "
    "observations. Right: the cost of collapsing. GPB(k) is exact for k steps; the larger k, the "
    "closer it stays to the enumeration of all paths.",
)


class Known(NamedTuple):
    """After a step: modes ``(S, M)``, the state given each mode ``(S, M)``, and its mean."""

    modes: Tensor
    mode_means: Tensor
    mode_variances: Tensor
    mean: Tensor
    log_likelihood: Tensor


def mixed(weights: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of mixtures over the last dimension; weights need not sum to one."""
    p = weights / weights.sum(-1, keepdim=True)
    mean = (p * means).sum(-1)
    return mean, (p * (variances + (means - mean[..., None]) ** 2)).sum(-1)


def moved(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The state one step on, in each next mode: a new last dimension."""
    return W * mean[..., None] + B, W**2 * variance[..., None] + Q


def enumerated(y: Tensor) -> list[Known]:
    """All 2^t paths of modes ``(S, paths)``, each with its own Kalman filter on a line."""
    log_weight = INITIAL.log().expand(len(y), -1)
    last = torch.arange(2).expand(len(y), -1)
    mean, variance = torch.zeros_like(log_weight), torch.ones_like(log_weight)
    found: list[Known] = []
    for now in y.T:
        log_weight = (log_weight[..., None] + TRANSITION.log()[last]).flatten(1)
        mean, variance = (x.flatten(1) for x in moved(mean, variance))
        last = torch.arange(2).repeat(log_weight.shape[1] // 2).expand(len(y), -1)
        if not now.isnan().any():
            c, spread = C[last], C[last] ** 2 * variance + R[last]
            surprise = now[:, None] - c * mean
            log_weight = log_weight - (surprise**2 / spread + (2 * torch.pi * spread).log()) / 2
            mean = mean + variance * c / spread * surprise
            variance = variance * R[last] / spread
        total = log_weight.logsumexp(1, keepdim=True)
        weight = torch.unflatten((log_weight - total).exp(), 1, (-1, 2)).mT  # (S, M, paths)
        split = (torch.unflatten(x, 1, (-1, 2)).mT for x in (mean, variance))
        overall = (weight.flatten(1) * torch.unflatten(mean, 1, (-1, 2)).mT.flatten(1)).sum(1)
        found.append(Known(weight.sum(-1), *mixed(weight, *split), overall, total[:, 0]))
    return found


def heard(y: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kalman's update in each mode (last dimension): mean, variance and log-likelihood."""
    spread = C**2 * variance + R
    surprise = y - C * mean
    log_likelihood = -(surprise**2 / spread + (2 * torch.pi * spread).log()) / 2
    return mean + variance * C / spread * surprise, variance * R / spread, log_likelihood


def one_gaussian(y: Tensor) -> Tensor:
    """E[x] after each step by GPB1: M filters from one Gaussian, then one Gaussian again."""
    modes, means = INITIAL.expand(len(y), -1), list[Tensor]()
    mean, variance = torch.zeros(len(y)).double(), torch.ones(len(y)).double()
    for now in y.T:
        each, spreads, logs = heard(now[:, None], *moved(mean, variance))
        modes = ((modes @ TRANSITION).log() + logs).softmax(-1)
        mean, variance = mixed(modes, each, spreads)
        means.append(mean)
    return torch.stack(means, 1)


def interacting(y: Tensor) -> Tensor:
    """E[x] after each step by IMM: mix for each next mode by P(i|j), then M filters."""
    modes, means = INITIAL.expand(len(y), -1), list[Tensor]()
    mean, variance = torch.zeros(len(y), 2).double(), torch.ones(len(y), 2).double()
    for now in y.T:
        joint = (modes[..., None] * TRANSITION).mT  # (S, next, before)
        start, spread = mixed(joint, mean[:, None], variance[:, None])
        mean, variance, logs = heard(now[:, None], W * start + B, W**2 * spread + Q)
        modes = (joint.sum(-1).log() + logs).softmax(-1)
        means.append((modes * mean).sum(-1))
    return torch.stack(means, 1)


def library() -> SwitchingLinearGaussian:
    """The same model for `cumulant.filtering`."""
    one = torch.ones(1, dtype=torch.float64)
    return SwitchingLinearGaussian(
        transition=TRANSITION,
        initial=INITIAL,
        dynamics=W[:, None, None],
        dynamics_bias=B[:, None],
        dynamics_noise=Q[:, None, None],
        emission=C[:, None, None],
        emission_noise=R[:, None, None],
        initial_mean=0 * one,
        initial_covariance=one[:, None],
    )


def rms(misses: Tensor) -> tuple[float, float]:
    """Root mean square and its standard error, from the spread over repeated draws.

    A few series make most of it, so the squares of a single draw say too little of its error.
    """
    each = torch.unflatten(misses, 0, (DRAWS, -1)).square().mean(-1).sqrt()
    return float(misses.square().mean().sqrt()), standard_error(each)


def measure(trial: Trial) -> Found:
    """Two steps decide the formulas; eight compare the schemes."""
    model, steps = library(), trial.size(9, 8)
    draws = torch.Generator().manual_seed(trial.seed)
    series = DRAWS * trial.size(400, 100)
    y = sample(model, steps, series, generator=draws).observations[..., 0]
    exact = enumerated(y)

    # Eq. (8): the state in mode k at step 2, before its observation, mixed over the mode i before.
    unseen = y[:, :2].clone()
    unseen[:, 1] = torch.nan
    first, ahead = exact[0], enumerated(unseen)[1]
    each = [x.mT for x in moved(first.mode_means, first.mode_variances)]  # (S, next, before)
    as_drafted, _ = mixed(first.modes[:, None, :], *each)
    two = filter(model, unseen[..., None], collapse="gpb2")

    # Eq. (5): the modes move by the transition alone, whatever was observed.
    modes = [INITIAL.expand(len(y), -1) @ TRANSITION]
    for _ in range(steps - 1):
        modes.append(modes[-1] @ TRANSITION)
    seen = filter(model, y[:, :2, None], collapse="gpb2")
    whole = filter(model, y[..., None], collapse="exact")
    truth = torch.stack([x.mean for x in exact], 1)
    means = {
        name: filter(model, y[..., None], collapse=collapse).mean[..., 0]
        for name, collapse in {"gpb1": "gpb1", "imm": "imm", "gpb2": "gpb2", "gpb3": 3}.items()
    }
    misses = {name: mean - truth for name, mean in means.items()}
    longest = filter(model, y[..., None], collapse=steps).mean[..., 0]
    numbers = {
        "drafted_weights": gap(as_drafted, ahead.mode_means),
        "drafted_modes": gap(modes[1], exact[1].modes),
        "corrected_weights": max(
            gap(two.mode_means[:, 1, :, 0], ahead.mode_means),
            gap(two.mode_covariances[:, 1, :, 0, 0], ahead.mode_variances),
        ),
        "corrected_modes": gap(seen.mode_probabilities[:, 1], exact[1].modes),
        "exact_scheme": max(
            gap(whole.mean[..., 0], truth), gap(whole.log_likelihood, exact[-1].log_likelihood)
        ),
        "written_out": max(gap(means["gpb1"], one_gaussian(y)), gap(means["imm"], interacting(y))),
        "long_memory": max(gap(longest, truth), gap(means["gpb3"][:, :3], truth[:, :3])),
        **{f"{name}_error": rms(miss[:, -1]) for name, miss in misses.items()},
    }
    return Found(numbers, steps=steps, exact=exact, misses=misses, model=model, modes=modes, y=y)


def draw(figure: Any, seen: Any) -> None:
    """The second mode's probability in one series; what each collapse costs."""
    left, right = figure.subplots(1, 2)
    time = range(1, seen.steps + 1)
    # The series in which the observations say most about the mode.
    known = torch.stack([x.modes[:, 1] for x in seen.exact], 1)
    chosen = int(known.std(1).argmax())
    model: SwitchingLinearGaussian = seen.model
    ours = filter(model, seen.y[chosen, :, None], collapse="gpb2").mode_probabilities[:, 1]
    left.plot(time, known[chosen], color=INK, label="all paths")
    left.plot(time, ours, "o", ms=4, color=series_color(2), label="GPB2")
    drafted = [float(m[chosen, 1]) for m in seen.modes]
    left.plot(time, drafted, ":", color=series_color(1), label="eq. (5)")
    left.set(xlabel="step", ylabel="P(mode 2 | observations)", ylim=(-0.02, 1.02))
    left.legend()
    for i, (name, miss) in enumerate(seen.misses.items()):
        line = miss.square().mean(0).sqrt()
        there = [t for t in time if line[t - 1] > 1e-9]
        look = {"ms": 3.5, "color": series_color((1, 4, 2, 0)[i]), "label": name.upper()}
        right.semilogy(there, line[[t - 1 for t in there]], "o-", **look)
    right.set(xlabel="step", ylabel="rms error of E[x]")
    right.legend()
