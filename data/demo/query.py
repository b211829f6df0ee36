"""One SELECT as parts, rendered in the one canonical style of the demo golds.

Upper-case keywords, single-quoted text, no aliases; columns carry their table only when there is a join; a join starts
at the child table and names the foreign key first. The parts stay apart so that the generator can leave one out and see
whether it matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data.demo.spec import Column, Domain, Table


@dataclass(frozen=True)
class Query:
    """`where` conditions are joined by AND; `order` is an expression, without direction."""

    select: tuple[str, ...]
    table: str
    joins: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    group: str = ""
    having: str = ""
    order: str = ""
    descending: bool = False
    limit: int = 0  # 0: no limit
    distinct: bool = False

    @property
    def sql(self) -> str:
        parts = [
            "SELECT " + ("DISTINCT " if self.distinct else "") + ", ".join(self.select),
            f"FROM {self.table}",
            *self.joins,
            "WHERE " + " AND ".join(self.where) if self.where else "",
            f"GROUP BY {self.group}" if self.group else "",
            f"HAVING {self.having}" if self.having else "",
            f"ORDER BY {self.order} {'DESC' if self.descending else 'ASC'}" if self.order else "",
            f"LIMIT {self.limit}" if self.limit else "",
        ]
        return " ".join(part for part in parts if part)

    def reductions(self) -> list[Query]:
        """The query without one of its restrictions, for each of them; a good question needs them all."""
        fewer = [replace(self, where=self.where[:i] + self.where[i + 1 :]) for i in range(len(self.where))]
        if self.having:
            fewer.append(replace(self, having=""))
        if self.distinct:
            fewer.append(replace(self, distinct=False))
        return fewer


@dataclass(frozen=True)
class Edge:
    """A foreign key: `child.column` refers to the key of `parent`."""

    child: Table
    column: Column
    parent: Table

    @property
    def join(self) -> str:
        mine = f"{self.child.name}.{self.column.name}"
        return f"JOIN {self.parent.name} ON {mine} = {self.parent.name}.{self.parent.key.name}"

    @property
    def alone(self) -> bool:
        """No other foreign key of the child refers to the same parent."""
        return sum(column.references == self.parent.name for column in self.child.columns) == 1


def edges(domain: Domain) -> list[Edge]:
    """All foreign keys of a domain that are never NULL."""
    return [
        Edge(table, column, domain.table(column.references))
        for table in domain.tables
        for column in table.columns
        if column.references and not column.nullable
    ]


def literal(value: object) -> str:
    """A value as a SQL literal."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)
