"""What an episode is worth: 1.0 for the right result, small dense terms otherwise.

    correct                      1.0   (0.5 when the gold's result is empty: that is too easy to hit)
    otherwise                    reward_valid_call * valid_call + reward_executed * executed
                                 + reward_right_tables * right_tables + reward_right_result * right_result
                                 (settings grpo.reward_*, together < 0.5)

Where a question names perturbed copies of its database (shared/reward/perturbed_copies.py), a result that is right by
luck only, because the gold's answer differs on a copy, is not correct. An episode that submits nothing, or SQL that
fails, gets no `right_tables`. A submission that reads no table of the database or selects only constants is never
correct unless the gold does the same, and an empty result is correct only if the submission reads all gold tables.
`right_result` ranks wrong results; constants and results that are right by luck have none. An episode that the
infrastructure ended has no reward at all.

Limit: a constant hidden in a subquery or behind an arbitrary condition is not recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from sqlglot import exp

from shared.config.schema import GrpoConfig, SandboxConfig
from shared.errors import UserError
from shared.records import Episode, Question, Reward, StopReason
from shared.reward.execution_match import execution_match, result_overlap
from shared.reward.queries import Order, gold_is_ordered, order_of, reads_data, tables_read
from shared.sql.database import Database, QueryResult, SqlError

EMPTY_GOLD_REWARD = 0.5
_GARBAGE = (None, "", "this is no SQL", "DROP TABLE x", "SELECT NULL", "SELECT 1; SELECT 2")


def judge(question: Question, episode: Episode, database: Database, grpo: GrpoConfig) -> Reward:
    """The reward of a finished episode.

    Raises ValueError for an episode that the infrastructure ended and UserError for a gold that cannot be run.
    """
    if episode.stop is StopReason.INFRASTRUCTURE:
        raise ValueError(f"episode of question {question.id} was ended by the infrastructure and has no reward")
    state = database.path.stat().st_mtime_ns
    gold = gold_result(database, state, question.gold_sql)
    readable = sum(len(turn.calls) for turn in episode.turns)
    attempted = readable + sum(len(turn.malformed) for turn in episode.turns)
    outcomes = [
        pair for turn in episode.turns for pair in zip(turn.calls, turn.ok, strict=False)
    ]  # readable calls first
    valid_call = readable / attempted if attempted else 0.0
    executed = float(any(ok for call, ok in outcomes if call.name == "execute_sql"))
    try:
        with_result = grpo.reward_right_result > 0
        correct, lucky, right_tables, right_result = _verdict(
            database, state, question, episode.submitted_sql, with_result
        )
    except SqlError:
        correct, lucky, right_tables, right_result = False, False, 0.0, 0.0
    if correct:
        total = 1.0 if gold.rows else EMPTY_GOLD_REWARD
    else:
        total = grpo.reward_valid_call * valid_call + grpo.reward_executed * executed
        total += grpo.reward_right_tables * right_tables + grpo.reward_right_result * right_result
    return Reward(correct, valid_call, executed, right_tables, total, lucky, right_result)


@lru_cache(maxsize=20_000)  # a gold is needed once per rollout
def gold_result(database: Database, state: int, sql: str) -> QueryResult:
    """The whole result of a gold query on this state of the database file.

    Raises UserError when it fails or is too large to be compared.
    """
    start = f"Gold SQL {sql[:120]!r} on database {database.path}"
    try:
        result = database.execute(sql, database.limits.max_compare_rows)
    except SqlError as error:
        if error.kind == "timeout":
            seconds = f"{database.limits.timeout_seconds:g} s"
            raise UserError(
                f"{start} takes longer than {seconds}; raise sandbox.timeout_seconds or remove the question."
            ) from error
        raise UserError(f"{start} cannot be run ({error}); correct it or remove the question.") from error
    if result.truncated:
        raise UserError(
            f"{start} returns more than can be compared; raise sandbox.max_compare_rows and "
            "sandbox.max_result_bytes or remove the question."
        )
    return result


@lru_cache(maxsize=20_000)  # the episodes of a group often submit the same query
def _verdict(
    database: Database, state: int, question: Question, submitted_sql: str | None, with_result: bool
) -> tuple[bool, bool, float, float]:
    """Whether a submission is correct, or right by luck only, and the overlap of its tables and its result.

    The overlap of results is 0 unless `with_result`, for a correct or lucky submission and for a constant.

    Raises SqlError if it cannot be run on this state of the database.
    """
    if submitted_sql is None:
        raise SqlError("nothing was submitted")
    gold = gold_result(database, state, question.gold_sql)
    prediction = database.execute(submitted_sql, database.limits.max_compare_rows)
    wanted, read = tables_read(question.gold_sql, database), tables_read(submitted_sql, database)
    honest = reads_data(submitted_sql, database) or not reads_data(question.gold_sql, database)
    fair = honest and (bool(gold.rows) or wanted <= read)
    right_tables = 2 * len(wanted & read) / (len(wanted) + len(read)) if wanted or read else 1.0
    same = fair and execution_match(gold, prediction, ordered=gold_is_ordered(question.gold_sql))
    copies = open_copies(question.copies, database.limits)
    lucky = same and not agrees_on_copies(question.gold_sql, submitted_sql, copies)
    right_result = result_overlap(gold, prediction) if with_result and honest and not same else 0.0
    return same and not lucky, lucky, right_tables, right_result


def agrees_on_copies(gold_sql: str, prediction_sql: str, copies: Sequence[Database]) -> bool:
    """True unless some copy tells the queries apart by the house rule.

    A copy on which the gold fails, or on which ties leave its answer open, says nothing.
    """
    for copy in copies:
        order = order_of(gold_sql, copy)
        if order is Order.OPEN:
            continue
        try:
            gold = gold_result(copy, 0, gold_sql)  # nobody changes a copy
        except UserError:
            continue
        try:
            prediction = copy.execute(prediction_sql, copy.limits.max_compare_rows)
        except SqlError:
            return False
        if not execution_match(gold, prediction, ordered=order is Order.GIVEN):
            return False
    return True


@lru_cache(maxsize=512)  # one entry for each database of a run
def open_copies(folder: str, limits: SandboxConfig) -> tuple[Database, ...]:
    """The copies that shared/reward/perturbed_copies.py wrote into a folder; none for "". UserError if missing."""
    if not folder:
        return ()
    copies = tuple(Database(path, limits) for path in sorted(Path(folder).glob("*.sqlite")))
    if not copies:
        raise UserError(f"There are no copies in {folder}; prepare the data of this run again.")
    return copies


def self_test(questions: Sequence[Question], grpo: GrpoConfig, sandbox: SandboxConfig) -> None:
    """Check that every gold is worth its full reward and that garbage is worth nothing.

    Garbage includes a constant that equals the gold's first row. Raises UserError naming the question otherwise.
    """
    databases: dict[str, Database] = {}
    for question in questions:
        if question.database not in databases:
            databases[question.database] = Database(question.database, sandbox)
        database = databases[question.database]
        gold = gold_result(database, database.path.stat().st_mtime_ns, question.gold_sql)
        worth: dict[str | None, float] = {question.gold_sql: 1.0 if gold.rows else EMPTY_GOLD_REWARD}
        if reads_data(question.gold_sql, database):
            constants = [exp.select(*map(exp.convert, row)).sql("sqlite") for row in gold.rows[:1]]
            worth |= dict.fromkeys((*_GARBAGE, *constants), 0.0)
        for sql, reward in worth.items():
            total = judge(question, Episode(question.id, (), StopReason.ANSWERED, sql), database, grpo).total
            if total != reward:
                what = "its own gold SQL" if sql == question.gold_sql else f"the submission {sql!r}"
                raise UserError(
                    f"Question {question.id} gives {what} the reward {total:g} instead of {reward:g}; its gold may "
                    "depend on time or chance: correct it or remove the question."
                )
