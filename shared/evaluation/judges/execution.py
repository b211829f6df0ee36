"""What the judges share: running statements as an official evaluator would, each result once."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from shared.config.schema import SandboxConfig
from shared.sql.database import Database, Rows, SqlError

SECONDS = 30.0  # for one pair of queries, the time limit of BIRD's evaluator
_LIMITS = SandboxConfig(timeout_seconds=SECONDS, max_rows=1, max_compare_rows=1, max_result_bytes=1)  # of other queries
_open = lru_cache(maxsize=256)(Database)


@lru_cache(maxsize=64)  # a gold is needed once per sample, a prediction by several judges
def outcome(path: Path, statements: tuple[str, ...], seconds: float, decoding: str) -> list[Rows] | SqlError:
    """Rows of statements run one after another on one connection, or why one of them has none.

    Raises UserError for a missing or damaged file.
    """
    try:
        return _open(path, _LIMITS).official(statements, seconds, decoding)
    except SqlError as error:
        return error
