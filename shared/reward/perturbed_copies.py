"""Perturbed copies of a database, on which a right query must still give the gold's answer.

A copy has the same tables and far fewer rows. Each row starts as a sampled one; then values are exchanged with other
rows, moved a little, or set to what the golds compare the column with and its neighbours; columns that know NULL get
more of it. What an honest query may rely on is kept: keys are unique, references lead to rows, NULL appears only where it
did, the case of a text is not changed. The first copies are larger and full of repeated values, every second one is
small and has no number twice, so that order is decided. The same seed gives the same copies.

Limits: virtual tables and triggers are left out, and what a table's own CHECK refuses is missing.
"""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.reward.literals import Value, compared_values

_SAMPLED_ROWS = 2_000  # of each table, as the source of values
_ROWS = (40, 7, 90, 12, 60)  # of a table with enough of them, by copy
_MOST_ROWS = 90
_ATTEMPTS = 4  # for a row that a key refuses

Row = list[Any]


@dataclass
class _Table:
    name: str
    columns: list[str]
    types: list[str]
    keys: list[int]  # places of the primary key
    references: dict[int, tuple[str, str]]  # place -> parent table and column, in lower case
    rows: list[tuple[Any, ...]]
    known: list[list[Any]] = field(default_factory=list)  # distinct values of each column, NULL left out
    has_null: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        cells = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        self.known = [[*dict.fromkeys(value for value in column if value is not None)] for column in cells]
        self.has_null = [None in column for column in cells]


def make_copies(database: Path, golds: Sequence[str], folder: Path, count: int, seed: int) -> list[Path]:
    """Write `count` copies of `database` into `folder` as 0.sqlite, 1.sqlite, …; `golds` are queries asked of it.

    Copies that were there are replaced. Raises UserError when the database cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.sqlite"):
        old.unlink()
    paths = [folder / f"{number}.sqlite" for number in range(count)]
    try:
        with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.text_factory = lambda value: value.decode("utf-8", "replace")
            schema = _schema(connection)
            tables = _parents_first([_read(connection, name) for kind, name, _ in schema if kind == "table"])
    except sqlite3.Error as error:
        raise UserError(f"Database {database} cannot be copied ({error}); restore or replace the file.") from error
    compared = compared_values(golds)
    for number, path in enumerate(paths):
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        _write(partial, schema, tables, compared, number, random.Random(f"copies.{seed}.{database.stem}.{number}"))
        partial.replace(path)
    return paths


def _schema(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    found = connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type IN ('table', 'index', 'view') "
        "AND name NOT LIKE 'sqlite!_%' ESCAPE '!' AND sql NOT LIKE 'CREATE VIRTUAL%' ORDER BY type = 'view', rowid"
    )
    return found.fetchall()


def _read(connection: sqlite3.Connection, name: str) -> _Table:
    info = connection.execute("SELECT name, type, pk FROM pragma_table_info(?)", (name,)).fetchall()
    columns = [column for column, _, _ in info]
    place = {column.lower(): i for i, column in enumerate(columns)}
    links = connection.execute('SELECT "from", "table", "to" FROM pragma_foreign_key_list(?)', (name,)).fetchall()
    listed = ", ".join(_quoted(column) for column in columns)
    rows = connection.execute(f"SELECT {listed} FROM {_quoted(name)} LIMIT {_SAMPLED_ROWS}").fetchall()
    return _Table(
        name,
        columns,
        [kind.upper() for _, kind, _ in info],
        [i for i, (_, _, key) in enumerate(info) if key],
        {place[child.lower()]: (parent.lower(), (target or "").lower()) for child, parent, target in links},
        rows,
    )


def _parents_first(tables: list[_Table]) -> list[_Table]:
    """The tables in an order in which references lead back, as far as there is one."""
    left, done = list(tables), []
    while left:
        names = {table.name.lower() for table in left}
        free = [t for t in left if not {p for p, _ in t.references.values()} & names - {t.name.lower()}] or left[:1]
        done += free
        left = [table for table in left if table not in free]
    return done


def _write(
    path: Path,
    schema: Sequence[tuple[str, str, str]],
    tables: Sequence[_Table],
    compared: Mapping[str, list[Value]],
    number: int,
    draw: random.Random,
) -> None:
    made: dict[str, dict[str, list[Any]]] = {}  # table -> column -> values
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("BEGIN")
        for kind, _, sql in schema:
            if kind != "view":
                connection.execute(sql)
        for table in tables:
            maker = _RowMaker(table, made, compared, draw, distinct=number % 2 == 1)
            listed = ", ".join(_quoted(column) for column in table.columns)
            marks = ", ".join("?" * len(table.columns))
            insert = f"INSERT OR IGNORE INTO {_quoted(table.name)} ({listed}) VALUES ({marks})"
            for place in range(_wanted(table, number, draw)):
                attempts = (connection.execute(insert, maker.row(place)).rowcount for _ in range(_ATTEMPTS))
                any(count > 0 for count in attempts)
            rows = connection.execute(f"SELECT {listed} FROM {_quoted(table.name)}").fetchall()
            made[table.name.lower()] = {
                name.lower(): [*dict.fromkeys(cells)]
                for name, cells in zip(table.columns, zip(*rows, strict=True) or (), strict=False)
            }
        for kind, _, sql in schema:
            if kind == "view":
                with contextlib.suppress(sqlite3.Error):  # a view of something that is gone
                    connection.execute(sql)
        connection.execute("COMMIT")


def _wanted(table: _Table, number: int, draw: random.Random) -> int:
    """Rows for a copy: never as many as the table has, not more than a key of few values allows."""
    wanted = min(_MOST_ROWS, _ROWS[number % len(_ROWS)] + draw.randrange(4))
    return wanted + 1 if wanted == len(table.rows) else wanted


class _RowMaker:
    """Draws the rows of one table of one copy."""

    def __init__(
        self,
        table: _Table,
        made: Mapping[str, Mapping[str, list[Any]]],
        compared: Mapping[str, list[Value]],
        draw: random.Random,
        *,
        distinct: bool,
    ) -> None:
        self._table, self._draw, self._distinct = table, draw, distinct
        self._compared = [compared.get(column.lower(), []) for column in table.columns]
        self._used: list[set[Any]] = [set() for _ in table.columns]
        self._fraction = [any(isinstance(x, float) and x % 1 for x in values) for values in table.known]
        self._parents: dict[int, list[Any]] = {}
        for place, (parent, column) in table.references.items():
            values = made.get(parent, {})
            targets = values.get(column) or next(iter(values.values()), [])
            self._parents[place] = draw.sample(targets, max(1, len(targets) * 3 // 4)) if targets else []

    def row(self, place: int) -> Row:
        """One more row; `place` counts them."""
        table = self._table
        base = self._draw.choice(table.rows) if table.rows else (None,) * len(table.columns)
        return [self._cell(column, base[column], place) for column in range(len(table.columns))]

    def _cell(self, column: int, value: Any, place: int) -> Any:
        table, draw = self._table, self._draw
        if self._parents.get(column):
            empty = table.has_null[column] and draw.random() < 0.1
            return None if empty else draw.choice(self._parents[column])
        if table.keys == [column]:
            return self._key(column, place)
        if table.has_null[column] and draw.random() < 0.1:
            return None
        for _ in range(20):
            new = self._changed(column, value)
            if not (self._distinct and new in self._used[column] and _number_of(new) is not None):
                break
        self._used[column].add(new)
        return new

    def _key(self, column: int, place: int) -> Any:
        """Known keys first, shuffled by a drawn step; then new ones of their kind."""
        known = self._table.known[column]
        if place < len(known):
            return known[place]
        numbers = [value for value in known if isinstance(value, int)]
        if known and not numbers:
            return f"{known[place % len(known)]}{place}"
        return max(numbers, default=0) + 1 + place - len(known)

    def _changed(self, column: int, value: Any) -> Any:
        table, draw = self._table, self._draw
        known, compared = table.known[column], self._compared[column]
        chance = draw.random()
        if compared and chance < 0.35:
            return _fitting(_moved(draw.choice(compared), self._fraction[column], draw, often=0.6), known)
        if known and (value is None or chance < 0.6):
            return draw.choice(known)
        if value is None:
            return _invented(table.types[column], draw)
        return _moved(value, self._fraction[column], draw, often=0.5)


def _moved(value: Any, fraction: bool, draw: random.Random, *, often: float) -> Any:
    """The value, or with the chance `often` one beside it: a whole number unless `fraction`. A number in a text stays one."""
    number = _number_of(value)
    if draw.random() >= often or isinstance(value, bytes):
        return value
    if number is None:
        letters = isinstance(value, str) and re.search("[A-Za-z]", value)
        return f"{value} {draw.choice('BDKXZ')}" if letters and draw.random() < 0.3 else value
    if draw.random() < 0.3:
        moved: int | float = draw.choice((number * 10, number * 2, number // 2, number // 10))
    else:
        step = draw.choice((-2, -1, 1, 2))
        moved = round(number + step * 0.37, 4) if fraction or number % 1 else number + step
    return str(moved) if isinstance(value, str) else moved


def _number_of(value: Any) -> int | float | None:
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str) or not re.fullmatch(r"-?\d{1,15}(\.\d+)?", value):
        return None
    return float(value) if "." in value else int(value)


def _fitting(value: Any, known: Sequence[Any]) -> Any:
    """The value as the column stores its like: a text where all known values are texts."""
    return str(value) if known and all(isinstance(other, str) for other in known) else value


def _invented(kind: str, draw: random.Random) -> Any:
    if "INT" in kind or "BOOL" in kind:
        return draw.randrange(20)
    if any(word in kind for word in ("REAL", "FLOA", "DOUB", "DEC", "NUM")):
        return draw.randrange(2000) / 16
    return draw.choice(("amber", "birch", "cedar", "delta", "ember", "fjord"))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
