"""Joining results over disjoint key sets: the monoid behind online softmax and sharding.

Over two disjoint sets of keys with log-normalizers G_a and G_b, a key is drawn from the first set
with probability e^(G_a - G), G = log(e^G_a + e^G_b). Every expectation is then the mixture of the
two, entropies add by the chain rule and variances by the law of total variance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Shares(NamedTuple):
    """The joint log-normalizer and the logs of the two probabilities, all ``(*batch, M, 1)``."""

    log_normalizer: Tensor
    log_first: Tensor
    log_second: Tensor


def shares(first: Tensor, second: Tensor) -> Shares:
    """How the mass divides between two key sets. Where both are empty, both shares are zero."""
    # logaddexp has NaN derivatives at -inf, so the maximum is taken out by hand.
    peak = torch.maximum(first, second).detach()
    empty = peak == -math.inf
    peak = peak.masked_fill(empty, 0.0)
    total = (first - peak).exp() + (second - peak).exp()
    base = peak + total.masked_fill(empty, 1.0).log()
    joint = base.masked_fill(empty, -math.inf)
    return Shares(joint, first - base, second - base)


def mix(split: Shares, first: Tensor, second: Tensor) -> Tensor:
    """The expectation over both sets from the expectations over each."""
    return split.log_first.exp() * first + split.log_second.exp() * second


def mix_entropy(split: Shares, first: Tensor, second: Tensor) -> Tensor:
    """Chain rule: entropy of the choice plus the mean of the two entropies."""
    out = torch.zeros_like(first)
    for log_share, entropy in ((split.log_first, first), (split.log_second, second)):
        share = log_share.exp()
        out = out + share * (entropy - log_share.masked_fill(share == 0, 0.0))
    return out


def mix_variance(
    split: Shares, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> Tensor:
    """Law of total variance, from (mean, variance) of each set."""
    (mean_a, var_a), (mean_b, var_b) = first, second
    a, b = split.log_first.exp(), split.log_second.exp()
    return a * var_a + b * var_b + a * b * (mean_a - mean_b) ** 2
