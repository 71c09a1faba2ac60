"""`examine`: run texts through a model and measure everything, resumably."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, cast

from torch import nn

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.lens.examination import Examination
from cumulant.lens.extras import chosen
from cumulant.lens.finishing import finish
from cumulant.lens.images import ImageReading, pictures
from cumulant.lens.keeping import InFolder, InMemory, Store
from cumulant.lens.merging import merge_ranks
from cumulant.lens.observing import watching
from cumulant.lens.reading import SHOWN, Reading
from cumulant.lens.recorder import Recorder, Wanted
from cumulant.lens.shards import Shards
from cumulant.lens.state import identity
from cumulant.lens.summary import peak_memory
from cumulant.lens.texts import Text, named

__all__ = ["examine"]

CHUNK = 16  # texts encoded at a time


def examine(
    model: nn.Module,
    tokenizer: Any,
    texts: str | Iterable[str] | Iterable[Text] | Mapping[str, str] = (),
    *,
    images: Any = None,
    name: str | None = None,
    batch_size: int = 8,
    windows: bool = False,
    extras: str | Iterable[str] = (),
    folder: str | os.PathLike[str] | None = None,
    notes: Iterable[str] = (),
    progress: ProgressCallback | None = None,
    group: Any = None,
) -> Examination:
    """Run texts through a Hugging Face model and measure everything.

    Per token and head, it has the columns of `observe`; per head, scores of the patterns that heads
    are named after and statistics of its weights (T14, T35); per layer, expansion, contraction and
    shape (T14, T15, T17). ``COLUMNS`` defines them all. Expensive statistics are computed only when
    `extras` names them. Up to three texts are kept for the report.

    Args:
        model: as loaded by transformers; call ``eval()`` first to turn dropout off.
        tokenizer: the model's.
        texts: one text, several, or a dictionary of names and texts; a generator is read lazily, so
            a corpus may be larger than memory.
        images: instead of texts, images for a vision model: paths, arrays of bytes ``(height,
            width, 3)``, Pillow's images, or a dictionary of names and these. `tokenizer` is then
            the model's image processor, or None to resize images to the model's size and scale them
            to [-1, 1]. Tokens are the class token, registers, and patches row by row; the column
            `received` is added, and the report draws statistics on the picture.
        name: name of the model, for the report.
        batch_size: maximum number of texts per forward call.
        windows: split texts longer than the model's context into windows; otherwise they are
            truncated, with a note.
        extras: "energy" (of each head's own update, T19; a third of a forward pass), "partition"
            (the partition function of the embeddings, T31), "spectrum" (the leading eigenvalue of
            Cov[k], T14; a forward pass), "sensitivity" (T23; four backward passes over the first
            text), "link" (T29; seconds, or minutes for a causal model), or "all".
        folder: write results there while running, which bounds memory; the same call resumes after
            an interruption, without losing or repeating a batch.
        notes: notes on the model for the reader of the report.
        progress: called after each batch with the number of finished texts.
        group: processes that share the texts: a torch.distributed process group, or one dimension
            of a device mesh. All its ranks must make this call, with the same arguments and a
            shared folder; rank r of k runs texts r, r + k, ... (``progress`` counts these), rank 0
            merges, and every rank returns the whole examination. Default: this process alone.

    Raises:
        InputError: no text, an empty text, a tokenizer of another model, or a folder whose
            unfinished work is damaged, has other texts, settings or another number of processes, or
            is in use by another run.
        GroupError: another rank failed or died; the message says why.

    >>> import cumulant as cm
    >>> model, tokenizer, *_ = cm.lens.load()
    >>> found = cm.lens.examine(model, tokenizer, "Attention is a tilted measure.")
    >>> found.heads().shape[0]  # 6 layers of 12 heads
    72
    """
    shards = Shards(group)
    with shards.together():
        asked = chosen(extras)
        if batch_size < 1:
            raise InputError(f"examine: batch_size must be at least 1, not {batch_size}.")
        if group is not None and folder is None:
            raise InputError(
                "examine: a group needs a folder that all ranks can see: pass folder=."
            )
        if not isinstance(cast(Any, model), nn.Module):
            raise InputError(
                f"examine takes a loaded model, not {type(model).__name__}: "
                "model, tokenizer, *_ = cm.lens.load(name)."
            )
        known = getattr(getattr(model, "config", None), "name_or_path", None)
        label = str(name or (known != "None" and known) or type(model).__name__)
        target = None if folder is None else make_folder(folder)
        if images is not None and texts != ():
            raise InputError("examine: give texts or images, not both.")
        kind = Reading if images is None else ImageReading
        reading = kind(model, tokenizer, batch_size=batch_size, windows=windows, shards=shards)

    def settings() -> dict[str, Any]:
        how: dict[str, Any] = {"windows": windows, "batch_size": batch_size}
        how |= {"limit": reading.limit, "extras": sorted(asked)}
        return identity(model, tokenizer, label, how)

    store = InMemory() if target is None else InFolder(target, shards, settings)
    source = shards.own(named(texts) if images is None else _as_texts(images))
    given = texts if images is None else images
    total = 1 if isinstance(given, str) else None
    if isinstance(given, list | tuple | dict):
        total = len(cast(Sized, given))
    total = None if total is None else len(range(shards.rank, total, shards.size))
    with shards.claimed(target):
        if isinstance(store, InFolder):
            store.check_ranks()
            if (found := store.completed(source)) is not None:
                return found
        recorder = _read(reading, store, source, total, progress, asked)
        facts = shards.told((reading.state.parts, reading.seconds, peak_memory()))
        found = None
        with shards.together():
            if shards.rank == 0:
                parts, seconds, memory = zip(*facts, strict=True)
                reading.state.seconds += max(seconds) - seconds[0]
                if isinstance(store, InFolder) and not shards.alone:
                    merge_ranks(store, reading, recorder, parts)
                told = reading.notes(recorder, notes, asked)
                memory = [x for x in memory if x is not None]
                found = finish(
                    *(reading, recorder, store),
                    name=label,
                    notes=told,
                    memory=memory,
                    extras=asked,
                )
        if found is None:  # on the other ranks
            assert target is not None
            found = Examination.load(target)
        return found


def _as_texts(images: Any) -> Iterator[Text]:
    """Images where texts are expected: they too have a name and a content that tells them apart."""
    return cast(Iterator[Text], pictures(images))


def _read(
    reading: Reading,
    store: Store,
    source: Iterator[Text],
    total: int | None,
    progress: ProgressCallback | None,
    extras: frozenset[str],
) -> Recorder:
    """Run this rank's texts, after those that an interrupted run has finished."""
    shards = reading.shards
    folder = store if isinstance(store, InFolder) else None
    place = None if folder is None else folder.partial
    # The link is that of the first text, which rank 0 has.
    wanted = Wanted(
        spectrum="spectrum" in extras,
        energy="energy" in extras,
        links=int(shards.rank == 0 and "link" in extras),
        top=SHOWN,
        layers=True,
        received=isinstance(reading, ImageReading),
    )
    with (
        shards.working(place),
        watching(reading.model, wanted, seed=2 * shards.rank) as recorder,
    ):
        if folder is not None and (kept := folder.restore(source)) is not None:
            reading.resume(recorder, kept)
        while chunk := list(islice(source, CHUNK)):
            if folder is not None and not reading.continues(chunk):
                raise folder.refusal("other texts")
            for part in reading.take(recorder, chunk):
                store.add(part, reading, recorder)
                if progress is not None:
                    progress(Progress(reading.state.texts, total, "examining"))
                shards.check(place)
        if folder is not None and reading.state.pieces:
            raise folder.refusal("other texts")
        if not reading.state.texts and shards.rank == 0:
            raise InputError(
                "examine: there is no text or image to examine; call it as "
                "examine(model, tokenizer, texts)."
            )
    return recorder
