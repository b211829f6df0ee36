"""The data report: run every gold once and list every row that is bad or odd.

A row is unusable when it cannot be read, when its database is missing, or when its gold fails or returns too much.
Usable but worth a look are golds that are slow, empty, constant or a single value, golds that depend on time, chance or
ties, golds that a trivial query satisfies too, and questions asked twice with the same gold or with different results.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from data.questions import Databases
from data.sources import BadRowError, Place, Source, SourceRow
from data.sql_form import gold_key, is_repeatable, question_key
from shared.config.schema import Config
from shared.errors import UserError
from shared.reward.execution_match import execution_match
from shared.reward.queries import Order, gold_is_ordered, order_of, tables_read, trivial_query
from shared.sql.database import Database, QueryResult

SMALLEST = 20  # questions on one database with which no split is empty
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
    "order-ambiguous": "golds whose answer depends on how ties are broken",
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
        lines = [f"usable questions: {len(self.rows)}, databases: {len(databases)}"]
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
        if len(self.rows) < SMALLEST:
            lines.append(
                f"too few to train on: {SMALLEST} questions are the smallest useful number, a few hundred are better; "
                "`python -m data synthesize` makes more, and data.sources can keep these for the test (use: test)"
            )
        return "\n".join(lines)


def check(source: Source, rows: Sequence[tuple[Place, SourceRow | BadRowError]], config: Config) -> Checked:
    """Run the gold of every row and look at it. Raises UserError when there are no rows."""
    if not rows:
        files = " and ".join(map(str, source.files))
        raise UserError(f"{files} holds no rows; give a file with a question, its sql and its database in each row.")
    checked = Checked()
    databases = Databases(source, config.sandbox)
    asked: dict[tuple[Path, str], tuple[SourceRow, QueryResult]] = {}
    for place, row in tqdm(rows, "running golds", unit=" questions", disable=None, leave=False):
        try:
            if isinstance(row, BadRowError):
                raise row
            database, result = databases.run_gold(row)
        except BadRowError as reason:
            checked.findings[UNUSABLE].append((place, str(reason)))
            continue
        checked.rows.append((row, database.path))
        before = asked.setdefault((database.path, question_key(f"{row.question} {row.evidence}")), (row, result))
        for kind, what in _oddities(row, result, database, before):
            checked.findings[kind].append((place, what))
    for name, opened in databases.opened.items():
        texts = [f"{table.name} ()" for table in opened.schema.tables]
        texts += [f"{c.name} {c.type}, {c.references or ''}" for table in opened.schema.tables for c in table.columns]
        tokens = round(sum(map(len, texts)) / _CHARACTERS_PER_TOKEN)
        if tokens > config.agent.context_tokens / 2:
            checked.large_schemas[name] = tokens
    return checked


def _oddities(
    row: SourceRow, result: QueryResult, database: Database, before: tuple[SourceRow, QueryResult]
) -> Iterator[tuple[str, str]]:
    """Finding and detail of all that is odd about a usable row; `before` is the first row with the same question."""
    sql = " ".join(row.gold_sql.split())[:160]
    if result.seconds > SLOW_SECONDS:
        yield "slow", f"{result.seconds:.1f} s: {sql}"
    if not result.rows:
        yield "empty", sql
    if not tables_read(row.gold_sql, database):
        yield "constant", sql
    elif len(result.rows) == 1 and len(result.columns) == 1:
        yield "one scalar", f"{result.rows[0][0]!r}: {sql}"
    if not is_repeatable(row.gold_sql):
        yield "unrepeatable", sql
    if order_of(row.gold_sql, database) is not (Order.GIVEN if gold_is_ordered(row.gold_sql) else Order.FREE):
        yield "order-ambiguous", sql
    if trivial := trivial_query(row.gold_sql, result, database):
        yield "trivial", f"{sql}  =  {trivial}"
    first, known = before
    if first is row:
        return
    if gold_key(first.gold_sql) == gold_key(row.gold_sql):
        yield "duplicated", f"{row.question!r}, as in {first.place}"
    elif not execution_match(known, result, ordered=False):
        yield "contradictory", f"{row.question!r}, unlike {first.place}"
