"""T12: attention is an exponential family over keys; what masks, biases and sinks are in it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from cumulant import Empirical, attend
from cumulant.figures import series_color
from cumulant.lab.claims.claim import CORRECTED, Claim, Evidence, Picture, Trial, at_most, noted


def experiment(trial: Trial) -> Evidence:
    """One head with weights, as the draft writes it and as it is; then masks, biases, sinks."""
    n, d = trial.size(64, 16), 8
    states = trial.normal(n, d)
    w_q, w_k, w_v = trial.normal(3, d, d) / math.sqrt(d)
    q, k, v = states @ w_q, states @ w_k, states @ w_v
    # Torch's own head, rows of weights by query; scale one, as in the draft.
    truth = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    # Eq. (2) to the letter: A[i, j] has H_j W_k and H_i W_q and is normalized over i.
    drafted = torch.softmax(q @ k.T, 0)
    swapped = (drafted.T @ v - truth).abs().max()
    a = attend(q, k, v, scale=1.0)
    mended = (a.mean - truth).abs().max()
    # The family itself: h counts the keys, the query is η, masses must sum to one.
    family = Empirical(k)
    masses = torch.stack([family.log_prob(k, row) for row in q]).exp()
    total = (masses.sum(-1) - 1).abs().max()
    doubled = ((q @ k.T) - a.log_normalizer[:, None].log()).exp().sum(-1)

    # One bias for all queries is a base measure: log 3 counts a key three times.
    counts = torch.randint(1, 4, (n,), generator=trial.generator)
    log_counts = counts.double().log()
    biased = attend(q, k, v, attn_mask=log_counts, scale=1.0)
    many_k, many_v = (x.repeat_interleave(counts, 0) for x in (k, v))
    repeated = F.scaled_dot_product_attention(q, many_k, many_v, scale=1.0)
    shared = (biased.mean - repeated).abs().max()
    measure = Empirical(k, log_counts, v).value_mean(q)
    shared = torch.maximum(shared, (biased.mean - measure).abs().max())
    # A mask by query gives each query a measure of its own: the keys it sees, no others.
    seen = trial.uniform(n, n) < 0.5
    seen[:, 0] = True
    own = [
        Empirical(k[row], values=v[row]).value_mean(one) for row, one in zip(seen, q, strict=True)
    ]
    reference = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)
    both = torch.stack([attend(q, k, v, attn_mask=seen, scale=1.0).mean, torch.stack(own)])
    masked = (both - reference).abs().max()
    # A sink logit joins the softmax and is then thrown away; as a measure, an atom at key 0.
    sinks = torch.linspace(-4, 8, 13, dtype=torch.float64)
    keys, values = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))
    ours, written = list[torch.Tensor](), list[torch.Tensor]()
    for b in sinks:
        log_weights = torch.cat([torch.zeros_like(log_counts), b[None]])
        ours.append(Empirical(keys, log_weights, values).value_mean(q))
        with_sink = torch.cat([q @ k.T, b.expand(n, 1)], -1).softmax(-1)
        written.append(with_sink[:, :-1] @ v)
    sink = (torch.stack(ours) - torch.stack(written)).abs().max()
    # The scale is an inverse temperature: scores at scale s are those of the query s q.
    scaled = attend(q, k, scale=d**-0.5).log_normalizer
    temperature = (scaled - torch.logsumexp(q @ k.T / math.sqrt(d), -1)).abs().max()

    corrected = {
        "corrected_gap": (mended, "output normalized over keys, against torch"),
        "total_gap": (total, "masses of the family over keys, less 1"),
        "shared_bias_gap": (shared, "bias log c against a key counted c times"),
        "mask_gap": (masked, "mask by query against a measure for each"),
        "sink_gap": (sink, "sink logit against an atom at key 0"),
        "scale_gap": (temperature, "scale against a shorter query"),
    }

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        exact = torch.softmax(q @ k.T, -1)[0]
        top = exact.argsort(descending=True)[:12]
        bars = (("attention", exact[top], -0.2), ("eq. (2) as printed", drafted[top, 0], 0.2))
        for i, (name, weights, shift) in enumerate(bars):
            places = torch.arange(1, 13) + shift
            left.bar(places, weights, 0.4, color=series_color(i), label=name, zorder=2)
        left.set(xlabel="keys by weight", ylabel="weight for the first token")
        left.legend()
        sizes = [
            [x.norm(dim=-1).mean() / truth.norm(dim=-1).mean() for x in y] for y in (ours, written)
        ]
        right.plot(sinks, sizes[0], color=series_color(0), label="atom at key 0")
        right.plot(sinks, sizes[1], "o", ms=4, color=series_color(1), label="softmax with sink")
        right.set(xlabel="sink logit b", ylabel="output norm, relative", ylim=(0, 1.1))
        right.legend()

    return Evidence(
        [
            at_most("drafted_gap", swapped, 1e-8, "output by eq. (2) to the letter, against torch"),
            *(
                at_most(name, value, 1e-11, says, form="correction")
                for name, (value, says) in corrected.items()
            ),
            noted(
                "log_g_total", doubled.median(), "total mass by eq. (3) with G the log-normalizer"
            ),
        ],
        f"Eq. (2) as printed is off by up to {swapped:.1f}; normalized over keys the output is "
        f"torch's to {mended:.0e}. Biases, masks and sinks as base measures agree to "
        f"{torch.stack([shared, masked, sink]).max():.0e}.",
        Picture(
            draw,
            "Left: weights of one token; eq. (2) as printed compares its key with all queries. "
            "Right: a sink logit takes mass from all keys, exactly as an atom of mass e^b at key 0 "
            "with value 0 does.",
        ),
    )


CLAIM = Claim(
    id="T12",
    title="Attention is an exponential family over keys",
    statement=(
        "Softmax attention is an exponential family of the key with the query as natural parameter "
        "and a uniform measure over the keys."
    ),
    source="message passing draft, eq. (1) to (3)",
    formula=r"p(j \mid i) = \exp\left(\text{scale}\,\langle q_i, k_j\rangle + b_{ij} - G_i\right), "
    r"\qquad q_i = H_i W_q,\ k_j = H_j W_k",
    recorded=CORRECTED,
    experiment=experiment,
    correction=(
        "Eq. (2) swaps W_q and W_k, so that it normalizes over queries. Eq. (3) writes log G: "
        "right with G the denominator, as the text after it says, but with the G of the other "
        "drafts, the log-normalizer, it does not normalize. A bias shared by all queries changes "
        "the base measure, one by query gives each its own, and a sink is an atom at key 0."
    ),
    tests=("tests/laws/test_attention_calculus.py", "tests/attention/test_attend.py"),
)
