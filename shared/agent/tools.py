"""The agent's three tools: search_schema, get_columns, execute_sql.

Synthesis, RL and evaluation all use this one implementation. An answer is text for the model: it never has more than
`observation_tokens` tokens, keeps its first line and its count, and says what was left out. What the model did wrong
comes back as "Error: ..." with the names it may have meant; only a damaged database raises.
"""

from __future__ import annotations

import difflib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
_INSTEAD = {
    "year": "use strftime('%Y', x)",
    "month": "use strftime('%m', x)",
    "day": "use strftime('%d', x)",
    "concat": "use a || b",
}


@dataclass(frozen=True)
class Observation:
    """What the model gets to read after a call; `ok` is False when the tool refused or failed."""

    text: str
    ok: bool


class Toolbox:
    """The tools on one database. Safe to use from several threads."""

    def __init__(self, database: Database, tokenizer: Tokenizer, observation_tokens: int) -> None:
        self.database = database
        self._tokenizer = tokenizer
        self._max_tokens = observation_tokens
        self._tools = {
            "search_schema": ("query", self._search_schema),
            "get_columns": ("table", self._get_columns),
            "execute_sql": ("sql", self._execute_sql),
        }

    def run(self, call: ToolCall) -> Observation:
        """Run one call. Mistakes of the model come back as an observation; a damaged database raises UserError."""
        try:
            if call.name not in self._tools:
                raise SqlError(f"there is no tool {call.name!r}. Tools: {', '.join(self._tools)}.")
            argument, tool = self._tools[call.name]
            value = call.arguments.get(argument)
            if not isinstance(value, str) or not value.strip():
                raise SqlError(f'{call.name} needs the argument "{argument}" as a text.')
            if len(call.arguments) > 1:
                raise SqlError(f'{call.name} takes only the argument "{argument}".')
            text, ok = tool(value), True
        except SqlError as error:
            text, ok = f"Error: {error}", False
        if not self._fits(text):
            mark, text = " ...", text[: _LONGEST_TOKEN * self._max_tokens]
            text = self._tokenizer.cut(text, self._max_tokens - self._tokenizer.count(mark))[0] + mark
        return Observation(text, ok)

    def _fits(self, text: str) -> bool:
        return len(text) <= _LONGEST_TOKEN * self._max_tokens and self._tokenizer.count(text) <= self._max_tokens

    def _search_schema(self, query: str) -> str:
        """A line for each of the best tables, with those of their columns that answer best to the searched words.

        A word counts more the fewer tables it fits, and three times as much in the name of a table as in a column's.
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
        if not ranked:
            return f'Nothing matches "{query[:60]}". Tables: {_listed(table.name for table in tables)}.'
        lines = []
        for table in ranked[:_MAX_TABLES]:
            fits = {column.name: sum(_fit(word, column.name) for word in hits[table.name]) for column in table.columns}
            best = sorted((name for name in fits if fits[name]), key=lambda name: -fits[name])
            columns = [name for name in fits if name in best[:_MATCHED_COLUMNS]]
            columns += ["..."] if len(best) > _MATCHED_COLUMNS else []
            reasons = ", ".join(f'"{word}"' for word in hits[table.name])
            lines.append(f"{_listed([table.name])} ({', '.join(columns)}): matches {reasons}")
        return "\n".join(lines)

    def _get_columns(self, name: str) -> str:
        """A line per column, with sample values while tokens last: one each before any second one, keys last."""
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
        lines, values = [], []
        for column in table.columns:
            key, reference = "PK" if column.primary_key else "", f"→ {column.references}" if column.references else ""
            lines.append(" ".join(filter(None, (_listed([column.name]), column.type, key, reference))))
            cell = quoted(column.name)
            some = f"SELECT {cell} FROM {source} WHERE length({cell}) < {_SAMPLE_LENGTH} LIMIT {_SAMPLE_ROWS}"
            query = f"SELECT DISTINCT {cell} FROM ({some}) LIMIT {_SAMPLES}"
            try:
                rows = self.database.execute(query, seconds=deadline - time.monotonic()).rows
            except SqlError:  # an answer in time without samples is better than none
                rows = ()
            values.append([_literal(value) for (value,) in rows])
        left = self._max_tokens - self._tokenizer.count("\n".join([head, *lines]))
        shown: list[list[str]] = [[] for _ in lines]
        for turn in range(_SAMPLES):
            offers = [
                (bool(column.primary_key or column.references), self._tokenizer.count(f", e.g. {row[turn]}"), place)
                for place, (column, row) in enumerate(zip(table.columns, values, strict=True))
                if turn < len(row)
            ]
            for _, cost, place in sorted(offers):
                if cost <= left:
                    shown[place].append(values[place][turn])
                    left -= cost
        lines = [f"{line}, e.g. {', '.join(some)}" if some else line for line, some in zip(lines, shown, strict=True)]
        return self._fitted(
            head, lines, lambda n: f"... {_plural(len(lines) - n, 'more column')}" if n < len(lines) else ""
        )[0]

    def _execute_sql(self, sql: str) -> str:
        """Header, rows and their count; cells are shortened where not even one row would fit."""
        try:
            result = self.database.execute(sql)
        except SqlError as error:
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


def _words(text: str) -> list[str]:
    """Distinct lower-case words of a text or identifier, without plural endings: "PolicyIDs" gives policy, id."""
    words = []
    for word in re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower()):
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
    return f"; {_INSTEAD[name.lower()]}." if kind == "no such function" and name.lower() in _INSTEAD else ""
