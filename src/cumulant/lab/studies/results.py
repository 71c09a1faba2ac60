"""What a study leaves in its folder: JSON, Parquet, a page with table and verdict, TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, util
from pathlib import Path
from typing import Any, cast

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder, printable, write_file
from cumulant.lab.studies.judging import judgments, table
from cumulant.lab.studies.running import Run
from cumulant.lab.studies.study import Job, Study
from cumulant.lab.studies.tasks import objective_of
from cumulant.lens.files import parquet, write_table
from cumulant.lens.tables import pandas

__all__ = ["Results", "can_save", "json_text", "load", "markdown", "save", "with_curves"]

# Numbers that every run has but no table needs: they say what other columns say.
_LEFT_OUT = ("validation", "accuracy", "points", "capacity")
_WHICH = ("variant", "stage", "seed", "rate", "beta")  # what tells the runs of a study apart


@dataclass(frozen=True)
class Results:
    """The runs of a study and what they say.

    Attributes:
        study: as it was run.
        runs: all of them, with curves unless they were read from a record.
        about: command, machine, load, seconds of CPU, version, whether it was quick.
    """

    study: Study
    runs: Sequence[Run]
    about: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the curves."""
        lines, verdict = judgments(self.study, self.runs)
        return {
            "study": self.study.name,
            **self.about,
            "verdict": verdict,
            "rules": [x.as_dict() for x in lines],
            "table": table(self.study, self.runs),
            "runs": [run.as_dict(curve=False) for run in self.runs],
        }


def can_save() -> None:
    """Check that `save` will find its packages, before the hours of a study.

    Raises:
        InputError: one is missing.
    """
    pandas()
    parquet()


def save(results: Results, folder: Path) -> list[Path]:
    """Write everything; returns the files."""
    make_folder(folder)
    written = [
        write_file(folder / "results.json", json_text(results.as_dict())),
        write_file(folder / "results.md", markdown(results)),
    ]
    curves = pandas().DataFrame(_rows(results))
    write_table(curves, folder / "curves.parquet", "curves")
    written.append(folder / "curves.parquet")
    if util.find_spec("matplotlib") is not None:
        from cumulant.lab.studies.figures import draw

        written.append(draw(results, folder / "curves.png"))
    if util.find_spec("tensorboard") is not None:
        _tensorboard(results, folder / "tensorboard")
        written.append(folder / "tensorboard")
    return written


def load(path: Path, study: Study) -> Results:
    """Results read back from ``results.json``, without curves.

    Raises:
        InputError: it is missing, damaged, or of another study.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        runs = [_run(study, row) for row in content["runs"]]
        named = content["study"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot read {printable(path)}: {error}.") from None
    if named != study.name:
        raise InputError(f"{printable(path)} is of {named!r}, not of {study.name!r}.")
    made = ("study", "verdict", "rules", "table", "runs")
    about = {n: x for n, x in content.items() if n not in made}
    return Results(study, runs, {**about, "recorded": content["verdict"]})


def with_curves(results: Results, path: Path) -> Results:
    """Results of `load` with their curves, from ``curves.parquet``."""
    kept: dict[tuple[Any, ...], dict[int, dict[str, float]]] = {}
    for row in pandas().read_parquet(path).to_dict("records"):
        points = kept.setdefault(tuple(row[n] for n in _WHICH), {})
        step = int(row["step"])
        points.setdefault(step, {"step": step})[row["quantity"]] = row["value"]
    runs = [
        replace(run, curve=[*kept.get(tuple(getattr(run.job, n) for n in _WHICH), {}).values()])
        for run in results.runs
    ]
    return replace(results, runs=runs)


def _run(study: Study, row: dict[str, Any]) -> Run:
    where = {n: row[n] for n in _WHICH}
    job = Job(task=study.task, settings={}, **where)
    return Run(job, row["numbers"], [], row["diverged"], row["seconds"])


def json_text(content: Mapping[str, Any]) -> str:
    """Content as JSON that every parser reads: no NaN, no infinity."""
    return json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"


def _plain(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.7g}") if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(n): _plain(y) for n, y in cast(Mapping[Any, Any], x).items()}
    if isinstance(x, list | tuple):
        return [_plain(y) for y in cast(list[Any], x)]
    return x


def _rows(results: Results) -> list[dict[str, Any]]:
    """Curves, one row for each run, step and quantity."""
    rows: list[dict[str, Any]] = []
    for run in results.runs:
        job = run.job
        about = {name: getattr(job, name) for name in _WHICH}
        for point in run.curve:
            for name, x in point.items():
                if name != "step":
                    rows.append({**about, "step": int(point["step"]), "quantity": name, "value": x})
    return rows


def _tensorboard(results: Results, folder: Path) -> None:
    """Event files, one folder for each run that counts."""
    writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
    for run in results.runs:
        if run.job.stage == "final":
            target = folder / run.id
            for old in target.glob("events.*"):
                old.unlink()
            with writer(str(target)) as out:
                for point in run.curve:
                    for name, x in point.items():
                        if name != "step":
                            out.add_scalar(name, x, int(point["step"]))


def markdown(results: Results) -> str:
    """Verdict, rule and table as a page; it follows from the runs alone."""
    study, about = results.study, results.about
    lines, verdict = judgments(study, results.runs)
    quick = " (quick: it shows the machinery and decides nothing)" if about.get("quick") else ""
    out = [
        f"# {study.title}",
        "",
        f"{study.question}",
        "",
        f"**Verdict: {verdict}**{quick}.",
        "",
        "| rule | says | 95 % interval over seeds | hardest rival | outcome |",
        "|---|---|---|---|---|",
    ]
    for x in lines:
        low, high = _number(x.interval.low), _number(x.interval.high)
        says = x.rule.says.replace("|", "\\|")
        said = f"| {x.rule.name} | {says} | {_number(x.interval.mean)} [{low}, {high}] |"
        out.append(f"{said} {x.rival or '–'} | {x.measured.outcome} |")
    rows = table(study, results.runs)
    objective = objective_of(study.task)
    left = _LEFT_OUT if study.tuning.steps else (*_LEFT_OUT, "rate", "beta")
    if not study.tuning.steps and all(x.diverged is None for x in results.runs):
        left = (*left, "diverged")
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if n not in left]
    names = [n for n in names if not n.startswith("capacity_")]
    first = [n for n in ("variant", objective) if n in names]
    names = [*first, *(n for n in names if n not in first)]
    out += ["", "Means over seeds, ± half of the 95 % interval.", ""]
    out += [f"| {' | '.join(n.replace('_', ' ') for n in names)} |", "|" + "---|" * len(names)]
    out += [f"| {' | '.join(_cell(row.get(n)) for n in names)} |" for row in rows]
    facts = [f"{n}: {about[n]}" for n in ("command", "machine", "load") if n in about]
    out += ["", *(f"- {x}" for x in facts)]
    seconds = sum(run.seconds for run in results.runs)
    out += [f"- {len(results.runs)} runs, {seconds:.0f} seconds of CPU time", ""]
    return "\n".join(out)


def _number(x: float) -> str:
    if not math.isfinite(x):
        return "–"
    return f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"


def _cell(x: Any) -> str:
    if x is None:
        return "–"
    if isinstance(x, list):
        mean, half = cast(list[float], x)
        return f"{_number(mean)} ± {_number(half)}" if math.isfinite(half) else _number(mean)
    return f"{x:g}" if isinstance(x, float) else str(x)
