"""`cumulant bench`: ratios against the real alternative, measured in one run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cumulant.cli.progress import Shown
from cumulant.core.errors import InputError
from cumulant.core.files import destination, write_file

if TYPE_CHECKING:
    from cumulant.lab.bench.timing import Row

bench = typer.Typer(
    add_completion=False,
    help="Time Cumulant against the real alternative, interleaved in one run.",
)


@bench.callback(invoke_without_command=True)
def about(context: typer.Context) -> None:
    """Time Cumulant against the real alternative, interleaved in one run."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Rounds = Annotated[int, typer.Option(help="Rounds for short measurements; long ones have fewer.")]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Only quick measurements, to check that it runs; targets are for full runs.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads of torch; default: torch's own number. With one, attention and the lens are "
        "measured in CPU time."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Also write a Markdown table here.")
]


# Name: the page's title and the --help text.
_BENCHES = {
    "front": (
        "What the front page says",
        """The comparisons of the README, at its shapes, on one thread: the fastest of the rounds.

        The report measures the same. About four minutes; --quick takes one.""",
    ),
    "calculus": (
        "What the calculus of attention costs",
        """Attention and its derivatives against torch's attention.

        About five minutes; --quick takes fifteen seconds.""",
    ),
    "measures": (
        "What measures cost",
        """Measures against the kernel, a broadcast torch expression and scipy's optimizers.

        About three minutes and, for the broadcast expression, 13 GB; --quick takes ten seconds.""",
    ),
    "dynamics": (
        "What dynamics cost",
        """Dynamics against torch's attention, a loop over clouds, and plain iteration.

        About two minutes; --quick takes ten seconds.""",
    ),
    "memory": (
        "What retrieval costs",
        """Retrieval against torch's attention and a Hopfield layer in plain torch.

        About four minutes; --quick takes ten seconds.""",
    ),
    "contrastive": (
        "What the contrastive loss costs",
        """The contrastive loss against cross-entropy on the full matrix.

        About ten minutes and, for the full matrix, 6 GB; --quick takes ten seconds.""",
    ),
    "vocabulary": (
        "What the vocabulary loss costs, on one thread",
        """The vocabulary loss against the whole logits and torch's chunks, on one thread.

        About three minutes and 2 GB; --quick takes ten seconds. Needs torch 2.13.""",
    ),
    "distributed": (
        "What sharded keys cost",
        """Sharded keys: a group of one, bytes sent against the formula, times at 1 to 4 ranks.

        Starts its own processes, if possible in a network namespace, to count the bytes on the wire
        and throttle it. About two minutes; --quick takes twenty seconds.""",
    ),
    "filtering": (
        "What filters cost",
        """Filters against filterpy's IMM, fitting against statsmodels.

        Needs filterpy and statsmodels. About three minutes; --quick takes half a minute.""",
    ),
    "study": (
        "What training costs",
        """A training step of our transformer against the same model on torch's attention.

        Times other kernels too. About a minute; --quick takes ten seconds.""",
    ),
    "lens": (
        "What the lens costs",
        """The lens against a model's forward pass and against eager attention with its weights.

        Needs the extras lens and demo. About five minutes; --quick takes half a minute.""",
    ),
}


def _command(name: str, title: str) -> Callable[..., None]:
    def command(
        rounds: Rounds = 7,
        quick: Quick = False,
        threads: Threads = None,
        as_json: AsJson = False,
        output: Output = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise InputError(f"--threads must be at least 1, not {threads}.")
        import torch

        before = torch.get_num_threads()
        module = import_module(f"cumulant.lab.bench.{name}")
        fixed = getattr(module, "THREADS", None)
        if fixed is not None and threads not in (None, fixed):
            raise InputError(f"bench {name} measures on one thread; leave out --threads {threads}.")
        torch.set_num_threads(fixed or threads or before)
        options = " --quick" * quick + (f" --threads {threads}" if threads else "")
        try:
            told = (f"cumulant bench {name}{options}", title)
            how = getattr(module, "HOW", None)
            _measure(*told, module.run, rounds, quick, as_json, output, how)
        finally:
            torch.set_num_threads(before)

    return command


@bench.command("calculus", help=_BENCHES["calculus"][1])
def calculus(
    rounds: Rounds = 7,
    quick: Quick = False,
    threads: Threads = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda: the Triton engine on this GPU, measured beside what the cost model expects."
        ),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Attention and its derivatives, on the CPU or a GPU."""
    title = _BENCHES["calculus"][0]
    if device is None or device == "cpu":
        _command("calculus", title)(rounds, quick, threads, as_json, output)
        return
    run = partial(import_module("cumulant.lab.bench.gpu").measure, device=device)
    command = f"cumulant bench calculus --device {device}" + " --quick" * quick
    _measure(command, f"{title} on a GPU", run, rounds, quick, as_json, output)


for _name, (_title, _help) in _BENCHES.items():
    if _name != "calculus":
        bench.command(_name, help=_help)(_command(_name, _title))


@bench.command("gpu")
def gpu(
    target: Annotated[
        list[str] | None,
        typer.Option(help="cuda:80, cuda:90 or hip:gfx942; repeat for more. Default: all."),
    ] = None,
    width: Annotated[
        list[int] | None,
        typer.Option(help="Head dimension, 32, 64, 128 or 256; repeat for more. Default: all."),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Compile every Triton kernel in every tile of the table, without a GPU; expected costs.

    Exits with 1 if a kernel spills registers or needs more shared memory than the GPU has. All of
    it takes about half an hour on an idle core; an interrupted run resumes, since Triton keeps what
    it compiled.
    """
    if importlib.util.find_spec("triton") is None:
        raise InputError("cumulant bench gpu compiles with Triton: pip install triton.")
    if output is not None:
        destination(output)
    page = import_module("cumulant.lab.bench.gpu_page")
    with Shown("compiling") as progress:
        rows = page.compile_all(target, width, progress=progress)
    if output is not None:
        options = {"target": target, "width": width}
        given = [f" --{name} {x}" for name, xs in options.items() for x in xs or ()]
        write_file(output, page.markdown(rows, f"cumulant bench gpu{''.join(given)} -o {output}"))
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        typer.echo(page.summary(rows))
    if not all(row.fits for row in rows):
        raise typer.Exit(1)


def _measure(
    command: str,
    title: str,
    run: Callable[..., list[Row]],
    rounds: int,
    quick: bool,
    as_json: bool,
    output: Path | None,
    how: str | None = None,
) -> None:
    """Check, measure with a progress bar, print or write."""
    if rounds < 1:
        raise InputError(f"--rounds must be at least 1, not {rounds}.")
    if output is not None:
        destination(output)  # before the work, not after it
    from cumulant.lab.bench.timing import MEDIANS, load, machine, markdown

    busy = load()
    with Shown("measuring") as progress:
        try:
            rows = run(rounds=rounds, quick=quick, progress=progress)
        except KeyboardInterrupt:
            typer.echo("cumulant: interrupted; nothing was written", err=True)
            raise typer.Exit(130) from None
    if output is not None:
        write_file(output, markdown(title, command, rows, not quick, busy, how or MEDIANS))
    if as_json:
        report = {"machine": machine(), "load": busy, "rows": [r.as_dict() for r in rows]}
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(rows, aims=not quick, busy=busy)


def _show(rows: list[Row], aims: bool, busy: str) -> None:
    from cumulant.lab.bench.timing import aim, machine, short

    table = Table(title="Ratios (lower is better)", caption=f"{machine()}, {busy}")
    for name in ("shape", "quantity", "against"):
        table.add_column(name)
    for name in ("ours", "theirs", "ratio", "aim"):
        table.add_column(name, justify="right")
    for r in rows:
        style = "green" if r.met or not aims else "yellow"
        table.add_row(
            r.shape,
            r.quantity,
            r.against,
            f"{r.amount:.1f} {r.unit}",
            f"{r.baseline:.1f} {r.unit}",
            f"[{style}]{short(r.ratio)}[/{style}]",
            aim(r, aims),
        )
    Console().print(table)
