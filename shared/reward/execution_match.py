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

from shared.sql.database import QueryResult

_RELATIVE = 1e-6
_ABSOLUTE = 1e-12  # what is left of 0.1 + 0.2 - 0.3
_MAX_CELLS = 20_000_000  # compared in the search for a column order; beyond that the results count as different

Values = Sequence[Any]  # one column
SameRows = Callable[[Sequence[Values], Sequence[Values]], bool]
"""Do these columns, in matching order, hold equal multisets of rows?"""


def execution_match(gold: QueryResult, prediction: QueryResult, *, ordered: bool) -> bool:
    """True when the prediction gives the gold's answer; `ordered`: rows must come in the gold's order."""
    if gold.truncated or prediction.truncated or len(gold.rows) != len(prediction.rows):
        return False
    if not gold.rows or gold.rows == prediction.rows:
        return True
    if len(gold.columns) != len(prediction.columns):
        return False
    gold_columns, columns = (list(zip(*result.rows, strict=True)) for result in (gold, prediction))
    if ordered:
        fits = [[j for j, other in enumerate(columns) if _same_sequence(own, other)] for own in gold_columns]
        return column_order_exists(gold_columns, columns, fits, lambda *_: True)
    contents, other_contents = ([_contents(column) for column in each] for each in (gold_columns, columns))
    fits = [[j for j, other in enumerate(other_contents) if _same_contents(own, other)] for own in contents]
    return column_order_exists(gold_columns, columns, fits, _same_rows)


def column_order_exists(
    gold: Sequence[Values], prediction: Sequence[Values], fits: Sequence[Sequence[int]], same_rows: SameRows
) -> bool:
    """True when some order of the prediction's columns gives the gold's rows, whatever the order of these.

    `fits` lists for each column of the gold those of the prediction that may stand for it, because they hold the same
    values; so there is seldom a choice.
    """
    cells_left = _MAX_CELLS

    def can_complete(chosen: list[int]) -> bool:
        """`chosen` are columns of the prediction for the gold's first ones; True when the others can be found too."""
        nonlocal cells_left
        place = len(chosen)
        if place == len(gold):
            return True
        tried: list[Values] = []
        for j in sorted(fits[place], key=place.__ne__):
            if j in chosen or prediction[j] in tried:
                continue
            tried.append(prediction[j])
            longer = [*chosen, j]
            if len(longer) == len(gold) or len(fits[place]) > 1:  # without a choice the whole rows decide later
                cells_left -= len(longer) * len(gold[0])
                if cells_left <= 0 or not same_rows(gold[: len(longer)], [prediction[k] for k in longer]):
                    continue
            if can_complete(longer):
                return True
        return False

    return all(fits) and can_complete([])


def _close(x: Any, y: Any) -> bool:
    numbers = isinstance(x, (int, float)) and isinstance(y, (int, float))
    return math.isclose(x, y, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) if numbers else bool(x == y)


def _is_loose(gold: Values, prediction: Values) -> bool:
    return any(isinstance(value, float) for column in (gold, prediction) for value in column)


def _same_sequence(gold: Values, prediction: Values) -> bool:
    return gold == prediction or (_is_loose(gold, prediction) and all(map(_close, gold, prediction)))


def _contents(column: Values) -> tuple[list[float], Counter[Any]]:
    """The numbers of a column, sorted, and all else in it, counted."""
    numbers = sorted(value for value in column if isinstance(value, (int, float)))
    return numbers, Counter(value for value in column if not isinstance(value, (int, float)))


def _same_contents(gold: tuple[list[float], Counter[Any]], prediction: tuple[list[float], Counter[Any]]) -> bool:
    """Could these columns hold equal multisets? Pairs in sorted order are close if any pairing makes all of them close."""
    same_length = len(gold[0]) == len(prediction[0])
    return same_length and gold[1] == prediction[1] and all(map(_close, gold[0], prediction[0]))


def _same_rows(gold: Sequence[Values], prediction: Sequence[Values]) -> bool:
    columns = [_with_close_numbers_merged(own, other) for own, other in zip(gold, prediction, strict=True)]
    own, other = (Counter(zip(*each, strict=True)) for each in zip(*columns, strict=True))
    return own == other


def _with_close_numbers_merged(gold: Values, prediction: Values) -> tuple[Values, Values]:
    """Both columns with numbers that count as equal replaced by the smallest of them."""
    if not _is_loose(gold, prediction):
        return gold, prediction
    merged: dict[float, float] = {}
    smallest = -math.inf
    for number in sorted({value for value in (*gold, *prediction) if isinstance(value, (int, float))}):
        if not _close(smallest, number):
            smallest = number
        merged[number] = smallest
    return [merged.get(value, value) for value in gold], [merged.get(value, value) for value in prediction]
