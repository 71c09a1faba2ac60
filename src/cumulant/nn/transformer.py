"""`Transformer`: a transformer whose parts are those of the theory, each of which can be switched.

Copy this file to try an idea. A block is two steps x <- x + t f(x), attention and a feed-forward
layer, with a contraction before or after each (docs/theory.md, T13 to T16, T28, T36, T37).
Shape legend: B batch, N tokens, D width, H heads, d = D/H.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils import checkpoint as checkpoints

from cumulant.core.checks import real, whole
from cumulant.core.errors import InputError
from cumulant.nn.similarity import Similarity, similarity

__all__ = ["Attention", "Block", "Transformer"]

Weights = Literal["trained", "frozen", "identity"]
Outward = Literal["trained", "frozen", "identity", "tied"]
Contraction = Literal["layer", "rms", "sphere", "none"]
Place = Literal["before", "after"]
Step = Literal["one", "learned", "gated"]
_recomputed: Callable[..., Tensor] = getattr(checkpoints, "checkpoint")  # noqa: B009  (untyped)


class Attention(nn.Module):
    """Self-attention with a kernel of one's choice, and weights that are trained or not.

    The maps have no biases, so scores are x' W_q' W_k y and the head adds W_o W_v y. With
    ``value_output="tied"`` values are the keys and the output map is W_q', so that the value map is
    the matrix of the score and the step is a true gradient at x, that of sum_h G_h sqrt(d)/beta
    (T14). A frozen map keeps its random start; identity leaves a head its own d coordinates.
    Arguments as in `Transformer`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = True,
        kernel: str | Callable[[Tensor], Tensor] | Similarity = "exp",
        query_key: Weights = "trained",
        value_output: Outward = "trained",
        moments: bool = False,
        beta: float = 1.0,
        learn_beta: bool = False,
    ) -> None:
        super().__init__()
        for name, size in {"width": width, "heads": heads}.items():
            whole("Attention", name, size, 1)
        if width % heads:
            raise InputError(f"Attention: heads must divide width, but {heads} does not {width}.")
        _one_of("query_key", query_key, ("trained", "frozen", "identity"))
        _one_of("value_output", value_output, ("trained", "frozen", "identity", "tied"))
        self.width, self.heads, self.causal, self.moments = width, heads, causal, moments
        self.kernel = similarity(kernel)
        self.tied = value_output == "tied"
        if moments and (value_output not in ("trained", "frozen") or not self.kernel.normalized):
            raise InputError(
                "moments=True needs value_output trained or frozen and a normalized kernel: it "
                "takes the variance of the values and a map that reads it."
            )
        self.query, self.key = (_linear(width, width, query_key) for _ in range(2))
        other: Weights = "identity" if value_output == "tied" else value_output
        self.value = _linear(width, width, other)
        self.output = _linear(width * (2 if moments else 1), width, other)
        given = real("Attention", "beta", beta, least=0.0)
        start = torch.full((heads, 1, 1), given)
        self.beta = nn.Parameter(start) if learn_beta else given

    def extra_repr(self) -> str:
        return f"kernel={self.kernel.name!r}, heads={self.heads}, causal={self.causal}"

    def projected(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``(B, H, N, d)``."""
        _check_vectors("Attention", x_BND, self.width)
        query, key = self.query(x_BND), self.key(x_BND)
        value = key if self.tied else self.value(x_BND)
        q, k, v = (
            torch.unflatten(x, -1, (self.heads, -1)).transpose(-3, -2) for x in (query, key, value)
        )
        return q, k, v

    def forward(self, x_BND: Tensor) -> Tensor:
        q, k, v = self.projected(x_BND)
        if self.moments:  # E[v] and the standard deviation of v under the same weights (T28)
            mean, square = self.attend(q, k, torch.cat([v, v * v], -1)).chunk(2, -1)
            read = torch.cat([mean, (square - mean * mean).clamp_min(1e-6).sqrt()], -1)
        else:
            read = self.attend(q, k, v)
        joined = read.transpose(-3, -2).flatten(-2)
        if self.tied and isinstance(self.query, nn.Linear):
            return joined @ self.query.weight
        return self.output(joined)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The kernel's average of values; replace it to use another implementation."""
        return self.kernel(q, k, v, is_causal=self.causal, beta=self.beta)


class Block(nn.Module):
    """One layer: attention, then a feed-forward layer, as two steps with a contraction each.

    Before: x + t f(C(x)). After: C(x + t f(x)). It keeps the shape, so `cm.nn.Equilibrium` can
    iterate it to a fixed point.
    """

    def __init__(
        self,
        attention: Attention,
        width: int,
        *,
        hidden: int = 4,
        contraction: Contraction = "layer",
        place: Place = "before",
        step: Step = "one",
    ) -> None:
        super().__init__()
        self.first = _one_of("place", place, ("before", "after")) == "before"
        parts: list[nn.Module] = [attention]
        if hidden:
            wide = hidden * width
            parts.append(nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)))
        self.parts = nn.ModuleList(parts)
        self.contractions = nn.ModuleList(_contraction(contraction, width) for _ in parts)
        self.steps = nn.ModuleList(_step(step, width) for _ in parts)

    def forward(self, x: Tensor) -> Tensor:
        for part, contract, step in zip(self.parts, self.contractions, self.steps, strict=True):
            x = x + step(x, part(contract(x))) if self.first else contract(x + step(x, part(x)))
        return x


class Transformer(nn.Module):
    """A transformer made of the theory's parts.

    Args:
        vocabulary: number of tokens; None takes vectors ``(B, N, width)`` and returns vectors.
        width, heads, layers: heads must divide width.
        context: the largest number of tokens; positions are learned.
        hidden: width of the feed-forward layer, in units of `width`; 0 leaves it out.
        causal: token i sees tokens j <= i; False sees all (bidirectional).
        kernel: how a key counts for a query: exp, cosine, taylor2 (any even degree), relu2, elu1,
            sigmoid, uniform, or an elementwise function of the score (T36).
        query_key: "trained", "frozen" at random, or "identity" (T37).
        value_output: the same, or "tied": the value map is the score matrix (T14).
        contraction: "layer", "rms", "sphere" (radius 1) or "none" (T15).
        place: "before" each step (pre-norm) or "after" it (post-norm).
        step: "one", "learned" (a number per step, from 1), or "gated" by the state (T16).
        passes: times the stack is applied; ``layers=1, passes=12`` repeats one shared layer.
        moments: heads return mean and standard deviation of the values, and the output map reads
            both (T28).
        beta: inverse temperature, a factor of the scores; learn_beta: learn it for each head.
        checkpoint: recompute blocks in the backward pass instead of keeping their activations.

    Raises:
        InputError: an unknown choice; the message lists the known ones.

    >>> import torch, cumulant as cm
    >>> model = cm.nn.Transformer(50, width=32, heads=4, layers=2, kernel="taylor2")
    >>> model(torch.randint(50, (3, 20))).shape
    torch.Size([3, 20, 50])
    """

    def __init__(
        self,
        vocabulary: int | None,
        *,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        context: int = 128,
        hidden: int = 4,
        causal: bool = True,
        kernel: str | Callable[[Tensor], Tensor] | Similarity = "exp",
        query_key: Weights = "trained",
        value_output: Outward = "trained",
        contraction: Contraction = "layer",
        place: Place = "before",
        step: Step = "one",
        passes: int = 1,
        moments: bool = False,
        beta: float = 1.0,
        learn_beta: bool = False,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"width": width, "layers": layers, "context": context, "passes": passes}
        sizes |= {} if vocabulary is None else {"vocabulary": vocabulary}
        for name, size in sizes.items():
            whole("Transformer", name, size, 1)
        whole("Transformer", "hidden", hidden, 0)
        self.width, self.context, self.passes, self.checkpoint = width, context, passes, checkpoint
        self.embedding = None if vocabulary is None else nn.Embedding(vocabulary, width)
        self.position = None if vocabulary is None else nn.Parameter(torch.randn(context, width))
        attention = partial(Attention, causal=causal, kernel=kernel, moments=moments)
        attention = partial(attention, query_key=query_key, value_output=value_output)
        attention = partial(attention, beta=beta, learn_beta=learn_beta)
        block = partial(Block, hidden=hidden, contraction=contraction, place=place, step=step)
        self.blocks = nn.ModuleList(block(attention(width, heads), width) for _ in range(layers))
        last: Contraction = contraction if place == "before" else "none"
        self.contraction = _contraction(last, width)
        self.readout = None if vocabulary is None else nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, N, vocabulary)`` of tokens ``(B, N)``; vectors of vectors if no vocabulary.

        A causal model needs no mask of padding at the end, which earlier tokens do not see.

        Raises:
            InputError: more tokens than `context`, one outside the vocabulary, or another shape.
        """
        x = self.contraction(self.states(x))
        return x if self.readout is None else self.readout(x)

    def states(self, x: Tensor) -> Tensor:
        """The residual stream after the last block, ``(B, N, D)``."""
        x = self.embedded(x)
        for _ in range(self.passes):
            for block in self.blocks:
                again = self.checkpoint and torch.is_grad_enabled()
                x = _recomputed(block, x, use_reentrant=False) if again else block(x)
        return x

    def embedded(self, x: Tensor) -> Tensor:
        """What enters the first block."""
        if self.embedding is None or self.position is None:
            return _check_vectors("Transformer", x, self.width)
        tokens = f"tokens (..., N) from 0 to {self.embedding.num_embeddings - 1}"
        if x.dtype not in (torch.int64, torch.int32) or not x.ndim:
            raise InputError(f"Transformer: expected {tokens}, not {x.dtype} {tuple(x.shape)}.")
        if x.shape[-1] > self.context:
            raise InputError(f"Transformer: {x.shape[-1]} tokens, but context is {self.context}.")
        try:
            return self.embedding(x) + self.position[: x.shape[-1]]
        except IndexError:
            raise InputError(f"Transformer: expected {tokens}; some are outside.") from None


class _Sphere(nn.Module):
    """x / ||x||; the origin stays (T15)."""

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, dim=-1)


class _Step(nn.Module):
    """t f for a step f at x: t is 1, a learned number, or a gate that depends on x (T16)."""

    def __init__(self, size: nn.Parameter | None = None, gate: nn.Linear | None = None) -> None:
        super().__init__()
        self.size, self.gate = size, gate

    def forward(self, x: Tensor, f: Tensor) -> Tensor:
        f = f if self.size is None else self.size * f
        return f if self.gate is None else torch.sigmoid(self.gate(x)) * f


def _step(kind: str, width: int) -> _Step:
    _one_of("step", kind, ("one", "learned", "gated"))
    size = nn.Parameter(torch.ones(())) if kind == "learned" else None
    return _Step(size, nn.Linear(width, width) if kind == "gated" else None)


def _contraction(kind: str, width: int) -> nn.Module:
    _one_of("contraction", kind, ("layer", "rms", "sphere", "none"))
    if kind in ("layer", "rms"):
        return nn.LayerNorm(width) if kind == "layer" else nn.RMSNorm(width, eps=1e-6)
    return _Sphere() if kind == "sphere" else nn.Identity()


def _linear(inputs: int, outputs: int, weights: Weights) -> nn.Module:
    if weights == "identity":
        return nn.Identity()
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)  # keeps the size of a vector, trained or not
    return layer.requires_grad_(weights == "trained")


def _one_of(name: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise InputError(f"{name} must be one of {', '.join(known)}; got {given!r}.")
    return given


def _check_vectors(owner: str, x: Tensor, width: int) -> Tensor:
    if x.ndim < 2 or x.shape[-1] != width or not x.is_floating_point():
        wanted, given = f"vectors (..., N, {width})", f"{x.dtype} {tuple(x.shape)}"
        raise InputError(f"{owner}: expected {wanted}, not {given}.")
    return x
