"""Executed traces: from (question, gold SQL, database) to the conversation a careful agent would have had.

Every observation is what the real tool answered on the real database. A trace is kept only if replaying all its calls on
a freshly opened database gives the same observations and its last query gives the gold's result; what is dropped is
counted by reason. The same question and seed give the same trace, whatever comes before it.

A trace: search the schema, look at the columns of each needed table, run the query, answer. Where the question's words do
not lead to a table or the limits cut a column off, another search by its name follows. Some traces begin with a search
that misses or contain a wrong query with its real outcome; those turns are not trained, what follows them is.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from shared.agent.episode import encode_call
from shared.agent.prompts import opening_messages
from shared.agent.tools import Observation, Toolbox
from shared.config.schema import Config
from shared.models.tokenizer import Tokenizer
from shared.records import Question, ToolCall
from shared.sql.database import Database, QueryResult, SqlError
from stage1_sft import wording
from stage1_sft.gold import Needed, mistakes, needed, tidy
from stage1_sft.traces import Dropped, TooLong, Trace, answers_gold, make_trace, verify

SHUFFLED_SHARE = 0.3  # of the traces look at their tables in another order than the query's
THOUGHT_SHARE = 0.1  # of the tool turns; a thought costs tokens in every episode, so the model should learn few


def synthesize(
    questions: Sequence[Question], *, limit: int, config: Config, tokenizer: Tokenizer, label: str
) -> tuple[list[Trace], list[Trace], Counter[str]]:
    """Up to `limit` verified traces of the questions in their order, the traces that are too long for the agent's limits,
    and how many questions were dropped for which reason, these included.
    """
    traces: list[Trace] = []
    too_long: list[Trace] = []
    dropped: Counter[str] = Counter()
    with tqdm(total=min(limit, len(questions)), desc=f"{label} traces", unit="trace") as bar:
        for question in questions:
            if len(traces) == limit:
                break
            try:
                traces.append(verified(question, config, tokenizer))
                bar.update()
            except Dropped as reason:
                dropped[str(reason)] += 1
                if isinstance(reason, TooLong):
                    too_long.append(reason.trace)
    return traces, too_long, dropped


def verified(question: Question, config: Config, tokenizer: Tokenizer) -> Trace:
    """The verified trace of a question, without its optional parts where only they go beyond what the agent may write.

    Raises Dropped, or UserError for a missing or damaged database.
    """
    trace = build(question, config, tokenizer)
    try:
        verify(trace, question, config, tokenizer)
    except TooLong:
        bare = dataclasses.replace(config.sft, wrong_turn_share=0.0, search_miss_share=0.0, parallel_share=1.0)
        trace = build(question, dataclasses.replace(config, sft=bare), tokenizer, thought_share=0.0)
        verify(trace, question, config, tokenizer)
    return trace


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
        raise Dropped("gold fails") from error
    if not wanted.tables:
        raise Dropped("gold reads no table")
    talk = _Conversation(question, sql, wanted, database, config, tokenizer, thought_share)
    return talk.trace(gold)


class _Conversation:
    """The conversation about one question; the calls of assistant turns are executed as they are added.

    Which optional parts it has is drawn from the seed and the question's id; the turn limit may leave no room for them.
    """

    def __init__(
        self,
        question: Question,
        sql: str,
        wanted: Needed,
        database: Database,
        config: Config,
        tokenizer: Tokenizer,
        thought_share: float,
    ) -> None:
        self.question, self.sql, self.wanted, self.database = question, sql, wanted, database
        self.toolbox = Toolbox(database, tokenizer, config.agent.observation_tokens)
        self.max_turns, self.thought_share = config.agent.max_turns, thought_share
        self.messages = opening_messages(question.question)
        self.trained = [False] * len(self.messages)
        self.read = ""  # everything the tools have shown
        self.columns: set[str] = set()  # "table.column" of all that they have named
        self.rng = rng = random.Random(f"{config.seed} {question.id}")
        mistake = rng.random() < config.sft.wrong_turn_share
        miss = rng.random() < config.sft.search_miss_share
        parallel = rng.random() < config.sft.parallel_share
        self.shuffled = rng.random() < SHUFFLED_SHARE
        tables, room = len(wanted.tables), self.max_turns - 3  # a search, a query, an answer
        self.parallel = parallel or tables > room
        self.mistake = mistake and room > (1 if self.parallel else tables)
        self.miss = miss and room > tables + self.mistake  # the tables may be found only one by one

    def trace(self, gold: QueryResult) -> Trace:
        """The whole conversation as a trace; `gold` is the result of the query."""
        missed = self.miss and self.search_in_vain()
        self.find_tables()
        self.look_at_columns()
        mistake = self.make_mistake() if self.mistake and self.turns_left > 2 else None
        self.act([ToolCall("execute_sql", {"sql": self.sql})])
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

    def act(self, calls: Sequence[ToolCall], *, trained: bool = True) -> list[Observation]:
        """One assistant turn with these calls, and their observations."""
        content = wording.thought(calls[0].name, self.rng) if self.rng.random() < self.thought_share else ""
        turn = self.max_turns - self.turns_left + 1
        encoded = [encode_call(call, f"call_{turn}_{i}") for i, call in enumerate(calls)]
        self.messages.append({"role": "assistant", "content": content, "tool_calls": encoded})
        observations = [self.toolbox.run(call) for call in calls]
        for sent, observation in zip(encoded, observations, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": sent["id"], "content": observation.text})
            self.read += observation.text + "\n"
            self.columns |= _columns_found(observation.text)
        self.trained += [trained, *(False for _ in calls)]
        return observations

    def search_in_vain(self) -> bool:
        """Add a poor search, not trained, unless it finds a needed table after all."""
        poor = _search(wording.poor_query(self.question.question, self.rng))
        found = {column.split(".")[0] for column in _columns_found(self.toolbox.run(poor).text)}
        if not found.isdisjoint(self.wanted.tables):
            return False
        self.act([poor], trained=False)
        return True

    def find_tables(self) -> None:
        """Search by the words of the question; where they name no needed table, once more by the name of one."""
        query = _search(wording.search_query(self.question.question))
        found = any(_names(self.toolbox.run(query).text, table) for table in self.wanted.tables)
        self.act([query], trained=found)
        if not found:
            self.search_by_name(self.wanted.tables[0])

    def look_at_columns(self) -> None:
        """Look at every needed table that a tool has named; search for the others, and for columns that were cut off."""
        waiting = list(self.wanted.tables)
        if self.shuffled:
            self.rng.shuffle(waiting)
        while waiting:
            unknown = [table for table in waiting if not _names(self.read, table)]
            scarce = len(waiting) + len(unknown) > self.turns_left - 2  # for one table after the other
            if unknown and (scarce or unknown == waiting):
                self.search_by_name(*(unknown if scarce else unknown[:1]))
                continue
            known = [table for table in waiting if table not in unknown]
            turn = known if self.parallel or scarce else known[:1]
            calls = [ToolCall("get_columns", {"table": table}) for table in turn]
            for table, observation in zip(turn, self.act(calls), strict=True):
                for line in observation.text.splitlines()[1:]:
                    quoted = re.match(r'"((?:[^"]|"")+)"', line)
                    self.columns.add(f"{table}.{quoted[1].replace('""', '"') if quoted else line.split(' ')[0]}")
            waiting = [table for table in waiting if table not in turn]
        while missing := {*self.wanted.columns} - self.columns:
            self.act([_search(wording.by_name(*(column for column in self.wanted.columns if column in missing)))])
            if missing.isdisjoint(self.columns):
                raise Dropped("a needed column is not shown")

    def search_by_name(self, *tables: str) -> None:
        """One search for all of these tables, which has to name one at least."""
        self.act([_search(wording.by_name(*tables))])
        if not any(_names(self.read, table) for table in tables):
            raise Dropped("no tool names a needed table")

    def make_mistake(self) -> str | None:
        """Add a wrong query with its real outcome, if one of the candidates really goes wrong; returns its kind."""
        for mistake in mistakes(self.sql, self.wanted, self.database.schema, self.rng):
            if not answers_gold(self.database, self.sql, mistake.sql):
                self.act([ToolCall("execute_sql", {"sql": mistake.sql})], trained=False)
                return mistake.kind
        return None


def _search(query: str) -> ToolCall:
    return ToolCall("search_schema", {"query": query})


def _names(text: str, table: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(table)}(?!\w)", text) is not None


def _columns_found(search_result: str) -> set[str]:
    """Columns, as "table.column", in the lines of a search result."""
    return {
        f"{table.strip('"')}.{column.strip('"')}"
        for table, columns in re.findall(r"^(.+?) \((.*)\): matches ", search_result, re.MULTILINE)
        for column in columns.split(", ")
    }
