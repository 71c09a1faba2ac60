"""`cumulant doctor`: what is installed, and whether derivatives are correct."""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from cumulant import __version__
from cumulant.cli.progress import Shown
from cumulant.core.errors import InputError
from cumulant.core.files import write_file
from cumulant.core.progress import Progress

if TYPE_CHECKING:
    from cumulant.derivatives import DerivativeReport
    from cumulant.derivatives.catalog import Verdict

_STYLES = {"right": "green", "wrong": "bold red", "not supported": "yellow"}


def doctor(
    derivatives: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Check the derivatives of module:function, or of torch's own functions: torch.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of one random input, such as 2,5,8; repeat for more. Without it, function "
            "takes no arguments and returns (f, inputs)."
        ),
    ] = None,
    order: Annotated[int, typer.Option(help="Highest order of derivative, 1 to 4.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time budget per check.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of inputs and directions.")] = 0,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Check the Triton kernels on this GPU, find the fastest tiles, and save both.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With torch: write the table to this Markdown file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, engines and missing extras; check derivatives, or the kernels on this GPU.

    F is forward mode, R is reverse mode; RF is reverse over forward. Exits with 0 if everything is
    right, 1 if a derivative is wrong, not supported or unclear, 2 on bad input. The first self-test
    waits for Triton to compile 192 kernels; later ones take seconds.

    \b
    cumulant doctor                                          versions, engines, extras
    cumulant doctor --self-test                              the Triton kernels on this GPU
    cumulant doctor --derivatives mymodel:loss --shape 2,5,8 a function of one tensor
    cumulant doctor --derivatives mymodel:example            example() returns (f, inputs)
    cumulant doctor --derivatives torch --order 3            torch's norms, losses, layers, ...
    """
    if shape and derivatives in (None, "torch"):
        raise InputError("--shape describes inputs of --derivatives module:function.")
    if output is not None and (derivatives != "torch" or not output.parent.is_dir()):
        raise InputError("--output needs --derivatives torch and an existing folder.")
    if self_test and derivatives is not None:
        raise InputError("--self-test and --derivatives are two commands: run one at a time.")
    if self_test:
        _validate(as_json)
    elif derivatives is None:
        _installation(as_json)
    elif derivatives == "torch":
        _torch(order, seconds, seed, output, as_json)
    else:
        from cumulant.derivatives import check_derivatives

        function, inputs = _target(derivatives, shape or [], seed)
        report = check_derivatives(function, inputs, order=order, seconds=seconds, seed=seed)
        if as_json:
            typer.echo(json.dumps(report.as_dict(), indent=2))
        else:
            _show(report)
        if not report.ok:
            raise typer.Exit(1)


def _extras() -> dict[str, list[str]]:
    """The missing packages of each extra."""
    missing: dict[str, list[str]] = {}
    try:
        requirements = metadata.requires("cumulant") or []
    except metadata.PackageNotFoundError:
        return missing
    for requirement in requirements:
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if match is None or match[1] == "cumulant":
            continue
        absent = missing.setdefault(match[2], [])
        try:
            metadata.version(match[1])
        except metadata.PackageNotFoundError:
            absent.append(match[1])
    return missing


def _installation(as_json: bool) -> None:
    from cumulant.kernels.engines import engines

    versions = {"cumulant": __version__, "python": platform.python_version()}
    versions |= {n: metadata.version(n) for n in ("torch", "numpy", "scipy")}
    extras = _extras()
    found = engines()
    if as_json:
        listed = {name: asdict(status) for name, status in found.items()}
        told = {"versions": versions, "engines": listed, "missing": extras}
        typer.echo(json.dumps(told, indent=2))
        return
    for name, version in versions.items():
        typer.echo(f"{name:<12}{version}")
    for name, status in found.items():
        kind = "" if status.instruction_set is None else f", {status.instruction_set}"
        state = f"runs{kind}: " if status.available else "missing: "
        typer.echo(f"engine {name}".ljust(16) + state + status.why)
    for extra, absent in sorted(extras.items()):
        state = "installed" if not absent else f"missing {', '.join(absent)}"
        hint = "" if not absent else f"  (pip install '.[{extra}]')"
        typer.echo(f"[{extra}]".ljust(12) + state + hint)


def _validate(as_json: bool) -> None:
    """Run the self-test of the GPU engine here, keep its result, say what it means."""
    from cumulant.kernels.engines import engines

    status = engines()["triton"]
    if not status.available:
        raise InputError(
            f"--self-test validates the engine triton, which cannot run: {status.why}."
        )
    import torch

    from cumulant.kernels.triton import recording, tuning, validating  # Triton need not be there

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    with Shown("self-test") as progress:
        record = validating.self_test(device, progress=progress)
    path = recording.keep(record)
    if gpu and record.passed:
        with Shown("timing tiles") as progress:
            record = replace(record, chosen=tuning.tune(device, progress=progress))
        recording.keep(record)
    failed = [c for c in record.checks if not c.passed]
    if as_json:
        told = {**asdict(record), "passed": record.passed, "file": str(path)}
        typer.echo(json.dumps(told, indent=2))
    else:
        for name, value in record.identity.items():
            typer.echo(f"{name:<12}{value}")
        for c in failed:
            typer.echo(f"wrong: {c.name}: error {c.error:.1e}, at most {c.tolerance:.0e}")
        typer.echo(f"{len(record.checks) - len(failed)} of {len(record.checks)} checks passed.")
        verdict = (
            "used by default on this GPU where torch's own attention does not do"
            if gpu
            else "right in Triton's interpreter"
        )
        refused = "used only where cm.engine('triton') asks for it; please report this"
        typer.echo(f"The engine triton is {verdict if record.passed else refused}. Kept in {path}")
    if failed:
        raise typer.Exit(1)


def _target(name: str, shapes: list[str], seed: int) -> tuple[Any, Any]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise InputError(f"--derivatives takes module:function or torch, not {name!r}.")
    sys.path.insert(0, "")  # modules in the current folder, as python -m finds them
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        said = str(error).rstrip(".")
        raise InputError(
            f"--derivatives {name}: {said}. Give module:function, without .py; the module is in "
            "this folder, or installed."
        ) from None
    except Exception as error:  # its own code
        raise InputError(
            f"--derivatives {name}: importing {module_name} failed with "
            f"{type(error).__name__}: {error}."
        ) from None
    finally:
        sys.path.remove("")
    if shapes:
        import torch

        from cumulant.core.typed import functions

        functions.manual_seed(seed)
        return found, tuple(torch.randn(_shape(s), dtype=torch.float64) for s in shapes)
    try:
        made = found()
    except TypeError as error:
        raise InputError(
            f"{name} takes arguments ({error}): give the shapes of its tensors with --shape, or "
            "name a function without arguments that returns (f, inputs)."
        ) from None
    except Exception as error:
        raise InputError(f"{name}() failed with {type(error).__name__}: {error}") from None
    pair = cast(tuple[Any, ...], made) if isinstance(made, tuple) else ()
    if not (len(pair) == 2 and callable(pair[0])):
        kind = type(cast(object, made)).__name__
        raise InputError(f"{name}() must return (f, inputs); it returned {kind}.")
    return pair


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(n) for n in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"--shape takes positive integers such as 2,5,8, not {text!r}.")
    return sizes


def _show(report: DerivativeReport) -> None:
    table = Table("word", "status", caption="outermost mode first: RF is reverse over forward")
    for name in ("torch", "differences", "±"):
        table.add_column(name, justify="right")
    for row in report.rows:
        style = _STYLES.get(row.status, "yellow")
        table.add_row(
            row.word,
            f"[{style}]{row.status}[/{style}]",
            "" if row.value is None else f"{row.value:.9g}",
            "" if row.expected is None else f"{row.expected:.9g}",
            "" if row.error_bar is None else f"{row.error_bar:.1e}",
        )
    Console().print(table)
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        if row.note:
            reasons.setdefault(f"{row.status}: {row.note}", []).append(row.word)
    for reason, words in reasons.items():
        typer.echo(f"{' '.join(words)} {reason}")
    for note in report.notes:
        typer.echo(f"note: {note}")
    for fault in report.faults:
        typer.echo(f"\n{fault}")


def _torch(order: int, seconds: float, seed: int, output: Path | None, as_json: bool) -> None:
    from cumulant.derivatives.catalog import catalog, markdown, sweep

    cases = list(catalog(seed))
    verdicts: list[Verdict] = []
    with Shown("torch") as progress:
        for verdict in sweep(cases, order=order, seconds=seconds):
            verdicts.append(verdict)
            progress(Progress(len(verdicts), len(cases), verdict.name))
    failing = [v for v in verdicts if not v.ok]
    if output is not None:
        command = f"cumulant doctor --derivatives torch --order {order}"
        write_file(output, markdown(verdicts, command))
    if as_json:
        typer.echo(json.dumps([v.as_dict() for v in verdicts], indent=2))
    else:
        table = Table("group", "function", "wrong", "not supported", "not checked")
        for v in failing:
            table.add_row(
                v.group, v.name, *(" ".join(x) for x in (v.wrong, v.not_supported, v.unchecked))
            )
        Console().print(table)
        typer.echo(
            f"{len(verdicts) - len(failing)} of {len(verdicts)} functions right in every word."
        )
    if failing:
        raise typer.Exit(1)
