"""What the exponential family says about each query of a call: one pass over its scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.attention.calls import AttentionCall
from cumulant.core.precision import without_autocast
from cumulant.kernels.rows import summarize

__all__ = ["Positions", "Top", "statistics", "top_of_text"]

LARGEST = 5  # weights of a query that are kept for the report
_WIDE = ("marked", "largest", "largest_key")


class Positions(NamedTuple):
    """Where queries and keys stand in their texts.

    Attributes:
        real: ``(B, M)``, False for padding.
        token: ``(B, M)``, the number of the query in its text.
        key_token: ``(B, N)``, the number of the key in its text, -1 for padding.
        own: ``(B, M)``, which key is the query's own, -1 where none is.
    """

    real: Tensor
    token: Tensor
    key_token: Tensor
    own: Tensor


class Top(NamedTuple):
    """The largest weights of one text, ``(H, tokens, k)``, and the tokens of their keys."""

    key: Tensor
    weight: Tensor


@torch.no_grad()
def statistics(
    call: AttentionCall,
    positions: Positions,
    *,
    order: bool = True,
    spectrum: bool = True,
    asked: Tensor | None = None,
    top: bool = False,
) -> dict[str, Tensor]:
    """Every per-token column of the tables that a call determines, each ``(B, H, M)``.

    Memory is linear in the lengths. `order` adds k90 and the top key, `spectrum` the leading
    eigenvalue of Cov[k], which takes two dozen further matrix products. The weights on keys that
    `asked` ``(B, M, c)`` names by number come back as ``asked`` ``(B, H, M, c)``, 0 for negative
    numbers. With `top` the five largest weights and their keys come back as ``largest`` and
    ``largest_key`` ``(B, H, M, 5)``, for `top_of_text`.
    """
    prepared = call.prepared().sink_as_key()
    arguments = {n: x.detach() for n, x in prepared.arguments.items() if n != "value"}
    shift = 0 if call.sinks is None else 1  # the sink is key 0
    if not bool(arguments["key"].sum().isfinite()):  # a sum shows it in a thirtieth of the time
        arguments["key"] = _cleaned(arguments["key"], positions.key_token, shift)
    first = (positions.key_token == 0).to(torch.int8).argmax(-1, keepdim=True)
    first = torch.where((positions.key_token == 0).any(-1, keepdim=True), first, -1 - shift)
    marks = torch.stack(
        [
            torch.where(positions.own < 0, -1, positions.own + shift),
            (first + shift).expand_as(positions.own),
            torch.full_like(positions.own, shift - 1),
        ],
        -1,
    )
    if asked is not None:
        marks = torch.cat([marks, torch.where(asked < 0, -1, asked + shift)], -1)
    lead = (1,) * (arguments["query"].ndim - 3)
    kind = arguments["query"].dtype
    arguments["marks"] = marks.reshape(len(marks), *lead, *marks.shape[1:]).to(kind)
    with without_autocast(call.query):
        found = summarize(
            *(arguments, prepared.options),
            order=order,
            spectrum=spectrum,
            largest=LARGEST if top else 0,
        )
    if prepared.lift is not None:
        found["log_normalizer"] = found["log_normalizer"] + prepared.lift
    found = {name: prepared.finish(x) for name, x in found.items()}
    column = {name: x[..., 0] for name, x in found.items() if name not in _WIDE}
    own, start, sink = found["marked"][..., :3].unbind(-1)
    out = {
        "log_normalizer": column["log_normalizer"],
        "entropy": column["entropy"],
        "effective_keys": column["entropy"].exp(),
        "visible": column["visible"],
        "score_variance": column["score_variance"],
        "self_mass": torch.zeros_like(own) if call.cross else own,
        "sink_mass": start + sink,
        "sink_logit_mass": sink,
        "fisher_trace": column["fisher_trace"],
    }
    if order:
        out["k90"] = column["coverage"]
        first = column["top"].long() - shift
        names = positions.key_token[:, None].expand(*first.shape[:2], -1)
        out["top_key"] = torch.where(first < 0, -1, names.gather(-1, first.clamp_min(0)))
        out["top_weight"] = column["top_weight"]
    if spectrum:
        out["leading_eigenvalue"] = column["leading"]
    if asked is not None:
        out["asked"] = found["marked"][..., 3:]
    if top:
        out["largest"], out["largest_key"] = found["largest"], found["largest_key"].long() - shift
    return out


def _cleaned(key: Tensor, key_token: Tensor, shift: int) -> Tensor:
    """Zeros for padding: models may leave NaN there, and 0 * NaN would reach every sum."""
    padding = torch.nn.functional.pad(key_token < 0, (shift, 0))
    lead = (1,) * (key.ndim - 3)
    return key.masked_fill(padding.reshape(len(padding), *lead, -1, 1), 0.0)


def top_of_text(largest: Tensor, largest_key: Tensor, positions: Positions, text: int) -> Top:
    """The largest weights of the real queries of one text, from those of `statistics`."""
    key, real = largest_key[text], positions.real[text]
    token = positions.key_token[text][key.clamp_min(0)]
    named = torch.where(key < 0, -1, token)
    return Top(named[:, real].cpu(), largest[text][:, real].cpu())
