"""`cumulant lens`: what attention does in a model, as tables and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cumulant.lens.extras import EXTRAS


def lens(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A folder, a .gguf file or a hub name. [default: MiniLM]"
        ),
    ] = None,
    text: Annotated[str | None, typer.Option("--text", "-t", help="Text to examine.")] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A text file or a folder of them; repeatable."),
    ] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="A JSON Lines file, one text per line.")
    ] = None,
    field: Annotated[str, typer.Option(help="The field that holds the text in --jsonl.")] = "text",
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="An image, for a vision model; repeatable."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the tables and the report.")
    ] = Path("cumulant-lens"),
    windows: Annotated[
        bool,
        typer.Option("--windows", help="Split texts longer than the model's context into windows."),
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Maximum number of texts per forward call.")] = 8,
    extras: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="Expensive statistics; repeatable or comma-separated. "
            + " ".join(f"{name}: {cost}." for name, cost in EXTRAS.items())
            + " Or: all.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Compare with an earlier output folder; writes comparison.csv."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what attention does in a model, token by token and head by head.

    Writes report.html (open it in any browser), tables (Parquet) and
    examination.json to the output folder. Without arguments, it examines a small
    installed model on a built-in passage and downloads nothing.

    \b
    cumulant lens                                   the demo model and passage
    cumulant lens --text "To be or not to be"
    cumulant lens --model path/to/model --file essay.txt -o essay/
    cumulant lens --jsonl corpus.jsonl --windows -o corpus/
    cumulant lens --file other.txt -o other/ --against essay/
    cumulant lens --with link,sensitivity
    cumulant lens --model path/to/vit --image cat.jpg -o cat/
    torchrun --nproc-per-node 4 -m cumulant lens --jsonl corpus.jsonl -o corpus/

    To resume an interrupted run, repeat the command. Processes started by
    torchrun share the texts. Columns are defined in examination.json, in the
    report and in docs/lens.md.
    """
    from cumulant.cli.lens_run import run_lens

    run_lens(
        *(model, text, file or (), jsonl, field, image or (), output, windows, batch_size),
        *([name.strip() for given in extras or () for name in given.split(",")], against, as_json),
    )
