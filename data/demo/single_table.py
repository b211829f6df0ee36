"""Question forms over one table: counts, filters, aggregates, groups."""

from __future__ import annotations

from dataclasses import replace

from data.demo import conditions
from data.demo.compose import NUMBERS, Draft, Draw, Form, Phrase, counted
from data.demo.conditions import literal, threshold
from data.demo.query import Query
from data.demo.spec import Kind, Table

COUNT_TEMPLATES = (
    "How many {np} are there?",
    "Count the {np}.",
    "What is the number of {np}?",
    "Give the number of {np}.",
)
LIST_TEMPLATES = (
    "Show the {columns} of {np}.",
    "List the {columns} of {np}.",
    "Give the {columns} of {np}.",
    "Find the {columns} of {np}.",
)
AGGREGATE_TEMPLATES = (
    "What is the {aggregate} of {np}?",
    "Find the {aggregate} of {np}.",
    "Give the {aggregate} of {np}.",
    "Compute the {aggregate} of {np}.",
)
_GROUP_COUNT_TEMPLATES = (
    "How many {many} are there for each {column}?",
    "For each {column}, count the {many}.",
    "Show each {column} with the number of {many}.",
    "For each {column}, show the number of {many}.",
)


def _count_all(draw: Draw) -> Draft:
    table = draw.table()
    return Draft(Query(("COUNT(*)",), table.name), {"np": table.plural})


def _count_where(draw: Draw) -> Draft:
    table = draw.table()
    return _counting(table, draw.phrase(table))


def _count_where_two(draw: Draw) -> Draft:
    table = draw.table()
    return _counting(table, draw.double_phrase(table))


def _counting(table: Table, phrase: Phrase) -> Draft:
    return Draft(Query(("COUNT(*)",), table.name, where=phrase.where), {"np": phrase.words}, phrase.sorts)


def _list_all(draw: Draw) -> Draft:
    table = draw.table()
    first, second = table.title, draw.shown(table, without=[table.title])
    return Draft(Query((first.name, second.name), table.name),
                 {"columns": f"{first.words} and {second.words}", "np": f"all {table.plural}"})  # fmt: skip


def _list_where(draw: Draw) -> Draft:
    table = draw.table()
    return _listing(draw, table, draw.phrase(table))


def _list_where_two(draw: Draw) -> Draft:
    table = draw.table()
    return _listing(draw, table, draw.double_phrase(table))


def _listing(draw: Draw, table: Table, phrase: Phrase) -> Draft:
    columns = [draw.shown(table, without=phrase.columns)]
    if draw.rng.random() < 0.3:
        columns.append(draw.shown(table, without=[*phrase.columns, *columns]))
    query = Query(tuple(c.name for c in columns), table.name, where=phrase.where)
    return Draft(query, {"columns": " and ".join(c.words for c in columns), "np": phrase.words}, phrase.sorts)


def _lookup(draw: Draw) -> Draft:
    table = draw.table()
    label = draw.column(table, Kind.LABEL)
    target = draw.column(table, Kind.CATEGORY, Kind.DATE, *NUMBERS)
    condition = conditions.named(draw.rng, draw.subject(table, label))
    slots = {"column": target.words, "one": table.singular, "noun": condition.noun, "clause": condition.clause}
    return Draft(Query((target.name,), table.name, where=(condition.sql,)), slots, (condition.sort,))


def _aggregate(draw: Draw) -> Draft:
    table = draw.table()
    function, word, column = draw.aggregate(table)
    slots = {"aggregate": f"{word} {column.words}", "np": f"all {table.plural}"}
    return Draft(Query((f"{function}({column.name})",), table.name), slots)


def _aggregate_where(draw: Draw) -> Draft:
    table = draw.table()
    function, word, column = draw.aggregate(table)
    phrase = draw.phrase(table, without=[column])
    slots = {"aggregate": f"{word} {column.words}", "np": phrase.words}
    return Draft(Query((f"{function}({column.name})",), table.name, where=phrase.where), slots, phrase.sorts)


def _distinct(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.CATEGORY, nullable=False)
    return Draft(Query((column.name,), table.name, distinct=True), {"column": column.words, "many": table.plural})


def _count_distinct(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.CATEGORY, Kind.REF, nullable=False)
    return Draft(Query((f"COUNT(DISTINCT {column.name})",), table.name), {"column": column.words, "many": table.plural})


def _group_count(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.CATEGORY, nullable=False)
    query = Query((column.name, "COUNT(*)"), table.name, group=column.name)
    return Draft(query, {"column": column.words, "many": table.plural})


def _group_count_where(draw: Draw) -> Draft:
    draft = _group_count(draw)
    table = draw.domain.table(draft.query.table)
    column = next(c for c in table.columns if c.name == draft.query.group)
    phrase = draw.phrase(table, without=[column])
    query = replace(draft.query, where=phrase.where)
    return Draft(query, {"column": column.words, "many": phrase.words}, phrase.sorts)


def _group_aggregate(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.CATEGORY, nullable=False)
    function, word, target = draw.aggregate(table)
    query = Query((column.name, f"{function}({target.name})"), table.name, group=column.name)
    return Draft(query, {"column": column.words, "aggregate": f"{word} {target.words}", "many": table.plural})


def _group_having(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.CATEGORY, nullable=False)
    share = table.rows // len(set(draw.subject(table, column).values))
    tail, words = counted(max(2, share // 2), max(3, share * 3 // 2), draw)
    query = Query((column.name,), table.name, group=column.name, having=f"COUNT(*) {tail}")
    return Draft(query, {"column": column.words, "number": words, "many": table.plural})


def _group_having_average(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.CATEGORY, nullable=False)
    target = draw.column(table, *NUMBERS)
    limit = literal(threshold(draw.subject(table, target), draw.rng.uniform(0.4, 0.65)))
    operator, word = draw.one(((">", "above"), ("<", "below")))
    query = Query((column.name,), table.name, group=column.name, having=f"AVG({target.name}) {operator} {limit}")
    slots = {
        "column": column.words,
        "aggregate": f"average {target.words}",
        "number": f"{word} {limit}",
        "many": table.plural,
    }
    return Draft(query, slots)


def _group_top(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.CATEGORY, nullable=False)
    word, descending = draw.one((("most", True), ("most", True), ("fewest", False)))
    query = Query((column.name,), table.name, group=column.name, order="COUNT(*)", descending=descending, limit=1)
    return Draft(query, {"column": column.words, "most": word, "many": table.plural})


def _year_group(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Kind.DATE, nullable=False)
    year = f"strftime('%Y', {column.name})"
    query = Query((year, "COUNT(*)"), table.name, group=year)
    return Draft(query, {"column": column.words, "many": table.plural})


SINGLE_TABLE_FORMS = (
    Form("count_all", _count_all, COUNT_TEMPLATES),
    Form("count_where", _count_where, COUNT_TEMPLATES, weight=5),
    Form("count_where_two", _count_where_two, COUNT_TEMPLATES, weight=2),
    Form("list_all", _list_all, LIST_TEMPLATES),
    Form("list_where", _list_where, LIST_TEMPLATES, weight=6),
    Form("list_where_two", _list_where_two, LIST_TEMPLATES, weight=2),
    Form("lookup", _lookup, (
        "What is the {column} of the {one} with {noun}?", "Show the {column} of the {one} with {noun}.",
        "Find the {column} of the {one} whose {clause}.", "Give the {column} of the {one} where the {clause}."), weight=2),
    Form("aggregate", _aggregate, AGGREGATE_TEMPLATES, weight=2),
    Form("aggregate_where", _aggregate_where, AGGREGATE_TEMPLATES, weight=4),
    Form("distinct", _distinct, (
        "Show each distinct {column} of the {many}.", "List every different {column} of the {many}.",
        "What different {column} values do the {many} have?", "Give the distinct {column} values of the {many}.")),
    Form("count_distinct", _count_distinct, (
        "How many different {column} values do the {many} have?", "Count the distinct {column} values of the {many}.",
        "What is the number of different {column} values of the {many}?", "How many distinct {column} values do the {many} have?")),
    Form("group_count", _group_count, _GROUP_COUNT_TEMPLATES, weight=2),
    Form("group_count_where", _group_count_where, _GROUP_COUNT_TEMPLATES),
    Form("group_aggregate", _group_aggregate, (
        "What is the {aggregate} of {many} for each {column}?", "For each {column}, show the {aggregate} of {many}.",
        "Show the {aggregate} of {many} for each {column}.", "Give the {aggregate} of {many} per {column}."), weight=2),
    Form("group_having", _group_having, (
        "Which {column} has {number} {many}?", "Show each {column} with {number} {many}.",
        "List every {column} that has {number} {many}.", "Find each {column} that has {number} {many}.")),
    Form("group_having_average", _group_having_average, (
        "Which {column} has {many} with an {aggregate} {number}?", "Show each {column} whose {many} have an {aggregate} {number}.",
        "List every {column} where the {aggregate} of {many} is {number}.",
        "Find each {column} for which the {aggregate} of {many} is {number}.")),
    Form("group_top", _group_top, (
        "Which {column} has the {most} {many}?", "What is the {column} with the {most} {many}?",
        "Show the {column} that has the {most} {many}.", "Find the {column} with the {most} {many}.")),
    Form("year_group", _year_group, (
        "How many {many} are there for each year of the {column}?", "For each year of the {column}, count the {many}.",
        "Show each year of the {column} with the number of {many}.", "Count the {many} for each year of the {column}."), weight=3),
)  # fmt: skip
