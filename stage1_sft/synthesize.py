"""Executed traces: from (question, gold SQL, database) to the conversation a careful agent would have had.

Every observation is what the real tool answered on the real database. A trace is kept only if running all its calls
again on a freshly opened database gives the same observations and its last query gives the gold's result; what is
dropped is counted by reason. The same question and seed give the same trace, whatever stands before it.

A trace: search the schema, look at the columns of each needed table, run the query, answer. Some traces begin with a
search that misses or contain a wrong query with its real outcome; those assistant messages are not trained, what
follows them is.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from shared.compare import execution_match, gold_is_ordered
from shared.database import Database, SqlError
from shared.prompts import TOOLS, opening_messages
from shared.records import Message, Question, ToolCall
from shared.settings import Config
from shared.tokens import Tokenizer
from shared.tool_calls import parse_hermes, render_turn
from shared.tools import Observation, Toolbox
from stage1_sft import wording
from stage1_sft.gold import Mistake, Needed, mistakes, needed, tidy

THOUGHT_SHARE = 0.1  # of the tool turns; a thought costs tokens in every episode, so the model should learn few
Trace = dict[str, Any]
"""One JSONL row: id, db_id, messages, tools (JSON text), trained (one bool per message), gold_sql, provenance."""


class Dropped(Exception):
    """The question gives no usable trace; `str(error)` is the reason as it is counted."""


def synthesize(
    questions: Iterable[Question], *, limit: int, config: Config, tokenizer: Tokenizer, label: str
) -> tuple[list[Trace], Counter[str]]:
    """Up to `limit` verified traces, questions drawn in a seeded order, and how many were dropped for which reason."""
    drawn = sorted(questions, key=lambda question: question.id)
    random.Random(f"{config.seed}").shuffle(drawn)
    traces: list[Trace] = []
    dropped: Counter[str] = Counter()
    with tqdm(total=min(limit, len(drawn)), desc=f"{label} traces", unit="trace") as bar:
        for question in drawn:
            if len(traces) == limit:
                break
            try:
                trace = build(question, config, tokenizer)
                verify(trace, question, config, tokenizer)
            except Dropped as reason:
                dropped[str(reason)] += 1
                continue
            traces.append(trace)
            bar.update()
    return traces, dropped


def build(question: Question, config: Config, tokenizer: Tokenizer) -> Trace:
    """The trace of one question, not yet verified. Raises Dropped, or UserError for a missing or damaged database."""
    database = Database(question.database, config.sandbox)
    toolbox = Toolbox(database, tokenizer, config.agent.observation_tokens)
    try:
        sql = _clean(question.gold_sql, database)
        wanted = needed(sql, database.schema)
        gold = database.execute(sql)
    except ValueError as error:
        raise Dropped(str(error).split(":")[0]) from error
    except SqlError as error:
        raise Dropped("gold fails") from error
    if not wanted.tables:
        raise Dropped("gold reads no table")
    plan = _Plan.draw(question, wanted, config)
    talk = _Conversation(toolbox, plan.rng, opening_messages(question.question))
    _find_tables(talk, question, wanted, plan)
    _look_at_columns(talk, wanted, plan)
    mistake = _make_mistake(talk, sql, wanted, plan.rng) if plan.mistake else None
    talk.act([ToolCall("execute_sql", {"sql": sql})])
    talk.say(wording.answer(gold))
    _check_limits(talk, config, tokenizer)
    return {
        "id": question.id,
        "db_id": question.db_id,
        "messages": talk.messages,
        "tools": json.dumps(TOOLS, ensure_ascii=False),
        "trained": talk.trained,
        "gold_sql": question.gold_sql,
        "provenance": {
            "difficulty": question.difficulty,
            "form": question.form,
            "tables": list(wanted.tables),
            "columns": list(wanted.columns),
            "search_miss": plan.missed,
            "parallel_columns": plan.parallel and len(wanted.tables) > 1,
            "mistake": mistake.kind if mistake else None,
        },
    }


def verify(trace: Trace, question: Question, config: Config, tokenizer: Tokenizer) -> None:
    """Run the trace again from its text alone; raises Dropped where it does not reproduce or misses the gold."""
    database = Database(question.database, config.sandbox)
    toolbox = Toolbox(database, tokenizer, config.agent.observation_tokens)
    messages, submitted = iter(trace["messages"]), None
    for message in messages:
        if message["role"] != "assistant":
            continue
        calls = tuple(_decode(call) for call in message.get("tool_calls", ()))
        if parse_hermes(render_turn(message["content"], calls)).calls != calls:
            raise Dropped("turn reads back differently")
        for call in calls:
            observation = toolbox.run(call)
            if next(messages)["content"] != observation.text:
                raise Dropped("observation does not reproduce")
            if call.name == "execute_sql" and observation.ok:
                submitted = call.arguments["sql"]
    if submitted is None or not _answers_gold(database, question.gold_sql, submitted):
        raise Dropped("last query misses the gold")


@dataclass
class _Plan:
    """Which of the optional parts the trace of one question has."""

    rng: random.Random
    miss: bool
    parallel: bool
    mistake: bool
    missed: bool = False  # the miss really happened

    @classmethod
    def draw(cls, question: Question, wanted: Needed, config: Config) -> _Plan:
        """Draw from the seed and the question's id; parts that the turn limit leaves no room for fall away."""
        rng, sft = random.Random(f"{config.seed} {question.id}"), config.sft
        mistake = rng.random() < sft.wrong_turn_share
        miss = rng.random() < sft.search_miss_share
        parallel = rng.random() < sft.parallel_share
        room = config.agent.max_turns - 3  # a search, a query, an answer
        parallel = parallel or len(wanted.tables) > room
        room -= 1 if parallel else len(wanted.tables)
        return cls(rng, miss=miss and room > mistake, parallel=parallel, mistake=mistake and room > 0)


@dataclass
class _Conversation:
    """Messages so far; assistant turns are executed as they are added."""

    toolbox: Toolbox
    rng: random.Random
    messages: list[Message]
    trained: list[bool] = field(default_factory=list)
    read: str = ""  # everything the tools have shown

    def __post_init__(self) -> None:
        self.trained = [False] * len(self.messages)

    def act(self, calls: Sequence[ToolCall], *, trained: bool = True) -> list[Observation]:
        """One assistant turn with these calls, and their observations."""
        content = wording.thought(calls[0].name) if self.rng.random() < THOUGHT_SHARE else ""
        turn = sum(message["role"] == "assistant" for message in self.messages) + 1
        encoded = [_encode(call, f"call_{turn}_{i}") for i, call in enumerate(calls)]
        self._add({"role": "assistant", "content": content, "tool_calls": encoded}, trained)
        observations = [self.toolbox.run(call) for call in calls]
        for sent, observation in zip(encoded, observations, strict=True):
            self._add({"role": "tool", "tool_call_id": sent["id"], "content": observation.text}, False)
            self.read += observation.text + "\n"
        return observations

    def say(self, text: str) -> None:
        """The final answer."""
        self._add({"role": "assistant", "content": text}, True)

    def _add(self, message: Message, trained: bool) -> None:
        self.messages.append(message)
        self.trained.append(trained)


def _find_tables(talk: _Conversation, question: Question, wanted: Needed, plan: _Plan) -> None:
    """Search until every needed table has been shown, or points to one that was (its columns will name it)."""
    if plan.miss:
        poor = ToolCall("search_schema", {"query": wording.poor_query(question.question, plan.rng)})
        if not _tables_shown(talk.toolbox.run(poor).text) & set(wanted.tables):
            talk.act([poor], trained=False)
            plan.missed = True
    query = ToolCall("search_schema", {"query": wording.search_query(question.question)})
    if not _tables_shown(talk.act([query])[0].text) & set(wanted.tables):
        raise Dropped("search finds no needed table")


def _tables_shown(search_result: str) -> set[str]:
    """Tables that have a line of their own in a search result."""
    return {line.split(" (")[0].strip('"') for line in search_result.splitlines() if "): matches " in line}


def _look_at_columns(talk: _Conversation, wanted: Needed, plan: _Plan) -> None:
    calls = [ToolCall("get_columns", {"table": table}) for table in wanted.tables]
    shown: set[str] = set()
    for turn in [calls] if plan.parallel else [[call] for call in calls]:
        if not all(re.search(rf"(?<!\w){re.escape(call.arguments['table'])}(?!\w)", talk.read) for call in turn):
            raise Dropped("no tool names a needed table")
        for call, observation in zip(turn, talk.act(turn), strict=True):
            shown |= {f"{call.arguments['table']}.{column}" for column in _columns_shown(observation.text)}
    if not set(wanted.columns) <= shown:
        raise Dropped("a needed column is not shown")


def _columns_shown(columns_result: str) -> Iterator[str]:
    """Columns that have a line of their own in the answer of get_columns."""
    for line in columns_result.splitlines()[1:]:
        quoted = re.match(r'"((?:[^"]|"")+)"', line)
        yield quoted[1].replace('""', '"') if quoted else line.split(" ")[0]


def _make_mistake(talk: _Conversation, sql: str, wanted: Needed, rng: random.Random) -> Mistake | None:
    """Add a wrong query with its real outcome, if one of the candidates really goes wrong."""
    database = talk.toolbox.database
    for mistake in mistakes(sql, wanted, database.schema, rng):
        if not _answers_gold(database, sql, mistake.sql):
            talk.act([ToolCall("execute_sql", {"sql": mistake.sql})], trained=False)
            return mistake
    return None


def _clean(gold_sql: str, database: Database) -> str:
    """The gold as it should be taught: tidy, and texts in single quotes where it wrote them in double ones."""
    sql = tidy(gold_sql)
    while text := database.text_in_double_quotes(sql):
        sql, before = sql.replace(f'"{text}"', "'" + text.replace("'", "''") + "'"), sql
        if sql == before:
            break
    return sql


def _answers_gold(database: Database, gold_sql: str, sql: str) -> bool:
    most = database.limits.max_compare_rows
    try:
        gold, result = database.execute(gold_sql, most), database.execute(sql, most)
    except SqlError:
        return False
    return execution_match(gold, result, ordered=gold_is_ordered(gold_sql))


def _check_limits(talk: _Conversation, config: Config, tokenizer: Tokenizer) -> None:
    """A turn longer than the agent may write, or more turns than it may take, would teach failing episodes."""
    turns = [message for message in talk.messages if message["role"] == "assistant"]
    if len(turns) > config.agent.max_turns:
        raise Dropped("more turns than agent.max_turns")
    for message in turns:
        text = render_turn(message["content"], [_decode(call) for call in message.get("tool_calls", ())])
        if tokenizer.count(text) + 1 > config.agent.max_turn_tokens:  # and the end-of-turn token
            raise Dropped("a turn longer than agent.max_turn_tokens")


def _encode(call: ToolCall, call_id: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _decode(call: dict[str, Any]) -> ToolCall:
    function = call["function"]
    return ToolCall(function["name"], json.loads(function["arguments"]))
