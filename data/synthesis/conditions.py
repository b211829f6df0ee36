"""Conditions: a piece of WHERE and the English for it, always together.

A condition has up to three wordings: a noun ("status 'open'", for "claims with ..."), a clause ("status is 'open'",
for "claims whose ...") and, where the column allows it, what the rows then are ("female", "from Brazil", for "customers
that are ..."). Values come from the rows: texts and dates are values of the column, thresholds are round
numbers between its quantiles.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.synthesis.query import literal
from data.synthesis.schema import Column, Meaning, Stored, repeated
from data.synthesis.words import a, be, date_said, is_participle, is_plural, listed, singular, value_said


class NoFit(Exception):
    """This draw cannot be completed with the table at hand; the generator draws again."""


@dataclass(frozen=True)
class Condition:
    sql: str
    noun: str
    clause: str
    sort: str  # one of SORTS, for the coverage of question forms
    being: str = ""  # "female", "from Brazil"; an adjective when it is one word
    value: str = ""  # of "equal": the value as it is said, without the column


_ORIGINS = ("country", "city", "nationality", "citizenship", "hometown")
Builder = Callable[[random.Random, Column], Condition]


def _said(rng: random.Random, column: Column, value: Any) -> str:
    quoted = rng.random() < 0.5 and column.words[0] not in _ORIGINS
    return column.says[value] if value in column.says else value_said(value, quoted)


def _called(rng: random.Random, column: Column) -> str:
    return rng.choice(column.words)


def _is_counted(words: str) -> bool:
    """Whether a number goes before the words: "4 cylinders", "9 injured"."""
    return is_plural(words) or is_participle(words)


def equal(rng: random.Random, column: Column) -> Condition:
    """Equality with one value of the column."""
    values = repeated(column.values)
    value = rng.choice(values[:12] if rng.random() < 0.7 else values)
    if len(str(value)) < (3 if column.meaning in (Meaning.DETAIL, Meaning.NAME) else 1) or (
        isinstance(value, str) and len(value) > 60
    ):
        raise NoFit
    words, said = _called(rng, column), _said(rng, column, value)
    being = ""
    if value in column.says and column.meaning is Meaning.CATEGORY:
        being = column.says[value]
    elif set(words.split()) & {"gender", "sex"} and isinstance(value, str) and value.lower() in ("male", "female"):
        being = value.lower()
    elif words in _ORIGINS and said[0] != "'":
        being = f"from {said}"
    noun = f"the {words} {said}" if column.meaning is Meaning.NAME or rng.random() < 0.5 else f"{a(words)} of {said}"
    if isinstance(value, (int, float)) and _is_counted(words):
        noun = f"{said} {words if value != 1 else singular(words)}"
    return Condition(f"{column.ref} = {literal(value)}", noun, f"{be(words)} {said}", "equal", being, value=said)


def _unequal(rng: random.Random, column: Column) -> Condition:
    if column.has_null:  # "not 'open'" leaves open whether an unknown status counts
        raise NoFit
    plain = equal(rng, column)
    words = _called(rng, column)
    noun, clause = f"{a(words)} other than {plain.value}", f"{be(words)} not {plain.value}"
    being = f"not {plain.being}" if plain.being else ""
    return Condition(plain.sql.replace(" = ", " != ", 1), noun, clause, "unequal", being)


def _either(rng: random.Random, column: Column) -> Condition:
    """One of two values, written with OR, or one of three, written with IN."""
    options = [value for value in repeated(column.values)[:12] if value != ""]
    if len(options) < 3:
        raise NoFit
    chosen = rng.sample(options, rng.choice((2, 2, 2, 3)) if len(options) > 3 else 2)
    words, each = _called(rng, column), [_said(rng, column, value) for value in chosen]
    if any(text[0] == "'" for text in each):
        each = [text if text[0] == "'" else f"'{text}'" for text in each]
    said = listed(each, "or")
    tests = [f"{column.ref} = {literal(value)}" for value in chosen]
    sql = f"({' OR '.join(tests)})" if len(chosen) == 2 else f"{column.ref} IN ({', '.join(map(literal, chosen))})"
    being = f"from {said}" if words in _ORIGINS and said[0] != "'" else ""
    return Condition(sql, f"the {words} {said}", f"{be(words)} {said}", "either", being)


_COMPARISONS = (
    (">", "greater than {}", "greater than {}"),
    (">", "above {}", "above {}"),
    (">", "over {}", "more than {}"),
    ("<", "less than {}", "less than {}"),
    ("<", "below {}", "below {}"),
    (">=", "of at least {}", "at least {}"),
    ("<=", "of at most {}", "at most {}"),
)


def _compare(rng: random.Random, column: Column) -> Condition:
    operator, noun, clause = rng.choice(_COMPARISONS)
    value = literal(threshold(column, rng.uniform(0.2, 0.8)))
    words = _called(rng, column)
    sql = f"{column.number} {operator} {value}"
    if _is_counted(words):  # "more than 4 cylinders"
        fewer = "fewer than" if "." not in value else "less than"
        said = {">": "more than", "<": fewer, ">=": "at least", "<=": "at most"}[operator]
        clause = f"number of {words} is {said.replace('fewer', 'less')} {value}"
        return Condition(sql, f"{said} {value} {words}", clause, "compare")
    return Condition(sql, f"{a(words)} {noun.format(value)}", f"{be(words)} {clause.format(value)}", "compare")


def _between(rng: random.Random, column: Column) -> Condition:
    ends = [literal(threshold(column, rng.uniform(*span))) for span in ((0.15, 0.4), (0.55, 0.85))]
    return _span(rng, column, column.number, ends, ends, "between")


def _span(rng: random.Random, column: Column, ref: str, ends: list[str], said: list[str], sort: str) -> Condition:
    (low, high), words = ends, _called(rng, column)
    if low == high:
        raise NoFit
    sql, between = f"{ref} BETWEEN {low} AND {high}", f"between {said[0]} and {said[1]}"
    if column.is_number and _is_counted(words):
        return Condition(sql, f"{between} {words}", f"number of {words} is {between}", sort)
    return Condition(sql, f"{a(words)} {between}", f"{be(words)} {between}", sort)


def date_parts(column: Column) -> tuple[str, str]:
    """SQL for the day ('2024-03-31', or what can be compared like it) and for the year of a date column as text."""
    ref = column.ref
    return {
        Stored.DAY: (ref, f"strftime('%Y', {ref})"),
        Stored.TIME: (f"date({ref})", f"strftime('%Y', {ref})"),
        Stored.COMPACT: (ref, f"substr({ref}, 1, 4)"),
        Stored.YEAR: (ref, ref),
        Stored.SECONDS: (f"date({ref}, 'unixepoch')", f"strftime('%Y', {ref}, 'unixepoch')"),
        Stored.MILLISECONDS: (f"date({ref} / 1000, 'unixepoch')", f"strftime('%Y', {ref} / 1000, 'unixepoch')"),
    }.get(column.stored, ("", ""))


def _day(column: Column, value: Any, written: bool) -> tuple[str, str]:
    """A date as a literal that `date_parts` can be compared with, and as people say it; `written` spells the month."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if column.stored in (Stored.SECONDS, Stored.MILLISECONDS):
        moment = value / (1000 if column.stored is Stored.MILLISECONDS else 1)
        text = datetime.datetime.fromtimestamp(moment, datetime.UTC).date().isoformat()
    if column.stored is Stored.YEAR:
        return (literal(value) if column.as_text else text), text
    day = f"{text[:4]}-{text[4:6]}-{text[6:8]}" if column.stored is Stored.COMPACT else text[:10]
    try:
        said = date_said(day)
    except ValueError:
        raise NoFit from None
    sql = (literal(text) if column.as_text else text) if column.stored is Stored.COMPACT else literal(day)
    return sql, said if written else day


def _date_between(rng: random.Random, column: Column) -> Condition:
    ordered, written = sorted(column.values), rng.random() < 0.4
    places = [int(len(ordered) * rng.uniform(*span)) for span in ((0.1, 0.4), (0.55, 0.9))]
    ends = [_day(column, ordered[place], written) for place in places]
    day, _ = date_parts(column)
    if not day:
        raise NoFit
    return _span(rng, column, day, [end for end, _ in ends], [said for _, said in ends], "date_between")


def _date_compare(rng: random.Random, column: Column) -> Condition:
    operator, word = rng.choice(((">", "after"), ("<", "before"), (">=", "on or after")))
    ordered = sorted(column.values)
    value, said = _day(column, ordered[int(len(ordered) * rng.uniform(0.2, 0.8))], rng.random() < 0.4)
    day, _ = date_parts(column)
    if not day:
        raise NoFit
    if column.stored is Stored.YEAR:
        word = word.replace("on or after", "in or after")
    words = _called(rng, column)
    return Condition(
        f"{day} {operator} {value}", f"{a(words)} {word} {said}", f"{be(words)} {word} {said}", "date_compare"
    )


def _year(rng: random.Random, column: Column) -> Condition:
    value, words = rng.choice(column.values), _called(rng, column)
    if column.stored is Stored.YEAR_LAST:
        year = str(value)[-4:]
        sql = f"{column.ref} LIKE '%{year}'"
    elif column.stored is Stored.YEAR:
        year = f"{value:g}" if isinstance(value, float) else str(value)
        return Condition(f"{column.ref} = {literal(value)}", f"{a(words)} of {year}", f"{be(words)} {year}", "year",
                         f"from {year}" if words == "year" else "")  # fmt: skip
    else:
        year = _day(column, value, False)[0].strip("'")[:4]
        sql = f"{date_parts(column)[1]} = '{year}'"
    return Condition(sql, f"{a(words)} in {year}", f"{be(words)} in {year}", "year")


def _like(rng: random.Random, column: Column) -> Condition:
    pieces = str(rng.choice(column.values)).split()
    if not pieces:
        raise NoFit
    verb, pattern, piece = rng.choice(
        (("start", "{}%", pieces[0]), ("end", "%{}", pieces[-1]), ("contain", "%{}%", rng.choice(pieces)))
    )
    if column.meaning is Meaning.TEXT:
        verb, pattern = "contain", "%{}%"
    piece = re.sub(r"^\W+|\W+$", "", piece)
    if not piece.isalpha() or len(piece) < 3:
        raise NoFit
    piece = piece if verb == "contain" or rng.random() < 0.5 else (piece[:2] if verb == "start" else piece[-3:])
    if verb == "contain" and rng.random() < 0.3:
        verb = "include"
    target = "" if verb in ("contain", "include") else " with"
    words = _called(rng, column)
    sql = f"{column.ref} LIKE {literal(pattern.format(piece))}"
    noun = f"{a(words)} {verb.removesuffix('e')}ing{target} {literal(piece)}"
    return Condition(sql, noun, f"{words} {verb}s{target} {literal(piece)}", "like")


def _missing(rng: random.Random, column: Column) -> Condition:
    words = _called(rng, column)
    if rng.random() < 0.35:
        return Condition(f"{column.ref} IS NULL", f"no {words}", f"{be(words)} missing", "null")
    return Condition(f"{column.ref} IS NOT NULL", f"a known {words}", f"{be(words)} known", "not_null")


def _flag(rng: random.Random, column: Column) -> Condition:
    value = rng.choice(sorted(set(column.values), key=str))
    yes = column.says.get(value) == "yes"
    parts = _called(rng, column).split()
    sql = f"{column.ref} = {literal(value)}"
    words = " ".join(part for part in parts if part not in ("yn", "flag", "has")) or parts[0]
    asserted = parts[0] in ("is", "was") and len(parts) > 1
    words = " ".join(parts[1:]) if asserted else words
    said = "yes" if yes else "no"
    if parts[0] == "has":
        return Condition(sql, words if yes else f"no {words}", f"{words} is {said}", "flag")
    if asserted or re.search(r"(ed|able|ible|active|open|available)$", words):
        being = words if yes else f"not {words}"
        return Condition(sql, f"the {words} flag set to {said}", f"{words} flag is {said}", "flag", being)
    return Condition(sql, f"{words} '{said}'", f"{words} is '{said}'", "flag")


_BUILDERS: dict[Meaning, tuple[Builder, ...]] = {
    Meaning.CATEGORY: (equal, equal, equal, equal, _unequal, _either, _either),
    Meaning.NAME: (_like, equal),
    Meaning.DETAIL: (equal, _like),
    Meaning.TEXT: (_like,),
    Meaning.QUANTITY: (_compare, _compare, _between),
    Meaning.LEVEL: (_compare, _compare, _between),
    Meaning.DATE: (_date_compare, _year, _date_between),
    Meaning.FLAG: (_flag,),
}
WEIGHTS = dict.fromkeys(_BUILDERS, 3.0) | {
    Meaning.CATEGORY: 6, Meaning.NAME: 2, Meaning.TEXT: 0.7, Meaning.DETAIL: 0.7,
}  # fmt: skip
SORTS = "equal unequal either compare between date_compare date_between year like null not_null flag".split()


def draw(rng: random.Random, column: Column) -> Condition:
    """A random condition that makes sense for the column; raises NoFit when this one does not."""
    if column.has_null and rng.random() < 0.5:
        return _missing(rng, column)
    builders = _BUILDERS.get(column.meaning)
    if not builders or not column.values:
        raise NoFit
    few = column.is_number and not column.as_text and len(set(column.values)) <= min(12, len(column.values) / 2)
    if few and rng.random() < 0.4 and all(float(value).is_integer() for value in column.values):
        return equal(rng, column)
    if column.meaning is Meaning.DATE and column.stored is Stored.YEAR_LAST:
        return _year(rng, column)
    return rng.choice(builders)(rng, column)


def threshold(column: Column, quantile: float) -> float:
    """A round number near a quantile: two significant digits from 100 on, else whole, with a decimal only below 10."""
    numbers = sorted(float(value) for value in column.values)
    value = numbers[int(len(numbers) * quantile)]
    if abs(value) < 10 and any(not number.is_integer() for number in numbers):
        return round(value, 1)
    digits = 10 ** max(0, len(str(int(abs(value)))) - 2)
    return int(round(value / digits) * digits)
