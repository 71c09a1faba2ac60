"""`examine`: texts through a model, everything measured, resumable where it takes long."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.errors import InputError
from cumulant.lens.encoding import Encoded, batches, encode, max_length
from cumulant.lens.examination import Examination
from cumulant.lens.files import PARTIAL, make_folder, move_in, write_table
from cumulant.lens.observing import watching
from cumulant.lens.recorder import Layer, Recorder, Wanted
from cumulant.lens.sensitivity import Group, sensitivity
from cumulant.lens.summary import HeadSums, link_columns, weight_columns, weights_of
from cumulant.lens.tables import pandas, token_table
from cumulant.lens.texts import Text

__all__ = ["Progress", "examine"]

# So many texts are encoded, run and written at a time; an interruption loses no more.
CHUNK = 16

# For the report: so many texts, of so many tokens.
SHOWN, SHOWN_TOKENS = 3, 512


@dataclass(frozen=True)
class Progress:
    """How far an examination is: texts done, and of how many if that is known."""

    done: int
    total: int | None


@dataclass
class _State:
    """What must survive an interruption, beside the tables on disk."""

    texts: int = 0
    parts: int = 0
    digest: str = ""
    seconds: float = 0.0
    tokens: int = 0
    inputs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    notes: list[str] = field(default_factory=list[str])
    shown: list[Any] = field(default_factory=list[Any])
    first: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def examine(
    model: nn.Module,
    tokenizer: Any,
    texts: str | Iterable[str] | Iterable[Text],
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
        texts: one text or many; a generator is taken as it comes, so that a corpus need not fit.
        name: of the model, for the report.
        batch_size: texts in one forward call, at most.
        windows: cut texts that are longer than the model's positions into pieces; otherwise their
            beginning is examined, and a note says so.
        folder: write there while running, so that memory stays bounded; the same call again goes on
            after an interruption, neither losing nor repeating a batch.
        notes: what a reader should know of the model.
        progress: called after each batch.

    Raises:
        InputError: no text, an empty one, or a folder that holds other texts' work.

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
    run = _Run(model, tokenizer, label, batch_size, windows, target)
    wanted = Wanted(energy=True, links=1, top=SHOWN, layers=True)
    with watching(model, wanted) as recorder:
        run.restore(recorder, source)
        while chunk := list(islice(source, CHUNK)):
            run.take(recorder, chunk)
            if progress is not None:
                progress(Progress(run.state.texts, total))
        if not run.state.texts:
            raise InputError("examine: there is no text to examine.")
    run.state.notes += [n for n in notes if n not in run.state.notes]
    if recorder.probe is not None and recorder.probe.skipped:
        left = "; ".join(f"{block}: {why}" for block, why in recorder.probe.skipped.items())
        run.state.notes.append(f"blocks without expansion and shape: {left}")
    return run.finish(recorder)


def _named(texts: str | Iterable[str] | Iterable[Text]) -> Iterator[Text]:
    if isinstance(texts, str):
        texts = [texts]
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
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.batch_size, self.windows, self.folder = batch_size, windows, folder
        self.state = _State()
        self.sums = HeadSums()
        self.tables: list[Any] = []
        self.started = time.perf_counter()
        self.limit = max_length(model, tokenizer)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    @property
    def partial(self) -> Path | None:
        return None if self.folder is None else self.folder / PARTIAL

    def take(self, recorder: Recorder, chunk: list[Text]) -> None:
        """Run some texts, and add what they gave."""
        encoded = encode(
            self.tokenizer,
            [x.content for x in chunk],
            self.limit,
            overlong="windows" if self.windows else "truncate",
            names=[x.name for x in chunk],
        )
        state = self.state
        for arguments in batches(encoded, self.batch_size, model=self.model):
            with torch.no_grad():
                self.model(**{n: x.to(self.device) for n, x in arguments.items()})
            if not state.first:
                length = int(arguments["attention_mask"][0].sum())
                state.first = {n: x[:1, :length].clone() for n, x in arguments.items()}
        state.notes += [n for n in encoded.notes if n not in state.notes]
        self._name_inputs(encoded, chunk)
        for record in recorder.records:
            self.sums.add(record)
        table = token_table(recorder)
        recorder.records.clear()
        state.tokens += sum(len(ids) for ids in encoded.ids)
        for each in chunk:
            state.digest = _digest(state.digest, each)
        state.texts += len(chunk)
        state.parts += 1
        if self.partial is None:
            self.tables.append(table)
        else:
            place = self.partial / "tokens.parquet"
            place.mkdir(parents=True, exist_ok=True)
            write_table(table, place / f"part-{state.parts - 1:05d}.parquet", "tokens")
            self._keep(recorder)

    def _name_inputs(self, encoded: Encoded, chunk: list[Text]) -> None:
        for ids, tokens, text in zip(encoded.ids, encoded.tokens, encoded.texts, strict=True):
            number = len(self.state.inputs)
            self.state.inputs.append(
                {"input": number, "text": chunk[text].name, "tokens": len(ids)}
            )
            if number < SHOWN and len(self.state.shown) == number and len(ids) <= SHOWN_TOKENS:
                shown: list[Any] = [chunk[text].name, tokens]
                if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
                    shown.append(["<start>", *tokens[:-1]])  # what the decoder reads, as `batches`
                self.state.shown.append(shown)

    def _sensitivity(self, layers: list[Layer]) -> dict[int, dict[str, float | None]]:
        """Of the first text's output to the weights of each layer (T23); it takes gradients."""
        groups: list[Group] = []
        for layer in layers:
            found = weights_of(self.model, layer)
            if found is not None and found.value_output:
                groups.append(Group(layer.number, found.query_key, found.value_output))
        if not groups or not self.state.first:
            return {}
        arguments = {n: x.to(self.device) for n, x in self.state.first.items()}

        def forward() -> Tensor:
            return self.model(**arguments)[0]

        return {
            x.layer: {"sensitivity_qk": x.query_key, "sensitivity_vo": x.value_output}
            for x in sensitivity(self.model, forward, groups)
        }

    def _keep(self, recorder: Recorder) -> None:
        """The state after a batch; replaced as a whole, so that it is never half-written."""
        if self.partial is None:
            return
        state = {
            "run": {**vars(self.state), "seconds": self._seconds()},
            "identity": self._identity(),
            "sums": self.sums.state(),
            "links": {
                k: [None if x is None else tuple(x) for x in v] for k, v in recorder.links.items()
            },
            "top": {k: tuple(v) for k, v in recorder.top.items()},
            "probe": recorder.probe.state() if recorder.probe is not None else None,
            "next_input": recorder.next_input,
        }
        path = self.partial / "state.pt"
        temporary = path.with_name("state.writing")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for work to be continued."""
        weights = [p for p in self.model.parameters() if p.numel()]
        few = torch.cat([p.detach().reshape(-1)[:4].double().cpu() for p in weights])
        return {
            "model": self.name,
            "weights": hashlib.sha256(few.numpy().tobytes()).hexdigest(),
            "windows": self.windows,
            "batch_size": self.batch_size,
        }

    def restore(self, recorder: Recorder, source: Iterator[Text]) -> None:
        """Go on where an interrupted run of the same texts stopped."""
        if self.partial is None or not (self.partial / "state.pt").exists():
            return
        from cumulant.lens.heads import Link
        from cumulant.lens.statistics import Top

        kept = torch.load(self.partial / "state.pt", weights_only=True)
        if kept["identity"] != self._identity():
            raise InputError(
                f"{self.folder} holds an unfinished examination of another model or with other "
                f"settings: choose another folder, or remove {self.partial}."
            )
        digest = ""
        for _ in range(kept["run"]["texts"]):
            each = next(source, None)
            digest = "" if each is None else _digest(digest, each)
        if digest != kept["run"]["digest"]:
            raise InputError(
                f"{self.folder} holds an unfinished examination of other texts: choose another "
                f"folder, or remove {self.partial}."
            )
        self.state = _State(**kept["run"])
        self.sums.merge(kept["sums"])
        recorder.links = {
            k: [None if x is None else Link(*x) for x in v] for k, v in kept["links"].items()
        }
        recorder.top = {k: Top(*v) for k, v in kept["top"].items()}
        recorder.next_input = kept["next_input"]
        if recorder.probe is not None and kept["probe"] is not None:
            recorder.probe.merge_state(kept["probe"])
        for part in (self.partial / "tokens.parquet").glob("part-*.parquet"):
            if int(part.stem[5:]) >= self.state.parts:  # written, but not counted
                part.unlink()

    def _seconds(self) -> float:
        return self.state.seconds + time.perf_counter() - self.started

    def finish(self, recorder: Recorder) -> Examination:
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
        sensitive = self._sensitivity(layers)
        for row in rows:
            row.update(sensitive.get(row["layer"], {}))
        tables = {
            "heads": _nullable(frames.DataFrame(heads)),
            "layers": _nullable(frames.DataFrame(rows)),
            "expansions": _nullable(frames.DataFrame([] if probe is None else probe.expansions())),
            "partition": _nullable(frames.DataFrame(self._partition())),
            "inputs": frames.DataFrame(self.state.inputs),
        }
        if self.partial is None:
            tables["tokens"] = frames.concat(self.tables, ignore_index=True)
        found = Examination(
            facts=self._facts(layers),
            run=self._facts_of_run(),
            notes=self.state.notes,
            tables=tables,
            shown=self.state.shown,
            top=self._top(recorder, len(layers)),
            folder=self.folder,
        )
        if self.partial is not None and self.folder is not None:
            found.write_rest(self.partial)
            (self.partial / "state.pt").unlink()
            move_in(self.partial, self.folder)
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

        try:
            embeddings = self.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        except (AttributeError, NotImplementedError):
            return []
        weight = getattr(embeddings, "weight", None)
        return [] if weight is None or weight.ndim != 2 else partition(weight.detach())

    def _top(self, recorder: Recorder, layers: int) -> list[Any]:
        """[text][layer][head][token] -> pairs (key, weight), for the texts that are shown."""
        out: list[Any] = []
        for text in range(len(self.state.shown)):
            rows: list[Any] = []
            for layer in range(layers):
                top = recorder.top.get((text, layer))
                if top is None:
                    rows.append([])
                    continue
                pairs = zip(top.key.tolist(), top.weight.tolist(), strict=True)
                rows.append(
                    [
                        [
                            [[j, round(w, 5)] for j, w in zip(keys, weights, strict=True) if w > 0]
                            for keys, weights in zip(*head, strict=True)
                        ]
                        for head in pairs
                    ]
                )
            out.append(rows)
        return out

    def _facts(self, layers: list[Layer]) -> dict[str, Any]:
        config = getattr(self.model, "config", None)
        return {
            "name": self.name,
            "type": str(getattr(config, "model_type", type(self.model).__name__)),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "layers": len(layers),
            "heads": max((x.heads for x in layers), default=0),
            "hidden size": getattr(config, "hidden_size", None),
            "attention": str(getattr(config, "_attn_implementation", "")),
            "precision": str(next((p.dtype for p in self.model.parameters()), "")).removeprefix(
                "torch."
            ),
        }

    def _facts_of_run(self) -> dict[str, Any]:
        import cumulant

        return {
            "texts": self.state.texts,
            "inputs": len(self.state.inputs),
            "tokens": self.state.tokens,
            "seconds": round(self._seconds(), 3),
            "peak_memory_mb": peak_memory(),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "versions": {
                "cumulant": cumulant.__version__,
                "torch": torch.__version__,
                "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
                "python": platform.python_version(),
            },
        }


def _nullable(table: Any) -> Any:
    """Missing numbers as NA, never NaN; columns that say nothing are left out."""
    table = table.dropna(axis="columns", how="all")
    for column in table.columns:
        if table[column].isna().any():
            table[column] = table[column].astype("Float64")
    return table


def _digest(before: str, text: Text) -> str:
    return hashlib.sha256(f"{before}\0{text.name}\0{text.content}".encode()).hexdigest()


def peak_memory() -> float | None:
    """The most memory this process has held, in MB, where the system tells."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
    except OSError:
        pass
    return None
