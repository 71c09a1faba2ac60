"""Measured growth rates of departures from a stationary law, and the clusters they end in (T34).

Rates are measured twice: on a population, by quadrature, and on random particles.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.core.typed import functions
from cumulant.dynamics.contraction import Sphere, Whiten
from cumulant.dynamics.growth import (
    circle_growth_rate,
    fastest_degree,
    gaussian_growth_rate,
    sphere_growth_rate,
)
from cumulant.dynamics.shape import clusters
from cumulant.dynamics.simulate import flow, simulate
from cumulant.measures.empirical import Empirical

__all__ = [
    "circle_particle_rate",
    "equal_particle_rate",
    "first_clusters",
    "gaussian_particle_rate",
    "gaussian_rate",
    "hermite",
    "sphere_rate",
]

SMALL = 1e-6  # the departure on a population
PUSH = 1e-4  # the departure on particles
STEP = 0.25  # of the flow to the first clusters; their growth time is about 1.4
SPAN = 0.25  # growth times over which particles are followed


def hermite(n: int, x: Tensor) -> Tensor:
    """He_n, the probabilists' polynomial."""
    one, two = torch.ones_like(x), x
    for k in range(1, n):
        one, two = two, x * two - k * one
    return two


def _whitened(x: Tensor, weights: Tensor) -> Tensor:
    away = x - (weights * x).sum(-1, keepdim=True)
    return away / (weights * away.square()).sum(-1, keepdim=True).sqrt()


def gaussian_rate(n: int, beta: float) -> float:
    """Growth rate of the n-th cumulant of a whitened line, by Gauss-Hermite quadrature.

    The nodes carry the weights of N(0, 1) times 1 + ε He_n / n! and move a little with the flow; to
    first order in ε the whitened cumulant is E[He_n].
    """
    nodes, mass = np.polynomial.hermite_e.hermegauss(60)
    x, w = functions.from_numpy(nodes), functions.from_numpy(mass / mass.sum())
    w = w * (1 + SMALL * hermite(n, x) / math.factorial(n))
    field = Empirical(x[:, None], log_weights=w.log()).mean(beta * x[:, None])[:, 0]
    h = 1e-3
    ahead, back = (float(w @ hermite(n, _whitened(x + s * field, w))) for s in (h, -h))
    return math.log(ahead / back) / (2 * h)


def sphere_rate(degree: int, beta: float, d: int) -> float:
    """Growth rate of a zonal harmonic on the uniform density of the sphere, by quadrature.

    Scores with (cos θ, sin θ, 0, ...) depend on two coordinates of a point, so points are pairs.
    """
    m = 64 + 2 * degree + 4 * int(beta**0.5)
    nodes, own = (functions.from_numpy(z) for z in np.polynomial.legendre.leggauss(m))
    if d == 2:
        theta = 2 * math.pi * torch.arange(2 * m, dtype=torch.float64) / (2 * m)
        area = torch.ones_like(theta)
        x, mass = torch.stack([theta.cos(), theta.sin()], -1), area
    else:  # the angle from the axis has the density sin^(d-2), the next one sin^(d-3)
        theta = phi = (nodes + 1) * math.pi / 2
        area = own * theta.sin() ** (d - 2)
        mass = torch.outer(area, own * phi.sin() ** (d - 3)).flatten()
        first = theta.cos()[:, None].expand(m, m)
        x = torch.stack([first, torch.outer(theta.sin(), phi.cos())], -1).flatten(0, 1)
    density = mass * (1 + SMALL * _zonal(degree, x[:, 0], d))
    at = torch.stack([theta.cos(), theta.sin()], -1)
    pull = Empirical(x, log_weights=density.log()).mean(beta * at)
    turn = -theta.sin() * pull[:, 0] + theta.cos() * pull[:, 1]  # θ' along the meridian
    angle = theta.clone().requires_grad_()
    harmonic: Any = _zonal(degree, angle.cos(), d)
    slope = torch.autograd.grad(harmonic.sum(), angle)[0]
    size = (area * harmonic.detach().square()).sum()
    return float((area * slope * turn).sum() / (SMALL * size))


def _zonal(degree: int, t: Tensor, d: int) -> Tensor:
    """The harmonic of this degree around an axis, 1 at the pole: Gegenbauer's polynomial."""
    one, two = torch.ones_like(t), t
    for k in range(1, degree):
        one, two = two, ((2 * k + d - 2) * t * two - k * one) / (k + d - 2)
    return two


# Particles. Each cloud is pushed by ±ε along the mode and both follow the flow; half of their
# difference is the response, to first order free of the cloud's own noise.


def _normal(points: int, draws: int, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, one in each of as many slices of equal probability."""
    return 2**0.5 * torch.erfinv(2 * _slices(points, draws, generator) - 1)


def _slices(points: int, draws: int, generator: torch.Generator) -> Tensor:
    """Random numbers in (0, 1), one in each of as many slices: random, yet evenly spread."""
    u = torch.rand(draws, points, dtype=torch.float64, generator=generator)
    return (torch.arange(points) + u) / points


def gaussian_particle_rate(
    n: int, beta: float, *, points: int, draws: int, generator: torch.Generator
) -> Tensor:
    """The rate of the n-th cumulant on clouds of weighted particles, one for each cloud.

    Particles are drawn from N(0, 4) and weighted to N(0, 1). Equal weights would not do, see
    `equal_particle_rate`.
    """
    z = 2 * _normal(points, draws, generator)
    w = (-0.375 * z.square()).softmax(-1)
    rate = gaussian_growth_rate(n, beta)

    def velocity(x: Tensor) -> Tensor:
        v = Empirical(x[..., None], log_weights=w.log()).mean(beta * x[..., None])[..., 0]
        v = v - (w * v).sum(-1, keepdim=True)
        return v - (w * v * x).sum(-1, keepdim=True) * x  # tangent to unit variance

    def cumulants(sign: int, steps: int = 2) -> tuple[Tensor, Tensor]:
        x = start = _whitened(_whitened(z, w) + sign * PUSH * hermite(n - 1, z), w)
        h = SPAN / rate / steps
        for _ in range(steps):  # Runge and Kutta's, of fourth order
            a = velocity(x)
            b = velocity(x + h / 2 * a)
            c = velocity(x + h / 2 * b)
            x = _whitened(x + h / 6 * (a + 2 * b + 2 * c + velocity(x + h * c)), w)
        return (w * hermite(n, start)).sum(-1), (w * hermite(n, x)).sum(-1)

    up, down = cumulants(1), cumulants(-1)
    return ((up[1] - down[1]) / (up[0] - down[0])).log() / SPAN * rate


def equal_particle_rate(
    n: int, beta: float, *, points: int, draws: int, generator: torch.Generator
) -> Tensor:
    """The same with equal weights: a cloud has no tails beyond its last point, and is slower."""
    z = Whiten()(_normal(points, draws, generator)[..., None])
    bump, rate = PUSH * hermite(n - 1, z), gaussian_growth_rate(n, beta)
    pair = torch.cat([z + bump, z - bump])
    path = flow(pair, [0.0, SPAN / rate], beta=beta, contraction=Whiten(), rtol=1e-6, atol=1e-9)
    mode = hermite(n, path.states[..., 0]).mean(-1)
    response = mode[:, :draws] - mode[:, draws:]
    return (response[1] / response[0]).log() / SPAN * rate


def circle_particle_rate(
    mode: int, beta: float, *, points: int, draws: int, generator: torch.Generator
) -> Tensor:
    """The rate of a mode on clouds of random particles on the circle, one for each cloud."""
    angle = 2 * math.pi * _slices(points, draws, generator)
    bent = torch.cat([angle + s * PUSH * (mode * angle).sin() for s in (-1, 1)])
    rate = circle_growth_rate(mode, beta)
    path = flow(
        torch.stack([bent.cos(), bent.sin()], -1),
        [0.0, SPAN / rate],
        beta=beta,
        contraction=Sphere(),
        rtol=1e-6,
        atol=1e-9,
    )
    x, y = path.states.unbind(-1)
    size = (mode * torch.atan2(y, x)).cos().mean(-1)
    response = size[:, :draws] - size[:, draws:]
    return (response[1] / response[0]).log() / SPAN * rate


def first_clusters(x: Tensor, beta: float) -> Tensor:
    """How many clusters there are when the first ones have formed; points ``(*batch, N, d)``.

    Noise of size N^(-1/2) in the fastest mode needs log(N)/2 of its growth times to become of
    order one; after three times as long the points have fallen together. Links are half of 1/√β.
    """
    n, d = x.shape[-2:]
    rate = sphere_growth_rate(fastest_degree(beta, dimension=d), beta, dimension=d)
    steps = round(1.5 * math.log(n) / rate / STEP)
    start = F.normalize(x.float(), dim=-1)
    run = simulate(start, steps, beta=beta, step_size=STEP, contraction=Sphere(), every=steps)
    return clusters(run.final, distance=0.5 / beta**0.5).count.double()
