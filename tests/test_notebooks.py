"""Notebooks, executed: the tour, and one cell for each result that is shown as a card."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from test_cards import checked, words

ROOT = Path(__file__).parents[1]


def executed(notebook, folder):
    """Run in a kernel of this Python; an error in a cell raises."""
    os.environ.setdefault("IPYTHONDIR", str(folder))
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    return client.execute()


def shown(notebook):
    """The HTML of every cell's result."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output["output_type"] != "error"
            data = output.get("data", {})
            if "text/html" in data:
                assert " at 0x" not in data["text/plain"]
                found.append(data["text/html"])
    return found


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    return executed(notebook, tmp_path_factory.mktemp("tour"))


def test_the_tour_runs_and_shows_a_card_of_each_kind(tour):
    pages = shown(tour)
    titles = [checked(page).find("p/b").text.split()[0] for page in pages]
    assert titles == ["Attended", "Trajectory", "Fit", "Posterior", "Examination", "T12"]
    assert sum(map(len, pages)) < 400_000
    printed = [o["text"] for c in tour.cells for o in c.get("outputs", ()) if "text" in o]
    assert any("right" in text and "wrong" not in text for text in printed)


def test_the_tour_is_committed_without_outputs():
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    assert len(code) >= 10
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_every_card_is_shown_in_a_notebook(tmp_path):
    first = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    first += "from cards import cards\nx = cards()"
    names = ["Attended", "Examination", "Posterior", "Smoothed", "Fit", "Summary", "Trajectory"]
    names += ["Claim", "Entry", "Result"]
    cells = [nbformat.v4.new_code_cell(first)]
    cells += [nbformat.v4.new_code_cell(f"x[{name!r}]") for name in names]
    pages = shown(executed(nbformat.v4.new_notebook(cells=cells), tmp_path))
    assert len(pages) == len(names)
    for page in pages:
        assert words(checked(page))
