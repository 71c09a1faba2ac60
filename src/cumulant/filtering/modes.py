"""Models without a state, n = 0: the Hamilton filter as a product of matrices.

See docs/theory.md, T25.

Without a state, the likelihood of each mode at each step is known beforehand, and the filter is
alpha_t = alpha_{t-1} E_t with E_t[i, j] = P(j | i) p(y_t | j). Products of matrices may be taken in
any order, so all prefixes come in log2(T) rounds instead of T steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.recursion import Belief, Beliefs, Run, whole_numbers

__all__ = ["chain", "log_total", "stateless"]

# Beyond so many modes, T steps with a vector cost less than products of matrices.
MOST_MODES = 8


def stateless(bank: GaussianBank) -> bool:
    """Whether the filter is a product of small matrices."""
    return bank.model.state_size == 0 and bank.model.modes <= MOST_MODES


def _factors(bank: GaussianBank, start: Belief) -> tuple[Tensor, Tensor]:
    """log E_t for all t, ``(*batch, T, M, M)``, in double precision, and what was taken off."""
    y = bank.observations
    M = bank.model.modes
    shape = (*start.log_weights.shape[:-2], y.shape[-2])
    nothing = y.new_zeros(*shape, 1, M, 0), y.new_zeros(*shape, 1, M, 0, 0)
    _, log_likelihood = bank.observe(nothing, None)
    log_likelihood = log_likelihood.double()
    size = log_likelihood.detach().amax(-1, keepdim=True)
    each = bank.log_transition(None).double() + (log_likelihood - size)[..., None, :]
    return each.squeeze(-3).expand(*shape, M, M), size[..., 0, 0].expand(shape)


def log_total(bank: GaussianBank, start: Belief) -> Tensor:
    """log p(y_1..T), ``(*batch,)``: the product alone, neighbors first."""
    product, size = _factors(bank, start)
    scale = size.sum(-1)
    while (count := product.shape[-3]) > 1:
        pairs = torch.unflatten(product[..., : count - count % 2, :, :], -3, (-1, 2))
        joined, taken = _times(pairs[..., 0, :, :], pairs[..., 1, :, :])
        scale = scale + taken.sum((-3, -2, -1))
        left = product[..., count - count % 2 :, :, :]
        product = torch.cat([joined, left], -3) if count % 2 else joined
    last = (start.log_weights.double()[..., None] + product).flatten(-3)
    return last.logsumexp(-1) + scale


def chain(bank: GaussianBank, start: Belief) -> Run:
    """All steps at once."""
    kind = bank.observations.dtype
    product, size = _factors(bank, start)
    factors = product
    count, reach = product.shape[-3], 1
    while reach < count:
        later, _ = _times(product[..., :-reach, :, :], product[..., reach:, :, :])
        product = torch.cat([product[..., :reach, :, :], later], -3)
        reach *= 2
    first = start.log_weights.double()
    after = (first[..., None] + product).logsumexp(-2).log_softmax(-1)
    # With the weights before each step, its likelihood and prediction are sums by themselves.
    before = torch.cat([first, after[..., :-1, :]], -2)[..., None]
    totals = (before + factors).flatten(-2).logsumexp(-1) + size
    whole_numbers(totals, bank.first)
    moved = before.unsqueeze(-3) + bank.log_transition(None).double()
    predicted = moved.squeeze(-3).logsumexp(-2).to(kind)
    weights = torch.cat([start.log_weights.unsqueeze(-3), after.to(kind)[..., None, :]], -3)
    lead = start.log_weights.ndim - 2
    message = tuple(
        x.unsqueeze(lead).expand(*x.shape[:lead], count + 1, *x.shape[lead:]) for x in start.message
    )
    return Run(Beliefs([Belief(weights, message)]), (totals.to(kind),), (predicted,))


def _times(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The product of matrices of logarithms, its largest entry taken off, and that entry.

    So one step of huge density, or none, does not swamp what the others say about the modes.
    """
    out = (first[..., :, :, None] + second[..., None, :, :]).logsumexp(-2)
    size = out.detach().amax((-2, -1), keepdim=True)
    return out - size, size
