"""T22: the classical Hopfield network as linear attention, and feed-forward layers as networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, gelu, silu, softplus

from cumulant import Memory, memory
from cumulant.core.interception import Begun, Hook, Scope
from cumulant.core.typed import functional, linalg
from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, median
from cumulant.lab.claims.remembering import remembered
from cumulant.lab.claims.subjects import MODELS, NEEDS, Subject, subject

QUICK = ("minilm",)
TOKENS = 4  # of each text, evenly spread
LOADS = (0.04, 0.08, 0.12, 0.16, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)

CLAIM = Claim(
    id="T22",
    title="Classical networks, linear attention, feed-forward layers",
    evidence="empirical",
    statement="The classical Hopfield network, with its patterns stored in the weights, is "
    "unnormalized linear attention followed by the sign; the dense network is exponential "
    "attention. The feed-forward layer may be a classical Hopfield layer too.",
    correction="A feed-forward layer is an update of a Hopfield network only if its second "
    "weights are the transpose of the first; with an increasing activation it then descends the "
    "energy. Trained layers are not: their Jacobians are far from symmetric.",
    source="proofs draft, section B; Hopfield (1982); Krotov and Hopfield (2021)",
    formula=r"\operatorname{sign}(W\xi) = \operatorname{sign}\left(\sum_i x_i"
    r" \langle x_i, \xi\rangle - N\xi\right), \qquad"
    r" W_1^\top \varphi(W_1 \xi) = \nabla \sum_h \Phi\left((W_1 \xi)_h\right), \quad"
    r" \Phi' = \varphi",
    bounds="A layer is a gradient where its Jacobian is symmetric: asymmetry |J − Jᵀ| / |J| is "
    "0 there, 1.4 for independent weights and 2 for an antisymmetric one; a tenth counts as "
    "symmetric, a half does not. What it adds is the Hopfield update of its first weights if "
    "their cosine is 1; half of that supports the claim, and 0 or less refutes it. The model "
    "nearest to the claim decides. Only rounding separates tied layers from a gradient. The "
    "classical network is known to break down at 0.14 patterns per unit (Amit et al. 1985): "
    "twice that must leave it a fifth at most. The first rule judged independent random "
    "matrices, which say nothing about trained ones; this one was written before their Jacobians "
    "were measured.",
    recorded="holds with a correction",
    systems=("classical Hopfield network",),
    tests=("tests/laws/test_hopfield.py",),
    needs=NEEDS,
    rules=table("""
      statement:
        real_asymmetry ≤ 0.1 (refuted at 0.5): asymmetry of the Jacobian of real feed-forward
            layers at their own inputs, relative, median over layers and tokens, the model with the
            least
        real_update ≥ 0.5 (refuted at 0): cosine of what a real layer gives with the Hopfield update
            of its first weights, mean over layers and tokens, the model with the most
      correction:
        tied_asymmetry ≤ 1e-12: asymmetry of a layer's Jacobian, relative, W₂ = W₁ᵀ
        tied_rise ≤ 1e-11: largest rise of E by a tied layer
      control:
        wrong_units ≤ 0: units that differ from sign(Wξ), W a matrix
        linear_gap ≤ 1e-12: linear memory against linear attention
        classical_lost ≤ 0.2: classical recall at 0.3 d
        dense_held ≥ 0.99: dense recall at 10 d
        jacobian_gap ≤ 0.001: Jacobian of a real layer by its weights against autograd, relative
      noted:
        untied_asymmetry: asymmetry of a layer's Jacobian, W₂ and W₁ independent
        untied_rises: share of untied updates that raise the energy of W₁
        aligned_least: share of MiniLM's neurons with a cosine of first and second weights beyond
            0.3 or −0.3, the layer with the fewest
        aligned_most: the layer with the most
        aligned_mean: mean cosine of first and second weights over all of MiniLM's neurons
    """),
    finding="Classical and linear memory agree with a weight matrix. At 0.3 d patterns the "
    "classical network recalls {classical_lost:.0%}, the dense one at 10 d {dense_held:.0%}. A "
    "feed-forward layer with W₂ = W₁ᵀ descends an energy. Trained ones: {told}; independent "
    "weights have asymmetry {untied_asymmetry:.1f}. In MiniLM {aligned_least:.0%} to "
    "{aligned_most:.0%} of a layer's neurons have first and second weights with a cosine beyond "
    "±0.3, mean over all {aligned_mean:.2f}.",
    caption="Left: the classical network breaks down between 0.12 and 0.2 patterns per unit, the "
    "dense one holds ten. Middle: a feed-forward layer applied repeatedly descends the energy of "
    "its first weights if the second are their transpose, and otherwise does not. Right: asymmetry "
    "of the Jacobians of trained layers; dashed, independent weights.",
    size=(10.0, 3.2),
)


class Layer(NamedTuple):
    """A trained feed-forward layer: W₁ ``(H, D)``, W₂ ``(D, H)``, a gate like W₁ or None."""

    first: Tensor
    bias: Tensor | float
    second: Tensor
    gate: Tensor | None


def layers_of(model: Any) -> list[tuple[Any, Layer]]:
    """The module that reads each layer's input, and the layer's weights."""
    if hasattr(model, "layers"):
        mlps = [block.mlp for block in model.layers]
        return [
            (x.gate_proj, Layer(x.up_proj.weight, 0.0, x.down_proj.weight, x.gate_proj.weight))
            for x in mlps
        ]
    if hasattr(model.encoder, "albert_layer_groups"):
        own = model.encoder.albert_layer_groups[0].albert_layers[0]
        pairs = [(own.ffn, own.ffn_output)]
    else:
        pairs = [(x.intermediate.dense, x.output.dense) for x in model.encoder.layer]
    return [(one, Layer(one.weight, one.bias, two.weight, None)) for one, two in pairs]


def output(layer: Layer, x: Tensor) -> Tensor:
    """What the layer gives at a state, without the second bias."""
    z = layer.first @ x + layer.bias
    return layer.second @ (gelu(z) if layer.gate is None else silu(layer.gate @ x) * z)


def slope(activation: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """φ'(z), elementwise."""
    return torch.func.jvp(activation, (z,), (torch.ones_like(z),))[1]


def jacobian(layer: Layer, x: Tensor) -> Tensor:
    """W₂ diag(φ') W₁, with a gate the sum over both factors."""
    z = layer.first @ x + layer.bias
    if layer.gate is None:
        return (layer.second * slope(gelu, z)) @ layer.first
    g = layer.gate @ x
    return (layer.second * silu(g)) @ layer.first + (layer.second * z * slope(silu, g)) @ layer.gate


def hopfield(layer: Layer, x: Tensor) -> Tensor:
    """The layer with its second weights tied to the first; a gate has its own update, too."""
    z = layer.first @ x + layer.bias
    if layer.gate is None:
        return layer.first.mT @ gelu(z)
    g = layer.gate @ x
    return layer.first.mT @ silu(g) + layer.gate.mT @ (z * slope(silu, g))


@torch.no_grad()
def trained(one: Subject) -> dict[str, Any]:
    """Asymmetries and cosines of every layer at states of its own; cosines of its neurons."""
    found = layers_of(one.model)
    inputs: dict[int, list[Tensor]] = {i: [] for i in range(len(found))}

    def note(i: int, module: Any, args: Any, kwargs: Any, given: Any) -> None:
        states = args[0]
        at = torch.linspace(1, states.shape[1] - 2, TOKENS).long()
        inputs[i].append(states[0, at])

    hooks = [Hook(reader, partial(note, i), after=True) for i, (reader, _) in enumerate(found)]
    with Scope(lambda: Begun(None, hooks)):
        one.run()
    asymmetry, cosine, aligned = list[list[float]](), list[list[float]](), list[list[float]]()
    for i, (_, layer) in enumerate(found):
        states = torch.cat(inputs[i])
        J = torch.stack([jacobian(layer, x) for x in states])
        size = linalg.matrix_norm(J)
        asymmetry.append([float(x) for x in linalg.matrix_norm(J - J.mT) / size])
        pairs = [(output(layer, x), hopfield(layer, x)) for x in states]
        cosine.append([float(cosine_similarity(a, b, dim=0)) for a, b in pairs])
        aligned.append([float(x) for x in cosine_similarity(layer.first, layer.second.mT, dim=1)])
    x = inputs[0][0][0]
    truth = functional.jacobian(partial(output, found[0][1]), x)
    off = linalg.matrix_norm(jacobian(found[0][1], x) - truth) / linalg.matrix_norm(truth)
    return {"asymmetry": asymmetry, "cosine": cosine, "aligned": aligned, "off": float(off)}


def against_matrix(trial: Trial) -> tuple[int, float]:
    """(units unlike sign(W ξ), error of linear attention), W written out as a matrix."""
    wrong, off, d = 0, 0.0, 60
    for n in (1, 4, 9):
        x, xi = (2 * (trial.uniform(rows, d) < 0.5).double() - 1 for rows in (n, 40))
        W = torch.stack([torch.outer(pattern, pattern) for pattern in x]).sum(0)
        field = xi @ (W - n * torch.eye(d))
        expected = torch.where(field == 0, xi, field.sign())
        wrong += int((memory.ClassicalMemory(x).retrieve(xi).state != expected).sum())
        attended = (xi @ x.mT) @ x / d  # the scores are the weights: no softmax, no normalizer
        ours = memory.LinearMemory(x).retrieve(xi).state
        off = max(off, gap(ours, attended), gap(ours, xi @ W / d))
    return wrong, off


def layer(trial: Trial, first: Tensor, second: Tensor) -> tuple[float, Tensor]:
    """(asymmetry of the Jacobian, energies along paths) of x ← W₂ tanh(W₁ x).

    The energy is that of W₁: ½‖x‖² less the sum over hidden units of log cosh, tanh's integral.
    """

    def apply(x: Tensor) -> Tensor:
        return torch.tanh(x @ first.mT) @ second.mT

    asymmetry, d = 0.0, first.shape[-1]
    for x in trial.normal(5, d):
        J = functional.jacobian(apply, x)
        asymmetry = max(asymmetry, float(linalg.vector_norm(J - J.mT) / linalg.vector_norm(J)))
    x, energies = 0.3 * trial.normal(200, d), list[Tensor]()
    for _ in range(12):
        z = x @ first.mT
        log_cosh = softplus(2 * z) - z - math.log(2)
        energies.append((x * x).sum(-1) / 2 - log_cosh.sum(-1))
        x = apply(x)
    return asymmetry, torch.stack(energies)


def measure(trial: Trial) -> Found:
    """Against a weight matrix; capacity beside the dense network; layers with and without tie."""
    wrong, off = against_matrix(trial)
    d, seeds = trial.size(400, 200), range(1000 * trial.seed, 1000 * trial.seed + trial.size(4, 2))

    def recall(make: Callable[[Tensor], Any]) -> Tensor:
        how: dict[str, Any] = {"flips": 0.05, "steps": 10, "queries": 100}
        counts = [int(load * d) for load in LOADS]
        rates = [memory.recall(make, d, counts, seed=seed, **how).rate for seed in seeds]
        return torch.tensor(rates).mean(0)

    classical, dense = recall(memory.ClassicalMemory), recall(lambda x: Memory(x, beta=0.5))
    first, other = (trial.normal(32, 8) / math.sqrt(8) for _ in range(2))
    tied, falling = layer(trial, first, first.mT)
    untied, wandering = layer(trial, first, other.mT)
    real: dict[str, dict[str, Any]] = {}
    for key in QUICK if trial.quick else MODELS:
        one = subject(key, 2, 1)
        real[key] = remembered(one.digest, {"T22": TOKENS}, partial(trained, one), source=__file__)
    numbers = {
        "wrong_units": wrong,
        "linear_gap": off,
        "classical_lost": classical[5],
        "dense_held": dense[-1],
        "untied_asymmetry": untied,
        "tied_asymmetry": tied,
        "tied_rise": falling.diff(dim=0).max(),
        "untied_rises": (wandering.diff(dim=0) > 0).double().mean(),
    }
    middles = {
        key: median([x for row in found["asymmetry"] for x in row]) for key, found in real.items()
    }
    means = {key: mean(found["cosine"]) for key, found in real.items()}
    shares = [sum(abs(x) > 0.3 for x in row) / len(row) for row in real["minilm"]["aligned"]]
    numbers |= {
        "real_asymmetry": min(middles.values()),
        "real_update": max(means.values()),
        "jacobian_gap": max(found["off"] for found in real.values()),
        "aligned_least": min(shares),
        "aligned_most": max(shares),
        "aligned_mean": mean(real["minilm"]["aligned"]),
    }
    names = {key: MODELS[key][2] for key in real}
    told = ", ".join(
        f"{names[key]} has asymmetry {middles[key]:.2f} and a cosine of {means[key]:.2f} with the "
        "update of its first weights"
        for key in real
    )
    recalls, paths = {"classical": classical, "dense": dense}, (falling, wandering)
    return Found(numbers, d=d, recalls=recalls, paths=paths, told=told, real=real, names=names)


def mean(rows: list[list[float]]) -> float:
    """Over all rows."""
    return sum(map(sum, rows)) / sum(map(len, rows))


def draw(figure: Any, seen: Any) -> None:
    """Recall against the load; the energy along layers with and without tie; trained layers."""
    left, right, real = figure.subplots(1, 3)
    for i, (name, rate) in enumerate(seen.recalls.items()):
        left.semilogx(LOADS, rate, "o-", color=series_color(i), markersize=4, label=name)
    left.set(xlabel="patterns per unit, N/d", ylabel="share recalled", title=f"d = {seen.d}")
    left.legend()
    for i, (name, path) in enumerate(zip(("tied, W₂ = W₁ᵀ", "untied"), seen.paths, strict=True)):
        lines = right.plot(path[:, :8], color=series_color(i), linewidth=1)
        lines[0].set_label(name)
    right.set(xlabel="update", ylabel="energy of W₁", title="feed-forward layers, φ = tanh")
    right.legend()
    for i, (key, found) in enumerate(seen.real.items()):
        middle = [median(row) for row in found["asymmetry"]]
        depth = torch.linspace(0, 1, len(middle)) if len(middle) > 1 else [0.5]
        real.plot(depth, middle, "o-", ms=3.5, color=series_color(i), label=seen.names[key])
    real.axhline(math.sqrt(2), color=MUTED, lw=1, ls="--")
    real.set(xlabel="depth", ylabel="asymmetry of the Jacobian", ylim=(0, 1.6))
    real.set_title("trained layers")
    real.legend(loc="lower left")
