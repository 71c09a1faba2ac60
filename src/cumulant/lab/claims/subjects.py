"""The real models that experiments look at, each with inputs of its kind."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.core.typed import functions, random
from cumulant.lens.models import Loaded, load
from cumulant.lens.packaged import PACKAGED, folder_of

__all__ = [
    "MODELS",
    "NEEDS",
    "Subject",
    "copied",
    "encoded",
    "mixed",
    "model_of",
    "records",
    "reseeded",
    "subject",
    "texts",
]

# Which inputs a model reads, how many tokens of each, and what people call it.
MODELS = {
    "minilm": ("austen", 128, "MiniLM"),
    "smollm2": ("austen", 128, "SmolLM2"),
    "rxnmapper": ("reactions", 128, "ALBERT"),
    "antiberty": ("antibodies", 128, "AntiBERTy"),
}
NEEDS = ("transformers", "gguf", "pandas", *(PACKAGED[name].package for name in MODELS))


@dataclass(frozen=True)
class Subject:
    """A model and what it reads.

    Attributes:
        key: of `MODELS`.
        name: what people call it.
        model: without a head, in evaluation mode.
        batches: arguments for the model.
        digest: of the weights and inputs; None where they are not those of the files.
    """

    key: str
    name: str
    model: Any
    batches: tuple[dict[str, Tensor], ...]
    digest: str | None

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        """The last hidden states ``(B, T, D)`` of every batch."""
        return [self.model(**batch).last_hidden_state for batch in self.batches]


def texts(kind: str) -> list[str]:
    """The inputs of a kind, one to a line: "austen", "reactions" or "antibodies"."""
    path = Path(__file__).with_name("data") / f"{kind}.txt"
    return path.read_text(encoding="utf-8").splitlines()


@cache
def model_of(key: str) -> Loaded:
    """A model of `MODELS` with its tokenizer, loaded once a process."""
    return load(key)


@cache
def file_digest(key: str) -> str:
    """A hash of the files that the weights come from."""
    source = PACKAGED[key]
    path = folder_of(source.package, source.install) / source.weights
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.suffix in (".gguf", ".bin", ".safetensors", ".json", ".txt"):
            found.update(file.read_bytes())
    return found.hexdigest()


@cache
def subject(key: str, count: int = 16, batch: int = 8) -> Subject:
    """A model with its first ``count`` inputs, ``batch`` of them at a time."""
    kind, length, name = MODELS[key]
    model, tokenizer, *_ = model_of(key)
    lines = texts(kind)[:count]
    batches = tuple(
        encoded(tokenizer, lines[start : start + batch], length)
        for start in range(0, len(lines), batch)
    )
    told = "\n".join([file_digest(key), str(length), str(batch), *lines])
    return Subject(key, name, model, batches, hashlib.sha256(told.encode()).hexdigest())


def encoded(tokenizer: Any, lines: Sequence[str], length: int) -> dict[str, Tensor]:
    """Arguments for a model: ids and the mask of padding."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    given = tokenizer(
        list(lines), return_tensors="pt", padding=True, truncation=True, max_length=length
    )
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def reseeded(one: Subject, seed: int = 0) -> Subject:
    """The same architecture with weights as before training: a control."""
    with random.fork_rng(devices=[]):
        functions.manual_seed(seed)
        model = type(one.model)(one.model.config).eval()
    return replace(one, model=model, digest=None)


def mixed(one: Subject, seed: int = 0) -> Subject:
    """The same tokens in another order within each text, special ones at the ends in place."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[dict[str, Tensor]] = []
    for batch in one.batches:
        ids = batch["input_ids"].clone()
        for row, mask in zip(ids, batch["attention_mask"], strict=True):
            n = int(mask.sum())
            row[1 : n - 1] = row[1 : n - 1][torch.randperm(n - 2, generator=generator)]
        batches.append({**batch, "input_ids": ids})
    return replace(one, batches=tuple(batches), digest=None)


def copied(one: Subject) -> Subject:
    """With a model of its own, whose weights may be changed."""
    model: nn.Module = copy.deepcopy(one.model)
    return replace(one, model=model, digest=None)


def records(frame: Any) -> list[dict[str, Any]]:
    """The rows of a table."""
    return frame.to_dict("records")
