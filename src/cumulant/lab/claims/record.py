"""The ledger in a folder: JSON, a page of Markdown, pictures; what is finished stays finished."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, write_file
from cumulant.core.journal import Journal
from cumulant.core.lock import locked
from cumulant.core.progress import ProgressCallback
from cumulant.figures import as_svg, need_matplotlib
from cumulant.lab.claims.claim import (
    CORRECTED,
    EVIDENCE,
    FAILS,
    HOLDS,
    OPEN,
    Claim,
    correction_title,
)
from cumulant.lab.claims.costs import Pace, by_cost, cost
from cumulant.lab.claims.ledger import Entry, run, sources
from cumulant.lab.claims.ledger import claims as known
from cumulant.lab.workers import Workers, cores, report

__all__ = ["LEDGER", "Keeper", "bound", "keeper", "markdown", "measured", "outcome", "tally"]

# Processes at once: the longest claims take an eighth of the time of all. Seconds of experiments
# that are worth starting processes for, each of which imports torch.
MOST, WORTH = 8, 10.0
LEDGER, PAGE, PARTIAL, FIGURES = "claims.json", "ledger.md", "claims.journal", "figures"

Row = dict[str, Any]


@contextmanager
def keeper(
    claims: Sequence[Claim],
    *,
    seed: int,
    quick: bool,
    folder: Path | None,
    version: str,
    update: bool = False,
) -> Generator[Keeper]:
    """A `Keeper` that has its folder to itself.

    Raises:
        InputError: another run writes into the folder, or there is no ledger to update.
    """
    if folder is None:
        if update:
            raise InputError("--update needs the folder of a ledger: add -o FOLDER.")
        yield Keeper(claims, seed=seed, quick=quick, folder=None, version=version)
        return
    make_folder(folder)
    with locked(folder / ".claims.lock"):
        yield Keeper(claims, seed=seed, quick=quick, folder=folder, version=version, update=update)


class Keeper:
    """Runs claims, several at a time, and in a folder keeps each when it is finished.

    An interrupted run leaves its finished claims in claims.journal. A run with the same settings
    resumes there; other settings, or another state of the library, start over. An earlier
    claims.json is replaced only at the end.

    Args:
        claims: what to run.
        seed: makes the run repeatable.
        quick: small experiments.
        folder: where to keep it; None keeps nothing.
        version: of the library; another version starts over.
        update: the claims take their places in the ledger that is in the folder; its other claims
            stay as they were measured.

    Raises:
        InputError: there is no ledger to update, or it was made with other settings.
    """

    def __init__(
        self,
        claims: Sequence[Claim],
        *,
        seed: int,
        quick: bool,
        folder: Path | None,
        version: str,
        update: bool = False,
    ) -> None:
        self.claims, self.folder = claims, folder
        self.about: Row = {"version": version, "seed": seed, "quick": quick}
        self._others = _earlier(folder, self.about) if update and folder is not None else {}
        self.pictures = folder is not None and _can_draw()
        self.rows: dict[str, Row] = {}
        self._journal: Journal | None = None
        if folder is not None:
            make_folder(folder)
            make_folder(folder / FIGURES)
            settings = {**self.about, "sources": sources(), "pictures": self.pictures}
            self._journal = Journal(folder / PARTIAL, settings)
            if self._journal.differs:
                self._journal.restart()
            rows: dict[str, Row] = {row["id"]: row for row in self._journal}
            self.rows = {name: row for name, row in rows.items() if self._sound(name, row)}

    @property
    def done(self) -> int:
        """How many of the claims asked for are there."""
        return sum(claim.id in self.rows for claim in self.claims)

    def run(self, claim: Claim) -> Row:
        """The claim's row: of an interrupted run if it is there, otherwise by experiment."""
        if claim.id not in self.rows:
            entry = run(claim, seed=self.about["seed"], quick=self.about["quick"])
            self._keep(*_made(entry, self.pictures))
        return self.rows[claim.id]

    def run_all(
        self, processes: int | None = None, progress: ProgressCallback = lambda _: None
    ) -> Iterator[Row]:
        """All rows: those that are there, then the others as they are finished.

        The most expensive claims begin, in processes of their own, unless all of them together take
        less than starting processes does. The numbers are those of `run`.

        Args:
            processes: at once; default: one for each processor, at most eight.
            progress: told of the claims that run and the expected time left.
        """
        yield from (self.rows[claim.id] for claim in self.claims if claim.id in self.rows)
        quick: bool = self.about["quick"]
        left = by_cost([x for x in self.claims if x.id not in self.rows], quick)
        most = min(processes or min(cores(), MOST), len(left))
        if sum(cost(x.id, quick) for x in left) < WORTH:
            most = min(most, 1)
        pace = Pace(len(self.claims), left, quick, max(most, 1), progress)
        if most < 2:
            for claim in left:
                pace.begins(claim.id)
                row = self.run(claim)
                pace.ends(row)
                yield row
            return
        given = [(claim.id, self.about["seed"], quick, self.pictures) for claim in left]
        with Workers(most) as workers:
            for row, picture in workers.each(_apart, given, told=pace.begins, waiting=pace.tell):
                self._keep(row, picture)
                pace.ends(row)
                yield row

    def finish(self) -> Row:
        """The whole ledger, written where there is a folder."""
        asked = [claim.id for claim in self.claims]
        found = self._others | {name: self.rows[name] for name in asked}
        order = {name: i for i, name in enumerate(known())} if self._others else {}
        rows = sorted(found.values(), key=lambda row: order.get(row["id"], len(order)))
        every = [row["id"] for row in rows]
        ledger = {**self.about, "complete": True, "asked": every, "claims": rows}
        if self.folder is not None and self._journal is not None:
            text = json.dumps(ledger, indent=1, allow_nan=False, ensure_ascii=False)
            page = markdown(ledger)
            write_file(self.folder / LEDGER, text + "\n")
            write_file(self.folder / PAGE, page)
            # Other claims of a run that was interrupted stay for it.
            self._journal.rewrite(row for name, row in self.rows.items() if name not in asked)
        return ledger

    def _keep(self, row: Row, picture: str | None) -> None:
        """The row and its picture; a claim without one loses that of an earlier run."""
        if self.folder is not None:
            path = self.folder / FIGURES / f"{row['id']}.svg"
            if picture is None:
                path.unlink(missing_ok=True)
            else:
                write_file(path, picture)
        self.rows[row["id"]] = row
        if self._journal is not None:
            self._journal.append(row)

    def _sound(self, name: str, row: Row) -> bool:
        """Whether an earlier row serves: what crashed, or lacked something, is tried again."""
        assert self.folder is not None
        drawn = row["caption"] is None or (self.folder / FIGURES / f"{name}.svg").is_file()
        return drawn and row["crash"] is None and row["not_run"] is None


def _apart(given: tuple[str, int, bool, bool]) -> tuple[Row, str | None]:
    """In a worker: a claim by its id."""
    name, seed, quick, pictures = given
    report(name)
    return _made(run(known()[name], seed=seed, quick=quick), pictures)


def _made(entry: Entry, pictures: bool) -> tuple[Row, str | None]:
    """What is written down about a run, and its picture as SVG if there is one."""
    row = entry.as_dict()
    if entry.picture is None or not pictures:
        return row | {"caption": None}, None
    try:
        return row, as_svg(entry.picture.draw, entry.picture.size, entry.claim.id)
    except Exception as error:  # a picture that fails is a crash of the experiment
        row["crash"] = f"picture: {type(error).__name__}: {error}".split("\n")[0]
        return row | {"caption": None, "departs": True, "verdict": OPEN}, None


def _earlier(folder: Path, about: Row) -> dict[str, Row]:
    """The claims of the ledger that is in a folder, by id."""
    path = folder / LEDGER
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows: dict[str, Row] = {row["id"]: row for row in found["claims"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"there is no ledger to update in {folder} ({LEDGER}: {error}): run all claims there "
            "once without --update."
        ) from None
    if odd := [name for name, value in about.items() if found.get(name) != value]:
        told = ", ".join(f"{name} {found.get(name)!r}, not {about[name]!r}" for name in odd)
        raise InputError(f"the ledger in {folder} was made with {told}: run all claims there anew.")
    return rows


def _can_draw() -> bool:
    try:
        need_matplotlib()
    except InputError:
        return False
    return True


def tally(rows: Iterable[Mapping[str, Any]]) -> str:
    """How many of each verdict: `30 hold, 9 hold with a correction, ...`."""
    counts = Counter(outcome(row) for row in rows)
    words = {
        HOLDS: ("holds", "hold"),
        CORRECTED: ("holds with a correction", "hold with a correction"),
        FAILS: ("does not hold in general", "do not hold in general"),
        OPEN: ("is open", "are open"),
        "crashed": ("crashed", "crashed"),
        "not run": ("was not run", "were not run"),
    }
    told = [(counts[name], words[name]) for name in words if counts[name]]
    return ", ".join(f"{n} {one if n == 1 else many}" for n, (one, many) in told)


def outcome(row: Mapping[str, Any]) -> str:
    """The verdict, or why there is none: a claim that was not run is not an open question."""
    return "not run" if row.get("not_run") else "crashed" if row.get("crash") else row["verdict"]


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
        "*correction*, and *controls* without which the experiment would mean nothing. Bounds on "
        "gaps are what rounding, quadrature or a solver's tolerance leaves; other bounds are "
        "explained where they stand.",
        "",
        f"Made by `cumulant claims{flags}`, version {ledger['version']}: {tally(rows)}.",
        "",
        "A verdict rests on one of three kinds of evidence: "
        + "; ".join(f"*{name}* is {says}" for name, says in EVIDENCE.items())
        + ".",
        "",
        "| | claim | verdict | evidence |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| [{r['id']}](#{r['id'].lower()}) | {r['title']} | {outcome(r)} | {r['evidence']} |"
        for r in rows
    ]
    for row in rows:
        lines += ["", *_section(row)]
    slips = [f"- [{row['id']}](#{row['id'].lower()}): {x}" for row in rows for x in row["slips"]]
    if slips:
        says = "Misprints and wrong names in the drafts, which change no claim."
        lines += ["", "## Slips", "", says, "", *slips]
    return "\n".join(lines) + "\n"


def _section(row: Row) -> list[str]:
    lines = [f"## {row['id']}", "", f"**{row['title']}: {outcome(row)}.** {row['statement']}"]
    lines += ["", f"$$\n{row['formula']}\n$$", ""]
    lines += [f"Source: {row['source']}. Evidence: {row['evidence']}."]
    if row["systems"]:
        lines[-1] += f" Known as: {', '.join(row['systems'])}."
    if row["correction"]:
        lines += ["", f"*{correction_title(row['verdict'])}.* {row['correction']}"]
    lines += [line for slip in row["slips"] for line in ("", f"*Slip.* {slip}")]
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
        if row["bounds"]:
            lines += ["", f"*Bounds.* {row['bounds']}"]
    if row["caption"]:
        lines += ["", f"![{row['caption']}]({FIGURES}/{row['id']}.svg)", "", f"*{row['caption']}*"]
    where = [f"Run it again: `{row['again']}`."]
    if row.get("experiment"):
        where.append(f"Experiment: `{row['experiment']}`.")
    if row["theory"]:
        where.append(f"Derivation: [theory.md](../theory.md#{row['theory'].lower()}).")
    if row["tests"]:
        where.append(f"Law: {', '.join(f'`{path}`' for path in row['tests'])}.")
    return [*lines, "", " ".join(where)]


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
