"""BIRD's execution accuracy and soft F1.

Source: evaluation_ex.py, evaluation_f1.py and evaluation_utils.py of bird-bench/mini_dev.

- Both queries run unchanged on one connection, the prediction first. What it deletes is missing from the gold's result.
- Execution accuracy compares sets of rows: duplicates and row order are ignored, column order matters, cells are
  compared exactly.
- Soft F1 drops duplicates, pairs the rows of both results by position and counts the cells that they share.
- A query that fails is worth 0, as is text that is not UTF-8, or a pair that exceeds the time limit.
"""

from __future__ import annotations

from pathlib import Path

from shared.evaluation.judges.execution import SECONDS, outcome
from shared.sql.database import Rows, SqlError


def bird_ex(gold_sql: str, prediction_sql: str, database: Path | str, *, seconds: float = SECONDS) -> bool:
    """BIRD's verdict; `seconds` is the time limit of both queries together. Raises UserError for a damaged database."""
    results = outcome(Path(database), (prediction_sql, gold_sql), seconds, "strict")
    return not isinstance(results, SqlError) and set(results[0]) == set(results[1])


def soft_f1(gold_sql: str, prediction_sql: str, database: Path | str, *, seconds: float = SECONDS) -> float:
    """BIRD's soft F1 between 0 and 1; `seconds` as for `bird_ex`. Raises UserError for a damaged database."""
    results = outcome(Path(database), (prediction_sql, gold_sql), seconds, "strict")
    return 0.0 if isinstance(results, SqlError) else soft_f1_match(results[1], results[0])


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
    return 2 * shared / (2 * shared + extra + missing)
