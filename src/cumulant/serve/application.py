"""The web application: one page, and questions that it asks in JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from cumulant.core.errors import InputError
from cumulant.pages import assemble
from cumulant.serve.guarding import Application, Guard, Refused
from cumulant.serve.models import MOST_CHARACTERS, Models
from cumulant.serve.running import Cancelled
from cumulant.serve.views import STATISTICS

__all__ = ["application", "page"]

WAITING = 16  # requests that may wait while one computes
POLL = 0.05  # seconds between two looks whether the visitor is still there
SCRIPTS = (
    *("base.js", "plot.js", "state.js", "asking.js", "tokens.js", "map.js", "head.js"),
    *("changes.js", "depth.js", "main.js"),
)

_log = logging.getLogger(__name__)


def page(models: Models) -> str:
    """The page, with what it needs to know before it asks anything."""
    data = {
        "live": True,
        "models": models.about(),
        "statistics": [
            {"column": name, "label": label, "kind": kind}
            for name, (label, kind) in STATISTICS.items()
        ],
        "most_characters": MOST_CHARACTERS,
    }
    packages = ("cumulant.pages", "cumulant.serve.page")
    values = {"connect": "'self'", "models": data["models"]}
    return assemble(packages, scripts=SCRIPTS, data=data, values=values)


def application(models: Models, *, token: str, hosts: set[str]) -> Application:
    """The application as ASGI; `hosts` are the Host headers it answers to.

    Questions are POST requests with JSON: ``view``, ``head``, ``depth`` and ``tangent`` of `Models`
    under ``/api/``. Errors are ``{"error": sentence}``.
    """
    starlette: Any = import_module("starlette.applications")
    routing: Any = import_module("starlette.routing")
    responses: Any = import_module("starlette.responses")
    shown = page(models)
    worker = _Worker()
    questions = {name: getattr(models, name) for name in ("view", "head", "depth", "tangent")}

    async def front(request: Any) -> Any:
        return responses.HTMLResponse(shown)

    async def ask(request: Any) -> Any:
        question = questions.get(request.path_params["question"])
        try:
            if question is None:
                raise Refused(404, f"questions are {', '.join(questions)}.")
            given = _object(await request.body())
            found = await worker.answer(lambda stop: question(given, stop), request.is_disconnected)
        except InputError as error:
            return responses.JSONResponse({"error": str(error)}, status_code=422)
        except Refused as refused:
            return responses.JSONResponse({"error": refused.message}, status_code=refused.status)
        except Cancelled:
            return responses.Response(status_code=499)
        except Exception:
            _log.exception("a question failed")
            message = "something went wrong while computing; the terminal has the details."
            return responses.JSONResponse({"error": message}, status_code=500)
        return responses.Response(found, media_type="application/json")

    routes = [
        routing.Route("/", front, methods=["GET"]),
        routing.Route("/api/{question}", ask, methods=["POST"]),
    ]
    whole = starlette.Starlette(routes=routes, lifespan=worker.lifespan)
    match = re.search(r"script-src ('sha256-[^']+')", shown)
    script = "'none'" if match is None else match[1]
    policy = (
        f"default-src 'none'; script-src {script}; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Guard(whole, token, hosts, policy)


def _object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the request is not JSON.") from None
    if not isinstance(given, dict):
        raise Refused(400, "the request must be a JSON object.")
    return given  # pyright: ignore[reportUnknownVariableType]


class _Worker:
    """One thread that computes, a bounded line before it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cumulant-serve")
        self._inside = 0

    def lifespan(self, _: Any) -> Any:
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def life():  # pyright: ignore[reportUnknownParameterType]
            yield
            self._pool.shutdown(wait=False, cancel_futures=True)

        return life()  # pyright: ignore[reportUnknownVariableType]

    async def answer(self, question: Callable[[threading.Event], Any], gone: Any) -> bytes:
        """The answer as JSON; computing stops when whoever asked is gone."""
        if self._inside > WAITING:
            raise Refused(503, f"{WAITING} requests are waiting already; try again in a moment.")
        stop = threading.Event()

        def work() -> bytes:
            if stop.is_set():
                raise Cancelled
            return json.dumps(question(stop), allow_nan=False).encode()

        self._inside += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, work)
            while not future.done():
                await asyncio.wait({future}, timeout=POLL)
                if not future.done() and await gone():
                    stop.set()
            return await future
        finally:
            self._inside -= 1
