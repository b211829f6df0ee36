"""What a database is about, from its schema and a sample of its rows: what columns mean, how tables hang together.

Nothing here reads a whole large table: values come from the first rows, and facts about all rows (how many, unique,
NULL) are asked for only where a table has at most 100,000.
"""

from __future__ import annotations

import enum
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from typing import Any

from data.synthesis import words
from data.synthesis.query import identifier, literal
from shared.errors import UserError
from shared.sql import database as sql

_SAMPLED_ROWS = 2_000
_SAMPLED_CELLS = 100_000
_COLUMNS_AT_ONCE = 100  # of one query; SQLite and the sandbox bound its length
_COUNTED_ROWS = 100_000  # of a table about which facts of all rows are asked
_LONGEST_CATEGORY = 40
_MOST_CATEGORIES = 40


class Meaning(enum.StrEnum):
    KEY = "key"  # identifies a row
    REFERENCE = "reference"  # leads to the row of another table
    NAME = "name"  # what people call the row
    CATEGORY = "category"  # a text or code that many rows share
    QUANTITY = "quantity"  # a number that adds up
    LEVEL = "level"  # a number that does not: age, rating, price of one
    DATE = "date"
    FLAG = "flag"  # yes or no
    DETAIL = "detail"  # a text of its own for nearly every row: e-mail, phone, address
    TEXT = "text"  # free text
    IGNORED = "ignored"  # no question is asked about it


class Stored(enum.StrEnum):
    """How a date is stored."""

    NONE = ""
    DAY = "2024-03-31"
    TIME = "2024-03-31 12:00:00"
    COMPACT = "20240331"
    YEAR = "2024"
    YEAR_LAST = "March 31, 2024"  # any text that ends with the year; it cannot be compared
    SECONDS = "seconds since 1970"
    MILLISECONDS = "milliseconds since 1970"


@dataclass(frozen=True)
class Column:
    """One column; two are the same when table and name are."""

    table: str
    name: str
    meaning: Meaning = field(compare=False)
    words: tuple[str, ...] = field(compare=False)  # what it is called; the report shows the first one
    values: tuple[Any, ...] = field(default=(), compare=False)  # a sample, in the order of the rows, without NULL
    has_null: bool = field(default=False, compare=False)
    is_unique: bool = field(default=False, compare=False)
    as_text: bool = field(default=False, compare=False)  # a number or year that is stored as text
    stored: Stored = field(default=Stored.NONE, compare=False)
    says: Mapping[Any, str] = field(default_factory=dict, compare=False)  # a value and how people say it
    references: tuple[str, str] | None = field(default=None, compare=False)  # parent table and column
    role: str = field(default="", compare=False)  # what the parent is to this row

    @property
    def ref(self) -> str:
        """The column inside a Query, which writes its table only where there are several."""
        return f"⟦{self.table}⟧{identifier(self.name)}"

    @property
    def number(self) -> str:
        """The column as a number or in the order of its dates."""
        return f"CAST({self.ref} AS REAL)" if self.as_text and self.meaning is not Meaning.DATE else self.ref

    def measured(self, rng: random.Random) -> str:
        """What its values are called: "price", "number of cylinders"."""
        called = rng.choice(self.words)
        several = words.is_plural(called) or words.is_participle(called)
        counts = self.is_number and several and not set(called.split()) & words.LISTS["uncountable"]
        return f"number of {called}" if counts else called

    @property
    def is_number(self) -> bool:
        return self.meaning in (Meaning.QUANTITY, Meaning.LEVEL)

    @property
    def is_clock(self) -> bool:
        """Whether it holds a date as a number that tells a reader nothing."""
        return self.stored in (Stored.SECONDS, Stored.MILLISECONDS)

    @property
    def can_be_ordered(self) -> bool:
        return self.is_number or (self.meaning is Meaning.DATE and self.stored is not Stored.YEAR_LAST)


@dataclass(frozen=True)
class Table:
    name: str
    singular: str
    plural: str
    rows: int
    columns: tuple[Column, ...]
    key: Column | None = None
    title: tuple[Column, ...] = ()  # what names a row: its name, or first and last name, else its key
    synonyms: tuple[str, ...] = ()

    def of(self, *meanings: Meaning) -> list[Column]:
        return [column for column in self.columns if column.meaning in meanings]

    @property
    def is_link(self) -> bool:
        """Whether a row does nothing but connect rows of two other tables."""
        told = [c.meaning for c in self.columns if c.meaning not in (Meaning.KEY, Meaning.IGNORED)]
        return told == [Meaning.REFERENCE] * 2


@dataclass(frozen=True)
class Understanding:
    tables: tuple[Table, ...]
    left_out: Mapping[str, str]  # table and why

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


def understand(database: sql.Database, hints: Mapping[str, Any]) -> Understanding:
    """Read the database; `hints` (see hints.py) overrule what was inferred. Raises UserError when no table is left."""
    left_out: dict[str, str] = {}
    listing = database.execute("SELECT name, type, COALESCE(sql, '') FROM sqlite_master", _COUNTED_ROWS).rows
    kinds = {str(name): (kind, str(text)) for name, kind, text in listing if kind in ("table", "view")}
    virtual = [name for name, (_, text) in kinds.items() if re.match(r"CREATE\s+VIRTUAL", text, re.IGNORECASE)]
    prefix = words.common_prefix([table.name for table in database.schema.tables])
    tables: list[Table] = []
    for declared in database.schema.tables:
        hint = hints.get(declared.name, {})
        kind = kinds.get(declared.name, ("table", ""))[0]
        if hint.get("leave_out") or (kind == "view" and hint.get("leave_out") is not False):
            left_out[declared.name] = "it is a view" if kind == "view" else "the hints say so"
        elif any(declared.name.startswith(f"{name}_") for name in virtual):
            left_out[declared.name] = "it belongs to a virtual table"
        else:
            try:
                table = _table(database, declared, hint, prefix)
            except (sql.SqlError, UserError) as error:
                left_out[declared.name] = f"it cannot be read ({error})"
                continue
            if table.rows < 2:
                left_out[declared.name] = "it has no rows" if not table.rows else "it has one row"
            else:
                tables.append(table)
    if not tables:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise UserError(f"{database.path} has no table to ask about ({reasons}); give a database with rows.")
    tables = _connected(database, tables, hints)
    return Understanding(tuple(_titled(table) for table in tables), left_out)


def _table(database: sql.Database, declared: sql.Table, hint: Mapping[str, Any], prefix: Sequence[str]) -> Table:
    """The table with the meanings that its own rows show."""
    name = identifier(declared.name)
    ((rows,),) = database.execute(f"SELECT COUNT(*) FROM (SELECT 1 FROM {name} LIMIT {_COUNTED_ROWS + 1})").rows
    one, many = words.table_words(declared.name, prefix)
    one = hint.get("words", one)
    many = hint.get("plural", words.plural(one) if "words" in hint else many)
    cells = [identifier(column.name) for column in declared.columns]
    shown = [f"CASE typeof({c}) WHEN 'text' THEN substr({c}, 1, 300) WHEN 'blob' THEN x'' ELSE {c} END" for c in cells]
    wanted = max(50, min(_SAMPLED_ROWS, _SAMPLED_CELLS // len(shown)))
    sample: list[tuple[Any, ...]] = [()] * min(rows, wanted)
    for some in batched(shown, _COLUMNS_AT_ONCE):  # NOT INDEXED: an index has its own order of rows
        block = database.execute(f"SELECT {', '.join(some)} FROM {name} NOT INDEXED LIMIT {wanted}", wanted).rows
        sample = [(*row, *more) for row, more in zip(sample, block, strict=True)]
    facts: list[tuple[int, int]] = []
    for some in batched(cells, _COLUMNS_AT_ONCE) if wanted < rows <= _COUNTED_ROWS else ():
        asked = ", ".join(f"COUNT({c}), COUNT(DISTINCT {c})" for c in some)
        (counts,) = database.execute(f"SELECT {asked} FROM {name}").rows
        facts += zip(counts[::2], counts[1::2], strict=True)
    drop = len(words.common_prefix([column.name for column in declared.columns]))
    keys = [column for column in declared.columns if column.primary_key]
    named = [_spoken(words.tokens(column.name)[drop:], one) or column.name for column in declared.columns]
    columns = []
    for place, column in enumerate(declared.columns):
        values = tuple(row[place] for row in sample if row[place] is not None)
        counted = facts[place] if facts else (len(values), len(set(map(repr, values))))
        total = rows if facts else len(sample)
        # "name" for the "country name" of a country, "cost" for the "cost of treatment" of a treatment
        spoken = named[place].removeprefix(f"{one} ").removeprefix(f"{many} ").removesuffix(f" of {one}")
        spoken = named[place] if spoken in (*named, one, "number") else spoken
        inferred = Column(
            declared.name, column.name, Meaning.IGNORED, (spoken,), values,
            has_null=counted[0] < total, is_unique=[column] == keys or (0 < total == counted[1]),
        )  # fmt: skip
        inferred = _inferred(inferred, words.tokens(column.name)[drop:], [column] == keys)
        columns.append(_hinted(inferred, hint.get("columns", {}).get(column.name, {})))
    return Table(declared.name, one, many, rows, tuple(columns), synonyms=tuple(hint.get("synonyms", ())))


def _spoken(parts: Sequence[str], row: str) -> str:
    """A column's tokens in words; a short form of what the row is called is written out: "cont ID" of a continent."""
    short = parts and " " not in row and len(parts[0]) > 2 and row.startswith(parts[0])
    said = words.spoken([row, *parts[1:]] if short else parts)
    if said in ("highest", "lowest", "average", "open", "high", "low", "close"):
        return f"{said} value"
    return f"{row} name" if said == row else said


_DATES = (
    (Stored.TIME, r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?"),
    (Stored.DAY, r"\d{4}-\d\d-\d\d"),
    (Stored.COMPACT, r"(19|20)\d\d(0[1-9]|1[012])([0-2]\d|3[01])"),
    (Stored.YEAR, r"(1[5-9]|20)\d\d(\.0)?"),
    (Stored.YEAR_LAST, r"(\d{1,2}[./-]\d{1,2}[./-]|.*[a-z].*\D)(1\d|20)\d\d"),
)
_PERSON = (("first name", "forename"), ("last name", "surname"))
_PAIRS = "1/0 Y/N y/n T/F t/f Yes/No yes/no true/false True/False TRUE/FALSE".split()
_FLAGS: list[list[Any]] = [[1, 0], *(pair.split("/") for pair in _PAIRS)]


def _inferred(column: Column, parts: Sequence[str], is_key: bool) -> Column:
    """The column with the meaning that its name and values give away."""
    distinct = set(column.values) if not any(isinstance(value, bytes) for value in column.values) else set()
    if not distinct:
        return column
    texts = [str(value) for value in column.values]
    is_text = any(isinstance(value, str) for value in column.values)
    named = set(parts) | set(column.words[0].split())
    if is_key:
        return replace(column, meaning=Meaning.KEY)
    for stored, pattern in _DATES:
        fits = bool(named & words.LISTS["dates"]) or stored in (Stored.DAY, Stored.TIME)
        if stored is Stored.YEAR and not named & {"year", "from", "since", "founded", "opened"}:
            continue
        if fits and all(re.fullmatch(pattern, text, re.IGNORECASE) for text in texts):
            return replace(column, meaning=Meaning.DATE, stored=stored, as_text=is_text)
    if not is_text and named & words.LISTS["dates"] and min(column.values) > 4e8:
        scale = {True: Stored.SECONDS, False: Stored.MILLISECONDS}[max(column.values) < 4e9]
        if max(column.values) < 4e12 and (scale is Stored.SECONDS or min(column.values) > 4e11):
            return replace(column, meaning=Meaning.DATE, stored=scale)
    for yes, no in _FLAGS:
        counts = yes == 1 and parts[0] not in ("is", "has", "was") and words.singular(parts[-1]) != parts[-1]
        if distinct == {yes, no} and not ({"gender", "sex"} & named or counts):
            return replace(column, meaning=Meaning.FLAG, says={yes: "yes", no: "no"})
    if {"gender", "sex"} & named and all(text.isdigit() for text in texts):
        return column
    numeric = not is_text or all(re.fullmatch(r"-?\d+(\.\d+)?", text) for text in texts)
    mostly_own = len(distinct) > len(texts) / 2
    identifies = parts[-1] in words.LISTS["identifiers"] or (len(parts) == 1 and parts[0].endswith("id"))
    if (identifies and (column.is_unique or not is_text or mostly_own)) or named & words.LISTS["contacts"]:
        return replace(column, meaning=Meaning.DETAIL if is_text else Meaning.IGNORED)
    if numeric and len(distinct) > 1 and not any(re.fullmatch(r"0\d+", text) for text in texts):
        adds = bool(named & words.LISTS["adds_up"]) and not named & words.LISTS["levels"]
        head, _, unit = column.words[0].rpartition(" ")
        unit = "millions" if unit == "m" and words.is_plural(head) else unit
        called = (f"{head} in {unit}",) if head and unit in words.LISTS["units"] else column.words
        return replace(column, meaning=Meaning.QUANTITY if adds else Meaning.LEVEL, as_text=is_text, words=called)
    longest = max(map(len, texts))
    if re.search(r"[\x00-\x08]|^\s*[\[{]", texts[0]) or not is_text:
        return column
    if parts in (["name"], ["title"]) or (named & {"name", "title", "label"} and longest <= 120 and mostly_own):
        return replace(column, meaning=Meaning.NAME)
    repeats, most = (1.05, 4 * _MOST_CATEGORIES) if named & words.LISTS["shared"] else (1.6, _MOST_CATEGORIES)
    if longest <= _LONGEST_CATEGORY and 1 < len(distinct) <= min(most, len(texts) / repeats):
        sexes = {"M": "male", "F": "female", "m": "male", "f": "female"} if named & {"gender", "sex"} else {}
        return replace(column, meaning=Meaning.CATEGORY, says={key: sexes[key] for key in sexes if key in distinct})
    if longest > 80 or named & words.LISTS["free"]:
        return replace(column, meaning=Meaning.TEXT if sum(map(len, texts)) / len(texts) > 15 else Meaning.DETAIL)
    return replace(column, meaning=Meaning.DETAIL if len(distinct) > 1 else Meaning.IGNORED)


def _hinted(column: Column, hint: Mapping[str, Any]) -> Column:
    """The column as the hints correct it."""
    called = (hint["words"],) if "words" in hint else column.words
    return replace(
        column,
        words=(*called, *hint.get("synonyms", ())),
        meaning=Meaning(hint.get("meaning", column.meaning)),
        says={**column.says, **hint.get("values", {})},
        role=hint.get("role", column.role),
    )


def _connected(database: sql.Database, tables: list[Table], hints: Mapping[str, Any]) -> list[Table]:
    """The tables with their keys and with the references that are declared, hinted, or shown by names and values."""
    keyed = []
    for table in tables:
        key = next((c for c in table.columns if c.meaning is Meaning.KEY), None)
        unique = [c for c in table.columns if c.is_unique and not c.has_null and words.tokens(c.name)[-1:] != ["name"]]
        others = {other.singular for other in tables if other is not table}
        for column in unique if key is None else ():
            *rest, last = words.tokens(column.name)
            if last in words.LISTS["identifiers"] and words.spoken(rest) not in others:
                key = column
                break
        if key and key.meaning in (Meaning.DETAIL, Meaning.IGNORED, Meaning.LEVEL):
            table, key = _with_meaning(table, key, Meaning.KEY)
        keyed.append(replace(table, key=key))
    parents = {table.name.lower(): table for table in keyed}
    result = []
    for table in keyed:
        columns = []
        declared = database.schema.table(table.name)
        for column in table.columns:
            hint = hints.get(table.name, {}).get("columns", {}).get(column.name, {})
            known = declared.column(column.name) if declared else None
            told = hint.get("references") or (known.references if known else None)
            target = _told_parent(told, parents) if told else None
            if target is None and "meaning" not in hint:
                target = _found_parent(database, table, column, keyed)
            if target and target[0].name == table.name and column.meaning is not Meaning.KEY:
                column = replace(column, meaning=Meaning.IGNORED)
            elif target and target[0].name != table.name and column.values:
                parent, key_name = target
                role = column.role or _role(column, parent)
                column = replace(column, meaning=Meaning.REFERENCE, references=(parent.name, key_name), role=role)
            columns.append(column)
        result.append(replace(table, columns=tuple(columns)))
    return result


def _with_meaning(table: Table, column: Column, meaning: Meaning) -> tuple[Table, Column]:
    """The table and its column, which now has this meaning."""
    changed = replace(column, meaning=meaning)
    return replace(table, columns=tuple(changed if c == column else c for c in table.columns)), changed


def _told_parent(told: str, parents: Mapping[str, Table]) -> tuple[Table, str] | None:
    """The parent that a declared or hinted "table.column" names, when its rows are unique there."""
    name, _, column = told.rpartition(".")
    parent = parents.get((name or column).lower())
    if parent is None:
        return None
    found = next((c for c in parent.columns if c.name.lower() == column.lower()), parent.key)
    return (parent, found.name) if found and found.is_unique else None


def _found_parent(
    database: sql.Database, table: Table, column: Column, tables: Sequence[Table]
) -> tuple[Table, str] | None:
    """A parent whose key or name the column's name repeats and whose keys hold all of its values."""
    if column.meaning in (Meaning.DATE, Meaning.FLAG, Meaning.TEXT) or (table.key and column.name == table.key.name):
        return None
    parts = words.tokens(column.name)
    prefix = words.common_prefix([c.name for c in table.columns])
    own = [part for part in parts[len(prefix) :] if part not in words.LISTS["identifiers"]]
    own_words = words.spoken(own)
    for parent in tables:
        key = parent.key
        if parent.name == table.name or key is None or not own:
            continue
        key_parts = words.tokens(key.name)
        same = len(key_parts) > 1 and parts[-2:] == key_parts[-2:]
        if not same and not (own_words == parent.singular or own_words.endswith(f" {parent.singular}")):
            continue
        values = list(dict.fromkeys(column.values))[:300]
        if not values or any(isinstance(value, bytes) for value in values):
            continue
        inside = ", ".join(map(literal, values))
        ((count,),) = database.execute(
            f"SELECT COUNT(*) FROM {identifier(parent.name)} WHERE {identifier(key.name)} IN ({inside})"
        ).rows
        if count == len(values):
            return parent, key.name
    return None


def _role(column: Column, parent: Table) -> str:
    """What the parent is to the row: "home team" for home_team_id."""
    parts = [part for part in column.words[0].split() if part.lower() not in words.LISTS["identifiers"]]
    role = words.singular(" ".join(parts))
    if parts[:1] in (["from"], ["to"]) and len(parts) > 1:
        return " ".join(["origin" if parts[0] == "from" else "destination", *parts[1:]])
    repeats = parent.singular.startswith(role) or parent.singular.endswith(role)
    return parent.singular if repeats or {"in", "by", "to", "at", "on"} & set(parts) else role


def _titled(table: Table) -> Table:
    """The table with the columns that name its rows."""
    called = {words.spoken(words.tokens(column.name)): column for column in reversed(table.columns)}
    first, last = (called.get(one) or called.get(other) for one, other in _PERSON)
    if first and last:
        for column in (first, last):
            table, _ = _with_meaning(table, column, Meaning.DETAIL)
        return replace(table, title=tuple(replace(c, meaning=Meaning.DETAIL) for c in (first, last)))
    lone = words.spoken(words.tokens(table.name))
    best = called.get("name") or called.get("title") or called.get(f"{lone} name")
    if best is None or best.meaning is not Meaning.NAME:
        row = set(table.singular.split())
        own = [c for c in table.of(Meaning.NAME) if set(c.words[0].split()) - {"name", "title", "label", "full"} <= row]
        best = min(own, key=lambda c: not c.is_unique, default=None)
    if best is None:
        described = [c for c in table.of(Meaning.DETAIL, Meaning.TEXT) if c.is_unique and not c.has_null]
        own = [c for c in described if words.spoken(words.tokens(c.name)) == table.singular]
        for column in own or (described if table.key and len(table.columns) <= 3 else []):
            table, best = _with_meaning(table, column, Meaning.NAME)
            break
    title = best or table.key
    others = [c for c in table.columns if c.meaning not in (Meaning.KEY, Meaning.IGNORED, Meaning.REFERENCE)]
    if best and not best.is_unique and others == [best]:  # a name and to whom it belongs: rows are not what is named
        table = replace(table, singular=f"{table.singular} entry", plural=f"{table.singular} entries")
    return replace(table, title=(title,) if title else ())


def repeated(values: Sequence[Any]) -> list[Any]:
    """The values of a sample, most frequent first."""
    return [value for value, _ in Counter(values).most_common()]
