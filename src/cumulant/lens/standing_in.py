"""A continuous law in place of a head's keys: a Gaussian, or a mixture of some (T3-T5, T40).

For a Gaussian law of (key, value) pairs the tilted mean of the value is v + Cov[v, k] eta, with
eta = scale q. In terms of the scores s_j = <eta, k_j> of the n keys it was fitted to, that is

    sum_j (1 + s_j - mean s) / n  v_j

which is linear attention: the first order of the softmax in the scores. A mixture has one such term
for every component c, with weight proportional to n_c exp(mean_c s + Var_c s / 2), because
eta' C_c eta is the variance of the scores in c. With a component for every key it is the softmax.
Shape legend: B texts, H heads, M queries, N keys, d features, n components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cumulant.attention.calls import AttentionCall
from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.core.precision import widened
from cumulant.core.typed import linalg, tolist
from cumulant.lens.editing import edited
from cumulant.lens.tables import pandas

if TYPE_CHECKING:
    from cumulant.lens.tables import DataFrame

__all__ = ["components_of", "continuous", "laws", "scores_of"]

_ROUNDS = 12  # of Lloyd's algorithm


@torch.no_grad()
def laws(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    components: Sequence[int] = (1, 2, 4, 8, 16),
) -> DataFrame:
    """How well a Gaussian or a mixture stands in for the keys of each head (T40).

    Every head of every text gets a law fitted to the keys it sees, its values by regression on
    them; the model itself runs unchanged. Memory: M x N a head, one layer at a time.

    Args:
        model: a Hugging Face model.
        inputs: arguments of the model, of one batch or batch by batch; ``attention_mask`` marks
            padding.
        components: sizes of the mixtures; 1 is the Gaussian.

    Returns:
        A row per (layer, head, components): ``error``, the size of the change of the head's output
        relative to the output, ``unexplained``, the square of that change relative to that of
        uniform attention (1: no better than the plain mean of the values), and ``tilt``,
        eta' C eta / (2 log N), median over tokens: a Gaussian is a fair law of N keys where this is
        well below 1 (T17).

    >>> import cumulant as cm
    >>> model, tokenizer, *_ = cm.lens.load()
    >>> inputs = tokenizer("To be, or not to be", return_tensors="pt")
    >>> table = cm.lens.laws(model, inputs, (1,))
    >>> len(table)  # 6 layers, 12 heads
    72
    """
    sizes = [whole("laws", "components", n, 1) for n in components]
    sums: dict[tuple[int, int], Tensor] = {}
    tilts: dict[int, list[Tensor]] = {}
    real = torch.ones(1, 1, dtype=torch.bool)

    def answer(layer: int, call: AttentionCall) -> None:
        marks = real.expand(call.query.shape[0], call.query.shape[2])
        truth, plain = call.attend().mean, _uniform(call)
        tilts.setdefault(layer, []).append(_tilt(call).transpose(0, 1)[:, marks])
        for n in sizes:
            rows = torch.stack(
                [
                    (continuous(call, n) - truth).square().sum(-1),
                    (plain - truth).square().sum(-1),
                    truth.square().sum(-1),
                ]
            )
            own = rows.transpose(1, 2)[:, :, marks].double().sum(-1)  # (3, H)
            sums[layer, n] = sums.get((layer, n), 0) + own

    with edited(model, answer):
        for arguments in [inputs] if isinstance(inputs, Mapping) else inputs:
            mask = arguments.get("attention_mask")
            real = torch.ones(1, 1, dtype=torch.bool) if mask is None else mask.bool()
            model(**arguments)
    rows: list[dict[str, Any]] = []
    for (layer, n), (changed, uniform, size) in sums.items():
        tilt = torch.cat(tilts[layer], 1).quantile(0.5, dim=1)
        columns = {
            "layer": [layer] * len(size),
            "head": range(len(size)),
            "components": [n] * len(size),
            "error": tolist((changed / size).sqrt()),
            "unexplained": tolist(changed / uniform),
            "tilt": tolist(tilt),
        }
        rows += [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    return pandas().DataFrame(rows).sort_values(["layer", "head", "components"], ignore_index=True)


def continuous(call: AttentionCall, components: int = 1, *, seed: int = 0) -> Tensor:
    """The output ``(B, H, M, e)`` of a call whose keys are replaced by a law of some components.

    Each query sees the law of the keys that it may attend to, weighted by its bias. Components are
    found by Lloyd's algorithm in the keys of the text; one component looks at no other key.

    Raises:
        InputError: a softcap or sink logits, which no tilted law describes.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 9, 4)
    >>> call = AttentionCall(q, k, v, scale=0.5)
    >>> torch.allclose(continuous(call, 9), call.attend().mean, atol=1e-5)
    True
    """
    score, weight = scores_of(call)
    value = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)
    value = value.to(score.dtype)
    label = components_of(call, components, seed=seed)
    share = torch.nn.functional.one_hot(label, int(label.max()) + 1).to(score.dtype)  # (B, H, N, n)
    mass = weight @ share  # (B, H, M, n)
    safe = mass.where(mass > 0, 1.0)
    mean = (weight * score) @ share / safe
    variance = ((weight * score.square()) @ share / safe - mean.square()).clamp_min(0)
    level = mass.log() + mean + variance / 2
    portion = level.softmax(-1) / safe
    # Back to the keys: each has the slope of its own component.
    slope = 1 + score - _spread(mean, label)
    return (weight * _spread(portion, label) * slope) @ value


def _spread(x: Tensor, label: Tensor) -> Tensor:
    """``(B, H, M, n)`` by component to ``(B, H, M, N)`` by key."""
    return x.gather(-1, label[:, :, None].expand(*x.shape[:-1], -1))


def scores_of(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Scores ``(B, H, M, N)`` without bias, and the weight of each key before it is tilted.

    Raises:
        InputError: a softcap or sink logits.
    """
    if call.softcap is not None or call.sinks is not None:
        raise InputError(
            "a continuous law takes neither soft-capped scores nor sink logits: leave such layers "
            "out."
        )
    kind = widened(call.query.dtype)
    group = call.query.shape[1] // call.key.shape[1]
    key = call.key.to(kind).repeat_interleave(group, 1)
    score = call.scale * call.query.to(kind) @ key.mT
    weight = torch.ones_like(score)
    if call.bias is not None:
        weight = weight * call.bias.to(kind).exp()
    if call.mask is not None:
        weight = weight * call.mask
    if call.causal:
        weight = weight.tril()
    return score, weight


def components_of(call: AttentionCall, components: int, *, seed: int = 0) -> Tensor:
    """The component ``(B, H, N)`` of each key, by Lloyd's algorithm from random keys."""
    group = call.query.shape[1] // call.key.shape[1]
    key = call.key.to(widened(call.key.dtype))
    batch, heads, length, _ = key.shape
    if components >= length:
        label = torch.arange(length, device=key.device).expand(batch, heads, length)
    elif components == 1:
        label = torch.zeros(batch, heads, length, dtype=torch.long, device=key.device)
    else:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randperm(length, generator=generator)[:components].to(key.device)
        center = key[:, :, start]
        label = _nearest(key, center)
        for _ in range(_ROUNDS):
            share = torch.nn.functional.one_hot(label, components).to(key.dtype)
            count = share.sum(2)[..., None]
            center = torch.where(count > 0, share.mT @ key / count.clamp_min(1), center)
            label = _nearest(key, center)
    return label.repeat_interleave(group, 1)


def _nearest(key: Tensor, center: Tensor) -> Tensor:
    return (linalg.vector_norm(center, dim=-1).square()[:, :, None] / 2 - key @ center.mT).argmin(
        -1
    )


def _moments(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Number of keys that each query sees, mean and variance of its scores before the tilt."""
    score, weight = scores_of(call)
    total = weight.sum(-1)
    mean = (weight * score).sum(-1) / total.clamp_min(1e-30)
    square = (weight * score.square()).sum(-1) / total.clamp_min(1e-30)
    return total, mean, (square - mean.square()).clamp_min(0)


def _tilt(call: AttentionCall) -> Tensor:
    """eta' C eta / (2 log N) ``(B, H, M)``; 0 where a query sees one key."""
    total, _, variance = _moments(call)
    bound = 2 * total.clamp_min(1).log()
    return torch.where(bound > 0, variance / bound.clamp_min(1e-30), 0.0).float()


def _uniform(call: AttentionCall) -> Tensor:
    """The mean of the values that each query sees."""
    return call.attend(query=torch.zeros_like(call.query)).mean
