"""A real encoder-decoder with cross-attention: the network that numbers antibodies (ANARCII).

Its weights come from the package anarcii (BSD 3-Clause, University of Oxford, 2025), which is not
imported: the network is written out here on torch's own ``nn.MultiheadAttention``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.core.errors import InputError
from cumulant.core.typed import tolist
from cumulant.lab.claims.subjects import texts
from cumulant.lens.packaged import folder_of

__all__ = ["INSTALL", "PACKAGE", "Numbering", "network", "numbered", "source_ids"]

PACKAGE, INSTALL = "anarcii", "--no-deps anarcii"
WEIGHTS = "models/antibody/antibody_4_2_128_512.pt"
LETTERS = ("<PAD>", "<SOS>", "<EOS>", "<SKIP>", *"ACDEFGHIKLMNPQRSTVWXY")
# Numbers are positions 1 to 128 of the IMGT scheme; the last four are an insertion and the chain.
NUMBERS = ("<PAD>", "<SOS>", "<EOS>", "<SKIP>", *map(str, range(1, 129)), "X", "H", "L", "K")
WIDTH, HEADS, LAYERS, LONGEST = 128, 4, 2, 210


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.multihead_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.multihead_attn(query, key, key, attn_mask=mask, need_weights=False)[0]


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_2(torch.relu(self.fc_1(x)))


class _Layer(nn.Module):
    """A layer of the encoder, or with ``crossed`` of the decoder; norms come after residuals."""

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.self_attention = _Attention()
        if crossed:
            self.enc_attn_layer_norm = nn.LayerNorm(WIDTH)
            self.encoder_attention = _Attention()
        self.ff_layer_norm = nn.LayerNorm(WIDTH)
        self.positionwise_feedforward = _FeedForward()
        self.crossed = crossed

    def forward(self, x: Tensor, mask: Tensor | None, memory: Tensor | None) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attention(x, x, mask))
        if self.crossed and memory is not None:
            x = self.enc_attn_layer_norm(x + self.encoder_attention(x, memory))
        return self.ff_layer_norm(x + self.positionwise_feedforward(x))


class _Stack(nn.Module):
    def __init__(self, tokens: int, crossed: bool) -> None:
        super().__init__()
        self.tok_embedding = nn.Embedding(tokens, WIDTH)
        self.pos_embedding = nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([_Layer(crossed) for _ in range(LAYERS)])
        if crossed:
            self.fc_out = nn.Linear(WIDTH, tokens)

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        length, mask = ids.shape[1], None
        x = self.tok_embedding(ids) * WIDTH**0.5 + self.pos_embedding(torch.arange(length))
        if memory is not None:
            mask = torch.ones(length, length).triu(1).bool()
        for layer in self.layers:
            x = layer(x, mask, memory)
        return x


class Numbering(nn.Module):
    """From an antibody's letters to the numbers of its positions; one sequence, no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _Stack(len(LETTERS), False), _Stack(len(NUMBERS), True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits ``(B, T, numbers)`` of the next number."""
        return self.decoder.fc_out(self.decoder(target, self.encoder(source)))


@cache
def network() -> Numbering:
    """The network with its trained weights.

    Raises:
        InputError: the package is missing, or holds other weights.
    """
    path = folder_of(PACKAGE, INSTALL) / WEIGHTS
    if not path.is_file():
        raise InputError(f"the installed {PACKAGE} has no {WEIGHTS}: pip install {INSTALL}.")
    own = Numbering()
    own.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return own.eval()


def source_ids(sequence: str) -> Tensor:
    """The letters of an antibody as ids ``(1, N)``, between start and end."""
    inner = [LETTERS.index(letter) for letter in sequence]
    return torch.tensor([[1, *inner, 2]])


class Numbered(NamedTuple):
    """Ids of letters and of the numbers that the network gave them."""

    source: Tensor
    target: Tensor

    @property
    def names(self) -> list[str]:
        return [NUMBERS[i] for i in tolist(self.target[0])]


@cache
@torch.no_grad()
def numbered(which: int = 0) -> Numbered:
    """An antibody of the list, numbered greedily by the network."""
    own: Any = network()
    source = source_ids(texts("antibodies")[which])
    target = torch.tensor([[1]])
    while target.shape[1] < source.shape[1] + 1 and int(target[0, -1]) != 2:
        following = own(source, target)[:, -1].argmax(-1, keepdim=True)
        target = torch.cat([target, following], 1)
    return Numbered(source, target)
