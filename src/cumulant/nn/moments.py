"""`MomentAttention`: attention that propagates the mean and covariance of every token.

See docs/theory.md, T28.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.core.checks import real, whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.precision import widened, without_autocast
from cumulant.nn.moment_blocks import Heads, Maps, dense, diagonal, low_rank
from cumulant.nn.moment_checks import (
    check_covariance,
    check_mean,
    check_result,
    checked_rank,
    joined_mask,
    one_of,
)

__all__ = ["MomentAttention", "TokenMoments"]

Form = Literal["dense", "diagonal", "low_rank"]
Reading = Literal["mixture", "average"]
_START = 1e-2  # of a noise that is learned


class TokenMoments(NamedTuple):
    """First two moments of every token.

    ============== ==================== ======================================================
    field          shape                meaning
    ============== ==================== ======================================================
    ``mean``       ``(*batch, N, E)``   the means
    ``covariance`` ``(*batch, N, E)``   variances, in the diagonal form
    ..             ``(..., N, E, E)``   covariances, in the dense form
    ..             ``(..., N, E, r)``   factors F of covariances F F', in the low-rank form
    ============== ==================== ======================================================
    """

    mean: Tensor
    covariance: Tensor

    __repr__ = described_fields


class MomentAttention(nn.Module):
    """Multi-head self-attention that propagates each token's covariance along with its mean.

    Tokens are independent random vectors with means H_i and covariances S_i. The weights p(i|j)
    come from the means and are held fixed; the mean of the output is ordinary attention. With a
    head's value map, m_i = W H_i + b, and m the mean of m_i under p(.|j), query j has (T28) ::

        mixture    sum_i p_i (W S_i W' + (m_i - m)(m_i - m)') + Q        p_i = p(i|j)
        average    sum_i p_i^2 W S_i W' + Q

    Under "mixture" each head samples one key by its weights, so disagreement between the keys
    counts; under "average" the output is the weighted sum that attention computes, and independent
    errors average out. Heads h and g share the tokens, so their cross-covariance is sum_i p^h_i
    p^g_i W^h S_i W^g'. Everything streams over the keys without an N x N array, and derivatives of
    every order are available.

    Args:
        embed_dim: features E per token.
        num_heads: number of heads; must divide `embed_dim`.
        covariance: the form of the covariances, in and out. "diagonal": variances only, an
            approximation that treats coordinates as independent after each linear map, var <- W^2
            var, and keeps only each head's own variances. "dense": exact. "low_rank": factors, the
            exact result truncated to its `rank` largest directions, a few queries at a time, so
            that without gradients the N matrices never exist at once; a gradient keeps them, and
            needs distinct eigenvalues.
        rank: columns of the factors, 1 to `embed_dim`; only with "low_rank".
        reading: "mixture" or "average".
        noise: variance Q of every value coordinate; default 0.
        learn_noise: learn it per coordinate as the parameter ``log_noise``; the logarithm keeps it
            positive. It starts at `noise` (default 0.01).
        bias: biases in the linear maps.

    Raises:
        InputError: incompatible options.

    >>> import torch, cumulant as cm
    >>> layer = cm.nn.MomentAttention(16, 4, covariance="dense")
    >>> x = torch.randn(2, 10, 16)
    >>> out = layer(x, 0.1 * torch.eye(16).expand(2, 10, 16, 16), residual=True)
    >>> out.mean.shape, out.covariance.shape
    (torch.Size([2, 10, 16]), torch.Size([2, 10, 16, 16]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        covariance: Form = "diagonal",
        rank: int | None = None,
        reading: Reading = "mixture",
        noise: float | None = None,
        learn_noise: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        me = type(self).__name__
        self.embed_dim = whole(me, "embed_dim", embed_dim, 1)
        self.num_heads = whole(me, "num_heads", num_heads, 1)
        if self.embed_dim % self.num_heads:
            raise InputError(
                f"{me}: embed_dim must be a multiple of num_heads, but {embed_dim} is not one of "
                f"{num_heads}; pad the features or change num_heads."
            )
        self.covariance = one_of("covariance", covariance, ("dense", "diagonal", "low_rank"))
        self.reading = one_of("reading", reading, ("mixture", "average"))
        self.rank = checked_rank(rank, self.covariance, self.embed_dim)
        self.noise = real(me, "noise", 0.0 if noise is None else noise, least=0.0)
        if learn_noise and noise is not None and self.noise == 0.0:
            raise InputError(
                f"{me}: a learned noise is stored as its logarithm and cannot start at 0; pass a "
                "small noise such as 0.001, or omit it to start at 0.01."
            )
        start = torch.full((self.embed_dim,), math.log(self.noise or _START))
        self.log_noise: nn.Parameter | None
        self.register_parameter("log_noise", nn.Parameter(start) if learn_noise else None)
        self.project_query, self.project_key, self.project_value, self.project_output = (
            nn.Linear(self.embed_dim, self.embed_dim, bias=bias) for _ in range(4)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as `torch.nn.MultiheadAttention` does: Xavier uniform, biases zero."""
        for layer in self._maps():
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                nn.init.zeros_(layer.bias)
        if self.log_noise is not None:
            nn.init.constant_(self.log_noise, math.log(self.noise or _START))

    @classmethod
    def from_attention(
        cls,
        attention: nn.MultiheadAttention,
        *,
        covariance: Form = "diagonal",
        rank: int | None = None,
        reading: Reading = "mixture",
        noise: float | None = None,
        learn_noise: bool = False,
    ) -> MomentAttention:
        """Copy the weights of a torch layer; the result is batch-first and has no dropout.

        >>> import torch, cumulant as cm
        >>> plain = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> layer, x = cm.nn.MomentAttention.from_attention(plain), torch.randn(3, 5, 8)
        >>> torch.allclose(layer(x).mean, plain(x, x, x)[0], atol=1e-6)
        True
        """
        me = cls.__name__
        if not isinstance(attention, nn.MultiheadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"{me}.from_attention takes a torch.nn.MultiheadAttention, not a "
                f"{type(attention).__name__}; copy other layers' weights into project_query, "
                "project_key, project_value and project_output."
            )
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        if weight is None or attention.bias_k is not None or attention.add_zero_attn:  # pyright: ignore[reportUnnecessaryComparison]
            raise InputError(
                f"{me}.from_attention takes self-attention, but this layer has kdim or vdim, "
                "add_bias_kv or add_zero_attn."
            )
        width: int = attention.embed_dim
        heads: int = attention.num_heads
        layer = cls(
            width,
            heads,
            covariance=covariance,
            rank=rank,
            reading=reading,
            noise=noise,
            learn_noise=learn_noise,
            bias=bias is not None,  # pyright: ignore[reportUnnecessaryComparison]
        ).to(weight)
        out = attention.out_proj
        with torch.no_grad():
            weights = [*weight.chunk(3), out.weight]
            for mine, theirs in zip(layer._maps(), weights, strict=True):
                mine.weight.copy_(theirs)
            if bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                for mine, theirs in zip(layer._maps(), [*bias.chunk(3), out.bias], strict=True):
                    mine.bias.copy_(theirs)
        return layer.train(attention.training)

    def extra_repr(self) -> str:
        rank = "" if self.rank is None else f", rank={self.rank}"
        form = f"covariance={self.covariance!r}{rank}, reading={self.reading!r}"
        return f"{self.embed_dim}, {self.num_heads}, {form}"

    def forward(
        self,
        mean: Tensor,
        covariance: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        residual: bool = False,
    ) -> TokenMoments:
        """Moments of the attention output, or of token plus output with `residual`.

        Args:
            mean: ``(*batch, N, E)``.
            covariance: ``(*batch, N, E)`` variances, ``(*batch, N, E, E)`` covariances or
                ``(*batch, N, E, any)`` factors, matching the layer's form; default zero. Symmetry,
                variances and correlations are checked; definiteness is not, as it costs too much.
            attn_mask: boolean (True = may attend) or added to the scores; broadcasts to
                ``(*batch, heads, N, N)``.
            is_causal: token j sees only tokens i <= j, in addition to any mask.
            key_padding_mask: ``(*batch, N)``, True at padding, which no token sees. Together with
                `attn_mask` it makes a mask ``(*batch, heads or 1, N, N)``.
            residual: return the moments of x_j + output_j, including their cross-covariance
                S_j W_v' p(j|j) W_o'. (In the diagonal form, where the terms are approximate, a
                negative sum is clamped to 0.)

        Returns:
            TokenMoments: in the dtype of the mean. A token whose keys are all masked has the output
            biases as mean and only the noise as covariance.

        Raises:
            InputError: mismatched shapes, NaN, or an invalid covariance.
        """
        check_mean(mean, self.project_value.weight)
        if covariance is not None:
            check_covariance(self.covariance, covariance, mean)
        mask = joined_mask(attn_mask, key_padding_mask, mean, self.num_heads)
        query, key, value = (self._split(layer(mean)) for layer in self._maps()[:3])
        kind = query.dtype
        with without_autocast(mean):
            narrow = Heads(query, key, value, mask, is_causal)
            narrow = narrow.to(widened(kind))
            read = narrow.read(narrow.value).mean.transpose(-3, -2).flatten(-2)
        out = self.project_output(read.to(kind))
        with without_autocast(mean):
            # Variances are differences of squares, so compute them in twice the precision.
            wide = torch.float32 if mean.device.type == "mps" else torch.float64
            heads, maps = narrow.to(wide), self._wide(wide)
            given = None if covariance is None else covariance.to(wide)
            if self.covariance == "diagonal":
                spread = diagonal(heads, maps, given, residual=residual)
            elif self.rank is None:
                spread = dense(heads, maps, given, residual=residual)
            else:
                spread = low_rank(heads, maps, given, residual=residual, rank=self.rank)
        out = mean + out if residual else out
        found = TokenMoments(out, spread.to(out.dtype))
        check_result(found)
        return found

    def _maps(self) -> tuple[nn.Linear, ...]:
        return self.project_query, self.project_key, self.project_value, self.project_output

    def _split(self, x: Tensor) -> Tensor:
        """``(*batch, heads, N, head features)``."""
        return torch.unflatten(x, -1, (self.num_heads, -1)).transpose(-3, -2)

    def _wide(self, dtype: torch.dtype) -> Maps:
        inward, outward = (x.weight.to(dtype) for x in (self.project_value, self.project_output))
        noise = inward.new_full((self.embed_dim,), self.noise)
        if self.log_noise is not None:
            noise = self.log_noise.to(dtype).exp()
        return Maps(inward, outward, noise, self.reading == "mixture")
