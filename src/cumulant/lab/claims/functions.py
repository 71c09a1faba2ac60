"""What a model is for, as one number in nats: language-model loss, or retrieval of halves.

``kept`` is the share of the model's own gain over a guess that looks at no context.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypedDict

import torch
from torch import Tensor

from cumulant import linear_cross_entropy
from cumulant.contrastive import info_nce
from cumulant.core.interception import Scope
from cumulant.core.typed import linalg
from cumulant.lab.claims.remembering import remembered
from cumulant.lab.claims.subjects import encoded, file_digest, model_of, texts
from cumulant.lens import ablate
from cumulant.lens.ablating import PARTS

__all__ = ["Costs", "Task", "costs", "kept", "language", "replaced", "retrieval", "tasks"]

LENGTH = 128  # tokens of a window
TEMPERATURE = 0.05  # MiniLM was trained on 20 times the cosine


@dataclass(frozen=True)
class Task:
    """A model with something to do.

    Attributes:
        name: of the model.
        model: it.
        loss: of the model as it is now, in nats.
        guess: the loss of a guess without context.
        fit: arguments that constants are fitted on, other text than the loss is of.
        layers: how many.
        fair: whether there is text enough for a verdict, not only for a try.
        digest: of the weights and texts; None where they are not those of the files.
    """

    name: str
    model: Any
    loss: Callable[[], float]
    guess: float
    fit: dict[str, Tensor]
    layers: int
    fair: bool
    digest: str | None

    def changed(self, part: str | None, layers: Iterable[int] | None = None) -> float:
        """The loss with a part of some layers replaced."""
        own: Scope[None] | nullcontext[None] = nullcontext()
        if part is not None:
            own = ablate(self.model, part, layers, fit=self.fit)
        with own:
            return self.loss()


class Costs(TypedDict):
    """Losses in nats: of the intact model, of a guess, with each part replaced.

    ``all`` is by part, replaced in all layers; ``single`` by part, one layer at a time.
    """

    intact: float
    guess: float
    all: dict[str, float]
    single: dict[str, list[float]]
    layers: list[int]


def costs(task: Task, parts: Sequence[str], single: Sequence[str], layers: Sequence[int]) -> Costs:
    """What replacing parts costs a model; kept on disk by content."""

    def compute() -> Costs:
        return {
            "intact": task.changed(None),
            "guess": task.guess,
            "all": {part: task.changed(part) for part in parts},
            "single": {part: [task.changed(part, [i]) for i in layers] for part in single},
            "layers": list(layers),
        }

    settings = {"costs": [list(parts), list(single), list(layers)]}
    return remembered(task.digest, settings, compute, source=__file__)


def tasks(quick: bool) -> list[Task]:
    """Both models with something to do; where time is short MiniLM alone, on fewer texts."""
    return [retrieval(8)] if quick else [retrieval(), language()]


def replaced(task: Task) -> Costs:
    """What every part costs in all layers, and the projections one layer at a time."""
    layers = [int(x) for x in torch.linspace(0, task.layers - 1, 6 if task.fair else 2)]
    return costs(task, list(PARTS), ("query_key", "value_output"), layers)


def kept(found: Costs, part: str) -> float:
    """The share of the model's gain over a guess that is left with a part gone in all layers."""
    return (found["guess"] - found["all"][part]) / (found["guess"] - found["intact"])


@cache
def language(windows: int = 4) -> Task:
    """SmolLM2 on paragraphs of Austen: nats per token."""
    model, tokenizer, *_ = model_of("smollm2")
    lines = texts("austen")
    given = encoded(tokenizer, lines[:windows], LENGTH)
    ids, mask = given["input_ids"], given["attention_mask"].bool()
    target = ids[:, 1:][mask[:, 1:]]

    @torch.no_grad()
    def loss() -> float:
        hidden = model(**given).last_hidden_state[:, :-1][mask[:, 1:]]
        return float(linear_cross_entropy(hidden, model.embed_tokens.weight, target))

    other = torch.cat([torch.tensor(tokenizer(x)["input_ids"]) for x in lines[windows:]])
    counts = 1 + other.bincount(minlength=model.config.vocab_size).double()
    guess = float(-(counts / counts.sum()).log()[target].mean())  # how often words occur elsewhere
    fit = encoded(tokenizer, lines[-2:], LENGTH)
    digest = _digest("smollm2", lines[:windows])
    count = model.config.num_hidden_layers
    return Task("SmolLM2", model, loss, guess, fit, count, windows > 2, digest)


@cache
def retrieval(paragraphs: int = 24) -> Task:
    """MiniLM finds the second half of a paragraph by the first, and the reverse."""
    model, tokenizer, *_ = model_of("minilm")
    lines = texts("austen")
    halves = [_halves(x) for x in lines[:paragraphs]]
    batches = [
        encoded(tokenizer, [h[side] for h in halves[start : start + 16]], LENGTH)
        for side in (0, 1)
        for start in range(0, len(halves), 16)
    ]

    @torch.no_grad()
    def loss() -> float:
        points = torch.cat([embedded(model, batch) for batch in batches])
        return float(info_nce(*points.chunk(2), temperature=TEMPERATURE, symmetric=True))

    guess = float(torch.tensor(float(paragraphs)).log())
    fit = encoded(tokenizer, lines[-4:], LENGTH)
    digest = _digest("minilm", lines[:paragraphs])
    count = model.config.num_hidden_layers
    return Task("MiniLM", model, loss, guess, fit, count, paragraphs > 16, digest)


def embedded(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the last states over tokens, as this model's sentences are embedded."""
    weight = batch["attention_mask"][..., None].float()
    mean = (model(**batch).last_hidden_state * weight).sum(1) / weight.sum(1)
    return mean / linalg.vector_norm(mean, dim=-1, keepdim=True)


def _halves(paragraph: str) -> tuple[str, str]:
    """Cut at the end of the sentence nearest to the middle."""
    ends = [m.end() for m in re.finditer(r"[.!?;] ", paragraph)]
    cut = min(ends, key=lambda end: abs(end - len(paragraph) / 2))
    return paragraph[:cut].strip(), paragraph[cut:].strip()


def _digest(key: str, lines: list[str]) -> str:
    told = "\n".join([file_digest(key), str(LENGTH), *lines])
    return hashlib.sha256(told.encode()).hexdigest()
