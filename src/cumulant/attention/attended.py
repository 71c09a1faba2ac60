"""`Attended`: the fields of an attention result, and the protocol of what computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.lazy import Lazy, Mode, kept

__all__ = ["FIELDS", "Attended", "Field", "Settled", "Source", "column_of"]

Field = Literal[
    "mean",
    "log_normalizer",
    "key_mean",
    "entropy",
    "score_mean",
    "score_variance",
    "value_variance",
]
FIELDS: tuple[Field, ...] = get_args(Field)


class Source(Protocol):
    """The columns ``(*batch, M, features)`` that fields are made of, in the computing precision.

    Attributes:
        shape: of ``mean``.
        requires_grad: whether anyone can ask for a gradient.
        mean, key_mean, entropy, score_mean, score_variance: the fields.
        lowered: the log-normalizer without `lift`.
        lift: what was taken off the scores of each query; None if nothing was.
        value_moments: mean and variance of the values and ``lowered`` side by side, in double
            precision where the device has it.
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

    def ready(self, name: Field) -> None:
        """Raise if the field cannot be computed now; over ranks, wait until all ask for it."""
        ...


def column_of(field: Field) -> str:
    """The column that a field is made of."""
    return {"log_normalizer": "lowered", "value_variance": "value_moments"}.get(field, field)


class Attended(Lazy):
    """The measure over keys of each query: fields are computed on first access, and kept.

    With p(j|i) = exp(scale <q_i, k_j> + bias_ij - G_i) (docs/theory.md, T1, T7, T12):

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

    With ``softcap`` the score is softcap tanh(scale <q, k> / softcap) throughout, and ``key_mean``
    is still E[k] but no longer a gradient of G. With a ``sink`` the measure has one more atom: key
    0, value 0, score 0, the sink's logit as its bias. It takes part in every field: it raises G and
    the entropy, draws ``mean``, ``key_mean`` and ``score_mean`` toward 0 (``key_mean`` is still the
    gradient of G), and the variances count its distance from the mean. A query that sees no key
    then has G = the logit. With ``dropout_p``, ``mean`` alone has weights dropped; all other fields
    describe the whole measure.

    A field records gradients if they were enabled both in `attend` and when the field is computed;
    reading one under ``torch.no_grad`` does not affect the others. Because fields are computed on
    first access, leave the inputs unchanged until then. Results can be used from several threads.
    A pickled or deeply copied result holds all fields as numbers, without inputs and gradients.
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


@dataclass(frozen=True)
class Settled:
    """A source that holds its columns as numbers, and nothing they were computed from."""

    shape: torch.Size
    lift: Tensor | None
    entropy: Tensor
    mean: Tensor
    lowered: Tensor
    key_mean: Tensor
    score_mean: Tensor
    score_variance: Tensor
    value_moments: Tensor
    requires_grad: bool = False

    def ready(self, name: Field) -> None:
        """Always: nothing is left to compute."""

    @classmethod
    def of(cls, source: Source) -> Settled:
        """All columns of a source, computed now."""
        for name in FIELDS:
            source.ready(name)
        entropy = source.entropy.detach()  # first: it brings G and the mean with it
        lift = source.lift
        return cls(
            shape=source.shape,
            lift=None if lift is None else lift.detach(),
            entropy=entropy,
            mean=source.mean.detach(),
            lowered=source.lowered.detach(),
            key_mean=source.key_mean.detach(),
            score_mean=source.score_mean.detach(),
            score_variance=source.score_variance.detach(),
            value_moments=source.value_moments.detach(),
        )
