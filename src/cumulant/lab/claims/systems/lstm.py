"""Gates as a learned warp of time."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.figures import series_color
from cumulant.lab.claims.claim import HOLDS, Claim, Evidence, Picture, Trial, at_most, noted

BETA = 2.0


def clock(t: Tensor) -> Tensor:
    """A warp of the unit interval: slow, fast, slow, fast."""
    return t - 0.8 * (4 * math.pi * t).sin() / (4 * math.pi)


def gated_run(x: Tensor, gates: Tensor, **how: Any) -> Tensor:
    """The states under a sequence of gates, ``(len(gates) + 1, N, d)``."""
    states = [x]
    for gate in gates:
        states.append(dynamics.step(states[-1], beta=BETA, step_size=gate, **how))
    return torch.stack(states)


def exact(x: Tensor, patterns: Tensor, end: float) -> Tensor:
    """Where attention to fixed patterns leads, written out and integrated by scipy."""
    y = patterns.numpy()

    def rate(_: float, flat: Any) -> Any:
        weights = np.exp(BETA * flat.reshape(x.shape) @ y.T)
        return (weights @ y / weights.sum(-1, keepdims=True)).ravel()

    path = import_module("scipy.integrate").solve_ivp(
        rate, (0, end), x.numpy().ravel(), rtol=1e-10, atol=1e-12
    )
    return torch.from_numpy(path.y[:, -1].reshape(x.shape))


def learned(before: Tensor, after: Tensor, kind: Tensor, kinds: int, patterns: Tensor) -> Tensor:
    """Gates sigmoid(theta[input]) that best predict the next state, ``(kinds,)``."""
    theta = torch.full((kinds,), -3.0, dtype=before.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=40, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Any:
        optimizer.zero_grad()
        gate = theta.sigmoid()[kind][:, None, None]
        new = dynamics.step(before, beta=BETA, step_size=gate, patterns=patterns)
        value = (new - after).square().sum() / (after - before).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return theta.detach().sigmoid()


@torch.no_grad()
def cells(trial: Trial) -> tuple[float, float, float]:
    """torch's GRU cell against h + (1−z)(n−h), its LSTM cell against c + i(g−c).

    The latter twice: where f + i = 1, and with an f of its own.
    """
    x, h, c = trial.normal(3, 16, 5)
    gru, lstm = torch.nn.GRUCell(5, 5).double(), torch.nn.LSTMCell(5, 5).double()
    for weights in (*gru.parameters(), *lstm.parameters()):
        weights.copy_(trial.normal(*weights.shape) / 2)
    (ir, iz, i_n), (hr, hz, hn) = (
        torch.nn.functional.linear(y, w, b).chunk(3, -1)
        for y, w, b in ((x, gru.weight_ih, gru.bias_ih), (h, gru.weight_hh, gru.bias_hh))
    )
    z, n = (iz + hz).sigmoid(), (i_n + (ir + hr).sigmoid() * hn).tanh()
    step_gap = gru(x, h) - (h + (1 - z) * (n - h))

    def lstm_gap() -> float:
        both = x @ lstm.weight_ih.mT + lstm.bias_ih + h @ lstm.weight_hh.mT + lstm.bias_hh
        gate, _, new, _ = both.chunk(4, -1)  # torch's order: i, f, g, o
        step = c + gate.sigmoid() * (new.tanh() - c)
        return float((lstm(x, (h, c))[1] - step).abs().max())

    free = lstm_gap()
    for weights in lstm.parameters():
        weights[5:10] = -weights[:5]  # σ(−a) = 1 − σ(a), so f + i = 1
    return float(step_gap.abs().max()), lstm_gap(), free


def experiment(trial: Trial) -> Evidence:
    """Gated attention against its flow in warped time, with known gates and with learned ones."""
    sphere = dynamics.Sphere()
    x = sphere(trial.normal(8, 3))
    counts = [16, 32, 64] if trial.quick else [32, 64, 128, 256, 512]
    fine = clock(torch.linspace(0, 1, counts[-1] + 1, dtype=x.dtype))
    flow = dynamics.flow(x, fine, beta=BETA, contraction=sphere, observables={}).states
    errors: list[float] = []
    for k in counts:
        some = slice(None, None, counts[-1] // k)
        run = gated_run(x, fine[some].diff(), contraction=sphere)
        errors.append(float((run - flow[some]).norm(dim=(-2, -1)).max()))
    slope = -float(np.polyfit(np.log(counts), np.log(errors), 1)[0])
    gate = trial.uniform(8, 1)
    by_hand = x + gate * (BETA * x @ x.mT).softmax(-1) @ x
    gate_gap = (dynamics.step(x, beta=BETA, step_size=gate) - by_hand).abs().max()
    # Clocks of their own in one cloud: each token then sees the others at other times.
    many = trial.size(512, 64)
    how: dict[str, Any] = {"beta": BETA, "contraction": sphere, "observables": {}}
    own = dynamics.simulate(x, many, step_size=gate / many, every=many, **how).final
    alone = dynamics.flow(x, gate.flatten().sort().values, **how).states
    at = gate.flatten().argsort().argsort()
    clocks = float((own - alone[at, torch.arange(8)]).norm() / (alone[-1] - x).norm())

    # A signal that runs at a speed which depends on an input symbol, and gates that read it.
    speeds = torch.tensor([0.3, 0.8, 1.7, 3.0], dtype=x.dtype)
    ticks = trial.size(160, 80)
    kind = torch.randint(4, (ticks // 8,), generator=trial.generator).repeat_interleave(8)
    kind[:32] = torch.arange(4).repeat_interleave(8)  # each speed occurs
    time = torch.cat([speeds.new_zeros(1), (speeds[kind] / ticks).cumsum(0)])
    patterns = trial.normal(6, 3)
    start = 0.5 * trial.normal(8, 3)
    teacher = dynamics.flow(start, time, beta=BETA, patterns=patterns, observables={}).states
    flow_gap = (teacher[-1] - exact(start, patterns, float(time[-1]))).abs().max()
    found = learned(teacher[:-1], teacher[1:], kind, 4, patterns)
    constant = learned(teacher[:-1], teacher[1:], torch.zeros_like(kind), 1, patterns)
    speed_error = float((found * ticks / speeds - 1).abs().max())
    runs = [
        gated_run(start, gates, patterns=patterns) - teacher
        for gates in (found[kind], constant.expand(ticks))
    ]
    lag = [run.norm(dim=(-2, -1)) for run in runs]
    share = float(lag[0].max() / lag[1].max())
    gru, tied, free = cells(trial)

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.step(range(ticks), speeds[kind], where="post", color=series_color(0), label="speed")
        left.step(
            range(ticks),
            found[kind] * ticks,
            where="post",
            color=series_color(1),
            linestyle="--",
            label="learned gate",
        )
        left.set(xlabel="tick", ylabel="time a tick takes, × ticks")
        left.legend(loc="upper right", ncols=2)
        left.set_ylim(0, 3.9)
        for i, label in ((1, "one gate for all"), (0, "learned gates")):
            right.plot(lag[i], "-" if i == 0 else "--", color=series_color(2 + i), label=label)
        right.set(xlabel="tick", ylabel="distance from the signal")
        right.legend()

    return Evidence(
        [
            at_most(
                "order_error",
                abs(slope - 1),
                0.1,
                "order of convergence of gated layers to the flow in warped time, minus 1",
            ),
            at_most(
                "speed_error",
                speed_error,
                0.1,
                "learned gates against the speeds they were never told, largest relative error",
            ),
            at_most(
                "lag_share",
                share,
                0.5,
                "how far the gated run strays from the signal, as a share of the best single gate",
            ),
            at_most(
                "gate_gap",
                gate_gap,
                1e-12,
                "a step with a gate for each token against the formula",
                form="control",
            ),
            at_most(
                "flow_gap", flow_gap, 1e-6, "the signal against scipy's solution", form="control"
            ),
            at_most(
                "gru_cell",
                gru,
                1e-12,
                "torch's GRU cell against h′ = h + (1−z)(n−h), step size 1−z",
            ),
            at_most(
                "lstm_tied", tied, 1e-12, "torch's LSTM cell with f + i = 1 against c + i(g−c)"
            ),
            noted("lstm_free", free, "the same with f of its own: no such step"),
            noted(
                "own_clocks_gap",
                clocks,
                "a clock for each token of one cloud: distance from the flow at the tokens' times, "
                "relative, which does not vanish",
            ),
        ],
        f"A gated layer follows the flow in warped time with order {slope:.2f}. Gates learned "
        f"from a signal of changing speed are that speed to {speed_error:.1%}, and the gated run "
        f"strays {share:.2f} times as far from it as one with a single gate. A GRU cell is such a "
        f"step to rounding; an LSTM cell is one only if f + i = 1, and misses it by up to "
        f"{free:.1f} otherwise.",
        Picture(
            draw,
            "Gates that read an input symbol, trained to predict the next state of a signal whose "
            "speed changes with the symbol, become that speed (left); run freely they follow the "
            "signal, which the best single gate does not (right).",
        ),
    )


CLAIM = Claim(
    id="lstm",
    title="Gates as a warp of time",
    statement=(
        "A gate that scales the update of a recurrent state is a learned, input-dependent step "
        "size: it lets the network run through its dynamics at the pace of the signal."
    ),
    source="main draft, §2.2, after Tallec and Ollivier (2018)",
    formula=r"h_{t+1} = h_t + g_t f(h_t) \approx x(c(t+1)), \qquad g_t = c(t+1) - c(t), "
    r"\quad \dot{x} = f(x)",
    recorded=HOLDS,
    experiment=experiment,
    systems=("long short-term memory", "gated recurrent unit", "leaky recurrent unit"),
    tests=("tests/dynamics/test_step.py", "tests/laws/test_population.py"),
)
