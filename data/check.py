"""What a data set is like before a run learns from it: every gold run once, every row that is bad or odd listed.

A row is unusable when it cannot be read, its database is missing or its gold fails or returns too much. Usable but worth
a look are golds that are slow, empty, constant or one scalar, that hang on time, chance or ties, or that a trivial query satisfies too,
and questions asked twice with the same gold or with golds of different results.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tqdm import tqdm

from data.databases import Databases
from data.sources import BadRowError, Place, Source, SourceRow, read_rows
from data.sql_form import gold_key, is_repeatable, question_key
from shared.config.schema import Config
from shared.errors import UserError
from shared.reward.execution_match import execution_match, gold_is_ordered
from shared.reward.ties import Order, order_of
from shared.reward.trivial import reads_no_data, trivial_query
from shared.sql.database import Database, QueryResult

SLOW_SECONDS = 1.0
_CHARACTERS_PER_TOKEN = 3.5  # of schema text, roughly
_LISTED = 10  # places of each finding

UNUSABLE = "unusable"
_MEANINGS = {
    UNUSABLE: "rows that cannot be used",
    "slow": f"golds that take longer than {SLOW_SECONDS:g} s",
    "empty": "golds without any row (worth half: too easy to hit)",
    "constant": "golds that read no data",
    "one scalar": "golds of a single value (easy to hit by luck)",
    "unrepeatable": "golds whose answer changes with time or chance",
    "order-ambiguous": "golds whose answer hangs on how ties are broken",
    "trivial": "golds that a trivial query satisfies too",
    "duplicated": "questions asked before with the same gold",
    "contradictory": "questions asked before with a gold of another result",
}


@dataclass
class Checked:
    """The usable rows with their databases, and the findings: kind -> places with what was found there."""

    rows: list[tuple[SourceRow, Path]] = field(default_factory=list)
    findings: dict[str, list[tuple[Place, str]]] = field(default_factory=lambda: defaultdict(list))
    large_schemas: dict[str, int] = field(default_factory=dict)  # db -> tokens, where they need over half the context

    def report(self) -> str:
        """The data report as text."""
        databases = Counter(path.stem for _, path in self.rows)
        lines = [f"{len(self.rows)} usable questions on {len(databases)} databases"]
        lines += [f"  {name:32}{count:6}" for name, count in sorted(databases.items())]
        for kind, meaning in _MEANINGS.items():
            found = self.findings.get(kind, [])
            lines.append(f"{kind:16}{len(found):6}  {meaning}")
            places: dict[str, list[Place]] = defaultdict(list)
            for place, what in found:
                places[what].append(place)
            alike = [f"{of[0]}{f' and {len(of) - 1} more' * (len(of) > 1)}: {what}" for what, of in places.items()]
            lines += [f"    {line}" for line in alike[:_LISTED]]
            lines += [f"    … and {len(alike) - _LISTED} more"] * (len(alike) > _LISTED)
        lines.append(
            f"{'large schema':16}{len(self.large_schemas):6}  schemas that fill more than half of agent.context_tokens"
        )
        lines += [f"    {name}: about {tokens} tokens" for name, tokens in sorted(self.large_schemas.items())]
        return "\n".join(lines)


def check(source: Source, config: Config) -> Checked:
    """Run every gold of a source and look at it. Raises UserError only for files without rows or that cannot be read."""
    rows = [*read_rows(source)]
    if not rows:
        files = " and ".join(map(str, source.files))
        raise UserError(f"{files} holds no rows; give a file with a question, its sql and its database in each row.")
    checked = Checked()
    checker = _Checker(source, config, checked)
    for place, row in tqdm(rows, "running golds", unit=" questions", disable=None, leave=False):
        try:
            if isinstance(row, BadRowError):
                raise row
            checker.look_at(row)
        except BadRowError as reason:
            checked.findings[UNUSABLE].append((place, str(reason)))
    sizes = {name: _schema_tokens(database) for name, database in checker.databases.opened.items()}
    checked.large_schemas = {name: size for name, size in sizes.items() if size > config.agent.context_tokens / 2}
    return checked


class _Checker:
    def __init__(self, source: Source, config: Config, checked: Checked) -> None:
        self.databases = Databases(partial(_file, source), config.sandbox)
        self._checked = checked
        self._asked: dict[tuple[Path, str], list[tuple[SourceRow, QueryResult]]] = defaultdict(list)

    def look_at(self, row: SourceRow) -> None:
        """Add the row to the usable ones, with what is odd about it; raises BadRowError when it is not usable."""
        database = self.databases.get(row.database)
        start = time.monotonic()
        result = self.databases.run_gold(row.database, row.gold_sql)
        seconds = time.monotonic() - start
        self._checked.rows.append((row, database.path))
        for kind, what in self._oddities(row, result, database, seconds):
            self._checked.findings[kind].append((row.place, what))
        self._asked[database.path, question_key(f"{row.question} {row.evidence}")].append((row, result))

    def _oddities(
        self, row: SourceRow, result: QueryResult, database: Database, seconds: float
    ) -> Iterator[tuple[str, str]]:
        sql = " ".join(row.gold_sql.split())[:160]
        if seconds > SLOW_SECONDS:
            yield "slow", f"{seconds:.1f} s: {sql}"
        if not result.rows:
            yield "empty", sql
        if reads_no_data(row.gold_sql, database):
            yield "constant", sql
        elif len(result.rows) == 1 and len(result.columns) == 1:
            yield "one scalar", f"{result.rows[0][0]!r}: {sql}"
        if not is_repeatable(row.gold_sql):
            yield "unrepeatable", sql
        if order_of(row.gold_sql, database) is not (Order.GIVEN if gold_is_ordered(row.gold_sql) else Order.FREE):
            yield "order-ambiguous", sql
        if trivial := trivial_query(row.gold_sql, result, database):
            yield "trivial", f"{sql}  =  {trivial}"
        yield from self._asked_before(row, result, database.path)

    def _asked_before(self, row: SourceRow, result: QueryResult, path: Path) -> Iterator[tuple[str, str]]:
        for other, known in self._asked[path, question_key(f"{row.question} {row.evidence}")][:1]:
            if gold_key(other.gold_sql) == gold_key(row.gold_sql):
                yield "duplicated", f"{row.question!r}, as in {other.place}"
            elif not execution_match(known, result, ordered=False):
                yield "contradictory", f"{row.question!r}, unlike {other.place}"


def _file(source: Source, name: str) -> Path:
    path = source.database(name)
    if path is None:
        looked = ", ".join(str(folder) for folder in source.folders)
        raise BadRowError(
            f"its database {name[:80]!r} is not in {looked}; put it there, correct the name, or name another folder with "
            "--databases"
        )
    return path


def _schema_tokens(database: Database) -> int:
    """About how many tokens naming all of its tables and columns takes."""
    return round(sum(len(text) for text in _schema_texts(database)) / _CHARACTERS_PER_TOKEN)


def _schema_texts(database: Database) -> Iterable[str]:
    for table in database.schema.tables:
        yield f"{table.name} ()"
        yield from (f"{column.name} {column.type}, {column.references or ''}" for column in table.columns)
