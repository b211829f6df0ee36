"""The agent's tools and their registry: search_schema, get_columns, execute_sql, and those that agent.tools names.

Synthesis, RL, evaluation and serving all use this one implementation. An answer is text for the model: it never has
more than `agent.observation_tokens` tokens, keeps its first line and its count, and says what was left out. What the
model did wrong comes back as "Error: ..." with the names it may have meant; only a damaged database or a faulty tool of
the user's raises. A call that repeats an earlier one of its episode is not answered again: its answer says so and what
to try instead.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shared.config.schema import AgentConfig
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import ToolCall
from shared.sql.database import Database, SqlError, Table, quoted

_MAX_TABLES = 5  # lines of one schema search
_MATCHED_COLUMNS = 4  # columns named in one line of it
_SAMPLES = 3  # distinct values shown per column
_SAMPLE_LENGTH = 10_000  # characters or bytes; longer values are no samples
_LONGEST_TOKEN = 64  # characters; a text that needs longer ones to fit is cut without counting its tokens
_SAMPLE_ROWS = 1000  # rows looked at for them
_SAMPLE_WIDTH = 30  # characters of one sample text
_CELL_WIDTHS = (200, 40, 12)  # characters of one result cell; the next when not even one row fits
_RESERVED = frozenset(
    "add all alter and as between by case check collate commit constraint create default deferrable delete distinct "
    "drop else escape except exists foreign from group having in index insert intersect into is isnull join limit not "
    "notnull null on or order primary references select set table then to transaction union unique update using values "
    "when where".split()
)
_OTHER_FUNCTION = {
    "year": "use strftime('%Y', x)",
    "month": "use strftime('%m', x)",
    "day": "use strftime('%d', x)",
    "concat": "use a || b",
}
_AFTER_FAILING_AGAIN = "Use other tables or columns, look at them first, or answer with your best query."
_ABOUT_SCHEMA = re.compile(r"^\s*(pragma|show|describe|desc)\b|\bpragma_\w+|\binformation_schema\b", re.IGNORECASE)
_UNSEGMENTED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"  # Japanese, Chinese, Korean


@dataclass(frozen=True)
class Observation:
    """What the model gets to read after a call; `ok` is False when the tool refused or failed."""

    text: str
    ok: bool


class Toolbox:
    """The tools on one database, for one episode: it remembers its calls. Safe to use from several threads."""

    def __init__(self, database: Database, tokenizer: Tokenizer, agent: AgentConfig, question: str = "") -> None:
        self.database = database
        self._tokenizer = tokenizer
        self._max_tokens = agent.observation_tokens
        self._question = question
        self._made: list[ToolCall] = []
        self._tools = registry(agent.tools)

    def run(self, call: ToolCall) -> Observation:
        """Run one call. Mistakes of the model come back as an observation; a damaged database raises UserError."""
        tool = self._tools.get(call.name)
        try:
            if tool is None:
                raise SqlError(f"there is no tool {call.name!r}. Tools: {', '.join(self._tools)}.")
            value = call.arguments.get(tool.argument)
            if not isinstance(value, str) or not value.strip():
                raise SqlError(f'{call.name} needs the argument "{tool.argument}" as a text.')
            if len(call.arguments) > 1:
                raise SqlError(f'{call.name} takes only the argument "{tool.argument}".')
            text, ok = tool.function(self, value), True
        except SqlError as error:
            text, ok = f"Error: {error}", False
        if call_key(call) in map(call_key, self._made):
            advice = tool.advice if ok and tool else _AFTER_FAILING_AGAIN
            answer = "its answer stands above" if ok else "it fails again in the same way"
            text = f"{'' if ok else 'Error: '}You made this call before, {answer}. {advice}"
        self._made.append(call)
        if not self._fits(text):
            mark, text = " ...", text[: _LONGEST_TOKEN * self._max_tokens]
            text = self._tokenizer.cut(text, self._max_tokens - self._tokenizer.count(mark))[0] + mark
        return Observation(text, ok)

    def _fits(self, text: str) -> bool:
        return len(text) <= _LONGEST_TOKEN * self._max_tokens and self._tokenizer.count(text) <= self._max_tokens

    def search_schema(self, query: str) -> str:
        """A line for each of the best tables, with those of their columns that answer best to the searched words.

        A word counts more the fewer tables it fits, and three times as much in the name of a table as in a column's.
        Where no word fits any name, as in a question in another language, all tables are listed.
        """
        tables, words = self.database.schema.tables, _words(query)
        hits: dict[str, dict[str, float]] = {}
        for table in tables:
            names = [column.name for column in table.columns]
            weights = {word: max(3 * _fit(word, table.name), *(_fit(word, name) for name in names)) for word in words}
            hits[table.name] = {word: weight for word, weight in weights.items() if weight}
        frequency = Counter(word for found in hits.values() for word in found)
        score = {name: sum(weight / frequency[word] for word, weight in found.items()) for name, found in hits.items()}
        ranked = sorted((table for table in tables if score[table.name]), key=lambda table: -score[table.name])
        lines = []
        if not ranked:
            head = f'Nothing matches "{query[:60]}".'
            for table in tables:
                first = [column.name for column in table.columns[:_MATCHED_COLUMNS]]
                first += ["..."] if len(table.columns) > _MATCHED_COLUMNS else []
                others = dict.fromkeys(one.references.split(".")[0] for one in table.columns if one.references)
                reason = f": refers to {_listed(others)}" if others else ""
                lines.append(f"{_listed([table.name])} ({', '.join(first)}){reason}")
            text, shown = self._fitted(f"{head} All tables:", lines, lambda _: "")
            if shown < len(lines):
                every = _listed(table.name for table in tables)
                text, _ = self._fitted(f"{head} Tables: {every}.", lines, lambda _: "")
            return text
        for table in ranked[:_MAX_TABLES]:
            fits = {column.name: sum(_fit(word, column.name) for word in hits[table.name]) for column in table.columns}
            best = sorted((name for name in fits if fits[name]), key=lambda name: -fits[name])
            columns = [name for name in fits if name in best[:_MATCHED_COLUMNS]]
            columns += ["..."] if len(best) > _MATCHED_COLUMNS else []
            reasons = ", ".join(f'"{word}"' for word in hits[table.name])
            lines.append(f"{_listed([table.name])} ({', '.join(columns)}): matches {reasons}")
        return "\n".join(lines)

    def get_columns(self, name: str) -> str:
        """A line per column, with sample values while tokens last: one each before any second one.

        Columns that the question or a search touched get theirs first, keys last. Where those get none, the others lose
        their types; where the table is wider still, the others are left out.
        """
        parts = [name.strip(), name.strip().removeprefix("main.")]
        inner = [part[1:-1].replace(q * 2, q) for part in parts for q in "\"`'" if part[:1] == part[-1:] == q]
        bare = parts[1].strip("\"'`[] ")
        candidates = (name, *parts, *inner, bare)  # as the table is called, or as SQL would write it
        table = next(filter(None, map(self.database.schema.table, candidates)), None)
        if table is None:
            names = [table.name for table in self.database.schema.tables]
            raise SqlError(f"no such table: {bare}.{_nearest(bare, names)} Tables: {_listed(names)}.")
        source, deadline = quoted(table.name), time.monotonic() + self.database.limits.timeout_seconds
        ((count,),) = self.database.execute(f"SELECT count(*) FROM {source}").rows
        head = f"{_listed([table.name])}: {_plural(count, 'row')}"
        values = []
        for cell in (quoted(column.name) for column in table.columns):
            some = f"SELECT {cell} FROM {source} WHERE length({cell}) < {_SAMPLE_LENGTH} LIMIT {_SAMPLE_ROWS}"
            query = f"SELECT DISTINCT {cell} FROM ({some}) LIMIT {_SAMPLES}"
            try:
                rows = self.database.execute(query, seconds=deadline - time.monotonic()).rows
            except SqlError:  # an answer in time without samples is better than none
                rows = ()
            values.append([_literal(value) for (value,) in rows])
        searches = [str(call.arguments.get("query")) for call in self._made if call.name == "search_schema"]
        words = {*_words(" ".join([self._question, *searches]))} - {*_words(table.name)}
        touched = [any(_fit(word, column.name) for word in words) for column in table.columns]
        keys = [column.primary_key or column.references is not None for column in table.columns]
        offers = sorted(  # of sample values, in the order in which they are taken
            (turn, not touched[place], keys[place], self._tokenizer.count(f", e.g. {value}"), place)
            for place, some in enumerate(values)
            for turn, value in enumerate(some)
        )
        for typed in (True, False):
            lines = []
            for column, is_touched in zip(table.columns, touched, strict=True):
                kind, key = column.type if typed or is_touched else "", "PK" if column.primary_key else ""
                target = f"→ {column.references}" if column.references else ""
                lines.append(" ".join(filter(None, (_listed([column.name]), kind, key, target))))
            left = self._max_tokens - self._tokenizer.count("\n".join([head, *lines]))
            shown: list[list[str]] = [[] for _ in lines]
            for turn, _, _, cost, place in offers:
                if cost <= left:
                    shown[place].append(values[place][turn])
                    left -= cost
            lacking = [place for place in range(len(lines)) if touched[place] and values[place] and not shown[place]]
            if not lacking and (any(shown) or not offers):
                break
        if left < 0:
            shown = [own[:1] if is_touched else [] for own, is_touched in zip(values, touched, strict=True)]
        lines = [f"{line}, e.g. {', '.join(own)}" if own else line for line, own in zip(lines, shown, strict=True)]
        if left < 0:
            lines = [lines[place] for place in sorted(range(len(lines)), key=lambda place: not touched[place])]
        return self._fitted(
            head, lines, lambda n: f"... {_plural(len(lines) - n, 'more column')}" if n < len(lines) else ""
        )[0]

    def execute_sql(self, sql: str) -> str:
        """Header, rows and their count; cells are shortened where not even one row would fit."""
        try:
            result = self.database.execute(sql)
        except SqlError as error:
            if _ABOUT_SCHEMA.search(sql):
                raise SqlError("the schema is not read with SQL; call search_schema or get_columns.") from None
            raise SqlError(f"{error}{_hint(str(error), sql, self.database.schema.tables)}", error.kind) from None
        literal = self.database.text_in_double_quotes(sql)
        note = "" if literal is None else f'Note: "{literal[:40]}" is no column and was read as a text.\n'
        total, more = len(result.rows), "+" if result.truncated else ""

        def count(shown: int) -> str:
            is_all = shown == total and not more
            return f"({_plural(total, 'row')})" if is_all else f"(first {shown} of {total}{more} rows)"

        for width in _CELL_WIDTHS:
            lines = [" | ".join(_cell(value, width) for value in row) for row in result.rows]
            text, shown = self._fitted(note + " | ".join(result.columns), lines, count)
            if shown or not total:
                break
        return text

    def _fitted(self, head: str, lines: Sequence[str], tail: Callable[[int], str]) -> tuple[str, int]:
        """Head, as many lines as fit, and `tail(lines shown)`; also that number. A head too long itself is cut."""

        def text(shown: int) -> str:
            return "\n".join(part for part in (head, *lines[:shown], tail(shown)) if part)

        low, high = 0, len(lines)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(text(middle)):
                low = middle
            else:
                high = middle - 1
        if low == 0 and not self._fits(text(0)):
            head = head[: _LONGEST_TOKEN * self._max_tokens]
            end = f" ...\n{tail(0)}"
            head = self._tokenizer.cut(head, max(0, self._max_tokens - self._tokenizer.count(end) - 1))[0] + " ..."
        return text(low), low


@dataclass(frozen=True)
class Tool:
    """One entry of the registry: a function of one text, and what the model is told about it."""

    function: Callable[[Toolbox, str], str]  # raises SqlError for what the model can mend
    name: str
    argument: str  # name of the text
    meaning: str  # of the text
    description: str
    step: str  # its line in the system prompt
    advice: str = ""  # after a call that repeats an earlier one


BUILT_IN = (
    Tool(
        Toolbox.search_schema,
        "search_schema",
        argument="query",
        meaning="Words of the question.",
        description="Find tables and columns by keywords.",
        step="search_schema finds the tables that matter.",
        advice="Search for other words, or call get_columns.",
    ),
    Tool(
        Toolbox.get_columns,
        "get_columns",
        argument="table",
        meaning="Table name.",
        description="Columns, keys and sample values of one table.",
        step="get_columns shows a table's columns and sample values; copy names and values exactly.",
        advice="Look at another table, or write the query.",
    ),
    Tool(
        Toolbox.execute_sql,
        "execute_sql",
        argument="sql",
        meaning="The query.",
        description="Run one SELECT on SQLite.",
        step="execute_sql runs one SELECT; nothing else is allowed. Fix errors and try again.",
        advice="Answer if it is what was asked for, or change the query.",
    ),
)
REVISIONS: tuple[str, ...] = ()
"""One phrase for each change of what a built-in tool answers; every fingerprint covers it (see test_tools.py)."""


@cache
def registry(own: str | None = None) -> dict[str, Tool]:
    """All tools by name; `own` is the value of agent.tools. Raises UserError for a function that cannot be a tool."""
    tools = {tool.name: tool for tool in (*BUILT_IN, *map(_own_tool, re.findall(r"[\w.:]+", own or "")))}
    if len(tools) < len(BUILT_IN) + (own or "").count(":"):
        raise UserError(f"Setting agent.tools is {own!r}, where a name stands twice; the built-in ones are taken, too.")
    return tools


def _own_tool(name: str) -> Tool:
    """The tool of a user's function `f(text)` or `f(text, database)`.

    Its docstring is the description, with the meaning of the text as a second paragraph. LookupError means that it has
    no answer.
    """
    function = load_function("agent.tools", name)
    parameters, told = [*inspect.signature(function).parameters], inspect.getdoc(function)
    if not told or not 1 <= len(parameters) <= 2:
        raise UserError(
            f"Setting agent.tools names {name}, which needs a docstring and takes one text; see docs/use.md."
        )
    description, _, meaning = (" ".join(part.split()) for part in told.partition("\n\n"))

    def run(toolbox: Toolbox, value: str) -> str:
        try:
            answer = function(value, *[toolbox.database][: len(parameters) - 1])
        except LookupError:
            raise SqlError(f"{function.__name__} has no answer for {value[:60]!r}.") from None
        except SqlError:
            raise
        except Exception as error:  # other people's code
            raise UserError(f"The tool {name} of agent.tools failed with {error!r}; correct its function.") from error
        if not isinstance(answer, str):
            raise UserError(f"The tool {name} of agent.tools returned {answer!r}; it must return a text.")
        return answer

    step = f"{function.__name__}: {description}"
    return Tool(run, function.__name__, parameters[0], meaning or "The text.", description, step)


def load_function(setting: str, name: str) -> Callable[..., Any]:
    """The function that a setting names as module:function; raises UserError when there is none."""
    module, _, attribute = name.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise UserError(
            f"Setting {setting} is {name!r}, which cannot be loaded ({error}); write module:function, and install what "
            "the module imports."
        ) from error
    if not callable(function):
        raise UserError(f"Setting {setting} is {name!r}, which is not a function; see docs/use.md.")
    return function


def call_key(call: ToolCall) -> str:
    """The same for calls that ask the same: white space and a final semicolon make no difference."""
    values = {name: " ".join(str(value).split()).rstrip("; ") for name, value in call.arguments.items()}
    return json.dumps([call.name, values], sort_keys=True)


def _words(text: str) -> list[str]:
    """Distinct lower-case words of a text or identifier, without plural endings: "PolicyIDs" gives policy, id.

    Scripts without spaces between words give every two characters that stand side by side.
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower()
    words = re.findall(rf"(?=([{_UNSEGMENTED}]{{2}}))", spaced)
    for word in re.findall(rf"[^\W_{_UNSEGMENTED}]+", spaced):
        if len(word) > 4 and word.endswith("ies"):
            word = f"{word[:-3]}y"
        elif len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
            word = word[:-1]
        words.append(word)
    return list(dict.fromkeys(words))


def _fit(word: str, name: str) -> float:
    """How well a searched word fits a name: 1 as one of its words, 0.5 inside it, else 0."""
    if word in _words(name):
        return 1.0
    return 0.5 if len(word) >= 4 and word in name.lower() else 0.0


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _cell(value: Any, width: int) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"<blob of {len(value)} bytes>"
    text = str(value).replace("\r", "\\r").replace("\n", "\\n")
    return text if len(text) <= width else f"{text[:width]}..."


def _literal(value: Any) -> str:
    """A sample value as it would stand in SQL; a long text is cut after its closing quote."""
    if not isinstance(value, str):
        return _cell(value, _SAMPLE_WIDTH)
    text = _cell(value, _SAMPLE_WIDTH).replace("'", "''")
    return f"'{text.removesuffix('...')}'..." if len(value) > _SAMPLE_WIDTH else f"'{text}'"


def _listed(names: Iterable[str]) -> str:
    """Names as they must be written in SQL: in double quotes only where needed."""
    return ", ".join(
        name if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.lower() not in _RESERVED else quoted(name)
        for name in names
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {_listed([by_lower[close[0]]])}?" if close else ""


def _hint(message: str, sql: str, tables: Sequence[Table]) -> str:
    """What the model may have meant, for the errors that SQLite reports with a name."""
    kind, _, name = message.partition(": ")
    used = [table for table in tables if re.search(rf"\b{re.escape(table.name)}\b", sql, re.IGNORECASE)]
    bare = name.split(" - ")[0].split(".")[-1].strip('"')
    if kind == "no such table":
        names = [table.name for table in tables]
        return f".{_nearest(bare, names)} Tables: {_listed(names)}."
    if kind == "no such column":
        homes = [table.name for table in tables if table.column(bare)]
        known = [column.name for table in used or tables for column in table.columns]
        hint = f" {bare} is a column of {_listed(homes)}." if homes else _nearest(bare, known)
        columns = [
            f" Columns of {_listed([table.name])}: {_listed(column.name for column in table.columns)}."
            for table in used or tables
        ]
        return f".{hint}{''.join(columns)}"
    if kind == "ambiguous column name":
        homes = [f"{_listed([table.name])}.{_listed([bare])}" for table in used if table.column(bare)]
        return f". Write one of {', '.join(homes)}."
    return (
        f"; {_OTHER_FUNCTION[name.lower()]}." if kind == "no such function" and name.lower() in _OTHER_FUNCTION else ""
    )
