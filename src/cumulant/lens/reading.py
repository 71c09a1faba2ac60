"""`Reading`: texts through a model, some pieces at a time, and what is summed on the way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.core.typed import tolist
from cumulant.lens.encoding import Encoded, batches, encode, fitting, max_length
from cumulant.lens.observing import watching
from cumulant.lens.recorder import Layer, Recorder, Wanted
from cumulant.lens.shards import Shards
from cumulant.lens.state import NAMED, State, digest_of
from cumulant.lens.summary import HeadSums, left_out
from cumulant.lens.tables import pandas, token_table
from cumulant.lens.texts import Text
from cumulant.lens.words import Words, sides_of, with_words

if TYPE_CHECKING:
    from cumulant.lens.tables import DataFrame

__all__ = ["SHOWN", "Part", "Reading"]

PIECES = 64  # of texts, run and written at a time; an interruption loses no more
SHOWN = 3  # inputs kept for the report (it cuts long ones itself)


class Part(NamedTuple):
    """What some pieces gave: rows of tokens, and one row for each input."""

    tokens: DataFrame
    inputs: DataFrame


class Reading:
    """A model, how to run it, and what was summed over the texts so far."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, batch_size: int, windows: bool, shards: Shards
    ) -> None:
        self.model, self.tokenizer, self.shards = model, tokenizer, shards
        self.batch_size, self.windows = batch_size, windows
        self.limit = max_length(model, tokenizer)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.state, self.sums = State(), HeadSums()
        self.kept: list[dict[str, Tensor]] = []  # the arguments of the first inputs, one by one
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of this run and those that it resumes."""
        return self.state.seconds + time.perf_counter() - self._started

    def snapshot(self, recorder: Recorder) -> dict[str, Any]:
        """Everything a later run needs, for a journal."""
        run = {**vars(self.state), "seconds": self.seconds}
        return {"run": run, "sums": self.sums.state(), "recorder": recorder.state()}

    def resume(self, recorder: Recorder, kept: Mapping[str, Any]) -> None:
        """Continue from a snapshot."""
        self.state = State(**kept["run"])
        self.sums.merge(kept["sums"])
        recorder.restore(kept["recorder"])

    def continues(self, chunk: list[Text]) -> bool:
        """Whether these are the texts whose first pieces are finished, if some are."""
        return not self.state.pieces or self._digest(chunk) == self.state.ahead

    def _digest(self, chunk: list[Text]) -> str:
        return reduce(digest_of, chunk, self.state.digest)

    def take(self, recorder: Recorder, chunk: list[Text]) -> Iterator[Part]:
        """Run some texts; `state` counts a part when it is yielded."""
        state, digest = self.state, self._digest(chunk)
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
            words = self._words(encoded.tokens[some])
            table = with_words(table, words, state.inputs, sides_of(recorder.layers))
            inputs = self._name_inputs(ids, encoded.tokens[some], [names[k] for k in texts])
            if not self.shards.alone:
                inputs["number"] = [numbers[k] for k in texts]  # by which ranks are merged
            state.tokens += sum(map(len, ids))
            state.parts += 1
            state.pieces, state.ahead = start + len(ids), digest
            if state.pieces == len(encoded.ids):
                told = zip((numbers[k] for k in encoded.overlong), encoded.notes, strict=True)
                state.notes += islice(told, max(0, NAMED - state.overlong))
                state.overlong += len(encoded.notes)
                state.texts += len(chunk)
                state.pieces, state.digest, state.ahead = 0, digest, ""
            yield Part(table, inputs)

    def _forward(self, arguments: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.model(**self.placed(arguments))

    def placed(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Arguments on the model's device."""
        return {n: x.to(self.device) for n, x in arguments.items()}

    def _measure(self, recorder: Recorder, encoded: Encoded) -> DataFrame:
        """Run the model; the table of what its tokens did."""
        for arguments in batches(encoded, self.batch_size, model=self.model):
            self._forward(arguments)
            lengths: list[int] = tolist(arguments["attention_mask"].sum(-1))
            for k, length in enumerate(lengths[: max(0, SHOWN - len(self.kept))]):
                own = {n: x[k : k + 1, :length].clone() for n, x in arguments.items()}
                self.kept.append(own)
                self.state.first = self.state.first or own
        table = token_table(recorder)
        for record in recorder.records:
            self.sums.add(record)
        recorder.records.clear()
        return table

    def _words(self, tokens: list[list[str]]) -> Words:
        """The tokens of inputs, and what a decoder reads, as `batches` shifts it."""
        if not getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            return Words(tokens)
        return Words(tokens, [["<start>", *x[:-1]] for x in tokens])

    def _name_inputs(
        self, ids: list[list[int]], tokens: list[list[str]], names: list[str]
    ) -> DataFrame:
        """The rows of some inputs; the first few are kept for the report."""
        state = self.state
        rows: list[dict[str, Any]] = []
        for own, words, name in zip(ids, tokens, names, strict=True):
            rows.append({"input": state.inputs, "text": name, "tokens": len(own)})
            if state.inputs == 0:
                state.length = len(own)
            if state.inputs < SHOWN:
                shown: list[Any] = [name, words]
                if (target := self._words([words]).target) is not None:
                    shown.append(target[0])
                state.shown.append(shown)
            state.inputs += 1
        return pandas().DataFrame(rows)

    def notes(self, recorder: Recorder, given: Iterable[str], extras: Set[str]) -> list[str]:
        """What a reader must know."""
        notes = [note for _, note in self.state.notes]
        if (more := self.state.overlong - NAMED) > 0:
            what = "examined in pieces" if self.windows else "truncated"
            notes.append(f"and {more} more {'text was' if more == 1 else 'texts were'} {what}")
        notes += [n for n in given if n not in notes]
        taken = [x for x in ("link", "sensitivity") if x in extras]
        if taken and (length := self.state.length) < 32:
            were = "were" if len(taken) > 1 else "was"
            notes.append(
                f"{' and '.join(taken)} {were} taken on the first text, which has {length} tokens; "
                "put a longer one first for figures that mean something"
            )
        if recorder.probe is not None and recorder.probe.skipped:
            notes.append(left_out(recorder.probe.skipped))
        return notes

    def layers(self, recorder: Recorder) -> list[Layer]:
        """The layers that ran; if a resumed run had no text left, one more word shows them."""
        if not recorder.layers:
            encoded = encode(self.tokenizer, ["a"], self.limit)
            with watching(self.model, Wanted(order=False, spectrum=False)) as again:
                for arguments in batches(encoded, 1, model=self.model):
                    self._forward(arguments)
            recorder.layers = again.layers
        return list(recorder.layers.values())
