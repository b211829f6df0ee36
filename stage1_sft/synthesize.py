"""Executed traces: from (question, gold SQL, database) to the conversation a careful agent would have had.

Every observation is what the real tool answered on the real database. A trace is kept only if replaying all its calls on
a freshly opened database gives the same observations and its last query gives the gold's result; what is dropped is
counted by reason. The same question and seed give the same trace, whatever comes before it.

A trace: search the schema, look at the columns of each needed table, run the query, answer. Where the question's words do
not lead to a table or the limits cut a column off, another search by its name follows. Some traces begin with a search
that misses or contain a wrong query with its real outcome; those turns are not trained, what follows them is.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from shared.agent.episode import encode_call
from shared.agent.prompts import opening_messages
from shared.agent.tools import Toolbox
from shared.config.schema import Config
from shared.models.tokenizer import Tokenizer
from shared.records import Question, ToolCall
from shared.sql.database import Database, QueryResult, SqlError
from stage1_sft import wording
from stage1_sft.gold import Needed, mistakes, needed, tidy
from stage1_sft.traces import TOO_MANY_TURNS, TURN_TOO_LONG, Dropped, Trace, answers_gold, calls_of, flaw, make_trace

SHUFFLED_SHARE = 0.3  # of the traces look at their tables in another order than the query's
THOUGHT_SHARE = 0.1  # of the tool turns; a thought costs tokens in every episode, so the model should learn few


def synthesize(
    questions: Sequence[Question], *, limit: int, config: Config, tokenizer: Tokenizer, label: str
) -> tuple[list[Trace], list[Trace], dict[str, list[str]]]:
    """Up to `limit` verified traces of the questions in their order; traces too long for the agent's limits; and by
    reason the ids of the questions that were dropped, these included. Raises UserError for a missing or damaged database.
    """
    traces, too_long, dropped = list[Trace](), list[Trace](), dict[str, list[str]]()
    with tqdm(total=min(limit, len(questions)), desc=f"{label} traces", unit="trace") as bar:
        for question in questions:
            if len(traces) == limit:
                break
            trace, reason = verified(question, config, tokenizer)
            if trace and not reason:
                traces.append(trace)
                bar.update()
                continue
            dropped.setdefault(reason, []).append(question.id)
            if trace and reason in (TOO_MANY_TURNS, TURN_TOO_LONG):
                too_long.append(trace)
    return traces, too_long, dropped


def verified(question: Question, config: Config, tokenizer: Tokenizer) -> tuple[Trace | None, str]:
    """The trace of a question and why it may not be trained on, "" if it may.

    Its optional parts are left out where only they go beyond what the agent may write.
    """
    try:
        trace = build(question, config, tokenizer)
        reason = flaw(trace, question, config, tokenizer)
        if reason in (TOO_MANY_TURNS, TURN_TOO_LONG):
            bare = config.sft.model_copy(
                update={"wrong_turn_share": 0.0, "search_miss_share": 0.0, "parallel_share": 1.0}
            )
            trace = build(question, config.model_copy(update={"sft": bare}), tokenizer, thought_share=0.0)
            reason = flaw(trace, question, config, tokenizer)
    except Dropped as error:
        return None, str(error)
    return trace, reason


def describe_yield(questions: Sequence[Question], config: Config, tokenizer: Tokenizer) -> list[str]:
    """How many of the questions become a trace, why the others do not, and how much the traces differ, as lines."""
    limit, by_id = len(questions), {question.id: question for question in questions}
    traces, _, dropped = synthesize(questions, limit=limit, config=config, tokenizer=tokenizer, label="all")
    lines = [f"{len(traces)} of {limit} golds become a verified trace: {len(traces) / max(1, limit):.1%}"]
    for reason, ids in sorted(dropped.items(), key=lambda item: -len(item[1])):
        example = by_id[ids[0]]
        lines.append(f"  {len(ids):4} {reason}, e.g. {example.id}: {example.question} | {example.gold_sql}")
    orders = {tuple(call.name for turn in trace["messages"] for call in calls_of(turn)) for trace in traces}
    rows = [trace["provenance"] for trace in traces]
    parts = Counter(name for row in rows for name in ("search_miss", "parallel_columns") if row[name])
    parts += Counter(row["mistake"] for row in rows if row["mistake"])
    found = ", ".join(f"{count} with {part}" for part, count in parts.most_common())
    return [*lines, f"{len(orders)} different orders of calls; {found or 'no optional part'}"]


def build(question: Question, config: Config, tokenizer: Tokenizer, *, thought_share: float = THOUGHT_SHARE) -> Trace:
    """The trace of one question, not yet verified. Raises Dropped, or UserError for a missing or damaged database."""
    database = Database(question.database, config.sandbox)
    sql = tidy(question.gold_sql)
    while text := database.text_in_double_quotes(sql):  # taught is the standard form, in single quotes
        before, sql = sql, sql.replace(f'"{text}"', "'" + text.replace("'", "''") + "'")
        if sql == before:
            break
    try:
        wanted = needed(sql, database.schema)
        gold = database.execute(sql)
    except ValueError as error:
        raise Dropped(str(error).split(":")[0]) from error
    except SqlError as error:
        slow = "gold takes longer than sandbox.timeout_seconds"
        raise Dropped(slow if error.kind == "timeout" else "gold fails") from error
    if not wanted.tables:
        raise Dropped("gold reads no table")
    return _Conversation(
        question, config, Toolbox(database, tokenizer, config.agent.observation_tokens), sql, wanted, thought_share
    ).trace(gold)


class _Conversation:
    """The conversation about one question; the calls of assistant turns are executed as they are added.

    Which optional parts it has is drawn from the seed and the question's id; the turn limit may leave no room for them.
    """

    def __init__(
        self, question: Question, config: Config, toolbox: Toolbox, sql: str, wanted: Needed, thought_share: float
    ) -> None:
        self.question, self.toolbox, self.sql, self.wanted = question, toolbox, sql, wanted
        self.max_turns, self.thought_share = config.agent.max_turns, thought_share
        self.messages = opening_messages(question.question)
        self.trained = [False] * len(self.messages)
        self.read = ""  # everything the tools have shown
        self.columns: set[str] = set()  # "table.column" of all that they have named
        self.rng = random.Random(f"{config.seed} {question.id}")
        draws = [self.rng.random() for _ in range(4)]
        tables, room = len(wanted.tables), self.max_turns - 3  # a search, a query, an answer
        self.parallel = draws[2] < config.sft.parallel_share or tables > room
        self.mistake = draws[0] < config.sft.wrong_turn_share and room > (1 if self.parallel else tables)
        # the tables may be found only one by one
        self.miss = draws[1] < config.sft.search_miss_share and room > tables + self.mistake
        self.waiting = [*wanted.tables]  # needed tables that it has not looked at yet, in their order
        if draws[3] < SHUFFLED_SHARE:
            self.rng.shuffle(self.waiting)

    def trace(self, gold: QueryResult) -> Trace:
        """The whole conversation as a trace; `gold` is the result of the query."""
        missed = self.find_tables()
        self.look_at_columns()
        mistake = self.make_mistake() if self.mistake and self.turns_left > 2 else None
        self.act(ToolCall("execute_sql", {"sql": self.sql}))
        self.messages.append({"role": "assistant", "content": wording.answer(gold)})
        self.trained.append(True)
        provenance = {
            "tables": list(self.wanted.tables),
            "columns": list(self.wanted.columns),
            "search_miss": missed,
            "parallel_columns": self.parallel and len(self.wanted.tables) > 1,
            "mistake": mistake,
        }
        return make_trace(self.question, self.messages, self.trained, provenance)

    @property
    def turns_left(self) -> int:
        """Assistant turns that the agent may still take."""
        return self.max_turns - sum(message["role"] == "assistant" for message in self.messages)

    def act(self, *calls: ToolCall, trained: bool = True) -> list[str]:
        """One assistant turn with these calls; returns what the tools answered."""
        thought = self.rng.choice(wording.THOUGHTS[calls[0].name]) if self.rng.random() < self.thought_share else ""
        turn = self.max_turns - self.turns_left + 1
        encoded = [encode_call(call, f"call_{turn}_{i}") for i, call in enumerate(calls)]
        self.messages.append({"role": "assistant", "content": thought, "tool_calls": encoded})
        answers = [self.toolbox.run(call).text for call in calls]
        for sent, answer in zip(encoded, answers, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": sent["id"], "content": answer})
            self.read += answer + "\n"
            self.columns |= _columns_found(answer)
        self.trained += [trained, *(False for _ in calls)]
        return answers

    def find_tables(self) -> bool:
        """Search by the words of the question; where they name no needed table, once more by the name of one.

        A search that finds no needed table is not trained. Returns whether a poor search came first.
        """
        poor = _search(wording.poor_query(self.question.question, self.rng))
        found = {column.split(".")[0] for column in _columns_found(self.toolbox.run(poor).text)}
        miss = self.miss and found.isdisjoint(self.wanted.tables)
        if miss:
            self.act(poor, trained=False)
        query = _search(wording.search_query(self.question.question))
        led = any(_names(self.toolbox.run(query).text, table) for table in self.wanted.tables)
        self.act(query, trained=led)
        if not led:
            self.search_by_name(self.wanted.tables[0])
        return miss

    def look_at_columns(self) -> None:
        """Look at every needed table that a tool has named; search for the others, and for columns that were cut off."""
        while self.waiting:
            unknown = [table for table in self.waiting if not _names(self.read, table)]
            scarce = len(self.waiting) + len(unknown) > self.turns_left - 2  # for one table after the other
            if unknown and (scarce or unknown == self.waiting):
                self.search_by_name(*(unknown if scarce else unknown[:1]))
                continue
            known = [table for table in self.waiting if table not in unknown]
            turn = known if self.parallel or scarce else known[:1]
            for table, answer in zip(
                turn, self.act(*(ToolCall("get_columns", {"table": name}) for name in turn)), strict=True
            ):
                self.waiting.remove(table)
                for line in answer.splitlines()[1:]:
                    quoted = re.match(r'"((?:[^"]|"")+)"', line)
                    self.columns.add(f"{table}.{quoted[1].replace('""', '"') if quoted else line.split(' ')[0]}")
        while missing := [column for column in self.wanted.columns if column not in self.columns]:
            self.act(_search(wording.by_name(*missing)))
            if self.columns.isdisjoint(missing):
                raise Dropped("a needed column is not shown")

    def search_by_name(self, *tables: str) -> None:
        """One search for all of these tables, which has to name one at least."""
        self.act(_search(wording.by_name(*tables)))
        if not any(_names(self.read, table) for table in tables):
            raise Dropped("no tool names a needed table")

    def make_mistake(self) -> str | None:
        """Add a wrong query with its real outcome, if one of the candidates really goes wrong; returns its kind."""
        database = self.toolbox.database
        for mistake in mistakes(self.sql, self.wanted, database.schema, self.rng):
            if not answers_gold(database, self.sql, mistake.sql):
                self.act(ToolCall("execute_sql", {"sql": mistake.sql}), trained=False)
                return mistake.kind
        return None


def _search(query: str) -> ToolCall:
    return ToolCall("search_schema", {"query": query})


def _names(text: str, table: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(table)}(?!\w)", text) is not None


def _columns_found(search_result: str) -> set[str]:
    """Columns, as "table.column", in the lines of a search result."""
    lines = re.findall(r"^(.+?) \((.*)\): matches ", search_result, re.MULTILINE)
    return {f"{table.strip('"')}.{column.strip('"')}" for table, columns in lines for column in columns.split(", ")}
