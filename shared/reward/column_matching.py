"""Is there an order of the prediction's columns that makes two results equal? What "equal" means is the caller's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Values = Sequence[Any]  # one column
SameRows = Callable[[Sequence[Values], Sequence[Values]], bool]
"""Do these columns, in matching order, hold equal multisets of rows?"""

_MAX_CELLS = 20_000_000  # looked at in the search; beyond that the results count as different


def column_order_exists(
    gold: Sequence[Values], prediction: Sequence[Values], fits: Sequence[Sequence[int]], same_rows: SameRows
) -> bool:
    """True when some order of the prediction's columns gives the gold's rows, whatever the order of these.

    `fits` lists for each column of the gold those of the prediction that hold the same values; only they can stand for it,
    so there is seldom a choice.
    """
    return all(fits) and _Search(gold, prediction, fits, same_rows).succeeds([])


def pairs_up(fits: Sequence[Sequence[int]]) -> bool:
    """True when every item can get a partner of its own among `fits[item]` (bipartite matching by augmenting paths)."""
    partner_of: dict[int, int] = {}

    def place(item: int, seen: set[int]) -> bool:
        for other in fits[item]:
            if other not in seen:
                seen.add(other)
                if other not in partner_of or place(partner_of[other], seen):
                    partner_of[other] = item
                    return True
        return False

    return all(place(item, set()) for item in range(len(fits)))


class _Search:
    """Gives the gold's columns one after another a column of the prediction, as long as the rows so far agree."""

    def __init__(
        self, gold: Sequence[Values], prediction: Sequence[Values], fits: Sequence[Sequence[int]], same_rows: SameRows
    ) -> None:
        self._gold, self._prediction, self._same_rows = gold, prediction, same_rows
        self._fits = [sorted(places, key=i.__ne__) for i, places in enumerate(fits)]
        self._cells_left = _MAX_CELLS

    def succeeds(self, chosen: list[int]) -> bool:
        """True when `chosen`, columns of the prediction for the gold's first ones, can be completed."""
        place = len(chosen)
        if place == len(self._gold):
            return True
        tried: list[Values] = []
        for j in self._fits[place]:
            column = self._prediction[j]
            if j not in chosen and column not in tried:
                tried.append(column)
                if self._rows_agree([*chosen, j]) and self.succeeds([*chosen, j]):
                    return True
        return False

    def _rows_agree(self, chosen: list[int]) -> bool:
        count = len(chosen)
        if count < len(self._gold) and len(self._fits[count - 1]) == 1:
            return True  # no choice here: the whole rows are compared later
        self._cells_left -= count * len(self._gold[0])
        return self._cells_left > 0 and self._same_rows(self._gold[:count], [self._prediction[j] for j in chosen])
