"""Wake-sleep on a Helmholtz machine, against the gradient of the evidence lower bound."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cumulant.core.typed import linalg
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, median

CLAIM = Claim(
    id="wakesleep",
    title="Wake-sleep and the evidence lower bound",
    evidence="identity",
    statement="Wake-sleep on a Helmholtz machine ascends the evidence lower bound.",
    correction="Its wake phase does. Its sleep phase descends KL(p‖q) on the machine's own dreams, "
    "not the bound's KL(q‖p) on data: another gradient, which vanishes with the bound's only where "
    "q is the posterior.",
    theory="T42",
    source="main draft, §2.3, after Dayan et al. (1995) and Hinton et al. (1995)",
    formula=r"\nabla_\theta\, \mathrm{ELBO} = E_{q}\nabla_\theta \log p_\theta(x, h), \qquad "
    r"\nabla_\phi\, \mathrm{ELBO} = -\nabla_\phi \mathrm{KL}(q_\phi \| p_\theta) \ne "
    r"E_{p_\theta} \nabla_\phi \log q_\phi(h \mid x)",
    recorded="holds with a correction",
    systems=("Helmholtz machine", "wake-sleep"),
    tests=("tests/laws/test_neighbors.py",),
    rules=table("""
      statement:
        wake_gap ≤ 1e-10: wake phase in expectation, by its delta rules, against the bound's
            gradient, relative
        sleep_gap ≤ 1e-10: sleep phase in expectation, by its delta rule, against the bound's
            gradient, relative
      correction:
        wake_again ≤ 1e-10: the wake phase, as above
        dream_gap ≤ 1e-10: sleep phase against −∇KL(p‖q) over the machine's own joint law, relative
        posterior_gap ≤ 1e-10: both gradients in the recognition law, where it is the posterior
      noted:
        cosine: between the sleep phase and the bound's gradient, median over machines
        against: share of machines where the sleep phase descends the bound
    """),
    finding="The wake phase is the bound's gradient to {wake_gap:.0e}. The sleep phase misses it "
    "(median cosine {cosine:.2f}) and is the gradient of KL(p‖q) on dreams to {dream_gap:.0e}.",
    caption="Cosine between the sleep phase and the bound's gradient, for machines of growing "
    "weights.",
)

VISIBLE, HIDDEN = 4, 2


def bits(n: int) -> Tensor:
    """All rows of n zeros and ones."""
    return torch.tensor(list(product((0.0, 1.0), repeat=n)), dtype=torch.float64)


def log_joint(theta: Tensor) -> Tensor:
    """log p(x, h) over all states, ``(x, h)``: a prior on h, sigmoid units x given h."""
    x, h = bits(VISIBLE), bits(HIDDEN)
    prior, weights, offset = theta[:HIDDEN], theta[HIDDEN:-VISIBLE], theta[-VISIBLE:]
    on_h = (h * logsigmoid(prior) + (1 - h) * logsigmoid(-prior)).sum(-1)
    field = h @ weights.view(HIDDEN, VISIBLE) + offset
    sign = 2 * x - 1
    return logsigmoid(sign[:, None] * field).sum(-1) + on_h


def log_recognition(phi: Tensor) -> Tensor:
    """log q(h | x) over all states, one Bernoulli for each hidden unit and each x."""
    sign = 2 * bits(HIDDEN) - 1
    return logsigmoid(sign * phi.view(-1, 1, HIDDEN)).sum(-1)


def slope(value: Tensor, at: Tensor) -> Tensor:
    """The gradient of a value, its graph kept."""
    return torch.autograd.grad(value, at, retain_graph=True)[0]


def wake_rules(theta: Tensor, weight: Tensor) -> Tensor:
    """The wake phase as Hinton et al. write it: every unit learns what was seen less its chance.

    ``weight`` ``(x, h)`` is how often a state occurs: data, and hidden units by recognition.
    """
    x, h = bits(VISIBLE), bits(HIDDEN)
    prior, weights, offset = theta[:HIDDEN], theta[HIDDEN:-VISIBLE], theta[-VISIBLE:]
    chance = (h @ weights.view(HIDDEN, VISIBLE) + offset).sigmoid()
    missed = weight.mT @ x - weight.sum(0)[:, None] * chance  # (h, visible)
    above = weight.sum(0) @ h - weight.sum() * prior.sigmoid()
    return torch.cat([above, (h.mT @ missed).flatten(), missed.sum(0)])


def sleep_rule(phi: Tensor, weight: Tensor) -> Tensor:
    """The sleep phase in the same form; ``weight`` ``(x, h)`` is how often a state is dreamt."""
    chance = phi.view(-1, HIDDEN).sigmoid()
    return (weight @ bits(HIDDEN) - weight.sum(1, keepdim=True) * chance).flatten()


def one(trial: Trial, size: float) -> tuple[float, float, float, float]:
    """(wake gap, sleep gap, dream gap, cosine) of a random machine with random data."""
    theta = (size * trial.normal(HIDDEN + HIDDEN * VISIBLE + VISIBLE)).requires_grad_()
    phi = (size * trial.normal(2**VISIBLE * HIDDEN)).requires_grad_()
    data = trial.normal(2**VISIBLE).softmax(0)
    p, q = log_joint(theta), log_recognition(phi)
    fixed_p, fixed_q = p.detach(), q.detach()
    bound = (data[:, None] * q.exp() * (p - q)).sum()
    wake = wake_rules(theta.detach(), data[:, None] * fixed_q.exp())
    sleep = sleep_rule(phi.detach(), fixed_p.exp())
    dream = slope(-(fixed_p.exp() * (fixed_p - fixed_p.logsumexp(1, keepdim=True) - q)).sum(), phi)
    truth = slope(bound, phi)
    norm = linalg.vector_norm(truth)
    cosine = float((sleep * truth).sum() / linalg.vector_norm(sleep) / norm)
    return (
        gap(wake, slope(bound, theta)) / float(linalg.vector_norm(wake)),
        float(linalg.vector_norm(sleep - truth) / norm),
        gap(sleep, dream) / float(linalg.vector_norm(sleep)),
        cosine,
    )


def posterior_gap(trial: Trial) -> float:
    """A machine whose hidden units are independent given x: both gradients vanish there."""
    theta = trial.normal(HIDDEN + HIDDEN * VISIBLE + VISIBLE)
    weights = theta[HIDDEN:-VISIBLE].view(HIDDEN, VISIBLE)
    weights[0, VISIBLE // 2 :], weights[1, : VISIBLE // 2] = 0.0, 0.0
    p = log_joint(theta)
    posterior = p - p.logsumexp(1, keepdim=True)
    on = torch.stack([posterior[:, h == 1].logsumexp(1) for h in bits(HIDDEN).T], -1)
    off = torch.stack([posterior[:, h == 0].logsumexp(1) for h in bits(HIDDEN).T], -1)
    phi = (on - off).flatten().requires_grad_()
    q = log_recognition(phi)
    data = trial.normal(2**VISIBLE).softmax(0)
    bound = slope((data[:, None] * q.exp() * (p - q)).sum(), phi)
    sleep = sleep_rule(phi.detach(), p.exp())
    return max(gap(bound, 0), gap(sleep, 0))


def measure(trial: Trial) -> Found:
    """Random machines of several weights, every expectation by enumeration."""
    sizes = (0.3, 1.0, 3.0)
    found = {s: [one(trial, s) for _ in range(trial.size(60, 15))] for s in sizes}
    every = [x for each in found.values() for x in each]
    cosines = torch.tensor([x[3] for x in every], dtype=torch.float64)
    wake = max(x[0] for x in every)
    numbers = {
        "wake_gap": wake,
        "sleep_gap": max(x[1] for x in every),
        "wake_again": wake,
        "dream_gap": max(x[2] for x in every),
        "posterior_gap": posterior_gap(trial),
        "cosine": median(cosines),
        "against": (cosines < 0).double().mean(),
    }
    return Found(numbers, cosines={s: [x[3] for x in each] for s, each in found.items()})


def draw(figure: Any, seen: Any) -> None:
    """Cosines by the size of the weights."""
    axes = figure.subplots()
    for i, (size, each) in enumerate(seen.cosines.items()):
        axes.plot(sorted(each), [k / len(each) for k in range(len(each))], color=series_color(i),
                  label=f"weights of size {size:g}")  # fmt: skip
    axes.set(xlabel="cosine with the bound's gradient", ylabel="share of machines below")
    axes.legend()
