"""A trace: the conversation of an agent that answered a question, as one JSONL row, and the checks that it must pass.

Replaying its calls on a freshly opened database must give the same observations, its last query must give the gold's
result, each turn must parse back to the same calls, and no turn may be longer than the agent may write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypedDict

from shared.agent.episode import submitted_block
from shared.agent.prompts import prompts_of
from shared.agent.tools import Toolbox
from shared.config.schema import Config
from shared.models.tokenizer import Tokenizer
from shared.records import Message, Question, ToolCall
from shared.reward.execution_match import execution_match
from shared.reward.queries import gold_is_ordered
from shared.sql.database import Database, SqlError
from shared.tool_calls import parse_hermes, render_turn

TOO_MANY_TURNS = "more turns than agent.max_turns"
TURN_TOO_LONG = "a turn longer than agent.max_turn_tokens"


class Trace(TypedDict):
    """One JSONL row."""

    id: str
    db_id: str
    messages: list[Message]
    tools: str  # JSON text: Arrow would give every tool the parameters of the others
    trained: list[bool]  # one per message
    gold_sql: str
    provenance: dict[str, Any]


class Dropped(Exception):
    """The question gives no trace; `str(error)` is the reason under which it is counted."""


def make_trace(
    question: Question,
    messages: Sequence[Message],
    trained: Sequence[bool],
    config: Config,
    provenance: dict[str, Any],
) -> Trace:
    """The JSONL row of a conversation about `question`; `trained` is parallel to the messages."""
    return {
        "id": question.id,
        "db_id": question.db_id,
        "messages": list(messages),
        "tools": json.dumps(prompts_of(config.agent).tools, ensure_ascii=False),
        "trained": list(trained),
        "gold_sql": question.gold_sql,
        "provenance": {"difficulty": question.difficulty, "form": question.form, **provenance},
    }


def calls_of(message: Message) -> tuple[ToolCall, ...]:
    """The tool calls of a message with decoded arguments."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return tuple(ToolCall(function["name"], json.loads(function["arguments"])) for function in functions)


def with_argument_objects(message: Message) -> Message:
    """The message with call arguments as objects instead of JSON text, as chat templates expect them."""
    if "tool_calls" not in message:
        return message
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls_of(message)]
    calls = [{**sent, "function": read} for sent, read in zip(message["tool_calls"], functions, strict=True)]
    return {**message, "tool_calls": calls}


def flaw(trace: Trace, question: Question, config: Config, tokenizer: Tokenizer) -> str:
    """Run the trace again from its text alone; returns why it may not be trained on, "" if it may."""
    database = Database(question.database, config.sandbox)
    toolbox = Toolbox(database, tokenizer, config.agent, question.question)
    if sum(message["role"] == "assistant" for message in trace["messages"]) > config.agent.max_turns:
        return TOO_MANY_TURNS
    messages, submitted = iter(trace["messages"]), None
    for message in messages:
        if message["role"] != "assistant":
            continue
        calls = calls_of(message)
        text = render_turn(message["content"], calls)
        if tokenizer.count(text) + 1 > config.agent.max_turn_tokens:  # and the end-of-turn token
            return TURN_TOO_LONG
        if parse_hermes(text).calls != calls:
            return "turn reads back differently"
        for call in calls:
            observation = toolbox.run(call)
            if next(messages)["content"] != observation.text:
                return "observation does not reproduce"
            if call.name == "execute_sql" and observation.ok:
                submitted = call.arguments["sql"]
    submitted = submitted_block(trace["messages"][-1]["content"]) or submitted
    answers = submitted is not None and answers_gold(database, question.gold_sql, submitted)
    return "" if answers else "last query misses the gold"


def answers_gold(database: Database, gold_sql: str, sql: str) -> bool:
    """Whether `sql` runs and gives the gold's result."""
    most = database.limits.max_compare_rows
    try:
        gold, result = database.execute(gold_sql, most), database.execute(sql, most)
    except SqlError:
        return False
    return execution_match(gold, result, ordered=gold_is_ordered(gold_sql))
