"""T12: attention is an exponential family over keys; masks, biases and sinks as base measures."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import Empirical, attend
from cumulant.figures import series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, median

CLAIM = Claim(
    id="T12",
    title="Attention is an exponential family over keys",
    evidence="identity",
    statement="Softmax attention is an exponential family of the key with the query as natural "
    "parameter and a uniform measure over the keys. A bias shared by all queries changes that "
    "measure, a bias per query gives each query its own, and a sink is an atom at key 0.",
    slips=(
        "Eq. (2) swaps W_q and W_k, so that as printed it normalizes over queries.",
        "Eq. (3) writes log G. That is correct if G is the denominator, as the text after it says, "
        "but with G the log-normalizer, as in the other drafts, it does not normalize.",
    ),
    source="message passing draft, eq. (1) to (3)",
    formula=r"p(j \mid i) = \exp\left(\text{scale}\,\langle q_i, k_j\rangle + b_{ij} - G_i\right), "
    r"\qquad q_i = H_i W_q,\ k_j = H_j W_k",
    bounds="At first eq. (2) as printed counted as part of the statement and made this a "
    "correction. It is a misprint, now listed as a slip, and its number is only noted: the rule "
    "was changed after its numbers were seen.",
    recorded="holds",
    tests=("tests/laws/test_attention_calculus.py", "tests/attention/test_attend.py"),
    rules=table("""
      statement:
        corrected_gap ≤ 1e-11: output normalized over keys, against torch
        total_gap ≤ 1e-11: masses of the family over keys, less 1
        shared_bias_gap ≤ 1e-11: bias log c against a key counted c times
        mask_gap ≤ 1e-11: mask per query against a measure per query
        sink_gap ≤ 1e-11: sink logit against an atom at key 0
        scale_gap ≤ 1e-11: scale against a shorter query
      noted:
        drafted_gap: output by eq. (2) as printed, against torch
        log_g_total: total mass by eq. (3) with G the log-normalizer
    """),
    finding="Normalized over keys the output is torch's to {corrected_gap:.0e}; biases, masks and "
    "sinks as base measures agree to {worst:.0e}. Eq. (2) as printed would be off by up to "
    "{drafted_gap:.1f}.",
    caption="Left: weights of one token; eq. (2) as printed compares its key with all queries. "
    "Right: a sink logit takes mass from all keys, exactly as an atom of mass e^b at key 0 with "
    "value 0 does.",
)


SINKS = torch.linspace(-4, 8, 13, dtype=torch.float64)


class Head(NamedTuple):
    """One head ``(N, d)``: queries, keys, values."""

    q: Tensor
    k: Tensor
    v: Tensor


def shared_bias_gap(trial: Trial, q: Tensor, k: Tensor, v: Tensor) -> float:
    """One bias for all queries is a base measure: log 3 counts a key three times."""
    counts = torch.randint(1, 4, (len(k),), generator=trial.generator)
    log_counts = counts.double().log()
    biased = attend(q, k, v, attn_mask=log_counts, scale=1.0).mean
    many_k, many_v = (x.repeat_interleave(counts, 0) for x in (k, v))
    repeated = F.scaled_dot_product_attention(q, many_k, many_v, scale=1.0)
    return max(gap(biased, repeated), gap(biased, Empirical(k, log_counts, v).value_mean(q)))


def mask_gap(trial: Trial, q: Tensor, k: Tensor, v: Tensor) -> float:
    """A mask per query gives each query its own measure: the keys it sees."""
    seen = trial.uniform(len(q), len(k)) < 0.5
    seen[:, 0] = True
    own = [
        Empirical(k[row], values=v[row]).value_mean(one) for row, one in zip(seen, q, strict=True)
    ]
    both = torch.stack([attend(q, k, v, attn_mask=seen, scale=1.0).mean, torch.stack(own)])
    return gap(both, F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0))


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs per sink logit, which joins the softmax and is then discarded.

    First as a measure, an atom at key 0 with value 0; then written out.
    """
    keys, values = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))
    ours, written = list[Tensor](), list[Tensor]()
    for b in SINKS:
        log_weights = torch.cat([k.new_zeros(len(k)), b[None]])
        ours.append(Empirical(keys, log_weights, values).value_mean(q))
        weights = torch.cat([q @ k.T, b.expand(len(q), 1)], -1).softmax(-1)
        written.append(weights[:, :-1] @ v)
    return torch.stack(ours), torch.stack(written)


def measure(trial: Trial) -> Found:
    """One head with weights, as the draft writes it and as it is; then masks, biases, sinks."""
    n, d = trial.size(64, 16), 8
    states, weights = trial.normal(n, d), trial.normal(3, d, d) / math.sqrt(d)
    head = Head(*(states @ weights))
    q, k, v = head
    # Torch's own head, rows of weights by query; scale one, as in the draft.
    truth = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    # Eq. (2) to the letter: A[i, j] has H_j W_k and H_i W_q and is normalized over i.
    drafted = torch.softmax(q @ k.T, 0)
    ours = attend(q, k, v, scale=1.0)
    # The family itself: h counts the keys, the query is η, masses must sum to one.
    masses = torch.stack([Empirical(k).log_prob(k, row) for row in q]).exp()
    doubled = ((q @ k.T) - ours.log_normalizer[:, None].log()).exp().sum(-1)
    shared, masked = shared_bias_gap(trial, *head), mask_gap(trial, *head)
    atom, written = with_sinks(*head)
    # The scale is an inverse temperature: scores at scale s are those of the query s q.
    scaled = attend(q, k, scale=d**-0.5).log_normalizer
    numbers = {
        "drafted_gap": gap(drafted.T @ v, truth),
        "corrected_gap": gap(ours.mean, truth),
        "total_gap": gap(masses.sum(-1), 1),
        "shared_bias_gap": shared,
        "mask_gap": masked,
        "sink_gap": gap(atom, written),
        "scale_gap": gap(scaled, torch.logsumexp(q @ k.T / math.sqrt(d), -1)),
        "log_g_total": median(doubled),
    }
    worst = max(shared, masked, gap(atom, written))
    exact = torch.softmax(q @ k.T, -1)
    return Found(
        numbers, worst=worst, drafted=drafted, exact=exact, truth=truth, sinks=(atom, written)
    )


def draw(figure: Any, seen: Any) -> None:
    """Weights of the first token by eq. (2) and as they are; the output's size under a sink."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    exact = seen.exact[0]
    top = exact.argsort(descending=True)[:12]
    bars = (("attention", exact[top], -0.2), ("eq. (2) as printed", seen.drafted[top, 0], 0.2))
    for i, (name, weights, shift) in enumerate(bars):
        places = torch.arange(1, 13) + shift
        left.bar(places, weights, 0.4, color=series_color(i), label=name, zorder=2)
    left.set(xlabel="keys by weight", ylabel="weight for the first token")
    left.legend()
    sizes = [x.norm(dim=-1).mean(-1) / seen.truth.norm(dim=-1).mean() for x in seen.sinks]
    right.plot(SINKS, sizes[0], color=series_color(0), label="atom at key 0")
    right.plot(SINKS, sizes[1], "o", ms=4, color=series_color(1), label="softmax with sink")
    right.set(xlabel="sink logit b", ylabel="output norm, relative", ylim=(0, 1.1))
    right.legend()
