"""`Source`: what computes the fields of a result, whatever the keys are."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from cumulant.kernels.search import Largest

__all__ = ["COLUMNS", "FIELDS", "Field", "Source", "column_of"]

Field = Literal[
    "mean",
    "log_normalizer",
    "key_mean",
    "entropy",
    "score_mean",
    "score_variance",
    "value_variance",
    "score_max",
    "score_max_key",
]
FIELDS: tuple[Field, ...] = get_args(Field)


class Source(Protocol):
    """The columns ``(*batch, M, features)`` that fields are made of, in the computing precision.

    Attributes:
        shape, device: of ``mean``.
        requires_grad: whether anyone can ask for a gradient.
        over_ranks: whether other processes must ask for the same field at the same time.
        keys: how many keys there are, on all ranks; the sink is none.
        mean, key_mean, entropy, score_mean, score_variance: the fields.
        lowered: the log-normalizer without `lift`.
        lift: what was taken off the scores of each query; None if nothing was.
        value_moments: mean and variance of the values and ``lowered`` side by side, in double
            precision where the device has it.
        score_max, score_max_key: the largest score without `lift`, and the number of its key.
    """

    @property
    def shape(self) -> torch.Size: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def over_ranks(self) -> bool: ...
    @property
    def keys(self) -> int: ...
    @property
    def mean(self) -> Tensor: ...
    @property
    def lowered(self) -> Tensor: ...
    @property
    def lift(self) -> Tensor | None: ...
    @property
    def key_mean(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...
    @property
    def score_mean(self) -> Tensor: ...
    @property
    def score_variance(self) -> Tensor: ...
    @property
    def value_moments(self) -> Tensor: ...
    @property
    def score_max(self) -> Tensor: ...
    @property
    def score_max_key(self) -> Tensor: ...

    def ready(self, name: str) -> None:
        """Raise if the field cannot be computed now; over ranks, wait until all ask for it."""
        ...

    def largest(self, k: int) -> Largest:
        """The `k` largest scores of each query, without `lift`, and the numbers of their keys."""
        ...

    def received(self, share: Tensor) -> Tensor:
        """sum_i g_i p(j|i) ``(*batch, N, c)`` for shares ``(*batch, M, c)`` of the queries.

        Of sharded keys those of this rank.
        """
        ...

    def seen(self, share: Tensor) -> Tensor:
        """The same with 1 in place of p(j|i) wherever query i sees key j."""
        ...

    def tempered(self, alpha: float) -> Tensor:
        """The log-normalizer of alpha times the scores (without `lift`), as precise as can be.

        At 0 the log of the number of atoms, at infinity the largest score, the sink's included.
        """
        ...


def column_of(field: str) -> str:
    """The column that a field is made of."""
    return {"log_normalizer": "lowered", "value_variance": "value_moments"}.get(field, field)


# The entropy first: it brings G, the mean and the largest score with it.
COLUMNS = ("entropy", *(column_of(name) for name in FIELDS if name != "entropy"))
