"""Losses that sample negatives: what each of them estimates (docs/theory.md, T24).

- sampled softmax: e^G without bias, so G a little low, less with more samples;
- NCE: G as a parameter, fitted;
- negative sampling (word2vec): no G at all; its optimum is the pointwise mutual information less
  log k.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cumulant.core.checks import broadcasts_to, finite, numbers, require, whole
from cumulant.core.errors import InputError
from cumulant.core.typed import tolist
from cumulant.kernels.merge import Pool
from cumulant.kernels.potential import log_normalizer

__all__ = ["AliasSampler", "nce", "negative_sampling", "sampled_softmax"]


class AliasSampler:
    """Samples from a fixed distribution over n classes in constant time per draw (Walker, 1977).

    A draw picks one of n columns and then its owner or its alias.

    Args:
        weights: ``(n,)``, nonnegative, not all zero; normalized here. For word2vec, counts to the
            power 0.75.

    >>> import torch, cumulant as cm
    >>> sampler = cm.contrastive.AliasSampler(torch.tensor([1.0, 0.0, 3.0]))
    >>> x = sampler.sample(1000, generator=torch.Generator().manual_seed(0))
    >>> bool((x != 1).all()), sampler.log_probability.exp()
    (True, tensor([0.2500, 0.0000, 0.7500]))
    """

    def __init__(self, weights: Tensor) -> None:
        w = numbers("AliasSampler", weights=weights)[0]["weights"].detach()
        if w.ndim != 1 or w.numel() == 0:
            raise InputError(f"AliasSampler: weights must have shape (n,), not {tuple(w.shape)}.")
        require(
            (w >= 0) & w.isfinite(),
            lambda: "AliasSampler: weights must be finite and not negative.",
        )
        if not float(w.max()) > 0:
            raise InputError("AliasSampler: at least one weight must be positive.")
        p = w.double() / w.max().double()
        p = p / p.sum()
        self.log_probability = p.log().to(w.dtype)
        share, alias = _columns(p)
        self._share = share.to(w.device)
        self._alias = alias.to(w.device)

    def __len__(self) -> int:
        return len(self._alias)

    def __repr__(self) -> str:
        return f"AliasSampler({len(self)} classes)"

    def sample(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws of this shape."""
        sizes = [whole("AliasSampler", "each size", n, 0) for n in shape]
        if generator is not None and not isinstance(generator, torch.Generator):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"AliasSampler: generator must be a torch.Generator, not {generator!r}."
            )
        device = self._share.device
        column = torch.randint(0, len(self), sizes, generator=generator, device=device)
        coin = torch.rand(sizes, generator=generator, dtype=torch.float64, device=device)
        return torch.where(coin < self._share[column], column, self._alias[column])


def _columns(p: Tensor) -> tuple[Tensor, Tensor]:
    """Fill n columns of height 1/n, each by one or two things (Vose, 1991)."""
    n = len(p)
    height = tolist(p * n)
    share, alias = [1.0] * n, list(range(n))
    low = [i for i, h in enumerate(height) if h < 1]
    high = [i for i, h in enumerate(height) if h >= 1]
    while low and high:
        small, large = low.pop(), high[-1]
        share[small], alias[small] = height[small], large
        height[large] -= 1 - height[small]
        if height[large] < 1:
            low.append(high.pop())
    # What rounding leaves over is as high as a column, unless it has no weight at all.
    positive = int(p.argmax())
    for i in low:
        if float(p[i]) == 0:
            share[i], alias[i] = 0.0, positive
    return torch.tensor(share, dtype=torch.float64), torch.tensor(alias)


def sampled_softmax(
    query: Tensor,
    table: Tensor,
    target: Tensor,
    sampler: AliasSampler,
    samples: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """-<q, v_y> + log of an estimate of e^G from a sample of the classes (T24).

    The target counts in full and the others by a sample of `samples` draws, shared by all queries,
    with log-weights -log(samples * probability); draws of the target itself are dropped. So the
    estimate of e^G = sum_j exp<q, v_j> has no bias, and the loss is low by about
    Var[e^G] / (2 e^(2G)): less with more samples, and with a proposal close to the truth.

    Args:
        query: ``(M, d)``.
        table: ``(n, d)``, one row for each class.
        target: ``(M,)``, the true classes.
        sampler: the proposal over classes; must give every class a chance for the estimate to be
            unbiased.
        samples: how many draws.

    Returns:
        The loss of every query, ``(M,)``; train on its mean. A bias of the classes is one more
        column of the table against a column of ones.

    >>> import torch, cumulant as cm
    >>> q, table, y = torch.randn(4, 8) / 3, torch.randn(1000, 8), torch.arange(4)
    >>> sampler = cm.contrastive.AliasSampler(torch.ones(1000))
    >>> loss = cm.contrastive.sampled_softmax(q, table, y, sampler, 900)
    >>> exact = torch.nn.functional.cross_entropy(q @ table.T, y, reduction="none")
    >>> torch.allclose(loss, exact, atol=1.0)
    True
    """
    q, v, y = _call("sampled_softmax", query, table, target, sampler)
    count = whole("sampled_softmax", "samples", samples, 1)
    drawn = sampler.sample(count, generator=generator)
    bias = -(sampler.log_probability[drawn].to(q) + math.log(count))
    positive = (q * v[y]).sum(-1)
    others = log_normalizer(
        {
            "query": q,
            "key": v[drawn],
            "bias": bias[None],
            "query_tag": y[:, None],
            "key_tag": drawn[:, None],
        }
    )[:, 0]
    return _in_range("sampled_softmax", Pool([positive, others]).log_normalizer() - positive)


def nce(
    query: Tensor,
    table: Tensor,
    target: Tensor,
    sampler: AliasSampler,
    samples: int,
    *,
    log_normalizer: Tensor | float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Noise-contrastive estimation: tell data from noise, with G as a parameter (T24).

    A classifier with logit <q, v> - c - log(samples * probability) is asked which of 1 + samples
    classes came from the data. At the optimum exp(<q, v> - c) is the conditional probability, so a
    free parameter c is fitted to G (Gutmann and Hyvaerinen, 2010).

    Args:
        query, table, target, sampler, samples: as in `sampled_softmax`; every query has draws of
            its own.
        log_normalizer: c, ``(M,)`` or a number; 0 asks the scores to normalize themselves.

    Returns:
        The loss of every query, ``(M,)``.
    """
    q, v, y = _call("nce", query, table, target, sampler)
    count = whole("nce", "samples", samples, 1)
    log_p = sampler.log_probability.to(q) + math.log(count)
    c = finite(
        "nce", "log_normalizer", numbers("nce", log_normalizer=log_normalizer)[0].popitem()[1]
    )
    require(
        log_p[y] > -math.inf,
        lambda: "nce: the sampler gives a target no chance; data and noise must overlap.",
    )
    if not broadcasts_to(c.shape, q.shape[:1]):
        raise InputError(
            f"nce: log_normalizer must be a number or one for each of {q.shape[0]} queries, but "
            f"has shape {tuple(c.shape)}."
        )
    c = c.to(q).expand(q.shape[0])[:, None]

    def offset(at: Tensor) -> Tensor:
        return c + log_p[at]

    return _tell_apart("nce", q, v, y, sampler, count, generator, offset)


def negative_sampling(
    query: Tensor,
    table: Tensor,
    target: Tensor,
    sampler: AliasSampler,
    samples: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """word2vec's loss: like `nce`, with neither G nor the proposal in the logit (T24).

    Its optimum is <q, v> = PMI - log(samples) for a proposal equal to the classes' own frequencies
    (Levy and Goldberg, 2014), in general log(p(v|q) / proposal(v)) - log(samples).

    Args:
        query, table, target, sampler, samples: as in `nce`.

    Returns:
        The loss of every query, ``(M,)``.

    >>> import torch, cumulant as cm
    >>> words, contexts = torch.randn(4, 8), torch.randn(1000, 8)
    >>> sampler = cm.contrastive.AliasSampler(torch.rand(1000) ** 0.75)
    >>> cm.contrastive.negative_sampling(words, contexts, torch.arange(4), sampler, 5).shape
    torch.Size([4])
    """
    q, v, y = _call("negative_sampling", query, table, target, sampler)
    count = whole("negative_sampling", "samples", samples, 1)
    return _tell_apart("negative_sampling", q, v, y, sampler, count, generator, None)


def _tell_apart(
    owner: str,
    query: Tensor,
    table: Tensor,
    target: Tensor,
    sampler: AliasSampler,
    samples: int,
    generator: torch.Generator | None,
    offset: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """-log sigmoid of the target's logit - sum of log sigmoid of minus the draws' logits."""
    drawn = sampler.sample(len(query), samples, generator=generator)
    at = torch.cat([target[:, None], drawn], -1)
    logits = (query[:, None] * F.embedding(at, table)).sum(-1)
    if offset is not None:
        logits = logits - offset(at)
    return _in_range(owner, F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).sum(-1))


def _in_range(owner: str, loss: Tensor) -> Tensor:
    require(
        loss.isfinite(),
        lambda: f"{owner}: the scores left the range of {loss.dtype}; scale the vectors down.",
    )
    return loss


def _call(
    owner: str, query: Any, table: Any, target: Any, sampler: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(table, torch.nn.Module):
        raise InputError(f"{owner}: table must be a tensor, such as the module's .weight.")
    got, _ = numbers(owner, query=query, table=table)
    q, v = (finite(owner, n, got[n]) for n in ("query", "table"))
    if q.ndim != 2 or v.ndim != 2 or q.shape[1] != v.shape[1] or 0 in (*q.shape, *v.shape):
        raise InputError(
            f"{owner}: query must have shape (M, d) and table (n, d), but have {tuple(q.shape)} "
            f"and {tuple(v.shape)}. Flatten sequences first: x.flatten(0, -2)."
        )
    if not isinstance(sampler, AliasSampler) or len(sampler) != len(v):
        size = len(sampler) if isinstance(sampler, AliasSampler) else type(sampler).__name__
        raise InputError(
            f"{owner}: sampler must be an AliasSampler over the {len(v)} classes, not {size}."
        )
    try:
        y = torch.as_tensor(target, device=q.device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{owner}: target must be integers, not {target!r:.40}.") from None
    if y.is_complex() or y.is_floating_point() or y.dtype == torch.bool or y.shape != (len(q),):
        raise InputError(
            f"{owner}: target must be {len(q)} integers, one for each query, but is {y.dtype} "
            f"of shape {tuple(y.shape)}."
        )
    require(
        (y >= 0) & (y < len(v)),
        lambda: (
            f"{owner}: target must lie between 0 and {len(v) - 1}, but goes from {int(y.min())} to "
            f"{int(y.max())}."
        ),
    )
    return q, v, y.long()
