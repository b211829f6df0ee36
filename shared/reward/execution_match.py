"""Do two query results mean the same? The house rule for rewards and for execution accuracy.

- Rows count as a multiset; their order matters only when the gold's top-level query orders them.
- Columns may come in another order, the same one for all rows; their names don't matter.
- Numbers are equal within 1e-6 relative in a column that holds a float, else exactly (1 = 1.0); texts and blobs byte by
  byte; NULL = NULL; '1' is not 1. DISTINCT is not stripped, unlike in Spider's official evaluator.
- Two empty results are equal whatever their columns; a result that a cap cut short equals nothing.

Limit: among results with many interchangeable columns the search for a column order gives up after a fixed amount of
work and says "different"; so does the pairing of more than a few hundred rows that only differ in near-equal floats.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import sqlglot
from sqlglot.errors import SqlglotError
from sqlglot.tokens import TokenType

from shared.reward.column_matching import Values, column_order_exists, pairs_up
from shared.sql.database import QueryResult

_RELATIVE = 1e-6
_ABSOLUTE = 1e-12  # what is left of 0.1 + 0.2 - 0.3
_MAX_PAIRING = 300  # rows paired by search when sorting did not pair them


def gold_is_ordered(sql: str) -> bool:
    """True when the top-level query has an ORDER BY; one in a subquery, CTE or window doesn't count."""
    depth = 0
    try:
        tokens = sqlglot.tokenize(sql, read="sqlite")
    except SqlglotError:  # SQLite forgives an open comment; without tokens any ORDER BY counts
        return re.search(r"\border\s+by\b", sql, re.IGNORECASE) is not None
    for token in tokens:
        depth += (token.token_type is TokenType.L_PAREN) - (token.token_type is TokenType.R_PAREN)
        if token.token_type is TokenType.ORDER_BY and depth == 0:
            return True
    return False


def execution_match(gold: QueryResult, prediction: QueryResult, *, ordered: bool) -> bool:
    """True when the prediction gives the gold's answer; `ordered`: rows must come in the gold's order."""
    if gold.truncated or prediction.truncated or len(gold.rows) != len(prediction.rows):
        return False
    if not gold.rows:
        return True
    if len(gold.columns) != len(prediction.columns):
        return False
    if gold.rows == prediction.rows:
        return True
    gold_columns, columns = list(zip(*gold.rows, strict=True)), list(zip(*prediction.rows, strict=True))
    if ordered:
        return pairs_up([[j for j, other in enumerate(columns) if _same_list(own, other)] for own in gold_columns])
    sorted_columns = [_sorted_values(column) for column in columns]
    fits = [
        [j for j, other in enumerate(sorted_columns) if _same_values(own, other)]
        for own in map(_sorted_values, gold_columns)
    ]
    return column_order_exists(gold_columns, columns, fits, _same_rows)


def _close(x: Any, y: Any) -> bool:
    numbers = isinstance(x, (int, float)) and isinstance(y, (int, float))
    return math.isclose(x, y, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) if numbers else bool(x == y)


def _has_float(column: Values) -> bool:
    return any(isinstance(x, float) for x in column)


def _same_list(gold: Values, prediction: Values) -> bool:
    loose = _has_float(gold) or _has_float(prediction)
    return gold == prediction or (loose and all(map(_close, gold, prediction)))


def _sorted_values(column: Values) -> tuple[list[float], Counter[Any]]:
    numbers = sorted(x for x in column if isinstance(x, (int, float)))
    return numbers, Counter(x for x in column if not isinstance(x, (int, float)))


def _same_values(gold: tuple[list[float], Counter[Any]], prediction: tuple[list[float], Counter[Any]]) -> bool:
    """Could these columns hold equal multisets? Pairing in sorted order finds a pairing of close numbers if any exists."""
    same_length = len(gold[0]) == len(prediction[0])
    return same_length and gold[1] == prediction[1] and all(map(_close, gold[0], prediction[0]))


def _same_rows(gold: Sequence[Values], prediction: Sequence[Values]) -> bool:
    """Equal multisets of rows, given as columns in matching order."""
    loose = [_has_float(own) or _has_float(other) for own, other in zip(gold, prediction, strict=True)]
    if not any(loose):
        return Counter(zip(*gold, strict=True)) == Counter(zip(*prediction, strict=True))
    own, other = _by_exact_part(gold, loose), _by_exact_part(prediction, loose)
    return own.keys() == other.keys() and all(_same_vectors(own[key], other[key]) for key in own)


def _by_exact_part(columns: Sequence[Values], loose: Sequence[bool]) -> dict[tuple[Any, ...], list[tuple[float, ...]]]:
    """Rows split into what must be equal exactly (the key) and the numbers of columns that hold floats."""
    groups: dict[tuple[Any, ...], list[tuple[float, ...]]] = defaultdict(list)
    for row in zip(*columns, strict=True):
        number = [is_loose and isinstance(x, (int, float)) for is_loose, x in zip(loose, row, strict=True)]
        key = tuple(float if is_number else x for is_number, x in zip(number, row, strict=True))
        groups[key].append(tuple(x for is_number, x in zip(number, row, strict=True) if is_number))
    return groups


def _same_vectors(gold: list[tuple[float, ...]], prediction: list[tuple[float, ...]]) -> bool:
    if len(gold) != len(prediction):
        return False
    own, other = sorted(gold, key=_rounded), sorted(prediction, key=_rounded)
    if all(all(map(_close, x, y)) for x, y in zip(own, other, strict=True)):
        return True
    if len(own) > _MAX_PAIRING:
        return False
    return pairs_up([[j for j, y in enumerate(other) if all(map(_close, x, y))] for x in own])


def _rounded(vector: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sort key in which noise in one number doesn't outweigh the next one."""
    return tuple(float(f"{x:.9g}") for x in vector), vector
