"""Moving a token's embedding: the first-order change of the model's output, and the true one.

Shape legend: N tokens, D features, S steps along the direction.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cumulant.core.typed import tolist
from cumulant.derivatives import differentiable
from cumulant.serve.running import Cancelled
from cumulant.serve.views import rounded

__all__ = ["tangent_view"]

STEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
SHOWN = 8  # tokens of the next-token distribution


def tangent_view(
    model: Any,
    ids: Sequence[int],
    token: int,
    toward: int,
    stop: threading.Event,
    unembedding: Tensor | None = None,
) -> dict[str, Any]:
    """f(x + s d) - f(x) beside s J d, where d leads from one word's embedding to another's.

    Args:
        model: a Hugging Face model without a head.
        ids: the tokens of one text.
        token: which of them moves.
        toward: the token id it moves to, at s = 1.
        stop: ends the work when set.
        unembedding: for the logits of the next token, or None.

    Returns:
        ``steps`` s; ``true`` and ``predicted``: lengths of the changes of each token's output,
        ``(S, N)``; ``missed``: how far the prediction is off, relative to the change of the whole
        output, ``(S,)``; for decoders ``next``: ids, logits now, true and predicted changes.
    """
    embed = model.get_input_embeddings()
    with torch.no_grad():
        x = embed(torch.tensor([list(ids)]))
        direction = torch.zeros_like(x)
        direction[0, token] = embed(torch.tensor(toward)) - x[0, token]

    def states(given: Tensor) -> Tensor:
        mask = torch.ones(given.shape[:2], dtype=torch.long)
        return model(inputs_embeds=given, attention_mask=mask).last_hidden_state

    with torch.no_grad(), differentiable():
        now, slope = torch.func.jvp(states, (x,), (direction,))[:2]
        if stop.is_set():
            raise Cancelled
        steps = torch.tensor(STEPS)
        after = states(x + steps[:, None, None] * direction)
    true, predicted = after - now, steps[:, None, None] * slope
    missed = (true - predicted).flatten(1).norm(dim=1) / true.flatten(1).norm(dim=1)
    found: dict[str, Any] = {
        "token": token,
        "steps": list(STEPS),
        "true": rounded(true.norm(dim=-1)),
        "predicted": rounded(predicted.norm(dim=-1)),
        "missed": rounded(missed),
    }
    if unembedding is not None:
        logits = now[0, -1] @ unembedding.T
        changes = [(y[:, -1] @ unembedding.T) for y in (true, predicted)]
        most = changes[0][-1].abs().topk(SHOWN).indices
        found["next"] = {
            "ids": tolist(most),
            "logits": rounded(logits[most]),
            "true": rounded(changes[0][:, most]),
            "predicted": rounded(changes[1][:, most]),
        }
    return found
