"""`examine`: texts through a model, everything measured, resumable where it takes long."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder
from cumulant.lens.encoding import Encoded, batches, encode, fitting, max_length
from cumulant.lens.examination import Examination
from cumulant.lens.files import (
    FINISHED,
    PARTIAL,
    STATE,
    check_parts,
    clear,
    finish_move,
    is_complete,
    mark_complete,
    part_name,
    read_state,
    read_table,
    share_name,
    write_state,
    write_table,
)
from cumulant.lens.observing import watching
from cumulant.lens.recorder import Layer, Recorder, Wanted
from cumulant.lens.shards import Shards, Work, merge_tables
from cumulant.lens.state import KEPT, NAMED, State, digest_of, identity
from cumulant.lens.statistics import Top
from cumulant.lens.summary import (
    HeadSums,
    left_out,
    link_columns,
    model_facts,
    nullable,
    partition_rows,
    peak_memory,
    sensitivities,
    top_pairs,
    versions,
    weight_columns,
)
from cumulant.lens.tables import pandas, token_table
from cumulant.lens.texts import Text, named

__all__ = ["Progress", "examine"]

# So many texts are encoded at a time, and so many of their pieces run and written at a time; an
# interruption loses no more.
CHUNK, PIECES = 16, 64

# So many inputs are kept for the report (it cuts long ones itself).
SHOWN = 3


@dataclass(frozen=True)
class Progress:
    """How far this process is: texts done, and of how many if that is known."""

    done: int
    total: int | None


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
    group: Any = None,
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
        group: of processes that share the texts: a torch.distributed process group, or one
            dimension of a device mesh. All of its ranks must make this call, with the same
            arguments and a folder that all of them see; rank r of k runs texts r, r + k, ...
            (``progress`` counts these), rank 0 merges, and every rank returns the whole. None, the
            default, is this process alone.

    Raises:
        InputError: no text, an empty one, a tokenizer of another model, or a folder that holds
            other texts' work, damaged work, that of a run that is going on, or that of another
            number of processes.
        GroupError: another rank has failed, and why, or died.

    >>> import cumulant as cm
    >>> model, tokenizer, *_ = cm.lens.load()
    >>> found = cm.lens.examine(model, tokenizer, "Attention is a tilted measure.")
    >>> found.heads().shape[0]  # 6 layers of 12 heads
    72
    """
    shards = Shards(group)
    with shards.together():
        if batch_size < 1:
            raise InputError(f"examine: batch_size must be at least 1, not {batch_size}.")
        if group is not None and folder is None:
            raise InputError("examine: a group needs a folder that all ranks see: give folder=.")
        label = name or str(getattr(getattr(model, "config", None), "name_or_path", "")) or None
        label = label or type(model).__name__
        target = None if folder is None else make_folder(folder)
        run = _Run(model, tokenizer, label, batch_size, windows, target, shards)
    total = 1 if isinstance(texts, str) else len(texts) if isinstance(texts, list | tuple) else None
    total = None if total is None else len(range(shards.rank, total, shards.size))
    source = shards.own(named(texts))
    with shards.claimed(target):
        run.check_ranks()
        if (found := run.completed(source)) is not None:
            return found
        # The link is that of the first text, which rank 0 has.
        wanted = Wanted(energy=True, links=int(shards.rank == 0), top=SHOWN, layers=True)
        with (
            shards.working(run.partial),
            watching(model, wanted, seed=2 * shards.rank) as recorder,
        ):
            run.restore(recorder, source)
            while chunk := list(islice(source, CHUNK)):
                for _ in run.take(recorder, chunk):
                    if progress is not None:
                        progress(Progress(run.state.texts, total))
                    shards.check(run.partial)
            if run.state.pieces:
                raise run.refusal("other texts")
            if not run.state.texts and shards.rank == 0:
                raise InputError("examine: there is no text to examine.")
        facts = shards.told(run.facts())
        with shards.together():
            if shards.rank == 0:
                run.merge(recorder, facts)
                found = run.finish(recorder, run.notes(recorder, notes))
        if found is None:  # on the other ranks
            assert target is not None
            found = Examination.load(target)
        return found


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
        shards: Shards,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.batch_size, self.windows = batch_size, windows
        self.folder, self.partial = folder, shards.place(folder)
        self.shards = shards
        self.state = State()
        self.sums = HeadSums()
        self.tables: list[Any] = []
        self.inputs: list[dict[str, Any]] = []
        self.started = time.perf_counter()
        self.memory: list[float] = []  # the most that each rank has held, where the system tells
        self.limit = max_length(model, tokenizer)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def take(self, recorder: Recorder, chunk: list[Text]) -> Iterator[None]:
        """Run some texts, and add what they gave; yields whenever a part of it is safe."""
        state = self.state
        digest = state.digest
        for each in chunk:
            digest = digest_of(digest, each)
        if state.pieces and digest != state.ahead:
            raise self.refusal("other texts")
        names = [x.name for x in chunk]
        encoded = encode(
            self.tokenizer,
            [x.content for x in chunk],
            self.limit,
            overlong="windows" if self.windows else "truncate",
            names=names,
        )
        encoded = fitting(encoded, self.model, names)
        numbers = [self.shards.number(state.texts + k) for k in range(len(chunk))]
        for start in range(state.pieces, len(encoded.ids), PIECES):
            some = slice(start, start + PIECES)
            ids, texts = encoded.ids[some], encoded.texts[some]
            table = self._measure(recorder, encoded._replace(ids=ids))
            inputs = self._name_inputs(ids, encoded.tokens[some], [names[k] for k in texts])
            if not self.shards.alone:
                for row, text in zip(inputs, texts, strict=True):
                    row["number"] = numbers[text]  # by which ranks are merged
            state.tokens += sum(map(len, ids))
            state.pieces, state.ahead = start + len(ids), digest
            if state.pieces == len(encoded.ids):
                told = zip((numbers[k] for k in encoded.overlong), encoded.notes, strict=True)
                state.notes += islice(told, max(0, NAMED - state.overlong))
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
            state.inputs += 1
        return rows

    def notes(self, recorder: Recorder, given: Iterable[str]) -> list[str]:
        """What a reader must know."""
        notes = [note for _, note in self.state.notes]
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
            "recorder": recorder.state(),
        }
        write_state(state, self.partial)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        settings = {"windows": self.windows, "batch_size": self.batch_size, "limit": self.limit}
        return identity(self.model, self.tokenizer, self.name, settings)

    def refusal(self, what: str) -> InputError:
        """Work on something else is neither continued nor thrown away."""
        return InputError(
            f"{self.folder} holds an unfinished examination of {what}: choose another folder, or "
            f"remove {self.folder}/{PARTIAL}."
        )

    def _same_texts(self, kept: dict[str, Any], source: Iterator[Text]) -> bool:
        """Whether the texts begin with those that were done; they are taken from the source."""
        digest = ""
        for _ in range(kept["run"]["texts"]):
            each = next(source, None)
            if each is None:
                return False
            digest = digest_of(digest, each)
        return digest == kept["run"]["digest"]

    def check_ranks(self) -> None:
        """All ranks must run the same model in the same way."""
        if self.shards.alone:
            return
        with self.shards.together():
            mine = self._identity
        for rank, other in enumerate(told := self.shards.told(mine)):
            if wrong := [name for name, x in told[0].items() if other[name] != x]:
                raise InputError(
                    f"examine: all ranks must have the same model and settings, but rank {rank} "
                    f"differs from rank 0 in {', '.join(wrong).replace('_', ' ')}."
                )

    def completed(self, source: Iterator[Text]) -> Examination | None:
        """What an earlier run had done but for moving its files: they are moved now."""
        shards, partial, folder = self.shards, self.partial, self.folder
        if partial is None or folder is None or not shards.told(is_complete(folder / PARTIAL))[0]:
            return None
        with shards.together():
            kept = read_state(partial, KEPT)
            same: bool | None = None  # the texts; None if not even the model is known
            if kept is not None and kept["identity"] == self._identity:
                same = self._same_texts(kept, source) and next(source, None) is None
        verdicts = shards.told(same)
        with shards.together():
            if shards.rank == 0:
                finish_move(folder / PARTIAL, folder)
        if False not in verdicts:
            return Examination.load(folder) if True in verdicts else None
        raise InputError(
            f"{folder} held a complete examination of other texts whose files were not in place "
            "yet; now they are. Do the same again to replace it, or choose another folder."
        )

    def restore(self, recorder: Recorder, source: Iterator[Text]) -> None:
        """Go on where an interrupted run of the same texts stopped."""
        if self.partial is None:
            return
        kept = read_state(self.partial, KEPT)
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
        self.state = State(**kept["run"])
        self.sums.merge(kept["sums"])
        recorder.restore(kept["recorder"])

    def _seconds(self) -> float:
        return self.state.seconds + time.perf_counter() - self.started

    def facts(self) -> dict[str, Any]:
        """What rank 0 must know of this one."""
        return {"parts": self.state.parts, "seconds": self._seconds(), "memory": peak_memory()}

    def merge(self, recorder: Recorder, facts: list[dict[str, Any]]) -> None:
        """Take in what the other ranks have found: then this is the work of a single process."""
        self.memory = [x["memory"] for x in facts if x["memory"] is not None]
        if self.shards.alone or self.folder is None:
            return
        state, whole = self.state, self.folder / PARTIAL
        state.seconds += max(x["seconds"] for x in facts) - facts[0]["seconds"]
        places = [whole / share_name(r, len(facts)) for r in range(len(facts))]
        works = [Work(p, x["parts"]) for p, x in zip(places, facts, strict=True)]
        shown, top = {0: state.shown}, {0: recorder.top}
        for rank, work in enumerate(works):
            if rank == 0 or not work.parts:  # there may be fewer texts than ranks
                continue
            kept = read_state(work.place, KEPT)
            if kept is None or kept["run"]["parts"] != work.parts:
                raise InputError(
                    f"{work.place} does not hold what rank {rank} has written: the folder must be "
                    "on a file system that all processes share."
                )
            state.merge(kept["run"])
            self.sums.merge(kept["sums"])
            recorder.merge_probe(kept["recorder"])
            shown[rank] = kept["run"]["shown"]
            top[rank] = {k: Top(*x) for k, x in kept["recorder"]["top"].items()}
        clear(whole, keep=[x.name for x in places])  # what an interrupted merge has left
        state.parts, first = merge_tables(works, whole)
        first = list(enumerate(first[:SHOWN]))
        state.shown = [shown[rank][own] for _, (rank, own) in first]
        recorder.top = {
            (number, layer): x
            for number, (rank, own) in first
            for (text, layer), x in top[rank].items()
            if text == own
        }
        self.partial = whole

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
            "partition": nullable(frames.DataFrame(partition_rows(self.model))),
            "inputs": frames.DataFrame(self.inputs)
            if self.partial is None
            else read_table(self.partial / "inputs.parquet", self.state.parts),
        }
        if self.partial is None:
            tables["tokens"] = frames.concat(self.tables, ignore_index=True)
        texts = ", ".join(dict.fromkeys(x[0] for x in self.state.shown))
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

    def _facts_of_run(self) -> dict[str, Any]:
        return {
            "texts": self.state.texts,
            "inputs": self.state.inputs,
            "tokens": self.state.tokens,
            "seconds": round(self._seconds(), 3),
            "peak_memory_mb": max([*self.memory, peak_memory() or 0.0]) or None,
            "processes": self.shards.size,
            "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "versions": versions(),
        }
