"""Conditions: a piece of WHERE and the English for it, always together.

Every condition has two wordings, a noun ("status 'open'", "a premium above 200", for "claims with ...") and a clause ("status is 'open'", for
"claims whose ..."). Values come from the real rows: texts and dates are literal values of the column, thresholds are
round numbers between its quantiles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data.demo.query import literal
from data.demo.spec import Column, Kind


class NoFit(Exception):
    """This draw cannot be completed with the table at hand; the generator draws again."""


@dataclass(frozen=True)
class Condition:
    sql: str
    noun: str
    clause: str
    sort: str  # one of SORTS, for the coverage of question forms


@dataclass(frozen=True)
class Subject:
    """The column a condition is about: `sql` is its name in the query, `values` its non-NULL values in row order."""

    column: Column
    sql: str
    values: Sequence[Any]

    @property
    def words(self) -> str:
        return self.column.words

    @property
    def a_words(self) -> str:
        """ "a premium", "an age"."""
        return f"{'an' if self.words[0] in 'aeiou' else 'a'} {self.words}"


Builder = Callable[[random.Random, Subject], Condition]


def _equal(rng: random.Random, at: Subject) -> Condition:
    value = literal(rng.choice(at.values))
    return Condition(f"{at.sql} = {value}", f"{at.words} {value}", f"{at.words} is {value}", "equal")


def _unequal(rng: random.Random, at: Subject) -> Condition:
    if at.column.nullable:  # "not 'open'" leaves open whether an unknown status counts
        raise NoFit
    value = literal(rng.choice(at.values))
    return Condition(f"{at.sql} != {value}", f"{at.words} other than {value}", f"{at.words} is not {value}", "unequal")


def _either(rng: random.Random, at: Subject) -> Condition:
    options = sorted(set(at.values))
    if len(options) < 3:
        raise NoFit
    first, second = map(literal, rng.sample(options, 2))
    words = f"{first} or {second}"
    return Condition(f"{at.sql} IN ({first}, {second})", f"{at.words} {words}", f"{at.words} is {words}", "either")


_COMPARISONS = (
    (">", "greater than {}", "greater than {}"),
    (">", "above {}", "above {}"),
    ("<", "less than {}", "less than {}"),
    ("<", "below {}", "below {}"),
    (">=", "of at least {}", "at least {}"),
    ("<=", "of at most {}", "at most {}"),
)


def _compare(rng: random.Random, at: Subject) -> Condition:
    operator, noun, clause = rng.choice(_COMPARISONS)
    value = literal(threshold(at, rng.uniform(0.2, 0.8)))
    return Condition(
        f"{at.sql} {operator} {value}",
        f"{at.a_words} {noun.format(value)}",
        f"{at.words} is {clause.format(value)}",
        "compare",
    )


def _between(rng: random.Random, at: Subject) -> Condition:
    ends = [threshold(at, rng.uniform(*range_)) for range_ in ((0.15, 0.4), (0.55, 0.85))]
    return _span(at, [literal(end) for end in ends], "between")


def _date_between(rng: random.Random, at: Subject) -> Condition:
    ordered = sorted(at.values)
    ends = [ordered[int(len(ordered) * rng.uniform(*range_))] for range_ in ((0.1, 0.4), (0.55, 0.9))]
    return _span(at, ends, "date_between", quote="'")


def _span(at: Subject, ends: Sequence[str], sort: str, quote: str = "") -> Condition:
    low, high = ends
    if low == high:
        raise NoFit
    sql = f"{at.sql} BETWEEN {quote}{low}{quote} AND {quote}{high}{quote}"
    return Condition(sql, f"{at.a_words} between {low} and {high}", f"{at.words} is between {low} and {high}", sort)


def _date_compare(rng: random.Random, at: Subject) -> Condition:
    operator, word = rng.choice(((">", "after"), ("<", "before")))
    value = sorted(at.values)[int(len(at.values) * rng.uniform(0.2, 0.8))]
    words = f"{word} {value}"
    return Condition(
        f"{at.sql} {operator} '{value}'", f"{at.a_words} {words}", f"{at.words} is {words}", "date_compare"
    )


def _year(rng: random.Random, at: Subject) -> Condition:
    value = rng.choice(at.values)[:4]
    words = f"in the year {value}"
    return Condition(f"strftime('%Y', {at.sql}) = '{value}'", f"{at.a_words} {words}", f"{at.words} is {words}", "year")


def _like(rng: random.Random, at: Subject) -> Condition:
    words = rng.choice(at.values).split()
    verb, pattern, piece = rng.choice(
        (("start", "{}%", words[0]), ("end", "%{}", words[-1]), ("contain", "%{}%", words[-1]))
    )
    if not piece.isalpha():
        raise NoFit
    piece = piece if verb == "contain" or rng.random() < 0.5 else (piece[:2] if verb == "start" else piece[-3:])
    target = "" if verb == "contain" else " with"
    sql = f"{at.sql} LIKE {literal(pattern.format(piece))}"
    noun = f"{at.a_words} {verb}ing{target} {literal(piece)}"
    return Condition(sql, noun, f"{at.words} {verb}s{target} {literal(piece)}", "like")


def _missing(rng: random.Random, at: Subject) -> Condition:
    if not at.column.nullable:
        raise NoFit
    if rng.random() < 0.5:
        return Condition(f"{at.sql} IS NULL", f"no {at.words}", f"{at.words} is missing", "null")
    return Condition(f"{at.sql} IS NOT NULL", f"a known {at.words}", f"{at.words} is known", "not_null")


_BUILDERS: dict[Kind, tuple[Builder, ...]] = {
    Kind.CATEGORY: (_equal, _equal, _equal, _unequal, _either),
    Kind.LABEL: (_like,),
    Kind.MEASURE: (_compare, _compare, _between),
    Kind.LEVEL: (_compare, _compare, _between),
    Kind.DATE: (_date_compare, _year, _date_between),
}
SORTS = ("equal unequal either compare between date_compare date_between year like null not_null").split()


def draw(rng: random.Random, at: Subject) -> Condition:
    """A random condition that makes sense for the kind of column; raises NoFit when this one does not."""
    if at.column.nullable and rng.random() < 0.4:
        return _missing(rng, at)
    builders = _BUILDERS.get(at.column.kind)
    if not builders or not at.values:
        raise NoFit
    return rng.choice(builders)(rng, at)


def named(rng: random.Random, at: Subject) -> Condition:
    """Equality with one value of the column."""
    return _equal(rng, at)


def threshold(at: Subject, quantile: float) -> float:
    """A round number near a quantile: two significant digits from 100 on, else whole, with a decimal only below 10."""
    value = sorted(at.values)[int(len(at.values) * quantile)]
    if at.column.is_year:
        return value
    if isinstance(value, float) and value < 10:
        return round(value, 1)
    digits = 10 ** max(0, len(str(int(value))) - 2)
    return int(round(value / digits) * digits)
