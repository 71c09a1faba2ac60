"""T37a: which weights of a trained model must be learned, by what the model is for."""

from __future__ import annotations

from typing import Any

import torch

from cumulant.figures import MUTED, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.functions import Costs, Task, kept, replaced, tasks
from cumulant.lab.claims.subjects import NEEDS
from cumulant.lens.ablating import PARTS
from cumulant.lens.editing import edited

SINGLE = ("query_key", "value_output")
SHOWN = {
    "query_key": "$W_q$, $W_k$ → identity",
    "uniform": "uniform weights",
    "gaussian": "Gaussian keys",
    "one_head": "one set of weights",
    "value_output": "$W_v$, $W_o$ → identity",
    "attention": "no attention",
    "feed_forward": "no feed-forward",
}

CLAIM = Claim(
    id="T37a",
    title="Which weights must be learned, by function",
    evidence="empirical",
    statement="The theory does not explain the weight matrices: without them language models would "
    "not perform fairly well. Queries and keys, values and outputs, heads and feed-forward layers "
    "all hold what a model has learned.",
    source="proofs draft, §B",
    formula=r"\text{kept} = \frac{L_{\text{guess}} - L_{\text{replaced}}}"
    r"{L_{\text{guess}} - L_{\text{intact}}}",
    bounds="A model performs fairly well without a part if it keeps half of its gain over a guess "
    "that knows no context (how often words occur; chance among paragraphs). Every part must fall "
    "below that in both models for the statement to hold, which may fail for any one of them. "
    "Temperatures and gains are fitted on other text. A model must gain at least half a nat over "
    "the guess to say anything, and attention computed by this library must change nothing.",
    recorded="does not hold in general",
    tests=("tests/lens/test_ablating.py", "tests/lens/test_editing.py"),
    needs=NEEDS,
    rules=table("""
      statement:
        query_key ≤ 0.5: share kept with W_q, W_k the identity at the best temperature, in all
            layers, the model that keeps more
        value_output ≤ 0.5: the same with W_v, W_o the best multiple of the identity
        one_head ≤ 0.5: the same with the mean weights in all heads
        feed_forward ≤ 0.5: the same without feed-forward layers
      control:
        gain ≥ 0.5: nats that an intact model gains over the guess, the lesser
        own_attention ≤ 0.001: change of the loss, in nats, by attention of this library
      noted:
        uniform: share kept with uniform weights
        gaussian: share kept with a Gaussian in place of each head's keys
        attention: share kept without attention
        single_query_key: nats lost with W_q, W_k the identity in one layer, mean over layers, the
            model that loses more
        single_value_output: the same with W_v, W_o
    """),
    finding="Replaced in all layers, {told}. One layer alone costs at most {single_query_key:.2f} "
    "nats without W_q and W_k, {single_value_output:.2f} without W_v and W_o (means over layers).",
    caption="Share of each model's function that is left with a part replaced in all layers: 1 is "
    "the intact model, 0 a guess without context (dashed: half).",
    size=(7.0, 3.2),
)


def own_attention(task: Task) -> float:
    """The change of the loss if this library computes the attention."""
    before = task.loss()
    with edited(task.model, lambda _, call: call.attend().mean):
        return abs(task.loss() - before)


def judged(found: dict[str, Costs]) -> dict[str, float]:
    """The numbers of the rules from the losses of some models."""
    shares = {part: max(kept(x, part) for x in found.values()) for part in PARTS}
    single = {
        f"single_{part}": max(
            sum(x["single"][part]) / len(x["layers"]) - x["intact"] for x in found.values()
        )
        for part in SINGLE
    }
    return {**shares, **single, "gain": min(x["guess"] - x["intact"] for x in found.values())}


@torch.no_grad()
def measure(trial: Trial) -> Found:
    """Losses of SmolLM2 and MiniLM with parts replaced."""
    found = {task.name: replaced(task) for task in tasks(trial.quick)}
    numbers = judged(found) | {"own_attention": max(map(own_attention, tasks(trial.quick)))}
    told = "; ".join(
        f"{name} keeps {kept(x, 'query_key'):.0%} of its function without W_q and W_k, "
        f"{kept(x, 'value_output'):.0%} without W_v and W_o, {kept(x, 'one_head'):.0%} with one "
        f"set of weights for all heads, {kept(x, 'gaussian'):.0%} with Gaussian keys, "
        f"{kept(x, 'feed_forward'):.0%} without feed-forward layers"
        for name, x in found.items()
    )
    return Found(numbers, told=told, found=found)


def draw(figure: Any, seen: Any) -> None:
    """What is left of each model's function, part by part."""
    axes = figure.subplots()
    for i, (name, found) in enumerate(seen.found.items()):
        values = [kept(found, part) for part in SHOWN]
        places = [k + 0.36 * (i - 0.5) for k in range(len(SHOWN))]
        axes.barh(places, [max(x, -0.6) for x in values], 0.34, color=series_color(i), label=name)
    axes.axvline(0.5, color=MUTED, lw=1, ls="--")
    axes.axvline(0, color=MUTED, lw=0.8)
    axes.set_yticks(range(len(SHOWN)), list(SHOWN.values()))
    axes.set(xlabel="share of the function kept (below −0.6 drawn at −0.6)", xlim=(-0.65, 1.02))
    axes.invert_yaxis()
    axes.legend(loc="lower right")
