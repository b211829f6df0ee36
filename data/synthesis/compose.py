"""The pieces that question forms are composed of: random tables and columns, noun phrases, aggregates, superlatives.

A form is a function that draws a `Draft`: a query and the words for the slots of its wordings (wordings.yaml), each
another way to ask for the same query. A form that cannot use what it drew raises NoFit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from data.synthesis import conditions
from data.synthesis.conditions import Condition, NoFit
from data.synthesis.query import Query, identifier, literal
from data.synthesis.schema import Column, Meaning, Table, Understanding
from data.synthesis.words import a, is_participle, listed, plural


@dataclass(frozen=True)
class Draft:
    query: Query
    slots: dict[str, str]
    sorts: tuple[str, ...] = ()  # of the conditions used
    wording: str = ""  # the entry of wordings.yaml, where it depends on what was drawn; else the form's name
    twin: str = ""  # other SQL with the same meaning; it must agree on every copy of the database


Form = Callable[["Draw"], Draft]  # a function called "_name" for the form "name"


@dataclass(frozen=True)
class Edge:
    """A reference: `column` of the child leads to the column `target` of the parent."""

    child: Table
    column: Column
    parent: Table
    target: Column
    alone: bool  # no other reference of the child leads to the same parent

    @property
    def role(self) -> str:
        return self.column.role

    @property
    def join(self) -> str:
        """The parent, joined to its child."""
        return f"JOIN {identifier(self.parent.name)} ON {self.column.ref} = {self.target.ref}"

    def children(self, shown: Sequence[Column], where: tuple[str, ...] = ()) -> Query:
        """What is shown of the parents that have children; a key alone needs no join."""
        if list(shown) == [self.target]:
            return Query((self.column.ref,), self.child.name, where=where)
        return Query(refs(shown), self.child.name, (self.join,), where)


@dataclass(frozen=True)
class Phrase:
    """A noun phrase such as "claims with status 'open'" and what it needs in the query."""

    words: str
    table: Table
    where: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    sorts: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()  # used in conditions on the phrase's own table

    def query(self, *select: str | Column) -> Query:
        return Query(refs(select), self.table.name, self.joins, self.where)

    def draft(self, query: Query, wording: str = "", **slots: str) -> Draft:
        """The query with these slots, and the phrase in slot "np"."""
        return Draft(query, {"np": self.words, **slots}, self.sorts, wording)


@dataclass
class Draw:
    """Random choices within one database."""

    rng: random.Random
    about: Understanding
    edges: list[Edge] = field(init=False)
    subjects: list[Table] = field(init=False)

    def __post_init__(self) -> None:
        tables = {table.name: table for table in self.about.tables}
        self.edges = []
        for table in self.about.tables:
            found = [(c, *c.references) for c in table.columns if c.references and c.references[0] in tables]
            for column, name, key in found:
                target = next(c for c in tables[name].columns if c.name == key)
                alone = [parent for _, parent, _ in found].count(name) == 1
                self.edges.append(Edge(table, column, tables[name], target, alone))
        self.subjects = [table for table in self.about.tables if not table.is_link]

    def one[T](self, options: Sequence[T]) -> T:
        if not options:
            raise NoFit
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def table(self) -> Table:
        """A table to ask about; one with more columns more often."""
        if not self.subjects:
            raise NoFit
        return self.rng.choices(self.subjects, [min(8, len(table.columns)) for table in self.subjects])[0]

    def edge(self, links: bool = True) -> Edge:
        """A reference that is never NULL."""
        return self.one([e for e in self.edges if (links or not e.child.is_link) and not e.column.has_null])

    def column(self, table: Table, *meanings: Meaning, nullable: bool = True, without: Sequence[Column] = ()) -> Column:
        return self.one([c for c in table.of(*meanings) if c not in without and (nullable or not c.has_null)])

    def ordered(self, table: Table, without: Sequence[Column] = ()) -> Column:
        """A column whose values have an order and are all known."""
        return self.one([c for c in table.columns if c.can_be_ordered and not c.has_null and c not in without])

    def sorting(self, table: Table, without: Sequence[Column] = ()) -> tuple[Column, dict[str, str], bool]:
        """A column to sort by, the words for it and its direction, and whether that is descending."""
        names = [c for c in table.title if c.meaning is Meaning.NAME]
        column = self.one(names) if names and self.chance(0.3) else self.ordered(table, without)
        descending = self.chance(0.5)
        direction = "in descending order" if descending else "in ascending order"
        if column in names:
            direction = "in reverse alphabetical order" if descending else "in alphabetical order"
        elif self.chance(0.6):
            ends = ("earliest", "latest") if column.meaning is Meaning.DATE else ("lowest", "highest")
            direction = f"from {ends[descending]} to {ends[not descending]}"
        return column, {"key": column.measured(self.rng), "direction": direction}, descending

    def shown(self, table: Table, count: int, without: Sequence[Column] = ()) -> list[Column]:
        """Columns worth showing, most often beginning with what names the row; first and last name stay together."""
        chosen = [*table.title] if self.rng.random() < 0.75 and not set(table.title) & set(without) else []
        others = [c for c in table.of(*SHOWN) if c not in without and c not in table.title and not c.is_clock]
        if not chosen and not others:
            chosen = [c for c in table.title if c not in without]
        wanted = max(0, count - bool(chosen))
        chosen += self.rng.sample(others, min(wanted, len(others)))
        return chosen or [self.one(others)]

    def condition(self, table: Table, without: Sequence[Column] = ()) -> tuple[Condition, Column]:
        columns = [c for c in table.columns if c.meaning in conditions.WEIGHTS and c not in without]
        if not columns:
            raise NoFit
        column = self.rng.choices(columns, [conditions.WEIGHTS[c.meaning] for c in columns])[0]
        return conditions.draw(self.rng, column), column

    def up(self, table: Table) -> list[Edge]:
        """References of the table that are never NULL."""
        return [edge for edge in self.edges if edge.child is table and not edge.column.has_null]

    def many(self, table: Table) -> str:
        """What rows of the table are called."""
        return self.one((table.plural, *(plural(word) for word in table.synonyms)))

    def phrase(
        self,
        table: Table,
        kinds: str = "plain own own own two two parent parent both both grand average average average",
        without: Sequence[Column] = (),
    ) -> Phrase:
        """A noun phrase about rows of a table, with conditions on them or on rows they refer to."""
        kind = self.one(kinds.split())
        many = self.many(table)
        if kind == "plain":
            return Phrase(many, table)
        if kind == "average":
            column = self.one([c for c in table.columns if c.is_number and c not in without and len(set(c.values)) > 3])
            operator, word = self.one(((">", "above"), (">", "greater than"), ("<", "below"), ("<", "less than")))
            called, inner = column.measured(self.rng), Query((f"AVG({column.number})",), table.name).sql
            words = self.one((f"with {a(called)} {word} the average", f"whose {called} is {word} the average"))
            test = f"{column.number} {operator} ({inner})"
            return Phrase(f"{many} {words}", table, (test,), (), ("average",), (column,))
        if kind in ("parent", "grand", "both"):
            return self._parent_phrase(kind, many, table, without)
        first, one = self.condition(table, without)
        if kind == "own":
            return Phrase(_with(many, first, self.rng), table, (first.sql,), (), (first.sort,), (one,))
        second, other = self.condition(table, (one, *without))
        sorts, columns = (first.sort, second.sort), (one, other)
        if self.chance(0.3):
            words = f"{many} with {first.noun} or with {second.noun}"
            return Phrase(words, table, (f"({first.sql} OR {second.sql})",), (), sorts, columns)
        if second.being:
            first, second = second, first
        if first.being:
            words = f"{_with(many, first, self.rng)} {self.one(('with', 'that have', 'having'))} {second.noun}"
        elif self.chance(0.5):
            words = f"{many} with {first.noun} and {second.noun}"
        else:
            words = f"{many} whose {first.clause} and whose {second.clause}"
        return Phrase(words, table, (first.sql, second.sql), (), sorts, columns)

    def _parent_phrase(self, kind: str, many: str, table: Table, without: Sequence[Column]) -> Phrase:
        """A phrase with a condition on the row that a row refers to, or on the one that it refers to ("grand")."""
        edge = self.one(self.up(table))
        joins: tuple[str, ...] = (edge.join,)
        role, parent = edge.role, edge.parent
        if kind == "grand":
            upper = self.one([e for e in self.up(parent) if e.parent is not table])
            joins, role, parent = (edge.join, upper.join), f"{edge.role}'s {upper.role}", upper.parent
        if len(parent.title) == 2 and kind == "parent" and self.chance(0.5):
            where, name = self.named(parent)
            return Phrase(f"{many} whose {role} is {name}", table, where, joins, ("equal", "equal"))
        found, column = self.condition(parent)
        words = self._related(role, parent, found, column, one=edge.column.is_unique)
        if kind == "parent" and self.rng.random() < 0.3:
            second, _ = self.condition(parent, (column,))
            words = f"whose {role} has {found.noun} and {second.noun}"
            where, sorts = (found.sql, second.sql), (found.sort, second.sort)
            return Phrase(f"{many} {words}", table, where, joins, sorts)
        phrase = Phrase(f"{many} {words}", table, (found.sql,), joins, (found.sort,))
        if kind != "both":
            return phrase
        own, used = self.condition(table, without)
        mine = _with(many, own, self.rng)
        words = f"{mine} and {words}" if " whose " in mine and words.startswith("whose") else f"{mine} {words}"
        return replace(phrase, words=words, where=(own.sql, found.sql), sorts=(own.sort, found.sort),
                       columns=(used,))  # fmt: skip

    def named(self, table: Table) -> tuple[tuple[str, ...], str]:
        """Conditions on first and last name of a random row, and the full name."""
        row = self.one(list(zip(*(column.values for column in table.title), strict=False)))
        return tuple(f"{c.ref} = {literal(v)}" for c, v in zip(table.title, row, strict=True)), " ".join(map(str, row))

    def _related(self, role: str, parent: Table, found: Condition, column: Column, one: bool) -> str:
        """ "whose policy has policy type 'auto'": a condition on the row that is referred to."""
        if found.sort == "equal" and column in parent.title and len(parent.title) == 1:
            whose = f"whose {role} is {found.value}"
            of = f"of the {role} {found.value}"
            return whose if one or "'s " in role else self.one([whose, of, f"that belong to the {role} {found.value}"])
        if found.being:
            return f"whose {role} is {found.being}"
        return self.one((f"whose {role} has {found.noun}", f"whose {role}'s {found.clause}"))

    def aggregate(self, table: Table, without: Sequence[Column] = ()) -> tuple[str, str, Column]:
        """SQL function, English word and the column: ("AVG", "average", claim_amount)."""
        column = self.one([c for c in table.columns if c.can_be_ordered and c not in without and not c.is_clock])
        function, word = self.one(AGGREGATES[column.meaning])
        if any(called.startswith(word) for called in column.words):  # "total total amount"
            raise NoFit
        return function, word, column

    def superlative(self, column: Column) -> tuple[str, bool]:
        """English word and whether it means descending order."""
        return self.one(SUPERLATIVES[column.meaning])


SHOWN = (Meaning.NAME, Meaning.CATEGORY, Meaning.DATE, Meaning.QUANTITY, Meaning.LEVEL, Meaning.DETAIL, Meaning.KEY)
_EXTREMES = (("MAX", "highest"), ("MAX", "maximum"), ("MIN", "lowest"), ("MIN", "minimum"))
AGGREGATES: dict[Meaning, tuple[tuple[str, str], ...]] = {
    Meaning.QUANTITY: (("AVG", "average"), ("AVG", "average"), ("SUM", "total"), ("SUM", "total"), *_EXTREMES),
    Meaning.LEVEL: (("AVG", "average"), ("AVG", "average"), ("AVG", "average"), *_EXTREMES),
    Meaning.DATE: (("MAX", "latest"), ("MAX", "most recent"), ("MIN", "earliest")),
}
SUPERLATIVES = {
    Meaning.QUANTITY: (("highest", True), ("largest", True), ("lowest", False), ("smallest", False)),
    Meaning.LEVEL: (("highest", True), ("lowest", False)),
    Meaning.DATE: (("latest", True), ("most recent", True), ("earliest", False)),
}


def refs(columns: Sequence[str | Column]) -> tuple[str, ...]:
    """The columns inside a Query; texts stay as they are."""
    return tuple(column if isinstance(column, str) else column.ref for column in columns)


def _with(many: str, found: Condition, rng: random.Random) -> str:
    """ "female patients", "claims with status 'open'"."""
    if found.being and (found.sort == "flag" or rng.random() < 0.8):
        if rng.random() < 0.3:
            return f"{many} that are {found.being}"
        if " " not in found.being:
            return f"{found.being} {many}"
        if found.being.startswith("from "):
            return f"{many} {found.being}"
    return f"{many} {rng.choice((f'with {found.noun}', f'that have {found.noun}', f'whose {found.clause}'))}"


def called(draw: Draw, columns: Sequence[Column], many: bool = False) -> str:
    """Columns in a list: "name and age", plural with `many`; first and last name become one."""
    found = [draw.one(column.words) for column in columns]
    for place, column in enumerate(columns):
        if column.is_number and is_participle(found[place]):
            found[place] = f"number {found[place]}"
    if len(found) >= 2 and found[0] == "first name" and found[1] == "last name" and draw.rng.random() < 0.5:
        return listed(
            ["first and last names" if many else "first and last name", *[plural(w) if many else w for w in found[2:]]]
        )
    return listed([plural(word) if many else word for word in found])


def counted(low: int, high: int, draw: Draw, few: bool = True) -> tuple[str, str]:
    """A comparison with a small count: SQL tail and words, ("> 5", "more than 5"); `few` allows "fewer than"."""
    number = draw.rng.randint(low, max(low, high))
    options = ((">", "more than"), (">=", "at least"), (">=", "{} or more"), ("<", "fewer than"), ("<=", "at most"))
    operator, words = draw.one(options if few else options[:3])
    return f"{operator} {number}", words.format(number) if "{}" in words else f"{words} {number}"
