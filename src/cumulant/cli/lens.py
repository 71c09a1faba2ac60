"""`cumulant lens`: what attention does in a model, as tables and one page."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cumulant.cli.progress import progress_bar
from cumulant.errors import InputError
from cumulant.lens.examination import Examination, compare
from cumulant.lens.examining import Progress, examine
from cumulant.lens.files import PARTIAL, make_folder, plain
from cumulant.lens.models import load
from cumulant.lens.texts import PASSAGE_SOURCE, read


def lens(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A folder, a .gguf file or a name on the hub; MiniLM if left out."
        ),
    ] = None,
    text: Annotated[str | None, typer.Option("--text", "-t", help="The text itself.")] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A text file, or a folder of them; may be repeated."),
    ] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="A file with one JSON object per line.")
    ] = None,
    field: Annotated[str, typer.Option(help="The field of these objects with the text.")] = "text",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for tables and report.")
    ] = Path("cumulant-lens"),
    windows: Annotated[
        bool,
        typer.Option("--windows", help="Cut texts that are too long for the model into pieces."),
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Texts in one forward call, at most.")] = 8,
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier output folder to compare with; writes comparison.csv."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """See what attention does in a model, token by token and head by head.

    Writes report.html (one page; open it in any browser), tables (Parquet) and
    examination.json into the output folder. Without arguments a small model and
    a passage that come along are examined; nothing is fetched.

    \b
    cumulant lens                                   the demo model and passage
    cumulant lens --text "To be or not to be"
    cumulant lens --model path/to/model --file essay.txt -o essay/
    cumulant lens --jsonl corpus.jsonl --windows -o corpus/
    cumulant lens --file other.txt -o other/ --against essay/

    An interrupted run goes on where it stopped if the same command is given
    again. Columns are defined in examination.json, in the report and in
    docs/lens.md.
    """
    fresh = not output.exists()
    earlier = None if against is None else Examination.load(against)
    texts = read(text, file or (), jsonl, field)
    folder = make_folder(output)
    shown = Console(stderr=True)
    try:
        with shown.status("loading the model"):
            loaded = load(model)
        with progress_bar() as progress:
            task = progress.add_task("examining", total=None)
            started = time.monotonic()

            def tick(now: Progress) -> None:
                speed = now.done / max(1e-9, time.monotonic() - started)
                label = f"{now.done} texts ({speed:.1f} a second)"
                progress.update(task, description=label, completed=now.done, total=now.total)

            found = examine(
                loaded.model,
                loaded.tokenizer,
                texts,
                name=loaded.name,
                batch_size=batch_size,
                windows=windows,
                folder=folder,
                notes=loaded.notes,
                progress=tick,
            )
        page = found.report(folder / "report.html")
        if earlier is not None:
            compare(earlier, found).to_csv(folder / "comparison.csv", index=False)
    except KeyboardInterrupt:
        typer.echo(f"cumulant: interrupted; {_left(folder, fresh)}", err=True)
        raise typer.Exit(130) from None
    except InputError:
        _left(folder, fresh)
        raise
    except OSError as error:
        where = error.filename or folder
        raise InputError(f"cannot write {where}: {error.strerror or error}.") from None
    whose = None if text or file or jsonl else PASSAGE_SOURCE
    (_tell_json if as_json else _tell)(found, page, whose)


def _left(folder: Path, fresh: bool) -> str:
    """What an unfinished run leaves behind: its finished batches, or nothing at all."""
    if (folder / PARTIAL / "state.pt").exists():
        return f"what was finished is kept in {folder}; give the same command again to go on"
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    if fresh:
        try:
            folder.rmdir()
        except OSError:
            return "nothing was written"
    return "nothing was written"


def _tell(found: Examination, page: Path, whose: str | None) -> None:
    """The findings in sentences, and where everything is."""
    from cumulant.lens.report import findings

    run, facts = found.run, found.facts
    console = Console(highlight=False)
    console.print(
        f"[bold]{facts['name']}[/bold]: {facts['layers']} layers, {facts['heads']} heads; "
        f"{run['tokens']} tokens of {run['texts']} text{'s' * (run['texts'] != 1)} in "
        f"{run['seconds']:.1f} s"
    )
    if whose is not None:
        console.print(f"[dim]{whose}[/dim]")
    for finding in findings(found.report_data()):
        console.print(f"\n[bold]{finding.headline}[/bold]\n{finding.sentence}", soft_wrap=False)
    for note in found.notes:
        console.print(f"\n[yellow]{note}[/yellow]")
    console.print(f"\nThe report is {page}; tables are beside it.")


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
