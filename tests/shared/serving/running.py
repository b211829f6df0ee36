"""The real server in a thread of this process, before a scripted model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from shared.config.load import load_config
from shared.evaluation.run import Endpoint
from shared.records import ToolCall
from shared.serving.answering import Agent
from shared.serving.server import guarded_app, server_settings
from shared.sql.database import Database
from tests.scripted_server import answer, scripted_server
from tests.shared.examples import insurance_file, tokenizer_folder

KEY = "the-key"
ROOT = Path(__file__).resolve().parents[3]
Handler = Callable[[dict[str, Any]], Any]


def says_sql(sql: str, final: str = "Done.") -> Handler:
    """A model that runs one query, then answers."""

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        return (
            answer(final)
            if request["messages"][-1]["role"] == "tool"
            else answer(calls=[ToolCall("execute_sql", {"sql": sql})])
        )

    return handle


def echo(request: dict[str, Any]) -> dict[str, Any]:
    """A model that selects the question as a text, then answers with the question and what the tool gave."""
    question = request["messages"][1]["content"]
    if request["messages"][-1]["role"] == "tool":
        return answer(f"{question} / {request['messages'][-1]['content'].splitlines()[1]}")
    literal = question.replace("'", "''")
    return answer(calls=[ToolCall("execute_sql", {"sql": f"SELECT '{literal}' AS asked"})])


@contextmanager
def agent_for(handler: Handler, folder: Path, *settings: str, extra: str = "") -> Iterator[Agent]:
    config = load_config(
        ROOT / "pipeline.yaml", "cpu", ["agent.context_tokens=20000", "agent.observation_tokens=400", *settings]
    )
    with scripted_server(handler) as url:
        endpoint = Endpoint(url, tokenizer_folder(folder))
        yield Agent(config, endpoint, Database(insurance_file(folder, extra), config.sandbox))


@contextmanager
def serving(handler: Handler, folder: Path, *settings: str, key: str = KEY, extra: str = "") -> Iterator[str]:
    """The base address of a running server."""
    with agent_for(handler, folder, *settings, extra=extra) as agent, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = uvicorn.Server(server_settings(guarded_app(agent, port, key)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(15)
            assert not thread.is_alive()


def client(url: str, key: str = KEY, timeout: float = 30) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=timeout, trust_env=False)


def events(text: str) -> list[tuple[str, Any]]:
    """Name and data of each server-sent event."""
    found = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found
