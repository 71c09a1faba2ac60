"""T17: the fixed point of attention and normalization, and whether it is Gaussian."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import dynamics
from cumulant.core.typed import linalg
from cumulant.figures import INK, MUTED, series_color, tidy
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, integrated, relative, standard_error

# Layer norm takes one dimension away, so it gets one more; all clouds are tested in the plane.
KINDS: dict[str, tuple[dynamics.Contraction | None, int]] = {
    "none": (None, 2),
    "whitening": (dynamics.Whiten(), 2),
    "sphere": (dynamics.Sphere(), 2),
    "layer norm": (dynamics.LayerNorm(), 3),
}
STEP, SEEN = 0.2, (0, 1, 4, 8, 16, 24)
# N, clouds of that size, and draws for the test of each.
SIZES = ((32, 20, 199), (128, 20, 199), (512, 6, 99), (2048, 2, 39))
QUICK_SIZES = ((32, 8, 99), (128, 5, 99), (512, 2, 39))
SHARES_OF_TIME = torch.linspace(0, 0.99, 100, dtype=torch.float64)
PLANE = F.normalize(torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]], dtype=torch.float64), dim=-1)

CLAIM = Claim(
    id="T17",
    title="The fixed point of attention and normalization",
    evidence="simulation",
    statement="Attention spreads the points, normalization shrinks them back towards a Gaussian: "
    "repeated, the layer has a Gaussian distribution as its fixed point.",
    source="exponential family draft, §3.1, end",
    formula=r"\mathcal{N}(m, \Sigma) \mapsto \mathcal{N}\left(2m + \Sigma m, "
    r"(I + \Sigma)\Sigma(I + \Sigma)\right), \qquad "
    r"\Sigma(t) = \left(\Sigma_0^{-1} - 2t I\right)^{-1}",
    bounds="On a sphere, and under layer norm, all norms are equal: no cloud is Gaussian there, by "
    "geometry alone, so these are noted and the claim is judged under whitening, the one "
    "normalization that leaves a Gaussian where it is. A 5% test rejects one Gaussian cloud in "
    "twenty; 0.15 allows for the small number of clouds per run, 0.25 for the control. An "
    "attracting fixed point must bring other laws closer: a ratio below 1. A cloud of thousands of "
    "points follows its law to a tenth. After the first numbers, sphere and layer norm were taken "
    "out of the statement and became notes, since geometry alone decides them; they had failed, "
    "and so had whitening, so the verdict did not change.",
    recorded="does not hold in general",
    tests=(
        "tests/laws/test_population.py",
        "tests/dynamics/test_instruments.py",
        "tests/lab/test_fixed_point_study.py",
    ),
    rules=table("""
      statement:
        whitening_rejected ≤ 0.15: whitening: share rejected at time 4.8
        attraction ≤ 1: clouds of other laws, whitened: final over initial distance to a Gaussian,
            least of four laws
      control:
        false_alarms ≤ 0.25: share of the Gaussian clouds rejected before the first step
        law_gap ≤ 1e-6: Gaussian law of map and flow against closed form and scipy
        blow_up_gap ≤ 1e-9: blow-up time against 1/λmax of Σ^½(A+Aᵀ)Σ^½
        particles_gap ≤ 0.1: covariance of a cloud after two steps against the law's
        equiangular_gap ≤ 1e-6: cosine of equiangular points on the sphere against its equation
        uniform_moved ≤ 1e-6: displacement of points spread evenly on the circle
        step_gap ≤ 1e-9: a step under each contraction against plain torch
      noted:
        sphere_rejected: sphere in the plane: share rejected at each look, after 1, 4, 8, 16 and 24
            steps; geometry alone decides this, all norms being equal
        layer_norm_rejected: layer norm: the same
        region_low: the smallest β tried (from 0.125) at which half of the whitened clouds are
            rejected by time 4.8; T34 gives the rates
        unnormalized_rejected: no normalization: share rejected at time 4.8
        heavy_tail_dip: at β = 4, the least such ratio on the way: heavy tails shrink at first
        clusters_hot: clusters of 48 points on the sphere at t = 30, β = 1
        clusters_cold: the same for β = 9
        second_variance: second variance over the largest at 0.99 of the blow-up time, from 0.8
    """),
    finding="Whitening leaves the Gaussian law where it is, yet by t = 4.8 a 5% test rejects "
    "{whitening_rejected:.0%} of clouds of {fewest} to {most} points at β = 1, and more than half "
    "from β = {region_low:g} on; below that the loss is slower (T34). Other laws end at least "
    "{attraction:.1f} times as far from a Gaussian as they started. On the sphere and under layer "
    "norm equal norms rule a Gaussian out, and clusters form: {clusters_hot:.1f} are left at "
    "β = 1, {clusters_cold:.1f} at β = 9.",
    caption="Left: Gaussian clouds of growing N; above the line at 1 the test rejects them. Sphere "
    "and layer norm lose the Gaussian at once, whitening and no normalization within a few units "
    "of time, larger clouds more clearly. Middle: 48 points on the sphere, seen from above, "
    "collapse into clusters (β = 9). Right: without normalization the law stays Gaussian, but its "
    "smaller variances become negligible against the largest before it blows up.",
    size=(10.5, 3.7),
)


def tested(x: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Which clouds a 5% test rejects, and the statistic over its 95% level, for each cloud."""
    away = x - x.mean(-2, keepdim=True)
    values = linalg.eigvalsh(away.mT @ away)
    full = values[..., 0] > 1e-10 * values[..., -1]  # what has become flat is no Gaussian
    test = dynamics.gaussianity(x[full], draws=draws)
    rejected, distance = torch.ones(full.shape), torch.full(full.shape, float("nan"))
    rejected[full] = (test.p_value <= 0.05).float()
    distance[full] = (test.statistic / test.null_quantiles[-1]).float()
    return rejected, distance


def decay(trial: Trial, n: int, clouds: int, draws: int) -> dict[str, tuple[Tensor, Tensor]]:
    """From Gaussian clouds N(0, I/4) at beta = 1: both of the above, ``(times, clouds)``."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (contraction, d) in KINDS.items():
        x = 0.5 * trial.normal(clouds, n, d)
        run = dynamics.simulate(
            x, SEEN[-1], step_size=STEP, contraction=contraction, observables={}
        )
        states = run.states[list(SEEN)]
        found[name] = tested(states @ PLANE.mT if d == 3 else states, draws)
    return found


def over_beta(trial: Trial) -> dict[float, float]:
    """Whitened Gaussian clouds of 128 points: the share rejected at time 4.8, for each β."""
    found: dict[float, float] = {}
    for beta in (0.125, 0.25, 0.5, 1.0, 2.0):
        x = dynamics.Whiten()(trial.normal(trial.size(20, 8), 128, 2))
        run = dynamics.simulate(
            x, SEEN[-1], beta=beta, step_size=STEP, contraction=dynamics.Whiten(), every=SEEN[-1],
            observables={},
        )  # fmt: skip
        found[beta] = float(tested(run.final, 99)[0].mean())
    return found


def estimate(samples: Tensor) -> tuple[float, float]:
    """A share and its standard error; at 0 or 1, the error that one exception would give."""
    count = len(samples)
    return float(samples.mean()), max(float(samples.std()), 1 / count**0.5) / count**0.5


def step_gap(trial: Trial) -> float:
    """A step under each contraction against plain torch."""

    def whitened(z: Tensor) -> Tensor:
        away = z - z.mean(0)
        values, vectors = linalg.eigh(away.mT @ away / len(z))
        return away @ vectors @ torch.diag(values.rsqrt()) @ vectors.mT

    x = trial.normal(20, 3)
    moved = x + STEP * (x @ x.mT).softmax(-1) @ x
    plain = {
        "none": moved,
        "whitening": whitened(moved),
        "sphere": moved / linalg.vector_norm(moved, dim=-1, keepdim=True),
        "layer norm": F.layer_norm(moved, (3,), eps=0),
    }
    return max(
        gap(dynamics.step(x, step_size=STEP, contraction=KINDS[k][0]), y) for k, y in plain.items()
    )


def law_gaps(trial: Trial) -> tuple[float, float]:
    """The Gaussian law against its closed forms and scipy; the blow-up time against numpy."""
    one = torch.eye(3, dtype=torch.float64)
    m, factor = trial.normal(3), 0.5 * trial.normal(3, 3)
    S = factor @ factor.mT + 0.1 * one
    A, V = one + 0.2 * trial.normal(3, 3), one + 0.2 * trial.normal(3, 3)

    def rate(y: Any) -> Any:
        mean, spread = y[:3], y[3:].reshape(3, 3)
        drift = V.numpy() @ spread @ A.numpy() @ spread
        moved = V.numpy() @ (mean + spread @ A.numpy() @ mean)
        return np.concatenate([moved, (drift + drift.T).ravel()])

    root = np.linalg.cholesky(S.numpy())
    end = 1 / np.linalg.eigvalsh(root.T @ (A + A.mT).numpy() @ root)[-1]
    time = 0.3 * float(end)
    start = torch.cat([m, S.flatten()])
    y = integrated(rate, start, time, rtol=1e-11, atol=1e-12)
    flow = dynamics.gaussian_flow(m, S, [time], scores=A, values=V)
    once = dynamics.gaussian_map(m, S, 1)
    gaps = (
        relative(flow.mean[0], y[:3]),
        relative(flow.covariance[0].flatten(), y[3:]),
        linalg.vector_norm(once.mean[1] - 2 * m - S @ m) / linalg.vector_norm(m),
        linalg.vector_norm(once.covariance[1] - (one + S) @ S @ (one + S)) / linalg.vector_norm(S),
    )
    blow_up = float(dynamics.gaussian_flow(m, S, [0.0], scores=A).blow_up_time)
    return max(map(float, gaps)), abs(blow_up / float(end) - 1)


def equiangular_gap() -> float:
    """Eight points at equal angles on the sphere against their equation, by scipy."""
    n, beta, cosine = 8, 3.0, 0.1
    gram = (1 - cosine) * torch.eye(n, dtype=torch.float64) + cosine
    x = linalg.cholesky(gram)
    run = dynamics.flow(x, [2.0], beta=beta, contraction=dynamics.Sphere(), observables={}).final

    def rate(g: Any) -> Any:
        return 2 * (1 - g) * ((n - 1) * g + 1) / (np.exp(beta * (1 - g)) + n - 1)

    start = torch.tensor([cosine], dtype=torch.float64)
    i, j = torch.triu_indices(n, n, 1)
    return gap((run @ run.mT)[i, j], integrated(rate, start, 2, rtol=1e-11, atol=1e-12))


def attraction(trial: Trial, n: int, clouds: int) -> tuple[Tensor, Tensor]:
    """Energy distance over that of the start, under whitening, from four laws that are not
    Gaussian: at the end for beta = 1, and at its least for beta = 4, ``(4, clouds)`` each."""
    uniform = trial.uniform(clouds, n, 2)
    sign = (trial.uniform(clouds, n, 2) > 0.5).double() * 2 - 1
    laws = (  # a square, a disc, two groups, a law with heavy tails
        uniform - 0.5,
        F.normalize(trial.normal(clouds, n, 2), dim=-1) * uniform[..., :1].sqrt(),
        0.5 * trial.normal(clouds, n, 2) + 1.5 * sign[..., :1] * torch.tensor([1.0, 0.0]),
        -uniform.clamp_min(1e-12).log() * sign,
    )
    start = dynamics.Whiten()(torch.stack(laws))
    ratios: list[Tensor] = []
    for beta in (1.0, 4.0):
        run = dynamics.simulate(
            start, 24, beta=beta, step_size=STEP, contraction=dynamics.Whiten(), observables={}
        ).states
        distance = dynamics.gaussianity(run[[0, 1, 2, 4, 8, 24]], draws=1).statistic
        ratios.append(distance / distance[0])
    return ratios[0][-1], ratios[1].amin(0)


def particles_off(trial: Trial) -> Tensor:
    """Covariance of clouds after two steps against the law's, relative.

    As many points as can follow: η'Ση stays far below 2 log N.
    """
    half = trial.normal(4, trial.size(1000, 500), 2)
    cloud = 0.2**0.5 * dynamics.Whiten()(torch.cat([half, -half], -2))
    moved = dynamics.simulate(cloud, 2, observables={}).final
    exact = 0.2 * 1.2**2 * (1 + 0.2 * 1.2**2) ** 2
    return linalg.vector_norm(
        moved.mT @ moved / moved.shape[-2] / exact - torch.eye(2), dim=(-2, -1)
    )


def uniform_moved() -> float:
    """How far points spread evenly on the circle move in a unit of time."""
    ring = dynamics.initial_cloud("ring", 100, 2, dtype=torch.float64)
    sphere = dynamics.Sphere()
    return gap(dynamics.flow(ring, [1.0], beta=2.0, contraction=sphere, observables={}).final, ring)


def on_sphere(trial: Trial) -> Tensor:
    """Paths of 48 points on the sphere at β = 1 and at β = 9, ``(times, 2, starts, 48, 3)``."""
    starts = F.normalize(trial.normal(trial.size(6, 2), 48, 3), dim=-1)
    beta = torch.tensor([1.0, 9.0], dtype=torch.float64)[:, None, None, None]
    return dynamics.flow(
        starts.expand(2, *starts.shape).contiguous(),
        torch.linspace(0, 30, 121, dtype=torch.float64),
        beta=beta.expand(2, len(starts), 1, 1),
        contraction=dynamics.Sphere(),
        observables={},
        rtol=1e-5,
        atol=1e-7,
    ).states


def variances() -> Tensor:
    """Of a Gaussian law without normalization, over the largest, up to 0.99 of its blow-up time."""
    S = torch.diag(torch.tensor([0.25, 0.2, 0.125], dtype=torch.float64))
    path = dynamics.gaussian_flow(torch.zeros(3, dtype=torch.float64), S, 2 * SHARES_OF_TIME)
    values = linalg.eigvalsh(path.covariance)
    return values / values[:, -1:]


def mean_of(samples: Tensor) -> tuple[Tensor, float]:
    """The mean and its standard error."""
    return samples.mean(), standard_error(samples)


def measure(trial: Trial) -> Found:
    """Gaussian clouds of tens to thousands of points under four contractions, with controls."""
    sizes = QUICK_SIZES if trial.quick else SIZES
    runs = {n: decay(trial, n, clouds, draws) for n, clouds, draws in sizes}
    # All clouds of all N together, at each time.
    rejected = {k: torch.cat([run[k][0] for run in runs.values()], -1) for k in KINDS}
    late = {k: estimate(x[-1]) for k, x in rejected.items()}
    ever = {k: estimate(x[1:].amin(0)) for k, x in rejected.items()}
    law, blow_up = law_gaps(trial)
    ends, dips = attraction(trial, trial.size(256, 128), trial.size(8, 4))
    off, spheres, values = particles_off(trial), on_sphere(trial), variances()
    shares = over_beta(trial)
    region = [beta for beta, share in shares.items() if share >= 0.5]
    hot, cold = dynamics.clusters(spheres[-1]).count.double()
    numbers = {
        "sphere_rejected": ever["sphere"],
        "layer_norm_rejected": ever["layer norm"],
        "whitening_rejected": late["whitening"],
        "attraction": mean_of(ends[ends.mean(-1).argmin()]),
        "false_alarms": estimate(torch.cat([x[0] for x in rejected.values()])),
        "law_gap": law,
        "blow_up_gap": blow_up,
        "particles_gap": mean_of(off),
        "equiangular_gap": equiangular_gap(),
        "uniform_moved": uniform_moved(),
        "step_gap": step_gap(trial),
        "unnormalized_rejected": late["none"],
        "heavy_tail_dip": dips.mean(-1).min(),
        "clusters_hot": mean_of(hot),
        "clusters_cold": mean_of(cold),
        "region_low": min(region, default=float("nan")),
        "second_variance": values[-1, 1],
    }
    return Found(
        numbers, fewest=min(runs), most=max(runs), runs=runs, spheres=spheres, values=values
    )


def draw(figure: Any, seen: Any) -> None:
    """Gaussianity lost; clusters on the sphere; rank lost without normalization."""
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 0.9, 0.9))
    draw_decay(left, seen.runs)
    angle = np.linspace(0, 2 * np.pi, 200)
    middle.plot(np.cos(angle), np.sin(angle), color=MUTED, linewidth=0.8)
    shown = seen.spheres[:, 1, 0]
    for k in range(shown.shape[1]):
        middle.plot(*shown[:, k, :2].mT, color=series_color(0), linewidth=0.5)
    middle.scatter(*shown[0, :, :2].mT, s=8, color=MUTED, zorder=3, label="start")
    middle.scatter(*shown[-1, :, :2].mT, s=36, color=series_color(1), zorder=4, label="t = 30")
    middle.set(aspect="equal", xticks=[], yticks=[], ylim=(-1.05, 1.3))
    middle.set_title("On the sphere: clusters")
    middle.spines[:].set_visible(False)
    middle.legend(loc="upper center", ncols=2)
    tidy(middle)
    for i in range(3):
        values = seen.values[:, 2 - i]
        right.plot(SHARES_OF_TIME, values, color=series_color(i), label=f"λ{i + 1}")
    right.set(xlabel="time / blow-up time", ylabel="variance / the largest", ylim=(0, 1.05))
    right.set_title("No normalization: rank is lost")
    right.legend(loc="lower left")


def draw_decay(axes: Any, runs: dict[int, dict[str, tuple[Tensor, Tensor]]]) -> None:
    """Distance to a Gaussian over time, a line for each contraction and each N."""
    dashes = {"layer norm": "-", "sphere": ":", "whitening": "--", "none": "-"}
    for i, (name, dash) in enumerate(dashes.items()):
        for j, run in enumerate(runs.values()):
            axes.plot(
                STEP * np.array(SEEN),
                run[name][1].nanmedian(-1).values,
                dash,
                color=series_color((4, 1, 2, 0)[i]),
                linewidth=0.7 + 0.5 * j,
                label=name if j == len(runs) - 1 else None,
            )
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set(yscale="log", xlabel="time", ylabel="distance to a Gaussian / its 95% level")
    axes.set(ylim=(0.3, 4000), title=f"Gaussianity lost, N = 32 (thin) to {max(runs)}")
    axes.legend(loc="upper left", ncols=2)
