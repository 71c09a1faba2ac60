"""Who may ask: the right token, from this machine's own page, in small requests."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

__all__ = ["Guard", "Refused", "headers"]

MOST_BYTES = 64 * 1024

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):  # noqa: N818
    """A request that is answered with a status and one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def headers(policy: str) -> list[tuple[bytes, bytes]]:
    """What every answer carries: a content security policy, and no cache, frame or referrer."""
    found = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
    return [(name.encode(), value.encode()) for name, value in found.items()]


class Guard:
    """Refuse requests before the application sees them.

    A page of another site can make a browser send requests here, and a name can be made to point
    here (DNS rebinding). So the Host must be ours, the Origin too where there is one, and every
    request must carry the token: in the address of the page, in a header of everything else, which
    no other site can set without asking first (and nobody answers that question: no CORS).

    Args:
        application: what is guarded.
        token: the secret in the address.
        hosts: allowed values of the Host header.
        policy: the content security policy of every answer.
    """

    def __init__(self, application: Application, token: str, hosts: set[str], policy: str) -> None:
        self._application, self._token, self._hosts = application, token, hosts
        self._headers = headers(policy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        try:
            self._check(scope)
        except Refused as refused:
            await _answer(refused, sending)
            return
        await self._application(scope, receive, sending)

    def _check(self, scope: Scope) -> None:
        given = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if given.get("host") not in self._hosts:
            raise Refused(421, "this server answers only to its own address.")
        origin = given.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in self._hosts}:
            raise Refused(403, "requests from other sites are refused.")
        if given.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refused(403, "requests from other sites are refused.")
        page = scope["path"] == "/"
        token = _query(scope) if page else given.get("x-cumulant-token", "")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise Refused(403, "the token is missing or wrong: use the address that was printed.")
        if not page and not given.get("content-type", "").startswith("application/json"):
            raise Refused(415, "send JSON.")
        length = given.get("content-length", "0")
        if not page and (not length.isdecimal() or int(length) > MOST_BYTES):
            raise Refused(413, f"a request may have at most {MOST_BYTES} bytes.")


def _query(scope: Scope) -> str:
    """The token in the address of the page."""
    parts = scope["query_string"].decode("latin-1").split("&")
    return next((x.removeprefix("token=") for x in parts if x.startswith("token=")), "")


async def _answer(refused: Refused, send: Send) -> None:
    body = json.dumps({"error": refused.message}).encode()
    kind = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": kind})
    await send({"type": "http.response.body", "body": body})
