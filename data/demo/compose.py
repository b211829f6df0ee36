"""The pieces that question forms are composed of: random tables and columns, noun phrases, aggregates, superlatives.

A form is a function that draws a `Draft` (a query and the words for its slots) and a tuple of templates, each another
way to ask for the same query. A form that cannot use what it drew raises NoFit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from data.demo import conditions
from data.demo.build import Rows
from data.demo.conditions import Condition, NoFit, Subject
from data.demo.query import Edge, Query, edges
from data.demo.spec import Column, Domain, Kind, Table

NUMBERS = (Kind.MEASURE, Kind.LEVEL)


@dataclass(frozen=True)
class Draft:
    query: Query
    slots: dict[str, str]
    sorts: tuple[str, ...] = ()  # of the conditions used
    templates: tuple[str, ...] = ()  # where the words depend on what was drawn; else the form's


@dataclass(frozen=True)
class Form:
    name: str
    compose: Callable[[Draw], Draft]
    templates: tuple[str, ...]
    weight: int = 1


@dataclass(frozen=True)
class Phrase:
    """A noun phrase such as "claims with status 'open'" and what it needs in the query."""

    words: str
    where: tuple[str, ...] = ()
    sorts: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()  # used in conditions on the phrase's own table


@dataclass
class Draw:
    """Random choices within one domain. `rows` are the real rows."""

    rng: random.Random
    domain: Domain
    rows: Rows
    edges: list[Edge] = field(init=False)

    def __post_init__(self) -> None:
        self.edges = edges(self.domain)

    def one[T](self, options: Sequence[T]) -> T:
        if not options:
            raise NoFit
        return self.rng.choice(options)

    def table(self) -> Table:
        return self.one(self.domain.tables)

    def edge(self, alone: bool = False) -> Edge:
        """A foreign key; `alone` when the words will not say which of several is meant."""
        return self.one([edge for edge in self.edges if edge.alone or not alone])

    def column(self, table: Table, *kinds: Kind, nullable: bool = True, without: Sequence[Column] = ()) -> Column:
        return self.one([c for c in table.of(*kinds, nullable=nullable) if c not in without])

    def shown(self, table: Table, without: Sequence[Column] = ()) -> Column:
        """A column worth showing, most often the one that names the row."""
        if self.rng.random() < 0.5 and table.title not in without:
            return table.title
        return self.column(table, Kind.LABEL, Kind.CATEGORY, Kind.DATE, *NUMBERS, without=without)

    def subject(self, table: Table, column: Column, qualified: bool = False) -> Subject:
        values = [row[column.name] for row in self.rows[table.name] if row[column.name] is not None]
        return Subject(column, f"{table.name}.{column.name}" if qualified else column.name, values)

    def condition(
        self, table: Table, qualified: bool = False, without: Sequence[Column] = ()
    ) -> tuple[Condition, Column]:
        columns = [c for c in table.of(*_CONDITION_WEIGHTS) if c not in without]
        if not columns:
            raise NoFit
        column = self.rng.choices(columns, [_CONDITION_WEIGHTS[c.kind] for c in columns])[0]
        return conditions.draw(self.rng, self.subject(table, column, qualified)), column

    def phrase(self, table: Table, qualified: bool = False, without: Sequence[Column] = ()) -> Phrase:
        """ "claims with status 'open'"."""
        condition, column = self.condition(table, qualified, without)
        words = self.one(("with {0.noun}", "that have {0.noun}", "whose {0.clause}", "where the {0.clause}"))
        return Phrase(f"{table.plural} {words.format(condition)}", (condition.sql,), (condition.sort,), (column,))

    def double_phrase(self, table: Table) -> Phrase:
        """ "claims with status 'open' and claim amount above 500"."""
        first, one = self.condition(table)
        second, other = self.condition(table, without=[one])
        words = self.one(("with {0.noun} and {1.noun}", "whose {0.clause} and whose {1.clause}",
                          "where the {0.clause} and the {1.clause}"))  # fmt: skip
        return Phrase(f"{table.plural} {words.format(first, second)}", (first.sql, second.sql),
                      (first.sort, second.sort), (one, other))  # fmt: skip

    def parent_phrase(self, edge: Edge) -> Phrase:
        """ "claims whose policy has policy type 'auto'"."""
        condition, _ = self.condition(edge.parent, qualified=True)
        words = self.one(("whose {1} has {0.noun}", "where the {1} has {0.noun}"))
        return Phrase(
            f"{edge.child.plural} {words.format(condition, edge.column.role)}", (condition.sql,), (condition.sort,)
        )

    def aggregate(self, table: Table, without: Sequence[Column] = ()) -> tuple[str, str, Column]:
        """SQL function, English word and the column: ("AVG", "average", claim_amount)."""
        column = self.column(table, *NUMBERS, Kind.DATE, without=without)
        function, word = self.one(_AGGREGATES[column.kind])
        return function, word, column

    def superlative(self, column: Column) -> tuple[str, bool]:
        """English word and whether it means descending order."""
        return self.one((("latest", True), ("earliest", False)) if column.kind is Kind.DATE
                        else (("highest", True), ("lowest", False)))  # fmt: skip


_CONDITION_WEIGHTS = {Kind.CATEGORY: 5, Kind.MEASURE: 3, Kind.LEVEL: 3, Kind.DATE: 3, Kind.LABEL: 2}
_EXTREMES = (("MAX", "highest"), ("MAX", "maximum"), ("MIN", "lowest"), ("MIN", "minimum"))
_AGGREGATES: dict[Kind, tuple[tuple[str, str], ...]] = {
    Kind.MEASURE: (("AVG", "average"), ("AVG", "average"), ("SUM", "total"), ("SUM", "total"), *_EXTREMES),
    Kind.LEVEL: (("AVG", "average"), ("AVG", "average"), *_EXTREMES),
    Kind.DATE: (("MAX", "latest"), ("MIN", "earliest")),
}


def counted(low: int, high: int, draw: Draw, few: bool = True) -> tuple[str, str]:
    """A comparison with a small count: SQL tail and words, ("> 5", "more than 5"); `few` allows "fewer than"."""
    number = draw.rng.randint(low, high)
    options = ((">", "more than"), (">=", "at least"), ("<", "fewer than"))
    operator, words = draw.one(options if few else options[:2])
    return f"{operator} {number}", f"{words} {number}"
