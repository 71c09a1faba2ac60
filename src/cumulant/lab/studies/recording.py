"""Recorded studies: full runs that come with the library, for the ledger and the docs.

``python -m cumulant.lab.studies.recording FOLDER``, from the root of the repository, takes up a
finished folder of ``cumulant study``: its numbers go into ``recorded/``, its curves into
``docs/studies/``. Pages and figures of all recorded studies are then written anew from the two, as
they are without a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import copyfile

from cumulant.core.files import make_folder, write_file
from cumulant.lab.studies.reading import read
from cumulant.lab.studies.results import Results, load, markdown, with_curves

__all__ = ["page", "record", "recorded", "write_pages"]

FOLDER = Path(__file__).parent / "recorded"


def recorded() -> dict[str, Results]:
    """The recorded studies by name, without curves."""
    return {x.stem: load(x, read(x.stem)) for x in sorted(FOLDER.glob("*.json"))}


def page(results: Results) -> str:
    """The page of a recorded study; it follows from the recorded runs."""
    name = results.study.name
    picture = f"\n![Curves of the study: {results.study.title}]({name}.png)\n\n"
    picture += "*Lines: means over seeds; shades: from the lowest seed to the highest; bars: 95 % "
    picture += "intervals.*\n"
    files = f"\nThe curves of all runs: [{name}.parquet]({name}.parquet).\n"
    return markdown(results) + picture + files


def record(folder: Path, docs: Path) -> str:
    """Take up the results in a folder of `cumulant study`; returns the study's name."""
    name = folder.name
    content = json.loads((folder / "results.json").read_text("utf-8"))
    content["command"] = f"cumulant study {name} -o {name}/"
    make_folder(FOLDER)
    write_file(FOLDER / f"{name}.json", json.dumps(content, indent=1) + "\n")
    make_folder(docs)
    copyfile(folder / "curves.parquet", docs / f"{name}.parquet")
    return name


def write_pages(docs: Path) -> None:
    """Page and figure of every recorded study, from its runs and curves."""
    from cumulant.lab.studies.figures import draw

    for name, results in recorded().items():
        write_file(docs / f"{name}.md", page(results))
        draw(with_curves(results, docs / f"{name}.parquet"), docs / f"{name}.png")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        record(Path(given), Path("docs/studies"))
    write_pages(Path("docs/studies"))
