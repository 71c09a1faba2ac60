"""What an examination must remember to resume after an interruption, and to know its own work."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from cumulant.lens.summary import weights_digest
from cumulant.lens.texts import Text

__all__ = ["NAMED", "State", "digest_of", "identity"]

NAMED = 5  # notes that name a text that was too long
FORMAT = 3  # of the records in the journal


@dataclass
class State:
    """What must survive an interruption, beside the tables on disk; it does not grow with them.

    ``digest`` is that of the finished texts; ``pieces`` of the next chunk are finished as well, and
    ``ahead`` is the digest with all of that chunk. ``notes`` have the numbers of their texts.
    """

    texts: int = 0
    pieces: int = 0
    parts: int = 0
    digest: str = ""
    ahead: str = ""
    seconds: float = 0.0
    tokens: int = 0
    inputs: int = 0
    overlong: int = 0
    length: int = 0
    notes: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    shown: list[Any] = field(default_factory=list[Any])
    pictures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    first: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def __post_init__(self) -> None:
        self.notes = [(number, note) for number, note in self.notes]  # a journal has lists

    def merge(self, other: State) -> None:
        """Take in the counts and notes of another rank."""
        for name in ("texts", "tokens", "inputs", "overlong"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes = sorted([*self.notes, *other.notes])[:NAMED]


def digest_of(before: str, text: Text) -> str:
    """The digest of some texts and one more."""
    return hashlib.sha256(f"{before}\0{text.name}\0{text.content}".encode()).hexdigest()


def identity(
    model: nn.Module, tokenizer: Any, name: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What must be the same for work to be resumed."""
    return {
        "model": name,
        "weights": weights_digest(model),
        **settings,
        "tokenizer": type(tokenizer).__name__,
        "vocabulary": len(tokenizer) if hasattr(tokenizer, "__len__") else None,
        "format": FORMAT,
    }
