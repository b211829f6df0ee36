"""Does a prediction give the gold's answer on perturbed copies too?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from shared.config.schema import SandboxConfig
from shared.errors import UserError
from shared.reward.execution_match import execution_match
from shared.reward.gold_checks import Order, order_of
from shared.sql.database import Database, QueryResult, SqlError


def agrees_on_copies(gold_sql: str, prediction_sql: str, copies: Sequence[Database]) -> bool:
    """True unless some copy tells the queries apart by the house rule.

    A copy on which the gold fails, or on which ties leave its answer open, says nothing.
    """
    for copy in copies:
        gold, order = _gold(copy, gold_sql)
        if gold is None or order is Order.OPEN:
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
    """The copies that shared/reward/perturbed_copies.py wrote into a folder; none for "". UserError if they are missing."""
    if not folder:
        return ()
    copies = tuple(Database(path, limits) for path in sorted(Path(folder).glob("*.sqlite")))
    if not copies:
        raise UserError(f"There are no copies in {folder}; prepare the data of this run again.")
    return copies


@lru_cache(maxsize=20_000)  # a gold is needed once per rollout
def _gold(copy: Database, sql: str) -> tuple[QueryResult | None, Order]:
    try:
        result = copy.execute(sql, copy.limits.max_compare_rows)
    except SqlError:
        return None, Order.OPEN
    return (None if result.truncated else result), order_of(sql, copy)
