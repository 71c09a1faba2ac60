"""Two attention layers with known heads, in one-hot coordinates: the induction circuit by hand.

The state of a token is (its token, its position, the token before it, written by layer 0). With
`s` the score of a match and 0 that of everything else, every weight is a closed form.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

SCORE = 40.0


class InductionModel(nn.Module):
    """Heads (0, 0): previous token; (0, 1): uniform; (1, 0): induction; (1, 1): same token."""

    base_model_prefix = "model"

    def __init__(self, words, length):
        super().__init__()
        self.words, self.length = words, length
        self.embedding = nn.Embedding(words, words)
        self.config = SimpleNamespace(max_position_embeddings=length, model_type="induction")

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask=None):
        token = F.one_hot(input_ids, self.words).double()
        place = F.one_hot(torch.arange(input_ids.shape[1]), self.length).double()
        before = place.roll(-1, -1)  # position i as a query for position i - 1
        before[0] = 0
        place, before = (x.expand(len(token), -1, -1) for x in (place, before))
        first = self.attend([before, 0 * before], [place, place], [token, token])
        previous = first[:, 0]
        second = self.attend([token, token], [previous, token], [token, token])
        return (second.sum(1),)

    def attend(self, query, key, value):
        query, key, value = (torch.stack(x, 1) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCORE)


class Numbers:
    """A tokenizer of numbers, with one special token before the text."""

    all_special_ids = (0,)
    pad_token_id = 0
    model_max_length = 10**30

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return self.words

    def __call__(self, text, add_special_tokens=True):
        ids = [1 + ord(c) % (self.words - 1) for c in text]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}

    def convert_ids_to_tokens(self, ids):
        return [str(i) for i in ids]
