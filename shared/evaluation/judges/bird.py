"""BIRD's execution accuracy and soft F1.

Source: evaluation_ex.py, evaluation_f1.py and evaluation_utils.py of bird-bench/mini_dev. Both queries run unchanged on
one connection, the prediction first, so what it deletes is missing from the gold's result too. Execution accuracy
compares the sets of rows: duplicates and the order of rows are ignored, the order of columns matters, cells are compared
exactly. Soft F1 drops duplicates, pairs the rows of both results by position and counts the cells they share. Whatever
fails, text that is not UTF-8 included, is worth 0; so is a pair of queries that takes longer than the time limit.
"""

from __future__ import annotations

from pathlib import Path

from shared.evaluation.judges.execution import SECONDS, outcome
from shared.sql.database import Rows, SqlError


def bird_ex(gold_sql: str, prediction_sql: str, database: Path | str, *, seconds: float = SECONDS) -> bool:
    """BIRD's verdict; `seconds` is the time limit of both queries together. Raises UserError for a damaged database."""
    results = _results(gold_sql, prediction_sql, database, seconds)
    return results is not None and bird_match(*results)


def soft_f1(gold_sql: str, prediction_sql: str, database: Path | str, *, seconds: float = SECONDS) -> float:
    """BIRD's soft F1 between 0 and 1; `seconds` as for `bird_ex`. Raises UserError for a damaged database."""
    results = _results(gold_sql, prediction_sql, database, seconds)
    return 0.0 if results is None else soft_f1_match(*results)


def bird_match(gold: Rows, prediction: Rows) -> bool:
    """True when both results hold the same set of rows."""
    return set(gold) == set(prediction)


def soft_f1_match(gold: Rows, prediction: Rows) -> float:
    """Harmonic mean of precision and recall over cells; each cell counts one part of the gold's width."""
    wanted, given = list(dict.fromkeys(gold)), list(dict.fromkeys(prediction))
    if not wanted and not given:
        return 1.0
    shared = extra = missing = 0.0
    for own, other in zip(wanted, given, strict=False):
        shared += sum(cell in own for cell in other) / len(own)
        extra += sum(cell not in own for cell in other) / len(own)
        missing += sum(cell not in other for cell in own) / len(own)
    extra += max(0, len(given) - len(wanted))
    missing += max(0, len(wanted) - len(given))
    precision = shared / (shared + extra) if shared + extra else 0.0
    recall = shared / (shared + missing) if shared + missing else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _results(gold_sql: str, prediction_sql: str, database: Path | str, seconds: float) -> list[Rows] | None:
    """Rows of gold and prediction, or None when one of them fails."""
    results = outcome(Path(database), (prediction_sql, gold_sql), seconds, "strict")
    return None if isinstance(results, SqlError) else results[::-1]
