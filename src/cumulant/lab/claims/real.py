"""The real model that some experiments look at: loaded, and run on one passage, once a process.

Shape legend: N tokens, D features of the model, H heads, d features of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.lab.claims.subjects import model_of
from cumulant.lens.models import DEMO, Loaded
from cumulant.lens.texts import passage

__all__ = ["NEEDS", "Sublayer", "attentions", "loaded", "passage_ids", "split", "sublayers"]

NEEDS = ("transformers", DEMO)


class Sublayer(NamedTuple):
    """A block of the model on the passage: what goes in and out, and its heads.

    ``state`` and ``after`` are ``(N, D)``; ``query``, ``key`` and ``value`` are ``(H, N, d)``.
    """

    block: Any
    state: Tensor
    after: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


def loaded() -> Loaded:
    """The lens' default model with its tokenizer, the same as `model_of` gives."""
    return model_of("minilm")


@cache
def passage_ids() -> Tensor:
    """The passage as tokens, ``(1, N)``."""
    return loaded().tokenizer(passage().content, return_tensors="pt")["input_ids"]


def split(x: Tensor) -> Tensor:
    """``(N, D)`` to ``(H, N, d)``."""
    heads = loaded().model.config.num_attention_heads
    return torch.unflatten(x, -1, (heads, -1)).transpose(-3, -2)


@cache
@torch.no_grad()
def sublayers() -> tuple[Sublayer, ...]:
    """Every block, with the states that the model itself computes."""
    model = loaded().model
    states = model(passage_ids(), output_hidden_states=True).hidden_states
    found: list[Sublayer] = []
    for block, before, after in zip(model.encoder.layer, states[:-1], states[1:], strict=True):
        own, x = block.attention.self, before[0]
        query, key, value = (split(project(x)) for project in (own.query, own.key, own.value))
        scale = query.shape[-1] ** -0.5
        found.append(Sublayer(block, x, after[0], query, key, value, scale))
    return tuple(found)


@cache
@torch.no_grad()
def attentions() -> tuple[Tensor, ...]:
    """The weights ``(H, N, N)`` of every block as the model writes them out, in eager mode."""
    model = loaded().model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return tuple(x[0] for x in model(passage_ids(), output_attentions=True).attentions)
    finally:
        model.set_attn_implementation(before)
