"""`examine`: texts through a model, everything measured, resumable where it takes long."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.errors import InputError
from cumulant.lens.encoding import Encoded, batches, encode, max_length
from cumulant.lens.examination import Examination
from cumulant.lens.files import (
    FINISHED,
    STATE,
    check_parts,
    claimed,
    clear,
    finish_move,
    is_complete,
    mark_complete,
    part_name,
    read_state,
    read_table,
    write_state,
    write_table,
)
from cumulant.lens.observing import watching
from cumulant.lens.recorder import Layer, Recorder, Wanted
from cumulant.lens.summary import (
    HeadSums,
    left_out,
    link_columns,
    model_facts,
    nullable,
    peak_memory,
    sensitivities,
    top_pairs,
    versions,
    weight_columns,
    weights_digest,
)
from cumulant.lens.tables import pandas, token_table
from cumulant.lens.texts import Text
from cumulant.writing import make_folder

__all__ = ["Progress", "examine"]

# So many texts are encoded at a time, and so many of their pieces run and written at a time; an
# interruption loses no more.
CHUNK, PIECES = 16, 64

# So many inputs are kept for the report (it cuts long ones itself), and so many notes name a text
# that was too long.
SHOWN, NAMED = 3, 5


@dataclass(frozen=True)
class Progress:
    """How far an examination is: texts done, and of how many if that is known."""

    done: int
    total: int | None


@dataclass
class _State:
    """What must survive an interruption, beside the tables on disk; it does not grow with them.

    ``digest`` is that of the texts done; ``pieces`` of the chunk that follows are done as well, and
    ``ahead`` is the digest with all of that chunk.
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
    names: list[str] = field(default_factory=list[str])
    length: int = 0
    notes: list[str] = field(default_factory=list[str])
    shown: list[Any] = field(default_factory=list[Any])
    first: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


_KEPT = ("run", "identity", "sums", "links", "top", "probe", "next_input")


def examine(
    model: nn.Module,
    tokenizer: Any,
    texts: str | Iterable[str] | Iterable[Text] | Mapping[str, str],
    *,
    name: str | None = None,
    batch_size: int = 8,
    windows: bool = False,
    folder: str | os.PathLike[str] | None = None,
    notes: Iterable[str] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Examination:
    """Run texts through a Hugging Face model and measure everything the theory names.

    Per token and head the columns of `observe`; per head the energy of its own update, what its
    weights say, and the link conjecture (T14, T19, T29); per layer expansion, contraction, shape,
    and sensitivity (T14, T15, T17, T23); the partition function of the embeddings (T31).
    ``COLUMNS`` defines each. The link is solved, and the sensitivity taken, on the first text; up
    to three texts are kept for the report.

    Args:
        model: as loaded by transformers; it is run as it is, so call ``eval()`` first.
        tokenizer: the model's.
        texts: one text or many, or a dictionary of names and texts; a generator is taken as it
            comes, so that a corpus need not fit.
        name: of the model, for the report.
        batch_size: texts in one forward call, at most.
        windows: cut texts that are longer than the model's positions into pieces; otherwise their
            beginning is examined, and a note says so.
        folder: write there while running, so that memory stays bounded; the same call again goes on
            after an interruption, neither losing nor repeating a batch.
        notes: what a reader should know of the model.
        progress: called after each batch.

    Raises:
        InputError: no text, an empty one, a tokenizer of another model, or a folder that holds
            other texts' work, damaged work, or that of a run that is going on.

    >>> import cumulant as cm
    >>> model, tokenizer, *_ = cm.lens.load()
    >>> found = cm.lens.examine(model, tokenizer, "Attention is a tilted measure.")
    >>> found.heads().shape[0]  # 6 layers of 12 heads
    72
    """
    if batch_size < 1:
        raise InputError(f"examine: batch_size must be at least 1, not {batch_size}.")
    total = 1 if isinstance(texts, str) else len(texts) if isinstance(texts, list | tuple) else None
    source = iter(_named(texts))
    label = name or str(getattr(getattr(model, "config", None), "name_or_path", "")) or None
    label = label or type(model).__name__
    target = None if folder is None else make_folder(folder)
    with claimed(target) as partial:
        run = _Run(model, tokenizer, label, batch_size, windows, target, partial)
        if (found := run.completed(source)) is not None:
            return found
        wanted = Wanted(energy=True, links=1, top=SHOWN, layers=True)
        with watching(model, wanted) as recorder:
            run.restore(recorder, source)
            while chunk := list(islice(source, CHUNK)):
                for _ in run.take(recorder, chunk):
                    if progress is not None:
                        progress(Progress(run.state.texts, total))
            if run.state.pieces:
                raise run.refusal("other texts")
            if not run.state.texts:
                raise InputError("examine: there is no text to examine.")
        return run.finish(recorder, run.notes(recorder, notes))


def _named(texts: str | Iterable[str] | Iterable[Text] | Mapping[str, str]) -> Iterator[Text]:
    if isinstance(texts, str):
        texts = [texts]
    elif isinstance(texts, Mapping):
        texts = [Text(str(name), content) for name, content in texts.items()]
    for number, each in enumerate(texts):
        if isinstance(each, str):
            yield Text(f"text {number}", each)
        elif isinstance(each, Text):  # pyright: ignore[reportUnnecessaryIsInstance]
            yield each
        else:
            raise InputError(
                f"examine: texts must be strings, but text {number} is a {type(each).__name__}."
            )


class _Run:
    """One examination on its way."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        name: str,
        batch_size: int,
        windows: bool,
        folder: Path | None,
        partial: Path | None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.batch_size, self.windows = batch_size, windows
        self.folder, self.partial = folder, partial
        self.state = _State()
        self.sums = HeadSums()
        self.tables: list[Any] = []
        self.inputs: list[dict[str, Any]] = []
        self.started = time.perf_counter()
        self.limit = max_length(model, tokenizer)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def take(self, recorder: Recorder, chunk: list[Text]) -> Iterator[None]:
        """Run some texts, and add what they gave; yields whenever a part of it is safe."""
        state = self.state
        digest = state.digest
        for each in chunk:
            digest = _digest(digest, each)
        if state.pieces and digest != state.ahead:
            raise self.refusal("other texts")
        encoded = encode(
            self.tokenizer,
            [x.content for x in chunk],
            self.limit,
            overlong="windows" if self.windows else "truncate",
            names=[x.name for x in chunk],
        )
        encoded = self._fitting(encoded, chunk)
        for start in range(state.pieces, len(encoded.ids), PIECES):
            some = slice(start, start + PIECES)
            ids, names = encoded.ids[some], [chunk[k].name for k in encoded.texts[some]]
            table = self._measure(recorder, encoded._replace(ids=ids))
            inputs = self._name_inputs(ids, encoded.tokens[some], names)
            state.tokens += sum(map(len, ids))
            state.pieces, state.ahead = start + len(ids), digest
            if state.pieces == len(encoded.ids):
                state.notes += encoded.notes[: max(0, NAMED - state.overlong)]
                state.overlong += len(encoded.notes)
                state.texts += len(chunk)
                state.pieces, state.digest, state.ahead = 0, digest, ""
            state.parts += 1
            if self.partial is None:
                self.tables.append(table)
                self.inputs += inputs
            else:
                self._write_part(self.partial, "tokens", table)
                self._write_part(self.partial, "inputs", pandas().DataFrame(inputs))
                self._keep(recorder)
            yield

    def _fitting(self, encoded: Encoded, chunk: list[Text]) -> Encoded:
        """Only tokens that the model has; for padding, which is masked, any one of them does."""
        size = getattr(self._embeddings(), "num_embeddings", None)
        if size is None:
            return encoded
        for ids, text in zip(encoded.ids, encoded.texts, strict=True):
            if max(ids) >= size:
                raise InputError(
                    f"the tokenizer does not fit the model: {chunk[text].name} has token "
                    f"{max(ids)}, but the model knows {size} tokens (0 to {size - 1}); take the "
                    "model's own tokenizer."
                )
        return encoded if encoded.padding < size else encoded._replace(padding=0)

    def _measure(self, recorder: Recorder, encoded: Encoded) -> Any:
        """Run the model; the table of what its tokens did."""
        for arguments in batches(encoded, self.batch_size, model=self.model):
            with torch.no_grad():
                self.model(**{n: x.to(self.device) for n, x in arguments.items()})
            if not self.state.first:
                length = int(arguments["attention_mask"][0].sum())
                self.state.first = {n: x[:1, :length].clone() for n, x in arguments.items()}
        table = token_table(recorder)
        for record in recorder.records:
            self.sums.add(record)
        recorder.records.clear()
        return table

    def _write_part(self, partial: Path, name: str, table: Any) -> None:
        place = partial / f"{name}.parquet"
        place.mkdir(exist_ok=True)
        write_table(table, place / part_name(self.state.parts - 1), name)

    def _name_inputs(
        self, ids: list[list[int]], tokens: list[list[str]], names: list[str]
    ) -> list[dict[str, Any]]:
        """The rows of some inputs; the first few are kept for the report."""
        state = self.state
        rows: list[dict[str, Any]] = []
        for own, words, name in zip(ids, tokens, names, strict=True):
            rows.append({"input": state.inputs, "text": name, "tokens": len(own)})
            if state.inputs == 0:
                state.length = len(own)
            if state.inputs < SHOWN:
                shown: list[Any] = [name, words]
                if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
                    shown.append(["<start>", *words[:-1]])  # what the decoder reads, as `batches`
                state.shown.append(shown)
                state.names.append(name)
            state.inputs += 1
        return rows

    def notes(self, recorder: Recorder, given: Iterable[str]) -> list[str]:
        """What a reader must know."""
        notes = list(self.state.notes)
        if (more := self.state.overlong - NAMED) > 0:
            what = "examined in pieces" if self.windows else "truncated"
            notes.append(f"and {more} more {'text was' if more == 1 else 'texts were'} {what}")
        notes += [n for n in given if n not in notes]
        if (length := self.state.length) < 32:
            notes.append(
                f"link and sensitivity were taken on the first text, which has {length} tokens; "
                "put a longer one first for figures that mean something"
            )
        if recorder.probe is not None and recorder.probe.skipped:
            notes.append(left_out(recorder.probe.skipped))
        return notes

    def _keep(self, recorder: Recorder) -> None:
        """The state after a batch; replaced as a whole, so that it is never half-written."""
        if self.partial is None:
            return
        state = {
            "run": {**vars(self.state), "seconds": self._seconds()},
            "identity": self._identity,
            "sums": self.sums.state(),
            "links": {
                k: [None if x is None else tuple(x) for x in v] for k, v in recorder.links.items()
            },
            "top": {k: tuple(v) for k, v in recorder.top.items()},
            "probe": recorder.probe.state() if recorder.probe is not None else None,
            "next_input": recorder.next_input,
        }
        write_state(state, self.partial)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same for work to be continued."""
        sized = hasattr(self.tokenizer, "__len__")
        return {
            "model": self.name,
            "weights": weights_digest(self.model),
            "windows": self.windows,
            "batch_size": self.batch_size,
            "limit": self.limit,
            "tokenizer": type(self.tokenizer).__name__,
            "vocabulary": len(self.tokenizer) if sized else None,
        }

    def refusal(self, what: str) -> InputError:
        """Work on something else is neither continued nor thrown away."""
        return InputError(
            f"{self.folder} holds an unfinished examination of {what}: choose another folder, or "
            f"remove {self.partial}."
        )

    def _same_texts(self, kept: dict[str, Any], source: Iterator[Text]) -> bool:
        """Whether the texts begin with those that were done; they are taken from the source."""
        digest = ""
        for _ in range(kept["run"]["texts"]):
            each = next(source, None)
            if each is None:
                return False
            digest = _digest(digest, each)
        return digest == kept["run"]["digest"]

    def completed(self, source: Iterator[Text]) -> Examination | None:
        """What an earlier run had done but for moving its files: they are moved now."""
        if self.partial is None or self.folder is None or not is_complete(self.partial):
            return None
        kept = read_state(self.partial, _KEPT)
        finish_move(self.partial, self.folder)
        if kept is None or kept["identity"] != self._identity:
            return None
        if self._same_texts(kept, source) and next(source, None) is None:
            return Examination.load(self.folder)
        raise InputError(
            f"{self.folder} held a complete examination of other texts whose files were not in "
            "place yet; now they are. Do the same again to replace it, or choose another folder."
        )

    def restore(self, recorder: Recorder, source: Iterator[Text]) -> None:
        """Go on where an interrupted run of the same texts stopped."""
        if self.partial is None:
            return
        from cumulant.lens.heads import Link
        from cumulant.lens.statistics import Top

        kept = read_state(self.partial, _KEPT)
        if kept is None:
            clear(self.partial)  # nothing says what it is
            return
        if kept["identity"] != self._identity:
            raise self.refusal("another model or with other settings")
        clear(self.partial, keep=(STATE, "tokens.parquet", "inputs.parquet"))
        for name in ("tokens", "inputs"):
            check_parts(self.partial / f"{name}.parquet", kept["run"]["parts"])
        if not self._same_texts(kept, source):
            raise self.refusal("other texts")
        self.state = _State(**kept["run"])
        self.sums.merge(kept["sums"])
        recorder.links = {
            k: [None if x is None else Link(*x) for x in v] for k, v in kept["links"].items()
        }
        recorder.top = {k: Top(*v) for k, v in kept["top"].items()}
        recorder.next_input = kept["next_input"]
        if recorder.probe is not None and kept["probe"] is not None:
            recorder.probe.merge_state(kept["probe"])

    def _seconds(self) -> float:
        return self.state.seconds + time.perf_counter() - self.started

    def finish(self, recorder: Recorder, notes: list[str]) -> Examination:
        """All tables, and the files in their place."""
        frames = pandas()
        layers = list(recorder.layers.values())
        if not layers:
            layers = self._layers_again(recorder)
        heads: list[dict[str, Any]] = []
        for layer in layers:
            parts = (
                self.sums.rows(layer),
                weight_columns(self.model, layer),
                link_columns(recorder, layer),
            )
            heads += [{**a, **b, **c} for a, b, c in zip(*parts, strict=True)]
        probe = recorder.probe
        rows = [] if probe is None else probe.layers()
        first = {n: x.to(self.device) for n, x in self.state.first.items()}
        sensitive = sensitivities(self.model, layers, first)
        for row in rows:
            row.update(sensitive.get(row["layer"], {}))
        tables = {
            "heads": nullable(frames.DataFrame(heads)),
            "layers": nullable(frames.DataFrame(rows)),
            "expansions": nullable(frames.DataFrame([] if probe is None else probe.expansions())),
            "partition": nullable(frames.DataFrame(self._partition())),
            "inputs": frames.DataFrame(self.inputs)
            if self.partial is None
            else read_table(self.partial / "inputs.parquet", self.state.parts),
        }
        if self.partial is None:
            tables["tokens"] = frames.concat(self.tables, ignore_index=True)
        texts = ", ".join(dict.fromkeys(self.state.names))
        texts += ", ..." if self.state.inputs > SHOWN else ""
        found = Examination(
            facts=model_facts(self.model, self.name, layers, texts),
            run=self._facts_of_run(),
            notes=notes,
            tables=tables,
            shown=self.state.shown,
            top=top_pairs(recorder, len(self.state.shown), len(layers)),
            folder=self.folder,
            parts=None if self.folder is None else self.state.parts,
        )
        if self.partial is not None and self.folder is not None:
            finished = self.partial / FINISHED
            shutil.rmtree(finished, ignore_errors=True)
            finished.mkdir()
            found.write_rest(finished, self.state.parts)
            mark_complete(self.partial, self.folder)
            finish_move(self.partial, self.folder)
        return found

    def _layers_again(self, recorder: Recorder) -> list[Layer]:
        """Everything had been run before the interruption: one more word shows the layers."""
        encoded = encode(self.tokenizer, ["a"], self.limit)
        with watching(self.model, Wanted(order=False, spectrum=False)) as again:
            for arguments in batches(encoded, 1, model=self.model):
                with torch.no_grad():
                    self.model(**{n: x.to(self.device) for n, x in arguments.items()})
        recorder.layers = again.layers
        return list(again.layers.values())

    def _partition(self) -> list[dict[str, Any]]:
        from cumulant.lens.partition import partition

        weight = getattr(self._embeddings(), "weight", None)
        return [] if weight is None or weight.ndim != 2 else partition(weight.detach())

    def _embeddings(self) -> Any:
        """Of the tokens, where the model tells."""
        try:
            return self.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        except (AttributeError, NotImplementedError):
            return None

    def _facts_of_run(self) -> dict[str, Any]:
        return {
            "texts": self.state.texts,
            "inputs": self.state.inputs,
            "tokens": self.state.tokens,
            "seconds": round(self._seconds(), 3),
            "peak_memory_mb": peak_memory(),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "versions": versions(),
        }


def _digest(before: str, text: Text) -> str:
    return hashlib.sha256(f"{before}\0{text.name}\0{text.content}".encode()).hexdigest()
