"""The models that are served, and what they compute for a request.

One request computes at a time: a lens sees all threads, and torch has the cores for itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import tolist
from cumulant.lens.editing import edited
from cumulant.lens.encoding import encode, max_length
from cumulant.lens.models import Loaded
from cumulant.serve.changes import Edits, parse
from cumulant.serve.running import Run, Seen, run_model
from cumulant.serve.tangents import tangent_view
from cumulant.serve.views import depth_view, head_view, rounded, text_view, weights_of

__all__ = ["MOST_CHARACTERS", "MOST_TOKENS", "Models"]

MOST_CHARACTERS, MOST_TOKENS = 4000, 256
KEPT = 8  # runs
NEXT = 10  # tokens of the next-token distribution


class Asked(NamedTuple):
    """A request: which model, which tokens, which changes."""

    model: int
    ids: tuple[int, ...]
    edits: Edits

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model, self.ids, self.edits.changes


class Models:
    """Loaded models, and the latest runs of each."""

    def __init__(self, loaded: Sequence[Loaded]) -> None:
        self._loaded = list(loaded)
        self._runs: OrderedDict[tuple[Any, ...], Run] = OrderedDict()
        self._shapes = [_shape(x.model) for x in loaded]

    def about(self) -> list[dict[str, Any]]:
        """What the page needs to know of each model; names only, no paths."""
        return [
            {
                "name": PurePath(x.name).name,
                "layers": layers,
                "heads": heads,
                "decoder": _unembedding(x.model) is not None,
                "most_tokens": self._limit(x),
            }
            for x, (layers, heads) in zip(self._loaded, self._shapes, strict=True)
        ]

    def view(self, given: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        """Every statistic of every token of a text, and the next-token distribution."""
        asked, loaded = self._asked(given)
        run = self._run(asked, loaded, stop)
        tokens = [_shown(loaded.tokenizer, x) for x in asked.ids]
        found = {"tokens": tokens, "ids": list(asked.ids), **text_view(run)}
        return found | {"next": _next(loaded, run.states[-1])}

    def head(self, given: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        """One head's weights, and one query among its keys."""
        asked, loaded = self._asked(given)
        run = self._run(asked, loaded, stop)
        return head_view(run, *(_integer(given, x) for x in ("layer", "head", "token")))

    def depth(self, given: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        """Expansion and contraction along depth."""
        asked, loaded = self._asked(given)
        with edited(loaded.model, asked.edits.answer, skipped=asked.edits.skipped):
            run = run_model(loaded.model, _inputs(asked.ids), stop, depth=True)
        return depth_view(run)

    def tangent(self, given: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        """The first-order change along a direction of one token's embedding, and the true one."""
        asked, loaded = self._asked(given)
        if asked.edits.changes:
            raise InputError("tangents are those of the model as it is: remove the changes.")
        toward = given.get("toward")
        if not isinstance(toward, str) or not toward.strip() or len(toward) > 100:
            raise InputError("`toward` must be a word of at most 100 characters.")
        token = _integer(given, "token")
        if not 0 <= token < len(asked.ids):
            raise InputError(f"token must be from 0 to {len(asked.ids) - 1}.")
        other = _first_token(loaded.tokenizer, toward, asked.ids[token])
        found = tangent_view(
            loaded.model, asked.ids, token, other, stop, _unembedding(loaded.model)
        )
        names: dict[str, Any] = {"toward": _shown(loaded.tokenizer, other)}
        if "next" in found:
            names["next_tokens"] = [_shown(loaded.tokenizer, i) for i in found["next"]["ids"]]
        return found | names

    def _asked(self, given: dict[str, Any]) -> tuple[Asked, Loaded]:
        number = given.get("model", 0)
        if not isinstance(number, int) or not 0 <= number < len(self._loaded):
            raise InputError(f"model must be an integer from 0 to {len(self._loaded) - 1}.")
        loaded = self._loaded[number]
        text = given.get("text")
        if not isinstance(text, str) or not text.strip():
            raise InputError("the text is empty; type a few words.")
        if len(text) > MOST_CHARACTERS:
            raise InputError(
                f"the text has {len(text)} characters; the limit is {MOST_CHARACTERS}. Shorten it."
            )
        ids = encode(loaded.tokenizer, text, None).ids[0]
        if len(ids) > self._limit(loaded):
            raise InputError(
                f"the text has {len(ids)} tokens; the limit is {self._limit(loaded)}. Shorten it."
            )
        for place, word in _swaps(given.get("swaps", []), len(ids)):
            ids[place] = _first_token(loaded.tokenizer, word, ids[place])
        changes = parse(given.get("changes", []), *self._shapes[number])
        return Asked(number, tuple(ids), Edits(changes)), loaded

    def _limit(self, loaded: Loaded) -> int:
        return min(MOST_TOKENS, max_length(loaded.model, loaded.tokenizer) or MOST_TOKENS)

    def _run(self, asked: Asked, loaded: Loaded, stop: threading.Event) -> Run:
        """The run, new or kept; its calls are those with the changes."""
        if asked.key in self._runs:
            self._runs.move_to_end(asked.key)
            return self._runs[asked.key]
        edits = asked.edits
        with edited(loaded.model, edits.answer, skipped=edits.skipped):
            run = run_model(loaded.model, _inputs(asked.ids), stop)
        seen = tuple(
            Seen(x.layer, edits.call(x.layer.number, x.call), x.positions) for x in run.seen
        )
        self._runs[asked.key] = run = Run(seen, run.states)
        while len(self._runs) > KEPT:
            self._runs.popitem(last=False)
        return run


def _inputs(ids: Sequence[int]) -> dict[str, Tensor]:
    found = torch.tensor([list(ids)])
    return {"input_ids": found, "attention_mask": torch.ones_like(found)}


def _shape(model: Any) -> tuple[int, int]:
    """Layers and heads, as a pass over one token shows them."""
    run = run_model(model, _inputs([0, 0]))
    return len(run.seen), max(x.call.query.shape[1] for x in run.seen)


def _shown(tokenizer: Any, number: int) -> str:
    """A token as text: decoded, or its piece where it is half a character."""
    text: str = tokenizer.decode([number])
    return text if text and "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(number))


def _first_token(tokenizer: Any, word: str, instead: int) -> int:
    """The first token of a word, with a space before it if the token it replaces has one."""
    spaced = " " * str(tokenizer.decode([instead])).startswith(" ")
    ids: list[int] = tokenizer(spaced + word.strip(), add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(f"{word!r} is not a word of the model.")
    return ids[0]


def _swaps(given: object, count: int) -> list[tuple[int, str]]:
    listed = cast(list[object], given) if isinstance(given, list) else [None]
    found: list[tuple[int, str]] = []
    for pair in listed[: count + 1]:
        place, word = cast(list[object], pair) if _is_pair(pair) else (-1, "")
        good = isinstance(place, int) and isinstance(word, str) and 0 <= place < count
        if not good or not 0 < len(str(word).strip()) <= 100:
            raise InputError(f"swaps must be pairs of a token (0 to {count - 1}) and a word.")
        found.append((int(cast(int, place)), str(word)))
    return found


def _is_pair(x: object) -> bool:
    return isinstance(x, list) and len(cast(list[object], x)) == 2


def _integer(given: dict[str, Any], name: str) -> int:
    value = given.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} must be an integer.")
    return value


def _unembedding(model: Any) -> Tensor | None:
    """The matrix that turns states into logits: of decoders that share it with the embedding."""
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return model.get_input_embeddings().weight.detach() if tied and is_causal(model) else None


@cache
def is_causal(model: Any) -> bool:
    """Whether a token does not see the one after it, in every layer."""
    run = run_model(model, _inputs([0, 0]))
    return all(not bool(weights_of(x.call)[:, 0, 1].any()) for x in run.seen)


def _next(loaded: Loaded, state: Tensor) -> list[dict[str, Any]] | None:
    """The most probable next tokens, for decoders."""
    matrix = _unembedding(loaded.model)
    if matrix is None:
        return None
    top = (matrix @ state).softmax(-1).topk(NEXT)
    pairs = zip(tolist(top.indices), rounded(top.values), strict=True)
    return [{"id": i, "token": _shown(loaded.tokenizer, i), "p": p} for i, p in pairs]
