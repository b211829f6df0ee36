"""The parser in real vLLM servers, found through the entry point alone, on a model that was taught a wrong format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.agent.prompts import TOOLS, opening_messages
from shared.config.load import load_config
from shared.processes.vllm_server import vllm_server
from tests.tiny_model import QUESTIONS, save_tiny_model, teach

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
ARGUMENTS = {"query": "open claims"}
WORDS = "I search the schema."
ANSWER = f'{WORDS}\n```json\n{{"name": "search_schema", "arguments": {json.dumps(ARGUMENTS)}}}\n```'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(save_tiny_model(tmp_path_factory.mktemp("taught") / "model"), ANSWER)


def client(model: Path, parser: str, folder: Path) -> Iterator[Any]:
    """An OpenAI client of a server that knows the parser by its name."""
    import openai

    settings = ["agent.context_tokens=4096", "vllm.cpu_kv_cache_gib=1", f"vllm.tool_call_parser={parser}"]
    with vllm_server(model, load_config(PIPELINE, "cpu", settings), folder / parser) as url:
        yield openai.OpenAI(base_url=url, api_key="none")


@pytest.fixture(scope="module")
def ours(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from client(model, "qwen25_coder", tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from client(model, "hermes", tmp_path_factory.mktemp("server"))


def ask(client: Any, question: str, **options: Any) -> Any:
    messages = opening_messages(question)
    return client.chat.completions.create(
        model="auto", messages=messages, tools=TOOLS, temperature=0, max_tokens=96, **options
    )


def whole(client: Any, question: str, **options: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Content, calls and finish reason of an answer."""
    (choice,) = ask(client, question, **options).choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def streamed(client: Any, question: str) -> tuple[str, list[tuple[str, Any]], str]:
    """The same, added up from the deltas of a stream."""
    content, finish, calls = "", "", dict[int, list[str]]()
    for chunk in ask(client, question, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or ():
            call = calls.setdefault(delta.index, ["", ""])
            call[0] += delta.function.name or ""
            call[1] += delta.function.arguments or ""
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()], finish


@pytest.mark.parametrize("read", [whole, streamed])
def test_every_wrongly_written_call_is_read(ours: Any, read: Any) -> None:
    for question in QUESTIONS:
        assert read(ours, question) == (WORDS, [("search_schema", ARGUMENTS)], "tool_calls")


def test_calls_that_the_request_forbids_are_text(ours: Any) -> None:
    assert whole(ours, QUESTIONS[0], tool_choice="none") == (ANSWER, [], "stop")


@pytest.mark.parametrize("read", [whole, streamed])
def test_the_stock_parser_reads_none_of_them(stock: Any, read: Any) -> None:
    for question in QUESTIONS:
        assert read(stock, question) == (ANSWER, [], "stop")
