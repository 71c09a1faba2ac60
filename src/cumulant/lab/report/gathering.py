"""The parts of the report; each is saved when done, so an interrupted run can resume."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cumulant.core.errors import InputError
from cumulant.core.files import make_folder
from cumulant.core.journal import Journal
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.core.typed import tolist
from cumulant.filtering.filters import filter
from cumulant.filtering.model_files import example_files, read_model
from cumulant.filtering.series import read_series
from cumulant.filtering.smoothing import smooth
from cumulant.filtering.tables import deviations, labels_of, summarize
from cumulant.lab.bench import front
from cumulant.lab.bench.timing import Others, machine
from cumulant.lab.claims.ledger import select, sources
from cumulant.lab.claims.record import FIGURES, keeper
from cumulant.lab.report.page import Parts
from cumulant.lens.examination import Examination
from cumulant.lens.examining import examine
from cumulant.lens.models import DEMO, load
from cumulant.lens.texts import PASSAGE_SOURCE, passage
from cumulant.pages import number

__all__ = ["LOCK", "finish", "gather"]

STATE, LOCK, LEDGER = "report.journal", ".report.lock", "claims"
OPTIONAL = ("matplotlib", "transformers", DEMO, "filterpy", "statsmodels")

Content = dict[str, Any]


def gather(
    folder: Path, *, seed: int, quick: bool, version: str, progress: ProgressCallback
) -> Parts:
    """Run everything the report shows, or resume an interrupted run.

    A part that cannot be made because a package is missing is left out and noted. The caller holds
    the lock.

    Args:
        folder: where the parts are kept.
        seed: of the experiments.
        quick: small experiments, and of the benchmarks those of milliseconds.
        version: of the library.
        progress: called before each piece of work.
    """
    make_folder(folder)
    # What another environment left out is made here.
    there = [name for name in OPTIONAL if find_spec(name) is not None]
    about = {"version": version, "seed": seed, "quick": quick, "packages": there}
    kept = _Kept(folder, {**about, "sources": sources()})
    started, notes = time.monotonic(), list[str]()
    ledger = kept.part("ledger", lambda: _ledger(folder / LEDGER, seed, quick, version, progress))
    figures = _figures(folder / LEDGER, ledger, notes)
    try:
        progress(Progress(0, None, "the lens: loading the model"))
        kept.part("lens", lambda: _lens(folder / "lens", progress))
        lens = Examination.load(folder / "lens").report_data()
    except InputError as error:
        lens = None
        notes.append(f"The lens was skipped: {error}")
    series = kept.part("series", lambda: _series(progress))
    benchmarks = kept.part("benchmarks", lambda: _benchmarks(quick, progress))
    notes += benchmarks["notes"]
    return Parts(
        ledger=ledger,
        figures=figures,
        lens=lens,
        series=series,
        benchmarks=benchmarks,
        run={
            "version": version,
            "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.monotonic() - started),
            "seed": seed,
            "experiments": "small" if quick else "full",
            "benchmarks": "those of the README, on one thread",
            "machine": machine(),
        },
        notes=notes,
    )


def finish(folder: Path) -> None:
    """The report is written: the next run starts over."""
    (folder / STATE).unlink(missing_ok=True)


class _Kept:
    """Finished parts of a run with these settings; those of another are forgotten."""

    def __init__(self, folder: Path, settings: Content) -> None:
        self._journal = Journal(folder / STATE, settings)
        if self._journal.differs:
            self._journal.restart()
        self.parts: dict[str, Any] = dict(self._journal)

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """The part, made if it is not there."""
        if name not in self.parts:
            self.parts[name] = make()
            self._journal.append([name, self.parts[name]])
        return self.parts[name]


def _ledger(
    folder: Path, seed: int, quick: bool, version: str, progress: ProgressCallback
) -> Content:
    """Every claim; the pictures are in files."""
    chosen = select()
    with keeper(chosen, seed=seed, quick=quick, folder=folder, version=version) as keep:
        for _ in keep.run_all(
            progress=lambda now: progress(replace(now, what=f"claims: {now.what}"))
        ):
            pass
        return keep.finish()


def _figures(folder: Path, ledger: Content, notes: list[str]) -> dict[str, str]:
    """The pictures by claim, as SVG."""
    drawn = [row["id"] for row in ledger["claims"] if row["caption"]]
    if not drawn:
        notes.append("The ledger has no figures; they need: pip install '.[plot]'")
    paths = {name: folder / FIGURES / f"{name}.svg" for name in drawn}
    return {name: path.read_text("utf-8") for name, path in paths.items() if path.is_file()}


def _lens(folder: Path, progress: ProgressCallback) -> bool:
    """The lens on the default model and text, in a folder of its own."""
    loaded = load()
    examine(
        loaded.model,
        loaded.tokenizer,
        [passage()],
        name=loaded.name,
        extras="all",
        notes=[*loaded.notes, f"The text is from {PASSAGE_SOURCE}."],
        folder=folder,
        progress=lambda now: progress(replace(now, what="the lens: reading")),
    )
    return True


def _series(progress: ProgressCallback) -> Content:
    """US inflation by GPB2: trend and regimes, given all observations."""
    progress(Progress(0, None, "a series: inflation in two regimes"))
    source, parameters = example_files()
    series, (model, names) = read_series(source), read_model(parameters)
    post = filter(model, series.values)
    later = smooth(model, post)
    labels, (state,) = labels_of(series), names.states
    modes = summarize(model, names.modes, later)
    spread = 1.96 * deviations(later.covariance)[:, 0]
    mean = later.mean[:, 0]
    # The longest episode of the rarer regime, and what the whole comes to.
    rare = min(modes, key=lambda mode: mode.share)
    longest = rare.episodes[0]
    return {
        "title": "US inflation, percent per year",
        "source": "US Bureau of Labor Statistics by way of FRED and statsmodels (public domain)",
        "state": state,
        "dates": labels,
        "observed": [None if x != x else x for x in tolist(series.values[:, 0])],
        "mean": tolist(mean),
        "low": tolist(mean - spread),
        "high": tolist(mean + spread),
        "modes": names.modes,
        "probabilities": tolist(later.mode_probabilities.T),
        "log_likelihood": float(post.log_likelihood),
        "sentences": [
            f"Over {post.steps} quarters, {labels[0]} to {labels[-1]}, the regime is {rare.name} "
            f"{rare.share:.0%} of the time; the longest stretch is {labels[longest.first]} to "
            f"{labels[longest.last]}.",
            "The filter is GPB2, followed by a smoother; the log-likelihood is "
            f"{number(float(post.log_likelihood), 5)}.",
        ],
    }


def _benchmarks(quick: bool, progress: ProgressCallback) -> Content:
    """Ratios of the front page at its shapes, and what kept the machine busy meanwhile."""
    others, notes = Others(), list[str]()
    rows = front.run(
        rounds=3,
        quick=quick,
        progress=lambda now: progress(replace(now, what=f"benchmarks: {now.what}")),
        notes=notes,
    )
    return {
        "machine": machine(threads=1),
        "busy": others.note(),
        "notes": notes,
        "rows": [
            row.as_dict() | line.shown() | {"bench": line.bench, "recorded": line.recorded}
            for line in front.FRONT
            for row in rows
            if line.of(row)
        ],
    }
