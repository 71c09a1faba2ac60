"""The score of a head as a bilinear form in coordinates where its hidden states are white (T35).

Near a Gaussian law N(m, C) the canonical link is C^-1 (mu - m). So if W_q and W_k are that link,
the form A = W_q W_k' is, in white coordinates, S = C^(1/2) A C^(1/2): symmetric and positive.
Shape legend: H heads, Hk key heads, D features of the model, d of a head, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.core.errors import InputError
from cumulant.lens.weights import Projections, bilinear

__all__ = ["FEWEST", "form_rows", "mismatched", "rotated", "rotation", "whitened"]

# Fewer tokens than this say nothing about a covariance.
FEWEST = 32


def whitened(found: Projections, states: Tensor) -> Projections:
    """The weights as seen from coordinates where ``states`` ``(n, D)`` are white.

    x = C^(1/2) z + m, so W becomes C^(1/2) W. No inverse is needed: directions in which the states
    do not vary drop out.
    """
    return _seen(found, _root(states))


def _root(states: Tensor) -> Tensor:
    """C^(1/2) up to an isometry, which changes neither figure: the centered states are one."""
    away = states - states.double().mean(0).to(states)
    return away / (len(states) - 1) ** 0.5


def _seen(found: Projections, root: Tensor) -> Projections:
    # Products in the precision of the states; what is made of them is summed in double.
    query, key = (_product(root.to(x.device), x.to(root.dtype)) for x in (found.query, found.key))
    return replace(found, query=query, key=key, output=None)


def _product(root: Tensor, heads: Tensor) -> Tensor:
    """``(n, d)`` for each head, as one product with all of them."""
    return torch.unflatten(root @ heads.mT.flatten(0, 1).mT, -1, (len(heads), -1)).transpose(0, 1)


def rotation(model: nn.Module, size: int) -> Tensor | None:
    """The angles ``(k,)`` per unit of distance of a model with rotary positions, None without.

    Known by Hugging Face's name: a module ``...RotaryEmbedding`` with ``inv_freq``.
    """
    for module in model.modules():
        angles = getattr(module, "inv_freq", None)
        if type(module).__name__.endswith("RotaryEmbedding") and isinstance(angles, Tensor):
            return angles.detach().double() if 2 * len(angles) <= size else None
    return None


def rotated(found: Projections, angles: Tensor, distance: float) -> Projections:
    """The weights for a query that stands ``distance`` after its key, by rotary positions.

    Feature i of the first half turns with feature i of the second (Llama and its kin).
    """
    k = len(angles)
    cos, sin = (distance * angles).cos(), (distance * angles).sin()
    q = found.query.double()
    a, b, rest = q[..., :k], q[..., k : 2 * k], q[..., 2 * k :]
    return replace(found, query=torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1))


def mismatched(found: Projections, shift: int) -> Projections:
    """Queries of each head with the keys of another head of the same layer, ``shift`` on."""
    group = len(found.query) // len(found.key)
    keys = found.key.repeat_interleave(group, 0)
    return replace(found, key=keys.roll(shift * group, 0), output=None)


def form_rows(
    found: Projections, states: Tensor | None, angles: Tensor | None, distances: Sequence[float]
) -> list[dict[str, Any]]:
    """Symmetry and definiteness of each head at each distance: raw, white, and mismatched.

    ``mismatched_`` columns are of pairs that were never trained together, in white coordinates (raw
    where there are no states): the mean over all other key heads for the symmetry, the next key
    head for the definiteness; NaN with one key head.

    Raises:
        InputError: a distance other than 0 in a model without rotary positions.
    """
    if any(distances) and angles is None:
        raise InputError(
            "forms: without rotary positions the score does not depend on the distance; leave "
            "distances out."
        )
    rows: list[dict[str, Any]] = []
    root = None if states is None or len(states) < FEWEST else _root(states)
    for distance in distances:
        turned = found if angles is None else rotated(found, angles, distance)
        turned = replace(turned, output=None)
        raw = bilinear(turned)
        if raw.symmetry is None or raw.definiteness is None:
            return []
        white = None if root is None else _seen(turned, root)
        columns: dict[str, Tensor | None] = {
            "symmetry": raw.symmetry,
            "definiteness": raw.definiteness,
        }
        if white is not None:
            own = bilinear(white)
            columns["whitened_symmetry"] = own.symmetry
            columns["whitened_definiteness"] = own.definiteness
        columns |= _null(turned if white is None else white)
        for head in range(len(found.query)):
            numbers = {n: float(x[head]) for n, x in columns.items() if x is not None}
            rows.append({"head": head, "distance": float(distance), **numbers})
    return rows


def _null(found: Projections) -> dict[str, Tensor | None]:
    """What the same figures are for pairs of two heads."""
    others = [mismatched(found, shift) for shift in range(1, len(found.key))]
    if not others:
        return {}
    return {
        "mismatched_symmetry": torch.stack([_symmetry(x) for x in others]).mean(0),
        "mismatched_definiteness": bilinear(others[0]).definiteness,
    }


def _symmetry(found: Projections) -> Tensor:
    """tr(AA) / tr(AA') of all heads at once, each with a key head of its own."""
    q, k = found.query.double(), found.key.double()
    across = k.mT @ q
    size = ((q.mT @ q) * (k.mT @ k).mT).sum((-2, -1))
    return (across * across.mT).sum((-2, -1)) / size
