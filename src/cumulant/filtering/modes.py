"""Models without a state, n = 0: the Hamilton filter as a product of matrices (THEORY T25).

Without a state, the likelihood of each mode at each step is known beforehand, and the filter is
alpha_t = alpha_{t-1} E_t with E_t[i, j] = P(j | i) p(y_t | j). Products of matrices may be taken in
any order, so all prefixes come in log2(T) rounds instead of T steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.filtering.gaussian import GaussianBank
from cumulant.filtering.recursion import Belief

__all__ = ["Chain", "chain", "stateless"]

# Beyond so many modes, T steps with a vector cost less than products of matrices.
MOST_MODES = 8


class Chain(NamedTuple):
    """log p(y_1..t, A_t) for all t, ``(*batch, T, M)``, and log P(A_t | y_1..t-1)."""

    log_joint: Tensor
    log_predicted: Tensor


def stateless(bank: GaussianBank) -> bool:
    """Whether the filter is a product of small matrices."""
    return bank.model.state_dimension == 0 and bank.model.modes <= MOST_MODES


def chain(bank: GaussianBank, start: Belief) -> Chain:
    """All steps at once."""
    y = bank.observations
    steps, M = y.shape[-2], bank.model.modes
    nothing = y.new_zeros(*y.shape[:-1], 1, M, 0), y.new_zeros(*y.shape[:-1], 1, M, 0, 0)
    _, log_likelihood = bank.observe(nothing, None)
    each = bank.log_transition(None) + log_likelihood[..., None, :]
    product = each.squeeze(-3).double()
    batch = start.log_weights.shape[:-2]
    product = product.expand(*batch, steps, M, M)
    reach = 1
    while reach < steps:
        later = _times(product[..., :-reach, :, :], product[..., reach:, :, :])
        product = torch.cat([product[..., :reach, :, :], later], -3)
        reach *= 2
    first = start.log_weights.double()
    log_joint = (first[..., None] + product).logsumexp(-2)
    before = torch.cat([first, log_joint[..., :-1, :]], -2)
    before = before - before.logsumexp(-1, keepdim=True)
    moved = before[..., None, :, None] + bank.log_transition(None).double()
    return Chain(log_joint, moved.squeeze(-3).logsumexp(-2).to(y.dtype))


def _times(first: Tensor, second: Tensor) -> Tensor:
    """The product of matrices of logarithms."""
    return (first[..., :, :, None] + second[..., None, :, :]).logsumexp(-2)
