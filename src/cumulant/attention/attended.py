"""`Attended`: what attention knows about each query, and what can answer for it."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from cumulant.core.lazy import Lazy, Mode, kept
from cumulant.errors import InputError

__all__ = ["FIELDS", "Attended", "Settled", "Source", "column_of"]

FIELDS = (
    "mean",
    "log_normalizer",
    "key_mean",
    "entropy",
    "score_mean",
    "score_variance",
    "value_variance",
)


class Source(Protocol):
    """The columns ``(*batch, M, features)`` that fields are made of, in computing precision.

    Attributes:
        shape: of ``mean``.
        requires_grad: whether a gradient could be asked for.
        mean, key_mean, entropy, score_mean, score_variance: the fields.
        lowered: the log-normalizer without `lift`.
        lift: what was taken off the scores of each query, None if nothing was.
        value_moments: mean and variance of the values and ``lowered`` side by side, in double
            precision where there is one.
    """

    @property
    def shape(self) -> torch.Size: ...
    @property
    def requires_grad(self) -> bool: ...
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

    def ready(self, name: str) -> None:
        """Raise if the field cannot be computed now; over ranks, wait until all ask for it."""
        ...


def column_of(field: str) -> str:
    """The column that a field is made of."""
    return {"log_normalizer": "lowered", "value_variance": "value_moments"}.get(field, field)


class Attended(Lazy):
    """The tilted measure over keys, one per query: fields are computed when asked for, and kept.

    With p(j|i) = exp(scale <q_i, k_j> + bias_ij - G_i) (THEORY T1, T7, T12):

    ================== ================== =========================================================
    field              shape              what it is
    ================== ================== =========================================================
    ``mean``           ``(*batch, M, e)`` E[v], the attention output
    ``log_normalizer`` ``(*batch, M)``    G, the log-sum-exp of the scores
    ``key_mean``       ``(*batch, M, d)`` E[k], the gradient of G in scale * q
    ``entropy``        ``(*batch, M)``    Shannon entropy of the weights, in nats
    ``score_mean``     ``(*batch, M)``    E of scale <q, k>, without the bias
    ``score_variance`` ``(*batch, M)``    Var of scale <q, k>: the heat capacity
    ``value_variance`` ``(*batch, M, e)`` the diagonal of Cov[v]
    ================== ================== =========================================================

    A query that sees no key has G = -inf and zeros elsewhere. For half-precision input, vectors
    come back in that precision and the scalars in float32.

    Fields record gradients where both `attend` and the field itself are asked for with gradients
    enabled; looking at one under ``torch.no_grad`` changes no other. Because fields wait until they
    are asked for, leave the inputs unchanged until then. Results can be used from several threads.
    A pickled or deeply copied result holds all fields as plain numbers: no inputs and no gradients.
    """

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source = source
        self._dtype = dtype

    @kept
    def mean(self) -> Tensor:
        self._source.ready("mean")
        return self._source.mean.to(self._dtype)

    @kept
    def log_normalizer(self) -> Tensor:
        self._source.ready("log_normalizer")
        lift = self._source.lift
        G = self._source.lowered if lift is None else self._source.lowered + lift
        return G.squeeze(-1)

    @kept
    def key_mean(self) -> Tensor:
        self._source.ready("key_mean")
        return self._source.key_mean.to(self._dtype)

    @kept
    def entropy(self) -> Tensor:
        self._source.ready("entropy")
        return self._source.entropy.squeeze(-1)

    @kept
    def score_mean(self) -> Tensor:
        self._source.ready("score_mean")
        return self._source.score_mean.squeeze(-1)

    @kept
    def score_variance(self) -> Tensor:
        self._source.ready("score_variance")
        return self._source.score_variance.squeeze(-1)

    @kept
    def value_variance(self) -> Tensor:
        self._source.ready("value_variance")
        mean, width = self._source.mean, self._source.shape[-1]
        variance = self._source.value_moments[..., width : 2 * width].to(mean.dtype)
        return variance.masked_fill(~mean.isfinite(), math.nan).to(self._dtype)

    def __repr__(self) -> str:
        shape, kind = tuple(self._source.shape), str(self._dtype).removeprefix("torch.")
        settled = isinstance(self._source, Settled)
        known = [n for n in FIELDS if settled or any(name == n for name, _ in self._kept)]
        return f"Attended(mean {shape} {kind}; computed: {', '.join(known) or 'nothing yet'})"

    def __copy__(self) -> Attended:
        return Attended(self._source, self._dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._made.transforms or Mode.now().transforms:
            raise InputError(
                "a result of attend cannot be copied deeply or pickled inside a transform of "
                "torch.func: return its fields from the function and copy those."
            )
        with torch.no_grad():
            settled = Settled.of(self._source)
        return Attended, (settled, self._dtype)


class Settled:
    """A source that holds its columns as numbers, and nothing they were computed from."""

    def __init__(self, shape: torch.Size, lift: Tensor | None, columns: dict[str, Tensor]) -> None:
        self.shape = shape
        self.requires_grad = False
        self.lift = lift
        self.mean = columns["mean"]
        self.lowered = columns["lowered"]
        self.key_mean = columns["key_mean"]
        self.entropy = columns["entropy"]
        self.score_mean = columns["score_mean"]
        self.score_variance = columns["score_variance"]
        self.value_moments = columns["value_moments"]

    def ready(self, name: str) -> None:
        """Always: nothing is left to compute."""

    @classmethod
    def of(cls, source: Source) -> Settled:
        """All columns of a source, computed now; entropy first, which brings G and the mean."""
        for name in FIELDS:
            source.ready(name)
        columns = {
            "entropy": source.entropy,
            "mean": source.mean,
            "lowered": source.lowered,
            "key_mean": source.key_mean,
            "score_mean": source.score_mean,
            "score_variance": source.score_variance,
            "value_moments": source.value_moments,
        }
        lift = source.lift
        return cls(
            source.shape,
            None if lift is None else lift.detach(),
            {n: x.detach() for n, x in columns.items()},
        )
