"""`Examination`: what a model did with some texts, as tables, files and a page."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from cumulant.core.checks import whole
from cumulant.core.describing import described
from cumulant.core.errors import InputError
from cumulant.core.files import destination, make_folder, write_file
from cumulant.lens.columns import COLUMNS, TABLES
from cumulant.lens.comparing import chance
from cumulant.lens.files import part_name, read_table, write_json, write_table
from cumulant.lens.pairs import pairs_of, top_table
from cumulant.lens.partial import ABOUT, claimed, finish_move, is_complete, move_in, outdated
from cumulant.lens.tables import TOKEN_COLUMNS, pandas
from cumulant.lens.typed import Table, view
from cumulant.lens.words import Words, with_words

if TYPE_CHECKING:
    from cumulant.lens.head_picture import HeadAttention, Rerun
    from cumulant.lens.report import ReportData
    from cumulant.lens.tables import DataFrame

__all__ = ["Examination", "compare"]

_SMALL = ("heads", "layers", "expansions", "partition", "inputs")
TOP = "top"  # the table of the largest weights of the texts shown
_KINDS = {"model": dict, "run": dict, "notes": list, "shown": list, "top": int}


@dataclass(frozen=True)
class Examination:
    """The tables of an examination, and the metadata of the run.

    Attributes:
        facts: the model: name, type, layers, heads, ...
        run: seconds, peak memory, tokens, versions, when.
        notes: caveats for the reader, such as truncated texts.
        shown: texts whose tokens are kept for the report: (name, tokens[, decoder's tokens]).
        top: for these texts, by [text][layer][head][token], pairs (key, weight) of the largest
            weights.
        pictures: of images, what the model saw (``png``, base64), ``rows`` and ``columns`` of
            patches, and how many ``special`` tokens come before them.
        folder: where the table of tokens is, if not in ``tables``.
        parts: of how many files it consists there.
        rerun: how `head` runs the model again; None for a loaded examination.
    """

    facts: dict[str, Any]
    run: dict[str, Any]
    notes: list[str]
    tables: dict[str, DataFrame]
    shown: list[Any] = field(default_factory=list[Any])
    top: list[Any] = field(default_factory=list[Any])
    pictures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    folder: Path | None = None
    parts: int | None = None
    rerun: Rerun | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}: {len(x)} rows" for n, x in self.tables.items())
        name = described(Path(str(self.facts.get("name", "model"))).name)[1:-1]
        return f"Examination({name}; {sizes})"

    def _repr_html_(self) -> str:
        from cumulant.lens.display import as_html

        return as_html(self)

    def table(self) -> DataFrame:
        """One row per (input, layer, head, token); the columns are those of ``COLUMNS``."""
        if "tokens" not in self.tables and self.folder is not None:
            return read_table(self.folder / "tokens.parquet", self.parts)
        return self._table("tokens")

    def heads(self) -> DataFrame:
        """One row per (layer, head)."""
        return self._table("heads")

    def layers(self) -> DataFrame:
        """One row per transformer block."""
        return self._table("layers")

    def expansions(self) -> DataFrame:
        """Quantiles over token pairs of ``|f(x) - f(y)| / |x - y|``, per sublayer."""
        return self._table("expansions")

    def partition(self) -> DataFrame:
        """The partition function of the input embeddings (T31)."""
        return self._table("partition")

    def inputs(self) -> DataFrame:
        """One row per input: the text's name and how many tokens it has."""
        return self._table("inputs")

    def head(
        self, layer: int, head: int, text: int | str = 0, *, cells: int = 256
    ) -> HeadAttention:
        """One head's attention as a picture: its weights, with token strings.

        The examination stores no N x N array, so the model runs once more, up to that layer. It
        must still be in memory, so this does not work on a loaded examination. A text of more than
        `cells` tokens is pooled into blocks while it streams.

        Args:
            layer, head: counted from 0, as in ``heads()``.
            text: one of the first three inputs, by number or name.
            cells: the most rows and columns of the picture.

        Returns:
            `HeadAttention`: ``weights``, ``strongest()``, ``figure()``, ``save(path)``; a notebook
            shows it as a card.

        Raises:
            InputError: no such layer, head or text; no model to run.

        >>> import cumulant as cm
        >>> model, tokenizer, *_ = cm.lens.load()
        >>> found = cm.lens.examine(model, tokenizer, "the cat and the dog")
        >>> found.head(2, 5)
        HeadAttention(layer 2 head 5, 'text 0': 7 queries, 7 keys)
        """
        if self.rerun is None:
            raise InputError(
                "head: this examination has no model to run again (it was loaded from a folder, "
                "resumed, or shared by processes): examine the text again in this process, "
                "cm.lens.examine(model, tokenizer, text).head(layer, head)."
            )
        from cumulant.lens.head_picture import attention_of

        layer, head = _number("layer", layer), _number("head", head)
        cells = whole("head", "cells", cells, 1)
        layers = int(self.facts.get("layers", 0))
        if not 0 <= layer < layers:
            raise InputError(f"head: layers are 0 to {layers - 1}, not {layer}.")
        names = [str(x[0]) for x in self.shown]
        number = names.index(text) if isinstance(text, str) and text in names else text
        if not isinstance(number, int) or not 0 <= number < len(names):
            listed = ", ".join(f"{k} ({name})" for k, name in enumerate(names))
            raise InputError(f"head: text {text!r} is not among those kept: {listed}.")
        arguments, shown = self.rerun.arguments[number], self.shown[number]
        return attention_of(self.rerun.model(), arguments, shown, layer, head, cells)

    def _table(self, name: str) -> DataFrame:
        """A table; one without rows was not written, and is read back as empty."""
        return self.tables[name] if name in self.tables else pandas().DataFrame()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write all tables into a folder: Parquet, and one JSON file with definitions and facts.

        Files appear in the folder only when all of them are complete.
        """
        target = make_folder(folder)
        own: Path | None = None
        try:
            with claimed(target) as partial:
                if partial is not None and is_complete(partial):
                    finish_move(partial, target)
                # Not the folder of unfinished work: a later run may resume that.
                own = Path(tempfile.mkdtemp(prefix=".cumulant-saving-", dir=target))
                (own / "tokens.parquet").mkdir()
                write_table(self.table(), own / "tokens.parquet" / part_name(0), "tokens")
                self.write_rest(own, parts=1)
                move_in(own, target, outdated(target, [x.name for x in own.iterdir()]))
        except OSError as error:
            raise InputError(f"cannot write to {target}: {error.strerror or error}.") from None
        finally:
            if own is not None:
                shutil.rmtree(own, ignore_errors=True)
        return target

    def _top_table(self) -> DataFrame:
        """The largest weights of the texts shown, with token strings."""
        table = top_table(self.top)
        if not len(table):
            return table
        heads: Any = self.heads()
        rows = heads[["layer", "attention", "module"]].drop_duplicates().itertuples(index=False)
        sides = {int(n): (kind == "cross", "decoder" in name) for n, kind, name in rows}
        target = [x[2] for x in self.shown] if all(len(x) > 2 for x in self.shown) else None
        return with_words(table, Words([x[1] for x in self.shown], target), 0, sides)

    def write_rest(self, folder: Path, parts: int) -> None:
        """Write everything but the table of tokens, which has `parts` parts."""
        for name in _SMALL:
            if len(self.tables.get(name, ())):
                write_table(self.tables[name], folder / f"{name}.parquet", name)
        if len(top := self._top_table()):
            write_table(top, folder / f"{TOP}.parquet", TOP)
        used = {c for x in (*self.tables.values(), top) for c in x.columns} | set(TOKEN_COLUMNS)
        write_json(
            {
                "model": self.facts,
                "run": self.run,
                "notes": self.notes,
                "shown": self.shown,
                "top": len(top),
                "pictures": self.pictures,
                "definitions": {
                    n: {"unit": c.unit, "definition": c.definition, "theory": c.theory}
                    for n, c in COLUMNS.items()
                    if n in used
                },
                "tables": TABLES,
                "parts": parts,
                **{n: self.tables[n] for n in _SMALL if len(self.tables.get(n, ()))},
            },
            folder / ABOUT,
        )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """An examination that was saved.

        Raises:
            InputError: there is none, or the file that is missing or damaged.
        """
        path = Path(folder)
        try:
            about = json.loads((path / ABOUT).read_text("utf-8"))
        except FileNotFoundError:
            raise InputError(f"{path} holds no examination (no {ABOUT}).") from None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot read {path / ABOUT}: {error}.") from None
        wrong = _wrong(about)
        if wrong:
            raise InputError(
                f"{path / ABOUT} does not belong to an examination, or is damaged: {wrong}; "
                "examine again."
            )
        tables = {n: read_table(path / f"{n}.parquet") for n in _SMALL if n in about}
        return cls(
            facts=about["model"],
            run=about["run"],
            notes=about["notes"],
            tables=tables,
            shown=about["shown"],
            top=pairs_of(
                read_table(path / f"{TOP}.parquet") if about["top"] else None,
                len(about["shown"]),
                int(about["model"].get("layers", 0)),
            ),
            pictures=about.get("pictures", []),
            folder=path,
            parts=about.get("parts"),
        )

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML page."""
        from cumulant.lens.report import render

        target = Path(path)
        if os.path.isdir(target):  # Path.is_dir raises where a name is too long
            raise InputError(f"{target} is a folder: give a file, such as {target}/report.html.")
        make_folder(target.parent)
        destination(target)
        return write_file(target, render(self.report_data()))

    def report_data(self) -> ReportData:
        """What the report shows: all small tables, and the tokens of the texts that are shown."""
        from cumulant.lens.report import ReportData

        few = len(self.shown)
        tokens = None
        if few and "tokens" in self.tables:
            tokens = view(self.tables["tokens"])
        elif few and self.folder is not None:  # the first part has the first texts
            tokens = view(read_table(self.folder / "tokens.parquet" / part_name(0)))
        return ReportData(
            title=str(self.facts.get("name", "a model")),
            facts=self.facts,
            tokens=None if tokens is None else tokens[tokens["input"] < few],
            heads=self.tables.get("heads"),
            layers=self.tables.get("layers"),
            expansions=self.tables.get("expansions"),
            partition=self.tables.get("partition"),
            texts=self.shown,
            top=self.top,
            pictures=self.pictures,
            run=self.run,
            notes=self.notes,
        )


def _number(name: str, value: Any) -> int:
    """A layer or head by number; a row of a table gives it as a float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return whole("head", f"the {name}", value)


def _wrong(about: Any) -> str:
    """What keeps the content of an examination.json from being that; nothing if it is."""
    if not isinstance(about, dict):
        return "it does not hold an object"
    held = cast(dict[str, Any], about)
    for name, kind in _KINDS.items():
        if not isinstance(held.get(name), kind):
            return f"it has no {name!r}"
    parts = held.get("parts", 1)
    return "" if isinstance(parts, int) and parts > 0 else "its 'parts' is not a positive integer"


def compare(first: Examination, second: Examination) -> DataFrame:
    """Two models, or two texts: one row per statistic and head, or per quarter of the depth.

    Where both have the same layers and heads, rows are (layer, head, statistic) with ``first``,
    ``second`` and ``difference``, the heads that changed most first. ``noise`` is the 95 % quantile
    of changes by chance, and ``p`` below 0.05 means that the change is more than chance, allowing
    for the number of heads and statistics: texts, or eighths of a few texts, are shuffled between
    the two examinations, or have random signs if both read the same texts. Both are null for
    statistics that are not means over tokens. Otherwise rows are medians over the heads of each
    quarter of the depth.

    Raises:
        InputError: an argument is not an `Examination`, or has no table of heads.
    """
    tables, keys = [_heads_of(x) for x in (first, second)], ["layer", "head"]
    if tables[0][keys].to_numpy().tolist() != tables[1][keys].to_numpy().tolist():
        tables, keys = [_quarters(x) for x in tables], ["quarter"]
    is_number = pandas().api.types.is_numeric_dtype
    shared = [c for c in tables[0].columns if c in tables[1].columns and c not in keys]
    numeric = [c for c in shared if is_number(tables[0][c])]
    long = [x.melt(keys, numeric, "statistic", "value") for x in tables]
    joined = pandas().merge(
        long[0], long[1], on=[*keys, "statistic"], suffixes=("_first", "_second")
    )
    joined = joined.rename(columns={"value_first": "first", "value_second": "second"})
    joined = joined.dropna(subset=["first", "second"], ignore_index=True)
    joined = joined.assign(difference=joined["second"] - joined["first"])
    if keys == ["quarter"]:
        return joined
    joined = joined.merge(chance(first, second), how="left", on=["layer", "head", "statistic"])
    times = (joined["difference"] / joined["noise"]).abs().replace(math.inf, math.nan)
    order = joined.assign(times=times).sort_values(
        ["p", "times"], ascending=[True, False], kind="stable", na_position="last"
    )
    return joined.loc[order.index].reset_index(drop=True)


def _heads_of(examination: Examination) -> Table:
    if not isinstance(examination, Examination):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"compare takes two examinations, not a {type(examination).__name__}: for a folder use "
            "Examination.load(folder)."
        )
    heads, folder = view(examination.heads()), examination.folder
    if not {"layer", "head"} <= set(heads.columns):
        where = "" if folder is None else f" in {folder / 'heads.parquet'}"
        raise InputError(f"compare: there is no table of heads{where}; examine again.")
    return heads


def _quarters(heads: Table) -> Table:
    """Medians over the heads of each quarter of the depth."""
    layers = heads["layer"]
    quarter = 4 * layers // max(1, int(layers.max()) + 1) + 1
    heads = heads.drop(columns=["layer", "head"]).assign(quarter=quarter)
    return heads.groupby("quarter", as_index=False).median(numeric_only=True)
