"""What `cumulant lens` does: load, examine, write, tell."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from cumulant.cli.progress import Shown
from cumulant.cli.text import as_text
from cumulant.core.errors import GroupError, InputError
from cumulant.core.files import make_folder, whole_file
from cumulant.core.progress import Progress
from cumulant.core.threads import one_thread, threads_that_help
from cumulant.distributed.ranks import Ranks, launched
from cumulant.lens.examination import Examination, compare
from cumulant.lens.examining import examine
from cumulant.lens.extras import chosen
from cumulant.lens.files import plain
from cumulant.lens.images import Vision, load_vision, pictures
from cumulant.lens.models import load, reason_of
from cumulant.lens.partial import ABOUT, unfinished
from cumulant.lens.shards import Shards
from cumulant.lens.texts import PASSAGE_SOURCE, read
from cumulant.lens.typed import view

# Seconds that a process waits for the others: they may be far apart, and a death is noticed at
# once.
PATIENCE = 7 * 86_400.0
CHANGED = 8  # heads that a comparison lists


def run_lens(
    model: str | None,
    text: str | None,
    file: Sequence[Path],
    jsonl: Path | None,
    field: str,
    image: Sequence[Path],
    output: Path,
    windows: bool,
    batch_size: int,
    extras: Sequence[str],
    against: Path | None,
    as_json: bool,
) -> None:
    """Examine, with the options of the command in its order."""
    fresh = not os.path.exists(
        output
    )  # before the processes meet: later, another may have created it
    busy = _is_busy()
    with launched(PATIENCE) as ranks, one_thread(busy):
        if busy and not ranks.rank:
            typer.echo(
                "cumulant: the machine is busy, so one thread works; OMP_NUM_THREADS sets another "
                "number",
                err=True,
            )
        try:
            _lens(
                *(model, text, file, jsonl, field, image, output),
                *(windows, batch_size, extras, against, as_json, fresh, ranks),
            )
        except GroupError:
            if ranks.rank:  # the one that failed says why, and rank 0 repeats it
                raise typer.Exit(1) from None
            raise


def _lens(
    model: str | None,
    text: str | None,
    files: Sequence[Path],
    jsonl: Path | None,
    field: str,
    images: Sequence[Path],
    output: Path,
    windows: bool,
    batch_size: int,
    extras: Sequence[str],
    against: Path | None,
    as_json: bool,
    fresh: bool,
    ranks: Ranks,
) -> None:
    first, shards = ranks.rank == 0, Shards(ranks)
    with shards.together():
        chosen(extras)
        earlier = None if against is None else Examination.load(against)
        if images and (text or files or jsonl):
            raise InputError("--image takes no text: leave out --text, --file and --jsonl.")
        if images:
            next(pictures(images[0]))  # a file that is no image is told before the model is loaded
        texts = () if images else read(text, files, jsonl, field)
        folder = make_folder(output)
        before = _stamp(folder)
    shown = Console(stderr=True, quiet=not first)
    try:
        with Shown("examining", quiet=not first) as progress:
            with shown.status("loading the model"), shards.together():
                loaded = load_vision(model) if images else load(model)
            progress(Progress(0, None, "examining"))
            found = examine(
                loaded.model,
                loaded.processor if isinstance(loaded, Vision) else loaded.tokenizer,
                texts,
                images=list(images) or None,
                name=loaded.name,
                batch_size=batch_size,
                windows=windows,
                extras=extras,
                folder=folder,
                notes=loaded.notes,
                progress=progress,
                group=ranks,
            )
        if not first:
            return
        page = found.report(folder / "report.html")
        differences = None if earlier is None else compare(earlier, found)
        if differences is not None:
            with whole_file(folder / "comparison.csv") as part:
                view(differences).to_csv(part, index=False)
    except KeyboardInterrupt:
        left = _left(folder, fresh and first, before)
        if first:
            typer.echo(f"cumulant: interrupted; {left}", err=True)
        raise typer.Exit(130) from None
    except (InputError, GroupError):
        _left(folder, fresh and first, before)
        raise
    except OSError as error:
        _left(folder, fresh and first, before)
        where, why = error.filename or folder, error.strerror or reason_of(error)
        raise InputError(f"cannot write {where}: {why}.") from None
    whose = None if text or files or jsonl or images else PASSAGE_SOURCE
    if as_json:
        _tell_json(found, page, whose)
        return
    console = Console(highlight=False, emoji=False)
    _tell(console, found, page, whose)
    if before is not None:
        console.print(f"[dim]It replaces an earlier examination in {as_text(folder)}.[/dim]")
    if differences is not None:
        _tell_difference(console, differences, against, folder, _lengths(earlier, found))


def _is_busy() -> bool:
    """Whether other work makes one thread the fastest; not asked if the environment decides."""
    given = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys()
    return not given and torch.get_num_threads() > 1 and threads_that_help() == 1


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Distinguishes one examination in the folder from the next."""
    try:
        found = (folder / ABOUT).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _left(folder: Path, fresh: bool, before: tuple[int, int] | None) -> str:
    """What a stopped run leaves behind: its tables, its finished batches, or nothing."""
    if unfinished(folder):
        return f"finished batches are kept in {folder}; run the same command again to resume"
    if (now := _stamp(folder)) is not None and now != before:
        return f"the tables are in {folder}, but the report is not complete"
    if fresh:
        with suppress(OSError):  # somebody else has written into it
            folder.rmdir()
    return "nothing was written"


def _tell(console: Console, found: Examination, page: Path, whose: str | None) -> None:
    """The findings in sentences, and where everything is."""
    from cumulant.lens.report import findings

    run, facts = found.run, found.facts
    name = as_text(facts["name"])
    console.print(
        f"[bold]{name}[/bold]: {facts['layers']} layers, {facts['heads']} heads; "
        f"{run['tokens']} tokens of {run['texts']} text{'s' * (run['texts'] != 1)} in "
        f"{run['seconds']:.1f} s"
    )
    if whose is not None:
        console.print(f"[dim]{as_text(whose)}[/dim]")
    for finding in findings(found.report_data()):
        headline, sentence = as_text(finding.headline), as_text(finding.sentence)
        console.print(f"\n[bold]{headline}[/bold]\n{sentence}", soft_wrap=False)
    for note in found.notes:
        console.print(f"\n[yellow]{as_text(note)}[/yellow]")
    console.print(f"\nThe report is {as_text(page)}; the tables are next to it.")


def _lengths(*examinations: Examination | None) -> list[float]:
    """The median length of the texts of each."""
    tables: list[Any] = [x.inputs() for x in examinations if x is not None]
    return [float(x["tokens"].median()) for x in tables if len(x)]


def _tell_difference(
    console: Console,
    differences: Any,
    against: Path | None,
    folder: Path,
    lengths: list[float],
) -> None:
    """The heads that changed most, medians over heads, and where the details are."""
    console.print(f"\n[bold]Against {as_text(against)}[/bold]")
    if len(set(lengths)) > 1:
        before, now = lengths
        console.print(
            f"[yellow]The texts differ in length ({before:g} and {now:g} tokens). Most statistics "
            "depend on how many keys a token sees: compare texts of equal length.[/yellow]"
        )
    alike = "p" in differences
    if alike:
        _tell_changed(console, differences)
    else:
        console.print("The models differ in layers or heads, so no single heads are compared.")
    console.print("medians over heads, before and now:")
    for name in ("entropy", "effective_keys", "k90_fraction", "self_mass", "sink_mass"):
        rows = differences[differences["statistic"] == name]
        if len(rows):
            before, after = float(rows["first"].median()), float(rows["second"].median())
            console.print(f"{name:>15}  {before:10.4g}  {after:10.4g}")
    unit = "head" if alike else "quarter of the depth"
    console.print(f"Every statistic of every {unit} is in {as_text(folder / 'comparison.csv')}.")


def _tell_changed(console: Console, differences: Any) -> None:
    """The heads that changed beyond chance, the most certain first."""
    tested = differences.dropna(subset=["p"])
    changed = tested[tested["p"] < 0.05]
    heads, total = (len(x[["layer", "head"]].drop_duplicates()) for x in (changed, tested))
    if not total:
        return
    most = "; those that did most:" if heads else "."
    console.print(f"{heads or 'None'} of {total} heads changed by more than chance{most}")
    for row in changed.drop_duplicates(["layer", "head"]).head(CHANGED).to_dict("records"):
        console.print(
            f"  layer {row['layer']} head {row['head']}: {row['statistic']} "
            f"{row['first']:.3g} → {row['second']:.3g} (chance: ±{row['noise']:.2g})"
        )


def _tell_json(found: Examination, page: Path, whose: str | None) -> None:
    from cumulant.lens.report import findings

    content: dict[str, Any] = {
        "model": found.facts,
        "run": found.run,
        "notes": found.notes,
        "passage": whose,
        "findings": [
            {"headline": x.headline, "sentence": x.sentence, "evidence": x.evidence}
            for x in findings(found.report_data())
        ],
        "report": page,
    }
    typer.echo(json.dumps(plain(content), indent=2, allow_nan=False))
