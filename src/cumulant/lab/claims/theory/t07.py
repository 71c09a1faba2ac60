"""T7: entropy and free energy are the log-normalizer less an expectation."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cumulant import Empirical, GaussianMixture, attend
from cumulant.figures import series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted


def experiment(trial: Trial) -> Evidence:
    """KL, entropy and free energy against scipy's sums, an optimizer, quadrature, physics."""
    special: Any = import_module("scipy.special")
    minimize: Any = import_module("scipy.optimize").minimize
    n, d, m = trial.size(300, 60), 3, trial.size(20, 5)
    x, eta, log_w = trial.normal(n, d), trial.normal(m, d), trial.normal(n).log_softmax(0)
    h = Empirical(x, log_w)
    p = (eta @ x.T + log_w).softmax(-1)
    mean = p @ x
    kl = torch.tensor(special.rel_entr(p.numpy(), log_w.exp().numpy()).sum(-1))
    difference = (eta * h.mean(eta)).sum(-1) - h.log_normalizer(eta)
    both = torch.stack([h.relative_entropy(eta), difference])
    kl_gap = (both - kl).abs().max()

    def conjugate(mu: Tensor) -> float:
        """max over η of <η, μ> - G(η), by BFGS."""

        def negative(e: Any) -> tuple[float, Any]:
            scores = x.numpy() @ e + log_w.numpy()
            slope = special.softmax(scores) @ x.numpy() - mu.numpy()
            return float(special.logsumexp(scores) - e @ mu.numpy()), slope

        return -float(minimize(negative, [0.0] * d, jac=True, options={"gtol": 1e-9}).fun)

    found = torch.tensor([conjugate(mu) for mu in mean], dtype=torch.float64)
    dual_gap = (h.dual(mean) - found).abs().max()

    centers, spreads = torch.tensor([[-1.0, 2.0], [0.5, 0.2]], dtype=torch.float64)
    mixture = GaussianMixture(centers[:, None], spreads)
    line = torch.linspace(-12, 14, 5201, dtype=torch.float64)
    bells = torch.exp(-((line - centers[:, None]) ** 2) / (2 * spreads[:, None]))
    base = (bells / (2 * torch.pi * spreads[:, None]).sqrt()).mean(0)
    tilted = base * torch.exp(1.3 * line)
    tilted = tilted / torch.trapezoid(tilted, line)
    integral = torch.trapezoid(torch.tensor(special.rel_entr(tilted.numpy(), base.numpy())), line)
    density_gap = abs(mixture.relative_entropy(centers.new_tensor([1.3])) - integral)

    bias = trial.normal(m, n)
    weights = (0.7 * eta @ x.T + bias).softmax(-1)
    shannon = torch.tensor(special.entr(weights.numpy()).sum(-1))
    entropy_gap = (attend(eta, x, attn_mask=bias, scale=0.7).entropy - shannon).abs().max()

    # A quantum oscillator with unit spacing: levels are points, minus inverse temperature is η.
    levels = Empirical(torch.arange(2000, dtype=torch.float64)[:, None] + 0.5)
    warm = torch.linspace(0.1, 4, 79, dtype=torch.float64)
    free = -warm * levels.log_normalizer(-1 / warm[:, None])
    disorder = -warm * levels.relative_entropy(-1 / warm[:, None])
    known_free = 0.5 + warm * torch.log1p(-torch.exp(-1 / warm))
    known_energy = 0.5 + 1 / torch.expm1(1 / warm)
    known = torch.stack([known_free, known_energy - known_free])
    free_gap = (torch.stack([free, disorder]) - known).abs().max()

    # Single precision, points further and further out: the plain difference cancels.
    offsets = (1.0, 10.0, 100.0, 1000.0)
    ours, plain = list[float](), list[float]()
    for offset in offsets:
        far = (offset + trial.normal(50, 4)).float()
        at = torch.full((1, 4), 2.5)
        scores = far.double() @ at[0].double()
        exact = float(special.entr(scores.softmax(0).numpy()).sum())
        single = Empirical(far)
        rough = single.log_normalizer(at) - (at * single.mean(at)).sum(-1)
        ours.append(abs(float(-single.relative_entropy(at)) - exact))
        plain.append(abs(float(rough) - exact))

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        parts = ("energy U", known_energy, free + disorder), ("heat TS", known[1], disorder)
        for i, (name, truth, curve) in enumerate(
            (*parts, ("free energy U − TS", known_free, free))
        ):
            left.plot(warm, curve, color=series_color(i), label=name)
            left.plot(warm[::6], truth[::6], "o", ms=3.5, color=series_color(i))
        left.set(xlabel="temperature", ylabel="units of the spacing")
        left.legend()
        right.loglog(offsets, plain, "o-", color=series_color(1), label="G − ⟨η, μ⟩")
        floored = [max(e, 1e-9) for e in ours]
        right.loglog(offsets, floored, "o-", color=series_color(0), label="the library's sum")
        right.set(xlabel="distance of the points", ylabel="error of H, single precision")
        right.legend()

    return Evidence(
        [
            at_most("kl_gap", kl_gap, 1e-11, "KL(p‖h) and ⟨η,μ⟩ − G against sums"),
            at_most("dual_gap", dual_gap, 1e-8, "G*(μ) against a maximum found by BFGS"),
            at_most("density_gap", density_gap, 1e-10, "KL of tilted Gaussians against quadrature"),
            at_most("entropy_gap", entropy_gap, 1e-12, "entropy of attention with scale and bias"),
            at_most("free_energy_gap", free_gap, 1e-11, "−T log Z and T·S of an oscillator"),
            at_most("single_precision_error", max(ours), 1e-5, "error of H, scores up to 10,000"),
            noted("plain_difference_error", max(plain), "the same by G − ⟨η, μ⟩: it cancels"),
        ],
        f"KL(p‖h) is ⟨η,μ⟩ − G to {kl_gap:.0e} and G* at the mean to {dual_gap:.0e}. In single "
        f"precision the summed entropy is off by {max(ours):.0e}, the plain difference by "
        f"{max(plain):.0e}.",
        Picture(
            draw,
            "Left: an oscillator's free energy, energy and heat from G (lines) and from physics "
            "(dots). Right: entropy in single precision when points move away from the origin: "
            "the formula cancels, the sum does not.",
        ),
    )


CLAIM = Claim(
    id="T7",
    title="Entropy and free energy",
    statement=(
        "The log-normalizer is free energy. For normalized h the relative entropy of the tilted "
        "law is ⟨η, μ⟩ − G(η), the convex conjugate of G at the mean; the Shannon entropy of "
        "attention is G minus the mean score."
    ),
    source="main draft, section 2.3",
    formula=r"\operatorname{KL}(p_\eta \| h) = \langle\eta, \mu\rangle - G(\eta) = G^*(\mu), "
    r"\qquad H = G(\eta) - \langle\eta, \mu\rangle - E[\log w], \qquad "
    r"-\beta^{-1} \log Z = U - \beta^{-1} H",
    recorded=HOLDS,
    experiment=experiment,
    tests=("tests/laws/test_duality.py", "tests/laws/test_attention_calculus.py"),
)
