"""Executed traces: from (question, gold SQL, database) to the conversation a careful agent would have had.

Every observation is what the real tool answered on the real database. A trace is kept only if replaying all its calls
on a freshly opened database gives the same observations and its last query gives the gold's result; what is dropped
is counted by reason. The same question and seed give the same trace, whatever comes before it.

A trace: search the schema, look at the columns of each needed table in the order in which the search named them, run
the query, answer. Where the question's words do not lead to a table or the limits cut a column off, another search by
its name follows. Some traces begin with a search that misses or contain a wrong query with its real outcome; those
turns are not trained, what follows them is. A trained turn holds nothing that is drawn at random: a small model learns
only what the conversation before it tells."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from shared.agent.episode import encode_call
from shared.agent.prompts import prompts_of
from shared.agent.tools import BUILT_IN, Toolbox, registry
from shared.config.schema import Config
from shared.models.tokenizer import Tokenizer
from shared.records import Question, ToolCall
from shared.reward.queries import gold_is_ordered
from shared.sql.database import Database, SqlError
from stage1_sft import wording
from stage1_sft.gold import MISSING_TABLE, Mistake, mistakes, needed, plain, tidy
from stage1_sft.traces import TOO_MANY_TURNS, TURN_TOO_LONG, Dropped, Trace, answers_gold, calls_of, flaw, make_trace

REPEAT_SHARE = 0.2  # of the wrong queries, where a turn is left for it, are asked a second time
GIVE_UP_SHARE = 0.2  # of the mistakes come after the right query: the answer goes back to that
_ANSWER_TOKENS = 120  # a longer list is not written out, and none that takes a quarter of agent.max_turn_tokens
_LOOK_UP_WORDS = 3  # of the question, at most, with which an own tool is tried


def synthesize(
    questions: Sequence[Question], *, limit: int, config: Config, tokenizer: Tokenizer, label: str
) -> tuple[list[Trace], list[Trace], dict[str, list[str]]]:
    """Up to `limit` verified traces of the questions in their order; traces too long for the agent's limits; and by
    reason the ids of the questions that were dropped, these included. Raises UserError for a missing or damaged
    database."""
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
            trace = build(question, config, tokenizer, bare=True)
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


def build(question: Question, config: Config, tokenizer: Tokenizer, *, bare: bool = False) -> Trace:
    """The trace of one question, not yet verified; `bare` leaves out what is optional.

    Raises Dropped, or UserError for a missing or damaged database.
    """
    return _Conversation(question, config, tokenizer, bare).trace()


class _Conversation:
    """The conversation about one question; the calls of assistant turns are executed as they are added.

    Which optional parts it has is drawn from the seed and the question's id; the turn limit may leave no room for them.
    """

    def __init__(self, question: Question, config: Config, tokenizer: Tokenizer, bare: bool) -> None:
        self.question, self.tokenizer, self.config, self.limits = question, tokenizer, config, config.agent
        self.database = Database(question.database, config.sandbox)
        self.sql = tidy(question.gold_sql)
        while text := self.database.text_in_double_quotes(self.sql):  # the standard form, in single quotes, is taught
            before, self.sql = self.sql, self.sql.replace(f'"{text}"', "'" + text.replace("'", "''") + "'")
            if self.sql == before:
                break
        if answers_gold(self.database, self.sql, simple := plain(self.sql, question.question)):
            self.sql = simple
        try:
            self.wanted = needed(self.sql, self.database.schema)
            self.gold = self.database.execute(self.sql)
        except ValueError as error:
            raise Dropped(str(error).split(":")[0]) from error
        except SqlError as error:
            slow = "gold takes longer than sandbox.timeout_seconds"
            raise Dropped(slow if error.kind == "timeout" else "gold fails") from error
        if not self.wanted.tables:
            raise Dropped("gold reads no table")
        self.toolbox = self.fresh_toolbox()
        self.messages = prompts_of(config.agent).opening(question.question)
        self.trained = [False] * len(self.messages)
        self.read = ""  # everything the tools have shown
        self.columns: set[str] = set()  # "table.column" of all that they have named
        self.looked_at: set[str] = set()  # tables
        self.last_sql = ""  # the last query that ran
        self.rng, sft = random.Random(f"{config.seed} {question.id}"), config.sft
        draws = [self.rng.random() + bare for _ in range(3)]
        self.language = wording.language_of(question.question)
        self.look_ups = [] if bare else self.find_look_ups()
        tables = len(self.wanted.tables)
        room = self.limits.max_turns - 3 - len(self.look_ups)  # a search, a query, an answer
        self.parallel = bare or draws[2] < sft.parallel_share or tables > room
        self.may_err = draws[0] < sft.wrong_turn_share and room > (1 if self.parallel else tables)
        # the tables may be found only one by one
        self.may_miss = draws[1] < sft.search_miss_share and room > tables + self.may_err

    def trace(self) -> Trace:
        """The whole conversation as a trace."""
        for call in self.look_ups:
            self.act(call)
        provenance = {
            "tables": list(self.wanted.tables),
            "columns": list(self.wanted.columns),
            "language": self.language,
            "search_miss": self.find_tables(),
            "parallel_columns": self.parallel and len(self.wanted.tables) > 1,
            "mistake": None,
            "way_out": None,
        }
        first, *others = self.wanted.tables
        mistake = self.find_mistake() if self.may_err else None
        gives_up = self.rng.random() < GIVE_UP_SHARE
        if mistake and mistake.kind == MISSING_TABLE:
            if self.turns_left > 3 + len(others):
                self.look_at_columns(first, trained=False)
                provenance |= self.err(mistake, reserved=2 + len(others))
            mistake = None
        self.look_at_columns(*self.wanted.tables)
        if mistake and self.turns_left > 2 and not gives_up:
            provenance |= self.err(mistake, reserved=2)
            mistake = None
        (shown,) = self.act(ToolCall("execute_sql", {"sql": self.sql}))
        if mistake and self.turns_left > 1:
            provenance |= {**self.err(mistake, reserved=1), "way_out": "give_up"}
        cut, most = re.search(r"\(first (\d+) of", shown), min(_ANSWER_TOKENS, self.limits.max_turn_tokens // 4)
        answer = wording.answer(
            self.gold,
            self.language,
            shown=int(cut[1]) if cut else len(self.gold.rows),
            ordered=gold_is_ordered(self.sql),
            fits=lambda text: self.tokenizer.count(text) <= most,
        )
        if self.last_sql != self.sql:  # a later, worse query ran: the best one is submitted by its text
            answer += f"\n```sql\n{self.sql}\n```"
        self.messages.append({"role": "assistant", "content": answer})
        self.trained.append(True)
        return make_trace(self.question, self.messages, self.trained, self.config, provenance)

    @property
    def turns_left(self) -> int:
        """Assistant turns that the agent may still take."""
        return self.limits.max_turns - [message["role"] for message in self.messages].count("assistant")

    def act(self, *calls: ToolCall, trained: bool = True) -> list[str]:
        """One assistant turn with these calls; returns what the tools answered."""
        turn = self.limits.max_turns - self.turns_left + 1
        encoded = [encode_call(call, f"call_{turn}_{i}") for i, call in enumerate(calls)]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": encoded})
        answers = [self.toolbox.run(call) for call in calls]
        for call, sent, answer in zip(calls, encoded, answers, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": sent["id"], "content": answer.text})
            self.read += answer.text + "\n"
            self.columns |= _columns_found(answer.text)
            if call.name == "execute_sql" and answer.ok:
                self.last_sql = call.arguments["sql"]
        self.trained += [trained, *(False for _ in calls)]
        return [answer.text for answer in answers]

    def fresh_toolbox(self) -> Toolbox:
        """A toolbox that has seen no call yet; it answers repeated calls differently."""
        return Toolbox(self.database, self.tokenizer, self.limits, self.question.question)

    def find_look_ups(self) -> list[ToolCall]:
        """For each own tool its first call that is answered; asked are runs of the question's words, longest first."""
        words = re.findall(r"[^\W_][\w-]*", self.question.question)
        runs = [" ".join(words[i : i + n]) for n in range(_LOOK_UP_WORDS, 0, -1) for i in range(len(words) - n + 1)]
        found = []
        for tool in [*registry(self.limits.tools).values()][len(BUILT_IN) :]:
            calls = (ToolCall(tool.name, {tool.argument: run}) for run in runs)
            found += [call for call in calls if self.fresh_toolbox().run(call).ok][:1]
        return found

    def find_tables(self) -> bool:
        """Search by the words of the question; where they name no needed table, once more by the name of one.

        A search that finds no needed table is not trained. Returns whether a poor search came first.
        """
        poor = wording.poor_query(self.question.question, self.rng)
        found = {column.split(".")[0] for column in _columns_found(self.fresh_toolbox().run(_search(poor)).text)}
        if missed := self.may_miss and found.isdisjoint(self.wanted.tables):
            self.act(_search(poor), trained=False)
        query = wording.search_query(self.question.question)
        answer = self.fresh_toolbox().run(_search(query)).text
        leads = any(_named(table, answer) >= 0 for table in self.wanted.tables)
        self.act(_search(query), trained=leads)
        if not leads:
            self.search_by_name(self.wanted.tables[0])
        return missed

    def look_at_columns(self, *tables: str, trained: bool = True) -> None:
        """Look at those of the tables that it has not looked at yet and that a tool has named, in the order of naming;
        search for the others, and for needed columns that were cut off.
        """
        waiting = [table for table in tables if table not in self.looked_at]
        while waiting:
            unknown = [table for table in waiting if _named(table, self.read) < 0]
            scarce = len(waiting) + len(unknown) > self.turns_left - 2  # for one table after the other
            if unknown and (scarce or unknown == waiting):
                self.search_by_name(*(unknown if scarce else unknown[:1]))
                continue
            known = [table for table in waiting if table not in unknown]
            known.sort(key=lambda table: _named(table, self.read))
            turn = known if self.parallel or scarce else known[:1]
            answers = self.act(*(ToolCall("get_columns", {"table": table}) for table in turn), trained=trained)
            for table, answer in zip(turn, answers, strict=True):
                waiting.remove(table)
                self.looked_at.add(table)
                for line in answer.splitlines()[1:]:
                    quoted = re.match(r'"((?:[^"]|"")+)"', line)
                    self.columns.add(f"{table}.{quoted[1].replace('""', '"') if quoted else line.split(' ')[0]}")
        wanted = [column for column in self.wanted.columns if column.startswith(tuple(f"{table}." for table in tables))]
        while missing := [column for column in wanted if column not in self.columns]:
            self.act(_search(wording.by_name(*missing)))
            if self.columns.isdisjoint(missing):
                raise Dropped("a needed column is not shown")

    def search_by_name(self, *tables: str) -> None:
        """One search for all of these tables, which has to name one at least."""
        self.act(_search(wording.by_name(*tables)))
        if not any(_named(table, self.read) >= 0 for table in tables):
            raise Dropped("no tool names a needed table")

    def find_mistake(self) -> Mistake | None:
        """The first of the candidates that really goes wrong."""
        candidates = mistakes(self.sql, self.wanted, self.database.schema, self.rng)
        return next((each for each in candidates if not answers_gold(self.database, self.sql, each.sql)), None)

    def err(self, mistake: Mistake, *, reserved: int) -> dict[str, str]:
        """A wrong query with its real outcome, maybe repeated, neither trained; then maybe a trained look at the
        values.

        `reserved` turns are left for what follows. Returns the provenance.
        """
        wrong, way_out = ToolCall("execute_sql", {"sql": mistake.sql}), ["repair"]
        self.act(wrong, trained=False)
        if self.turns_left > reserved and self.rng.random() < REPEAT_SHARE:
            self.act(wrong, trained=False)
            way_out.append("repeat")
        elif self.turns_left > reserved > 1 and mistake.look:
            self.act(ToolCall("execute_sql", {"sql": mistake.look}))
            way_out.append("look")
        return {"mistake": mistake.kind, "way_out": way_out[-1]}


def _search(query: str) -> ToolCall:
    return ToolCall("search_schema", {"query": query})


def _named(table: str, text: str) -> int:
    """Where the text first names the table; -1 where it does not."""
    found = re.search(rf"(?<!\w){re.escape(table)}(?!\w)", text)
    return found.start() if found else -1


def _columns_found(search_result: str) -> set[str]:
    """Columns, as "table.column", in the lines of a search result."""
    lines = re.findall(r"^(.+?) \((.*)\): matches ", search_result, re.MULTILINE)
    return {f"{table.strip('"')}.{column.strip('"')}" for table, columns in lines for column in columns.split(", ")}
