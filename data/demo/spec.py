"""How a demo database is declared: domains hold tables, tables hold columns, columns know what they mean.

Both the SQLite file and the questions come from this one declaration, so a question's words and the identifiers it
needs cannot drift apart: the words of `claim_amount` are "claim amount". What a column *means* (its kind) decides which
questions make sense for it: amounts add up, ages do not.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Maker = Callable[[random.Random, Row], Any]
"""Makes one value; sees the values of the columns to its left."""


class Kind(enum.StrEnum):
    KEY = "key"  # integer primary key
    REF = "ref"  # foreign key
    LABEL = "label"  # unique text that names the row
    CATEGORY = "category"  # text with few distinct values
    MEASURE = "measure"  # a quantity that adds up
    LEVEL = "level"  # a quantity that does not: age, year, rating
    DATE = "date"  # ISO text


@dataclass(frozen=True)
class Column:
    name: str
    kind: Kind
    make: Maker
    sql_type: str
    null_share: float = 0.0
    references: str = ""  # parent table, for REF
    role: str = ""  # what the parent is to this row, for REF: "home team"

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    @property
    def is_year(self) -> bool:
        return self.name.endswith("_year")

    @property
    def nullable(self) -> bool:
        return self.null_share > 0


@dataclass(frozen=True)
class Table:
    """`name` is the plural noun of its rows, `singular` the words for one of them."""

    name: str
    singular: str
    rows: int
    columns: tuple[Column, ...]

    @property
    def plural(self) -> str:
        return self.name.replace("_", " ")

    @property
    def key(self) -> Column:
        return self.of(Kind.KEY)[0]

    @property
    def title(self) -> Column:
        """The column that says which row it is: its label, else its key."""
        return (self.of(Kind.LABEL) or self.of(Kind.KEY))[0]

    def of(self, *kinds: Kind, nullable: bool = True) -> list[Column]:
        """Columns of these kinds; `nullable=False` leaves out those that hold NULLs."""
        return [c for c in self.columns if c.kind in kinds and (nullable or not c.nullable)]


@dataclass(frozen=True)
class Domain:
    db_id: str
    tables: tuple[Table, ...]  # parents before children

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


def key(name: str) -> Column:
    return Column(name, Kind.KEY, lambda rng, row: None, "INTEGER")


def ref(name: str, table: str, role: str = "", null: float = 0.0) -> Column:
    """A foreign key; the role defaults to the column's name without `_id`."""
    words = role or name.removesuffix("_id").replace("_", " ")
    return Column(name, Kind.REF, lambda rng, row: None, "INTEGER", null, table, words)


def label(name: str, make: Maker) -> Column:
    return Column(name, Kind.LABEL, make, "TEXT")


def category(name: str, make: Maker, null: float = 0.0) -> Column:
    return Column(name, Kind.CATEGORY, make, "TEXT", null)


def measure(name: str, make: Maker, sql_type: str = "REAL", null: float = 0.0) -> Column:
    return Column(name, Kind.MEASURE, make, sql_type, null)


def level(name: str, make: Maker, sql_type: str = "INTEGER", null: float = 0.0) -> Column:
    return Column(name, Kind.LEVEL, make, sql_type, null)


def date(name: str, make: Maker, null: float = 0.0) -> Column:
    return Column(name, Kind.DATE, make, "TEXT", null)
