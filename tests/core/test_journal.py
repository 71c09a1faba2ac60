"""Journals: every cut and every flipped byte, full disks, company, and what is never unpickled."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys

import pytest
import torch

import cumulant as cm
from cumulant.core.journal import MAGIC, Journal
from cumulant.core.lock import locked

SETTINGS = {"seed": 3, "sizes": [1, 2], "name": "walk"}
STEPS = 5


def walk(path, steps=STEPS, settings=SETTINGS):
    """A random walk whose every step is kept; returns where it ends and how many steps it took."""
    journal = Journal(path, settings)
    state = journal.last or {"step": 0, "at": torch.zeros(2, dtype=torch.float64), "path": []}
    taken = 0
    while state["step"] < steps:
        generator = torch.Generator().manual_seed(state["step"])
        at = state["at"] + torch.randn(2, dtype=torch.float64, generator=generator)
        state = {"step": state["step"] + 1, "at": at, "path": [*state["path"], float(at[0])]}
        journal.append(state)
        taken += 1
    return state, taken, journal.damage


@pytest.fixture
def whole(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of files, and no power cut
    path = tmp_path / "whole"
    end, taken, _ = walk(path)
    assert taken == STEPS
    return path.read_bytes(), end


def same(a, b):
    return a["step"] == b["step"] and a["path"] == b["path"] and torch.equal(a["at"], b["at"])


def test_a_kill_at_any_byte_ends_as_an_uninterrupted_run(whole, tmp_path):
    content, end = whole
    path, steps = tmp_path / "cut", []
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        found, taken, damage = walk(path)
        assert same(found, end), size
        assert damage == "", size  # half a record is no damage
        assert path.read_bytes() == content, size
        steps.append(taken)
    assert steps == sorted(steps, reverse=True)  # the longer the file, the less is left to do
    assert set(steps) == set(range(STEPS + 1))


def test_a_flipped_byte_anywhere_is_noticed_and_mended(whole, tmp_path, caplog):
    content, end = whole
    path, steps = tmp_path / "flipped", []
    for at in range(len(content)):
        for bits in (0x01, 0x80, 0xFF):
            path.write_bytes(content[:at] + bytes([content[at] ^ bits]) + content[at + 1 :])
            caplog.clear()
            found, taken, _ = walk(path)
            assert same(found, end), at
            assert taken > 0, at
            assert str(path) in caplog.text, at  # named, once
            assert len(caplog.records) == 1
            assert path.read_bytes() == content, at
        steps.append(taken)
    assert steps == sorted(steps, reverse=True)


def test_damage_says_where(whole, tmp_path):
    content, _ = whole
    path = tmp_path / "flipped"
    path.write_bytes(content[:-1] + b"\0")
    journal = Journal(path, SETTINGS)
    assert len(journal) == STEPS - 1
    assert f"damaged in record {STEPS}, at byte" in journal.damage
    path.write_bytes(b"another file, longer than the magic line")
    journal = Journal(path, SETTINGS)
    assert len(journal) == 0
    assert "is not a journal of this version" in journal.damage


def test_lengths_that_lie_do_not_reserve_memory(whole, tmp_path):
    path = tmp_path / "huge"
    at = len(MAGIC)
    path.write_bytes(whole[0][:at] + b"\xff" * 8 + whole[0][at + 8 :])
    assert Journal(path, SETTINGS).damage
    assert len(Journal(path, SETTINGS)) == 0


def test_other_settings_are_named(whole, tmp_path):
    path = tmp_path / "whole"
    assert Journal(path, {**SETTINGS, "sizes": (1, 2)}).differs == []  # tuples are lists
    assert Journal(path, {**SETTINGS, "seed": 4, "more": 1}).differs == ["more", "seed"]
    journal = Journal(path, {"seed": 4})
    journal.restart()
    assert len(journal) == 0
    assert journal.last is None
    assert path.read_bytes() == whole[0]  # until there is something new
    journal.append([1])
    assert list(Journal(path, {"seed": 4})) == [[1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_what_is_put_in_comes_out(tmp_path, dtype):
    x = (10 * torch.randn(3, 4)).to(dtype)
    given = {
        "tensors": [x, x.T, x[:0], x[0, 0], x[1:], x > 0],  # views of one another
        "numbers": [0.1, 1e-300, math.pi, -(2**70), True, None, math.inf],
        "text": "\u2207G \ud800 \n\0",
        "nested": {"a": {"b": [{"c": x}]}},
    }
    journal = Journal(tmp_path / "a", {})
    journal.append(given)
    found = Journal(tmp_path / "a", {}).last
    for ours, theirs in zip(given["tensors"], found["tensors"], strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert found["numbers"] == given["numbers"]
    assert found["text"] == given["text"]
    assert torch.equal(found["nested"]["a"]["b"][0]["c"], x)


@pytest.mark.parametrize("content", [{1: 2}, {"tensor": "0"}, {"a": object()}])
def test_what_json_would_change_is_refused(tmp_path, content):
    with pytest.raises(TypeError):
        Journal(tmp_path / "a", {}).append(content)
    assert not (tmp_path / "a").exists()


def test_keeping_the_newest_and_writing_anew(tmp_path):
    journal = Journal(tmp_path / "a", {"k": 1})
    sizes = []
    for k in range(40):
        journal.append({"k": k, "x": torch.full((1000,), float(k))})
        journal.keep(2, most=4)
        sizes.append((tmp_path / "a").stat().st_size)
        assert journal.last["k"] == k
        assert Journal(tmp_path / "a", {"k": 1}).last["k"] == k
    assert max(sizes) < 4.2 * sizes[0]
    assert [x["k"] for x in journal] == [38, 39] or len(journal) <= 4
    journal.rewrite([{"k": -1}])
    assert list(Journal(tmp_path / "a", {"k": 1})) == [{"k": -1}]
    journal.rewrite([])
    assert not (tmp_path / "a").exists()
    journal.append(5)
    assert Journal(tmp_path / "a", {"k": 1}).last == 5


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    import resource

    journal = Journal(tmp_path / "a", {})
    journal.append(1)
    before = (tmp_path / "a").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(cm.InputError, match=r"cannot write .*a: "):
            journal.append("x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "a").read_bytes() == before
    journal.append(2)
    assert list(Journal(tmp_path / "a", {})) == [1, 2]


def test_what_a_killed_process_wrote(tmp_path):
    script = (
        "import sys, torch; from cumulant.core.journal import Journal\n"
        "journal = Journal(sys.argv[1], {})\n"
        "for k in range(10**6):\n"
        "    journal.append({'k': k, 'x': torch.full((5000,), float(k))})\n"
        "    print(k, flush=True)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    )
    for line in run.stdout:
        if int(line) >= 20:
            break
    os.kill(run.pid, signal.SIGKILL)
    told = int(([line, *run.stdout])[-1])
    run.wait()
    journal = Journal(tmp_path / "a", {})
    assert journal.damage == ""
    assert len(journal) in (told + 1, told + 2)  # what was told is there; one more may be
    for k, record in enumerate(journal):
        assert record["k"] == k
        assert bool((record["x"] == k).all())


# --- locks


HOLDER = (
    "import os, sys; from cumulant.core.lock import locked\n"
    "with locked(sys.argv[1]):\n"
    "    print('held', flush=True)\n"
    "    {}\n"
    "    sys.stdin.read()\n"
)


def holder(path, inside="pass"):
    run = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(inside), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "held\n"
    return run


def test_the_second_run_is_told_of_the_first(tmp_path):
    path = tmp_path / "work" / "lock"
    first = holder(path)
    try:
        host = os.uname().nodename
        wanted = rf"another run \(process {first.pid} on {host}\) is writing into .*work: wait"
        with pytest.raises(cm.InputError, match=wanted), locked(path):
            pass
        second = subprocess.run(
            [sys.executable, "-c", HOLDER.format("pass"), str(path)],
            capture_output=True,
            text=True,
            input="",
        )
        assert f"another run (process {first.pid} on {host})" in second.stderr
        assert path.exists()
    finally:
        first.communicate("")
    assert not path.exists()
    with locked(path):
        assert path.read_text().split() == [str(os.getpid()), host]


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path):
    path = tmp_path / "lock"
    first = holder(path)
    first.kill()
    first.wait()
    assert path.read_text().split()[0] == str(first.pid)
    with locked(path):
        assert path.read_text().split()[0] == str(os.getpid())
    assert not path.exists()


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path):
    path = tmp_path / "lock"
    fork = "child = os.fork() or (sys.stdin.read(), os._exit(0)); print(child, flush=True)"
    first = holder(path, fork)
    child = int(first.stdout.readline())
    first.kill()
    first.wait()
    os.kill(child, 0)  # it lives
    with locked(path):
        pass
    first.stdin.close()


def test_one_process_may_not_take_a_lock_twice(tmp_path):
    path = tmp_path / "lock"
    with locked(path):
        with pytest.raises(cm.InputError, match=f"process {os.getpid()} on"), locked(path):
            pass
        assert path.exists()
    refused = pytest.raises(cm.InputError, match="is writing into the attic")
    with locked(path), refused, locked(path, "the attic"):
        pass


@pytest.mark.parametrize("how", ["alive", "dead", "elsewhere", "nonsense"])
def test_a_file_system_without_locks_asks_for_the_process(tmp_path, monkeypatch, how):
    import fcntl

    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = os.uname().nodename
    content = {
        "alive": f"{os.getppid()} {host}",
        "dead": f"{gone.pid} {host}",
        "elsewhere": "1 another-host",
        "nonsense": "\0",
    }[how]
    (tmp_path / "lock").write_text(content)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    if how in ("alive", "elsewhere"):
        with pytest.raises(cm.InputError, match="another run"), locked(tmp_path / "lock"):
            pass
    else:
        with locked(tmp_path / "lock"):
            assert (tmp_path / "lock").read_text().split()[0] == str(os.getpid())


def test_many_runs_never_hold_one_lock_together(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from cumulant.core.errors import InputError\n"
        "from cumulant.core.lock import locked\n"
        "done, end = 0, time.monotonic() + 60\n"
        "while done < 40 and time.monotonic() < end:\n"
        "    try:\n"
        "        with locked(sys.argv[1] + '/lock'):\n"
        "            Path(sys.argv[1], 'inside').mkdir()\n"  # fails if another run is inside
        "            Path(sys.argv[1], 'inside').rmdir()\n"
        "            done += 1\n"
        "    except InputError:\n"
        "        pass\n"
        "print(done)\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for run in runs:
        out, err = run.communicate()
        assert (out, err) == ("40\n", "")
