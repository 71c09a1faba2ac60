"""The ledger in a folder: JSON, a page of Markdown, pictures; what is finished stays finished."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulant.claims.claim import VERDICTS, Claim
from cumulant.claims.ledger import Entry, run
from cumulant.errors import InputError
from cumulant.figures import as_svg, need_matplotlib
from cumulant.writing import make_folder, whole_file

__all__ = ["LEDGER", "Keeper", "bound", "markdown", "measured", "tally"]

LEDGER, PAGE, PARTIAL, FIGURES = "claims.json", "ledger.md", "claims.partial.json", "figures"

Row = dict[str, Any]


class Keeper:
    """Runs claims one after another and, in a folder, keeps each as it is finished.

    An interrupted run leaves its finished claims in claims.partial.json; the same settings again
    go on from there, others begin anew. An earlier claims.json is replaced at the end only.

    Args:
        claims: what to run.
        seed: makes the run repeatable.
        quick: small experiments.
        folder: where to keep it; None keeps nothing.
        version: of the library; another version begins anew.
    """

    def __init__(
        self,
        claims: Sequence[Claim],
        *,
        seed: int,
        quick: bool,
        folder: Path | None,
        version: str,
    ) -> None:
        self.claims, self.folder = claims, folder
        self.about: Row = {"version": version, "seed": seed, "quick": quick}
        self.pictures = folder is not None
        self.rows: dict[str, Row] = {}
        if folder is not None:
            make_folder(folder)
            make_folder(folder / FIGURES)
            self.rows = self._earlier()
            try:
                need_matplotlib()
            except InputError:
                self.pictures = False

    def run(self, claim: Claim) -> Row:
        """The claim's row: of an interrupted run if it is there, otherwise by experiment."""
        if claim.id not in self.rows:
            entry = run(claim, seed=self.about["seed"], quick=self.about["quick"])
            row = entry.as_dict()
            if self.folder is not None:
                self._draw(entry, row)
            self.rows[claim.id] = row
            self._write(PARTIAL, complete=False)
        return self.rows[claim.id]

    def finish(self) -> Row:
        """The whole ledger, written where there is a folder."""
        ledger = self._ledger(complete=True)
        if self.folder is not None:
            self._write(LEDGER, complete=True)
            with whole_file(self.folder / PAGE) as part:
                part.write_text(markdown(ledger), encoding="utf-8")
            (self.folder / PARTIAL).unlink(missing_ok=True)
        return ledger

    def _ledger(self, complete: bool) -> Row:
        asked = [claim.id for claim in self.claims]
        rows = [self.rows[name] for name in asked if name in self.rows]
        return {**self.about, "complete": complete, "asked": asked, "claims": rows}

    def _write(self, name: str, complete: bool) -> None:
        if self.folder is None:
            return
        content = json.dumps(self._ledger(complete), indent=1, allow_nan=False, ensure_ascii=False)
        with whole_file(self.folder / name) as part:
            part.write_text(content + "\n", encoding="utf-8")

    def _draw(self, entry: Entry, row: Row) -> None:
        """The picture, if there is one; a claim without loses that of an earlier run."""
        assert self.folder is not None
        path = self.folder / FIGURES / f"{entry.claim.id}.svg"
        if entry.picture is None or not self.pictures:
            row["caption"] = None
            path.unlink(missing_ok=True)
            return
        try:
            content = as_svg(entry.picture.draw, entry.picture.size, entry.claim.id)
        except Exception as error:  # a picture that fails is a crash of the experiment
            row["crash"] = f"picture: {type(error).__name__}: {error}".split("\n")[0]
            row["caption"], row["departs"] = None, True
            return
        with whole_file(path) as part:
            part.write_text(content, encoding="utf-8")

    def _earlier(self) -> dict[str, Row]:
        """Rows of an interrupted run with these settings; none of it if anything is amiss."""
        assert self.folder is not None
        try:
            kept = json.loads((self.folder / PARTIAL).read_text(encoding="utf-8"))
            rows = {str(row["id"]): dict(row) for row in kept["claims"]}
            same = all(kept[name] == value for name, value in self.about.items())
            there = [(self.folder / FIGURES / f"{name}.svg").is_file() for name in rows]
            drawn = zip(rows.values(), there, strict=True)
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        if not same:
            return {}
        sound = {row["id"]: row for row, there in drawn if there or row.get("caption") is None}
        wanted = {claim.id for claim in self.claims}
        return {name: row for name, row in sound.items() if name in wanted}


def tally(rows: Iterable[Mapping[str, Any]]) -> str:
    """How many of each verdict: `30 hold, 9 hold with a correction, ...`."""
    counts = Counter(str(row["verdict"]) for row in rows)
    plural = {"holds": "hold", "does not hold in general": "do not hold in general"}
    parts: list[str] = []
    for name in VERDICTS:
        count, many = counts[name], name.replace("holds", "hold")
        many = plural.get(name, many)
        verb = ("is " if count == 1 else "are ") if name == "open" else ""
        if count:
            parts.append(f"{count} {verb}{name if count == 1 else many}")
    return ", ".join(parts)


def markdown(ledger: Mapping[str, Any]) -> str:
    """The ledger as a page: a table of verdicts, then each claim with its numbers and picture."""
    rows: list[Row] = ledger["claims"]
    flags = f" --seed {ledger['seed']}" if ledger["seed"] else ""
    flags += " --quick" if ledger["quick"] else ""
    lines = [
        "# The ledger",
        "",
        "Every claim of *A Probabilistic Interpretation of Transformers* (Shim, arXiv 2205.01080) "
        "and its drafts, and every system they lean on, as an experiment. A verdict follows from "
        "the numbers below it: numbers of the *statement* as the draft makes it, of its "
        "*correction*, and *controls* without which the experiment would mean nothing.",
        "",
        f"Made by `cumulant claims{flags}`, version {ledger['version']}: {tally(rows)}.",
        "",
        "| | claim | verdict |",
        "|---|---|---|",
    ]
    lines += [f"| [{r['id']}](#{r['id'].lower()}) | {r['title']} | {r['verdict']} |" for r in rows]
    for row in rows:
        lines += ["", *_section(row)]
    return "\n".join(lines) + "\n"


def _section(row: Row) -> list[str]:
    lines = [f"## {row['id']}", "", f"**{row['title']}: {row['verdict']}.** {row['statement']}"]
    lines += ["", f"$$\n{row['formula']}\n$$", "", f"Source: {row['source']}."]
    if row["systems"]:
        lines[-1] += f" Known as: {', '.join(row['systems'])}."
    if row["correction"]:
        lines += ["", f"*Correction.* {row['correction']}"]
    if row["finding"]:
        lines += ["", row["finding"]]
    for trouble in ("crash", "not_run"):
        if row[trouble]:
            lines += ["", f"*{'Crashed' if trouble == 'crash' else 'Not run'}: {row[trouble]}*"]
    if row["numbers"]:
        lines += ["", "| number | measured | should be | speaks for |", "|---|---|---|---|"]
        lines += [
            f"| {cell(x['says'])} (`{x['name']}`) | {measured(x)} | {bound(x)} | {x['form']} |"
            for x in row["numbers"]
        ]
    if row["caption"]:
        lines += ["", f"![{row['caption']}]({FIGURES}/{row['id']}.svg)", "", f"*{row['caption']}*"]
    if row["tests"]:
        lines += ["", f"Law: {', '.join(f'`{path}`' for path in row['tests'])}."]
    return lines


def cell(text: str) -> str:
    """Text that does not end its cell."""
    return text.replace("|", "\\|")


def measured(number: Mapping[str, Any]) -> str:
    """The value with its standard error: `0.51 ± 0.02`."""
    if number["value"] is None:
        return "not finite"
    error = "" if number["error"] is None else f" ± {number['error']:.1g}"
    return f"{number['value']:.4g}{error}"


def bound(number: Mapping[str, Any]) -> str:
    """What the value should be, and whether it is."""
    if number["form"] == "noted":
        return ""
    limit = f"≤ {number['high']:.4g}" if number["high"] is not None else f"≥ {number['low']:.4g}"
    refuted = "" if number["refuted"] is None else f" (refuted at {number['refuted']:.4g})"
    return f"{limit}{refuted}: {number['outcome']}"
