"""What docs/security.md says of the sources: who writes files, what is loaded, what is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import cumulant as cm
from cumulant.cli.simulate_run import read_points
from cumulant.core.journal import Journal

SOURCE = Path(cm.__file__).parent

WRITES = {
    *("write_text", "write_bytes", "touch", "savefig", "save_file", "to_csv", "to_json"),
    *("to_parquet", "to_pickle", "to_html", "to_excel", "to_feather", "tofile", "savetxt"),
    *("save", "savez", "savez_compressed", "write_table", "mkstemp", "NamedTemporaryFile"),
}
# Calls of these names that put no file where another process could see half of it.
HARMLESS = {
    ("lab/bench/peak.py", "open"),  # asks the kernel to forget a peak
    ("core/files.py", "open"),
    ("dynamics/film.py", "savefig"),  # into memory
    ("dynamics/trajectory.py", "save"),  # Trajectory.save
    ("figures/style.py", "savefig"),  # into memory; the other one is inside whole_file
    ("core/journal.py", "open"),  # adds a record to a journal
    ("core/journal.py", "save"),  # safetensors into memory
    ("lens/images.py", "save"),  # a PNG into memory
    ("lens/monitoring/monitor.py", "save"),  # Log.save, by write_table of lens/files.py
    ("lens/shards.py", "touch"),  # an empty file, as a signal
    ("kernels/triton/compiling.py", "NamedTemporaryFile"),  # for an assembler, gone afterwards
}
PICKLES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCE.rglob("*.py"):
        yield str(path.relative_to(SOURCE)), ast.parse(path.read_text())


def called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def sheltered(tree: ast.Module) -> set[int]:
    """Nodes inside `with whole_file(...)`."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any(called(item.context_expr) == "whole_file" for item in node.items)
        for inner in ast.walk(node)
    }


def option(node: ast.Call, name: str) -> object:
    found = [x.value for x in node.keywords if x.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def writes(node: ast.AST) -> bool:
    if called(node) == "open":
        modes = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
        return any(isinstance(m, str) and len(m) < 4 and set(m) & set("wax+") for m in modes)
    return called(node) in WRITES


def ours(tree: ast.Module) -> set[str]:
    """Functions of ours that a module calls by their bare names; they are read where they stand."""
    imported = {
        x.asname or x.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cumulant.")
        for x in node.names
    }
    return imported | {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}


def test_every_file_is_written_by_one_mechanism():
    harmless = set()
    for name, tree in trees():
        inside, own = sheltered(tree), ours(tree)
        for node in ast.walk(tree):
            bare = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if not writes(node) or id(node) in inside or (bare and called(node) in own):
                continue
            assert (name, called(node)) in HARMLESS, f"{name}, line {node.lineno}"
            harmless.add((name, called(node)))
    assert harmless == HARMLESS  # nothing is excused that is no longer there


def test_nothing_is_unpickled_or_evaluated():
    loads = 0
    for name, tree in trees():
        for node in ast.walk(tree):
            where = f"{name}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not PICKLES & {x.name.split(".")[0] for x in node.names}, where
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in PICKLES, where
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__"}, where
            if called(node) == "load" and isinstance(node.func, ast.Attribute):
                owner = getattr(node.func.value, "id", "")
                if owner == "torch":
                    assert option(node, "weights_only") is True, where
                    loads += 1
                if owner in ("np", "numpy"):
                    assert option(node, "allow_pickle") is False, where
                    loads += 1
    assert loads >= 3


class Mark:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickles_are_refused(tmp_path):
    mark = Mark(tmp_path / "mark")
    array = np.array([mark], dtype=object)
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    np.savez(tmp_path / "b.npz", points=array)
    np.savez(tmp_path / "c.npz", states=array, format=array)
    torch.save(mark, tmp_path / "d.journal")
    for attempt in (
        lambda: read_points(str(tmp_path / "a.npy"), None, 3, 0),
        lambda: read_points(str(tmp_path / "b.npz"), None, 3, 0),
        lambda: read_points(str(tmp_path / "c.npz"), None, 3, 0),
        lambda: cm.dynamics.Trajectory.load(tmp_path / "c.npz"),
        lambda: cm.Memory.load(tmp_path / "c.npz"),
    ):
        with pytest.raises(cm.InputError):
            attempt()
    journal = Journal(tmp_path / "d.journal", {})
    assert len(journal) == 0
    assert journal.damage
    assert not (tmp_path / "mark").exists()


def test_weights_that_are_programs_are_refused(tmp_path):
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    model = BertModel(BertConfig(**small, intermediate_size=8))
    model.config.save_pretrained(tmp_path)
    mark = Mark(tmp_path / "mark")
    torch.save({**model.state_dict(), "extra": mark}, tmp_path / "pytorch_model.bin")
    with pytest.raises(cm.InputError, match="cannot load the weights"):
        cm.lens.load(tmp_path)
    assert not mark.path.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert mark.path.exists()  # the trap works
