"""From a declared domain to rows and a SQLite file.

Every column draws from its own random source, named after it, so adding a column leaves the others' values as they are.
With one SQLite version the file is the same byte for byte; SQLite writes its version number into the header.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from data.demo.spec import Column, Domain, Kind, Row, Table

Rows = dict[str, list[Row]]
"""Rows by table name."""

_CHILDLESS_SHARE = 0.12  # of the rows of each table nothing refers to, so that "without any ..." has an answer
_MAX_DRAWS = 2000  # for one unique value


def make_rows(domain: Domain) -> Rows:
    """All rows of a domain, parents first; keys count from 1."""
    rows: Rows = {}
    for table in domain.tables:
        rows[table.name] = [{} for _ in range(table.rows)]
        for column in table.columns:
            _fill(domain.db_id, table, column, rows)
    return rows


def write_database(domain: Domain, rows: Rows, path: Path) -> None:
    """Write the SQLite file; a reader sees all of it or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(partial)) as connection:
        connection.execute("PRAGMA synchronous = OFF")  # a crash leaves only the partial file
        insert(connection, domain, rows)
    partial.replace(path)


def insert(connection: sqlite3.Connection, domain: Domain, rows: Rows) -> None:
    """Create the tables and insert the rows in one transaction."""
    with connection:
        for table in domain.tables:
            connection.execute(create_statement(domain, table))
            marks = ", ".join("?" for _ in table.columns)
            values = [tuple(row[column.name] for column in table.columns) for row in rows[table.name]]
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", values)


def create_statement(domain: Domain, table: Table) -> str:
    """The table's DDL, one column a line."""
    lines = [f"  {column.name} {column.sql_type}{_constraint(domain, column)}" for column in table.columns]
    return f"CREATE TABLE {table.name} (\n" + ",\n".join(lines) + "\n)"


def _constraint(domain: Domain, column: Column) -> str:
    if column.kind is Kind.KEY:
        return " PRIMARY KEY"
    required = "" if column.nullable else " NOT NULL"
    if column.kind is not Kind.REF:
        return required
    return f"{required} REFERENCES {column.references} ({domain.table(column.references).key.name})"


def _fill(db_id: str, table: Table, column: Column, rows: Rows) -> None:
    rng = random.Random(f"{db_id}.{table.name}.{column.name}")
    make = _maker(table, column, rows, rng)
    taken: set[Any] = set()
    for number, row in enumerate(rows[table.name], start=1):
        if column.kind is Kind.KEY:
            row[column.name] = number
        elif rng.random() < column.null_share:
            row[column.name] = None
        else:
            row[column.name] = _fresh(make, row, taken) if column.kind is Kind.LABEL else make(row)


def _maker(table: Table, column: Column, rows: Rows, rng: random.Random) -> Callable[[Row], Any]:
    if column.kind is not Kind.REF:
        return lambda row: column.make(rng, row)
    keys = list(range(1, len(rows[column.references]) + 1))
    rng.shuffle(keys)
    keys = keys[: round(len(keys) * (1 - _CHILDLESS_SHARE))]
    siblings = [c.name for c in table.of(Kind.REF) if c.references == column.references and c is not column]

    def parent(row: Row) -> int:
        """Some parents are more popular; a row never names the same parent twice."""
        named = [row.get(name) for name in siblings]
        free = [key for key in keys if key not in named] if siblings else keys
        return free[int(len(free) * rng.random() ** 1.6)]

    return parent


def _fresh(make: Callable[[Row], Any], row: Row, taken: set[Any]) -> Any:
    for _ in range(_MAX_DRAWS):
        value = make(row)
        if value not in taken:
            taken.add(value)
            return value
    raise ValueError(f"no unused value left after {len(taken)} rows; widen the maker or lower the row count")
