"""What a gold query needs (tables, columns), and how a model could plausibly have got it wrong.

Read with sqlglot and resolved against the real schema scope by scope, so that aliases, subqueries, set operations and
common table expressions come out as tables and columns of the database. Pure functions; nothing is executed here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.scope import traverse_scope

from shared.sql.database import Schema

_WORDS = re.compile(r"[^\W\d_]+([ -][^\W\d_]+)*")


@dataclass(frozen=True)
class Needed:
    """Names as the schema spells them, in order of first appearance in the query; columns as "table.column"."""

    tables: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Mistake:
    """A wrong query a model could have written instead of the gold."""

    kind: str  # misspelt_column | missing_join | literal_case
    sql: str


def tidy(sql: str) -> str:
    """The query without its final semicolon, doubled spaces and spaces before commas; quoted texts stay as they are."""
    parts = re.split(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")", sql.strip())
    parts[::2] = [re.sub(r"\s+(?=,)", "", re.sub(r"\s+", " ", part)) for part in parts[::2]]
    return "".join(parts).rstrip("; ")


def needed(sql: str, schema: Schema) -> Needed:
    """Tables and columns of the database that `sql` reads. Raises ValueError for SQL that sqlglot cannot read."""
    tree = _parse(sql)
    found = (schema.table(node.name) for node in tree.find_all(exp.Table, bfs=False))
    tables = dict.fromkeys(table.name for table in found if table)
    columns: dict[str, None] = {}
    try:
        for scope in traverse_scope(tree):
            sources = {
                alias.lower(): schema.table(source.name)
                for alias, source in scope.sources.items()
                if isinstance(source, exp.Table)
            }
            for node in scope.columns:
                homes = [sources.get(node.table.lower())] if node.table else sources.values()
                matches = ((table, table.column(node.name)) for table in homes if table)
                names = (f"{table.name}.{column.name}" for table, column in matches if column)
                columns |= dict.fromkeys([*names][:1])
    except SqlglotError as error:
        raise ValueError(f"unresolvable SQL: {error}") from error
    return Needed(tuple(tables), tuple(columns))


def mistakes(sql: str, wanted: Needed, schema: Schema, rng: random.Random) -> Iterator[Mistake]:
    """Candidates, those that fit few golds first; whether one really goes wrong is for the caller to see."""
    kinds: list[tuple[str, Callable[[], str | None]]] = [
        ("missing_join", lambda: _missing_join(sql)),
        ("literal_case", lambda: _literal_case(sql, rng)),
    ]
    rng.shuffle(kinds)
    for kind, make in [*kinds, ("misspelt_column", lambda: _misspelt_column(sql, wanted, schema, rng))]:
        wrong = make()
        if wrong and wrong != sql:
            yield Mistake(kind, wrong)


def _parse(sql: str) -> exp.Expression:
    try:
        tree = sqlglot.parse_one(sql, read="sqlite")
    except (SqlglotError, RecursionError) as error:
        raise ValueError(f"unreadable SQL: {error}") from error
    if not isinstance(tree, exp.Query):
        raise ValueError("not a SELECT")
    return tree


def _misspelt_column(sql: str, wanted: Needed, schema: Schema, rng: random.Random) -> str | None:
    """One column under a near-miss of its name: a dropped part, a wrong number, two words run together."""
    taken = {column.name.lower() for table in schema.tables for column in table.columns}
    slips = []
    for name in dict.fromkeys(column.split(".", 1)[1] for column in wanted.columns):
        tail = name.split("_", 1)[1] if "_" in name.strip("_") else ""
        number = name[:-1] if name.endswith("s") else f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
        slips += [(name, slip) for slip in (tail, number, name.replace("_", "")) if slip and slip.lower() not in taken]
    if not slips:
        return None
    name, slip = rng.choice(slips)
    return re.sub(rf"(?<![\w']){re.escape(name)}(?![\w'])", slip, sql, flags=re.IGNORECASE)


def _missing_join(sql: str) -> str | None:
    """The outermost SELECT without its joins."""
    tree = _parse(sql)
    if not isinstance(tree, exp.Select) or not tree.args.get("joins"):
        return None
    tree.set("joins", None)
    return tree.sql(dialect="sqlite")


def _literal_case(sql: str, rng: random.Random) -> str | None:
    """One text literal in the wrong case: 'open' as 'Open', 'Bern' as 'bern'."""
    texts = [node.name for node in _parse(sql).find_all(exp.Literal) if node.is_string and _WORDS.fullmatch(node.name)]
    if not texts:
        return None
    text = rng.choice(texts)
    wrong = text.capitalize() if text.islower() else text.lower()
    return sql.replace(f"'{text}'", f"'{wrong}'")
