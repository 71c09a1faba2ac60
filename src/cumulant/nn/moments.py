"""`MomentAttention`: attention that carries mean and covariance of every token (THEORY T27, T28)."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.errors import InputError
from cumulant.measures.checks import HALF, real, require, whole
from cumulant.nn.moment_blocks import Heads, Maps, dense, diagonal, low_rank

__all__ = ["MomentAttention", "TokenMoments"]

Form = Literal["dense", "diagonal", "low_rank"]
Reading = Literal["mixture", "average"]
_START = 1e-2  # of a noise that is learned


class TokenMoments(NamedTuple):
    """First two moments of every token.

    ============== ==================== ======================================================
    field          shape                what it is
    ============== ==================== ======================================================
    ``mean``       ``(*batch, N, E)``   the means
    ``covariance`` ``(*batch, N, E)``   variances, in the diagonal form
    ..             ``(..., N, E, E)``   covariances, in the dense form
    ..             ``(..., N, E, r)``   factors F of covariances F F', in the low-rank form
    ============== ==================== ======================================================
    """

    mean: Tensor
    covariance: Tensor


class MomentAttention(nn.Module):
    """Multi-head self-attention that carries the covariance of every token along with its mean.

    Tokens are independent random vectors with means H_i and covariances S_i. The weights p(i|j) come
    from the means and are held fixed; the mean of the output is ordinary attention. With the value
    map of a head, m_i = W H_i + b, and m the mean of m_i under p(.|j), query j has (T28)

        mixture    sum_i p_i (W S_i W' + (m_i - m)(m_i - m)') + Q        p_i = p(i|j)
        average    sum_i p_i^2 W S_i W' + Q

    In the first reading each head picks one key by its weights, so disagreement between the keys
    counts; in the second the output is the weighted sum that attention computes, and independent
    errors average out. Heads h and g share the tokens: between them is sum_i p^h_i p^g_i W^h S_i
    W^g'. All of it streams over the keys, without an N x N array, and has every derivative.

    Args:
        embed_dim: features E of a token.
        num_heads: heads; divides `embed_dim`.
        covariance: the form in which covariances come and go. "diagonal": variances only, an
            approximation: coordinates count as independent after each linear map, var <- W^2 var,
            and only each head's own variances are kept. "dense": exact. "low_rank": factors, the
            exact result cut to its `rank` largest directions, a few queries at a time, so that
            without gradients the N matrices never exist at once; a gradient keeps them, and needs
            eigenvalues that differ.
        rank: columns of the factors, from 1 to `embed_dim`; only with "low_rank".
        reading: "mixture" or "average".
        noise: variance Q of every value's coordinate; 0 if left out.
        learn_noise: make it a parameter for each coordinate, ``log_noise``, kept positive by its
            logarithm; `noise` (0.01 if left out) is where it starts.
        bias: biases in the linear maps.

    Raises:
        InputError: options that do not fit together.

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
                f"{num_heads}; pad the features or take another number of heads."
            )
        self.covariance = _one_of("covariance", covariance, ("dense", "diagonal", "low_rank"))
        self.reading = _one_of("reading", reading, ("mixture", "average"))
        self.rank = _checked_rank(rank, self.covariance, self.embed_dim)
        self.noise = real(me, "noise", 0.0 if noise is None else noise, least=0.0)
        if learn_noise and noise is not None and self.noise == 0.0:
            raise InputError(
                f"{me}: a learned noise is kept by its logarithm and cannot start at 0; give a "
                "small noise such as 0.001, or none to start at 0.01."
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
        """A layer with a copy of the weights of torch's; batches come first, dropout stays behind.

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
        layer = cls(
            attention.embed_dim,
            attention.num_heads,
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
        return f"num_heads={self.num_heads}, covariance={self.covariance!r}{rank}, reading={self.reading!r}"

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
        """Moments of the attention output, or with `residual` of token plus output.

        Args:
            mean: ``(*batch, N, E)``.
            covariance: ``(*batch, N, E)`` variances, ``(*batch, N, E, E)`` covariances or
                ``(*batch, N, E, any)`` factors, as the layer's form is; zero if left out. Symmetry,
                variances and correlations are checked, definiteness is not: that costs too much.
            attn_mask: boolean (True = may attend) or added to the scores; broadcasts to
                ``(*batch, heads, N, N)``.
            is_causal: token j sees tokens i <= j, beside any mask.
            key_padding_mask: ``(*batch, N)``, True at padding, which no token sees. Together with
                `attn_mask` it makes a mask ``(*batch, heads or 1, N, N)``.
            residual: moments of x_j + output_j, with their covariance S_j W_v' p(j|j) W_o'. (In the
                diagonal form, where the parts are approximate, a sum below 0 is 0.)

        Returns:
            TokenMoments: in the dtype of the mean. A token that sees none has the output biases for
            mean and only the noise for covariance.

        Raises:
            InputError: shapes that do not fit, NaN, what cannot be a covariance.
        """
        _check_mean(mean, self.project_value.weight)
        if covariance is not None:
            _check_covariance(self.covariance, covariance, mean)
        mask = _joined_mask(attn_mask, key_padding_mask, mean, self.num_heads)
        query, key, value = (self._split(layer(mean)) for layer in self._maps()[:3])
        kind = query.dtype
        with torch.autocast(mean.device.type, enabled=False):
            narrow = Heads(query, key, value, mask, is_causal)
            narrow = narrow.to(torch.float32 if kind in HALF else kind)
            read = narrow.read(narrow.value).mean.transpose(-3, -2).flatten(-2)
        out = self.project_output(read.to(kind))
        with torch.autocast(mean.device.type, enabled=False):
            # Variances are differences of squares, so they take twice the digits.
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
        return TokenMoments(out, spread.to(out.dtype))

    def _maps(self) -> tuple[nn.Linear, ...]:
        return self.project_query, self.project_key, self.project_value, self.project_output

    def _split(self, x: Tensor) -> Tensor:
        """``(*batch, heads, N, head features)``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)

    def _wide(self, dtype: torch.dtype) -> Maps:
        inward, outward = (x.weight.to(dtype) for x in (self.project_value, self.project_output))
        noise = inward.new_full((self.embed_dim,), self.noise)
        if self.log_noise is not None:
            noise = self.log_noise.to(dtype).exp()
        return Maps(inward, outward, noise, self.reading == "mixture")


def _one_of(name: str, given: Any, names: tuple[str, ...]) -> str:
    if given not in names:
        told = ", ".join(repr(x) for x in names)
        raise InputError(f"MomentAttention: {name} must be one of {told}, not {given!r:.40}.")
    return given


def _checked_rank(rank: Any, form: str, size: int) -> int | None:
    if form != "low_rank":
        if rank is not None:
            raise InputError(
                f"MomentAttention: rank belongs to covariance='low_rank', not to {form!r}; leave "
                "it out or change the form."
            )
        return None
    if rank is None:
        raise InputError(
            f"MomentAttention: covariance='low_rank' needs rank, the columns of a factor, from 1 "
            f"to embed_dim = {size}."
        )
    if whole("MomentAttention", "rank", rank, 1) > size:
        raise InputError(
            f"MomentAttention: rank must be at most embed_dim = {size}, not {rank}; "
            "covariance='dense' keeps all."
        )
    return int(rank)


def _check_mean(mean: Any, weight: Tensor) -> None:
    size = weight.shape[-1]
    if not isinstance(mean, Tensor) or mean.ndim < 2 or mean.shape[-1] != size:
        came = tuple(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
        raise InputError(
            f"MomentAttention: mean must be a tensor (*batch, N, {size}), not {came}. One token "
            "goes in as x[None]."
        )
    free = torch.is_autocast_enabled(mean.device.type) and mean.is_floating_point()
    if mean.dtype != weight.dtype and not free:
        raise InputError(
            f"MomentAttention: mean has dtype {mean.dtype} and the layer {weight.dtype}; convert "
            "one with .to(dtype)."
        )
    _check_finite("mean", mean)


def _check_finite(name: str, x: Tensor) -> None:
    require(
        x.detach().isfinite(),
        lambda: (
            f"MomentAttention: {name} must be finite, but holds "
            f"{'NaN' if bool(x.isnan().any()) else 'an infinity'}; replace what is missing by 0 "
            "and leave those tokens out with key_padding_mask."
        ),
    )


def _check_covariance(form: str, covariance: Any, mean: Tensor) -> None:
    """Shape, sign, symmetry and correlations; no eigenvalues, which would cost more than the rest."""
    more = {"diagonal": (), "dense": (mean.shape[-1],), "low_rank": ("any",)}[form]
    shape = tuple(covariance.shape) if isinstance(covariance, Tensor) else ()
    fits = shape == (*mean.shape, *(shape[-1:] if form == "low_rank" else more))
    if not fits or not covariance.is_floating_point() or covariance.device != mean.device:
        came = type(covariance).__name__
        if isinstance(covariance, Tensor):
            came = f"{shape} {covariance.dtype} on {covariance.device}"
        told = ", ".join(str(x) for x in (*mean.shape, *more))
        raise InputError(
            f"MomentAttention: a covariance in the {form} form must be a floating-point tensor "
            f"({told}) beside that mean on {mean.device}, but is {came}."
        )
    _check_finite("covariance", covariance)
    if form == "low_rank":
        return
    given = covariance.detach()
    variance = given if form == "diagonal" else given.diagonal(dim1=-2, dim2=-1)
    require(
        variance >= 0,
        lambda: (
            f"MomentAttention: variances must not be negative; the smallest is "
            f"{float(variance.min()):.3g}. Log-variances go in as x.exp()."
        ),
    )
    if form == "diagonal" or not given.numel():
        return
    given = given.to(torch.promote_types(given.dtype, torch.float32))
    tolerance = min(1e3 * torch.finfo(covariance.dtype).eps, 0.02)
    size = given.abs().amax((-2, -1), keepdim=True)
    require(
        (given - given.mT).abs() <= tolerance * size,
        lambda: (
            f"MomentAttention: a covariance must be symmetric; entries differ from their "
            f"transposes by up to {float((given - given.mT).abs().max()):.3g}. Use (x + x.mT) / 2 "
            "if that is rounding."
        ),
    )
    deviation = given.diagonal(dim1=-2, dim2=-1).sqrt()
    require(
        given.abs() <= deviation[..., :, None] * deviation[..., None, :] + tolerance * size,
        lambda: (
            "MomentAttention: a covariance must be positive semi-definite, but one here has a "
            "correlation beyond 1; A @ A.mT is always one."
        ),
    )


def _joined_mask(attn_mask: Any, padding: Any, mean: Tensor, heads: int) -> Tensor | None:
    """One mask with at least three dimensions, True or finite where a token may be seen."""
    *batch, n, _ = mean.shape
    mask = None
    if attn_mask is not None:
        grid, fits = (*batch, heads, n, n), False
        if isinstance(attn_mask, Tensor) and attn_mask.device == mean.device:
            fits = attn_mask.dtype == torch.bool or attn_mask.is_floating_point()
            try:
                fits = fits and torch.broadcast_shapes(attn_mask.shape, grid) == torch.Size(grid)
            except RuntimeError:
                fits = False
        if not fits:
            came = type(attn_mask).__name__
            if isinstance(attn_mask, Tensor):
                came = f"{tuple(attn_mask.shape)} {attn_mask.dtype} on {attn_mask.device}"
            raise InputError(
                f"MomentAttention: attn_mask must be boolean (True = may attend) or added, and "
                f"broadcast to (*batch, heads, N, N) = {grid}, but is {came}; one for each example "
                "goes in as mask[:, None], padding as key_padding_mask."
            )
        mask = attn_mask[(None,) * (3 - attn_mask.ndim)]
        if mask.is_floating_point():
            mask = _lowered(mask)
    if padding is not None:
        shape = tuple(padding.shape) if isinstance(padding, Tensor) else None
        if shape != (*batch, n) or padding.dtype != torch.bool or padding.device != mean.device:
            came = f"{shape} {padding.dtype}" if shape is not None else type(padding).__name__
            raise InputError(
                f"MomentAttention: key_padding_mask must be boolean {(*batch, n)}, True at padding, "
                f"on {mean.device}, but is {came}."
            )
        hidden = padding[..., None, None, :]
        if mask is None:
            return ~hidden
        mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -math.inf)
    return mask


def _lowered(mask: Tensor) -> Tensor:
    """Take each query's largest entry off, so that masks of two heads can be added."""
    require(~mask.detach().isnan(), lambda: "MomentAttention: attn_mask holds NaN.")
    if not mask.shape[-1]:
        return mask
    top = mask.detach().amax(-1, keepdim=True)
    return mask - torch.where(top.isfinite(), top, 0.0)
