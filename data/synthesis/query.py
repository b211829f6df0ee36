"""A gold as parts, rendered in one style: upper-case keywords, single-quoted text, no aliases.

A column stands in an expression as ⟦table⟧column; the table is written only when the query has several. The parts stay
apart so that the audit can leave one out and see whether it matters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sqlglot import tokens

_RESERVED = frozenset(word for words in tokens.Tokenizer.KEYWORDS for word in words.split() if word.isalpha())


@dataclass(frozen=True)
class Query:
    """`where` conditions are joined by AND; `order` is an expression, without direction."""

    select: tuple[str, ...]
    table: str
    joins: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    having: str = ""
    order: str = ""
    descending: bool = False
    limit: int = 0  # 0: no limit
    distinct: bool = False
    then: tuple[str, Query] | None = None  # a set operation and its second query

    @property
    def sql(self) -> str:
        parts = [
            "SELECT " + ("DISTINCT " if self.distinct else "") + ", ".join(self.select),
            f"FROM {identifier(self.table)}",
            *self.joins,
            "WHERE " + " AND ".join(self.where) if self.where else "",
            f"GROUP BY {', '.join(self.group)}" if self.group else "",
            f"HAVING {self.having}" if self.having else "",
            f"ORDER BY {self.order} {'DESC' if self.descending else 'ASC'}" if self.order else "",
            f"LIMIT {self.limit}" if self.limit else "",
        ]
        text = " ".join(part for part in parts if part)
        text = re.sub("⟦(.*?)⟧", lambda found: f"{identifier(found[1])}." if self.joins else "", text)
        return f"{text} {self.then[0]} {self.then[1].sql}" if self.then else text

    def reductions(self) -> list[Query]:
        """The query without one of its restrictions, for each of them; a good question needs them all."""
        fewer = [replace(self, where=self.where[:i] + self.where[i + 1 :]) for i in range(len(self.where))]
        if self.having:
            fewer.append(replace(self, having=""))
        if self.distinct:
            fewer.append(replace(self, distinct=False))
        if self.then:
            operator, other = self.then
            fewer.append(replace(self, then=None))
            if operator != "EXCEPT":
                fewer.append(other)
        return fewer


def identifier(name: str) -> str:
    """The identifier, in double quotes where SQLite needs them."""
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.upper() not in _RESERVED
    return name if plain else '"' + name.replace('"', '""') + '"'


def literal(value: object) -> str:
    """A value as a SQL literal."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)
