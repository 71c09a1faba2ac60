"""The shape of the hidden states of many texts at one place of a model (T17).

Most of it is the shape of one cloud, the tokens of all texts together, and is computed from a
uniform sample of them. The rank residual is a matter of each text: it needs all its tokens, and is
averaged over texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import linalg
from cumulant.dynamics import gaussianity, participation_ratio
from cumulant.lens.hidden import Reservoir

__all__ = ["Cloud", "Sample", "Shape"]

DIRECTIONS = 4  # principal directions in which Gaussianity is tested
TESTED = 512  # tokens in that test: the null distribution costs their square, once
DRAWS = 199
# Steps of the search for principal directions.
KRYLOV = 6


class Shape(NamedTuple):
    """The shape of the hidden states; None where there are too few of them.

    Attributes:
        participation_ratio: (tr C)^2 / tr C^2 of the covariance C of the tokens of all texts: how
            many dimensions they fill.
        anisotropy: the mean cosine over pairs of tokens, of one text or of two (Ethayarajh, 2019).
        rank_residual: ||X - 1 mean'||_F / ||X||_F of each text, averaged over texts: 0 where the
            tokens of every text are one point (Dong et al., 2021, in the Frobenius norm).
        gaussianity: energy statistic of the leading principal directions.
        gaussianity_null: the 0.95 quantile of that statistic for Gaussian clouds of the same size.
        gaussianity_p: the chance of a statistic as large, were the tokens independent and Gaussian.
    """

    participation_ratio: float | None = None
    anisotropy: float | None = None
    rank_residual: float | None = None
    gaussianity: float | None = None
    gaussianity_null: float | None = None
    gaussianity_p: float | None = None


class Sample:
    """A uniform sample of at most `tokens` hidden states of many texts.

    ``columns`` holds their states ``(n, d)`` and, in "sink", which are of sink tokens.
    """

    def __init__(self, tokens: int, seed: int) -> None:
        self._rows = Reservoir(tokens, seed)

    def add(self, states: Tensor, *, real: Tensor, sink: Tensor) -> None:
        """Take in the rows of ``states`` ``(B T, d)`` that are real tokens of B texts.

        ``real`` and ``sink``, ``(B, T)``, mark unpadded tokens and sink tokens.
        """
        draw = self._rows.offer([int(n) for n in real.sum(-1)])
        chosen = real.flatten().nonzero()[:, 0][draw.item.to(real.device)]
        kept = states.index_select(0, chosen).cpu()
        wide = kept if kept.dtype == torch.float64 else kept.float()
        marks = sink.flatten()[chosen].float().cpu()
        self._rows.add(draw.key, {"state": wide, "sink": marks})

    @property
    def columns(self) -> dict[str, Tensor]:
        return self._rows.columns

    def states(self) -> Tensor:
        """The sampled states ``(n, d)`` that are finite, without sink tokens."""
        if not self.columns:
            return torch.empty(0, 0)
        state = self.columns["state"]
        return state[state.isfinite().all(-1) & (self.columns["sink"] == 0)]

    def state(self) -> dict[str, Any]:
        """What was taken in so far, for a journal."""
        return self._rows.state()

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another sample."""
        self._rows.merge(dict(state))


class Cloud:
    """Hidden states of many texts: a uniform sample of at most `tokens`, and their residuals.

    >>> import torch
    >>> from cumulant.lens.clouds import Cloud
    >>> points = torch.tensor([[3.0, 4.0], [0.0, -2.0]])  # two texts, each collapsed to a point
    >>> real, sink = torch.ones(2, 5).bool(), torch.zeros(2, 5).bool()
    >>> cloud = Cloud(100, seed=0)
    >>> cloud.add(points.repeat_interleave(5, dim=0), real=real, sink=sink)
    >>> cloud.shape().rank_residual
    0.0
    """

    def __init__(self, tokens: int, seed: int) -> None:
        self._sample = Sample(tokens, seed)
        self._residual, self._texts = 0.0, 0  # the sum over so many texts

    def add(self, states: Tensor, *, real: Tensor, sink: Tensor) -> None:
        """Take in states as a `Sample` does."""
        self._sample.add(states, real=real, sink=sink)
        for text, mine in zip(torch.unflatten(states, 0, real.shape), real, strict=True):
            residual = _residual(text[mine])
            if residual is not None:
                self._residual, self._texts = self._residual + residual, self._texts + 1

    def __bool__(self) -> bool:
        return bool(self._sample.columns)

    @property
    def size(self) -> int:
        """How many numbers the sample holds."""
        return self._sample.columns["state"].numel() if self else 0

    def shape(self) -> Shape:
        """The shape of what was taken in.

        Sink tokens, whose few huge coordinates would decide the matter alone, are left out of the
        test of Gaussianity (T17), and of nothing else.
        """
        columns = self._sample.columns
        if not columns:
            return Shape()
        usable = columns["state"].isfinite().all(-1)
        states, sink = columns["state"][usable], columns["sink"][usable] > 0
        X = states.double()
        n = len(X)
        if n < 2 or not bool(X.any()):
            return Shape()
        length = linalg.vector_norm(X, dim=-1, keepdim=True)
        unit = X / length.where(length > 0, 1.0)
        cosines = (unit.sum(0).square().sum() - unit.square().sum()) / (n * (n - 1))
        residual = self._residual / self._texts if self._texts else None
        filled = float(participation_ratio(states))
        return Shape(filled, float(cosines), residual, *_gaussianity(X[~sink]))

    def state(self) -> dict[str, Any]:
        """What was taken in so far, for a journal."""
        return {"sample": self._sample.state(), "residual": self._residual, "texts": self._texts}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the state of another cloud.

        Raises:
            InputError: it has other entries.
        """
        if set(state) != {"sample", "residual", "texts"}:
            raise InputError(
                "the saved hidden states are damaged, or were written by another version: remove "
                "them to start over."
            )
        self._sample.merge(state["sample"])
        self._residual += state["residual"]
        self._texts += state["texts"]


def _residual(states: Tensor) -> float | None:
    """||X - 1 mean'|| / ||X|| of one text; None for fewer than two tokens, or zeros only.

    Tokens are taken from the first one: where all are one point it is exactly 0.
    """
    kind = torch.float32 if states.device.type == "mps" else torch.float64
    rows = states.to(kind, copy=True)
    size = float(linalg.vector_norm(rows))
    if not math.isfinite(size):
        rows = rows[rows.isfinite().all(-1)]
        size = float(linalg.vector_norm(rows))
    if len(rows) < 2 or size == 0 or not math.isfinite(size):
        return None
    rows -= rows[:1].clone()
    rows -= rows.mean(0)
    return float(linalg.vector_norm(rows)) / size


def _leading(X: Tensor, count: int) -> Tensor:
    """The leading right singular vectors, by the smaller Gram matrix."""
    small = len(X) < X.shape[1]
    axes = _largest_axes(X @ X.T if small else X.T @ X, count)
    return torch.nn.functional.normalize(axes @ X if small else axes, dim=-1)


def _largest_axes(matrix: Tensor, count: int) -> Tensor:
    """Eigenvectors of the largest eigenvalues of a positive semidefinite matrix, as rows.

    Large ones by block Krylov (Musco and Musco, 2015): a solver for all eigenvectors takes ten
    times as long, and scipy's for some of them has threads of its own, which stall on a busy
    machine.
    """
    n, width = len(matrix), count + 4
    basis = torch.eye(n).to(matrix)
    if n > 2 * KRYLOV * width:
        block = torch.randn(n, width, generator=torch.Generator().manual_seed(0)).to(matrix)
        basis = matrix.new_empty(n, 0)
        for _ in range(KRYLOV):
            block = matrix @ block
            for _ in range(2):  # once leaves rounding, where a block is nearly in the basis
                block = linalg.qr(block - basis @ (basis.T @ block)).Q
            basis = torch.cat([basis, block], -1)
    inside = linalg.eigh(basis.T @ (matrix @ basis)).eigenvectors[:, -count:]
    return (basis @ inside).T


def _gaussianity(X: Tensor) -> tuple[float | None, float | None, float | None]:
    """Statistic, null quantile and p-value in principal directions found on other tokens.

    The test needs fewer dimensions than tokens: one half of the tokens gives the principal
    directions, the other half is tested in them. As the halves are different tokens the null
    distribution is exact for independent tokens; tokens of one text are not quite that, so mind
    small p-values of few texts.
    """
    n = min(TESTED, len(X) // 2)
    n -= n % 2 ** max(0, n.bit_length() - 4)  # few different sizes, for each has its own null
    r = min(DIRECTIONS, X.shape[1])
    if n < 4 * r:
        return None, None, None
    tested, fitted = X[:n], X[n : 2 * n]
    away = fitted - fitted.mean(0)
    axes = _leading(away, r)
    try:
        found = gaussianity(tested @ axes.T, draws=DRAWS, levels=(0.95,))
    except InputError:  # a cloud in a subspace
        return None, None, None
    return float(found.statistic), float(found.null_quantiles[0]), float(found.p_value)
