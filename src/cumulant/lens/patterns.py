"""Patterns that heads are named after: previous token, duplicate token, induction, fixed distance.

A pattern names keys for each query, and a head's score is the weight that it puts there. The keys
follow from the token ids alone, so the kernel returns these weights as marked entries of its rows
and no matrix of weights is stored.

Shape legend: B texts, H heads, M queries, N keys, c keys of a pattern.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.lens.statistics import Positions

__all__ = ["DISTANCES", "PATTERNS", "Asked", "Found", "asked", "masses", "occurrences"]

# Query minus key position; positive looks back.
DISTANCES = (*range(1, 9), *range(-1, -9, -1))
# Earlier occurrences of a token that are looked at, from the nearest.
OCCURRENCES = 32
PATTERNS = ("previous_mass", "duplicate_mass", "induction_mass")


class Asked(NamedTuple):
    """Keys of each pattern by number ``(B, M, c)``, -1 for none."""

    distances: Tensor
    duplicates: Tensor
    followers: Tensor

    def marks(self) -> Tensor:
        """All of them side by side."""
        return torch.cat(self, -1)


class Found(NamedTuple):
    """Weights on the keys of each pattern.

    Attributes:
        columns: ``(B, H, M)`` by name, NaN where the pattern names no key.
        distances: sums over the queries that have a key at that distance, ``(H, c)``.
        counts: how many queries these are, ``(c,)``.
    """

    columns: dict[str, Tensor]
    distances: Tensor
    counts: Tensor


def occurrences(ids: Tensor, most: int = OCCURRENCES) -> Tensor:
    """Where each token occurred before, the nearest first, ``(B, N, c)``; -1 for nowhere.

    Args:
        ids: ``(B, N)``; negative ones equal nothing.
        most: the largest c.

    >>> occurrences(torch.tensor([[7, 8, 7, 7]])).tolist()
    [[[-1, -1], [-1, -1], [0, -1], [2, 0]]]
    """
    kind, order = ids.sort(dim=-1, stable=True)  # equal tokens side by side, in their order
    length = ids.shape[-1]
    out = ids.new_full((*ids.shape, min(most, max(length - 1, 0))), -1)
    width = 0
    for back in range(1, out.shape[-1] + 1):
        same = (kind[:, back:] == kind[:, :-back]) & (kind[:, back:] >= 0)
        if not bool(same.any()):
            break
        earlier = order[:, :-back].where(same, -1)
        out[..., back - 1].scatter_(-1, order[:, back:], earlier)
        width = back
    return out[..., :width]


def asked(positions: Positions, ids: Tensor | None) -> Asked:
    """The keys that each pattern names for the queries of a call.

    - distances: the key 1 to 8 places before, and after;
    - duplicates: earlier occurrences of the query's own token;
    - followers: the tokens after these, themselves before the query (induction).

    Args:
        positions: of the call.
        ids: ``(B, N)`` token ids of the keys if queries and keys are the same tokens; without them
            only distances are known.
    """
    own = positions.own[..., None]
    places = positions.key_token.shape[-1]
    step = torch.tensor(DISTANCES, device=own.device)
    near = own - step
    near = near.where((own >= 0) & (near >= 0) & (near < places), -1)
    near = near.where(_real(near, positions), -1)
    empty = near[..., :0]
    if ids is None:
        return Asked(near, empty, empty)
    earlier = occurrences(ids.where(positions.key_token >= 0, -1))
    after = (earlier + 1).where((earlier >= 0) & (earlier + 1 < own), -1)
    return Asked(near, earlier, after)


def _real(keys: Tensor, positions: Positions) -> Tensor:
    """Whether keys ``(B, M, c)`` are tokens of the text, not padding."""
    text = positions.key_token[:, None].expand(-1, keys.shape[1], -1)
    return text.gather(-1, keys.clamp_min(0)) >= 0


def masses(weights: Tensor, keys: Asked, real: Tensor) -> Found:
    """Scores from the weights ``(B, H, M, c)`` on the marked keys.

    Args:
        weights: in the order of `Asked.marks`.
        keys: what they are the weights of.
        real: ``(B, M)``, which queries count.
    """
    ends = keys.distances.shape[-1], keys.distances.shape[-1] + keys.duplicates.shape[-1]
    near = weights[..., : ends[0]]
    columns = {
        "previous_mass": near[..., 0].where(_some(keys.distances[..., :1]), torch.nan),
        "duplicate_mass": _sum(weights[..., ends[0] : ends[1]], keys.duplicates),
        "induction_mass": _sum(weights[..., ends[1] :], keys.followers),
    }
    there = (keys.distances >= 0) & real[..., None]
    sums = (near.double() * there[:, None]).sum((0, 2))
    return Found(columns, sums.cpu(), there.sum((0, 1)).double().cpu())


def _sum(weights: Tensor, keys: Tensor) -> Tensor:
    return weights.sum(-1).where(_some(keys), torch.nan)


def _some(keys: Tensor) -> Tensor:
    """Whether a pattern names a key, ``(B, 1, M)``."""
    return (keys >= 0).any(-1)[:, None]
