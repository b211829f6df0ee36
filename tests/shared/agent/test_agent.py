"""The episode loop: what is asked and kept, how an episode ends, what is submitted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shared.agent.chat_client
from shared.agent.chat_client import ChatClient
from shared.agent.episode import run_episode
from shared.agent.prompts import SYSTEM_PROMPT, TOOLS
from shared.agent.tools import Toolbox
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, StopReason, ToolCall
from tests.scripted_server import Reply, ScriptedModel, answer, scripted_server
from tests.shared.episodes import COUNT, LIMITS, QUESTION, episode, says, search, sql


def test_an_episode_goes_from_search_to_an_answer(play: Callable[..., Episode]) -> None:
    played = play(says(search()), says(ToolCall("get_columns", {"table": "claims"})), says(sql()), "Three claims.")
    assert played.stop is StopReason.ANSWERED
    assert played.submitted_sql == COUNT
    assert [turn.merged for turn in played.turns] == [None, True, True, True]
    assert [turn.hermes_calls for turn in played.turns] == [1, 1, 1, 0]
    assert all(all(turn.ok) for turn in played.turns)
    assert "(1 row)" in played.turns[2].observations[0]
    assert played.turns[3].content == "Three claims."
    assert played.seconds > 0


def test_the_conversation_is_kept_in_openai_form(play: Callable[..., Episode]) -> None:
    messages = play(says(search("Schäden"), content="I look."), "None.").messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[0]["content"] == SYSTEM_PROMPT
    assert messages[2]["content"] == "I look."
    call = messages[2]["tool_calls"][0]
    assert call["function"] == {"name": "search_schema", "arguments": '{"query": "Schäden"}'}
    assert messages[3]["tool_call_id"] == call["id"]
    assert messages[4] == {"role": "assistant", "content": "None."}


def test_every_request_offers_the_tools_and_the_limits(toolbox: Toolbox, tokenizer: Tokenizer) -> None:
    model = ScriptedModel(tokenizer, says(search()), "Done.")
    with scripted_server(model) as base_url:
        asyncio.run(episode(base_url, toolbox, tokenizer))
    assert [request["tools"] for request in model.requests] == [TOOLS, TOOLS]
    assert [request["max_tokens"] for request in model.requests] == [400, 400]
    assert [request["temperature"] for request in model.requests] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("final", "submitted"),
    [
        ("There are three.", COUNT),
        ("```sql\nSELECT 1\n```", "SELECT 1"),
        ("First\n```sql\nSELECT 1\n```\nbetter\n```SQL\nSELECT 2;\n```", "SELECT 2;"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("```sql\n```\nNothing to add.", COUNT),
        ("```python\nprint(1)\n```", COUNT),
    ],
)
def test_the_submission_is_the_last_sql_block_else_the_last_query_that_ran(
    play: Callable[..., Episode], final: str, submitted: str
) -> None:
    failing = sql("SELECT nothing FROM claims")
    assert play(says(sql("SELECT 7")), says(sql()), says(failing), final).submitted_sql == submitted


def test_without_any_query_nothing_is_submitted(play: Callable[..., Episode]) -> None:
    assert play("I do not know.").submitted_sql is None


def test_an_sql_block_beside_a_call_is_no_submission(play: Callable[..., Episode]) -> None:
    played = play(says(search(), content="```sql\nSELECT 9\n```"), limits=LIMITS.model_copy(update={"max_turns": 1}))
    assert (played.stop, played.submitted_sql) == (StopReason.TURN_LIMIT, None)


def test_the_turn_limit_leaves_the_last_calls_unrun(play: Callable[..., Episode]) -> None:
    played = play(says(sql()), says(sql("SELECT 2")), limits=LIMITS.model_copy(update={"max_turns": 2}))
    assert played.stop is StopReason.TURN_LIMIT
    assert played.submitted_sql == COUNT
    assert played.turns[1].calls == (sql("SELECT 2"),)
    assert played.turns[1].observations == ()
    assert played.messages[-1]["role"] == "assistant"


def test_an_answer_in_the_last_turn_is_an_answer(play: Callable[..., Episode]) -> None:
    assert play(says(sql()), "Three.", limits=LIMITS.model_copy(update={"max_turns": 2})).stop is StopReason.ANSWERED


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_message_is_no_answer(play: Callable[..., Episode], text: str) -> None:
    assert play(text).stop is StopReason.NO_ANSWER


@pytest.mark.parametrize("text", ["word " * 300, says(sql("SELECT " + "1, " * 300))])
def test_a_turn_cut_by_its_token_limit_is_named_and_never_run(play: Callable[..., Episode], text: str) -> None:
    played = play(says(sql()), text, limits=LIMITS.model_copy(update={"max_turn_tokens": 100}))
    assert played.stop is StopReason.LENGTH
    assert played.turns[1].observations == ()
    assert played.submitted_sql == COUNT


def test_a_complete_call_counts_even_if_the_turn_was_cut_behind_it(play: Callable[..., Episode]) -> None:
    played = play(says(sql()) + "\nand " * 300, "Three.", limits=LIMITS.model_copy(update={"max_turn_tokens": 100}))
    assert played.stop is StopReason.ANSWERED
    assert played.submitted_sql == COUNT


def test_the_context_limit_ends_before_the_prompt_that_would_not_fit(tokenizer: Tokenizer, toolbox: Toolbox) -> None:
    model = ScriptedModel(tokenizer, says(ToolCall("get_columns", {"table": "claims"})))
    limits = LIMITS.model_copy(update={"max_turns": 1000, "context_tokens": 3000})
    with scripted_server(model) as base_url:
        played = asyncio.run(episode(base_url, toolbox, tokenizer, limits))
    assert played.stop is StopReason.CONTEXT_LIMIT
    last = played.turns[-1]
    assert last.prompt_tokens + last.completion_tokens < 3000
    for turn, request in zip(played.turns, model.requests, strict=True):
        assert turn.prompt_tokens + request["max_tokens"] <= 3000


def test_a_question_too_long_for_the_context_is_never_asked(tokenizer: Tokenizer, toolbox: Toolbox) -> None:
    model = ScriptedModel(tokenizer, "Done.")
    with scripted_server(model) as base_url:
        played = asyncio.run(episode(base_url, toolbox, tokenizer, LIMITS.model_copy(update={"context_tokens": 300})))
    assert (played.stop, played.turns, model.requests) == (StopReason.CONTEXT_LIMIT, (), [])


def test_a_server_with_a_smaller_context_ends_the_episode_likewise(play: Callable[..., Episode]) -> None:
    assert play(lambda r: Reply(400, {"message": "maximum context length is 10"})).stop is StopReason.CONTEXT_LIMIT


def test_a_failing_endpoint_keeps_the_turns_so_far(
    play: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.agent.chat_client, "_FIRST_DELAY_SECONDS", 0.01)
    replies = iter([answer("", [sql()])])
    played = play(lambda request: next(replies, Reply(500, "CUDA error")))
    assert played.stop is StopReason.INFRASTRUCTURE
    assert "CUDA error" in played.error
    assert len(played.turns) == 1


def test_a_damaged_database_is_infrastructure_not_a_wrong_answer(play: Callable[..., Episode], tmp_path: Path) -> None:
    (tmp_path / "insurance.sqlite").write_bytes(b"not a database " * 1000)
    played = play(says(sql()), "Three.")
    assert played.stop is StopReason.INFRASTRUCTURE
    assert "insurance.sqlite" in played.error


def test_cancelling_an_episode_cancels_it(tokenizer: Tokenizer, toolbox: Toolbox) -> None:
    release = threading.Event()

    async def run(base_url: str) -> None:
        task = asyncio.create_task(episode(base_url, toolbox, tokenizer))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()

    with scripted_server(lambda request: answer("late") if release.wait(5) else {}) as base_url:
        asyncio.run(run(base_url))


def test_many_episodes_share_one_client(tokenizer: Tokenizer, toolbox: Toolbox) -> None:
    def handler(request: dict[str, Any]) -> dict[str, Any]:
        return answer("Three.") if request["messages"][-1]["role"] == "tool" else answer("", [sql()])

    async def run(base_url: str) -> list[Episode]:
        async with ChatClient(base_url) as chat:
            options: dict[str, Any] = {"toolbox": toolbox, "chat": chat, "tokenizer": tokenizer, "limits": LIMITS}
            return await asyncio.gather(*(run_episode(QUESTION, temperature=1.0, **options) for _ in range(20)))

    with scripted_server(handler) as base_url:
        played = asyncio.run(run(base_url))
    assert [(one.stop, one.submitted_sql) for one in played] == [(StopReason.ANSWERED, COUNT)] * 20
