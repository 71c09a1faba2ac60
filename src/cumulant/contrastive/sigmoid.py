"""`sigmoid_loss`: every pair is classified by itself, without the matrix of pairs (SigLIP).

With scores s = <q, k> / t + b and labels z = 1 for positive pairs, -1 for the others,

    -log sigmoid(z s) = softplus(s) - s [z = 1],

so the loss is a sum of softplus over all pairs, taken over tiles like attention's but without a
normalizer, minus the scores of the positive pairs, which need no matrix.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cumulant.contrastive.call import Call, Reduction, Similarity
from cumulant.contrastive.group import ContrastiveGroup, Reduce
from cumulant.core.checks import a_step, require
from cumulant.core.errors import InputError
from cumulant.distributed.facts import Facts
from cumulant.kernels import formulas
from cumulant.kernels.formulas import INDEX
from cumulant.kernels.tiles import Arguments, Named, Program, Result, Tile, tile_sum

__all__ = ["sigmoid_loss"]


@a_step
def sigmoid_loss(
    query: Tensor,
    key: Tensor,
    *,
    positives: Tensor | None = None,
    labels: Any = None,
    temperature: float | Tensor = 0.1,
    bias: float | Tensor = -10.0,
    similarity: Similarity = "cosine",
    exclude: Tensor | Literal["self"] | None = None,
    reduction: Reduction = "mean",
    group: Any = None,
) -> Tensor:
    """The sigmoid loss of SigLIP, exact, in linear memory, any derivative.

    loss_i = -sum_j log sigmoid(z_ij (<q_i, k_j> / t + b)),   z_ij = 1 for positives, otherwise -1

    Unlike `info_nce` it has no normalizer, so pairs do not compete (Zhai et al., 2023). No matrix
    of anchors by keys is ever stored.

    Args:
        query: ``(*batch, M, d)``, the anchors.
        key: ``(*batch, N, d)``.
        positives, labels, similarity, exclude, reduction, group: as in `info_nce`. All positives of
            an anchor count in full.
        temperature: t > 0, a number or a tensor with one entry (`Temperature` learns it). SigLIP
            begins with 0.1.
        bias: b, a number or a tensor with one entry. SigLIP begins with -10, because almost all
            pairs are negative, and learns it.

    Returns:
        The loss; "mean" divides by the number of anchors, as SigLIP does, not by that of pairs.

    Raises:
        InputError: as `info_nce`, or a bias that is not one finite number.
        GroupError: another rank has died, or is in another call.

    >>> import torch, cumulant as cm
    >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
    >>> cosine = torch.nn.functional.cosine_similarity(x[:, None], y, dim=-1)
    >>> signs = 2 * torch.eye(8) - 1
    >>> exact = -torch.nn.functional.logsigmoid(signs * (cosine / 0.1 - 10)).sum() / 8
    >>> torch.allclose(cm.contrastive.sigmoid_loss(x, y), exact, atol=1e-5)
    True
    """
    ranks = ContrastiveGroup(group)
    with _speaking_as("sigmoid_loss"):
        call = Call(
            *(query, key, positives, labels, temperature, similarity, False),
            *(None, exclude, None, True, reduction),
        )
        scores, _, _, kind = call.checked(ranks)
        b = ranks.ranks.checked(
            "sigmoid_loss", lambda: _one_number(bias, scores.query), lambda _: _facts(bias)
        )
        named = scores.arguments()
        every = _softplus_rows({**named, "bias": b.expand((1,) * named["query"].ndim)})
        count = scores.positives.count(scores.query.device)
        loss = every - count * (scores.positive() + b)
        return Reduce(ranks, reduction, kind)(loss)


@contextmanager
def _speaking_as(name: str) -> Generator[None]:
    """Errors of what this shares with `info_nce` under this name."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("info_nce:", f"{name}:", 1)) from None


def _facts(bias: float | Tensor) -> Facts:
    learned = isinstance(bias, Tensor)
    return {
        "the value of bias": "a tensor" if isinstance(bias, Tensor) else float(bias),
        "whether the bias requires gradients": learned and bias.requires_grad,
    }


def _one_number(bias: Any, like: Tensor) -> Tensor:
    try:
        out = bias if isinstance(bias, Tensor) else like.new_full((), float(bias))
    except (TypeError, ValueError):
        raise InputError(
            f"sigmoid_loss: bias must be a number, not {type(bias).__name__}."
        ) from None
    if out.numel() != 1 or not out.is_floating_point():
        raise InputError(
            "sigmoid_loss: a tensor bias must be real and have one entry, but is "
            f"{out.dtype} of shape {tuple(out.shape)}."
        )
    good = out if isinstance(bias, Tensor) else torch.as_tensor(float(bias))
    require(good.isfinite(), lambda: f"sigmoid_loss: bias must be finite, not {float(out):g}.")
    return out.reshape(()).to(like.device, like.dtype)


def _softplus(tile: Tile, a: Arguments) -> Arguments:
    """sum_j softplus(s_ij); pairs that may not meet have s = -inf and add nothing.

    ``F.softplus`` is linear from 20 on, which double precision and second derivatives would see.
    """
    s_mn = formulas.scores(tile, a, 1.0)
    return {"rows": -formulas.row_sum(F.logsigmoid(-s_mn))}


def _softplus_gradient(tile: Tile, a: Arguments) -> Arguments:
    """ds = c sigmoid(s),   dq = ds k,   dk = ds' q,   dbias = ds, summed over pairs."""
    work = tile.work
    ds_mn = work.mul(torch.sigmoid(formulas.scores(tile, a, 1.0)), a["cotangent rows"])
    return {
        "query": work.matmul(ds_mn, a["key"]),
        "key": work.matmul(ds_mn.mT, a["query"]),
        "bias": ds_mn.sum((-2, -1), keepdim=True),
    }


def _pull(
    program: Program, arguments: Named, cotangents: Named, wanted: Sequence[str]
) -> Arguments:
    """The first gradient in three matrix products; from then on the general rule."""
    pulled = replace(
        program,
        function=_softplus_gradient,
        indices={**INDEX, "cotangent rows": "i"},
        results=tuple(Result(n, INDEX[n], tuple(arguments[n].shape)) for n in wanted),
        pull=None,
    )
    return tile_sum(pulled, {**arguments, "cotangent rows": cotangents["rows"]})


def _softplus_rows(arguments: Named) -> Tensor:
    """sum_j softplus(s_ij) of every query, ``(*batch, M)``."""
    query, key = arguments["query"], arguments["key"]
    batch = [1] * (query.ndim - 2)
    for x in arguments.values():
        batch = [max(a, b) for a, b in zip(batch, x.shape[:-2], strict=True)]
    program = Program(
        function=_softplus,
        indices=INDEX,
        results=(Result("rows", "i", (*batch, query.shape[-2], 1)),),
        grid=(query.shape[-2], key.shape[-2]),
        pull=_pull,
    )
    return tile_sum(program, arguments)["rows"][..., 0]
