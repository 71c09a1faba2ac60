"""T7: entropy and free energy are the log-normalizer minus an expectation."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cumulant import Empirical, GaussianMixture, attend
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, minimized

CLAIM = Claim(
    id="T7",
    title="Entropy and free energy",
    evidence="identity",
    statement="The log-normalizer is free energy. For normalized h the relative entropy of the "
    "tilted law is ⟨η, μ⟩ − G(η), the convex conjugate of G at the mean; the Shannon entropy of "
    "attention is G minus the mean score.",
    source="main draft, section 2.3",
    formula=r"\operatorname{KL}(p_\eta \| h) = \langle\eta, \mu\rangle - G(\eta) = G^*(\mu), "
    r"\qquad H = G(\eta) - \langle\eta, \mu\rangle - E[\log w], \qquad "
    r"-\beta^{-1} \log Z = U - \beta^{-1} H",
    recorded="holds",
    tests=("tests/laws/test_duality.py", "tests/laws/test_attention_calculus.py"),
    rules=table("""
      statement:
        kl_gap ≤ 1e-11: KL(p‖h) and ⟨η,μ⟩ − G against sums
        dual_gap ≤ 1e-8: G*(μ) against a maximum found by BFGS
        density_gap ≤ 1e-10: KL of tilted Gaussians against quadrature
        entropy_gap ≤ 1e-12: entropy of attention with scale and bias
        free_energy_gap ≤ 1e-11: −T log Z and T·S of an oscillator
        single_precision_error ≤ 1e-5: error of H, scores up to 10,000
      noted:
        plain_difference_error: the same by G − ⟨η, μ⟩, which cancels
    """),
    finding="KL(p‖h) is ⟨η,μ⟩ − G to {kl_gap:.0e} and G* at the mean to {dual_gap:.0e}. In single "
    "precision the summed entropy is off by {single_precision_error:.0e}, the plain difference by "
    "{plain_difference_error:.0e}.",
    caption="Left: an oscillator's free energy, energy and heat from G (lines) and from physics "
    "(dots). Right: entropy in single precision as the points move away from the origin: the "
    "difference cancels, the sum does not.",
)


OFFSETS = (1.0, 10.0, 100.0, 1000.0)
WARM = torch.linspace(0.1, 4, 79, dtype=torch.float64)  # temperatures
special: Any = import_module("scipy.special")


def conjugate(x: Any, log_w: Any, mu: Any) -> float:
    """max over η of <η, μ> - G(η), by BFGS."""

    def negative(e: Any) -> tuple[float, Any]:
        scores = x @ e + log_w
        return float(special.logsumexp(scores) - e @ mu), special.softmax(scores) @ x - mu

    start = [0.0] * len(mu)
    return -float(minimized(negative, start, jac=True, options={"gtol": 1e-9}).fun)


def on_points(trial: Trial) -> dict[str, float]:
    """KL and its dual of weighted points; the entropy of attention over them."""
    n, d, m = trial.size(300, 60), 3, trial.size(20, 5)
    x, eta, log_w = trial.normal(n, d), trial.normal(m, d), trial.normal(n).log_softmax(0)
    h = Empirical(x, log_w)
    p = (eta @ x.T + log_w).softmax(-1)
    kl = torch.tensor(special.rel_entr(p.numpy(), log_w.exp().numpy()).sum(-1))
    difference = (eta * h.mean(eta)).sum(-1) - h.log_normalizer(eta)
    mean = p @ x
    found = [conjugate(x.numpy(), log_w.numpy(), mu.numpy()) for mu in mean]
    bias = trial.normal(m, n)
    shannon = special.entr((0.7 * eta @ x.T + bias).softmax(-1).numpy()).sum(-1)
    return {
        "kl_gap": gap(torch.stack([h.relative_entropy(eta), difference]), kl),
        "dual_gap": gap(h.dual(mean), torch.tensor(found, dtype=torch.float64)),
        "entropy_gap": gap(attend(eta, x, attn_mask=bias, scale=0.7).entropy, shannon),
    }


def density_gap() -> float:
    """KL of two tilted Gaussians on a line, against quadrature."""
    centers, spreads = torch.tensor([[-1.0, 2.0], [0.5, 0.2]], dtype=torch.float64)
    line = torch.linspace(-12, 14, 5201, dtype=torch.float64)
    bells = torch.exp(-((line - centers[:, None]) ** 2) / (2 * spreads[:, None]))
    base = (bells / (2 * torch.pi * spreads[:, None]).sqrt()).mean(0)
    tilted = base * torch.exp(1.3 * line)
    tilted = tilted / torch.trapezoid(tilted, line)
    integral = torch.trapezoid(torch.tensor(special.rel_entr(tilted.numpy(), base.numpy())), line)
    mixture = GaussianMixture(centers[:, None], spreads)
    return gap(mixture.relative_entropy(centers.new_tensor([1.3])), integral)


def oscillator() -> tuple[Tensor, Tensor]:
    """Free energy and heat of a quantum oscillator with unit spacing: from G, and from physics."""
    # Levels are points, minus inverse temperature is η.
    levels = Empirical(torch.arange(2000, dtype=torch.float64)[:, None] + 0.5)
    free = -WARM * levels.log_normalizer(-1 / WARM[:, None])
    disorder = -WARM * levels.relative_entropy(-1 / WARM[:, None])
    known_free = 0.5 + WARM * torch.log1p(-torch.exp(-1 / WARM))
    known_energy = 0.5 + 1 / torch.expm1(1 / WARM)
    return torch.stack([free, disorder]), torch.stack([known_free, known_energy - known_free])


def in_single_precision(trial: Trial) -> tuple[list[float], list[float]]:
    """Errors of H by the library and by G − ⟨η, μ⟩, for points farther and farther out."""
    ours, plain = list[float](), list[float]()
    for offset in OFFSETS:
        far = (offset + trial.normal(50, 4)).float()
        at = torch.full((1, 4), 2.5)
        scores = far.double() @ at[0].double()
        exact = float(special.entr(scores.softmax(0).numpy()).sum())
        single = Empirical(far)
        rough = single.log_normalizer(at) - (at * single.mean(at)).sum(-1)
        ours.append(abs(float(-single.relative_entropy(at)) - exact))
        plain.append(abs(float(rough) - exact))
    return ours, plain


def measure(trial: Trial) -> Found:
    """KL, entropy and free energy against scipy's sums, an optimizer, quadrature, physics."""
    curves, known = oscillator()
    numbers = on_points(trial) | {
        "density_gap": density_gap(),
        "free_energy_gap": gap(curves, known),
    }
    ours, plain = in_single_precision(trial)
    numbers |= {"single_precision_error": max(ours), "plain_difference_error": max(plain)}
    return Found(numbers, curves=curves, known=known, ours=ours, plain=plain)


def draw(figure: Any, seen: Any) -> None:
    """The oscillator's energies; the error of H when points are far from the origin."""
    left, right = figure.subplots(1, 2)
    (free, heat), (known_free, known_heat) = seen.curves, seen.known
    parts = (
        ("energy U", known_free + known_heat, free + heat),
        ("heat TS", known_heat, heat),
        ("free energy U − TS", known_free, free),
    )
    for i, (name, truth, curve) in enumerate(parts):
        left.plot(WARM, curve, color=series_color(i), label=name)
        left.plot(WARM[::6], truth[::6], "o", ms=3.5, color=series_color(i))
    left.set(xlabel="temperature", ylabel="units of the spacing")
    left.legend()
    right.loglog(OFFSETS, seen.plain, "o-", color=series_color(1), label="G − ⟨η, μ⟩")
    floored = [max(e, 1e-9) for e in seen.ours]
    right.loglog(OFFSETS, floored, "o-", color=series_color(0), label="the library's sum")
    right.set(xlabel="distance of the points", ylabel="error of H, single precision")
    right.legend()
