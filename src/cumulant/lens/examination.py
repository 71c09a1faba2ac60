"""`Examination`: what a model did with some texts, as tables, files and a page."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cumulant.errors import InputError
from cumulant.lens.columns import COLUMNS, TABLES
from cumulant.lens.files import PARTIAL, make_folder, move_in, read_table, write_json, write_table
from cumulant.lens.tables import TOKEN_COLUMNS, pandas

__all__ = ["Examination", "compare"]

_SMALL = ("heads", "layers", "expansions", "partition", "inputs")


@dataclass(frozen=True)
class Examination:
    """Tables of what was measured, and the facts of the run.

    Attributes:
        facts: the model: name, type, layers, heads, ...
        run: seconds, peak memory, tokens, versions, when.
        notes: what a reader must know, such as truncated texts.
        shown: texts whose tokens are kept for the report: (name, tokens).
        top: for these texts, by [text][layer][head][token], pairs (key, weight) of the largest
            weights.
    """

    facts: dict[str, Any]
    run: dict[str, Any]
    notes: list[str]
    tables: dict[str, Any]
    shown: list[Any] = field(default_factory=list[Any])
    top: list[Any] = field(default_factory=list[Any])
    folder: Path | None = None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}: {len(x)} rows" for n, x in self.tables.items())
        return f"Examination({self.facts.get('name', 'model')}; {sizes})"

    def table(self) -> Any:
        """One row per (input, layer, head, token); the columns are those of ``COLUMNS``."""
        if "tokens" not in self.tables and self.folder is not None:
            return read_table(self.folder / "tokens.parquet")
        return self.tables["tokens"]

    def heads(self) -> Any:
        """One row per (layer, head)."""
        return self.tables["heads"]

    def layers(self) -> Any:
        """One row per transformer block."""
        return self.tables["layers"]

    def expansions(self) -> Any:
        """Quantiles over token pairs of |f(x) - f(y)| / |x - y|, per sublayer."""
        return self.tables["expansions"]

    def partition(self) -> Any:
        """The partition function of the input embeddings (T31)."""
        return self.tables["partition"]

    def inputs(self) -> Any:
        """One row per input: the text's name and how many tokens it has."""
        return self.tables["inputs"]

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write all tables into a folder: Parquet, and one JSON file with definitions and facts.

        Nothing is half-written: files appear in the folder when all of them are complete.
        """
        target = make_folder(folder)
        partial = target / PARTIAL
        try:
            (partial / "tokens.parquet").mkdir(parents=True, exist_ok=True)
            write_table(self.table(), partial / "tokens.parquet" / "part-00000.parquet", "tokens")
            self.write_rest(partial)
            move_in(partial, target)
        except OSError as error:
            raise InputError(f"cannot write into {target}: {error.strerror or error}.") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return target

    def write_rest(self, folder: Path) -> None:
        """Everything but the table of tokens."""
        for name in _SMALL:
            if len(self.tables.get(name, ())):
                write_table(self.tables[name], folder / f"{name}.parquet", name)
        used = {c for x in self.tables.values() for c in x.columns} | set(TOKEN_COLUMNS)
        write_json(
            {
                "model": self.facts,
                "run": self.run,
                "notes": self.notes,
                "shown": self.shown,
                "top": self.top,
                "definitions": {
                    n: {"unit": c.unit, "definition": c.definition, "theory": c.theory}
                    for n, c in COLUMNS.items()
                    if n in used
                },
                "tables": TABLES,
                **{n: self.tables[n] for n in _SMALL if len(self.tables.get(n, ()))},
            },
            folder / "examination.json",
        )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """An examination that was saved."""
        path = Path(folder)
        try:
            about = json.loads((path / "examination.json").read_text("utf-8"))
        except FileNotFoundError:
            raise InputError(f"{path} holds no examination (no examination.json).") from None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path / 'examination.json'}: {error}.") from None
        tables = {
            n: read_table(path / f"{n}.parquet") for n in _SMALL if (path / f"{n}.parquet").exists()
        }
        return cls(
            about["model"], about["run"], about["notes"], tables, about["shown"], about["top"], path
        )

    def report(self, path: str | os.PathLike[str]) -> Path:
        """One self-contained HTML page; opens anywhere, asks for nothing from outside."""
        from cumulant.lens.report import render

        page = render(self.report_data())
        target = Path(path)
        make_folder(target.parent)
        temporary = target.with_name(target.name + ".writing")
        try:
            temporary.write_text(page, "utf-8")
            os.replace(temporary, target)
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror or error}.") from None
        return target

    def report_data(self) -> Any:
        """What the report shows: all small tables, and the tokens of the texts that are shown."""
        from cumulant.lens.report import ReportData

        few = len(self.shown)
        tokens = None
        if few and "tokens" in self.tables:
            tokens = self.tables["tokens"][self.tables["tokens"]["input"] < few]
        elif few and self.folder is not None:  # the first part has the first texts
            first = sorted((self.folder / "tokens.parquet").glob("part-*.parquet"))[0]
            tokens = read_table(first)
            tokens = tokens[tokens["input"] < few]
        return ReportData(
            title=str(self.facts.get("name", "a model")),
            facts=self.facts,
            tokens=tokens,
            heads=self.tables.get("heads"),
            layers=self.tables.get("layers"),
            expansions=self.tables.get("expansions"),
            partition=self.tables.get("partition"),
            texts=self.shown,
            top=self.top,
            run=self.run,
            notes=self.notes,
        )


def compare(first: Examination, second: Examination) -> Any:
    """Two models, or two texts: one row per statistic and head, or per quarter of the depth.

    Where both have the same layers and heads, rows are (layer, head, statistic) with ``first``,
    ``second`` and ``difference``; otherwise medians over the heads of each quarter of the depth.
    """
    frames = pandas()
    grids = [x.heads() for x in (first, second)]
    keys = ["layer", "head"]
    same = len(grids[0]) == len(grids[1]) and bool(
        (grids[0][keys].to_numpy() == grids[1][keys].to_numpy()).all()
    )
    numeric = [
        c
        for c in grids[0].columns
        if c in grids[1].columns
        and c not in keys
        and frames.api.types.is_numeric_dtype(grids[0][c])
    ]
    parts: list[Any] = []
    for grid in grids:
        table = grid[[*keys, *numeric]].copy()
        if not same:
            depth = table.pop("layer") / max(1, int(grid["layer"].max()) + 1)
            table = table.drop(columns="head").assign(quarter=(4 * depth).astype(int) + 1)
            table = table.groupby("quarter", as_index=False).median()
        index = keys if same else ["quarter"]
        parts.append(table.melt(index, var_name="statistic", value_name="value"))
    index = [*(keys if same else ["quarter"]), "statistic"]
    joined = parts[0].merge(parts[1], on=index, suffixes=("_first", "_second"))
    joined = joined.rename(columns={"value_first": "first", "value_second": "second"})
    joined = joined.dropna(subset=["first", "second"], ignore_index=True)
    return joined.assign(difference=joined["second"] - joined["first"])
