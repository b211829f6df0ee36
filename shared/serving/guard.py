"""What stands before every request of the server: who may ask, how much, and how slowly.

The server listens on 127.0.0.1, where every web page that the user has open can send requests, too. So the Host must
be ours (no DNS rebinding), an Origin must be ours (no request from another site), and all but the bare page needs
the key in a header, which no other site can send. Bodies are small and must arrive in time; answers must be taken in
time.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BODY_BYTES = 64 * 1024
BODY_SECONDS = 10.0  # for the whole body
HEADER_SECONDS = 10.0  # for the headers of a request, and for the next request on an open connection
SEND_SECONDS = 30.0  # for a client to take one piece of an answer
OPEN_PATHS = ("/",)  # the page itself, which holds nothing
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(Exception):
    """A request that is not served: HTTP status and one sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Guard:
    """ASGI middleware. `key` "" means that none is required; `policy` is the Content-Security-Policy."""

    def __init__(self, app: ASGIApp, *, port: int, key: str, policy: str) -> None:
        self.app, self._key, self._policy = app, key, policy
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update({**_HEADERS, "Content-Security-Policy": self._policy})
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            self._check(scope)
            await self.app(scope, await _whole_body(scope, receive), guarded)
        except Refused as refusal:
            await _refuse(guarded, refusal)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[host] for host in self._hosts]:
            raise Refused(421, "The Host is not this server; ask for http://127.0.0.1 with its port.")
        if any(origin not in self._origins for origin in headers.getlist("origin")):
            raise Refused(403, "Requests from other web sites are refused.")
        if not self._key or scope["path"] in OPEN_PATHS:
            return
        given = headers.getlist("authorization")
        expected = f"Bearer {self._key}".encode()
        if len(given) != 1 or not secrets.compare_digest(given[0].encode("latin-1"), expected):
            raise Refused(401, "The key is missing or wrong; send it as `Authorization: Bearer KEY`.")


async def _whole_body(scope: Scope, receive: Receive) -> Receive:
    """Read the body, bounded in size and time; returns a `receive` that gives it, then waits for the disconnect."""
    length = Headers(scope=scope).get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise Refused(413, f"The request is larger than {MAX_BODY_BYTES} bytes.")
    body, more = b"", True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "The request ended early.")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MAX_BODY_BYTES:
                    raise Refused(413, f"The request is larger than {MAX_BODY_BYTES} bytes.")
    except TimeoutError:
        raise Refused(408, f"The request did not arrive within {BODY_SECONDS:g} s.") from None
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Send, refusal: Refused) -> None:
    """Answer in the form of OpenAI's errors and close the connection."""
    body = json.dumps(error_body(refusal.reason)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(reason: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error as OpenAI's API writes it."""
    return {"error": {"message": reason, "type": kind, "param": None, "code": None}}


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol, which also ends connections whose headers do not arrive in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._end_if_idle, False)

    def _end_if_idle(self, was_idle: bool) -> None:
        """Close a connection that had no request at two checks in a row."""
        if self.transport.is_closing():
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and was_idle:
            self.transport.close()
        else:
            self.loop.call_later(HEADER_SECONDS / 2, self._end_if_idle, idle)
