"""`python run_pipeline.py serve --database shop.sqlite`: the trained agent for browsers, programs and other assistants.

    GET  /                      one page without external files: ask, watch the turns, rows as table, CSV and chart
    POST /api/ask               {"question": …} → server-sent events: `message` for each message, then `answer`
    POST /v1/chat/completions   OpenAI-compatible, streaming too; the question is the last user message
    GET  /v1/models             likewise
    POST /mcp                   the tools as an MCP server (streamable HTTP, stateless)

Each question is an episode of its own, with own tools and sandbox limits; nothing is kept between questions. What
stands before every request is in guard.py.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from pydantic import BaseModel, Field
from starlette.routing import Route

from shared.errors import UserError
from shared.evaluation.run import Endpoint
from shared.processes.owned_process import random_key
from shared.records import Message, StopReason
from shared.serving.answering import MOST_AT_ONCE, Agent, Answer, Busy, chosen, describe, serving
from shared.serving.guard import MAX_BODY_BYTES, Guard, PatientProtocol, error_body
from shared.serving.mcp_server import mcp_server, serve_stdio

KEY = "FIRSTCALL_SERVE_KEY"  # environment variable with a key that stays the same from start to start
MODEL = "firstcall"
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_END_SECONDS = 10  # that running questions may take when the server is to end
_Text = Field(min_length=1, pattern=r"\S")


class Asked(BaseModel):
    """A question of the page."""

    question: str = _Text


class ChatMessage(BaseModel):
    """A message of a chat; parts other than text are passed over."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(BaseModel):
    """What counts of a chat completion request; sampling is the server's."""

    messages: list[ChatMessage]
    stream: bool = False

    def question(self) -> str:
        """The text of the last user message, "" if there is none."""
        content = next((each.content for each in reversed(self.messages) if each.role == "user"), None) or ""
        if isinstance(content, str):
            return content.strip()
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text").strip()


def serve(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    config, subject, database = chosen(args)
    if args.dry_run:
        print(describe(config, subject, database))
        return
    if args.stdio:
        nobody = subject if isinstance(subject, Endpoint) else Endpoint("", subject)
        agent = Agent(config, nobody, database)  # whose model is never asked
        asyncio.run(serve_stdio(mcp_server(config.agent, agent.toolbox)))
        return
    key = "" if args.no_key else os.environ.get(KEY) or random_key()
    with _socket(args.port) as listener, serving(subject, config, announce=True) as endpoint:
        port = listener.getsockname()[1]
        app = guarded_app(Agent(config, endpoint, database), port, key)
        address = f"http://127.0.0.1:{port}/" + (f"#key={key}" if key and KEY not in os.environ else "")
        print(f"{describe(config, subject, database)}\nopen {address} (also /v1 for OpenAI clients, /mcp)", flush=True)
        uvicorn.Server(server_settings(app)).run(sockets=[listener])


def server_settings(app: Any) -> uvicorn.Config:
    """uvicorn without access log (questions stay private), with an end in time."""
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_END_SECONDS,
        limit_concurrency=1000,
        h11_max_incomplete_event_size=16 * 1024,
    )


def _socket(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise UserError(f"Port {port} of 127.0.0.1 cannot be used ({error}); give another one with --port.") from error
    return listener


def policy(page: str) -> str:
    """The page's Content-Security-Policy: its own script and style by their hashes, and nothing else."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag in ("script", "style")
        for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    }
    sources = "; ".join(f"{tag}-src 'sha256-{value}'" for tag, value in hashes.items())
    nothing = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {sources}; connect-src 'self'; {nothing}"


def guarded_app(agent: Agent, port: int, key: str) -> Guard:
    """The whole application behind its guard."""
    return Guard(make_app(agent), port=port, key=key, policy=policy(PAGE))


def make_app(agent: Agent) -> FastAPI:
    """The routes."""
    tools = mcp_server(agent.config.agent, agent.toolbox, agent.place)
    sessions = StreamableHTTPSessionManager(
        tools, json_response=True, stateless=True, max_request_body_size=MAX_BODY_BYTES
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # A slow query holds one thread, so there are as many as places.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_AT_ONCE))
        async with sessions.run():
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.routes.append(Route("/mcp", StreamableHTTPASGIApp(sessions), methods=None))

    @app.exception_handler(Busy)
    async def busy(request: Request, error: Busy) -> JSONResponse:
        body = error_body("Too many questions at once; ask again in a moment.", "rate_limit_error")
        return JSONResponse(body, 429, {"Retry-After": "2"})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:])) or "the body"
        return JSONResponse(error_body(f"{where}: {first['msg']}."), 400)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        row = {"id": MODEL, "object": "model", "created": 0, "owned_by": agent.database.path.name}
        return {"object": "list", "data": [row]}

    @app.post("/api/ask")
    async def ask(asked: Asked) -> StreamingResponse:
        return StreamingResponse(await _started(_page_events(agent, asked.question)), media_type="text/event-stream")

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: ChatRequest) -> StreamingResponse | JSONResponse:
        question = request.question()
        if not question:
            return JSONResponse(error_body("messages: there is no user message with text."), 400)
        if request.stream:
            return StreamingResponse(await _started(_chat_chunks(agent, question)), media_type="text/event-stream")
        with agent.place():
            answer = await agent.answer(question)
        if answer.stop == StopReason.INFRASTRUCTURE:
            return JSONResponse(error_body(answer.problem, "server_error"), 502)
        return JSONResponse(_completion(answer))

    return app


async def _started(events: AsyncGenerator[str]) -> AsyncIterator[str]:
    """The events, begun before the response: what is refused is then refused with its own status."""
    first = await anext(events)

    async def all_events() -> AsyncIterator[str]:
        async with contextlib.aclosing(events):
            yield first
            async for event in events:
                yield event

    return all_events()


async def _steps(agent: Agent, question: str) -> AsyncGenerator[Message | Answer | None]:
    """None at once, then the messages of the episode as they come about, then the answer. Raises Busy."""
    with agent.place():
        waiting = asyncio.Queue[Message | Answer]()
        yield None
        task = asyncio.create_task(agent.answer(question, waiting.put_nowait))
        try:
            while not task.done() or not waiting.empty():
                step = asyncio.create_task(waiting.get())
                await asyncio.wait({task, step}, return_when=asyncio.FIRST_COMPLETED)
                if step.done():
                    yield step.result()
                else:
                    step.cancel()
            yield task.result()
        finally:
            task.cancel()


async def _page_events(agent: Agent, question: str) -> AsyncGenerator[str]:
    async with contextlib.aclosing(_steps(agent, question)) as steps:
        async for step in steps:
            if step is None:
                yield ": asked\n\n"
            elif isinstance(step, Answer):
                yield _event(dataclasses.asdict(step), "answer")
            else:
                yield _event(step, "message")


async def _chat_chunks(agent: Agent, question: str) -> AsyncGenerator[str]:
    """Steps as `reasoning_content`, which clients show apart or pass over, then the answer as `content`."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _event({**head, "object": "chat.completion.chunk", "choices": [choice]})

    head = _head()
    async with contextlib.aclosing(_steps(agent, question)) as steps:
        async for step in steps:
            if step is None:
                yield chunk({"role": "assistant", "content": ""})
            elif not isinstance(step, Answer):
                calls = [
                    f"{call['function']['name']}({call['function']['arguments']})"
                    for call in step.get("tool_calls", ())
                ]
                if calls or step["role"] == "tool":
                    yield chunk({"reasoning_content": "\n".join([*calls, step["content"]]).strip() + "\n"})
            elif step.stop == StopReason.INFRASTRUCTURE:
                yield _event(error_body(step.problem, "server_error"))
            else:
                yield chunk({"content": _content(step)})
                yield chunk({}, "stop")
    yield "data: [DONE]\n\n"


def _completion(answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": _content(answer)}
    usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    usage["total_tokens"] = sum(usage.values())
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {**_head(), "object": "chat.completion", "choices": [choice], "usage": usage}


def _head() -> dict[str, Any]:
    return {"id": f"chatcmpl-{random_key()}", "created": int(time.time()), "model": MODEL}


def _content(answer: Answer) -> str:
    """The answer and the SQL behind it."""
    written = f"```sql\n{answer.sql}\n```" if answer.sql and "```" not in answer.text else ""
    return "\n\n".join(filter(None, (answer.text, answer.problem, written)))


def _event(data: Any, name: str = "") -> str:
    """A server-sent event in ASCII: JSON escapes every line break, also those that only some clients know."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"
