"""What an episode is worth: 1.0 for the right result, small dense terms otherwise.

    correct                      1.0   (0.5 when the gold's result is empty: that is too easy to hit)
    otherwise                    reward_valid_call * valid_call + reward_executed * executed
                                 + reward_right_tables * right_tables       (settings grpo.reward_*, together < 0.5)

Where a question names perturbed copies of its database (shared/audit), a result that is right by luck only, because the
gold's answer differs on a copy, is not correct. An episode that submits nothing, or SQL that fails, gets no
`right_tables`. A submission that reads no table of the database or selects only constants is never correct unless the gold
does the same, and an empty result is correct only if the submission reads all of the gold's tables. An episode that the
infrastructure ended has no reward at all.

Limit: a constant hidden in a subquery or behind an arbitrary condition is not recognised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from tqdm import tqdm

from shared.config.schema import GrpoConfig, SandboxConfig
from shared.errors import UserError
from shared.records import Episode, Question, Reward, StopReason
from shared.reward.agreement import agrees_on_copies, open_copies
from shared.reward.execution_match import execution_match, gold_is_ordered
from shared.sql.database import Database, QueryResult, SqlError

EMPTY_GOLD_REWARD = 0.5


class GoldCache:
    """Results of gold queries, run once each as long as the database file stays the same."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, int, str], QueryResult] = {}

    def __call__(self, database: Database, sql: str) -> QueryResult:
        """The whole result of a gold query; raises UserError when it fails or is too large to compare."""
        key = (str(database.path), database.path.stat().st_mtime_ns, sql)
        if key not in self._results:
            self._results[key] = _run_gold(database, sql)
        return self._results[key]


_golds = GoldCache()


def judge(question: Question, episode: Episode, database: Database, grpo: GrpoConfig) -> Reward:
    """The reward of a finished episode.

    Raises ValueError for an episode that the infrastructure ended and UserError for a gold that cannot be run.
    """
    if episode.stop is StopReason.INFRASTRUCTURE:
        raise ValueError(f"episode of question {question.id} was ended by the infrastructure and has no reward")
    gold = _golds(database, question.gold_sql)
    valid_call, executed = _valid_call(episode), float(any(_sql_outcomes(episode)))
    dense = grpo.reward_valid_call * valid_call + grpo.reward_executed * executed
    try:
        verdict = _verdict(database, database.path.stat().st_mtime_ns, question, episode.submitted_sql)
    except SqlError:
        return Reward(False, valid_call, executed, 0.0, dense)
    right_tables = verdict.right_tables
    if verdict.correct:
        return Reward(True, valid_call, executed, right_tables, 1.0 if gold.rows else EMPTY_GOLD_REWARD)
    dense += grpo.reward_right_tables * right_tables
    return Reward(False, valid_call, executed, right_tables, dense, verdict.lucky)


@dataclass(frozen=True)
class _Verdict:
    correct: bool
    lucky: bool
    right_tables: float


@lru_cache(maxsize=20_000)  # the episodes of a group often submit the same query
def _verdict(database: Database, state: int, question: Question, submitted_sql: str | None) -> _Verdict:
    """What a submission is worth on this state of the database; raises SqlError, which is not remembered, if it fails."""
    if submitted_sql is None:
        raise SqlError("nothing was submitted")
    gold = _golds(database, question.gold_sql)
    prediction = database.execute(submitted_sql, database.limits.max_compare_rows)
    wanted, read = _tables(question.gold_sql, database), _tables(submitted_sql, database)
    honest = _reads_data(submitted_sql, read) or not _reads_data(question.gold_sql, wanted)
    fair = honest and (bool(gold.rows) or wanted <= read)
    right_tables = 2 * len(wanted & read) / (len(wanted) + len(read)) if wanted or read else 1.0
    same = fair and execution_match(gold, prediction, ordered=gold_is_ordered(question.gold_sql))
    copies = open_copies(question.copies, database.limits)
    lucky = same and not agrees_on_copies(question.gold_sql, submitted_sql, copies)
    return _Verdict(same and not lucky, lucky, right_tables)


def judge_all(
    questions: Sequence[Question], episodes: Sequence[Episode], databases: Mapping[str, Database], grpo: GrpoConfig
) -> list[Reward | None]:
    """Rewards parallel to the episodes of these questions, None where the infrastructure ended one.

    `databases` are found by the path that a question names.
    """
    pairs = tqdm(zip(questions, episodes, strict=True), "judging", len(questions), unit=" episodes", leave=False)
    return [
        None if episode.stop is StopReason.INFRASTRUCTURE
        else judge(question, episode, databases[question.database], grpo)
        for question, episode in pairs
    ]  # fmt: skip


def self_test(questions: Sequence[Question], grpo: GrpoConfig, sandbox: SandboxConfig) -> None:
    """Check that every gold is worth its full reward and that garbage is worth nothing.

    Garbage includes a constant that equals the gold's first row. Raises UserError naming the question otherwise.
    """
    databases: dict[str, Database] = {}
    for question in questions:
        if question.database not in databases:
            databases[question.database] = Database(question.database, sandbox)
        database = databases[question.database]
        gold = _golds(database, question.gold_sql)
        _expect(question, question.gold_sql, database, grpo, 1.0 if gold.rows else EMPTY_GOLD_REWARD)
        wanted = _tables(question.gold_sql, database)
        for sql in _garbage(gold) if _reads_data(question.gold_sql, wanted) else ():
            _expect(question, sql, database, grpo, 0.0)


def _expect(question: Question, sql: str | None, database: Database, grpo: GrpoConfig, reward: float) -> None:
    episode = Episode(question.id, (), StopReason.ANSWERED, sql)
    total = judge(question, episode, database, grpo).total
    if total != reward:
        what = "its own gold SQL" if sql == question.gold_sql else f"the submission {sql!r}"
        raise UserError(
            f"Question {question.id} gives {what} the reward {total:g} instead of {reward:g}; its gold may depend on "
            "time or chance: correct it or remove the question."
        )


def _garbage(gold: QueryResult) -> Iterator[str | None]:
    yield from (None, "", "this is no SQL", "DROP TABLE x", "SELECT NULL", "SELECT 1; SELECT 2")
    if gold.rows:
        yield f"SELECT {', '.join(_literal(value) for value in gold.rows[0])}"


def _literal(value: object) -> str:
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else repr(value)


def _run_gold(database: Database, sql: str) -> QueryResult:
    start = f"Gold SQL {sql[:120]!r} on database {database.path}"
    try:
        result = database.execute(sql, database.limits.max_compare_rows)
    except SqlError as error:
        raise UserError(f"{start} cannot be run ({error}); correct it or remove the question.") from error
    if result.truncated:
        raise UserError(
            f"{start} returns more than can be compared; raise sandbox.max_compare_rows and "
            "sandbox.max_result_bytes or remove the question."
        )
    return result


def _valid_call(episode: Episode) -> float:
    readable = sum(len(turn.calls) for turn in episode.turns)
    attempted = readable + sum(len(turn.malformed) for turn in episode.turns)
    return readable / attempted if attempted else 0.0


def _sql_outcomes(episode: Episode) -> Iterator[bool]:
    for turn in episode.turns:
        for call, ok in zip(turn.calls, turn.ok, strict=False):  # `ok` goes on with the malformed calls
            if call.name == "execute_sql":
                yield ok


def _tables(sql: str, database: Database) -> set[str]:
    """Lower-case names of the database's tables that the SQL reads; by its words where sqlglot cannot parse it."""
    known = {table.name.lower() for table in database.schema.tables}
    tree = _parse(sql)
    if tree is None:
        return {name for name in known if name in sql.lower()}
    with_names = {cte.alias_or_name.lower() for cte in tree.find_all(exp.CTE)}
    return {table.name.lower() for table in tree.find_all(exp.Table)} & known - with_names


def _reads_data(sql: str, tables: set[str]) -> bool:
    """False for a query without tables and for one whose every output is a constant."""
    tree = _parse(sql)
    if tree is None or not tables:
        return bool(tables)
    outputs = [output for select in _branches(tree) for output in select.expressions]
    return any(output.find(exp.Column, exp.Star, exp.AggFunc) for output in outputs)


def _branches(tree: exp.Expression) -> Iterator[exp.Expression]:
    """The SELECTs whose rows the query returns: one, or the parts of a UNION, INTERSECT or EXCEPT."""
    if isinstance(tree, exp.SetOperation):
        yield from _branches(tree.left)
        yield from _branches(tree.right)
    elif isinstance(tree, exp.Subquery):
        yield from _branches(tree.this)
    else:
        yield tree


def _parse(sql: str) -> exp.Expression | None:
    try:
        return sqlglot.parse_one(sql, read="sqlite")
    except (SqlglotError, RecursionError):  # a degenerate query that SQLite may still run
        return None
