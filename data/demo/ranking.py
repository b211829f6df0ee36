"""Question forms over one table that compare rows with each other: orders, top rows, above average."""

from __future__ import annotations

from dataclasses import replace

from data.demo.compose import NUMBERS, Draft, Draw, Form, Phrase
from data.demo.query import Query
from data.demo.single_table import COUNT_TEMPLATES, LIST_TEMPLATES
from data.demo.spec import Kind, Table

_ORDER_TEMPLATES = (
    "Show the {column} of {np} ordered by {key} {direction}.",
    "List the {column} of {np} sorted by {key} {direction}.",
    "Order {np} by {key} {direction} and show the {column}.",
    "Sort {np} by {key} {direction} and list the {column}.",
)


def _order_all(draw: Draw) -> Draft:
    return _ordered(draw, draw.table(), None)


def _order_where(draw: Draw) -> Draft:
    table = draw.table()
    return _ordered(draw, table, draw.phrase(table))


def _ordered(draw: Draw, table: Table, phrase: Phrase | None) -> Draft:
    column = draw.column(table, Kind.LABEL, Kind.DATE, *NUMBERS, nullable=False)
    shown = draw.shown(table, without=phrase.columns if phrase else ())
    descending, direction = draw.one(_DIRECTIONS[column.kind])
    query = Query(
        (shown.name,), table.name, where=phrase.where if phrase else (), order=column.name, descending=descending
    )
    slots = {"column": shown.words, "key": column.words, "direction": direction}
    return Draft(
        query, slots | {"np": phrase.words if phrase else f"all {table.plural}"}, phrase.sorts if phrase else ()
    )


_UP = ((False, "in ascending order"), (True, "in descending order"))
_DIRECTIONS: dict[Kind, tuple[tuple[bool, str], ...]] = {
    Kind.LABEL: ((False, "in alphabetical order"), (False, "from A to Z")),
    Kind.DATE: ((False, "from earliest to latest"), (True, "from latest to earliest"), *_UP),
    Kind.MEASURE: ((False, "from lowest to highest"), (True, "from highest to lowest"), *_UP),
    Kind.LEVEL: ((False, "from lowest to highest"), (True, "from highest to lowest"), *_UP),
}


def _top_one(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.DATE, *NUMBERS, nullable=False)
    word, descending = draw.superlative(column)
    shown = draw.shown(table, without=[column])
    query = Query((shown.name,), table.name, order=column.name, descending=descending, limit=1)
    return Draft(query, {"column": shown.words, "one": table.singular, "best": f"{word} {column.words}"})


def _top_one_where(draw: Draw) -> Draft:
    draft = _top_one(draw)
    table = draw.domain.table(draft.query.table)
    used = [c for c in table.columns if c.name in (draft.query.order, *draft.query.select)]
    phrase = draw.phrase(table, without=used)
    query = replace(draft.query, where=phrase.where)
    return Draft(query, draft.slots | {"np": phrase.words}, phrase.sorts)


def _top_k(draw: Draw) -> Draft:
    draft = _top_one(draw)
    number = draw.rng.randint(2, 6)
    many = draw.domain.table(draft.query.table).plural
    return Draft(replace(draft.query, limit=number), draft.slots | {"number": str(number), "many": many})


def _above_average(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, *NUMBERS)
    operator, word = draw.one(((">", "above"), (">", "greater than"), ("<", "below"), ("<", "less than")))
    condition = f"{column.name} {operator} (SELECT AVG({column.name}) FROM {table.name})"
    words = f"{column.words} {word} the average {column.words}"
    if draw.rng.random() < 0.5:
        return Draft(Query(("COUNT(*)",), table.name, where=(condition,)), {"np": f"{table.plural} with {words}"},
                     templates=COUNT_TEMPLATES)  # fmt: skip
    shown = draw.shown(table, without=[column])
    return Draft(
        Query((shown.name,), table.name, where=(condition,)),
        {"columns": shown.words, "np": f"{table.plural} with {words}"},
    )


RANKING_FORMS = (
    Form("order_all", _order_all, _ORDER_TEMPLATES, weight=3),
    Form("order_where", _order_where, _ORDER_TEMPLATES),
    Form("top_one", _top_one, (
        "Show the {column} of the {one} with the {best}.", "What is the {column} of the {one} with the {best}?",
        "Find the {column} of the {one} that has the {best}.", "Which {one} has the {best}? Show the {column}."), weight=2),
    Form("top_one_where", _top_one_where, (
        "Among the {np}, which one has the {best}? Show the {column}.", "Of the {np}, show the {column} of the one with the {best}.",
        "Among the {np}, find the {column} of the one with the {best}.", "Of the {np}, which has the {best}? Give the {column}.")),
    Form("top_k", _top_k, (
        "Show the {column} of the {number} {many} with the {best}.", "List the {column} of the {number} {many} with the {best}.",
        "Which {number} {many} have the {best}? Show the {column}.", "Find the {column} of the {number} {many} that have the {best}."),
        weight=2),
    Form("above_average", _above_average, LIST_TEMPLATES, weight=3),
)  # fmt: skip
