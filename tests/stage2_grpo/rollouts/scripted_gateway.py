"""A small HTTP server with the rollout API of Agent Lightning's gateway, for fast tests: states, events, proxy.

The real gateway takes seconds to start; the slow tests use it (gateway.py).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.scripted_server import Reply

KEY = "scripted key"
_NEXT = {"queuing": ("running", "failed"), "running": ("succeeded", "failed")}


class ScriptedGateway:
    """The gateway's memory. `model` answers the proxied requests; `refuse` may turn any request into another reply."""

    def __init__(self) -> None:
        self.url = ""
        self.rollouts: dict[str, dict[str, Any]] = {}
        self.events: dict[tuple[str, str], list[dict[str, Any]]] = {}  # by rollout and attempt
        self.model: Callable[[dict[str, Any]], Reply | dict[str, Any]] = lambda request: Reply(503)
        self.refuse: Callable[[str, str], Reply | None] = lambda method, path: None
        self.clock: Callable[[], float] = time.time

    def queue(self, *inputs: Any, timeout_seconds: float = 60) -> list[str]:
        """New rollouts, as the trainer queues them."""
        names = []
        for value in inputs:
            names.append(f"r{len(self.rollouts)}")
            self.rollouts[names[-1]] = {
                "rollout_id": names[-1], "input": value, "is_train": True,
                "config": {"timeout_seconds": timeout_seconds},
                "status": {"state": "queuing", "created_at": self.clock(), "updated_at": self.clock(),
                           "last_attempt_id": None, "error_message": None},
            }  # fmt: skip
        return names

    def states(self) -> list[str]:
        """Of all rollouts, in the order of the queue."""
        return [rollout["status"]["state"] for rollout in self.rollouts.values()]

    def error(self, rollout: str) -> str:
        """Why a rollout failed."""
        return str(self.rollouts[rollout]["status"]["error_message"])

    def rewards(self, rollout: str) -> list[float]:
        """What the trainer would read: the rewards of the rollout's last attempt."""
        return [event["data"]["value"] for event in self.read(rollout) if event["event_type"] == "reward"]

    def read(self, rollout: str) -> list[dict[str, Any]]:
        """The events of the rollout's last attempt."""
        attempt = self.rollouts[rollout]["status"]["last_attempt_id"] or "0"
        return self.events.get((rollout, attempt), [])

    def answer(self, method: str, path: str, query: str, body: Any) -> Reply:
        """One request."""
        if refusal := self.refuse(method, path):
            return refusal
        if method == "GET" and path == "/api/rollouts":
            state, limit = re.findall(r"state_in=(\w+)&limit=(\d+)", query)[0]
            found = [rollout for rollout in self.rollouts.values() if rollout["status"]["state"] == state]
            return Reply(body=found[: int(limit)])
        rollout, rest = re.findall(r"/rollouts?/([^/]+)/?(.*)", path)[0]
        if rollout not in self.rollouts:
            return Reply(404, {"detail": "Rollout not found"})
        if method == "PATCH":
            return self._move(self.rollouts[rollout], body["status"])
        if method == "GET":
            return Reply(body=[event for event in self.read(rollout) if f"event_type={event['event_type']}" in query])
        attempt = rest.split("/")[1]
        return self._proxy(rollout, attempt, body) if "openai" in rest else self._keep(rollout, attempt, body)

    def _move(self, rollout: dict[str, Any], status: dict[str, Any]) -> Reply:
        if "state" in status and status["state"] not in _NEXT.get(rollout["status"]["state"], ()):
            return Reply(409, {"detail": "invalid transition"})
        rollout["status"] |= {**status, "updated_at": self.clock()}
        return Reply(body=rollout)

    def _keep(self, rollout: str, attempt: str, event: dict[str, Any]) -> Reply:
        self.events.setdefault((rollout, attempt), []).append(event)
        return Reply(body=event)

    def _proxy(self, rollout: str, attempt: str, request: dict[str, Any]) -> Reply:
        result = self.model(request)
        reply = result if isinstance(result, Reply) else Reply(body=result)
        data = {"request": request, "response": reply.body, "http_status": reply.status}
        self._keep(rollout, attempt, {"event_type": "model_request", "data": data})
        return reply


@contextmanager
def scripted_gateway() -> Iterator[ScriptedGateway]:
    """Serve a ScriptedGateway on a free port."""
    gateway = ScriptedGateway()

    class Requests(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, _, query = self.path.partition("?")
            allowed = self.headers.get("Authorization") == f"Bearer {KEY}"
            reply = gateway.answer(self.command, path, query, json.loads(body or "null")) if allowed else Reply(401)
            payload = json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(payload))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PATCH = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    server.daemon_threads = True
    gateway.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
