"""Executed traces from (question, gold SQL, database): what a careful agent would have done, with real observations.

    search the schema (now and then a search that misses) → columns of each needed table (sometimes in one turn)
    → now and then a plausible wrong query and its real error → the gold query → a short answer

Every observation comes from the agent's own tools on the real database. A trace counts only if it replays: all calls
again, all observations equal, and the final result matches the gold's. The wrong query is shown but never trained.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from shared.compare import execution_match, gold_is_ordered
from shared.config import Config
from shared.database import Database, SqlError
from shared.prompts import TOOLS, opening_messages
from shared.records import Message, Question, ToolCall
from shared.tokens import Tokenizer
from shared.tools import Toolbox
from stage1_sft import phrases
from stage1_sft.sql_needs import mistakes, needed_tables

_THOUGHT_SHARE = 0.12


class Unusable(Exception):
    """A question that gives no trace; the text is the reason that is counted."""


@dataclass
class Trace:
    """A conversation under construction; `trained` runs parallel to `messages`."""

    question: Question
    toolbox: Toolbox
    messages: list[Message] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for message in opening_messages(self.question.question):
            self._append(message, trained=False)

    def call(self, calls: Sequence[ToolCall], content: str = "", *, trained: bool = True) -> list[tuple[str, bool]]:
        """One assistant turn and the real answers to its calls; returns (text, ok) of each."""
        numbered = [(f"call_{len(self.messages)}_{i}", call) for i, call in enumerate(calls)]
        entries = [
            {
                "id": name,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for name, call in numbered
        ]
        self._append({"role": "assistant", "content": content, "tool_calls": entries}, trained=trained)
        observations = [self.toolbox.run(call) for call in calls]
        for (name, _), observation in zip(numbered, observations, strict=True):
            self._append({"role": "tool", "tool_call_id": name, "content": observation.text}, trained=False)
        return [(observation.text, observation.ok) for observation in observations]

    def answer(self, text: str) -> None:
        self._append({"role": "assistant", "content": text}, trained=True)

    def row(self) -> dict[str, Any]:
        """The JSONL row. Arguments and tools are JSON texts: Arrow would unify the structs of different tools."""
        question = self.question
        return {
            "id": question.id,
            "db_id": question.db_id,
            "messages": self.messages,
            "tools": json.dumps(TOOLS, ensure_ascii=False),
            "trained": self.trained,
            "gold_sql": question.gold_sql,
            "provenance": {"database": question.database, "steps": self.steps, "difficulty": question.difficulty},
        }

    def _append(self, message: Message, *, trained: bool) -> None:
        self.messages.append(message)
        self.trained.append(trained)


def synthesize(
    questions: Sequence[Question], config: Config, tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], collections.Counter[str]]:
    """Trace rows of the questions that give one, and how many were dropped for each reason; deterministic by seed."""
    databases: dict[str, Database] = {}
    rows, dropped = [], collections.Counter[str]()
    for question in tqdm(questions, desc="traces", unit="trace", disable=None):
        if question.database not in databases:
            databases[question.database] = Database(question.database, config.sandbox)
        toolbox = Toolbox(databases[question.database], tokenizer, config.agent.observation_tokens)
        rng = random.Random(f"{config.seed}/{question.id}")
        try:
            rows.append(verified(trace_of(question, toolbox, config, rng), config))
        except Unusable as reason:
            dropped[str(reason)] += 1
    return rows, dropped


def trace_of(question: Question, toolbox: Toolbox, config: Config, rng: random.Random) -> Trace:
    """One executed trace; raises Unusable."""
    database = toolbox.database
    tables = needed_tables(question.gold_sql, database.schema)
    if not tables:
        raise Unusable("the gold names no table of the schema")
    trace = Trace(question, toolbox)
    _search(trace, tables, config, rng)
    _read_columns(trace, tables, config, rng)
    fixes = rng.random() < config.sft.wrong_turn_share and _wrong_turn(trace, rng)
    content = phrases.thought("fix" if fixes else "query", rng, _THOUGHT_SHARE)
    ((_, ok),) = trace.call([ToolCall("execute_sql", {"sql": question.gold_sql})], content)
    if not ok:
        raise Unusable("the gold query fails")
    trace.answer(phrases.answer(database.execute(question.gold_sql), rng))
    return trace


def _search(trace: Trace, tables: Sequence[str], config: Config, rng: random.Random) -> None:
    """Search until every needed table was named; the model sees misses, too."""
    words = phrases.search_words(trace.question.question)
    queries = [words] if words else []
    if rng.random() < config.sft.search_miss_share:
        queries.insert(0, phrases.missing_words(rng))
        trace.steps.append("miss")
    queries.append(" ".join(table.replace("_", " ").lower() for table in tables))
    for number, query in enumerate(dict.fromkeys(queries)):
        kind = "search_again" if number else "search"
        call = ToolCall("search_schema", {"query": query})
        ((text, _),) = trace.call([call], phrases.thought(kind, rng, _THOUGHT_SHARE))
        trace.steps.append("search")
        if all(f"{table} (" in text or f'"{table}" (' in text for table in tables):
            return


def _read_columns(trace: Trace, tables: Sequence[str], config: Config, rng: random.Random) -> None:
    calls = [ToolCall("get_columns", {"table": table}) for table in tables]
    together = len(calls) > 1 and rng.random() < config.sft.parallel_share
    for group in [calls] if together else [[call] for call in calls]:
        trace.call(group, phrases.thought("columns", rng, _THOUGHT_SHARE))
    trace.steps.append("parallel" if together else "columns")


def _wrong_turn(trace: Trace, rng: random.Random) -> bool:
    """Run a plausible mistake whose outcome shows that it is one: an error or a result that is not the gold's."""
    question, database = trace.question, trace.toolbox.database
    for wrong in mistakes(question.gold_sql, rng):
        if _matches(database, question.gold_sql, wrong):
            continue
        trace.call(
            [ToolCall("execute_sql", {"sql": wrong})], phrases.thought("query", rng, _THOUGHT_SHARE), trained=False
        )
        trace.steps.append("wrong")
        return True
    return False


def _matches(database: Database, gold: str, sql: str) -> bool:
    try:
        result = database.execute(sql)
    except SqlError:
        return False
    return execution_match(database.execute(gold), result, ordered=gold_is_ordered(gold))


def verified(trace: Trace, config: Config) -> dict[str, Any]:
    """The row of a trace that replays exactly on a freshly opened database; raises Unusable."""
    fresh = Database(trace.question.database, config.sandbox)
    toolbox = Toolbox(fresh, trace.toolbox._tokenizer, config.agent.observation_tokens)
    answers = iter([message["content"] for message in trace.messages if message["role"] == "tool"])
    sql = ""
    for call in _calls(trace.messages):
        if toolbox.run(call).text != next(answers):
            raise Unusable("an observation does not reproduce")
        sql = call.arguments["sql"] if call.name == "execute_sql" else sql
    if not _matches(fresh, trace.question.gold_sql, sql):
        raise Unusable("the final result is not the gold's")
    return trace.row()


def _calls(messages: Sequence[Message]) -> list[ToolCall]:
    entries = [entry["function"] for message in messages for entry in message.get("tool_calls", [])]
    return [ToolCall(entry["name"], json.loads(entry["arguments"])) for entry in entries]
