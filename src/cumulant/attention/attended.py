"""`Attended`: the fields of an attention result."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.attention.held import Held
from cumulant.attention.source import FIELDS, Source
from cumulant.core.checks import broadcasts_to, whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.lazy import Lazy, Mode, kept
from cumulant.core.precision import widened

__all__ = ["Attended", "TopKeys"]

# So close to 1 the Renyi entropy is the Shannon entropy as exactly as doubles can tell.
_NEAR_ONE = 2**-26


class TopKeys(NamedTuple):
    """The largest weights of each query in falling order, and their keys: ``(*batch, M, k)``.

    Where a query sees fewer than k keys, weights are 0 and indices -1.
    """

    weights: Tensor
    indices: Tensor

    __repr__ = described_fields


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
    ``score_max``      ``(*batch, M)``    the largest score, bias included; differentiable
    ``score_max_key``  ``(*batch, M)``    the key that has it
    ``effective_keys`` ``(*batch, M)``    exp(entropy): how many equal weights have this entropy
    ================== ================== =========================================================

    and, for an argument, `received`, `seen_by`, `top_keys`, `renyi`, `tsallis`.

    A query that sees no key has G = ``score_max`` = -inf, ``score_max_key`` = -1 and zeros
    elsewhere. For half-precision input, vectors
    come back in that precision and the scalars in float32.

    With ``softcap`` the score is softcap tanh(scale <q, k> / softcap) throughout, and ``key_mean``
    is still E[k] but no longer a gradient of G. With a ``sink`` the measure has one more atom: key
    0, value 0, score 0, the sink's logit as its bias. It takes part in the fields: it raises G and
    the entropy, draws ``mean``, ``key_mean`` and ``score_mean`` toward 0 (``key_mean`` is still the
    gradient of G), and the variances count its distance from the mean. A query that sees no key
    then has G = the logit. Only what is about single keys leaves it out: ``score_max``, `received`
    and `top_keys`, whose weights then sum to less than one. With ``dropout_p``, ``mean`` alone has
    weights dropped; all other fields describe the whole measure.

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

    @kept
    def score_max(self) -> Tensor:
        self._source.ready("score_max")
        lift, score = self._source.lift, self._source.score_max
        return (score if lift is None else score + lift).squeeze(-1)

    @kept
    def score_max_key(self) -> Tensor:
        self._source.ready("score_max_key")
        return self._source.score_max_key.squeeze(-1)

    @kept
    def effective_keys(self) -> Tensor:
        entropy = self.entropy
        return entropy.exp().masked_fill(self._source.lowered.squeeze(-1) == -math.inf, 0.0)

    def received(self, queries: Tensor | slice | None = None) -> Tensor:
        """The total weight that each key receives: sum_i p(j|i), over all queries or some.

        Differentiable to any order. Divide by `seen_by` for the mean over the queries that see the
        key; `cumulant.Received` adds both up over decoding steps. For the last w queries of a long
        prompt, attend with those queries alone: it costs w/M of this.

        Args:
            queries: which queries count: a slice, or a tensor that broadcasts to ``(*batch, M)``,
                boolean or real (a weight for each query; differentiable). The default is all.

        Returns:
            Tensor: ``(*batch, N)``, for each query head under grouped heads. Of merged results, the
            keys of one after those of the other; of sharded keys, those of this rank, and what
            they receive from the queries of all ranks.

        Raises:
            InputError: `queries` does not fit.
            UnknownFieldError: the keys are not at hand (`from_lse`, copies).

        >>> import torch, cumulant as cm
        >>> x = torch.zeros(3, 2)
        >>> cm.attend(x, x, is_causal=True).received()  # 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3
        tensor([1.8333, 0.8333, 0.3333])
        """
        self._source.ready("received")
        return self._source.received(self._share(queries)).squeeze(-1)

    def seen_by(self, queries: Tensor | slice | None = None) -> Tensor:
        """How many queries see each key ``(*batch, N)``: what to divide `received` by.

        `queries` as in `received`; real ones are added up instead of counted. An additive mask
        hides a key where it is -inf; large negative numbers do not, so give such masks as booleans.

        >>> import torch, cumulant as cm
        >>> x = torch.zeros(3, 2)
        >>> cm.attend(x, x, is_causal=True).seen_by()
        tensor([3., 2., 1.])
        """
        self._source.ready("seen_by")
        return self._source.seen(self._share(queries)).squeeze(-1)

    def _share(self, queries: Tensor | slice | None) -> Tensor:
        """The weight of each query, ``(*batch, M, 1)``."""
        source, rows = self._source, tuple(self._source.shape[:-1])
        ones = torch.ones((*rows, 1), dtype=widened(self._dtype), device=source.device)
        if queries is None:
            return ones
        if isinstance(queries, slice):
            chosen = torch.zeros(rows[-1], dtype=torch.bool, device=ones.device)
            chosen[queries] = True
            queries = chosen
        real = isinstance(queries, Tensor) and queries.is_floating_point()  # pyright: ignore[reportUnnecessaryIsInstance]
        if not real and not (isinstance(queries, Tensor) and queries.dtype == torch.bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = queries.dtype if isinstance(queries, Tensor) else type(queries).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                "received: queries must be a slice or a boolean or real tensor that broadcasts to "
                f"{rows} (*batch, M), not {kind}."
            )
        if not broadcasts_to(queries.shape, rows):
            raise InputError(
                f"received: queries must broadcast to {rows} (*batch, M), but have shape "
                f"{tuple(queries.shape)}."
            )
        return ones * queries.to(ones.dtype).unsqueeze(-1)

    def top_keys(self, k: int) -> TopKeys:
        """The `k` largest weights of each query and their keys; no row of weights is kept.

        Weights are exp(score - G), differentiable to any order while the order of the scores stays
        as it is; indices have no derivative. Of equal weights the smaller index comes first.

        Args:
            k: an integer >= 1.

        Returns:
            TopKeys: weights and indices, ``(*batch, M, k)``, for each query head under grouped
            heads. Merged results count their keys one after the other, sharded keys those of all
            ranks; the sink is no key.

        Raises:
            InputError: `k` is not an integer >= 1.
            UnknownFieldError: the keys are not at hand (`from_lse`, copies).

        >>> import torch, cumulant as cm
        >>> key = torch.tensor([[0.0], [2.0], [1.0]]).log1p()
        >>> cm.attend(torch.ones(1, 1), key).top_keys(2)  # weights 1, 3, 2 of 6
        TopKeys(weights=tensor([[0.5000, 0.3333]]), indices=tensor([[1, 2]]))
        """
        k = whole("top_keys", "k", k, 1)
        self._source.ready(f"top_keys({k})")
        found = self._source.largest(k)
        gap = (found.score - self._source.lowered).masked_fill(found.index < 0, -math.inf)
        return TopKeys(gap.exp(), found.index)

    def renyi(self, alpha: float) -> Tensor:
        """The Renyi entropy of the weights, in nats: log(sum_j p_j^alpha) / (1 - alpha).

        It is G at another scale, (G(alpha s) - alpha G(s)) / (1 - alpha), taken in double
        precision; so it has derivatives of any order. At 1 it is ``entropy``, at 0 the log of the
        number of visible keys, at infinity -log of the largest weight. A sink counts as an atom, as
        in ``entropy``.

        Args:
            alpha: a number >= 0, or ``math.inf``.

        Returns:
            Tensor: ``(*batch, M)``; 0 for a query that sees no key.

        Raises:
            InputError: `alpha` is negative or not a number.
            UnknownFieldError: the keys are not at hand (`from_lse`, copies).

        >>> import torch, cumulant as cm
        >>> key = torch.tensor([[1.0], [1.0], [2.0]]).log()  # weights 1/4, 1/4, 1/2
        >>> a = cm.attend(torch.ones(1, 1), key)
        >>> [round(a.renyi(alpha).exp().item(), 4) for alpha in (0, 1, 2, float("inf"))]
        [3.0, 2.8284, 2.6667, 2.0]
        """
        order = _order("renyi", alpha)
        if abs(order - 1) < _NEAR_ONE:
            return self.entropy
        source = self._source
        source.ready(f"renyi({order:g})")
        normalizer = source.tempered(1.0)
        empty = normalizer == -math.inf
        G, tempered = (x.masked_fill(empty, 0.0) for x in (normalizer, source.tempered(order)))
        out = G - tempered if order == math.inf else (tempered - order * G) / (1 - order)
        return out.clamp_min(0.0).squeeze(-1).to(widened(self._dtype))

    def tsallis(self, alpha: float) -> Tensor:
        """The Tsallis entropy of the weights: (1 - sum_j p_j^alpha) / (alpha - 1).

        A function of `renyi`, with its arguments and errors; at 1 it is ``entropy``.

        >>> import torch, cumulant as cm
        >>> a = cm.attend(torch.zeros(1, 2), torch.zeros(4, 2))
        >>> a.tsallis(2.0)  # 1 - 4 (1/4)^2
        tensor([0.7500])
        """
        order = _order("tsallis", alpha)
        if abs(order - 1) < _NEAR_ONE:
            return self.entropy
        entropy = self.renyi(order)
        if order == math.inf:
            return torch.zeros_like(entropy)
        return torch.expm1((1 - order) * entropy) / (1 - order)

    @classmethod
    def from_lse(cls, mean: Tensor, lse: Tensor, base: str | float = "e") -> Attended:
        """The result of another kernel (flash-attention, flashinfer, flex, vLLM), to `merge`.

        It knows ``mean`` and ``log_normalizer``, differentiable in what it was given; other fields
        raise `UnknownFieldError`. A row without keys has lse = -inf (or +inf, as flash-attention
        writes); what its mean holds does not matter.

        Args:
            mean: ``(*batch, M, e)``, the attention output.
            lse: ``(*batch, M)``, the log-sum-exp of its scores.
            base: of that logarithm: "e", or 2 for kernels that use exp2 (flashinfer).

        Raises:
            InputError: shapes, dtypes or devices do not fit, or the base is neither.

        >>> import torch, cumulant as cm
        >>> q, k = torch.randn(4, 8), torch.randn(10, 8)
        >>> s = q @ k[:6].T / 8**0.5
        >>> theirs = cm.Attended.from_lse(s.softmax(-1) @ k[:6], s.logsumexp(-1))
        >>> both = cm.merge(theirs, cm.attend(q, k[6:]))
        >>> torch.allclose(both.mean, cm.attend(q, k).mean, atol=1e-6)
        True
        """
        factor = {"e": 1.0, "2": math.log(2)}.get(str(base).removesuffix(".0"))
        if factor is None:
            raise InputError(f'from_lse: base must be "e" or 2, not {base!r}.')
        tensors = isinstance(mean, Tensor) and isinstance(lse, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not tensors or not (mean.is_floating_point() and lse.is_floating_point()):
            raise InputError("from_lse takes two real tensors, mean and lse.")
        if mean.device != lse.device:
            raise InputError(
                f"from_lse: mean and lse must be on one device, not {mean.device} and {lse.device}."
            )
        if mean.ndim < 2 or lse.shape != mean.shape[:-1]:
            raise InputError(
                f"from_lse: mean (*batch, M, e) and lse (*batch, M) do not fit: got "
                f"{tuple(mean.shape)} and {tuple(lse.shape)}. Where heads come after the length, "
                "transpose first: mean.transpose(-3, -2)."
            )
        compute = widened(mean.dtype)
        empty = lse.isinf().unsqueeze(-1)
        columns = {
            "mean": torch.where(empty, 0.0, mean.to(compute)),
            "lowered": torch.where(empty, -math.inf, factor * lse.to(compute).unsqueeze(-1)),
        }
        why = (
            "Attended.from_lse was given the mean and the log-sum-exp, which do not determine it. "
            "Use attend on the queries and keys themselves."
        )
        return cls(Held(columns, why=why), mean.dtype)

    def __repr__(self) -> str:
        source, kind = self._source, str(self._dtype).removeprefix("torch.")
        shape, held = tuple(source.shape), source.fields if isinstance(source, Held) else ()
        known = [n for n in FIELDS if n in held or any(name == n for name, _ in self._kept)]
        return f"Attended(mean {shape} {kind}; computed: {', '.join(known) or 'nothing yet'})"

    def _repr_html_(self) -> str:
        from cumulant.attention.display import as_html

        return as_html(self)

    def __copy__(self) -> Attended:
        return Attended(self._source, self._dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._made.transforms or Mode.now().transforms:
            raise InputError(
                "a result of attend cannot be copied deeply or pickled inside a transform of "
                "torch.func: return its fields from the function and copy those."
            )
        with torch.no_grad():
            return Attended, (Held.of(self._source), self._dtype)


def _order(name: str, alpha: float) -> float:
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not number or not alpha >= 0:
        raise InputError(f"{name}: alpha must be a number >= 0 or math.inf, not {alpha!r}.")
    return float(alpha)
