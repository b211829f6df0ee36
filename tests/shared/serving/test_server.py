"""The server with its real clients: the page's stream, OpenAI's client, many people at once."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.records import ToolCall
from tests.scripted_server import Reply, answer
from tests.shared.serving.running import KEY, agent_for, client, echo, events, says_sql, serving

COUNT = "SELECT city, count(*) AS n FROM customers GROUP BY city"
RUNAWAY = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


def test_the_page_gets_each_step_and_then_the_answer_with_its_rows(tmp_path: Path) -> None:
    with serving(says_sql(COUNT, "Two cities."), tmp_path) as url, client(url) as http:
        response = http.post("/api/ask", json={"question": "How many per city?"})
    assert response.headers["content-type"].startswith("text/event-stream")
    *steps, (name, last) = events(response.text)
    assert [(kind, data["role"]) for kind, data in steps] == [
        ("message", role) for role in ("assistant", "tool", "assistant")
    ]
    assert steps[0][1]["tool_calls"][0]["function"]["name"] == "execute_sql"
    assert (name, last["text"], last["sql"], last["stop"]) == ("answer", "Two cities.", COUNT, "answered")
    assert (last["columns"], last["rows"], last["truncated"]) == (
        ["city", "n"],
        [[None, 1], ["Bern", 1], ["Oslo", 1]],
        False,
    )


def test_cells_that_json_or_a_browser_would_change_come_as_text(tmp_path: Path) -> None:
    sql = "SELECT 9007199254740993 AS big, 1e999 AS inf, x'00ff' AS blob, 1.5 AS half, NULL AS none"
    with agent_for(says_sql(sql), tmp_path) as agent:
        found = asyncio.run(agent.answer("q"))
    assert found.rows == [["9007199254740993", "inf", "<blob of 2 bytes>", 1.5, None]]


@pytest.mark.parametrize(
    ("handler", "stop", "problem"),
    [
        (says_sql(COUNT, "```sql\nSELECT x FROM claims\n```"), "answered", "The submitted SQL fails: no such column"),
        (
            lambda request: answer(calls=[ToolCall("search_schema", {"query": "x"})]),
            "turn_limit",
            "No answer: the last allowed turn",
        ),
        (lambda request: Reply(403), "infrastructure", "No answer: InfrastructureError"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said(tmp_path: Path, handler: Any, stop: str, problem: str) -> None:
    with agent_for(handler, tmp_path, "agent.max_turns=2") as agent:
        found = asyncio.run(agent.answer("q"))
    assert (found.stop, found.rows) == (stop, [])
    assert found.problem.startswith(problem)


def test_openais_client_gets_answer_and_sql_whole_and_streamed(tmp_path: Path) -> None:
    with serving(says_sql(COUNT, "Two cities."), tmp_path) as url:
        openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        messages: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "How many?"}]},
        ]
        assert [model.id for model in openai_client.models.list()] == ["firstcall"]
        whole = openai_client.chat.completions.create(model="firstcall", messages=messages)
        chunks = [*openai_client.chat.completions.create(model="firstcall", messages=messages, stream=True)]
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        with pytest.raises(openai.BadRequestError, match="no user message"):
            openai_client.chat.completions.create(model="firstcall", messages=messages[:1])
    expected = f"Two cities.\n\n```sql\n{COUNT}\n```"
    assert whole.choices[0].message.content == expected
    assert whole.usage
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens == 30
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    thought = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
    assert "execute_sql(" in thought
    assert "Bern | 1" in thought


def test_a_failing_model_server_is_an_error_of_the_server(tmp_path: Path) -> None:
    with serving(lambda request: Reply(403), tmp_path) as url:
        openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        messages: Any = [{"role": "user", "content": "How many?"}]
        with pytest.raises(openai.InternalServerError, match="No answer"):
            openai_client.chat.completions.create(model="firstcall", messages=messages)
        with pytest.raises(openai.APIError, match="No answer"):
            [*openai_client.chat.completions.create(model="firstcall", messages=messages, stream=True)]


def many(url: str, questions: int, people: int) -> list[str]:
    """What went wrong when `people` ask `questions` in all, each its own."""

    async def everybody() -> list[str]:
        limits = httpx.Limits(max_connections=people)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=120, limits=limits, trust_env=False
        ) as http:

            async def person(mine: range) -> list[str]:
                wrong = []
                for number in mine:
                    question = f"question <{number}> of 'me'"
                    body = {"messages": [{"role": "user", "content": question}]}
                    response = await http.post("/v1/chat/completions", json=body)
                    said = response.text if response.is_error else response.json()["choices"][0]["message"]["content"]
                    if not said.startswith(f"{question} / {question}\n"):
                        wrong.append(f"{question}: {said}")
                return wrong

            found = await asyncio.gather(*(person(range(start, questions, people)) for start in range(people)))
        return [one for mine in found for one in mine]

    return asyncio.run(everybody())


def test_many_people_at_once_get_their_own_answers(tmp_path: Path) -> None:
    with serving(echo, tmp_path) as url:
        assert many(url, questions=64, people=16) == []


@pytest.mark.slow
def test_1000_questions_of_32_people_get_their_own_answers(tmp_path: Path) -> None:
    with serving(echo, tmp_path) as url:
        assert many(url, questions=1000, people=32) == []


def test_a_runaway_query_of_one_delays_another_by_less_than_a_second(tmp_path: Path) -> None:
    def handler(request: dict[str, Any]) -> dict[str, Any]:
        runaway = request["messages"][1]["content"] == "run away"
        return says_sql(RUNAWAY if runaway else COUNT)(request)

    def ask(question: str) -> float:
        started = time.monotonic()
        with client(url) as http:
            http.post("/api/ask", json={"question": question}).raise_for_status()
        return time.monotonic() - started

    with serving(handler, tmp_path, "sandbox.timeout_seconds=2.0") as url, ThreadPoolExecutor(8) as pool:
        alone = ask("first")
        runaways = [pool.submit(ask, "run away") for _ in range(2)]
        time.sleep(0.3)
        beside = ask("second")
        assert all(not runaway.done() for runaway in runaways)
        assert min(runaway.result() for runaway in runaways) >= 2
    assert beside < alone + 1


def test_a_busy_server_answers_429_to_page_and_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.serving.answering.MOST_AT_ONCE", 0)
    with serving(echo, tmp_path) as url, client(url) as http:
        asked = http.post("/api/ask", json={"question": "q"})
        chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "q"}], "stream": True})
    assert (asked.status_code, chat.status_code) == (429, 429)
    assert asked.headers["retry-after"] == "2"
    assert "Too many questions" in chat.json()["error"]["message"]


def test_who_leaves_gives_the_place_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()

    def slow(request: dict[str, Any]) -> dict[str, Any]:
        if request["messages"][1]["content"] == "slow":
            left.wait(20)
        return answer("Done.")

    monkeypatch.setattr("shared.serving.answering.MOST_AT_ONCE", 1)
    with serving(slow, tmp_path) as url, client(url) as http:
        with http.stream("POST", "/api/ask", json={"question": "slow"}) as response:
            events = response.iter_raw()  # a stream that nobody holds is closed at once
            next(events)
            assert http.post("/api/ask", json={"question": "quick"}).status_code == 429
        deadline = time.monotonic() + 5
        while (status := http.post("/api/ask", json={"question": "quick"}).status_code) == 429:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        left.set()
    assert status == 200
