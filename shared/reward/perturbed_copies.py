"""Perturbed copies of a database, on which a right query must still give the gold's answer.

A copy has the same tables and far fewer rows. Each row starts as a sampled one; then values are exchanged with other
rows, moved a little, or set to what the golds compare the column with and its neighbours; columns that know NULL get
more of it. What an honest query may rely on is kept: keys are unique, references lead to rows, NULL appears only where
it did, the case of a text is not changed. The first copies are larger and full of repeated values; every second one is
small and has no number twice, so that order is decided. The same seed gives the same copies.

Limits: virtual tables and triggers are left out, and what a table's own CHECK refuses is missing.
"""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.reward.queries import Value, compared_values
from shared.sql.database import quoted

_SAMPLED_ROWS = 2_000  # of each table, as the source of values
_ROWS = (40, 7, 90, 12, 60)  # of a table with enough of them, by copy
_MOST_ROWS = 90
_ATTEMPTS = 4  # for a row that a key refuses

Made = dict[str, dict[str, list[Any]]]
"""What a copy holds so far: table -> column -> distinct values, all names in lower case."""


@dataclass
class _Table:
    """A table of the original with a sample of its rows; columns are known by their places."""

    name: str
    columns: list[str]
    types: list[str]
    keys: list[int]  # places of the primary key
    references: dict[int, tuple[str, str]]  # place -> parent table and column, in lower case
    rows: list[tuple[Any, ...]]
    known: list[list[Any]]  # distinct values of each column, NULL left out
    has_null: list[bool]


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
            schema = connection.execute(
                "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type IN ('table', 'index', "
                "'view') AND name NOT LIKE 'sqlite!_%' ESCAPE '!' AND sql NOT LIKE 'CREATE VIRTUAL%' "
                "AND name NOT IN (SELECT name FROM pragma_table_list WHERE type = 'shadow') "
                "ORDER BY type = 'view', rowid"
            ).fetchall()
            tables = _parents_first([_read_table(connection, name) for kind, name, _ in schema if kind == "table"])
    except sqlite3.Error as error:
        raise UserError(f"Database {database} cannot be copied ({error}); restore or replace the file.") from error
    compared = compared_values(golds)
    for number, path in enumerate(paths):
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        draw = random.Random(f"copies.{seed}.{database.stem}.{number}")
        with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute("BEGIN")
            for kind, _, sql in schema:
                if kind != "view":
                    connection.execute(sql)
            made: Made = {}
            for table in tables:
                made[table.name.lower()] = _fill(connection, table, made, compared, number, draw)
            for kind, _, sql in schema:
                if kind == "view":
                    with contextlib.suppress(sqlite3.Error):  # a view of something that is gone
                        connection.execute(sql)
            connection.execute("COMMIT")
        partial.replace(path)
    return paths


def _read_table(connection: sqlite3.Connection, name: str) -> _Table:
    info = connection.execute("SELECT name, type, pk FROM pragma_table_info(?)", (name,)).fetchall()
    columns = [column for column, _, _ in info]
    place = {column.lower(): i for i, column in enumerate(columns)}
    links = connection.execute('SELECT "from", "table", "to" FROM pragma_foreign_key_list(?)', (name,)).fetchall()
    listed = ", ".join(map(quoted, columns))
    rows = connection.execute(f"SELECT {listed} FROM {quoted(name)} LIMIT {_SAMPLED_ROWS}").fetchall()
    cells = list(zip(*rows, strict=True)) or [()] * len(columns)
    return _Table(
        name=name,
        columns=columns,
        types=[kind.upper() for _, kind, _ in info],
        keys=[i for i, (_, _, key) in enumerate(info) if key],
        references={place[child.lower()]: (parent.lower(), (target or "").lower()) for child, parent, target in links},
        rows=rows,
        known=[[*dict.fromkeys(value for value in column if value is not None)] for column in cells],
        has_null=[None in column for column in cells],
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


def _fill(
    connection: sqlite3.Connection,
    table: _Table,
    made: Made,
    compared: Mapping[str, list[Value]],
    number: int,
    draw: random.Random,
) -> dict[str, list[Any]]:
    """Give a table of copy `number` its rows; returns the distinct values of its columns."""
    maker = _RowMaker(table, made, compared, draw, distinct=number % 2 == 1)
    listed = ", ".join(map(quoted, table.columns))
    marks = ", ".join("?" * len(table.columns))
    insert = f"INSERT OR IGNORE INTO {quoted(table.name)} ({listed}) VALUES ({marks})"
    wanted = min(_MOST_ROWS, _ROWS[number % len(_ROWS)] + draw.randrange(4))
    for place in range(wanted + (wanted == len(table.rows))):  # never as many rows as the table has
        for _ in range(_ATTEMPTS):
            base = draw.choice(table.rows) if table.rows else (None,) * len(table.columns)
            row = [maker.cell(column, value, place) for column, value in enumerate(base)]
            if connection.execute(insert, row).rowcount > 0:
                break
    rows = connection.execute(f"SELECT {listed} FROM {quoted(table.name)}").fetchall()
    columns = zip(*rows, strict=True) if rows else [()] * len(table.columns)
    return {name.lower(): [*dict.fromkeys(cells)] for name, cells in zip(table.columns, columns, strict=True)}


class _RowMaker:
    """Draws the cells of one table of one copy."""

    def __init__(
        self,
        table: _Table,
        made: Made,
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

    def cell(self, column: int, value: Any, place: int) -> Any:
        """A value for row number `place`, made from that of a sampled row."""
        table, draw = self._table, self._draw
        if self._parents.get(column):
            empty = table.has_null[column] and draw.random() < 0.1
            return None if empty else draw.choice(self._parents[column])
        if table.keys == [column]:  # known keys first, then new ones of their kind
            known = table.known[column]
            if place < len(known):
                return known[place]
            numbers = [key for key in known if isinstance(key, int)]
            if known and not numbers:
                return f"{known[place % len(known)]}{place}"
            return max(numbers, default=0) + 1 + place - len(known)
        if table.has_null[column] and draw.random() < 0.1:
            return None
        for _ in range(20):
            new = self._changed(column, value)
            if not (self._distinct and new in self._used[column] and _number(new) is not None):
                break
        self._used[column].add(new)
        return new

    def _changed(self, column: int, value: Any) -> Any:
        table, draw = self._table, self._draw
        known, compared = table.known[column], self._compared[column]
        chance = draw.random()
        if compared and chance < 0.35:
            new = _moved(draw.choice(compared), self._fraction[column], draw, often=0.6)
            return str(new) if known and all(isinstance(other, str) for other in known) else new
        if known and (value is None or chance < 0.6):
            return draw.choice(known)
        if value is not None:
            return _moved(value, self._fraction[column], draw, often=0.5)
        if "INT" in table.types[column] or "BOOL" in table.types[column]:
            return draw.randrange(20)
        if any(word in table.types[column] for word in ("REAL", "FLOA", "DOUB", "DEC", "NUM")):
            return draw.randrange(2000) / 16
        return draw.choice(("amber", "birch", "cedar", "delta", "ember", "fjord"))


def _moved(value: Any, fraction: bool, draw: random.Random, *, often: float) -> Any:
    """The value, or with the chance `often` one near it: whole unless `fraction`. A number in a text stays one."""
    number = _number(value)
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


def _number(value: Any) -> int | float | None:
    """The number that a value is or spells out."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str) or not re.fullmatch(r"-?\d{1,15}(\.\d+)?", value):
        return None
    return float(value) if "." in value else int(value)
