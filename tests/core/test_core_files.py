"""Files are whole or not there: company, links, devices, names, permissions, full disks, Ctrl-C."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cumulant as cm
from cumulant.core import files
from cumulant.core.files import destination, interrupts_held, make_folder, printable, write_file
from cumulant.core.journal import Journal
from cumulant.figures import new_figure
from cumulant.figures import write as write_figure
from cumulant.filtering.tables import Table
from cumulant.lens.files import write_json


def names(folder):
    return sorted(x.name for x in folder.iterdir())


def trajectory(seed=0):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(seed))
    return cm.dynamics.simulate(x, 6)


@contextlib.contextmanager
def full_disk(after=1500):
    """No file can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def figure():
    out = new_figure(3, 3)
    out.add_subplot().plot(np.random.default_rng(0).normal(size=300))
    return out


def new_journal(path):
    journal = Journal(path, {})
    journal.restart()  # whatever is there
    return journal


WRITERS = {
    "run.npz": lambda path: trajectory().save(path),
    "film.gif": lambda path: trajectory().animate(path, frames=3),
    "film.html": lambda path: trajectory().animate(path, frames=3),
    "plot.png": lambda path: trajectory().plot(path),
    "plot.svg": lambda path: write_figure(figure(), path),
    "memory": lambda path: cm.Memory(torch.randn(100, 20)).save(path),
    "table.csv": lambda path: Table(["a"], [["1"]] * 2000).write(path),
    "about.json": lambda path: write_json({"a": list(range(2000))}, path),
    "state.journal": lambda path: new_journal(path).append({"a": torch.randn(2000)}),
    "page.md": lambda path: write_file(path, "x" * 5000),
}
writers = pytest.mark.parametrize("name", WRITERS)


@writers
def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path, name):
    path = tmp_path / name
    path.write_text("old")
    with full_disk(), pytest.raises(cm.InputError, match="cannot write") as error:
        WRITERS[name](path)
    assert "\n" not in str(error.value)
    assert path.read_text() == "old"
    assert names(tmp_path) == [name]
    WRITERS[name](path)
    assert path.stat().st_size > 1500


@writers
def test_permissions_are_those_of_the_umask_or_of_the_old_file(tmp_path, name):
    path = tmp_path / name
    before = os.umask(0o027)
    try:
        WRITERS[name](path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        WRITERS[name](path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


@writers
def test_a_link_stays_and_its_file_is_replaced(tmp_path, name):
    path = tmp_path / name
    (tmp_path / "elsewhere").mkdir()
    real = tmp_path / "elsewhere" / "real"
    path.symlink_to(real)
    for _ in range(2):  # first it points to nothing, then to a file
        WRITERS[name](path)
        assert path.is_symlink()
        assert real.stat().st_size > 1000
    assert names(tmp_path / "elsewhere") == ["real"]


@writers
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "loop"])
def test_what_is_no_file_is_refused_and_left_alone(tmp_path, name, kind):
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(str(path))
    elif kind == "device":
        if os.geteuid():
            pytest.skip("only root makes devices")
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # a second /dev/null
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    before = path.lstat()
    said = {"loop": "symbolic links"}.get(kind, f"is a {kind}")
    with pytest.raises(cm.InputError, match=f"cannot write .*{said}"):
        WRITERS[name](path)
    assert path.lstat().st_ino == before.st_ino
    assert path.lstat().st_mode == before.st_mode
    assert names(tmp_path) == [name]


def test_processes_that_save_one_path_never_show_a_part(tmp_path):
    path = tmp_path / "run.npz"
    runs = [trajectory(seed) for seed in range(2)]
    runs[0].save(path)
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_save_often, args=(run, path)) for run in runs]
    for process in both:
        process.start()
    seen = 0
    while any(process.is_alive() for process in both) or not seen:
        found = cm.dynamics.Trajectory.load(path).states
        assert any(torch.equal(found, run.states) for run in runs)
        seen += 1
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert names(tmp_path) == ["run.npz"]


def _save_often(run, path):
    for _ in range(60):
        run.save(path)


def test_the_temporary_file_follows_no_link(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / "victim").write_text("mine")
    trap = tmp_path / ".cumulant-guessed.txt"
    trap.symlink_to(tmp_path / "victim")
    with pytest.raises(cm.InputError, match="File exists"):
        write_file(tmp_path / "a.txt", "new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert trap.is_symlink()
    assert names(tmp_path) == [".cumulant-guessed.txt", "victim"]


# --- names


@pytest.mark.parametrize("name", ["n" * 255, "n" * 251 + ".txt", "a." + "s" * 253, "ü" * 127])
def test_names_as_long_as_the_file_system_takes(tmp_path, name):
    write_file(tmp_path / name, "whole")
    assert (tmp_path / name).read_text() == "whole"
    assert names(tmp_path) == [name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("n" * 256, "File name too long"),
        ("d/" * 3000 + "x", "File name too long"),
        ("a\x1b[2Jb", "control characters"),
        ("a\nb", "control characters"),
        ("a\x7f", "control characters"),
        ("a\x9b2J", "control characters"),
        ("a\0b", "control characters"),
        ("missing/a", "there is no folder .*; make it first"),
        ("file/a", "Not a directory"),
        ("", "it is a folder"),
    ],
)
def test_names_that_cannot_be(tmp_path, name, said):
    (tmp_path / "file").write_text("")
    for write in (lambda path: write_file(path, "x"), destination, trajectory().save):
        with pytest.raises(cm.InputError, match=said) as error:
            write(f"{tmp_path}/{name}")
        assert str(error.value).isprintable()
    assert names(tmp_path) == ["file"]


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("n" * 256, "a\x1b[2J", "file", "file/below"):
        with pytest.raises(cm.InputError, match=r"cannot (make|write)") as error:
            make_folder(tmp_path / name)
        assert str(error.value).isprintable()
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_files_and_folders(tmp_path):
    write_file(tmp_path / "a", "x")
    (tmp_path / "a").chmod(0o444)
    with pytest.raises(cm.InputError, match="the file is read-only"):
        write_file(tmp_path / "a", "y")
    tmp_path.chmod(0o555)
    for name in ("a", "b"):
        with pytest.raises(cm.InputError, match="read-only"):
            write_file(tmp_path / name, "y")


def test_what_is_no_path():
    with pytest.raises(cm.InputError, match="must be a path, not 3"):
        write_file(3, "x")


def test_printable_spells_out_what_a_terminal_would_act_on():
    assert printable("Übung ≤ 3, 漢字.npz") == "Übung ≤ 3, 漢字.npz"
    assert printable("a\x1b]0;x\x07\r\n\x9b\u202e\udcff") == r"a\x1b]0;x\x07\r\n\x9b\u202e\udcff"


# --- Ctrl-C


def test_ctrl_c_at_every_instruction(tmp_path):
    """The old file or the new one is there, whole, and nothing beside it."""
    path = tmp_path / "a.txt"
    watched = {files.__file__, contextlib.__file__}
    outcomes, number = set(), 0
    while True:
        number += 1
        path.write_text("old")
        left = [number]

        def trace(frame, event, _, left=left):
            if frame.f_code.co_filename not in watched:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left[0] -= 1
                if left[0] == 0:
                    signal.raise_signal(signal.SIGINT)
            return trace

        stopped = False
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            write_file(path, "new")
        except KeyboardInterrupt:
            stopped = True
        finally:
            sys.settrace(before)
        outcomes.add((stopped, path.read_text()))
        assert names(tmp_path) == ["a.txt"], number
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if left[0] > 0:  # it was over before the interrupt was due
            break
    assert number > 300
    assert outcomes == {(True, "old"), (True, "new"), (False, "new")}


TWICE = """
import os, random, signal, sys, threading, time
from pathlib import Path
from cumulant.core.files import write_file

folder, rng, armed, stopped = Path(sys.argv[1]), random.Random(int(sys.argv[2])), False, 0
path, old = folder / "a.bin", b"0" * 200_000

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

def strike(delays):
    for delay in delays:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, interrupt)
path.write_bytes(old)
for k in range(int(sys.argv[3])):
    new = bytes([k % 250 + 1]) * 200_000
    thread = threading.Thread(target=strike, args=([rng.uniform(0, 3e-3), rng.uniform(0, 3e-4)],))
    thread.start()
    try:
        try:
            armed = True
            write_file(path, new)
        finally:
            armed = False
    except KeyboardInterrupt:
        stopped += 1
    armed = False
    thread.join()
    found = path.read_bytes()
    assert found in (old, new), k
    assert os.listdir(folder) == ["a.bin"], (k, os.listdir(folder))
    old = found
print(stopped)
"""


def test_ctrl_c_twice_at_random_moments(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", TWICE, str(tmp_path), "0", "300"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) > 20


def test_interrupts_wait_and_then_come(tmp_path):
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():  # noqa: PT012
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
        done.append("after the inner block")
        signal.raise_signal(signal.SIGINT)
        done.append("at the end")
    assert done == ["after the inner block", "at the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_waits_until_the_run_is_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    save, saved = np.savez_compressed, []

    def interrupted(file, **arrays):
        signal.raise_signal(signal.SIGINT)
        save(file, **arrays)
        saved.append(len(arrays["times"]))

    def progress(now):
        if now.done >= 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cm.dynamics.simulate(torch.randn(5, 2), 9, checkpoint=path, progress=progress)
    assert saved == [5]
    assert len(cm.dynamics.Trajectory.load(path).times) == 5


def test_a_checkpoint_that_cannot_be_written_stops_the_run_before_it_begins(tmp_path):
    seen = []
    with pytest.raises(cm.InputError, match="no folder"):
        cm.dynamics.simulate(
            torch.randn(5, 2), 9, checkpoint=tmp_path / "no" / "run.npz", progress=seen.append
        )
    assert not seen


# --- commands


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "calculus", "--quick", "-o", "{}/a\x1b[2J.md"],
        ["bench", "calculus", "--quick", "-o", "{}/" + "n" * 300],
        ["bench", "calculus", "--quick", "-o", "{}/pipe.npz"],
        ["simulate", "-o", "{}/a\n.npz"],
        ["simulate", "-o", "{}/" + "n" * 300 + ".npz"],
        ["simulate", "-o", "{}/pipe.npz"],
        ["simulate", "-a", "{}/a\x1b[2J.html"],
        ["simulate", "-p", "{}/" + "n" * 300 + ".png"],
        ["simulate", "{}/\x1b[2J.csv"],
        ["simulate", "{}/" + "n" * 300],
        ["filter", "--example", "-o", "{}/a\x1b[2J"],
        ["filter", "--example", "-o", "{}/" + "n" * 300],
        ["filter", "--example", "-o", "{}/pipe.npz"],
        ["filter", "{}/\x1b[2J\n.csv", "-m", "{}/\x1b[2J\n.toml"],
        ["filter", "{}/" + "n" * 300, "-m", "{}/" + "n" * 300],
        ["claims", "--quick", "--only", "T4", "-o", "{}/a\x1b[2J"],
        ["claims", "--quick", "--only", "T4", "-o", "{}/" + "n" * 300],
        ["lens", "-t", "a", "-o", "{}/a\x1b[2J"],
        ["lens", "-t", "a", "-o", "{}/" + "n" * 300],
        ["lens", "-f", "{}/" + "n" * 300],
        ["lens", "--jsonl", "{}/" + "n" * 300],
        ["lens", "-m", "{}/\x1b[2J", "-t", "a", "-o", "{}/out"],
        ["lens", "-m", "{}/" + "n" * 300, "-t", "a", "-o", "{}/out"],
        ["lens", "-t", "a", "--against", "{}/" + "n" * 300],
        ["report", "--quick", "-o", "{}/a\x1b[2J"],
        ["report", "--quick", "-o", "{}/" + "n" * 300],
    ],
    ids=lambda x: " ".join(x).replace("n" * 300, "long").encode("unicode_escape").decode(),
)
def test_names_on_the_command_line_are_one_line(tmp_path, monkeypatch, capsys, arguments):
    from cumulant.cli import main

    os.mkfifo(tmp_path / "pipe.npz")
    monkeypatch.chdir(tmp_path)
    filled = [x.replace("{}", str(tmp_path)) for x in arguments]
    monkeypatch.setattr(sys, "argv", ["cumulant", *filled])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr()
    assert (end.value.code, told.out) == (2, "")
    assert told.err.startswith("cumulant: ")
    assert told.err.removesuffix("\n").isprintable()
    assert set(names(tmp_path)) <= {"pipe.npz"}


def test_texts_of_files_do_not_steer_the_terminal(tmp_path, monkeypatch, capsys):
    from cumulant.cli import main

    rows = "".join(f"day\x1b[2J {k},{k % 3}\n" for k in range(9))
    (tmp_path / "s.csv").write_text(f"day,rate\x1b[31m [bold]\n{rows}")
    (tmp_path / "m.toml").write_text(
        'names = ["calm\\u001b[2J", "wild"]\ntransition = [[0.9, 0.1], [0.1, 0.9]]\n'
        "initial = [0.5, 0.5]\nemission_bias = [0.0, 2.0]\nemission_noise = [1.0, 1.0]\n"
    )
    line = ["filter", "s.csv", "-m", "m.toml", "-o", "out", "--no-picture"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cumulant", *line])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().out
    assert end.value.code == 0
    assert "\x1b" not in told
    assert r"rate\x1b[31m [bold]: day\x1b[2J 0" in told
    assert r"calm\x1b[2J" in told


def test_the_library_is_imported_from_this_tree():
    assert Path(files.__file__).is_relative_to(Path(cm.__file__).parent)
