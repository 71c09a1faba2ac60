"""What is the fixed point of attention and a contraction? Is it Gaussian? (T17, T34)

The experiments behind ``docs/fixed-point.md``: ``python -m cumulant.lab.fixed_points.study FOLDER``
runs them and writes numbers and figures to FOLDER; names of parts after it run those alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, write_file
from cumulant.core.progress import ProgressCallback, counted
from cumulant.core.typed import linalg, tolist
from cumulant.dynamics.contraction import Contraction, LayerNorm, Sphere, Whiten
from cumulant.dynamics.gaussian_path import gaussian_flow
from cumulant.dynamics.gaussianity import gaussianity
from cumulant.dynamics.growth import (
    circle_growth_rate,
    fastest_degree,
    gaussian_growth_rate,
    sphere_growth_rate,
)
from cumulant.dynamics.initial import initial_cloud
from cumulant.dynamics.shape import clusters
from cumulant.dynamics.simulate import flow, simulate
from cumulant.lab.fixed_points import rates

__all__ = ["Study", "run"]

# Layer norm takes one dimension away, so it gets one more; all are tested in the plane.
CONTRACTIONS: dict[str, tuple[Contraction | None, int]] = {
    "none": (None, 2),
    "whiten": (Whiten(), 2),
    "sphere": (Sphere(), 2),
    "layer norm": (LayerNorm(), 3),
}
VARIANCE, STEP, DRAWS = 0.25, 0.1, 399
Tick = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """All numbers: plain lists, so that they can be written as JSON."""

    rejected: list[dict[str, Any]]
    counts: list[dict[str, Any]]
    followed: list[dict[str, Any]]
    dimensions: list[dict[str, Any]]
    growth: list[dict[str, Any]]
    first: list[dict[str, Any]]
    paths: list[dict[str, Any]]
    limits: list[dict[str, Any]]


def _in_the_plane(x: Tensor, name: str) -> Tensor:
    """Layer norm leaves the plane orthogonal to (1, 1, 1); coordinates in it."""
    if name != "layer norm":
        return x
    basis = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]], dtype=x.dtype)
    return x @ torch.nn.functional.normalize(basis, dim=-1).mT


def gaussian_kept(
    sizes: list[int], betas: list[float], ensemble: int, horizon: int, tick: Tick
) -> list[dict[str, Any]]:
    """From Gaussian clouds N(0, I/4): the share that the energy test rejects at 5 %, step by step.

    A cloud that has become flat or has no distinct points left is counted as rejected.
    """
    at = [k for k in (0, 1, 2, 4, 7, 11, 16, 23, 32, 45, 64) if k <= horizon]
    found: list[dict[str, Any]] = []
    for name, (contraction, d) in CONTRACTIONS.items():
        for n in sizes:
            for beta in betas:
                tick(f"{name}, N = {n}, beta = {beta:g}")
                random = torch.Generator().manual_seed(n)
                x = torch.randn(ensemble, n, d, dtype=torch.float64, generator=random)
                x = VARIANCE**0.5 * x
                states = simulate(
                    x, horizon, beta=beta, step_size=STEP, contraction=contraction
                ).states
                seen = [_tested(_in_the_plane(states[min(k, len(states) - 1)], name)) for k in at]
                found.append(
                    {
                        "contraction": name,
                        "points": n,
                        "beta": beta,
                        "times": [STEP * k for k in at],
                        "rejected": [share for share, _ in seen],
                        "distance": [distance for _, distance in seen],
                        "null": tolist(gaussianity(x[0, :, :2], draws=DRAWS).null_quantiles.div(n)),
                    }
                )
    return found


def _tested(x: Tensor) -> tuple[float, float | None]:
    """The share rejected, and the median energy distance of the clouds that have one."""
    away = x - x.mean(-2, keepdim=True)
    values = linalg.eigvalsh(away.mT @ away)
    full = values[..., 0] > 1e-10 * values[..., -1]
    if not bool(full.any()):
        return 1.0, None
    test = gaussianity(x[full], draws=DRAWS)
    rejected = (~full).sum() + (test.p_value <= 0.05).sum()
    return float(rejected) / len(x), float(test.statistic.quantile(0.5)) / x.shape[-2]


def _cloud(name: str, n: int, d: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return initial_cloud(name, n, d, generator=generator, dtype=torch.float64)


def cluster_counts(
    betas: list[float], n: int, seeds: int, end: float, tick: Tick
) -> list[dict[str, Any]]:
    """On the sphere in three dimensions: the number of clusters against time, mean and spread."""
    times = [0.0, *tolist(torch.logspace(-0.5, torch.tensor(end).log10().item(), 24))]
    found: list[dict[str, Any]] = []
    for beta in betas:
        tick(f"sphere, beta = {beta:g}")
        x = torch.stack([_cloud("sphere", n, 3, seed=s) for s in range(seeds)])
        run = flow(x, times, beta=beta, contraction=Sphere(), rtol=1e-6, atol=1e-8)
        count = clusters(run.states).count.double()
        found.append(
            {
                "beta": beta,
                "times": times,
                "clusters": tolist(count.mean(-1)),
                "deviation": tolist(count.std(-1)),
                "starts": seeds,
            }
        )
    return found


def _variance(x: Tensor) -> Tensor:
    return x.square().mean((-2, -1))


def law_followed(starts: dict[int, int], tick: Tick) -> list[dict[str, Any]]:
    """The variance of particles under the flow in space, against the law's, which blows up.

    Every start has the law's mean and covariance exactly; mean and range over the starts.
    """
    times = torch.linspace(0, 4, 33, dtype=torch.float64)
    fine = torch.linspace(0, 2, 401, dtype=torch.float64)
    law = gaussian_flow(torch.zeros(2), VARIANCE * torch.eye(2), fine)
    found: list[dict[str, Any]] = [
        {
            "points": None,
            "times": tolist(law.times),
            "variance": tolist(law.covariance[:, 0, 0]),
            "blow_up_time": float(law.blow_up_time),
        }
    ]
    for n, draws in starts.items():
        tick(f"flow in space, N = {n}")
        random = torch.Generator().manual_seed(0)
        x = torch.randn(draws, n // 2, 2, dtype=torch.float64, generator=random)
        x = VARIANCE**0.5 * Whiten()(torch.cat([x, -x], -2))
        path = flow(x, times, observables={"variance": _variance}, rtol=1e-6, atol=1e-8)
        seen = path.observables["variance"]
        found.append(
            {
                "points": n,
                "starts": draws,
                "times": tolist(path.times),
                "variance": tolist(seen.mean(-1)),
                "least": tolist(seen.amin(-1)),
                "most": tolist(seen.amax(-1)),
            }
        )
    return found


def growth(quick: bool, tick: Tick) -> list[dict[str, Any]]:
    """Rates of departures from the Gaussian and from the uniform law: theory and quadrature."""
    found: list[dict[str, Any]] = []
    betas = [0.5, 1.0] if quick else [0.25, 0.5, 0.75, 1.0, 1.25]
    for beta in betas:
        tick(f"growth on the line, beta = {beta:g}")
        orders = [3, 4, 5, 6, 7, 8]
        found.append(
            {
                "law": "gaussian",
                "beta": beta,
                "orders": orders,
                "theory": [gaussian_growth_rate(n, beta) for n in orders],
                "measured": [rates.gaussian_rate(n, beta) for n in orders],
            }
        )
    for beta in [4.0] if quick else [2.0, 8.0, 32.0, 128.0]:
        tick(f"growth on the circle, beta = {beta:g}")
        orders = list(range(1, 8 if quick else 26))
        found.append(
            {
                "law": "circle",
                "beta": beta,
                "orders": orders,
                "theory": [circle_growth_rate(k, beta) for k in orders],
                "measured": [rates.sphere_rate(k, beta, 2) for k in orders],
            }
        )
    return found


def first_clusters(
    sizes: list[int], betas: list[float], draws: int, tick: Tick
) -> list[dict[str, Any]]:
    """The number of first clusters of uniform clouds, for each start."""
    found: list[dict[str, Any]] = []
    for d in (2, 3, 4):
        for n in sizes:
            for beta in betas:
                tick(f"first clusters, d = {d}, N = {n}, beta = {beta:g}")
                x = torch.randn(draws, n, d, generator=torch.Generator().manual_seed(n + d))
                top = fastest_degree(beta, dimension=d)
                found.append(
                    {
                        "dimension": d,
                        "points": n,
                        "beta": beta,
                        "clusters": tolist(rates.first_clusters(x, beta)),
                        "fastest": top,
                        "rate": sphere_growth_rate(top, beta, dimension=d),
                    }
                )
    return found


def paths(betas: list[float], n: int, tick: Tick) -> list[dict[str, Any]]:
    """Angles of points on the circle over time, for a picture."""
    found: list[dict[str, Any]] = []
    for beta in betas:
        tick(f"picture: circle, beta = {beta:g}")
        x = Sphere()(torch.randn(n, 2, generator=torch.Generator().manual_seed(3)))
        run = simulate(x, 140, beta=beta, step_size=0.1, contraction=Sphere())
        angle = torch.atan2(run.states[..., 1], run.states[..., 0])
        keep = slice(None, None, max(1, n // 250))
        found.append(
            {
                "beta": beta,
                "fastest": fastest_degree(beta),
                "times": tolist(run.times),
                "angles": tolist(angle[:, keep]),
            }
        )
    return found


def by_dimension(dimensions: list[int], n: int, ensemble: int, tick: Tick) -> list[dict[str, Any]]:
    """Gaussian clouds projected on the sphere once: the shares rejected, whole and by one axis."""
    found: list[dict[str, Any]] = []
    for d in dimensions:
        tick(f"projected once, d = {d}")
        random = torch.Generator().manual_seed(d)
        x = Sphere()(torch.randn(ensemble, n, d, dtype=torch.float64, generator=random))
        found.append({"dimension": d, "cloud": _tested(x)[0], "coordinate": _tested(x[..., :1])[0]})
    return found


def limits(n: int, beta: float, steps: int, tick: Tick) -> list[dict[str, Any]]:
    """One Gaussian cloud under each contraction, for a picture: start, middle, end."""
    found: list[dict[str, Any]] = []
    for name, (contraction, d) in CONTRACTIONS.items():
        tick(f"picture: {name}")
        x = VARIANCE**0.5 * _cloud("gaussian", n, d, seed=1)
        states = simulate(x, steps, beta=beta, step_size=STEP, contraction=contraction).states
        shown = [0, steps // 8, steps // 2, steps]
        found.append(
            {
                "contraction": name,
                "times": [STEP * k for k in shown],
                "clouds": [tolist(_in_the_plane(states[k], name)) for k in shown],
            }
        )
    return found


PARTS: dict[str, Callable[[bool, Tick], list[dict[str, Any]]]] = {
    "rejected": lambda quick, tick: gaussian_kept(
        [32, 128] if quick else [32, 128, 512, 2048],
        [1.0] if quick else [0.25, 1.0, 4.0],
        20 if quick else 40,
        16 if quick else 64,
        tick,
    ),
    "counts": lambda quick, tick: cluster_counts(
        [1.0, 16.0] if quick else [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        32 if quick else 64,
        2 if quick else 20,
        10.0 if quick else 100.0,
        tick,
    ),
    "followed": lambda quick, tick: law_followed(
        {100: 20} if quick else {100: 20, 400: 20, 1600: 10}, tick
    ),
    "dimensions": lambda quick, tick: by_dimension(
        [2, 16] if quick else [2, 4, 8, 16, 32, 64],
        128 if quick else 512,
        20 if quick else 100,
        tick,
    ),
    "growth": growth,
    "first": lambda quick, tick: first_clusters(
        [200] if quick else [500, 1000, 2000],
        [8.0, 32.0] if quick else [8.0, 16.0, 32.0, 64.0],
        2 if quick else 20,
        tick,
    ),
    "paths": lambda quick, tick: paths([8.0, 32.0] if quick else [8.0, 32.0, 128.0], 2000, tick),
    "limits": lambda quick, tick: limits(200, 4.0, 80, tick),
}
PICTURES = ("limits", "paths")  # drawn, not tabulated


def run(*, quick: bool = False, progress: ProgressCallback | None = None) -> Study:
    """All experiments: about half an hour on one core, or twenty seconds if quick."""
    tick = counted(progress)
    return Study(**{name: part(quick, tick) for name, part in PARTS.items()})


def main(folder: Path, quick: bool, only: list[str]) -> None:
    """Run, and write ``fixed-point.json`` and the figures; other parts stay as they were."""
    from cumulant.lab.fixed_points.figures import draw

    if odd := set(only) - set(PARTS):
        raise InputError(f"parts are {', '.join(PARTS)}, not {', '.join(sorted(odd))}.")
    make_folder(folder)
    numbers = folder / "fixed-point.json"
    tick = counted(lambda x: print(x.what, file=sys.stderr, flush=True))  # noqa: T201
    known: dict[str, Any] = json.loads(numbers.read_text()) if only else {}
    wanted = [name for name in PARTS if not only or name in only or name in PICTURES]
    known |= {name: PARTS[name](quick, tick) for name in wanted}
    study = Study(**{name: known.get(name, []) for name in PARTS})
    told = {n: x for n, x in asdict(study).items() if n not in PICTURES}
    write_file(numbers, json.dumps(told, indent=1))
    draw(study, folder)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]), "--quick" in sys.argv, [x for x in sys.argv[2:] if not x.startswith("-")]
    )
