"""The episode loop, against a scripted model behind real HTTP and the real tools on a real database."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shared.chat
from shared.agent import run_episode
from shared.chat import ChatClient
from shared.prompts import SYSTEM_PROMPT, TOOLS
from shared.records import Episode, Question, StopReason, ToolCall
from shared.settings import AgentConfig
from shared.tokens import Tokenizer
from shared.tool_calls import Parsed, parse, render_turn
from shared.tools import Toolbox
from tests.scripted_server import Reply, ScriptedModel, answer, scripted_server
from tests.shared.examples import insurance, tiny_tokenizer

QUESTION = Question("q1", "insurance", "How many claims are there?", "SELECT count(*) FROM claims", "insurance.sqlite")
LIMITS = AgentConfig(max_turns=8, max_turn_tokens=400, context_tokens=20_000, observation_tokens=200)
COUNT = "SELECT count(*) FROM claims"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def toolbox(tmp_path: Path, tokenizer: Tokenizer) -> Toolbox:
    return Toolbox(insurance(tmp_path), tokenizer, LIMITS.observation_tokens)


@pytest.fixture
def play(toolbox: Toolbox, tokenizer: Tokenizer) -> Callable[..., Episode]:
    """Play an episode against a handler, or against a model that says the given texts."""

    def run(*says: Any, limits: AgentConfig = LIMITS, **options: Any) -> Episode:
        handler = says[0] if callable(says[0]) else ScriptedModel(tokenizer, *says)
        with scripted_server(handler) as base_url:
            return asyncio.run(episode(base_url, toolbox, tokenizer, limits, **options))

    return run


async def episode(
    base_url: str, toolbox: Toolbox, tokenizer: Tokenizer, limits: AgentConfig = LIMITS, **options: Any
) -> Episode:
    async with ChatClient(base_url, **options) as chat:
        return await run_episode(
            QUESTION, toolbox=toolbox, chat=chat, tokenizer=tokenizer, limits=limits, temperature=0.0
        )


def search(query: str = "claims") -> ToolCall:
    return ToolCall("search_schema", {"query": query})


def sql(statement: str = COUNT) -> ToolCall:
    return ToolCall("execute_sql", {"sql": statement})


def says(*calls: ToolCall, content: str = "") -> str:
    return render_turn(content, calls)


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


def test_parallel_calls_run_in_order_and_are_answered_one_by_one(play: Callable[..., Episode]) -> None:
    tables = ["customers", "claims", "nothing"]
    played = play(says(*(ToolCall("get_columns", {"table": table}) for table in tables)), "Done.")
    assert [text.split(":")[0] for text in played.turns[0].observations] == ["customers", "claims", "Error"]
    assert played.turns[0].ok == (True, True, False)
    ids = [call["id"] for call in played.messages[2]["tool_calls"]]
    assert [message["tool_call_id"] for message in played.messages[3:6]] == ids
    assert len(set(ids)) == 3


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
    played = play(says(search(), content="```sql\nSELECT 9\n```"), limits=replace(LIMITS, max_turns=1))
    assert (played.stop, played.submitted_sql) == (StopReason.TURN_LIMIT, None)


def test_the_turn_limit_leaves_the_last_calls_unrun(play: Callable[..., Episode]) -> None:
    played = play(says(sql()), says(sql("SELECT 2")), limits=replace(LIMITS, max_turns=2))
    assert played.stop is StopReason.TURN_LIMIT
    assert played.submitted_sql == COUNT
    assert played.turns[1].calls == (sql("SELECT 2"),)
    assert played.turns[1].observations == ()
    assert played.messages[-1]["role"] == "assistant"


def test_an_answer_in_the_last_turn_is_an_answer(play: Callable[..., Episode]) -> None:
    assert play(says(sql()), "Three.", limits=replace(LIMITS, max_turns=2)).stop is StopReason.ANSWERED


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_message_is_no_answer(play: Callable[..., Episode], text: str) -> None:
    assert play(text).stop is StopReason.NO_ANSWER


@pytest.mark.parametrize("text", ["word " * 300, says(sql("SELECT " + "1, " * 300))])
def test_a_turn_cut_by_its_token_limit_is_named_and_never_run(play: Callable[..., Episode], text: str) -> None:
    played = play(says(sql()), text, limits=replace(LIMITS, max_turn_tokens=100))
    assert played.stop is StopReason.LENGTH
    assert played.turns[1].observations == ()
    assert played.submitted_sql == COUNT


def test_a_complete_call_counts_even_if_the_turn_was_cut_behind_it(play: Callable[..., Episode]) -> None:
    played = play(says(sql()) + "\nand " * 300, "Three.", limits=replace(LIMITS, max_turn_tokens=100))
    assert played.stop is StopReason.ANSWERED
    assert played.submitted_sql == COUNT


def test_the_context_limit_ends_before_the_prompt_that_would_not_fit(tokenizer: Tokenizer, toolbox: Toolbox) -> None:
    model = ScriptedModel(tokenizer, says(ToolCall("get_columns", {"table": "claims"})))
    limits = replace(LIMITS, max_turns=1000, context_tokens=3000)
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
        played = asyncio.run(episode(base_url, toolbox, tokenizer, replace(LIMITS, context_tokens=300)))
    assert (played.stop, played.turns, model.requests) == (StopReason.CONTEXT_LIMIT, (), [])


def test_a_server_with_a_smaller_context_ends_the_episode_likewise(play: Callable[..., Episode]) -> None:
    assert play(lambda r: Reply(400, {"message": "maximum context length is 10"})).stop is StopReason.CONTEXT_LIMIT


def test_a_failing_endpoint_keeps_the_turns_so_far(
    play: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.chat, "_FIRST_DELAY_SECONDS", 0.01)
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


def test_an_unknown_tool_is_answered_with_the_tools_there_are(play: Callable[..., Episode]) -> None:
    played = play(says(ToolCall("drop_table", {"table": "claims"})), "Sorry.")
    assert played.stop is StopReason.ANSWERED
    assert played.turns[0].ok == (False,)
    assert all(tool["function"]["name"] in played.turns[0].observations[0] for tool in TOOLS)


def test_a_malformed_call_comes_back_as_a_tool_message_and_turns_still_merge(play: Callable[..., Episode]) -> None:
    broken = '<tool_call>\n{"name": "execute_sql", "arguments": {"sql": SELECT 1}}\n</tool_call>'
    played = play(broken, says(sql()), "Three.")
    first = played.turns[0]
    assert first.calls == ()
    assert "not valid JSON" in first.malformed[0]
    assert (first.observations, first.ok) == ((f"Error: {first.malformed[0]}",), (False,))
    assert played.messages[2] == {"role": "assistant", "content": broken}
    assert played.messages[3]["role"] == "tool"
    assert [turn.merged for turn in played.turns] == [None, True, True]


def test_a_good_call_beside_a_broken_one_runs(play: Callable[..., Episode]) -> None:
    played = play(f"<tool_call>\n{{oops}}\n</tool_call>\n{says(sql())}", "Three.")
    assert played.turns[0].ok == (True, False)
    assert [turn.merged for turn in played.turns] == [None, True]


def test_a_model_that_repeats_a_malformed_call_meets_the_turn_limit(play: Callable[..., Episode]) -> None:
    played = play("<tool_call>\nsearch\n</tool_call>", limits=replace(LIMITS, max_turns=4))
    assert played.stop is StopReason.TURN_LIMIT
    assert [len(turn.observations) for turn in played.turns] == [1, 1, 1, 0]


def test_calls_the_stock_parser_misses_run_and_are_counted(play: Callable[..., Episode]) -> None:
    played = play(f"```json\n{json.dumps({'name': 'execute_sql', 'arguments': {'sql': COUNT}})}\n```", "Three.")
    assert played.submitted_sql == COUNT
    assert played.turns[0].calls == (sql(),)
    assert played.turns[0].hermes_calls == 0
    assert played.turns[1].merged is False  # the template renders the call in its own form


def test_an_endpoint_without_token_ids_leaves_them_unknown(tokenizer: Tokenizer, toolbox: Toolbox) -> None:
    model = ScriptedModel(tokenizer, says(sql(), content="I count."), "Three.", parser=plain, ids=False)
    with scripted_server(model) as base_url:
        played = asyncio.run(episode(base_url, toolbox, tokenizer, return_token_ids=False))
    assert played.submitted_sql == COUNT
    assert played.turns[0].content == "I count."
    assert [(turn.text, turn.hermes_calls, turn.merged) for turn in played.turns] == [(None, None, None)] * 2


def plain(text: str) -> Parsed:
    """The server of a model without tool parser."""
    return Parsed(text, (), (), "")


@pytest.mark.parametrize("content", ["I count.", "I count.\n", "```sql\nSELECT 1\n```", "1 < 2"])
@pytest.mark.parametrize("parser", [None, plain, lambda text: parse(text, TOOLS)])
def test_text_before_a_call_merges_with_any_server_parser(
    tokenizer: Tokenizer, toolbox: Toolbox, content: str, parser: Any
) -> None:
    options = {} if parser is None else {"parser": parser}
    model = ScriptedModel(tokenizer, says(sql(), content=content), "Three.", **options)
    with scripted_server(model) as base_url:
        played = asyncio.run(episode(base_url, toolbox, tokenizer))
    assert played.turns[0].content == content
    assert played.turns[1].merged is True


def test_a_call_written_with_other_white_space_runs_but_does_not_merge(play: Callable[..., Episode]) -> None:
    played = play('<tool_call>{"name":"execute_sql","arguments":{"sql":"SELECT 1"}}</tool_call>', "One.")
    assert played.turns[0].hermes_calls == 1
    assert played.turns[1].merged is False


def test_arguments_the_server_could_not_read_come_back_as_an_error(play: Callable[..., Episode]) -> None:
    broken = answer("", [sql()])
    broken["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = '{"sql": '
    replies = iter([broken, answer("Sorry.")])
    played = play(lambda request: next(replies))
    assert played.stop is StopReason.ANSWERED
    assert "execute_sql" in played.turns[0].observations[0]
    assert played.turns[0].ok == (False,)


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
