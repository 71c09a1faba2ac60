"""T23: the weight matrices of a real model, which neither theory explains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant import attend
from cumulant.core.typed import linalg, tolist
from cumulant.figures import COLORS, MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.functions import Costs, replaced, tasks
from cumulant.lab.claims.measuring import gap, median, relative, standard_error
from cumulant.lab.claims.real import (
    Sublayer,
    attentions,
    loaded,
    passage_ids,
    split,
    sublayers,
)
from cumulant.lab.claims.subjects import NEEDS
from cumulant.lens import observe
from cumulant.lens.sensitivity import Group, sensitivity
from cumulant.lens.typed import view
from cumulant.lens.weights import Block, projections

SIZE = 1e-3  # of the perturbation, relative to the weights
TEMPERATURES = tolist(torch.logspace(-3, 1.5, 19))  # tried for scores without W_q, W_k

CLAIM = Claim(
    id="T23",
    title="What the weight matrices do",
    evidence="empirical",
    statement="Neither this theory nor that of Hopfield networks explains the weight matrices. "
    "Some may be less sensitive: queries and keys less than values and outputs.",
    source="proofs draft, §B",
    formula=r"\frac{\lVert \operatorname{att}(x; W) - \operatorname{att}(x; I) \rVert}"
    r"{\lVert \operatorname{att}(x; W) \rVert}, \qquad "
    r"\frac{1}{\lVert y \rVert}\sqrt{\sum_W \frac{\lVert W \rVert^2}{n_W} "
    r"\left\lVert \frac{\partial y}{\partial W} \right\rVert^2}",
    bounds="The model computes in single precision: 1e-4. Sensitivities are estimated from a few "
    "random probes and perturbations, each accurate to about a tenth: 0.4. The statement is "
    "decided by what can be: whether queries and keys are the less sensitive. By derivatives, the "
    "ratio must be at least 1; by function, replacing W_q and W_k by the identity in one layer "
    "must cost less than replacing W_v and W_o, beyond two standard errors over layers in both "
    "models, and is refuted if it costs more by as much in either. The ratio of derivatives was "
    "noted before it became part of the rule, so its number was known; the losses were not.",
    recorded="open",
    tests=("tests/lens/test_sensitivity.py", "tests/lens/test_weights.py"),
    needs=NEEDS,
    rules=table("""
      statement:
        sensitivity_ratio ≥ 1: sensitivity to W_v, W_o over that to W_q, W_k, median over blocks
        function_order ≥ 2 (refuted at -2): nats lost with W_v, W_o the identity in one layer, less
            those with W_q, W_k, mean over standard error over layers, the lesser of both models
      control:
        lens_gap ≤ 0.0001: statistics by the lens and states rebuilt with the library's attention,
            against the model's own in eager mode
        sensitivity_gap ≤ 0.4: sensitivity against actually perturbed weights, relative
      noted:
        query_key_identity: change of the attention output with W_q, W_k the identity, relative
        uniform_weights: the same with uniform weights
        value_output_identity: the same with W_v, W_o the best multiple of the identity
        one_head: the same with the mean weights in all heads
        constant: the same with one vector for all tokens, the mean of the output
        query_key_fitted: with W_q, W_k the identity at the best temperature, times the best gain
        uniform_fitted: uniform weights times the best gain
        one_head_fitted: the mean weights in all heads, times the best gain
        no_feed_forward: change of the next state without the feed-forward layer, relative
    """),
    finding="A constant, the mean over tokens, misses the attention output of MiniLM by "
    "{constant:.0%} of its size, less than most replacements do: W_q and W_k the identity misses "
    "it by {query_key_identity:.0%}, uniform weights by {uniform_weights:.0%}, one set of weights "
    "for all heads by {one_head:.0%}, any multiple of the identity for W_v and W_o by "
    "{value_output_identity:.0%}. At its best temperature and gain the identity for W_q and W_k "
    "({query_key_fitted:.0%}) does no better than uniform weights with a gain "
    "({uniform_fitted:.0%}). The model is {least:.1f} to {most:.1f} times as sensitive to W_v, W_o "
    "as to W_q, W_k by derivatives. By function, one layer without W_v and W_o costs {told}.",
    caption="Left: how much of the attention output each block of MiniLM loses with one part "
    "replaced; a constant (dashed) loses less than most. Right: the model is more sensitive to "
    "value and output weights than to the others.",
)


def merge(heads: Tensor) -> Tensor:
    """``(H, N, d)`` to ``(N, D)``."""
    return heads.transpose(-3, -2).flatten(-2)


def fitted_gain(replaced: Tensor, output: Tensor) -> float:
    """|c · replaced - output| / |output| at the best c."""
    best = (replaced * output).sum() / replaced.square().sum()
    return relative(best * replaced, output)


def ablated(layer: Sublayer) -> dict[str, float]:
    """Change of the attention output with one part removed; of the block for feed-forward."""
    block, x, scale = layer.block, layer.state, layer.scale
    dense = block.attention.output.dense
    query, key, value = layer.query, layer.key, layer.value
    weights = (scale * query @ key.mT).softmax(-1)
    output = dense(merge(attend(query, key, value, scale=scale).mean))
    token = split(x)

    def without_qk(scale: float) -> Tensor:
        return dense(merge(attend(token, token, value, scale=scale).mean))

    uniform = dense(merge(value.mean(-2, keepdim=True).expand_as(value)))
    one_head = dense(merge(weights.mean(0) @ value))
    after = block.attention.output.LayerNorm(output + x)
    rebuilt = block.output(block.intermediate(after), after)
    return {
        "rebuilt": relative(rebuilt, layer.after),
        "query_key": relative(without_qk(scale), output),
        "query_key_fitted": min(fitted_gain(without_qk(t * scale), output) for t in TEMPERATURES),
        "uniform": relative(uniform, output),
        "uniform_fitted": fitted_gain(uniform, output),
        "value_output": fitted_gain(merge(attend(query, key, token, scale=scale).mean), output),
        "heads": relative(one_head, output),
        "heads_fitted": fitted_gain(one_head, output),
        "constant": relative(output.mean(0).expand_as(output), output),
        "feed_forward": relative(block.output.LayerNorm(after), layer.after),
    }


def function_order(found: Costs) -> tuple[float, float, float]:
    """(t, mean without W_v and W_o, mean without W_q and W_k): nats lost, layer by layer."""
    value, query = (
        torch.tensor(found["single"][part], dtype=torch.float64) - found["intact"]
        for part in ("value_output", "query_key")
    )
    away = value - query
    return float(away.mean()) / standard_error(away), float(value.mean()), float(query.mean())


def lens_gap() -> float:
    """Entropy, largest weight and weight on itself by the lens, against the written-out weights."""
    with observe(loaded().model, spectrum=False) as lens:
        loaded().model(passage_ids())
    table = view(lens.table())
    p = torch.stack(attentions())
    truth = {
        "entropy": -torch.xlogy(p, p).sum(-1),
        "top_weight": p.amax(-1),
        "self_mass": p.diagonal(dim1=-2, dim2=-1),
    }
    found = {name: torch.tensor(table[name].to_numpy(float)) for name in truth}
    return max(gap(found[n], x.flatten()) for n, x in truth.items())


def perturbed(blocks: tuple[Block, ...], ids: Tensor, trial: Trial, draws: int) -> float:
    """The figure of `sensitivity` by changing the weights and running the model again."""
    model = loaded().model
    before, squares = model(ids).last_hidden_state, 0.0
    kept = [b.parameter.detach().clone() for b in blocks]
    for _ in range(draws):
        try:
            for block, own in zip(blocks, kept, strict=True):
                noise = (
                    trial.normal(*own.shape).to(own)
                    * linalg.vector_norm(own)
                    / math.sqrt(own.numel())
                )
                block.parameter.copy_(own + SIZE * noise)
            squares += relative(model(ids).last_hidden_state, before) ** 2 / draws
        finally:
            for block, own in zip(blocks, kept, strict=True):
                block.parameter.copy_(own)
    return math.sqrt(squares) / SIZE


@torch.no_grad()
def measure(trial: Trial) -> Found:
    """Each block of MiniLM with its own input, one part replaced at a time."""
    model, ids = loaded().model, passage_ids()[:, :64]
    lost = [ablated(layer) for layer in sublayers()]
    groups: list[Group] = []
    for i, layer in enumerate(sublayers()):
        own = layer.block.attention
        count = len(layer.query)
        found = projections(own.self, heads=count, key_heads=count, parent=own)
        groups += [Group(i, found.query_key, found.value_output)] if found else []
    how: dict[str, Any] = {"probes": trial.size(16, 4), "seed": trial.seed}
    figures = sensitivity(model, lambda: model(ids).last_hidden_state, groups, **how)
    middle = len(groups) // 2
    gaps = [
        abs((figure or 0.0) / perturbed(tuple(blocks), ids, trial, trial.size(24, 6)) - 1)
        for figure, blocks in (
            (figures[middle].query_key, groups[middle].query_key),
            (figures[middle].value_output, groups[middle].value_output),
        )
    ]
    ratios = [(f.value_output or 0.0) / (f.query_key or 1.0) for f in figures]
    typical = {name: median([x[name] for x in lost]) for name in lost[0]}
    spread = torch.tensor(ratios)
    orders = {task.name: function_order(replaced(task)) for task in tasks(trial.quick)}
    told = ", ".join(
        f"{name} {value:.2f} nats (without W_q and W_k {query:.2f})"
        for name, (_, value, query) in orders.items()
    )
    numbers = {
        "lens_gap": max(lens_gap(), *(x["rebuilt"] for x in lost)),
        "sensitivity_gap": max(gaps),
        "query_key_identity": typical["query_key"],
        "uniform_weights": typical["uniform"],
        "value_output_identity": typical["value_output"],
        "one_head": typical["heads"],
        "constant": typical["constant"],
        "query_key_fitted": typical["query_key_fitted"],
        "uniform_fitted": typical["uniform_fitted"],
        "one_head_fitted": typical["heads_fitted"],
        "no_feed_forward": typical["feed_forward"],
        "function_order": min(t for t, *_ in orders.values()),
        "sensitivity_ratio": (median(spread), standard_error(spread)),
    }
    return Found(
        numbers, least=min(ratios), most=max(ratios), told=told, figures=figures, lost=lost
    )


def draw(figure: Any, seen: Any) -> None:
    """What is lost in each block with one part replaced; how sensitive the model is to each."""
    left, right = figure.subplots(1, 2)
    depth = range(len(seen.lost))
    parts = {
        "query_key": "$W_q$, $W_k$ → identity",
        "uniform": "uniform weights",
        "value_output": "$W_v$, $W_o$ → c · identity",
        "heads": "mean weights in all heads",
    }
    for i, (name, label) in enumerate(parts.items()):
        lost = [x[name] for x in seen.lost]
        left.plot(depth, lost, "os^D"[i] + "-", ms=4, color=COLORS[i], label=label)
    constant = [x["constant"] for x in seen.lost]
    left.plot(depth, constant, "--", color=MUTED, label="one vector for all tokens")
    left.set(xlabel="layer", ylabel="relative change of the output", ylim=(0, 1.15))
    left.legend(loc="lower right")
    kinds = (("$W_v$, $W_o$", "value_output"), ("$W_q$, $W_k$", "query_key"))
    for i, (name, kind) in enumerate(kinds):
        values = [getattr(f, kind) for f in seen.figures]
        right.plot(depth, values, "o-", ms=4, color=series_color(i), label=name)
    right.set(xlabel="layer", ylabel="sensitivity of the model", ylim=(0, None))
    right.legend()
