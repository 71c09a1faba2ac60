"""A corpus over several processes: one table, as a single process makes it, whatever is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from shard_worker import PATIENCE, TEXTS, examining, merging, rank_of, reading, small
from toy_texts import toy_folder, toy_model, toy_tokenizer

import cumulant as cm
from cumulant.distributed.ranks import Ranks

TABLES = ("table", "inputs", "heads", "expansions", "partition")
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def start():
    """Processes that share one import of torch and transformers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shard_worker"])
    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:  # the server takes its environment from here
        places = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()

    def run(place, folder, size, how=None):
        """The exit codes of all ranks, and what they said."""
        place.mkdir()
        ranks = [
            context.Process(target=rank_of, args=(r, size, place, folder, how)) for r in range(size)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(90)
            if each.exitcode is None:
                each.kill()
                each.join()
        said = [place / f"said-{r}" for r in range(size)]
        return [x.exitcode for x in ranks], [x.read_text() if x.exists() else "" for x in said]

    return run


@pytest.fixture
def single(tmp_path, monkeypatch):
    changed = ((examining, "CHUNK"), (reading, "PIECES"), (merging, "ROWS"), (merging, "INPUTS"))
    for module, name in changed:
        monkeypatch.setattr(module, name, getattr(module, name))
    small()
    return tmp_path / "single"


def alone(folder, **options):
    model, tokenizer = toy_model(), toy_tokenizer()
    return cm.lens.examine(
        model, tokenizer, TEXTS, name="toy", windows=True, folder=folder, **options
    )


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """Three ranks, undisturbed: the folder, and where the forward calls are written down."""
    place = tmp_path_factory.mktemp("straight")
    codes, said = start(place / "run", place / "out", 3)
    assert codes == [0, 0, 0], said
    assert len(set(said)) == 1  # the same examination on every rank
    return place


def forward(*places):
    """The batches of each rank in these runs, in order; one word may have been run for its layers.

    A rank without a new text asks the model once which layers it has.
    """
    again = str(toy_tokenizer()(["a"])["input_ids"])
    out = []
    for rank in range(3):
        files = [x / f"forward-{rank}" for x in places]
        lines = [y for x in files if x.exists() for y in x.read_text().splitlines()]
        out.append([x for x in lines if x != again])
    return out


def assert_same(folder, other):
    found, expected = (cm.lens.Examination.load(x) for x in (folder, other))
    for name in TABLES:
        ours, theirs = getattr(found, name)(), getattr(expected, name)()
        pd.testing.assert_frame_equal(ours, theirs, rtol=2e-4, atol=1e-5, obj=name)
    assert found.shown == expected.shown
    assert [[len(h) for h in x] for x in found.top] == [[len(h) for h in x] for x in expected.top]
    flat, other = (torch.tensor(json.loads(json.dumps(x.top[2][1][0]))) for x in (found, expected))
    torch.testing.assert_close(flat, other, rtol=0, atol=2e-5)
    assert found.notes == expected.notes
    for name in ("texts", "inputs", "tokens"):
        assert found.run[name] == expected.run[name]
    assert not (folder / ".cumulant-partial").exists()
    return found


def test_three_processes_are_as_one(straight, single):
    alone(single)
    found = assert_same(straight / "out", single)
    assert found.run["processes"] == 3
    assert found.inputs()["input"].tolist() == list(range(len(found.inputs())))
    assert len(list((straight / "out" / "tokens.parquet").iterdir())) > 2
    tokens = found.table()
    assert tokens["class"].dtype == cm.lens.Examination.load(single).table()["class"].dtype
    assert found.report_data().tokens["input"].nunique() == 3
    done = [x for each in forward(straight / "run") for x in each]
    assert all(forward(straight / "run"))
    assert len(done) == len(set(done))


@pytest.mark.parametrize(
    "how", [("kill", 1, 1), ("kill", 0, 2), ("merge", 0, 0), ("move", 0, 0)], ids=str
)
def test_a_killed_rank_loses_and_repeats_nothing(start, straight, tmp_path, how):
    out = tmp_path / "out"
    codes, said = start(tmp_path / "first", out, 3, how)
    assert codes[how[1]] == KILLED, said
    assert all(code == 1 for rank, code in enumerate(codes) if rank != how[1])
    assert not (out / "examination.json").exists()
    codes, said = start(tmp_path / "second", out, 3)
    assert codes == [0, 0, 0], said
    assert_same(out, straight / "out")
    assert forward(tmp_path / "first", tmp_path / "second") == forward(straight / "run")
    if how[0] == "move":
        assert not list((tmp_path / "second").glob("forward-*"))


def test_another_number_of_processes_is_refused(start, single, tmp_path):
    out = tmp_path / "out"
    start(tmp_path / "killed", out, 3, ("kill", 1, 1))
    kept = sorted(out.rglob("*.parquet"))
    with pytest.raises(cm.InputError, match="begun with 3 processes, not 1: start it with as many"):
        alone(out)
    codes, said = start(tmp_path / "two", out, 2)
    assert codes == [2, 1]
    assert all("begun with 3 processes, not 2" in x for x in said)
    assert sorted(out.rglob("*.parquet")) == kept

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        alone(single, progress=stop)
    codes, said = start(tmp_path / "after", single, 2)
    assert codes == [2, 1]
    assert all("begun with 1 process, not 2" in x for x in said)


def test_an_error_on_one_rank_stops_all(start, tmp_path):
    began = time.monotonic()
    codes, said = start(tmp_path / "empty", tmp_path / "out", 3, ("empty", 1, 5.0))
    assert codes == [1, 2, 1], said
    assert "text 4 is empty" in said[1]
    assert "rank 1 of 3 has failed: text 4 is empty" in said[0]
    assert time.monotonic() - began < PATIENCE  # nobody waited in vain
    began = time.monotonic()
    codes, said = start(tmp_path / "model", tmp_path / "other", 2, ("model", 1, 0))
    assert codes == [2, 2]
    assert all("rank 1 differs from rank 0 in weights" in x for x in said)
    assert time.monotonic() - began < PATIENCE
    assert not (tmp_path / "other" / ".cumulant-partial").exists()


def test_a_group_needs_a_folder():
    with pytest.raises(cm.InputError, match="needs a folder"):
        cm.lens.examine(toy_model(), toy_tokenizer(), TEXTS, group=Ranks())


def torchrun(*arguments):
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "cumulant")
    return subprocess.run(
        [sys.executable, *run, "lens", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_command_with_more_ranks_than_texts(tmp_path):
    model, out = toy_folder(tmp_path / "model"), tmp_path / "out"
    done = torchrun("-m", model, "--text", "the cat sat on a mat", "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The report is") == 1
    assert (out / "report.html").exists()
    found = cm.lens.Examination.load(out)
    assert found.run["processes"] == 2
    assert found.inputs()["text"].tolist() == ["text"]
    assert not (out / ".cumulant-partial").exists()
