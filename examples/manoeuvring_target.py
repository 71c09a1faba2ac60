"""A target that flies straight and turns: one Kalman filter, IMM, GPB2, GPB(3), and smoothers.

Each series is a flight of 120 seconds with its own start, heading and speed; all fly the same legs,
straight or in turns of 6 degrees per second, exactly. A sensor sees the position once a second with
noise of 50 m; each coordinate is missing one time in ten, and for eight seconds of the second turn
nothing is seen. The filters know the two rates of turn and the noise of the sensor, not the legs.

    one filter   straight flight alone, with process noise large enough to follow the turns
    IMM, GPB2,   three modes (straight, left, right) that last 25 seconds on average
    GPB(3)
    legs known   told at each step which mode holds: what is left then is the noise of the sensor

The process noise of each (one number) is the best of a grid for the filtered position, on other
flights than those counted. Found: knowing how the target turns takes a good third off the error of
the best single filter, with IMM already; GPB2 takes a few percent more and costs twice as much, and
GPB(3) gains next to nothing over GPB2. Hindsight is worth more than any of this: smoothing GPB2
halves its error. It does as much for the single filter, which then is as good as GPB2 without.
Run it: python examples/manoeuvring_target.py [picture.png] (matplotlib to draw)
"""

import math
import sys
import time
from typing import NamedTuple

import torch
from torch import Tensor

import cumulant as cm

RATE = math.radians(6.0)
LEGS = [(0, 30), (1, 20), (0, 20), (2, 25), (0, 25)]  # mode and seconds
MODES = ["straight", "left", "right"]
MODE = torch.tensor([mode for mode, seconds in LEGS for _ in range(seconds)])
BLIND = slice(75, 83)
NOISE, STAY, FLIGHTS = 50.0, 0.96, 300
GRID = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


class Flights(NamedTuple):
    """Positions ``(flights, T, 2)``, and what the sensor sees of them, NaN where nothing."""

    position: Tensor
    seen: Tensor


def flights(count: int, seed: int) -> Flights:
    """Circles and lines by their geometry, not by the model."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator).double()

    turned = torch.tensor([0.0, RATE, -RATE]).double()[MODE]
    after = uniform(0.0, 2 * math.pi) + turned.cumsum(0)
    middle, half = after - turned / 2, turned / 2
    step = uniform(150.0, 250.0) * torch.sinc(half / math.pi)  # the chord of an arc
    position = torch.stack([(step * middle.cos()).cumsum(-1), (step * middle.sin()).cumsum(-1)], -1)
    seen = position + NOISE * torch.randn(position.shape, generator=generator).double()
    seen[torch.rand(seen.shape, generator=generator) < 0.1] = torch.nan
    seen[:, BLIND] = torch.nan
    return Flights(position, seen)


def turning(rate: float) -> Tensor:
    """One second of a coordinated turn, for the state (x, y, velocity x, velocity y)."""
    s, c = math.sin(rate), math.cos(rate)
    along, across = (s / rate, (1 - c) / rate) if rate else (1.0, 0.0)
    rows = [[1, 0, along, -across], [0, 1, across, along], [0, 0, c, -s], [0, 0, s, c]]
    return torch.tensor(rows).double()


TURNS = torch.stack([turning(0.0), turning(RATE), turning(-RATE)])


def model(dynamics: Tensor, noise: float) -> cm.filtering.SwitchingLinearGaussian:
    """Modes that move by these matrices, with white acceleration of this variance per second."""
    count, eye = dynamics.shape[-3], torch.eye(2).double()
    leave = (1 - STAY) / max(count - 1, 1)
    transition = torch.full((count, count), leave).double()
    accelerated = torch.tensor([[1 / 3, 1 / 2], [1 / 2, 1.0]]).double()
    return cm.filtering.SwitchingLinearGaussian(
        transition=transition.fill_diagonal_(STAY if count > 1 else 1.0),
        dynamics=dynamics,
        dynamics_noise=noise * torch.kron(accelerated, eye),
        emission=torch.cat([eye, 0 * eye], -1),
        emission_noise=NOISE**2 * eye,
        initial_mean=torch.zeros(4),
        initial_covariance=torch.tensor([250.0, 250.0, 200.0, 200.0]).square().diag(),
    )


def errors(mean: Tensor, truth: Tensor) -> Tensor:
    """Distance between estimates and positions, squared."""
    return (mean[..., :2] - truth).square().sum(-1)


def tuned(dynamics: Tensor, data: Flights, collapse: str) -> tuple[float, Tensor]:
    """The process noise of the grid with the smallest error of the filtered position."""
    found = torch.tensor(
        [
            errors(
                cm.filtering.filter(model(dynamics, q), data.seen, collapse=collapse).mean,
                data.position,
            ).mean()
            for q in GRID
        ]
    )
    return GRID[int(found.argmin())], found.sqrt()


if __name__ == "__main__":
    d = flights(60, 1)
    t0=time.perf_counter()
    legs = TURNS[MODE][:, None]
    for dyn in (TURNS[:1], TURNS, legs):
        print(tuned(dyn, d, "imm"), time.perf_counter()-t0)
    print(tuned(TURNS, d, "gpb2"), time.perf_counter()-t0)
    data = flights(300, 2)
    for dyn,c,q in ((TURNS[:1],'gpb1',300.),(TURNS,'imm',.3),(TURNS,'gpb2',.3),(TURNS,3,.3),(legs,'gpb1',.3)):
        m=model(dyn,q)
        t0=time.perf_counter(); post=cm.filtering.filter(m,data.seen,collapse=c); e=errors(post.mean,data.position); t1=time.perf_counter()-t0
        s=cm.filtering.smooth(m,post); es=errors(s.mean,data.position); t2=time.perf_counter()-t0-t1
        print(c, e.mean().sqrt(), e[:,MODE==0].mean().sqrt(),e[:,MODE>0].mean().sqrt(), es.mean().sqrt(), t1,t2)
        print(((post.mode_probabilities.argmax(-1)==MODE).float().mean(),(s.mode_probabilities.argmax(-1)==MODE).float().mean()))
