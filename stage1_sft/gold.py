"""What a gold query needs (tables, columns), and how a model could plausibly have got it wrong.

Read with sqlglot and resolved against the real schema scope by scope, so that aliases, subqueries, set operations and
common table expressions come out as tables and columns of the database. Pure functions; nothing is executed here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.scope import traverse_scope

from shared.reward.queries import parse
from shared.sql.database import Schema

MISSING_TABLE = "missing_table"
_QUOTED = r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")"
_WORDS = re.compile(r"[^\W\d_]+([ -][^\W\d_]+)*")


@dataclass(frozen=True)
class Needed:
    """Names as the schema spells them, in order of first appearance in the query; columns as "table.column"."""

    tables: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Mistake:
    """A wrong query a model could have written instead of the gold, and a query that shows what is wrong with it."""

    kind: str  # missing_table | misspelt_column | misspelt_table | wrong_column | literal_case
    sql: str
    look: str = ""  # "" where the answer to the wrong query says enough


def tidy(sql: str) -> str:
    """The query without its final semicolon, doubled spaces and spaces before commas; quoted texts stay as they are."""
    parts = re.split(_QUOTED, sql.strip())
    parts[::2] = [re.sub(r"\s+(?=,)", "", re.sub(r"\s+", " ", part)) for part in parts[::2]]
    return "".join(parts).rstrip("; ")


def plain(sql: str, question: str) -> str:
    """One spelling of what golds spell in several ways, so that a model need not guess which.

    Alternatives become IN, LIKE stands without LOWER and with the question's spelling of its text, and names stand
    without needless quotes. Whether the result stays the same is for the caller to see.
    """
    parts = re.split(_QUOTED, sql)
    parts[1::2] = [part[1:-1] if re.fullmatch(r'"[A-Za-z_]\w*"', part) else part for part in parts[1::2]]
    value = rf"({_QUOTED[1:-1]}|-?[\d.]+)"
    sql = re.sub(rf"\(([\w.]+) = {value} OR \1 = {value}\)", r"\1 IN (\2, \3)", "".join(parts))
    sql = re.sub(r"\bLOWER\(([\w.]+)\) LIKE (?=')", r"\1 LIKE ", sql)

    def as_asked(found: re.Match[str]) -> str:
        start = question.lower().find(found[2].lower())
        return found[1] + (question[start : start + len(found[2])] if start >= 0 else found[2])

    return re.sub(r"( LIKE '%?)([^'%]+)", as_asked, sql)


def needed(sql: str, schema: Schema) -> Needed:
    """Tables and columns of the database that `sql` reads. Raises ValueError for SQL that sqlglot cannot read."""
    tree = parse(sql)
    if not isinstance(tree, exp.Query):
        raise ValueError("unreadable SQL" if tree is None else "not a SELECT")
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
    """Candidates, a missing table first, which a small model forgets most.

    Whether one really goes wrong is for the caller to see.
    """
    makers = [_wrong_text, _misspelt]
    rng.shuffle(makers)
    for make in [_first_table_only, *makers]:
        yield from (mistake for mistake in make(sql, wanted, schema, rng) if mistake.sql != sql)


def _first_table_only(sql: str, wanted: Needed, schema: Schema, rng: random.Random) -> Iterator[Mistake]:
    """The outermost SELECT without joins and subqueries, as if its table had the columns of all."""
    tree = parse(sql)
    if len(wanted.tables) < 2 or not isinstance(tree, exp.Select):
        return
    tree.set("joins", None)
    for test in list(tree.find_all(exp.In)):
        if where := test.args.get("query") and test.args["query"].find(exp.Where):
            test.replace(where.this)
    for node in tree.find_all(exp.Column, exp.Table):
        node.set("alias" if isinstance(node, exp.Table) else "table", None)
    yield Mistake(MISSING_TABLE, tree.sql(dialect="sqlite"))


def _wrong_text(sql: str, wanted: Needed, schema: Schema, rng: random.Random) -> Iterator[Mistake]:
    """A text in the wrong case ('open' as 'Open', 'Bern' as 'bern') or compared with another column."""
    tree = parse(sql)
    texts = (
        [node for node in tree.find_all(exp.Literal) if node.is_string and _WORDS.fullmatch(node.name)] if tree else []
    )
    if not texts:
        return
    text = rng.choice(texts)
    compared = text.parent.find(exp.Column)
    homes = (name.split(".", 1) for name in wanted.columns)
    table, column = next((home for home in homes if compared and home[1].lower() == compared.name.lower()), ("", ""))
    look = f"SELECT DISTINCT {column} FROM {table} LIMIT 10" if re.fullmatch(r"\w+ \w+", f"{table} {column}") else ""
    wrong = text.name.capitalize() if text.name.islower() else text.name.lower()
    found = [Mistake("literal_case", sql.replace(f"'{text.name}'", f"'{wrong}'"), look)]
    home = schema.table(table)
    others = [other.name for other in home.columns if other.type == "TEXT" and other.name != column] if home else []
    if others:
        found.append(Mistake("wrong_column", _renamed(sql, column, rng.choice(others)), look))
    rng.shuffle(found)
    yield from found


def _misspelt(sql: str, wanted: Needed, schema: Schema, rng: random.Random) -> Iterator[Mistake]:
    """One column or table under a near-miss of its name: a dropped part, a wrong number, words run together."""
    taken = {column.name.lower() for table in schema.tables for column in table.columns}
    taken |= {table.name.lower() for table in schema.tables}
    slips = []
    for kind, names in (("misspelt_table", wanted.tables), ("misspelt_column", wanted.columns)):
        for table, _, column in (name.partition(".") for name in names):
            name = column or table
            tail = name.split("_", 1)[1] if "_" in name.strip("_") else ""
            number = name[:-1] if name.endswith("s") else f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
            glued = f"{table.removesuffix('s')}_{column}" if column else ""
            slips += [(kind, name, slip) for slip in (tail, number, name.replace("_", ""), glued)]
    rng.shuffle(slips)
    for kind, name, slip in slips:
        if slip and slip.lower() not in taken:
            yield Mistake(kind, _renamed(sql, name, slip))


def _renamed(sql: str, name: str, other: str) -> str:
    return re.sub(rf"(?<![\w']){re.escape(name)}(?![\w'])", other, sql, flags=re.IGNORECASE)
