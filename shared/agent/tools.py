"""The agent's three tools: search_schema, get_columns, execute_sql.

Synthesis, RL, evaluation and serving all use this one implementation. An answer is text for the model: it never has more
than `observation_tokens` tokens, keeps its first line and its count, and says what was left out. What the model did
wrong comes back as "Error: ..." with the names it may have meant; only a damaged database raises.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.models.tokenizer import Tokenizer
from shared.records import ToolCall
from shared.sql.database import Column, Database, QueryResult, SqlError, Table

_MAX_TABLES = 5  # lines of one schema search
_MATCHED_COLUMNS = 4  # columns named in one line of it
_SAMPLES = 3  # distinct values shown per column
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
            return Observation(self._cut(self._dispatch(call)), ok=True)
        except SqlError as error:
            return Observation(self._cut(f"Error: {error}"), ok=False)

    def _dispatch(self, call: ToolCall) -> str:
        if call.name not in self._tools:
            raise SqlError(f"there is no tool {call.name!r}. Tools: {', '.join(self._tools)}.")
        argument, tool = self._tools[call.name]
        value = call.arguments.get(argument)
        if not isinstance(value, str) or not value.strip():
            raise SqlError(f'{call.name} needs the argument "{argument}" as a text.')
        if len(call.arguments) > 1:
            raise SqlError(f'{call.name} takes only the argument "{argument}".')
        return tool(value)

    def _search_schema(self, query: str) -> str:
        tables = self.database.schema.tables
        found = {table.name: _matches(query, table) for table in tables}
        frequency = {word: sum(word in hits for hits in found.values()) for word in _words(query)}
        scored = [
            (sum(weight / frequency[word] for word, weight in found[table.name].items()), table) for table in tables
        ]
        ranked = [table for score, table in sorted(scored, key=lambda pair: -pair[0]) if score > 0]
        if not ranked:
            return f'Nothing matches "{query[:60]}". Tables: {_listed(table.name for table in tables)}.'
        return "\n".join(_search_line(table, found[table.name]) for table in ranked[:_MAX_TABLES])

    def _get_columns(self, name: str) -> str:
        bare = name.strip().removeprefix("main.").strip("\"'`[] ")
        table = self.database.schema.table(bare)
        if table is None:
            names = [table.name for table in self.database.schema.tables]
            raise SqlError(f"no such table: {bare}.{_nearest(bare, names)} Tables: {_listed(names)}.")
        count = self.database.execute(f"SELECT count(*) FROM {_quoted(table.name)}").rows[0][0]
        head = f"{_identifier(table.name)}: {_plural(count, 'row')}"
        lines = self._with_samples(table, [_column_line(column) for column in table.columns], head)
        return self._fit_rows(head, lines, lambda shown: _missing_columns(len(lines) - shown))[0]

    def _with_samples(self, table: Table, lines: list[str], head: str) -> list[str]:
        """Add sample values while tokens last: one for each column before any second one, keys last."""
        left = self._max_tokens - self._tokenizer.count("\n".join([head, *lines]))
        values = [self._samples(table, column) for column in table.columns]
        shown: list[list[str]] = [[] for _ in lines]
        for turn in range(_SAMPLES):
            offers = [
                (i, row[turn], self._tokenizer.count(f", e.g. {row[turn]}"))
                for i, row in enumerate(values)
                if turn < len(row)
            ]
            for i, value, cost in sorted(offers, key=lambda offer: (_is_key(table.columns[offer[0]]), offer[2])):
                if cost <= left:
                    shown[i].append(value)
                    left -= cost
        return [f"{line}, e.g. {', '.join(some)}" if some else line for line, some in zip(lines, shown, strict=True)]

    def _samples(self, table: Table, column: Column) -> list[str]:
        name, source = _quoted(column.name), _quoted(table.name)
        rows = self.database.execute(
            f"SELECT DISTINCT {name} FROM (SELECT {name} FROM {source} WHERE {name} IS NOT NULL LIMIT {_SAMPLE_ROWS}) "
            f"LIMIT {_SAMPLES}"
        ).rows
        return [_literal(value) for (value,) in rows]

    def _execute_sql(self, sql: str) -> str:
        try:
            result = self.database.execute(sql)
        except SqlError as error:
            raise SqlError(f"{error}{_hint(str(error), sql, self.database.schema.tables)}", error.kind) from None
        literal = self.database.text_in_double_quotes(sql)
        note = "" if literal is None else f'Note: "{literal[:40]}" is no column and was read as a text.\n'
        return self._table(result, note)

    def _table(self, result: QueryResult, note: str) -> str:
        head = note + " | ".join(result.columns)
        total = len(result.rows)
        for width in _CELL_WIDTHS:
            lines = [" | ".join(_cell(value, width) for value in row) for row in result.rows]
            text, shown = self._fit_rows(head, lines, lambda shown: _count_line(shown, total, result.truncated))
            if shown or not total:
                break
        return text

    def _fit_rows(self, head: str, lines: Sequence[str], tail: Callable[[int], str]) -> tuple[str, int]:
        """Head, as many lines as fit, and `tail(lines shown)`; also that number. A head too long itself is cut."""

        def text(shown: int) -> str:
            return "\n".join(part for part in (head, *lines[:shown], tail(shown)) if part)

        low, high = 0, len(lines)
        while low < high:
            middle = (low + high + 1) // 2
            if self._tokenizer.count(text(middle)) <= self._max_tokens:
                low = middle
            else:
                high = middle - 1
        if low == 0 and self._tokenizer.count(text(0)) > self._max_tokens:
            end = f" ...\n{tail(0)}"
            head = self._tokenizer.cut(head, max(0, self._max_tokens - self._tokenizer.count(end) - 1))[0] + " ..."
        return text(low), low

    def _cut(self, text: str) -> str:
        if self._tokenizer.count(text) <= self._max_tokens:
            return text
        mark = " ..."
        return self._tokenizer.cut(text, self._max_tokens - self._tokenizer.count(mark))[0] + mark


def _words(text: str) -> list[str]:
    """Distinct lower-case words of a text or identifier, without plural endings: "PolicyIDs" gives policy, id."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return list(dict.fromkeys(_singular(word.lower()) for word in re.findall(r"[^\W_]+", spaced)))


def _singular(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


def _word_weight(word: str, name: str) -> float:
    """How well a searched word fits a name: 1 as one of its words, 0.5 inside it, else 0."""
    if word in _words(name):
        return 1.0
    return 0.5 if len(word) >= 4 and word in name.lower() else 0.0


def _matches(query: str, table: Table) -> dict[str, float]:
    """Weight of each word of the query that this table answers to; its name counts three times a column's."""
    weights = {
        word: max(3 * _word_weight(word, table.name), *(_word_weight(word, column.name) for column in table.columns))
        for word in _words(query)
    }
    return {word: weight for word, weight in weights.items() if weight}


def _search_line(table: Table, hits: dict[str, float]) -> str:
    """The table with those of its columns that answer best to the searched words; get_columns shows the others."""
    weights = {column.name: sum(_word_weight(word, column.name) for word in hits) for column in table.columns}
    names = [name for name, weight in weights.items() if weight]
    best = sorted(names, key=lambda name: -weights[name])[:_MATCHED_COLUMNS]
    shown = [name for name in names if name in best]
    listed = ", ".join(shown if len(shown) == len(names) else [*shown, "..."])
    reasons = ", ".join(f'"{word}"' for word in hits)
    return f"{_identifier(table.name)} ({listed}): matches {reasons}"


def _column_line(column: Column) -> str:
    parts = [_identifier(column.name), column.type, "PK" if column.primary_key else ""]
    parts.append(f"→ {column.references}" if column.references else "")
    return " ".join(part for part in parts if part)


def _is_key(column: Column) -> bool:
    return column.primary_key or column.references is not None


def _missing_columns(count: int) -> str:
    return f"... {_plural(count, 'more column')}" if count else ""


def _count_line(shown: int, total: int, truncated: bool) -> str:
    more = "+" if truncated else ""
    return f"({_plural(total, 'row')})" if shown == total and not more else f"(first {shown} of {total}{more} rows)"


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


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _identifier(name: str) -> str:
    """The name as it must be written in SQL: in double quotes only where needed."""
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.lower() not in _RESERVED
    return name if plain else _quoted(name)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(_identifier(name) for name in names)


def _nearest(name: str, known: Sequence[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {_identifier(by_lower[close[0]])}?" if close else ""


def _hint(message: str, sql: str, tables: Sequence[Table]) -> str:
    """What the model may have meant, for the errors that SQLite reports with a name."""
    kind, _, name = message.partition(": ")
    used = [table for table in tables if re.search(rf"\b{re.escape(table.name)}\b", sql, re.IGNORECASE)]
    bare = name.split(" - ")[0].split(".")[-1].strip('"')
    if kind == "no such table":
        names = [table.name for table in tables]
        return f".{_nearest(bare, names)} Tables: {_listed(names)}."
    if kind == "no such column":
        return _column_hint(bare, used or tables, tables)
    if kind == "ambiguous column name":
        homes = [f"{_identifier(table.name)}.{_identifier(bare)}" for table in used if table.column(bare)]
        return f". Write one of {', '.join(homes)}."
    return f"; {_INSTEAD[name.lower()]}." if kind == "no such function" and name.lower() in _INSTEAD else ""


def _column_hint(name: str, used: Sequence[Table], tables: Sequence[Table]) -> str:
    homes = [table for table in tables if table.column(name)]
    if homes:
        hint = f" {name} is a column of {_listed(table.name for table in homes)}."
    else:
        hint = _nearest(name, [column.name for table in used for column in table.columns])
    columns = [f"Columns of {_identifier(t.name)}: {_listed(column.name for column in t.columns)}." for t in used]
    return f".{hint} {' '.join(columns)}"
