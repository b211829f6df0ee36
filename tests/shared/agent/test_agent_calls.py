"""The calls of an episode: run in order, refused with a message, read by any server's parser, merged or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.agent.prompts import TOOLS
from shared.agent.tools import Toolbox
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, StopReason, ToolCall
from shared.tool_calls import Parsed, parse
from tests.scripted_server import ScriptedModel, answer, scripted_server
from tests.shared.episodes import COUNT, LIMITS, episode, says, sql


def test_parallel_calls_run_in_order_and_are_answered_one_by_one(play: Callable[..., Episode]) -> None:
    tables = ["customers", "claims", "nothing"]
    played = play(says(*(ToolCall("get_columns", {"table": table}) for table in tables)), "Done.")
    assert [text.split(":")[0] for text in played.turns[0].observations] == ["customers", "claims", "Error"]
    assert played.turns[0].ok == (True, True, False)
    ids = [call["id"] for call in played.messages[2]["tool_calls"]]
    assert [message["tool_call_id"] for message in played.messages[3:6]] == ids
    assert len(set(ids)) == 3


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
    played = play("<tool_call>\nsearch\n</tool_call>", limits=LIMITS.model_copy(update={"max_turns": 4}))
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
