"""The chat client against a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import shared.agent.chat_client
from shared.agent.chat_client import ChatClient, Completion, ContextOverflow, InfrastructureError
from shared.agent.prompts import TOOLS
from shared.records import ToolCall
from tests.scripted_server import MODEL, Reply, answer, scripted_server

QUESTION = [{"role": "user", "content": "How many claims?"}]


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.agent.chat_client, "_FIRST_DELAY_SECONDS", 0.01)


def ask(base_url: str, **options: Any) -> Completion:
    async def run() -> Completion:
        async with ChatClient(base_url, **options) as chat:
            return await chat.complete(QUESTION, tools=TOOLS, max_tokens=64, temperature=0.5)

    return asyncio.run(run())


def in_turn(*replies: Reply | dict[str, Any]) -> tuple[Callable[[dict[str, Any]], Any], list[dict[str, Any]]]:
    """A handler that gives the replies one after the other, and the list of requests it got."""
    requests: list[dict[str, Any]] = []

    def handler(request: dict[str, Any]) -> Any:
        requests.append(request)
        return replies[min(len(requests), len(replies)) - 1]

    return handler, requests


def test_a_completion_carries_calls_token_ids_and_usage() -> None:
    call = ToolCall("search_schema", {"query": "Schäden"})
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    reply = answer(None, [call], token_ids=[5, 6], prompt_token_ids=[1, 2, 3], usage=usage)
    with scripted_server(lambda request: reply) as base_url:
        assert ask(base_url) == Completion("", (call,), (), "tool_calls", [1, 2, 3], [5, 6], 3, 2)


def test_the_request_asks_for_token_ids_unless_switched_off() -> None:
    handler, requests = in_turn(answer("Two."))
    with scripted_server(handler) as base_url:
        ask(base_url, model="m")
        ask(base_url, model="m", return_token_ids=False)
    asked = {"model": "m", "messages": QUESTION, "tools": TOOLS}
    assert requests[0] == {**asked, "max_tokens": 64, "temperature": 0.5, "return_token_ids": True}
    assert "return_token_ids" not in requests[1]


def test_the_finish_reason_is_passed_on() -> None:
    with scripted_server(lambda request: answer("Tw", finish_reason="length")) as base_url:
        assert ask(base_url).finish_reason == "length"


@pytest.mark.parametrize("arguments", ['{"sql": "SELECT', '"SELECT 1"', "[1]", '{"sql": "\\ud83c"}'])
def test_arguments_that_are_no_sendable_object_become_a_call_error(arguments: str) -> None:
    reply = answer("", [ToolCall("get_columns", {"table": "claims"}), ToolCall("execute_sql", {})])
    reply["choices"][0]["message"]["tool_calls"][1]["function"]["arguments"] = arguments
    with scripted_server(lambda request: reply) as base_url:
        completion = ask(base_url)
    assert completion.calls == (ToolCall("get_columns", {"table": "claims"}),)
    assert len(completion.call_errors) == 1
    assert "execute_sql" in completion.call_errors[0]


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_empty_arguments_are_an_empty_object(arguments: Any) -> None:
    reply = answer("", [ToolCall("search_schema", {})])
    reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = arguments
    with scripted_server(lambda request: reply) as base_url:
        assert ask(base_url).calls == (ToolCall("search_schema", {}),)


@pytest.mark.parametrize("trouble", [Reply(500), Reply(503, "no servers"), Reply(429), Reply(body=None)])
def test_passing_trouble_is_retried(trouble: Reply) -> None:
    handler, requests = in_turn(trouble, trouble, answer("Two."))
    with scripted_server(handler) as base_url:
        assert ask(base_url).content == "Two."
    assert len(requests) == 3


def test_lasting_trouble_is_an_infrastructure_error_after_the_retries() -> None:
    handler, requests = in_turn(Reply(502, {"detail": "Upstream model server request failed"}))
    with scripted_server(handler) as base_url, pytest.raises(InfrastructureError, match=r"failed 3 times.*Upstream"):
        ask(base_url, max_retries=2)
    assert len(requests) == 3


def test_a_paused_gateway_is_waited_for_beyond_the_retries() -> None:
    pause = Reply(429, {"error": "gateway paused"}, {"Retry-After": "0"})
    handler, requests = in_turn(*[pause] * 6, answer("Two."))
    with scripted_server(handler) as base_url:
        assert ask(base_url, max_retries=1).content == "Two."
    assert len(requests) == 7


def test_a_gateway_that_stays_paused_is_given_up_at_the_timeout() -> None:
    with (
        scripted_server(lambda request: Reply(429, headers={"Retry-After": "0"})) as base_url,
        pytest.raises(InfrastructureError, match="429"),
    ):
        ask(base_url, max_retries=1, timeout_seconds=0.2)


def test_retry_after_is_honoured() -> None:
    handler, _ = in_turn(Reply(429, headers={"Retry-After": "0.3"}), answer("Two."))
    with scripted_server(handler) as base_url:
        start = time.monotonic()
        ask(base_url)
    assert time.monotonic() - start >= 0.3


def test_a_server_that_is_not_there_is_an_infrastructure_error() -> None:
    with scripted_server(lambda request: answer()) as base_url:
        pass
    with pytest.raises(InfrastructureError, match="ConnectError"):
        ask(base_url, max_retries=1)


def test_a_server_that_does_not_answer_in_time_is_an_infrastructure_error() -> None:
    release = threading.Event()

    def hang(request: dict[str, Any]) -> dict[str, Any]:
        release.wait(5)
        return answer()

    with scripted_server(hang) as base_url:
        with pytest.raises(InfrastructureError, match=r"no answer within 0\.1 s"):
            ask(base_url, max_retries=0, timeout_seconds=0.1)
        release.set()


def test_an_answer_that_drips_in_does_not_outlive_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.02)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(InfrastructureError, match=r"no answer within 0\.2 s"):
            ask(f"http://127.0.0.1:{server.getsockname()[1]}/v1", max_retries=0, timeout_seconds=0.2)
        thread.join(5)


def test_a_refused_request_is_not_retried() -> None:
    handler, requests = in_turn(Reply(401, {"error": "wrong key"}))
    with scripted_server(handler) as base_url, pytest.raises(InfrastructureError, match=r"401.*wrong key"):
        ask(base_url)
    assert len(requests) == 1


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 2100 tokens.",
        "The decoder prompt (length 2100) is longer than the maximum model length of 2048.",
    ],
)
def test_a_prompt_beyond_the_context_is_named_as_such(text: str) -> None:
    with scripted_server(lambda request: Reply(400, {"message": text})) as base_url, pytest.raises(ContextOverflow):
        ask(base_url)


@pytest.mark.parametrize("body", ["<html>busy</html>", {}, [], {"choices": []}, {"choices": [{"message": None}]}])
def test_a_success_that_is_no_completion_is_an_infrastructure_error(body: Any) -> None:
    with scripted_server(lambda request: Reply(200, body)) as base_url, pytest.raises(InfrastructureError):
        ask(base_url)


def test_auto_finds_the_only_model_of_a_plain_server() -> None:
    def handler(request: dict[str, Any]) -> Reply | dict[str, Any]:
        return answer("Two.") if request["model"] == MODEL else Reply(404, {"error": "no such model"})

    with scripted_server(handler) as base_url:
        assert ask(base_url).content == "Two."


def test_auto_leaves_the_choice_to_a_gateway() -> None:
    handler, requests = in_turn(answer("Two."))
    with scripted_server(handler, "/proxy/rollout/r1/attempt/0/mode/train/openai/v1") as base_url:
        assert ask(base_url).content == "Two."
    assert [request["model"] for request in requests] == ["auto"]


def test_a_wrong_path_is_described_as_the_server_does() -> None:
    with scripted_server(lambda request: Reply(404, {"detail": "Rollout not found"})) as base_url:
        wrong = base_url.replace("/v1", "/v2")
        with pytest.raises(InfrastructureError, match=r"404.*Not Found"):
            ask(wrong)


def test_many_requests_run_at_once() -> None:
    together = threading.Barrier(40, timeout=10)

    def handler(request: dict[str, Any]) -> dict[str, Any]:
        together.wait()
        return answer("Two.")

    async def run(base_url: str) -> list[Completion]:
        async with ChatClient(base_url) as chat:
            asked = [chat.complete(QUESTION, tools=(), max_tokens=8, temperature=0) for _ in range(40)]
            return await asyncio.gather(*asked)

    with scripted_server(handler) as base_url:
        assert len(asyncio.run(run(base_url))) == 40


def test_cancelling_ends_the_request() -> None:
    release = threading.Event()

    async def run(base_url: str) -> None:
        async with ChatClient(base_url) as chat:
            task = asyncio.create_task(chat.complete(QUESTION, tools=(), max_tokens=8, temperature=0))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with scripted_server(lambda request: answer() if release.wait(5) else {}) as base_url:
        asyncio.run(run(base_url))
        release.set()
