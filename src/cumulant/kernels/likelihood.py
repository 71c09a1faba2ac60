"""The log-likelihood of one key per query, with its gradient in the same pass (T24).

-log p(target) = G - score(target), so a loss that weights queries is sum_i c_i G_i minus
sum_i a_i s_i(target), and its gradient in the scores is c p minus a at the target. All weights are
known before the scores, so the gradient is accumulated while the scores are available
(``potential.py``), the target's part is added to the same array, and the backward pass computes
nothing. Higher derivatives and forward mode use the same loss composed of functions that have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.autodiff import transformed
from cumulant.core.eager import eager
from cumulant.core.typed import Function, functions
from cumulant.kernels import formulas
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.formulas import INDEX
from cumulant.kernels.potential import MOST_KEYS, potential
from cumulant.kernels.tiles import Arguments, Program, Result, tile_sum

__all__ = ["Likelihood", "likelihood", "score_total", "target_score"]

_LEARNED = ("query", "key", "bias")


class Likelihood(NamedTuple):
    """The sum of c_i G_i - a_i s_i(target), and G ``(M, 1)`` of every query."""

    loss: Tensor
    log_normalizer: Tensor


@eager
def likelihood(
    arguments: Mapping[str, Tensor], target: Tensor, level: Tensor, share: Tensor
) -> Likelihood:
    """sum_i (level_i G_i - share_i s_i(target_i)), differentiable to any order in query, key, bias.

    Args:
        arguments: ``query`` ``(M, d)``, ``key`` ``(N, d)``, and optionally ``bias`` ``(1, N)`` and
            ``cap`` ``(1, 1)``.
        target: ``(M,)``, a key index per query.
        level, share: ``(M,)``, c and a; constants.
    """
    names = tuple(arguments)
    if not _only_a_gradient(arguments):
        return _composed(arguments, target, level, share)
    return Likelihood(*_Likelihood.apply(names, target, level, share, *arguments.values()))


def _only_a_gradient(arguments: Mapping[str, Tensor]) -> bool:
    """Whether a first gradient is needed, and no other derivative can be."""
    learned = any(arguments[n].requires_grad for n in _LEARNED if n in arguments)
    few = arguments["key"].shape[-2] <= MOST_KEYS
    return torch.is_grad_enabled() and learned and few and not transformed()


def _composed(
    arguments: Mapping[str, Tensor], target: Tensor, level: Tensor, share: Tensor
) -> Likelihood:
    given = {**arguments, "value": arguments["key"][..., :0]}
    G = attention(given, Options()).log_normalizer
    loss = (level * G[..., 0] - share * target_score(arguments, target)).sum()
    return Likelihood(loss, G)


def target_score(arguments: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """s_i(target_i), ``(*batch, M)``; of keys ``(*batch, N, d)``."""
    query, key = arguments["query"], arguments["key"]
    score = (query * _rows(key, target)).sum(-1)
    if "cap" in arguments:
        cap = arguments["cap"][..., 0]
        score = cap * (score / cap).tanh()
    if "bias" in arguments:
        score = score + _rows(arguments["bias"].mT, target)[..., 0]
    return score


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x by their numbers ``(*batch, M)``."""
    if x.ndim == 2:
        return x[index]
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


# Targets looked up at a time: copies of all their keys would be as large as the queries.
_ROWS = 128


def _subtract_target(
    arguments: Mapping[str, Tensor], target: Tensor, share: Tensor, first: int, made: Arguments
) -> Tensor:
    """Scores of some rows' targets; subtracts their part from the gradients in place."""
    query, key = arguments["query"][first : first + len(target)], arguments["key"]
    at = key[target]
    score, slope = (query * at).sum(-1), share
    if "cap" in arguments:
        cap = arguments["cap"][0]
        bent = (score / cap).tanh()
        score, slope = cap * bent, share * (1 - bent.square())
    if "bias" in arguments:
        score = score + arguments["bias"][0, target]
    if "query" in made:
        made["query"][first : first + len(target)].addcmul_(at, slope[:, None], value=-1)
    if "key" in made:
        made["key"].index_add_(0, target, query * slope[:, None], alpha=-1)
    if "bias" in made:
        made["bias"][0].index_add_(0, target, share, alpha=-1)
    return score


class _Likelihood(Function):
    """The loss with its gradient, which the first backward pass consumes.

    A second backward pass, or a differentiable one, goes through `_composed`.
    """

    @staticmethod
    def forward(
        ctx: Any, names: tuple[str, ...], target: Tensor, level: Tensor, share: Tensor, *xs: Tensor
    ) -> tuple[Tensor, Tensor]:
        arguments = dict(zip(names, xs, strict=True))
        wanted = tuple(n for n, need in zip(names, ctx.needs_input_grad[4:], strict=True) if need)
        made = potential({**arguments, "cotangent log_normalizer": level[:, None]}, wanted)
        G = made["log_normalizer"]
        score = torch.cat(
            [
                _subtract_target(arguments, target[i : i + _ROWS], share[i : i + _ROWS], i, made)
                for i in range(0, max(1, len(target)), _ROWS)
            ]
        )
        ctx.names = names
        ctx.kept = {n: made[n] for n in wanted}
        ctx.save_for_backward(target, level, share, *xs)
        ctx.set_materialize_grads(False)
        return (level * G[:, 0] - share * score).sum(), G

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        of_loss, of_G = grads
        target, level, share, *xs = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        made: dict[str, Tensor | None] = {}
        if (
            of_loss is not None
            and of_G is None
            and kept is not None
            and not torch.is_grad_enabled()
        ):
            one = of_loss.device.type == "cpu" and float(of_loss) == 1
            made = kept if one else {n: x.mul_(of_loss) for n, x in kept.items()}
        elif of_loss is not None or of_G is not None:
            needed = [n for n, x in zip(ctx.names, ctx.needs_input_grad[4:], strict=True) if x]
            again = torch.is_grad_enabled()
            with torch.enable_grad():
                arguments = dict(zip(ctx.names, xs, strict=True))
                values = _composed(arguments, target, level, share)
                seeds = [(x, g) for x, g in zip(values, grads, strict=True) if g is not None]
                outputs, cotangents = zip(*seeds, strict=True)
                given = [arguments[n] for n in needed]
                found = torch.autograd.grad(
                    outputs, given, cotangents, create_graph=again, allow_unused=True
                )
            made = dict(zip(needed, found, strict=True))
        return None, None, None, None, *(made.get(n) for n in ctx.names)


def score_total(arguments: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """sum_j w_ij s_ij of capped scores, ``(*batch, M)``, for weights ``(*batch, M or 1, N)``.

    Without a cap this is linear in the keys, and needs no scores.
    """
    query, key = arguments["query"], arguments["key"]
    given = {"query": query, "key": key, "cap": arguments["cap"], "weights": weights}
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in given.values()))
    program = Program(
        function=formulas.score_total,
        indices={**INDEX, "weights": "ij"},
        results=(Result("score_total", "i", (*batch, query.shape[-2], 1)),),
        grid=(query.shape[-2], key.shape[-2]),
    )
    return tile_sum(program, given)["score_total"][..., 0]
