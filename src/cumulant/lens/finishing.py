"""The last step of an examination: its tables, its facts, and its files in their place."""

from __future__ import annotations

import shutil
import time
from typing import Any

from cumulant.core.threads import one_thread
from cumulant.lens.examination import Examination
from cumulant.lens.head_picture import Rerun
from cumulant.lens.keeping import InFolder, Store
from cumulant.lens.pairs import top_pairs
from cumulant.lens.partial import FINISHED, finish_move, mark_complete
from cumulant.lens.reading import SHOWN, Reading
from cumulant.lens.recorder import Recorder
from cumulant.lens.repeats import repeat_columns
from cumulant.lens.summary import (
    link_columns,
    model_facts,
    nullable,
    partition_rows,
    peak_memory,
    sensitivities,
    versions,
    weight_columns,
)

__all__ = ["finish"]

# Width of the weights of a layer, up to which one thread is as fast as several.
NARROW = 1024


def finish(
    reading: Reading,
    recorder: Recorder,
    store: Store,
    *,
    name: str,
    notes: list[str],
    memory: list[float],
    extras: frozenset[str] = frozenset(),
) -> Examination:
    """All tables of what was read, written where the store is a folder.

    Args:
        reading, recorder, store: the work, that of all ranks merged.
        name: of the model.
        notes: what a reader must know.
        memory: the most that each rank has held, in MB.
        extras: expensive statistics that were asked for.
    """
    state, model = reading.state, reading.model
    layers = reading.layers(recorder)
    probe = recorder.probe
    rows = [] if probe is None else probe.layers()
    if "sensitivity" in extras:
        sensitive = sensitivities(model, layers, reading.placed(state.first))
        for row in rows:
            row.update(sensitive.get(row["layer"], {}))
    tables = {
        "heads": nullable(_heads(reading, recorder)),
        "layers": nullable(rows),
        "expansions": nullable([] if probe is None else probe.expansions()),
        "partition": nullable(partition_rows(model) if "partition" in extras else []),
        **store.tables(state.parts),
    }
    texts = ", ".join(dict.fromkeys(x[0] for x in state.shown))
    texts += ", ..." if state.inputs > SHOWN else ""
    facts = model_facts(model, name, layers, texts)
    if state.pictures:
        facts["image"] = facts.pop("text")
    folder = store.folder if isinstance(store, InFolder) else None
    found = Examination(
        facts=facts,
        run={
            "texts": state.texts,
            "inputs": state.inputs,
            "tokens": state.tokens,
            "seconds": round(reading.seconds, 3),
            "peak_memory_mb": max([*memory, peak_memory() or 0.0]) or None,
            "processes": reading.shards.size,
            "finished": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "versions": versions(),
        },
        notes=notes,
        tables=tables,
        shown=state.shown,
        pictures=state.pictures,
        top=top_pairs(recorder, len(state.shown), len(layers)),
        folder=folder,
        parts=None if folder is None else state.parts,
        rerun=_rerun(reading),
    )
    if isinstance(store, InFolder):
        _put_in_place(found, store, state.parts)
    return found


def _rerun(reading: Reading) -> Rerun | None:
    """For pictures of heads; not where an earlier run read the first texts, or another rank did."""
    whole = len(reading.kept) == len(reading.state.shown) and reading.shards.alone
    return Rerun(reading.model, [reading.placed(x) for x in reading.kept]) if whole else None


def _heads(reading: Reading, recorder: Recorder) -> list[dict[str, Any]]:
    """One row per head: sums over tokens, the test of repeats, what its weights say, the link."""
    model, rows = reading.model, list[dict[str, Any]]()
    repeats = repeat_columns(model, reading.tokenizer, reading.limit)
    for key, layer in recorder.layers.items():
        with one_thread(layer.heads * layer.size <= NARROW):
            states = None if recorder.probe is None else recorder.probe.attended(layer.number)
            parts = (
                reading.sums.rows(layer),
                repeats.get(key, [{}] * layer.heads),
                weight_columns(model, layer, states),
                link_columns(recorder, layer),
            )
        rows += [
            {n: x for part in own for n, x in part.items()} for own in zip(*parts, strict=True)
        ]
    return rows


def _put_in_place(found: Examination, store: InFolder, parts: int) -> None:
    finished = store.partial / FINISHED
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    found.write_rest(finished, parts)
    mark_complete(store.partial, store.folder)
    finish_move(store.partial, store.folder)
