"""`Similarity`: the kernel of attention, by name or as a function of the score (T22, T36)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import elu, normalize

from cumulant.attention import scaled_dot_product_attention
from cumulant.core.errors import InputError
from cumulant.kernels.weighted import associative_sums, weighted_sums

__all__ = ["NAMES", "Similarity", "similarity"]

# What a user may write, and what it means; "taylor4" and other even degrees work too.
NAMES = {
    "exp": "exp(s), softmax attention",
    "cosine": "exp of the cosine of query and key",
    "taylor2": "1 + s + s^2/2, the exponential to second order; any even degree to 64",
    "relu2": "max(s, 0)^2",
    "elu1": "<a(q), a(k)> with a = elu + 1, linear attention",
    "sigmoid": "1/(1 + n e^-s) over n keys, not normalized",
    "uniform": "1: the mean over visible keys",
}


@dataclass(frozen=True)
class Similarity:
    """How much a key counts for a query, and so what attention averages.

    With s = <q, k>/sqrt(d), the output is sum_j f(s_ij) v_j / sum_j f(s_ij). For f = exp that is
    the gradient of a log-normalizer and runs on the library's own attention. Other functions stream
    over tiles (`cumulant.kernels.weighted`), in memory linear in the length, and kernels made of
    features in time linear too.

    Attributes:
        name: as `similarity` takes it.
        weight: f; None for exp and for features.
        features: a, where f is <a(q), a(k)>.
        cosine: put queries and keys on the unit sphere; then s is the cosine.
        normalized: divide by the sum of weights.
        floor: added to that sum, for weights that may all vanish.
        per_key: subtract log n from the score, so that n unnormalized weights sum to order one;
            n counts all keys, so what a causal query reads depends on the length of the sequence.
    """

    name: str
    weight: Callable[[Tensor], Tensor] | None = None
    features: Callable[[Tensor], Tensor] | None = None
    cosine: bool = False
    normalized: bool = True
    floor: float = 0.0
    per_key: bool = False

    def __repr__(self) -> str:
        return f"Similarity({self.name!r})"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        beta: Tensor | float = 1.0,
    ) -> Tensor:
        """The output for queries ``(*batch, M, d)``, keys and values ``(*batch, N, d or e)``.

        `beta`, the inverse temperature, is a factor of the score; it broadcasts to the queries.
        """
        if self.cosine:
            query, key = normalize(query, dim=-1), normalize(key, dim=-1)
        if isinstance(beta, Tensor) or beta != 1.0:
            query = query * beta
        scale = 1.0 if self.cosine else 1 / math.sqrt(query.shape[-1])
        if self.weight is None and self.features is None:
            return scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
        if self.normalized:
            value = torch.cat([value, value.new_ones(()).expand(*value.shape[:-1], 1)], -1)
        if self.features is not None:
            a, b = self.features(query), self.features(key)
            sums = associative_sums(a, b, value, is_causal=is_causal)
        else:
            weight = self.shifted(key.shape[-2])
            sums = weighted_sums(query * scale, key, value, weight, is_causal=is_causal)
        if not self.normalized:
            return sums
        total = sums[..., -1:] + self.floor
        return sums[..., :-1] / torch.where(total == 0, 1.0, total)

    def shifted(self, keys: int) -> Callable[[Tensor], Tensor]:
        """The weight as a function of the score among this many keys."""
        weight = torch.exp if self.weight is None else self.weight
        offset = math.log(max(1, keys)) if self.per_key else 0.0
        return (lambda s: weight(s - offset)) if offset else weight

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool = False,
        beta: Tensor | float = 1.0,
    ) -> Tensor:
        """The weights as a matrix ``(*batch, M, N)``, for looking at a few short sequences."""
        identity = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
        values = identity.expand(*key.shape[:-2], *identity.shape)
        return self(query, key, values, is_causal=is_causal, beta=beta)


def similarity(kernel: str | Callable[[Tensor], Tensor] | Similarity) -> Similarity:
    """The kernel of that name, or an elementwise function of the score as a kernel.

    Raises:
        InputError: unknown name (the known ones are listed), or an odd Taylor degree.

    >>> similarity("taylor4").weight(torch.tensor(1.0))
    tensor(2.7083)
    """
    if isinstance(kernel, Similarity):
        return kernel
    if not isinstance(kernel, str):
        if not callable(kernel):
            raise InputError(f"kernel must be a name or a function, not {type(kernel).__name__}.")
        return Similarity(getattr(kernel, "__name__", "given"), weight=kernel)
    known = {
        "exp": Similarity("exp"),
        "cosine": Similarity("cosine", cosine=True),
        "relu2": Similarity("relu2", weight=_relu_squared, floor=1e-6),
        "elu1": Similarity("elu1", features=_elu_plus_one),
        "sigmoid": Similarity("sigmoid", weight=torch.sigmoid, normalized=False, per_key=True),
        "uniform": Similarity("uniform", features=_constant),
    }
    if kernel in known:
        return known[kernel]
    if found := re.fullmatch(r"taylor(\d+)", kernel):
        degree = int(found[1])
        if degree % 2 or not 2 <= degree <= 64:
            raise InputError(
                f"a Taylor kernel needs an even degree from 2 to 64, not {degree}: odd ones are "
                "negative for some scores, and negative weights have no normalizer."
            )
        return Similarity(kernel, weight=partial(_taylor, degree=degree))
    raise InputError(f"there is no kernel {kernel!r}; the kernels are {', '.join(NAMES)}.")


def _relu_squared(s: Tensor) -> Tensor:
    return torch.relu(s).square()


def _elu_plus_one(x: Tensor) -> Tensor:
    return elu(x.contiguous()) + 1  # torch.compile mistakes the strides of elu's gradient otherwise


def _constant(x: Tensor) -> Tensor:
    return torch.ones_like(x[..., :1])


def _taylor(s: Tensor, degree: int) -> Tensor:
    """sum of s^n / n! to this degree, by Horner's rule."""
    out = torch.ones_like(s)
    for n in range(degree, 0, -1):
        out = 1 + s * out / n
    return out
