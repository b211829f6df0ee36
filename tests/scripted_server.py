"""A real HTTP chat server whose answers a test scripts.

    with scripted_server(lambda request: answer("Seven.")) as base_url:
        ...

The handler gets the decoded request body and returns a response body, or a `Reply` for another status. It runs in the
server's threads, one per connection. `ScriptedModel` is a handler that behaves like vLLM with a given model output:
chat template, token ids, tool parser.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shared.models.tokenizer import Tokenizer
from shared.records import ToolCall
from shared.tool_calls import Parsed, parse_hermes
from tests.shared.chatml import render

MODEL = "scripted"


@dataclass(frozen=True)
class Reply:
    """An HTTP response; `body` None closes the connection without any."""

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[dict[str, Any]], "Reply | dict[str, Any]"]


@contextmanager
def scripted_server(handler: Handler, path: str = "/v1") -> Iterator[str]:
    """Serve POST {path}/chat/completions and GET {path}/models on a free port; yields the base URL."""
    server = _Server(("127.0.0.1", 0), _Requests)
    server.handler, server.path = handler, path
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{path}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(content: str | None = "", calls: Sequence[ToolCall] = (), **extra: Any) -> dict[str, Any]:
    """A chat completion. `extra` replaces or adds choice fields; `usage`, `prompt_token_ids` go to the top level."""
    tool_calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for i, call in enumerate(calls)
    ]
    top = {key: extra.pop(key) for key in ("usage", "prompt_token_ids") if key in extra}
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop", **extra}
    return {
        "object": "chat.completion",
        "choices": [choice],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5},
        **top,
    }


class ScriptedModel:
    """Answers turn after turn with the given texts, the last one again and again; keeps the request bodies."""

    def __init__(
        self, tokenizer: Tokenizer, *texts: str, parser: Callable[[str], Parsed] = parse_hermes, ids: bool = True
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._parser = parser
        self._ids = ids

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        text = self._texts[min(len(self.requests), len(self._texts) - 1)]
        self.requests.append(request)
        prompt = self._tokenizer.encode(render(request["messages"], request.get("tools"), prompt=True))
        tokens = self._tokenizer.encode(text + "<|im_end|>")
        limit = request["max_tokens"]
        cut = len(tokens) > limit
        if cut:
            tokens = tokens[:limit]
            text = self._tokenizer.decode(tokens)
        parsed = self._parser(text)
        ids = {"prompt_token_ids": prompt, "token_ids": tokens} if self._ids else {}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        reason = "tool_calls" if parsed.calls else "length" if cut else "stop"
        return answer(parsed.content, parsed.calls, finish_reason=reason, usage=usage, **ids)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    handler: Handler
    path: str


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet per answer; several wait for the client's delayed acknowledgement
    server: _Server

    def do_GET(self) -> None:
        found = self.path == f"{self.server.path}/models"
        self._send(Reply(body={"data": [{"id": MODEL}]}) if found else Reply(404, {"detail": "Not Found"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != f"{self.server.path}/chat/completions":
            return self._send(Reply(404, {"detail": "Not Found"}))
        result = self.server.handler(body)
        return self._send(result if isinstance(result, Reply) else Reply(body=result))

    def _send(self, reply: Reply) -> None:
        if reply.body is None:
            self.close_connection = True
            return
        payload = reply.body.encode() if isinstance(reply.body, str) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
