"""Executed traces: from (question, gold SQL, database) to the conversation a careful agent would have had.

Every observation is what the real tool answered on the real database. A trace is kept only if running all its calls
again on a freshly opened database gives the same observations and its last query gives the gold's result; what is
dropped is counted by reason. The same question and seed give the same trace, whatever stands before it.

A trace: search the schema, look at the columns of each needed table, run the query, answer. Where the question's words do
not lead to a table or the limits cut a column off, another search by its name follows. Some traces begin with a search that
misses or contain a wrong query with its real outcome; those assistant messages are not trained, what follows them is.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from shared.agent.episode import encode_call
from shared.agent.prompts import opening_messages
from shared.agent.tools import Observation, Toolbox
from shared.config.schema import Config
from shared.models.tokenizer import Tokenizer
from shared.records import Message, Question, ToolCall
from shared.sql.database import Database, SqlError
from stage1_sft import wording
from stage1_sft.gold import Mistake, Needed, mistakes, needed, tidy
from stage1_sft.traces import Dropped, TooLong, Trace, answers_gold, make_trace, verify

SHUFFLED_SHARE = 0.3  # of the traces look at their tables in another order than the query's
THOUGHT_SHARE = 0.1  # of the tool turns; a thought costs tokens in every episode, so the model should learn few


def synthesize(
    questions: Sequence[Question], *, limit: int, config: Config, tokenizer: Tokenizer, label: str
) -> tuple[list[Trace], list[Trace], Counter[str]]:
    """Up to `limit` verified traces of the questions in their order, others too long for the agent's limits, and how many
    questions were dropped for which reason, these included.
    """
    traces: list[Trace] = []
    too_long: list[Trace] = []
    dropped: Counter[str] = Counter()
    with tqdm(total=min(limit, len(questions)), desc=f"{label} traces", unit="trace") as bar:
        for question in questions:
            if len(traces) == limit:
                break
            try:
                trace = verified(question, config, tokenizer)
            except Dropped as reason:
                dropped[str(reason)] += 1
                if isinstance(reason, TooLong):
                    too_long.append(reason.trace)
                continue
            traces.append(trace)
            bar.update()
    return traces, too_long, dropped


def verified(question: Question, config: Config, tokenizer: Tokenizer) -> Trace:
    """The verified trace of a question, without its optional parts where only they go beyond what the agent may write.

    Raises Dropped, or UserError for a missing or damaged database.
    """
    trace = build(question, config, tokenizer)
    try:
        verify(trace, question, config, tokenizer)
    except TooLong:
        bare = config.sft.model_copy(update={"wrong_turn_share": 0.0, "search_miss_share": 0.0, "parallel_share": 1.0})
        trace = build(question, config.model_copy(update={"sft": bare}), tokenizer, thought_share=0.0)
        verify(trace, question, config, tokenizer)
    return trace


def build(question: Question, config: Config, tokenizer: Tokenizer, *, thought_share: float = THOUGHT_SHARE) -> Trace:
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
    talk = _Conversation(toolbox, plan.rng, opening_messages(question.question), thought_share)
    _find_tables(talk, question, wanted, plan)
    _look_at_columns(talk, wanted, plan)
    room = plan.turns - talk.turns - 2  # for a mistake before the query and the answer
    mistake = _make_mistake(talk, sql, wanted, plan.rng) if plan.mistake and room > 0 else None
    talk.act([ToolCall("execute_sql", {"sql": sql})])
    talk.say(wording.answer(gold))
    provenance = {
        "difficulty": question.difficulty,
        "form": question.form,
        "tables": list(wanted.tables),
        "columns": list(wanted.columns),
        "search_miss": plan.missed,
        "parallel_columns": plan.parallel and len(wanted.tables) > 1,
        "mistake": mistake.kind if mistake else None,
    }
    return make_trace(question, talk.messages, talk.trained, provenance)


@dataclass
class _Plan:
    """Which of the optional parts the trace of one question has."""

    rng: random.Random
    miss: bool
    parallel: bool
    mistake: bool
    shuffled: bool
    turns: int  # agent.max_turns
    missed: bool = False  # the miss really happened

    @classmethod
    def draw(cls, question: Question, wanted: Needed, config: Config) -> _Plan:
        """Draw from the seed and the question's id; parts that the turn limit leaves no room for fall away."""
        rng, sft = random.Random(f"{config.seed} {question.id}"), config.sft
        mistake = rng.random() < sft.wrong_turn_share
        miss = rng.random() < sft.search_miss_share
        parallel = rng.random() < sft.parallel_share
        shuffled = rng.random() < SHUFFLED_SHARE
        room = config.agent.max_turns - 3  # a search, a query, an answer
        parallel = parallel or len(wanted.tables) > room
        mistake = mistake and room > (1 if parallel else len(wanted.tables))
        miss = miss and room > len(wanted.tables) + mistake  # the tables may show themselves only one by one
        return cls(rng, miss=miss, parallel=parallel, mistake=mistake, shuffled=shuffled, turns=config.agent.max_turns)


@dataclass
class _Conversation:
    """Messages so far; assistant turns are executed as they are added."""

    toolbox: Toolbox
    rng: random.Random
    messages: list[Message]
    thought_share: float  # of the tool turns
    trained: list[bool] = field(default_factory=list)
    read: str = ""  # everything the tools have shown
    columns: set[str] = field(default_factory=set)  # "table.column" of all that they have named

    def __post_init__(self) -> None:
        self.trained = [False] * len(self.messages)

    @property
    def turns(self) -> int:
        """Assistant turns so far."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def act(self, calls: Sequence[ToolCall], *, trained: bool = True) -> list[Observation]:
        """One assistant turn with these calls, and their observations."""
        content = wording.thought(calls[0].name, self.rng) if self.rng.random() < self.thought_share else ""
        encoded = [encode_call(call, f"call_{self.turns + 1}_{i}") for i, call in enumerate(calls)]
        self._add({"role": "assistant", "content": content, "tool_calls": encoded}, trained)
        observations = [self.toolbox.run(call) for call in calls]
        for sent, observation in zip(encoded, observations, strict=True):
            self._add({"role": "tool", "tool_call_id": sent["id"], "content": observation.text}, False)
            self.read += observation.text + "\n"
            self.columns |= set(_found_by_search(observation.text))
        return observations

    def say(self, text: str) -> None:
        """The final answer."""
        self._add({"role": "assistant", "content": text}, True)

    def _add(self, message: Message, trained: bool) -> None:
        self.messages.append(message)
        self.trained.append(trained)


def _find_tables(talk: _Conversation, question: Question, wanted: Needed, plan: _Plan) -> None:
    """Search by the words of the question; where they name no needed table, once more by the name of one."""
    if plan.miss:
        poor = _search(wording.poor_query(question.question, plan.rng))
        if not {column.split(".")[0] for column in _found_by_search(talk.toolbox.run(poor).text)} & {*wanted.tables}:
            talk.act([poor], trained=False)
            plan.missed = True
    query = _search(wording.search_query(question.question))
    found = any(_names(talk.toolbox.run(query).text, table) for table in wanted.tables)
    talk.act([query], trained=found)
    if not found:
        _search_by_name(talk, wanted.tables[0])


def _look_at_columns(talk: _Conversation, wanted: Needed, plan: _Plan) -> None:
    """Look at every needed table that a tool has named; search for the others, and for columns that were cut off."""
    waiting = list(wanted.tables)
    if plan.shuffled:
        plan.rng.shuffle(waiting)
    while waiting:
        unknown = [table for table in waiting if not _names(talk.read, table)]
        left = plan.turns - talk.turns - 2  # the query and the answer need theirs
        scarce = len(waiting) + len(unknown) > left  # for one table after the other
        if unknown and (scarce or unknown == waiting):
            _search_by_name(talk, *(unknown if scarce else unknown[:1]))
            continue
        known = [table for table in waiting if table not in unknown]
        turn = known if plan.parallel or scarce else known[:1]
        calls = [ToolCall("get_columns", {"table": table}) for table in turn]
        for table, observation in zip(turn, talk.act(calls), strict=True):
            talk.columns |= {f"{table}.{column}" for column in _columns_shown(observation.text)}
        waiting = [table for table in waiting if table not in turn]
    while missing := {*wanted.columns} - talk.columns:
        talk.act([_search(wording.by_name(*(column for column in wanted.columns if column in missing)))])
        if missing.isdisjoint(talk.columns):
            raise Dropped("a needed column is not shown")


def _search_by_name(talk: _Conversation, *tables: str) -> None:
    """One search for all of these tables, which has to name one at least."""
    talk.act([_search(wording.by_name(*tables))])
    if not any(_names(talk.read, table) for table in tables):
        raise Dropped("no tool names a needed table")


def _search(query: str) -> ToolCall:
    return ToolCall("search_schema", {"query": query})


def _names(text: str, table: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(table)}(?!\w)", text) is not None


def _found_by_search(search_result: str) -> Iterator[str]:
    """Columns, as "table.column", in the lines of a search result."""
    for table, columns in re.findall(r"^(.+?) \((.*)\): matches ", search_result, re.MULTILINE):
        yield from (f"{table.strip('"')}.{column.strip('"')}" for column in columns.split(", "))


def _columns_shown(columns_result: str) -> Iterator[str]:
    """Columns that have a line of their own in the answer of get_columns."""
    for line in columns_result.splitlines()[1:]:
        quoted = re.match(r'"((?:[^"]|"")+)"', line)
        yield quoted[1].replace('""', '"') if quoted else line.split(" ")[0]


def _make_mistake(talk: _Conversation, sql: str, wanted: Needed, rng: random.Random) -> Mistake | None:
    """Add a wrong query with its real outcome, if one of the candidates really goes wrong."""
    database = talk.toolbox.database
    for mistake in mistakes(sql, wanted, database.schema, rng):
        if not answers_gold(database, sql, mistake.sql):
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
