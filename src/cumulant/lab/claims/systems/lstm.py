"""Gates as a learned warp of time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import dynamics
from cumulant.core.typed import linalg
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import fitted, gap, integrated, order

BETA = 2.0
SPEEDS = torch.tensor([0.3, 0.8, 1.7, 3.0], dtype=torch.float64)

CLAIM = Claim(
    id="lstm",
    title="Gates as a warp of time",
    evidence="simulation",
    statement="A gate that scales the update of a recurrent state is a learned, input-dependent "
    "step size: it lets the network run its dynamics at the pace of the signal.",
    theory="T16",
    source="main draft, §2.2, after Tallec and Ollivier (2018)",
    formula=r"h_{t+1} = h_t + g_t f(h_t) \approx x(c(t+1)), \qquad g_t = c(t+1) - c(t), "
    r"\quad \dot{x} = f(x)",
    bounds="A few halvings show Euler's order, 1, to a tenth. Gates count as speeds if each is "
    "accurate to a tenth and the gated run stays at least twice as close to the signal as the best "
    "single gate.",
    recorded="holds",
    systems=("long short-term memory", "gated recurrent unit", "leaky recurrent unit"),
    tests=("tests/dynamics/test_step.py", "tests/laws/test_population.py"),
    rules=table("""
      statement:
        order_error ≤ 0.1: order of convergence of gated layers to the flow in warped time, minus 1
        speed_error ≤ 0.1: learned gates against the hidden speeds, largest relative error
        lag_share ≤ 0.5: how far the gated run strays from the signal, as a share of the best single
            gate
        gru_cell ≤ 1e-12: torch's GRU cell against h′ = h + (1−z)(n−h), step size 1−z
        lstm_tied ≤ 1e-12: torch's LSTM cell with f + i = 1 against c + i(g−c)
      control:
        gate_gap ≤ 1e-12: a step with a gate for each token against the formula
        flow_gap ≤ 1e-6: the signal against scipy's solution
      noted:
        lstm_free: the same with an independent f: not such a step
        own_clocks_gap: a clock for each token of one cloud: distance from the flow at the tokens'
            times, relative, which does not vanish
    """),
    finding="A gated layer follows the flow in warped time with order {slope:.2f}. Gates learned "
    "from a signal of changing speed are that speed to {speed_error:.1%}, and the gated run "
    "strays {lag_share:.2f} times as far from it as one with a single gate. A GRU cell is such a "
    "step to rounding; an LSTM cell is one only if f + i = 1, and misses it by up to "
    "{lstm_free:.1f} otherwise.",
    caption="Gates that read an input symbol, trained to predict the next state of a signal whose "
    "speed changes with the symbol, learn that speed (left); run freely they follow the signal, "
    "which the best single gate does not (right).",
)


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

    def rate(z: Any) -> Any:
        weights = np.exp(BETA * z @ y.T)
        return weights @ y / weights.sum(-1, keepdims=True)

    return integrated(rate, x, end, rtol=1e-10, atol=1e-12)


def learned(before: Tensor, after: Tensor, kind: Tensor, kinds: int, patterns: Tensor) -> Tensor:
    """Gates sigmoid(theta[input]) that best predict the next state, ``(kinds,)``."""

    def loss(theta: Tensor) -> Tensor:
        gate = theta.sigmoid()[kind][:, None, None]
        new = dynamics.step(before, beta=BETA, step_size=gate, patterns=patterns)
        return (new - after).square().sum() / (after - before).square().sum()

    start = torch.full((kinds,), -3.0, dtype=before.dtype)
    return fitted(loss, start, max_iter=40, tolerance_change=1e-12).sigmoid()


@torch.no_grad()
def cells(trial: Trial) -> tuple[float, float, float]:
    """torch's GRU cell against h + (1−z)(n−h), its LSTM cell against c + i(g−c).

    The latter twice: with f + i = 1, and with an independent f.
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
        return gap(lstm(x, (h, c))[1], step)

    free = lstm_gap()
    for weights in lstm.parameters():
        weights[5:10] = -weights[:5]  # σ(−a) = 1 − σ(a), so f + i = 1
    return float(step_gap.abs().max()), lstm_gap(), free


def warped(trial: Trial, x: Tensor) -> tuple[float, float, float]:
    """Gates as steps on the sphere.

    Returns:
        The order with which gated layers approach the flow in warped time; error of a step with
        a gate for each token; distance of tokens with separate clocks from the flow at each
        token's time, since each then sees the others at other times.
    """
    sphere, many = dynamics.Sphere(), trial.size(512, 64)
    counts = [16, 32, 64] if trial.quick else [32, 64, 128, 256, 512]
    fine = clock(torch.linspace(0, 1, counts[-1] + 1, dtype=x.dtype))
    how: dict[str, Any] = {"beta": BETA, "contraction": sphere, "observables": {}}
    flow = dynamics.flow(x, fine, **how).states
    errors: list[float] = []
    for k in counts:
        some = slice(None, None, counts[-1] // k)
        run = gated_run(x, fine[some].diff(), contraction=sphere)
        errors.append(float(linalg.vector_norm(run - flow[some], dim=(-2, -1)).max()))
    gate = trial.uniform(8, 1)
    by_hand = x + gate * (BETA * x @ x.mT).softmax(-1) @ x
    own = dynamics.simulate(x, many, step_size=gate / many, every=many, **how).final
    alone = dynamics.flow(x, gate.flatten().sort().values, **how).states
    there = alone[gate.flatten().argsort().argsort(), torch.arange(8)]
    off = float(linalg.vector_norm(own - there) / linalg.vector_norm(alone[-1] - x))
    step_gap = gap(dynamics.step(x, beta=BETA, step_size=gate), by_hand)
    return order(counts, errors), step_gap, off


def measure(trial: Trial) -> Found:
    """Gated attention against its flow in warped time, with known gates and with learned ones."""
    slope, gate_gap, clocks = warped(trial, dynamics.Sphere()(trial.normal(8, 3)))
    # A signal that runs at a speed which depends on an input symbol, and gates that read it.
    ticks = trial.size(160, 80)
    kind = torch.randint(4, (ticks // 8,), generator=trial.generator).repeat_interleave(8)
    kind[:32] = torch.arange(4).repeat_interleave(8)  # each speed occurs
    time = torch.cat([SPEEDS.new_zeros(1), (SPEEDS[kind] / ticks).cumsum(0)])
    patterns, start = trial.normal(6, 3), 0.5 * trial.normal(8, 3)
    teacher = dynamics.flow(start, time, beta=BETA, patterns=patterns, observables={}).states
    found = learned(teacher[:-1], teacher[1:], kind, 4, patterns)
    constant = learned(teacher[:-1], teacher[1:], torch.zeros_like(kind), 1, patterns)
    lag = [
        linalg.vector_norm(gated_run(start, gates, patterns=patterns) - teacher, dim=(-2, -1))
        for gates in (found[kind], constant.expand(ticks))
    ]
    gru, tied, free = cells(trial)
    numbers = {
        "order_error": abs(slope - 1),
        "speed_error": gap(found * ticks / SPEEDS, 1),
        "lag_share": lag[0].max() / lag[1].max(),
        "gate_gap": gate_gap,
        "flow_gap": gap(teacher[-1], exact(start, patterns, float(time[-1]))),
        "gru_cell": gru,
        "lstm_tied": tied,
        "lstm_free": free,
        "own_clocks_gap": clocks,
    }
    speeds = {"speed": SPEEDS[kind], "learned gate": found[kind] * ticks}
    return Found(numbers, slope=slope, speeds=speeds, lag=lag)


def draw(figure: Any, seen: Any) -> None:
    """Speed of the signal and learned gates; how far gated runs stray from it."""
    left, right = figure.subplots(1, 2)
    for i, (label, values) in enumerate(seen.speeds.items()):
        look = {"color": series_color(i), "linestyle": ("-", "--")[i], "label": label}
        left.step(range(len(values)), values, where="post", **look)
    left.set(xlabel="tick", ylabel="time a tick takes, × ticks")
    left.legend(loc="upper right", ncols=2)
    left.set_ylim(0, 3.9)
    for i, label in ((1, "one gate for all"), (0, "learned gates")):
        right.plot(seen.lag[i], "-" if i == 0 else "--", color=series_color(2 + i), label=label)
    right.set(xlabel="tick", ylabel="distance from the signal")
    right.legend()
