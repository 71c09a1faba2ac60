"""One rank of an examination, in a process of its own, that can be made to fail."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from toy_texts import toy_model, toy_sentences, toy_tokenizer

import cumulant as cm
from cumulant.core.errors import GroupError
from cumulant.distributed.ranks import Ranks

examining = import_module("cumulant.lens.examining")
finishing = import_module("cumulant.lens.finishing")
merging = import_module("cumulant.lens.merging")
reading = import_module("cumulant.lens.reading")

# What is imported late is imported here, once, for all processes that are forked from this one.
toy_tokenizer()
toy_model()
for late in ("pandas", "pyarrow.parquet", "scipy.special", "cumulant.lens.sensitivity"):
    import_module(late)

PATIENCE = 60.0  # seconds that a rank waits for another

# The eighth is cut into pieces, with windows.
TEXTS = [*toy_sentences(7), " ".join(["the dog sat on a mat"] * 12), *toy_sentences(4, seed=1)]


def small():
    """Few texts in a chunk, few rows at a time: every seam is crossed."""
    examining.CHUNK, reading.PIECES, merging.ROWS, merging.INPUTS = 2, 2, 7, 4


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def rank_of(rank, size, place, folder, how):
    """Examine; `how` says what goes wrong: ("kill", rank, parts) and so on. The exit code tells."""
    small()
    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", f"file://{place}/store"),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )
    what, where, count = how or ("", -1, 0)
    texts, model, ticks = list(TEXTS), toy_model(), []
    if what == "empty" and where == rank:
        texts[rank + size] = "  "
    if what == "model" and where == rank:
        model = toy_model(num_hidden_layers=1)
    if what == "merge" and rank == 0:
        merging.write_table = lambda *_: die()
    if what == "move" and rank == 0:
        finishing.finish_move = lambda *_: die()

    def seen(_, args, kwargs):
        if not torch.is_grad_enabled():  # with gradients it is the sensitivity
            with (place / f"forward-{rank}").open("a") as file:
                file.write(f"{kwargs['input_ids'].tolist()}\n")

    def tick(_):
        ticks.append(None)
        if what == "kill" and where == rank and len(ticks) == count:
            die()
        if what == "empty" and where != rank:
            time.sleep(count)

    model.register_forward_pre_hook(seen, with_kwargs=True)
    code, said = 0, ""
    try:
        found = cm.lens.examine(
            *(model, toy_tokenizer(), iter(texts)),
            **{"name": "toy", "windows": True, "folder": folder, "progress": tick},
            group=Ranks() if rank else dist.group.WORLD,
        )
        said = f"{len(found.table())} rows"
    except cm.InputError as error:
        code, said = 2, str(error)
    except GroupError as error:
        code, said = 1, str(error)
    (place / f"said-{rank}").write_text(said)
    dist.destroy_process_group()
    os._exit(code)
