"""A trace: the conversation of an agent that answered a question, as one JSONL row, and the checks that make it count.

It counts when running all its calls again on a freshly opened database gives the same observations, its last query gives the
gold's result, each turn reads back as it was meant, and none is longer than the agent may write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shared.agent.episode import submitted_block
from shared.agent.prompts import TOOLS
from shared.agent.tools import Toolbox
from shared.config.schema import Config
from shared.models.tokenizer import Tokenizer
from shared.records import Message, Question, ToolCall
from shared.reward.execution_match import execution_match
from shared.reward.sql_text import gold_is_ordered
from shared.sql.database import Database, SqlError
from shared.tool_calls import parse_hermes, render_turn

Trace = dict[str, Any]
"""One JSONL row: id, db_id, messages, tools (JSON text), trained (one bool per message), gold_sql, provenance."""


class Dropped(Exception):
    """The question gives no usable trace; `str(error)` is the reason as it is counted."""


class TooLong(Dropped):
    """`trace` has more or longer turns than the agent may write: of no use for training, but for measuring lengths."""

    def __init__(self, reason: str, trace: Trace) -> None:
        super().__init__(reason)
        self.trace = trace


def make_trace(
    question: Question, messages: Sequence[Message], trained: Sequence[bool], provenance: dict[str, Any]
) -> Trace:
    """The JSONL row of a conversation about `question`; `trained` stands parallel to the messages."""
    return {
        "id": question.id,
        "db_id": question.db_id,
        "messages": list(messages),
        "tools": json.dumps(TOOLS, ensure_ascii=False),
        "trained": list(trained),
        "gold_sql": question.gold_sql,
        "provenance": provenance,
    }


def verify(trace: Trace, question: Question, config: Config, tokenizer: Tokenizer) -> None:
    """Run the trace again from its text alone.

    Raises Dropped where it does not reproduce, misses the gold, or goes beyond what the agent may write.
    """
    database = Database(question.database, config.sandbox)
    toolbox = Toolbox(database, tokenizer, config.agent.observation_tokens)
    _check_limits(trace, config, tokenizer)
    messages, submitted = iter(trace["messages"]), None
    for message in messages:
        if message["role"] != "assistant":
            continue
        calls = tuple(decode_call(call) for call in message.get("tool_calls", ()))
        if parse_hermes(render_turn(message["content"], calls)).calls != calls:
            raise Dropped("turn reads back differently")
        for call in calls:
            observation = toolbox.run(call)
            if next(messages)["content"] != observation.text:
                raise Dropped("observation does not reproduce")
            if call.name == "execute_sql" and observation.ok:
                submitted = call.arguments["sql"]
    submitted = submitted_block(trace["messages"][-1]["content"]) or submitted
    if submitted is None or not answers_gold(database, question.gold_sql, submitted):
        raise Dropped("last query misses the gold")


def answers_gold(database: Database, gold_sql: str, sql: str) -> bool:
    most = database.limits.max_compare_rows
    try:
        gold, result = database.execute(gold_sql, most), database.execute(sql, most)
    except SqlError:
        return False
    return execution_match(gold, result, ordered=gold_is_ordered(gold_sql))


def _check_limits(trace: Trace, config: Config, tokenizer: Tokenizer) -> None:
    """A turn longer than the agent may write, or more turns than it may take, would teach failing episodes."""
    turns = [message for message in trace["messages"] if message["role"] == "assistant"]
    if len(turns) > config.agent.max_turns:
        raise TooLong("more turns than agent.max_turns", trace)
    for message in turns:
        text = render_turn(message["content"], [decode_call(call) for call in message.get("tool_calls", ())])
        if tokenizer.count(text) + 1 > config.agent.max_turn_tokens:  # and the end-of-turn token
            raise TooLong("a turn longer than agent.max_turn_tokens", trace)


def decode_call(call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    return ToolCall(function["name"], json.loads(function["arguments"]))
