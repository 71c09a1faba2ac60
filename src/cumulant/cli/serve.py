"""`cumulant serve`: your own text, live in the browser."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import webbrowser
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from cumulant.core.errors import InputError

PORT = 8642
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A folder, a .gguf file, a hub name or smollm2; repeat it to compare models. "
            "[default: MiniLM]",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes any that is free.")
    ] = PORT,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Anything but loopback is open to the network."),
    ] = "127.0.0.1",
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
    fresh: Annotated[
        bool,
        typer.Option("--new-token", help="Make a new token; earlier addresses stop working."),
    ] = False,
) -> None:
    """Show what attention does with your own text, live in the browser.

    Type a text and see entropy, G, received mass and more on its tokens, head by
    head; change a head's temperature, leave out a layer, swap a word, and see
    what changes. Nothing leaves this machine.

    \b
    cumulant serve                       MiniLM, and the browser opens
    cumulant serve -m smollm2            a decoder: also the next-token distribution
    cumulant serve -m ./a -m ./b         two models side by side
    cumulant serve --port 0 --no-browser prints the address only

    The address holds a token that only you should know. It stays the same until
    --new-token, so saved links work after a restart on the same port.
    """
    for package in ("starlette", "uvicorn", "jinja2"):
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise InputError(f"serve needs {package}: pip install '.[serve]'.") from None
    listening = _listen(host, port)
    if host not in LOOPBACK:
        typer.echo(
            f"cumulant: warning: {host} is open to the network; whoever learns the address can "
            "read what you type and use your processor. The connection is not encrypted.",
            err=True,
        )
    own, number = listening.getsockname()[:2]
    token = _token(fresh)
    name = f"[{own}]" if ":" in own else own
    hosts = {f"{x}:{number}" for x in ("127.0.0.1", "localhost", "[::1]", name, host)}
    address = f"http://{name if host != 'localhost' else 'localhost'}:{number}/?token={token}"
    typer.echo(address)
    _run(model or [None], listening, token, hosts, address if browser else None)


def _listen(host: str, port: int) -> socket.socket:
    try:
        (kind, *_, where) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(kind, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
    except OSError as error:
        taken = port and not isinstance(error, socket.gaierror)
        hint = " Try --port 0." if taken else ""
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}.{hint}") from None
    listening.listen(128)
    return listening


def _token(fresh: bool) -> str:
    """The token of this user: kept in a file that only they can read."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(base, "cumulant", "serve-token")
    try:
        if not fresh and path.exists():
            known = path.read_text(encoding="ascii").strip()
            if len(known) >= 32 and known.isalnum() and not path.stat().st_mode & 0o077:
                return known
        token = secrets.token_hex(24)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        return token
    except OSError:
        return secrets.token_hex(24)  # nowhere to keep it: this run only


def _run(
    names: list[Any], listening: socket.socket, token: str, hosts: set[str], address: str | None
) -> None:
    from rich.console import Console

    from cumulant.lens.models import load
    from cumulant.serve.application import application
    from cumulant.serve.models import Models

    shown = Console(stderr=True)
    with shown.status("loading"):
        models = Models([load(name) for name in names])
    uvicorn: Any = import_module("uvicorn")
    app = application(models, token=token, hosts=hosts)
    config = uvicorn.Config(app, log_level="warning", server_header=False, date_header=False)
    if address is not None:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    typer.echo("cumulant: serving; Ctrl-C stops", err=True)
    uvicorn.Server(config).run(sockets=[listening])
