"""Do two query results mean the same? The house rule for rewards and for execution accuracy.

- Rows count as a multiset; their order matters only when the gold's top-level query orders them.
- Columns may come in another order, the same one for all rows; their names do not matter.
- Numbers are equal within 1e-6 relative in a column that holds a float, else exactly (1 = 1.0); texts and blobs byte by
  byte; NULL = NULL; '1' is not 1. DISTINCT is not stripped, unlike in Spider's official evaluator.
- Two empty results are equal whatever their columns; a result that a cap cut short equals nothing.

Limit: among results with many interchangeable columns the search for a column order gives up after a fixed amount of
work and says "different".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shared.sql.database import QueryResult, Rows

_RELATIVE = 1e-6
_ABSOLUTE = 1e-12  # what is left of 0.1 + 0.2 - 0.3
_MAX_CELLS = 20_000_000  # compared in the search for a column order; beyond that the results count as different

Values = Sequence[Any]  # one column
SameRows = Callable[[Sequence[Values], Sequence[Values]], bool]
"""Do these columns of gold and prediction, in matching order, hold the same rows?"""


def execution_match(gold: QueryResult, prediction: QueryResult, *, ordered: bool) -> bool:
    """True when the prediction gives the gold's answer; `ordered`: rows must come in the gold's order."""
    if gold.truncated or prediction.truncated or len(gold.rows) != len(prediction.rows):
        return False
    if not gold.rows or gold.rows == prediction.rows:
        return True

    def same_rows(own: Sequence[Values], other: Sequence[Values]) -> bool:
        if ordered:
            return all(map(_same_sequence, own, other))
        merged = [_with_close_numbers_merged(*pair) for pair in zip(own, other, strict=True)]
        mine, theirs = (Counter(zip(*columns, strict=True)) for columns in zip(*merged, strict=True))
        return mine == theirs

    return column_order_exists(gold.rows, prediction.rows, same_rows)


def result_overlap(gold: QueryResult, prediction: QueryResult) -> float:
    """How near a wrong result comes to the gold's, in [0, 1]: the mean F1 of its columns, rows and cells.

    All three are compared as multisets, a column by its values and a row by its cells in any order. Floats are equal
    when six significant digits are. Precision punishes a SELECT *, recall a guess of one value. An empty or truncated
    result has no overlap.
    """
    if gold.truncated or prediction.truncated or not gold.rows or not prediction.rows:
        return 0.0
    scores = []
    for parts in zip(_parts(gold.rows), _parts(prediction.rows), strict=True):
        own, other = map(Counter, parts)
        scores.append(2 * (own & other).total() / (own.total() + other.total()))
    return sum(scores) / len(scores)


def _parts(rows: Rows) -> tuple[list[Any], list[Any], list[Any]]:
    """The columns, rows and cells of a result in a form that can be counted."""
    table = [[float(f"{cell:.6g}") if isinstance(cell, float) else cell for cell in row] for row in rows]
    cells = [cell for row in table for cell in row]
    columns = [frozenset(Counter(column).items()) for column in zip(*table, strict=True)]
    return columns, [frozenset(Counter(row).items()) for row in table], cells


def column_order_exists(gold: Rows, prediction: Rows, same_rows: SameRows) -> bool:
    """True when `same_rows` holds for some order of the columns. Both results have equally many rows, at least one."""
    if len(gold[0]) != len(prediction[0]):
        return False
    columns, others = (list(zip(*rows, strict=True)) for rows in (gold, prediction))
    contents = [_contents(column) for column in others]
    # Only columns that hold about the same values can stand for each other, so there is seldom a choice.
    fits = [
        [j for j, (numbers, rest) in enumerate(contents) if rest == own_rest and all(map(_close, own_numbers, numbers))]
        for own_numbers, own_rest in map(_contents, columns)
    ]
    cells_left = _MAX_CELLS

    def can_complete(chosen: list[int]) -> bool:
        """`chosen` are columns of the prediction for the gold's first ones; True when the others can be found too."""
        nonlocal cells_left
        place = len(chosen)
        if place == len(columns):
            return True
        tried: list[Values] = []
        for j in sorted(fits[place], key=place.__ne__):
            if j in chosen or others[j] in tried:
                continue
            tried.append(others[j])
            longer = [*chosen, j]
            if len(longer) == len(columns) or len(fits[place]) > 1:  # without a choice the whole rows decide later
                cells_left -= len(longer) * len(gold)
                if cells_left <= 0 or not same_rows(columns[: len(longer)], [others[k] for k in longer]):
                    continue
            if can_complete(longer):
                return True
        return False

    return all(fits) and can_complete([])


def _contents(column: Values) -> tuple[list[float], Counter[Any]]:
    """The numbers of a column, sorted, and all else in it, counted.

    Numbers paired in sorted order are close to each other if any pairing makes all of them close.
    """
    numbers = sorted(value for value in column if isinstance(value, (int, float)))
    return numbers, Counter(value for value in column if not isinstance(value, (int, float)))


def _close(x: Any, y: Any) -> bool:
    numbers = isinstance(x, (int, float)) and isinstance(y, (int, float))
    return math.isclose(x, y, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) if numbers else bool(x == y)


def _is_loose(gold: Values, prediction: Values) -> bool:
    return any(isinstance(value, float) for column in (gold, prediction) for value in column)


def _same_sequence(gold: Values, prediction: Values) -> bool:
    return gold == prediction or (_is_loose(gold, prediction) and all(map(_close, gold, prediction)))


def _with_close_numbers_merged(gold: Values, prediction: Values) -> tuple[Values, Values]:
    """Both columns, where one holds a float with one number in place of those that pair up in sorted order."""
    if not _is_loose(gold, prediction):
        return gold, prediction
    merged: dict[float, float] = {}
    highest = number = -math.inf
    for own, other in zip(_contents(gold)[0], _contents(prediction)[0], strict=True):
        number = own if min(own, other) > highest else number  # pairs that overlap count as one number
        highest = max(own, other, highest)
        merged[own] = merged[other] = number
    return [merged.get(value, value) for value in gold], [merged.get(value, value) for value in prediction]
