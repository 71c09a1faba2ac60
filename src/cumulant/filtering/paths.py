"""The most likely path of modes, by Viterbi's recursion (docs/theory.md, T25)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.describing import described_fields
from cumulant.filtering.frames import PandasLike
from cumulant.filtering.kalman import GaussianBank, inputs_of
from cumulant.filtering.model import SwitchingLinearGaussian, gaussian_model
from cumulant.filtering.model_checks import proper_start, series
from cumulant.filtering.recursion import Belief, Message, branch, whole_numbers

__all__ = ["ModePath", "most_likely_path"]


class ModePath(NamedTuple):
    """Modes A_1, ..., A_T, ``(*batch, T)``, and the log of p(A_1..A_T, y_1..y_T), ``(*batch,)``."""

    modes: Tensor
    log_probability: Tensor

    __repr__ = described_fields


def most_likely_path(
    model: SwitchingLinearGaussian,
    observations: Tensor | PandasLike,
    *,
    lengths: Tensor | None = None,
    inputs: Tensor | None = None,
) -> ModePath:
    """The path of modes that, as a whole, explains the observations best (T25).

    The smoother's likeliest modes, each taken alone, may form a path that is impossible.

    score_t(j) = max_i score_{t-1}(i) + log P(j | i) + log p(y_t | the path to i, then j). For each
    current mode only the best path to it is kept, with the state that follows from it. That finds
    the best path of a model without a state. With states it is a search: a path that would have
    won later may be dropped; `log_probability` is that of the path returned, exactly.

    Args:
        model: a `SwitchingLinearGaussian` or `SwitchingNonlinear`.
        observations, lengths, inputs: as in `filter`.

    Returns:
        `ModePath`. The mode at time 0 is summed out, or belongs to the path that was searched where
        modes begin with states of their own.

    >>> import torch, cumulant as cm
    >>> nothing = torch.zeros(2, 0, 0)
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]), initial=torch.tensor([0.5, 0.5]),
    ...     dynamics=nothing, dynamics_noise=nothing, emission=torch.zeros(2, 1, 0),
    ...     emission_noise=torch.eye(1), emission_bias=torch.tensor([[-1.0], [1.0]]),
    ...     initial_mean=torch.zeros(0), initial_covariance=torch.zeros(0, 0))
    >>> y = torch.tensor([[-1.0], [0.2], [-1.0], [2.0], [1.5]])
    >>> cm.filtering.most_likely_path(model, y).modes
    tensor([0, 0, 0, 1, 1])
    """
    gaussian_model("most_likely_path", model)
    proper_start("most_likely_path", model)
    y = series("most_likely_path", model, observations, lengths)
    u = inputs_of("most_likely_path", model, inputs, y.shape[-2], y)
    with torch.no_grad():
        bank = GaussianBank(model, y, u)
        belief, alike = bank.start()
        belief = bank.rooted(belief) if model.state_size else belief
        came, scores = list[Tensor](), list[Tensor]()
        for t in range(y.shape[-2]):
            joint, message = branch(bank, belief, t)
            if alike and t == 0:
                at = joint.ndim - 2
                joint = joint.logsumexp(-2, keepdim=True)
                message = tuple(x.narrow(at, 0, 1) for x in message)
            message, log_likelihood = bank.observe(bank.predict(message, t), t)
            best = (joint + log_likelihood).max(-2, keepdim=True)
            came.append(best.indices.squeeze(-2))
            scores.append(best.values.squeeze(-2))
            belief = Belief(best.values, _chosen(message, best.indices))
        whole_numbers(torch.stack([s.amax(-1) for s in scores], -1), 0)
        value, last = scores[-1].max(-1)
        modes = [last]
        for origin in reversed(came[1:]):
            modes.append(origin.gather(-1, modes[-1][..., None]).squeeze(-1))
    return ModePath(torch.stack(modes[::-1], -1), value.to(y.dtype))


def _chosen(message: Message, index: Tensor) -> Message:
    """The message of the chosen history for each mode, from ``(*batch, G, M, ...)``."""
    lead = index.ndim - 2

    def one(x: Tensor) -> Tensor:
        tail = x.shape[lead + 2 :]
        at = index.reshape(*index.shape, *[1] * len(tail)).expand(*index.shape, *tail)
        return x.expand(*index.shape[:lead], *x.shape[lead:]).gather(lead, at)

    return tuple(one(x) for x in message)
