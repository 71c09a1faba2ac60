"""The partition function of word vectors over directions of a context (docs/theory.md, T31)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import finite, numbers, real, whole
from cumulant.core.errors import InputError
from cumulant.core.precision import wide
from cumulant.core.typed import linalg, tolist

__all__ = ["partition"]

AT_ONCE = 64  # directions whose scores with all words are held at once


@torch.no_grad()
def partition(
    embeddings: Tensor,
    *,
    radii: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0),
    directions: int = 256,
    seed: int = 0,
    counts: Tensor | None = None,
) -> list[dict[str, Any]]:
    """How constant Z(c) = sum_w exp<v_w, c> is over contexts c of one length (T31).

    The random-walk model needs Z nearly constant. Lengths only mean something beside the spread of
    the vectors, so a radius is counted in units in which it is the standard deviation of the scores
    <v_w, c> over words: |c| = radius / s, s^2 = mean |v_w - mean v|^2 / D. For D-dimensional
    Gaussian vectors Z then has mean V exp(radius^2 / 2) and relative variance
    (exp(radius^2) - E exp(radius^2 cos)) / V, cos that of two directions, less radius^2 / V for
    vectors about their mean: nothing at small radii, everything at large ones.

    Two rows for each radius: vectors as they are, and about their mean, because a common part
    multiplies Z by exp<mean v, c>, which varies with c but says nothing about words. Memory is
    linear in V.

    Args:
        embeddings: ``(V, D)``.
        radii: positive numbers.
        directions: how many random directions, the same for all radii.
        seed: of the directions.
        counts: ``(V,)``, how often each word occurs, to test log p(w) = |v_w|^2 |c|^2 / (2D) +
            const; words that do not occur are ignored.

    Returns:
        Rows with ``radius``; ``norm``, the length of c; ``centered``; ``directions`` ("random");
        ``mean``, ``sd``, ``q025`` and ``q975`` of log Z; ``relative_sd``, the standard deviation of
        Z over its mean (at most sqrt(directions), where one direction outweighs all);
        ``frequency_correlation`` of log p(w) with |v_w|^2, None without counts.

    Raises:
        InputError: fewer than two words or directions, vectors that are all alike, counts that do
            not fit.

    >>> import torch
    >>> rows = partition(torch.randn(2000, 50), radii=[0.1, 4.0])
    >>> [row["relative_sd"] < 0.01 for row in rows if row["centered"]]
    [True, False]
    """
    vectors = finite(
        "partition", "embeddings", numbers("partition", embeddings=embeddings)[0]["embeddings"]
    )
    if vectors.ndim != 2 or len(vectors) < 2 or vectors.shape[1] < 1:
        raise InputError(
            "partition: embeddings must have shape (V, D) with at least two words, but have "
            f"{tuple(vectors.shape)}."
        )
    lengths = [real("partition", "a radius", r, least=0.0, open_at_least=True) for r in radii]
    whole("partition", "directions", directions, 2)
    vectors = wide(vectors.detach())
    center = vectors.mean(0)
    vectors = vectors - center
    squares = linalg.vector_norm(vectors, dim=1).square()
    spread = math.sqrt(float(squares.double().mean()) / vectors.shape[1])
    if not spread > 0:
        raise InputError("partition: all embeddings are equal, so their scores do not vary.")
    correlations = _frequencies(vectors, center, squares, counts)
    generator = torch.Generator().manual_seed(seed)
    unit = torch.randn(directions, vectors.shape[1], dtype=torch.float64, generator=generator)
    unit = unit / linalg.vector_norm(unit, dim=1, keepdim=True)
    unit = (unit / spread).to(vectors)
    centered = _log_partition(vectors, unit, lengths)
    shift = (unit @ center).double()
    rows: list[dict[str, Any]] = []
    for i, radius in enumerate(lengths):
        plain = centered[i] + radius * shift
        for name, values in ((False, plain), (True, centered[i])):
            rows.append(
                {
                    "radius": radius,
                    "norm": radius / spread,
                    "centered": name,
                    "directions": "random",
                    **_summary(values),
                    "frequency_correlation": correlations[name],
                }
            )
    return rows


def _log_partition(vectors: Tensor, unit: Tensor, radii: Sequence[float]) -> Tensor:
    """log Z ``(radii, directions)`` in double precision: all radii share one set of scores."""
    parts: list[Tensor] = []
    # Fresh arrays would cost as much in page faults as the arithmetic.
    kept = unit.new_empty(2, min(AT_ONCE, len(unit)), len(vectors))
    for some in torch.split(unit, AT_ONCE):
        below, weights = kept[:, : len(some)]
        torch.matmul(some, vectors.T, out=below)
        top = below.amax(1, keepdim=True)
        below.sub_(top)
        sums = torch.stack([torch.mul(below, r, out=weights).exp_().sum(1) for r in radii])
        parts.append(sums.double().log() + torch.outer(top.new_tensor(radii), top[:, 0]).double())
    return torch.cat(parts, 1)


def _summary(values: Tensor) -> dict[str, float]:
    """Moments and quantiles of log Z, and the relative deviation of Z itself."""
    low, high = tolist(values.quantile(values.new_tensor([0.025, 0.975])))
    height = (values - values.max()).exp()  # Z in units of the largest
    return {
        "mean": float(values.mean()),
        "sd": float(values.std()),
        "q025": low,
        "q975": high,
        "relative_sd": float(height.std() / height.mean()),
    }


def _frequencies(
    vectors: Tensor, center: Tensor, squares: Tensor, counts: Tensor | None
) -> dict[bool, float | None]:
    """The correlation of log counts with |v|^2, for vectors as they are and centred."""
    if counts is None:
        return {False: None, True: None}
    counts = torch.as_tensor(counts, device=vectors.device)
    if counts.shape != squares.shape or bool((counts < 0).any()) or int((counts > 0).sum()) < 3:
        raise InputError(
            f"partition: counts must be {len(squares)} numbers >= 0, one for each word, at least "
            f"three of them positive; they have shape {tuple(counts.shape)}."
        )
    seen = counts > 0
    logs = counts[seen].double().log()
    plain = squares + 2 * vectors @ center + center.square().sum()
    found: dict[bool, float | None] = {}
    for name, values in ((False, plain), (True, squares)):
        value = float(torch.corrcoef(torch.stack([logs, values[seen].double()]))[0, 1])
        found[name] = value if math.isfinite(value) else None
    return found
