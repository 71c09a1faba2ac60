"""The standard test for induction heads: random tokens, and then the same tokens again.

In the second half every token has occurred exactly once, so there is one earlier copy and one token
that followed it; nothing but the repetition tells them (Olsson et al., 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cumulant.core.typed import tolist
from cumulant.lens.encoding import Encoded, batches, embeddings, surroundings
from cumulant.lens.observing import watching
from cumulant.lens.patterns import PATTERNS
from cumulant.lens.recorder import Wanted
from cumulant.lens.summary import HeadSums

__all__ = ["repeat_columns", "repeated"]

HALF = 50  # different tokens, where vocabulary and context allow
FEWEST = 8  # below this many, chance is too close to a pattern
TEXTS = 1  # of 50 tokens: the forward pass over them is a fifth of that over a text of 512


def repeated(
    model: nn.Module, tokenizer: Any, limit: int | None = None, *, seed: int = 0
) -> Encoded | None:
    """Texts of random tokens said twice, between the tokenizer's special tokens.

    Args:
        model, tokenizer: whose vocabulary it is.
        limit: the most tokens of a text.
        seed: of the tokens.

    Returns:
        None if vocabulary or context are too small, or the model reads no tokens.
    """
    takes = getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids" or not hasattr(tokenizer, "all_special_ids"):
        return None
    size = getattr(embeddings(model), "num_embeddings", None)
    words = len(tokenizer) if size is None else min(size, len(tokenizer))
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([x for x in range(words) if x not in special], dtype=torch.long)
    before, after = surroundings(tokenizer)
    room = 2 * HALF if limit is None else limit - len(before) - len(after)
    half = min(HALF, len(ordinary), room // 2)
    if half < FEWEST:
        return None
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = []
    for _ in range(TEXTS):
        places = torch.randperm(len(ordinary), generator=generator)[:half]
        drawn: list[int] = tolist(ordinary[places])
        ids.append([*before, *drawn, *drawn, *after])
    return Encoded(ids, [], list(range(TEXTS)), [], getattr(tokenizer, "pad_token_id", None) or 0)


@torch.no_grad()
def repeat_columns(
    model: nn.Module, tokenizer: Any, limit: int | None = None
) -> dict[tuple[str, int], list[dict[str, float | None]]]:
    """The scores of the test for each head, by the layer's key; nothing where it cannot be made."""
    encoded = repeated(model, tokenizer, limit)
    if encoded is None:
        return {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sums = HeadSums()
    with watching(model, Wanted(order=False, spectrum=False), warns=False) as recorder:
        for arguments in batches(encoded, TEXTS, model=model):
            model(**{n: x.to(device) for n, x in arguments.items()})
    for record in recorder.records:
        sums.add(record)
    return {
        key: [
            {f"repeat_{n.removesuffix('_mass')}": row.get(n) for n in PATTERNS}
            for row in sums.rows(layer)
        ]
        for key, layer in recorder.layers.items()
        if not layer.cross
    }
