"""What a gold query needs from the schema, and how a plausible query goes wrong. Pure functions over SQL text (sqlglot).

Limit: a query that sqlglot cannot parse as SQLite needs nothing and has no mistakes; its trace is dropped by the caller.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

import sqlglot
from sqlglot import exp

from shared.database import Schema


def needed_tables(sql: str, schema: Schema) -> list[str]:
    """Names of the tables that `sql` reads, as the schema spells them, in the order of their first mention."""
    try:
        tree = sqlglot.parse_one(sql, read="sqlite")
    except sqlglot.errors.SqlglotError:
        return []
    with_names = {cte.alias_or_name.lower() for cte in tree.find_all(exp.CTE)}
    mentioned = [table.name for table in tree.find_all(exp.Table, bfs=False) if table.name.lower() not in with_names]
    known = [schema.table(name) for name in mentioned]
    return list(dict.fromkeys(table.name for table in known if table is not None))


def mistakes(sql: str, rng: random.Random) -> list[str]:
    """Plausible wrong versions of `sql`, in random order: a misspelt column, a forgotten join, a literal in wrong case."""
    try:
        tree = sqlglot.parse_one(sql, read="sqlite")
    except sqlglot.errors.SqlglotError:
        return []
    makers: list[Callable[[exp.Expression, str, random.Random], Iterator[str]]] = [
        _misspelt_column,
        _forgotten_join,
        _wrong_case,
    ]
    rng.shuffle(makers)
    return [wrong for maker in makers for wrong in maker(tree, sql, rng) if wrong != sql]


def _misspelt_column(tree: exp.Expression, sql: str, rng: random.Random) -> Iterator[str]:
    """The name as one would guess it: without its underscores, or one word of it."""
    columns = sorted({column.name for column in tree.find_all(exp.Column) if len(column.name) > 3})
    if not columns:
        return
    name = rng.choice(columns)
    guesses = [name.replace("_", ""), name.rsplit("_", 1)[-1], f"{name}s", f"{name}_name"]
    guess = rng.choice([guess for guess in guesses if guess != name])
    yield re.sub(rf"\b{re.escape(name)}\b(?!['\w])", guess, sql)


def _forgotten_join(tree: exp.Expression, sql: str, rng: random.Random) -> Iterator[str]:
    joins = list(re.finditer(r"\s+JOIN\s+\w+\s+ON\s+[\w.]+\s*=\s*[\w.]+", sql, re.IGNORECASE))
    if joins:
        join = rng.choice(joins)
        yield sql[: join.start()] + sql[join.end() :]


def _wrong_case(tree: exp.Expression, sql: str, rng: random.Random) -> Iterator[str]:
    literals = [
        node.this for node in tree.find_all(exp.Literal) if node.is_string and re.search("[a-z]", node.this, re.I)
    ]
    literals = [text for text in literals if f"'{text}'" in sql and "%" not in text]
    if literals:
        text = rng.choice(literals)
        other = text.lower() if text != text.lower() else text.capitalize()
        yield sql.replace(f"'{text}'", f"'{other}'")
