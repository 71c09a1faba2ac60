"""Every Python block of the README and of the guides, and every example, runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from cumulant.lab.bench.front import FRONT, table
from cumulant.lab.bench.timing import short

ROOT = Path(__file__).parents[1]


def test_readme_snippets_run_in_order():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        assert len([x for x in block.splitlines() if x.strip()]) < 8
        exec(compile(block, "README.md", "exec"), names)
    tangent, x = names["tangent"], names["x"]
    assert isinstance(tangent, torch.Tensor)
    assert tangent.isfinite().all()
    assert isinstance(x, torch.Tensor)
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_readme_and_report_compare_at_the_same_shapes():
    """The README's table is `FRONT`, which the report measures; ratios are those of the pages."""
    assert table() in (ROOT / "README.md").read_text()
    report = (ROOT / "src" / "cumulant" / "lab" / "report" / "gathering.py").read_text()
    assert "front.run(" in report
    assert "threads=1" in report
    zen4 = (ROOT / "docs" / "benchmarks" / "front.md").read_text()
    assert "(family 25 model 17), 1 thread," in zen4
    for line in FRONT:
        page = (ROOT / "docs" / "benchmarks" / f"{line.bench}.md").read_text()
        # The section measured on one thread; it is the whole page where there is but one.
        parts = [x for x in re.split(r"^## ", page, flags=re.MULTILINE) if ", 1 thread," in x]
        rows = [[c.strip() for c in row.split("|")] for x in parts for row in x.splitlines()]
        named = [line.shape, line.quantity, line.against]
        found = [r[6] for r in rows if r[1:4] == named and r[4].endswith(f" {line.unit}")]
        assert short(line.page) in found, line
        ((*_, ratio, _, _),) = (
            cells
            for cells in ([c.strip() for c in row.split("|")] for row in zen4.splitlines())
            if cells[1:4] == named and cells[4].endswith(f" {line.unit}")
        )
        assert short(line.zen4) == ratio, line


@pytest.mark.parametrize(
    "page",
    [
        *("index", "tutorial", "attention", "measures", "dynamics", "memory", "contrastive"),
        *("filtering", "regimes", "tracking", "filtering-families", "coming-from-statsmodels"),
        *("lens", "monitoring", "ledger", "derivatives", "training-with-jvps", "coming-from-sdpa"),
        *("coming-from-metric-learning", "coming-from-hflayers", "coming-from-filterpy"),
        "coming-from-output-attentions",
        *("scaling", "distributed", "recipes", "linear-cross-entropy", "notebooks", "studies"),
    ],
)
def test_guides_run_in_order(page, capsys):
    """Where a block of output follows, it is what the code prints, to rounding."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    try:
        for block, shown in blocks:
            capsys.readouterr()
            exec(compile(block, page, "exec"), names)
            if shown:
                words, numbers = taken_apart(shown)
                printed = taken_apart(capsys.readouterr().out)
                assert printed[0] == words
                assert printed[1] == pytest.approx(numbers, rel=0.01, abs=0.002)
    finally:
        torch.set_printoptions(profile="default")


def taken_apart(text):
    """What stands around the numbers, without spaces, and the numbers."""
    number = r"-?\d+(?:\.\d*)?(?:e-?\d+)?"
    return re.sub(number + r"|\s", "", text), [float(x) for x in re.findall(number, text)]


# What takes minutes runs in a short form.
ARGUMENTS = {
    "mean_flow_digits.py": ["--steps", "30"],
    "evict_cache.py": ["--tokens", "48", "--budgets", "8", "16"],
    "hamilton_gnp.py": ["--order", "1"],
    "jvp_cost.py": ["64", "128"],
    "regimes_of_growth.py": ["picture.png"],
}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", [str(path), *ARGUMENTS.get(path.name, [])])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) >= 3
    assert "nan" not in printed


def test_the_tutorial_shows_what_every_step_prints():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    assert text.count("```python\n") == text.count("```text\n") == text.count("\n## ") - 1 == 16


def test_the_gallery_has_every_picture_with_what_makes_it():
    """Pages of claims and of recorded studies are written by commands, which they name."""
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)\]\(([^)]+)\) \| ([^|]+) \|", gallery)
    made = dict.fromkeys((ROOT / "docs" / picture).resolve() for picture, _, _ in shown)
    assert all("`" in command or command == "the same" for _, _, command in shown)
    pictures = {p for p in (ROOT / "docs" / "figures").iterdir() if p.suffix in (".png", ".gif")}
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            if not link.startswith("http"):
                pictures.add((page.parent / link).resolve())
    written = {(ROOT / "docs" / name).resolve() for name in ("claims", "studies")}
    assert {p for p in pictures if not written & set(p.parents)} <= set(made)
    assert all(p.is_file() for p in made)
    for command in re.findall(r"`python ((?:examples|docs)/\S+\.py)", gallery):
        assert (ROOT / command).is_file()
    for script in re.findall(r"`python (examples/\S+\.py) picture.png", gallery):
        assert "sys.argv[1]" in (ROOT / script).read_text(), script


def test_the_index_of_examples_and_the_gallery_leave_nothing_out():
    index = (ROOT / "examples" / "README.md").read_text()
    files = (ROOT / "examples").iterdir()
    wanted = {p.name for p in files if p.suffix in (".py", ".ipynb")}
    assert set(re.findall(r"[\w.]+\.(?:py|ipynb)(?=`|\))", index)) - {"NAME.py"} == wanted
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    for study in (ROOT / "docs" / "studies").glob("*.png"):
        assert f"(studies/{study.name})](studies/{study.stem}.md)" in gallery


def test_nothing_is_installed_from_where_it_is_not():
    """Until it is published, the package installs from a checkout."""
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    for path in [*places, *(ROOT / "examples").iterdir()]:
        if path.is_file():
            assert not re.search(r"pip install ['\"]?cumulant", path.read_text("utf-8")), path


def test_links_point_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
