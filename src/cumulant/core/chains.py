"""The stationary distribution of a Markov chain."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.autodiff import on_tape
from cumulant.core.checks import holds
from cumulant.core.typed import linalg

__all__ = ["StationaryLaw", "stationary_law"]


class StationaryLaw(NamedTuple):
    """A pi with pi T = pi, ``(*batch, n)``, and whether it is the only one, ``(*batch,)``."""

    law: Tensor
    unique: Tensor


def stationary_law(transition: Tensor) -> StationaryLaw:
    """pi = pi T for transition matrices ``(*batch, n, n)`` whose rows sum to one.

    pi is the average over t of u T^t, u uniform; if several distributions are stationary, it is the
    one reached from a uniform start. (T + I) / 2 has the same limit and is aperiodic; repeated
    squaring takes it 2^64 steps, after which no transient is left. Nothing is subtracted, so small
    entries are as accurate as large ones, even for a nearly reducible chain.

    Where pi is unique, derivatives of any order come from pi (I - T + 1 1') = 1'.

    >>> import torch
    >>> from cumulant.core.chains import stationary_law
    >>> stationary_law(torch.tensor([[0.9, 0.1], [0.3, 0.7]])).law
    tensor([0.7500, 0.2500])
    """
    limit = _limit(transition.detach())
    law = limit.mean(-2)
    far = (limit - law[..., None, :]).abs().amax((-2, -1))
    unique = far <= 1e-6
    if on_tape(transition):
        law = law + _derivatives(transition, law)
    return StationaryLaw(law, unique)


def _limit(T: Tensor) -> Tensor:
    """T^t for large t, averaged over its period: row i is the long-run law from state i."""
    n = T.shape[-1]
    power = (T + torch.eye(n, dtype=T.dtype, device=T.device)) / 2
    for _ in range(64):
        last, power = power, power @ power
        power = power / power.sum(-1, keepdim=True)
        if holds((power - last).abs() <= 16 * n * torch.finfo(T.dtype).eps * last):
            break
    return power


def _derivatives(T: Tensor, law: Tensor) -> Tensor:
    """Zero in value, with the derivatives of pi = 1' (I - T + 1 1')^(-1)."""
    n = T.shape[-1]
    system = torch.eye(n, dtype=T.dtype, device=T.device) - T + 1
    # By the inverse: torch's solve has wrong second derivatives over forward mode.
    found = linalg.inv_ex(system)
    good = (found.info == 0)[..., None]  # singular where pi is not unique
    step = ((1 - law[..., None, :] @ system) @ found.inverse)[..., 0, :]
    return torch.where(good, step - step.detach(), 0.0)
