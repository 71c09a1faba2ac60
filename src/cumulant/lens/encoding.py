"""Texts as the ids a model takes, in pieces that fit, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.lens.models import quiet, reason_of

__all__ = ["Encoded", "batches", "embeddings", "encode", "fitting", "max_length", "surroundings"]

LENGTH = "max_{}position_embeddings"
LIMITS = (*(LENGTH.format(x) for x in ("", "encoder_", "decoder_")), "n_positions")
UNLIMITED = 10**9  # tokenizers without a limit state an astronomical one
PADDING = 0.25  # of the tokens in a batch; more, and a new batch is begun


class Encoded(NamedTuple):
    """Pieces of texts: their ids with special tokens, these as display strings, and their text.

    Without windows, piece i is text i. ``padding`` is the id that fills up batches; ``overlong``
    are the texts of which the notes are.
    """

    ids: list[list[int]]
    tokens: list[list[str]]
    texts: list[int]
    notes: list[str]
    padding: int
    overlong: tuple[int, ...] = ()


def max_length(model: Any, tokenizer: Any = None) -> int | None:
    """The most tokens, special ones included, that a model's positions allow; None if any number.

    The least of what the configuration and the tokenizer state. Relative positions (T5) have no
    end; RoBERTa and its kin count positions from the padding id + 1.
    """
    config = model.config
    with suppress(AttributeError, ValueError):
        config = config.get_text_config()
    stated = {each: getattr(config, each, None) for each in LIMITS}
    if hasattr(config, "relative_attention_num_buckets"):
        stated.pop("n_positions")  # T5's files still state the length it was trained on
    limits = [x for x in stated.values() if isinstance(x, int) and x > 0]
    for path, module in model.named_modules():
        first = getattr(module, "padding_idx", None)
        if path.endswith("position_embeddings") and first is not None:
            limits.append(module.num_embeddings - first - 1)
    most = getattr(tokenizer, "model_max_length", None)
    if isinstance(most, int) and 0 < most < UNLIMITED:
        limits.append(most)
    return min(limits, default=None)


def encode(
    tokenizer: Any,
    texts: str | Iterable[str],
    limit: int | None = None,
    *,
    overlong: Literal["truncate", "windows"] = "truncate",
    names: Sequence[str] | None = None,
) -> Encoded:
    """Texts as ids with special tokens, each piece at most ``limit`` long.

    Args:
        tokenizer: of a Hugging Face model.
        texts: one or more; none may be empty.
        limit: tokens per piece, special ones included, as `max_length` tells; None for no limit.
        overlong: what becomes of a longer text: its beginning ("truncate"), or all of it, in
            pieces that each have the special tokens ("windows"). A note says so.
        names: what to call the texts in notes and errors; by default "text 0" and so on.

    Raises:
        InputError: which text is empty, or cannot be encoded.

    >>> import cumulant as cm
    >>> model, tokenizer, *_ = cm.lens.load()
    >>> encode(tokenizer, "Unbelievable!", max_length(model, tokenizer)).tokens
    [['[CLS]', 'unbelievable', '!', '[SEP]']]
    """
    if tokenizer is None:
        raise InputError("texts need a tokenizer, but it is None; a vision model has none.")
    if overlong not in ("truncate", "windows"):
        raise InputError(f"overlong must be 'truncate' or 'windows', not {overlong!r}.")
    out = Encoded([], [], [], [], getattr(tokenizer, "pad_token_id", None) or 0)
    overlong_texts: list[int] = []
    with quiet():
        for k, text in enumerate([texts] if isinstance(texts, str) else texts):
            name = names[k] if names is not None else f"text {k}"
            before, content, after = _split(tokenizer, text, name)
            total = len(before) + len(content) + len(after)
            room = len(content) if limit is None else limit - len(before) - len(after)
            if room < 1:
                raise InputError(
                    f"a limit of {limit} leaves no room for text next to the special tokens."
                )
            starts = range(0, len(content), room)
            if len(starts) > 1:
                what = f"{name} has {total} tokens, the model takes {limit}: "
                if overlong == "windows":
                    what += f"it is examined in {len(starts)} pieces"
                else:
                    what += f"the first {limit} are examined; windows (--windows) cover the rest"
                    starts = starts[:1]
                out.notes.append(what)
                overlong_texts.append(k)
            for start in starts:
                ids = [*before, *content[start : start + room], *after]
                out.ids.append(ids)
                out.tokens.append(_display(tokenizer, ids))
                out.texts.append(k)
    if not out.ids:
        raise InputError("there are no texts; pass at least one.")
    return out._replace(overlong=tuple(overlong_texts))


def fitting(encoded: Encoded, model: Any, names: Sequence[str]) -> Encoded:
    """Only tokens that the model has; for padding, which is masked, any one of them does.

    Raises:
        InputError: the tokenizer is another model's.
    """
    size = getattr(embeddings(model), "num_embeddings", None)
    if size is None:
        return encoded
    for ids, text in zip(encoded.ids, encoded.texts, strict=True):
        if max(ids) >= size:
            raise InputError(
                f"the tokenizer does not fit the model: {names[text]} has token {max(ids)}, but "
                f"the model knows {size} tokens (0 to {size - 1}); take the model's own tokenizer."
            )
    return encoded if encoded.padding < size else encoded._replace(padding=0)


def embeddings(model: Any) -> Any:
    """Of the tokens, where the model tells."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _split(tokenizer: Any, text: Any, name: str) -> tuple[list[int], list[int], list[int]]:
    """Special tokens before, the text's own tokens, special tokens after."""
    if not isinstance(text, str):
        raise InputError(f"{name} must be a string, not {type(text).__name__}.")
    if not text.strip():
        raise InputError(f"{name} is empty; it needs at least one word.")
    try:
        full = list(tokenizer(text)["input_ids"])
        content = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except (TypeError, ValueError, UnicodeError) as error:
        raise InputError(f"{name} cannot be encoded: {reason_of(error)}.") from None
    if not content:
        raise InputError(f"{name} has no characters that the tokenizer knows; remove it.")
    extra = len(full) - len(content)
    start = next((k for k in range(extra + 1) if full[k : k + len(content)] == content), None)
    if start is None:  # special tokens amid the text: pieces are cut as it stands
        return [], full, []
    return full[:start], content, full[start + len(content) :]


def surroundings(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    try:
        before, _, after = _split(tokenizer, "a", "a text")
    except InputError:  # it does not know the letter
        return [], []
    return before, after


def _display(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Tokens for human eyes: word beginnings have a leading space, bytes are characters again."""
    special = set(tokenizer.all_special_ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    bytewise = "ByteLevel" in repr(getattr(backend, "decoder", None))
    out: list[str] = []
    for key, raw in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        token = "" if raw is None else str(raw)
        if key not in special:
            token = _characters(token) if bytewise else token.replace("▁", " ")
        out.append("".join(c if c.isprintable() else repr(c)[1:-1] for c in token))
    return out


def _characters(token: str) -> str:
    """A byte-level token as text; bytes that are only part of a character stay escaped."""
    alphabet = _alphabet()
    if not all(c in alphabet for c in token):
        return token
    return bytes(alphabet[c] for c in token).decode("utf-8", errors="backslashreplace")


@cache
def _alphabet() -> dict[str, int]:
    """What GPT-2 and its kin write for bytes: printable characters stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [x for x in range(256) if x not in plain]
    return {chr(x): x for x in plain} | {chr(256 + k): x for k, x in enumerate(others)}


def batches(encoded: Encoded, size: int, *, model: Any = None) -> Iterator[dict[str, Tensor]]:
    """Arguments for the model: at most ``size`` pieces at a time, in order, padded on the right.

    Neighbors share a batch as long as padding stays below a quarter of its tokens. For an
    encoder-decoder ``model`` the decoder gets the text too, shifted right as in teacher forcing.
    """
    if size < 1:
        raise InputError(f"the batch size must be at least 1, not {size}.")
    config, start = getattr(model, "config", None), None
    if getattr(config, "is_encoder_decoder", False):
        names = ("decoder_start_token_id", "pad_token_id", "bos_token_id")
        found = (getattr(config, each, None) for each in names)
        start = next((x for x in found if isinstance(x, int)), 0)
    return _batches(encoded, size, start)


def _batches(encoded: Encoded, size: int, start: int | None) -> Iterator[dict[str, Tensor]]:
    group: list[list[int]] = []
    for ids in encoded.ids:
        wider = [*group, ids]
        held, longest = sum(map(len, wider)), max(map(len, wider))
        if group and (len(wider) > size or len(wider) * longest > (1 + PADDING) * held):
            yield _padded(group, encoded.padding, start)
            wider = [ids]
        group = wider
    if group:
        yield _padded(group, encoded.padding, start)


def _padded(group: Sequence[Sequence[int]], padding: int, start: int | None) -> dict[str, Tensor]:
    width = max(map(len, group))
    rows = [[*ids, *[padding] * (width - len(ids))] for ids in group]
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in group])
    out = {"input_ids": torch.tensor(rows), "attention_mask": mask}
    if start is not None:
        shifted = [[start, *ids[:-1], *[padding] * (width - len(ids))] for ids in group]
        out |= {"decoder_input_ids": torch.tensor(shifted), "decoder_attention_mask": mask.clone()}
    return out
