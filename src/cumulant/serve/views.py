"""What the page shows of a run, as plain numbers.

Shape legend: N tokens, H heads, L layers, d features of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant.attention.calls import AttentionCall
from cumulant.core.errors import InputError
from cumulant.core.typed import linalg, tolist
from cumulant.lens.statistics import statistics
from cumulant.memory.classes import EDGES
from cumulant.serve.running import Run, Seen

__all__ = ["STATISTICS", "depth_view", "head_view", "rounded", "text_view", "weights_of"]

# What tokens and heads can be colored by: the label and the kind of scale (pages/base.js).
STATISTICS: dict[str, tuple[str, str]] = {
    "entropy": ("Entropy (nats)", "number"),
    "log_normalizer": ("Log-normalizer G", "number"),
    "effective_keys": ("Effective keys", "log"),
    "received": ("Received mass", "log"),
    "sink_mass": ("Mass on the first token", "share"),
    "score_max": ("Largest score", "number"),
    "class": ("Class, I (spread) to IV (sharp)", "class"),
}
DIGITS = 5


def rounded(x: Tensor) -> Any:
    """Nested lists with few digits; what is not finite is null."""
    wide = x.double()
    power = torch.floor(torch.log10(wide.abs().clamp_min(1e-300))) - (DIGITS - 1)
    scale = torch.pow(10.0, power.abs())
    # Times or divided by a whole power of ten, so that 0.1 prints as 0.1.
    up = power < 0
    few = torch.where(up, (wide * scale).round() / scale, (wide / scale).round() * scale)
    few = torch.where(wide == 0, 0.0, few)
    listed = tolist(few)
    return listed if bool(few.isfinite().all()) else _nulled(listed)


def _nulled(x: Any) -> Any:
    if isinstance(x, list):
        return [_nulled(y) for y in x]  # pyright: ignore[reportUnknownVariableType]
    return x if math.isfinite(x) else None


@torch.no_grad()
def weights_of(call: AttentionCall) -> Tensor:
    """The weights ``(H, M, N)`` of a call of one text: E[v] of unit vectors as values."""
    heads, n = call.query.shape[1], call.key.shape[2]
    units = torch.eye(n, dtype=call.query.dtype, device=call.query.device)
    return call.attend(value=units.expand(1, heads, n, n)).mean[0]


@torch.no_grad()
def columns_of(seen: Seen) -> dict[str, Tensor]:
    """Every statistic of `STATISTICS`, ``(H, N)``; classes are numbered 0 to 3."""
    found = statistics(seen.call, seen.positions, spectrum=False)
    a = seen.call.attend()
    share = found["k90"] / found["visible"].clamp_min(1)
    edges = torch.tensor(EDGES, dtype=share.dtype)
    received = a.received()
    return {
        **{x: found[x][0] for x in ("entropy", "log_normalizer", "effective_keys", "sink_mass")},
        "received": received[0],
        "score_max": a.score_max[0],
        "class": (share[0][..., None] <= edges).sum(-1).float(),
    }


def text_view(run: Run) -> dict[str, Any]:
    """The statistics of every (layer, head, token), and of every head over its tokens.

    Returns:
        ``statistics``: name to ``(L, H, N)``; ``heads``: name to ``(L, H)``, means over tokens.
    """
    layers = [columns_of(seen) for seen in run.seen]
    every = {name: torch.stack([x[name] for x in layers]) for name in STATISTICS}
    means = {name: x.mean(-1) for name, x in every.items()}
    # Of an even count the lower of the middle two: between two classes there is none.
    means["class"] = every["class"].median(-1).values
    return {
        "statistics": {name: rounded(x) for name, x in every.items()},
        "heads": {name: rounded(x) for name, x in means.items()},
    }


@torch.no_grad()
def head_view(run: Run, layer: int, head: int, token: int) -> dict[str, Any]:
    """A head's weights, and one query among its keys: G and the plane in which the keys vary most.

    Coordinates are those of the two leading directions of the visible keys, about their mean. The
    ellipse is Cov[k] under the query's weights, in that plane; the query is drawn as the direction
    in which it tilts, and `gain` is how much of its length lies in the plane.
    """
    seen = run.at(layer)
    call, H = seen.call, seen.call.query.shape[1]
    if not (0 <= head < H and 0 <= token < call.query.shape[2]):
        raise InputError(
            f"there is no head {head} with a token {token}; there are {H} heads and "
            f"{call.query.shape[2]} tokens."
        )
    own = head // (H // call.key.shape[1])
    matrix = weights_of(call)[head]
    weights = matrix[token].double()
    keys = call.key[0, own].double()
    query = call.query[0, head, token].double() * call.scale
    shown = weights > 0
    center = keys[shown].mean(0)
    _, sizes, directions = linalg.svd(keys[shown] - center, full_matrices=False)
    axes = directions[:2]
    if len(axes) < 2:
        axes = torch.cat([axes, torch.zeros(2 - len(axes), keys.shape[1]).to(axes)])
    flat = (keys - center) @ axes.T
    mean = weights @ flat / weights.sum()
    apart = flat - mean
    covariance = (apart * weights[:, None]).T @ apart
    a = call.attend()
    tilt = axes @ query
    spread = sizes.square()
    return {
        "layer": layer,
        "head": head,
        "token": token,
        "weights": rounded(matrix),
        "visible": tolist(shown),
        "keys": rounded(flat),
        "mean": rounded(mean),
        "covariance": rounded(covariance),
        "query": rounded(tilt),
        "gain": rounded(linalg.vector_norm(tilt) / linalg.vector_norm(query).clamp_min(1e-30)),
        "explained": rounded(spread[:2].sum() / spread.sum().clamp_min(1e-30)),
        "log_normalizer": rounded(a.log_normalizer[0, head, token]),
        "entropy": rounded(a.entropy[0, head, token]),
        "score_max": rounded(a.score_max[0, head, token]),
        "score_variance": rounded(a.score_variance[0, head, token]),
    }


def depth_view(run: Run) -> dict[str, Any]:
    """What each sublayer did to distances between tokens: medians and quartiles by layer."""
    if run.probe is None:
        raise InputError("this run did not follow the hidden states.")
    rows = [row for row in run.probe.expansions() if row["tokens"] == "all"]
    numbers = ("q25", "median", "q75")
    names = ("layer", "sublayer", "name")
    return {
        "expansions": [
            {n: row[n] for n in names} | {n: rounded(torch.tensor(row[n])) for n in numbers}
            for row in rows
        ]
    }
