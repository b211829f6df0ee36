"""Are two results equal, up to one order of columns for all rows? Cells are compared exactly (1 = 1.0, NULL = NULL)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shared.database import Rows

_MAX_CELLS = 20_000_000  # looked at in search of a column order; beyond that the results count as different

Columns = Sequence[tuple[Any, ...]]


def equal_up_to_column_order(gold: Rows, prediction: Rows, *, ordered: bool) -> bool:
    """True when some order of the prediction's columns gives the gold's rows: as a list if `ordered`, else as a multiset.

    Both must hold rows, the same number of them and of the same width.
    """
    own, other = list(zip(*gold, strict=True)), list(zip(*prediction, strict=True))
    if ordered:
        return Counter(own) == Counter(other)
    return _Search(own, other).succeeds([])


class _Search:
    """Gives the gold's columns one after another a column of the prediction, as long as the rows so far agree."""

    def __init__(self, gold: Columns, prediction: Columns) -> None:
        self._gold, self._prediction = gold, prediction
        self._cells_left = _MAX_CELLS
        counts = [Counter(column) for column in prediction]
        self._fits = [[j for j, count in enumerate(counts) if count == Counter(column)] for column in gold]

    def succeeds(self, chosen: list[int]) -> bool:
        """True when `chosen`, columns of the prediction for the gold's first ones, can be completed."""
        place = len(chosen)
        if place == len(self._gold):
            return True
        tried = set()
        for j in sorted(self._fits[place], key=lambda j: j != place):
            column = self._prediction[j]
            if j not in chosen and column not in tried:
                tried.add(column)
                if self._rows_agree([*chosen, j]) and self.succeeds([*chosen, j]):
                    return True
        return False

    def _rows_agree(self, chosen: list[int]) -> bool:
        self._cells_left -= len(chosen) * len(self._gold[0])
        if self._cells_left < 0:
            return False
        picked = [self._prediction[j] for j in chosen]
        return Counter(zip(*self._gold[: len(chosen)], strict=True)) == Counter(zip(*picked, strict=True))
