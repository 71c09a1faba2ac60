"""Examinations that meet trouble: kills, full disks, damage, company, other tokenizers, NaN."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_texts import WORDS, toy_folder, toy_model, toy_sentences, toy_tokenizer

import cumulant as cm
from cumulant.cli.main import main
from cumulant.core.journal import Journal

examine = partial(cm.lens.examine, extras="all")
TEXTS = toy_sentences(11)
LONG = " ".join(["the cat sat on a mat"] * 30)  # 180 tokens where the model takes 24
PARTIAL = ".cumulant-partial"
examining = import_module("cumulant.lens.examining")
finishing = import_module("cumulant.lens.finishing")
partial = import_module("cumulant.lens.partial")
reading = import_module("cumulant.lens.reading")
STATE = partial.STATE


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model, tokenizer):
    return examine(model, tokenizer, TEXTS)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(examining, "CHUNK", 3)


def stop_after(count):
    seen = []

    def stop(progress):
        seen.append(progress.done)
        if len(seen) == count:
            raise KeyboardInterrupt

    return stop


def interrupt(model, tokenizer, folder, texts=TEXTS, after=2, **options):
    with pytest.raises(KeyboardInterrupt):
        examine(model, tokenizer, texts, folder=folder, progress=stop_after(after), **options)


def command(monkeypatch, *arguments):
    """The command in this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["cumulant", "lens", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "1000")
    try:
        main()
    except SystemExit as stopped:
        return stopped.code or 0
    return 0


def names(folder):
    return sorted(x.name for x in Path(folder).iterdir())


# --- the same model, or not


def test_weights_set_at_random_are_the_same_in_every_load(tmp_path):
    folder = toy_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    gone = [n for n in weights if n.endswith("layer.1.attention.self.query.weight")]
    save_file(
        {n: x for n, x in weights.items() if n not in gone},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    torch.manual_seed(5)
    first = cm.lens.load(folder)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)  # loading draws nothing from the caller's generator
    second = cm.lens.load(folder)
    assert gone
    assert any("at random" in note for note in first.notes)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("small")
def test_a_load_with_random_weights_goes_on(tmp_path):
    folder = toy_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(n for n in weights if n.endswith("layer.0.output.dense.weight")))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = cm.lens.load(folder)
    interrupt(loaded.model, loaded.tokenizer, tmp_path / "out")
    again = cm.lens.load(folder)
    found = examine(again.model, again.tokenizer, TEXTS, folder=tmp_path / "out")
    assert found.run["texts"] == len(TEXTS)


def other_weight():
    other = toy_model()
    with torch.no_grad():
        other.encoder.layer[1].output.dense.weight[3, 7] += 1e-3  # far from the first entries
    return other, toy_tokenizer()


def swapped_weights():
    other = toy_model()
    with torch.no_grad():  # the sum stays
        weight = other.encoder.layer[1].output.dense.weight
        weight[[0, 9]] = weight[[9, 0]]
    return other, toy_tokenizer()


def other_limit():
    tokenizer = toy_tokenizer()
    tokenizer.model_max_length = 16
    return toy_model(), tokenizer


def other_vocabulary():
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["zebra"])
    return toy_model(), tokenizer


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "other",
    [other_weight, swapped_weights, other_limit, other_vocabulary],
    ids=lambda f: f.__name__,
)
def test_other_models_and_tokenizers_do_not_continue(model, tokenizer, tmp_path, other):
    interrupt(model, tokenizer, tmp_path)
    with pytest.raises(cm.InputError, match="another model or with other settings"):
        examine(*other(), TEXTS, folder=tmp_path)
    found = examine(toy_model(), toy_tokenizer(), TEXTS, folder=tmp_path)  # nothing is lost
    assert found.run["texts"] == len(TEXTS)


def test_one_entry_of_a_large_parameter_is_noticed():
    torch.manual_seed(0)
    layer = torch.nn.Linear(300, 300)
    before = import_module("cumulant.lens.summary").weights_digest(layer)
    with torch.no_grad():
        layer.weight[1, 1] += 1.0
    assert import_module("cumulant.lens.summary").weights_digest(layer) != before


# --- unfinished work that is not what it should be


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("table", ["tokens", "inputs"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_parts_that_are_gone(model, tokenizer, tmp_path, table, damage):
    interrupt(model, tokenizer, tmp_path)
    part = tmp_path / PARTIAL / f"{table}.parquet" / "part-00000.parquet"
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(cm.InputError, match=f"part-00000.parquet is {damage}.*remove"):
        examine(model, tokenizer, TEXTS, folder=tmp_path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("content", [b"not a journal, though a long text", "first"])
def test_a_journal_without_a_good_record(model, tokenizer, tmp_path, content):
    interrupt(model, tokenizer, tmp_path)
    state = tmp_path / PARTIAL / STATE
    if content == "first":
        content = bytearray(state.read_bytes())
        content[100] ^= 1  # in the settings
    state.write_bytes(content)
    with pytest.raises(cm.InputError, match=r"state\.journal is damaged.*remove"):
        examine(model, tokenizer, TEXTS, folder=tmp_path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_record_is_noticed_and_its_work_done_again(
    model, tokenizer, tmp_path, caplog, whole, how, seed
):
    interrupt(model, tokenizer, tmp_path, after=3)
    state = tmp_path / PARTIAL / STATE
    content = bytearray(state.read_bytes())
    second = Journal(state, {})._spans[2].start
    at = int(torch.randint(second, len(content), (), generator=torch.Generator().manual_seed(seed)))
    content[at] ^= 1 << seed
    state.write_bytes(content if how == "flipped" else content[:at])
    ticks = []
    caplog.clear()
    found = examine(model, tokenizer, TEXTS, folder=tmp_path, progress=ticks.append)
    assert len(ticks) in (2, 3)  # of four parts; the journal knew of one or two
    assert ("state.journal is damaged in record" in caplog.text) == (how == "flipped")
    pd.testing.assert_frame_equal(found.table(), whole.table(), check_dtype=False)
    pd.testing.assert_frame_equal(found.heads(), whole.heads())
    assert found.run["tokens"] == whole.run["tokens"]
    assert found.shown == whole.shown


def test_a_flipped_byte_of_a_table_is_noticed(model, tokenizer, tmp_path):
    found = examine(model, tokenizer, TEXTS, folder=tmp_path)
    part = tmp_path / "tokens.parquet" / "part-00000.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 4] ^= 1  # in the numbers, where Parquet itself would not see it
    part.write_bytes(content)
    with pytest.raises(cm.InputError, match=r"part-00000\.parquet is damaged"):
        found.table()


def test_a_state_that_was_killed_before_its_first_record(model, tokenizer, tmp_path):
    interrupt(model, tokenizer, tmp_path, after=1)
    state = tmp_path / PARTIAL / STATE
    state.write_bytes(state.read_bytes()[:500])
    found = examine(model, tokenizer, TEXTS[:2], folder=tmp_path)
    assert found.run["texts"] == 2


def test_work_without_a_state_is_cleared(model, tokenizer, tmp_path):
    stale = tmp_path / PARTIAL / "tokens.parquet"
    stale.mkdir(parents=True)
    (stale / "part-00007.parquet").write_bytes(b"old")
    (tmp_path / PARTIAL / "heads.parquet").write_bytes(b"old")
    found = examine(model, tokenizer, TEXTS[:2], folder=tmp_path)
    assert names(tmp_path / "tokens.parquet") == ["part-00000.parquet"]
    assert found.table()["input"].nunique() == 2
    assert not (tmp_path / PARTIAL).exists()


@pytest.mark.usefixtures("small")
def test_saving_leaves_unfinished_work_alone(model, tokenizer, tmp_path):
    interrupt(model, tokenizer, tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / PARTIAL).rglob("*") if p.is_file()}
    examine(model, tokenizer, "the dog ran").save(tmp_path)
    assert {p: p.read_bytes() for p in (tmp_path / PARTIAL).rglob("*") if p.is_file()} == before
    assert cm.lens.Examination.load(tmp_path).inputs()["tokens"].tolist() == [5]
    assert not [n for n in names(tmp_path) if "saving" in n]
    found = examine(model, tokenizer, TEXTS, folder=tmp_path)
    assert found.run["texts"] == len(TEXTS)
    pd.testing.assert_frame_equal(
        found.table(), examine(model, tokenizer, TEXTS).table(), check_dtype=False
    )


# --- kills


class Killed(BaseException):
    """What no handler expects."""


def killing(monkeypatch, after):
    """Every change of the disk by `partial` counts; after number `after` none happens any more."""
    count = [0]

    def guarded(change):
        def guard(*arguments, **options):
            count[0] += 1
            if count[0] > after:
                raise Killed
            return change(*arguments, **options)

        return guard

    monkeypatch.setattr(partial.os, "replace", guarded(os.replace))
    monkeypatch.setattr(partial.shutil, "rmtree", guarded(shutil.rmtree))
    for name in ("unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(Path, name, guarded(getattr(Path, name)))
    return count


@pytest.fixture(scope="module")
def finished(model, tokenizer):
    return examine(model, tokenizer, TEXTS[:5], extras="partition")


def whole_examination(folder, sizes):
    """None, or how many texts the examination in the folder is of; all its tables must agree."""
    if not (folder / "examination.json").exists():
        with pytest.raises(cm.InputError, match="holds no examination"):
            cm.lens.Examination.load(folder)
        return None
    found = cm.lens.Examination.load(folder)
    texts = len(found.inputs())
    rows = found.table().groupby("input").size().tolist()
    assert rows == [4 * n for n in found.inputs()["tokens"]]
    assert found.run["inputs"] == texts
    assert sizes[texts] == pytest.approx(float(found.heads()["entropy"].sum()), rel=1e-6)
    return texts


def test_a_kill_at_any_moment_leaves_no_mixture(model, tokenizer, tmp_path, finished, monkeypatch):
    few = examine(model, tokenizer, TEXTS[5:7], folder=tmp_path / "first")
    sizes = {5: float(finished.heads()["entropy"].sum()), 2: float(few.heads()["entropy"].sum())}
    few.report(tmp_path / "first" / "report.html")
    (tmp_path / "first" / "mine.txt").write_text("mine")
    interrupted = tmp_path / "interrupted"
    shutil.copytree(tmp_path / "first", interrupted)
    interrupt(model, tokenizer, interrupted, TEXTS[:5], after=1)
    outcomes = []
    for after in range(60):
        folder = tmp_path / f"kill-{after}"
        shutil.copytree(interrupted, folder)
        with monkeypatch.context() as patched:
            count = killing(patched, after)
            try:
                examine(model, tokenizer, TEXTS[:5], folder=folder)
            except Killed:
                pass
            else:
                assert count[0] <= after
                break
        outcomes.append(whole_examination(folder, sizes))
        ticks = []
        found = examine(model, tokenizer, TEXTS[:5], folder=folder, progress=ticks.append)
        assert found.run["texts"] == 5
        assert whole_examination(folder, sizes) == 5
        assert not (folder / PARTIAL).exists()
        assert not (folder / "report.html").exists()  # it was the other examination's
        assert (folder / "mine.txt").read_text() == "mine"
        shutil.rmtree(folder)
    else:
        pytest.fail("the run never came to its end")
    assert {2, None, 5} == set(outcomes)  # the earlier, none, the new: kills hit all three phases


def test_a_complete_run_is_not_run_again(model, tokenizer, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(finishing, "finish_move", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            examine(model, tokenizer, TEXTS[:4], folder=tmp_path)
    shutil.copytree(tmp_path, tmp_path.with_name("texts"))
    shutil.copytree(tmp_path, tmp_path.with_name("model"))
    ticks = []
    found = examine(model, tokenizer, TEXTS[:4], folder=tmp_path, progress=ticks.append)
    assert ticks == []
    assert len(found.inputs()) == 4
    with pytest.raises(cm.InputError, match="now they are"):
        examine(model, tokenizer, TEXTS[4:6], folder=tmp_path.with_name("texts"))
    assert len(cm.lens.Examination.load(tmp_path.with_name("texts")).inputs()) == 4
    again = examine(model, tokenizer, TEXTS[4:6], folder=tmp_path.with_name("texts"))
    assert len(again.inputs()) == 2
    other = toy_model(num_hidden_layers=1)
    found = examine(other, tokenizer, TEXTS[:4], folder=tmp_path.with_name("model"))
    assert len(found.heads()) == 2


def test_only_files_of_an_earlier_examination_are_removed(model, tokenizer, tmp_path):
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "notes.parquet").write_text("mine")
    examine(model, tokenizer, TEXTS[:2], folder=tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"  # there was no examination before
    (tmp_path / "comparison.csv").write_text("of the first")
    examine(model, tokenizer, TEXTS[2:4], folder=tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "comparison.csv").exists()
    assert (tmp_path / "notes.parquet").read_text() == "mine"


# --- company


@pytest.mark.usefixtures("small")
def test_two_runs_in_one_folder(model, tokenizer, tmp_path):
    refused = []

    def second(_):
        with pytest.raises(cm.InputError, match=r"another run \(process \d+ on .+\) is writing"):
            examine(model, tokenizer, TEXTS, folder=tmp_path)
        with pytest.raises(cm.InputError, match=r"another run \(process \d+ on .+\) is writing"):
            cm.lens.Examination({}, {}, [], {"tokens": pd.DataFrame()}).save(tmp_path)
        refused.append(None)

    found = examine(model, tokenizer, TEXTS, folder=tmp_path, progress=second)
    assert len(refused) == 4
    assert found.run["texts"] == len(TEXTS)
    examine(model, tokenizer, TEXTS[:1], folder=tmp_path)  # the lock is released


def test_a_lock_of_another_process(model, tokenizer, tmp_path, saved, monkeypatch, capsys):
    (tmp_path / PARTIAL).mkdir()
    lock = tmp_path / PARTIAL / "lock"
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert command(monkeypatch, "-m", saved, "-t", "the cat", "-o", tmp_path) == 2
        told = capsys.readouterr()
        assert "another run is writing into" in told.err
        assert told.err.count("\n") == 1
        assert lock.exists()  # the other's work is not cleared away
    finally:
        holder.communicate("")
    assert examine(model, tokenizer, "the cat", folder=tmp_path).run["texts"] == 1


# --- full disks


@pytest.mark.parametrize(
    ("what", "why"), [("write_bytes", "cannot write"), ("mkdir", "cannot make the folder")]
)
def test_a_full_disk_is_one_line(saved, tmp_path, monkeypatch, capsys, what, why):
    change = getattr(Path, what)

    def full(self, *arguments, **options):
        if PARTIAL in str(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return change(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, what, full)
        assert command(patched, "-m", saved, "-t", "the cat", "-o", tmp_path / "out") == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"cumulant: {why} ")
    assert "No space left on device" in told.err
    assert told.err.count("\n") == 1
    assert not [x for x in tmp_path.rglob(".cumulant-*") if x.name != PARTIAL]
    assert command(monkeypatch, "-m", saved, "-t", "the cat", "-o", tmp_path / "out") == 0


def test_a_full_disk_in_parquet(model, tokenizer, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("pyarrow.parquet.write_table", full)
        with pytest.raises(cm.InputError, match="No space left"):
            examine(model, tokenizer, TEXTS[:2], folder=tmp_path)
    assert names(tmp_path) == []


# --- models and tokenizers that do not fit


def test_a_tokenizer_of_another_model(model, tmp_path):
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["zebra"])
    ran = []
    handle = model.register_forward_pre_hook(lambda *_: ran.append(None))
    with pytest.raises(cm.InputError, match=f"text 1 has token {len(WORDS)}.*{len(WORDS)} tokens"):
        examine(model, tokenizer, ["the cat", "the zebra"], folder=tmp_path / "out")
    handle.remove()
    assert ran == []
    assert names(tmp_path / "out") == []
    assert examine(model, tokenizer, "the cat").run["tokens"] == 4  # does no harm


def test_padding_may_be_a_token_the_model_does_not_have(model):
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    assert tokenizer.pad_token_id >= len(WORDS)
    texts = ["the cat sat on a mat", "the cat sat on a"]
    found = examine(model, tokenizer, texts)
    plain = examine(model, toy_tokenizer(), texts)
    pd.testing.assert_frame_equal(found.table(), plain.table())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tokenizer, tmp_path, value):
    broken = toy_model()
    with torch.no_grad():
        broken.encoder.layer[1].attention.self.query.weight[0, 0] = value
    with pytest.raises(cm.InputError, match=r"layer 1 \(encoder\.layer\.1\.attention\.self\)"):
        examine(broken, tokenizer, TEXTS, folder=tmp_path)
    assert names(tmp_path) == []


# --- damaged examinations


@pytest.fixture
def output(finished, tmp_path):
    return finished.save(tmp_path / "output")


@pytest.mark.parametrize(
    "content",
    ["[]", "3", "null", "{}", '{"model": 1}', "", "{", '{"parts": "x"}'],
)
def test_another_kind_of_examination_json(output, content):
    path = output / "examination.json"
    if content == '{"parts": "x"}':
        content = json.dumps(json.loads(path.read_text()) | {"parts": "x"})
    path.write_text(content)
    with pytest.raises(cm.InputError, match=r"examination\.json"):
        cm.lens.Examination.load(output)


def test_bytes_that_are_no_text(output):
    (output / "examination.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(cm.InputError, match=r"examination\.json"):
        cm.lens.Examination.load(output)


@pytest.mark.parametrize("name", ["heads", "layers", "expansions", "partition", "inputs"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_damaged_tables(output, name, damage):
    path = output / f"{name}.parquet"
    path.unlink() if damage == "missing" else path.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(cm.InputError, match=rf"{name}\.parquet is {damage}"):
        cm.lens.Examination.load(output)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("part", [0, 2, 3])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_damaged_parts(model, tokenizer, tmp_path, part, damage):
    found = examine(model, tokenizer, TEXTS, folder=tmp_path / "out")
    path = tmp_path / "out" / "tokens.parquet" / f"part-0000{part}.parquet"
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-50])
    for each in (found, cm.lens.Examination.load(tmp_path / "out")):
        with pytest.raises(cm.InputError, match=rf"part-0000{part}\.parquet is {damage}"):
            each.table()
        with pytest.raises(cm.InputError, match=rf"part-0000{part}\.parquet is {damage}"):
            each.save(tmp_path / "copy")
        if part == 0:
            with pytest.raises(cm.InputError, match=r"part-00000\.parquet"):
                each.report(tmp_path / "report.html")
    assert names(tmp_path / "copy") == []
    assert not (tmp_path / "report.html").exists()


def test_all_tokens_gone(finished, output):
    shutil.rmtree(output / "tokens.parquet")
    found = cm.lens.Examination.load(output)
    with pytest.raises(cm.InputError, match=r"tokens\.parquet is missing"):
        found.table()
    with pytest.raises(cm.InputError, match=r"tokens\.parquet"):
        found.report(output / "report.html")
    assert len(cm.lens.compare(finished, found))  # heads are all it takes


def test_compare_without_heads(finished):
    bare = cm.lens.Examination({}, {}, [], {})
    with pytest.raises(cm.InputError, match="no table of heads"):
        cm.lens.compare(finished, bare)


def test_a_report_in_the_place_of_a_folder(finished, tmp_path):
    (tmp_path / "page").mkdir()
    with pytest.raises(cm.InputError, match="is a folder"):
        finished.report(tmp_path / "page")
    assert names(tmp_path) == ["page"]
    with pytest.raises(cm.InputError):
        finished.report(tmp_path / "page" / ("x" * 300))
    assert names(tmp_path / "page") == []


# --- large corpora


@pytest.mark.usefixtures("small")
def test_the_state_does_not_grow(model, tokenizer, tmp_path):
    texts = [f"{LONG} the" for _ in range(60)]
    sizes = []

    def look(_):
        state = Journal(tmp_path / PARTIAL / STATE, {}).last
        del state["recorder"]["probe"]  # samples of hidden states, which have a size of their own
        Journal(tmp_path / "alone", {}).rewrite([state])
        sizes.append((tmp_path / "alone").stat().st_size)

    found = examine(model, tokenizer, texts, folder=tmp_path, progress=look)
    assert sizes[-1] <= 1.001 * sizes[2]  # after the five notes
    assert found.inputs()["input"].tolist() == list(range(60))
    assert (tmp_path / "inputs.parquet").is_file()
    overlong = [n for n in found.notes if "tokens, the model takes 24" in n]
    assert [n.split(" has ")[0] for n in overlong] == [f"text {k}" for k in range(5)]
    assert "and 55 more texts were truncated" in found.notes
    assert cm.lens.Examination.load(tmp_path).notes == found.notes


@pytest.mark.usefixtures("small")
def test_notes_of_long_texts_survive_an_interruption(model, tokenizer, tmp_path):
    texts = [LONG] * 6 + ["the cat"]
    straight = examine(model, tokenizer, texts)
    assert "and 1 more text was truncated" in straight.notes
    interrupt(model, tokenizer, tmp_path, texts)
    assert examine(model, tokenizer, texts, folder=tmp_path).notes == straight.notes


@pytest.mark.parametrize("after", [1, 2, 4, 5])
def test_going_on_inside_a_text(model, tokenizer, tmp_path, monkeypatch, after):
    monkeypatch.setattr(reading, "PIECES", 2)
    texts = [LONG, "the cat sat", LONG]  # 9 pieces, 1, 9: ten parts
    straight = examine(model, tokenizer, texts, windows=True)
    assert straight.run["inputs"] == 19
    interrupt(model, tokenizer, tmp_path, texts, after=after, windows=True)
    parts = tmp_path / PARTIAL / "tokens.parquet"
    assert len(names(parts)) == after
    for other in ([LONG, "the cat ran", LONG], [LONG], [], [*texts, "more"]):
        with pytest.raises(cm.InputError, match="other texts"):
            examine(model, tokenizer, other, windows=True, folder=tmp_path)
    ticks = []
    found = examine(model, tokenizer, texts, windows=True, folder=tmp_path, progress=ticks.append)
    assert len(ticks) == 10 - after
    assert ticks[-1].done == 3
    pd.testing.assert_frame_equal(found.table(), straight.table(), check_dtype=False)
    pd.testing.assert_frame_equal(found.heads(), straight.heads())
    pd.testing.assert_frame_equal(found.layers(), straight.layers())
    pd.testing.assert_frame_equal(found.inputs(), straight.inputs(), check_dtype=False)
    assert found.notes == straight.notes
    assert found.shown == straight.shown


# --- the report of long texts


def test_a_long_first_text_keeps_the_views_of_tokens(tokenizer, tmp_path):
    wide = toy_model(max_position_embeddings=2100)
    texts = [" ".join(["the cat sat on a mat and"] * 285), "the dog ran", "a mat", "the cat"]
    found = examine(wide, tokenizer, texts)
    assert [len(x[1]) for x in found.shown] == [1997, 5, 4]
    page = found.report(tmp_path / "report.html").read_text()
    assert "The token view shows the first 512 tokens of text 0." in page
    assert [len(x) for x in found.top] == [2, 2, 2]
    found.top[0][:] = [[], []]  # nothing is kept of very long texts
    page = found.report(tmp_path / "report.html").read_text()
    data = page.split('type="application/json"')[1].split(">", 1)[1].split("</script>")[0]
    shown = json.loads(data)["texts"]
    assert [len(x["tokens"]) for x in shown] == [512, 5, 4]
    assert not any(shown[0]["calls"]["0"]["top"][0])
    assert all(shown[1]["calls"]["0"]["top"][0])


# --- the command


def test_names_with_markup_are_shown_as_they_are(saved, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "[red]m[/bold]:cat:"
    shutil.copytree(saved, folder)
    file = tmp_path / "[link=x]t[/dim].txt"
    file.parent.mkdir()
    file.write_text(LONG)
    out = tmp_path / "[blink]o[/]"
    assert command(monkeypatch, "-m", folder, "-f", file, "-o", out) == 0
    told = capsys.readouterr().out
    assert str(folder) in told
    assert f"{file} has 182 tokens" in told
    assert f"The report is {out / 'report.html'}" in told
    assert "replaces" not in told
    assert command(monkeypatch, "-m", folder, "-t", "a cat", "-o", out, "--against", out) == 0
    told = capsys.readouterr().out
    assert f"It replaces an earlier examination in {out}." in told
    assert f"Against {out}" in told
    assert command(monkeypatch, "-m", folder, "-t", "a cat", "-o", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"]["tokens"] == 4


def test_an_interruption_of_the_report(saved, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cm.lens.Examination, "report", interrupted)
    out = tmp_path / "out"
    for _ in range(2):  # into a new folder, and over an earlier examination
        assert command(monkeypatch, "-m", saved, "-t", "a cat", "-o", out) == 130
        told = capsys.readouterr().err
        assert f"the tables are in {out}" in told
        assert "nothing was written" not in told
        assert len(cm.lens.Examination.load(out).inputs()) == 1


def test_an_interruption_before_anything(saved, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "encode", interrupted)
    assert command(monkeypatch, "-m", saved, "-t", "a cat", "-o", tmp_path / "out") == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small")
def test_an_interruption_in_between(saved, tmp_path, monkeypatch, capsys):
    lines = [json.dumps({"text": x}) for x in TEXTS]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    arguments = ("-m", saved, "--jsonl", tmp_path / "texts.jsonl", "-o", tmp_path / "out")
    append, calls = Journal.append, []

    def stop(self, content):
        append(self, content)
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", stop)
        assert command(patched, *arguments) == 130
    assert "run the same command again to resume" in capsys.readouterr().err
    assert command(monkeypatch, *arguments) == 0
    assert len(cm.lens.Examination.load(tmp_path / "out").inputs()) == len(TEXTS)
