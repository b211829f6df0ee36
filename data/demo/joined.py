"""Question forms over several tables: joins along foreign keys and nested queries.

The FROM table is always the child, the one that holds the foreign key.
"""

from __future__ import annotations

from dataclasses import replace

from data.demo.compose import NUMBERS, Draft, Draw, Form, counted
from data.demo.query import Edge, Query
from data.demo.single_table import AGGREGATE_TEMPLATES, COUNT_TEMPLATES, LIST_TEMPLATES
from data.demo.spec import Column, Kind, Table


def _full(table: Table, column: Column) -> str:
    return f"{table.name}.{column.name}"


def _join(edge: Edge, *select: str) -> Query:
    return Query(select, edge.child.name, joins=(edge.join,))


def _join_count_where(draw: Draw) -> Draft:
    edge = draw.edge()
    phrase = draw.parent_phrase(edge)
    return Draft(replace(_join(edge, "COUNT(*)"), where=phrase.where), {"np": phrase.words}, phrase.sorts)


def _join_list_where(draw: Draw) -> Draft:
    edge = draw.edge()
    phrase = draw.parent_phrase(edge)
    shown = draw.shown(edge.child)
    query = replace(_join(edge, _full(edge.child, shown)), where=phrase.where)
    return Draft(query, {"columns": shown.words, "np": phrase.words}, phrase.sorts)


def _join_aggregate_where(draw: Draw) -> Draft:
    edge = draw.edge()
    function, word, column = draw.aggregate(edge.child)
    phrase = draw.parent_phrase(edge)
    query = replace(_join(edge, f"{function}({_full(edge.child, column)})"), where=phrase.where)
    return Draft(query, {"aggregate": f"{word} {column.words}", "np": phrase.words}, phrase.sorts)


def _join_list(draw: Draw) -> Draft:
    edge = draw.edge()
    mine = draw.shown(edge.child)
    theirs = draw.shown(edge.parent)
    query = _join(edge, _full(edge.child, mine), _full(edge.parent, theirs))
    return Draft(query, {"mine": mine.words, "one": edge.child.singular, "theirs": theirs.words, "role": edge.column.role,
                         "many": edge.child.plural})  # fmt: skip


def _join_group_count(draw: Draw) -> Draft:
    edge = draw.edge()
    column = draw.column(edge.parent, Kind.CATEGORY, nullable=False)
    group = _full(edge.parent, column)
    query = replace(_join(edge, group, "COUNT(*)"), group=group)
    return Draft(query, {"column": column.words, "role": edge.column.role, "many": edge.child.plural})


def _join_group_aggregate(draw: Draw) -> Draft:
    draft = _join_group_count(draw)
    table = draw.domain.table(draft.query.table)
    function, word, column = draw.aggregate(table)
    query = replace(draft.query, select=(draft.query.group, f"{function}({_full(table, column)})"))
    return Draft(query, draft.slots | {"aggregate": f"{word} {column.words}"})


def _per_parent(draw: Draw) -> tuple[Query, dict[str, str], Edge]:
    """One group for each parent row that has children, named by its label.

    A parent without children is in no group, so the words must never ask for few or none ("fewer than", "lowest total").
    """
    edge = draw.edge(alone=True)
    label = draw.column(edge.parent, Kind.LABEL)
    query = replace(_join(edge, _full(edge.parent, label)), group=_full(edge.parent, edge.parent.key))
    slots = {
        "label": label.words,
        "one": edge.parent.singular,
        "parents": edge.parent.plural,
        "many": edge.child.plural,
    }
    return query, slots, edge


def _join_each(draw: Draw) -> Draft:
    query, slots, _ = _per_parent(draw)
    return Draft(replace(query, select=(*query.select, "COUNT(*)")), slots)


def _join_top(draw: Draw) -> Draft:
    query, slots, _ = _per_parent(draw)
    return Draft(replace(query, order="COUNT(*)", descending=True, limit=1), slots)


def _join_top_total(draw: Draw) -> Draft:
    query, slots, edge = _per_parent(draw)
    column = draw.column(edge.child, Kind.MEASURE)
    query = replace(query, order=f"SUM({_full(edge.child, column)})", descending=True, limit=1)
    return Draft(query, slots | {"best": f"highest total {column.words}"})


def _join_having(draw: Draw) -> Draft:
    query, slots, edge = _per_parent(draw)
    share = max(2, edge.child.rows // edge.parent.rows)
    tail, words = counted(share, 2 * share, draw, few=False)
    return Draft(replace(query, having=f"COUNT(*) {tail}"), slots | {"number": words})


def _without_any(draw: Draw) -> Draft:
    edge = draw.edge(alone=True)
    shown = draw.shown(edge.parent)
    nested = f"(SELECT {edge.column.name} FROM {edge.child.name})"
    query = Query((shown.name,), edge.parent.name, where=(f"{edge.parent.key.name} NOT IN {nested}",))
    return Draft(query, {"column": shown.words, "parents": edge.parent.plural, "many": edge.child.plural})


def _with_some(draw: Draw) -> Draft:
    edge = draw.edge(alone=True)
    shown = draw.shown(edge.parent)
    condition, _ = draw.condition(edge.child)
    nested = f"(SELECT {edge.column.name} FROM {edge.child.name} WHERE {condition.sql})"
    query = Query((shown.name,), edge.parent.name, where=(f"{edge.parent.key.name} IN {nested}",))
    slots = {"column": shown.words, "parents": edge.parent.plural, "child": edge.child.singular, "noun": condition.noun}
    return Draft(query, slots, (condition.sort,))


def _two_joins(draw: Draw) -> Draft:
    edge = draw.edge()
    upper = draw.one([e for e in draw.edges if e.child is edge.parent and e.parent is not edge.child])
    condition, _ = draw.condition(upper.parent, qualified=True)
    base = Query((), edge.child.name, joins=(edge.join, upper.join), where=(condition.sql,))
    phrase = f"{edge.child.plural} whose {edge.column.role}'s {upper.column.role} has {condition.noun}"
    if draw.rng.random() < 0.5:
        return Draft(replace(base, select=("COUNT(*)",)), {"np": phrase}, (condition.sort,), COUNT_TEMPLATES)
    shown = draw.shown(edge.child)
    query = replace(base, select=(_full(edge.child, shown),))
    return Draft(query, {"columns": shown.words, "np": phrase}, (condition.sort,), LIST_TEMPLATES)


def _join_where_both(draw: Draw) -> Draft:
    """A condition on the child and one on the parent."""
    edge = draw.edge()
    mine, _ = draw.condition(edge.child, qualified=True)
    theirs, _ = draw.condition(edge.parent, qualified=True)
    phrase = f"{edge.child.plural} with {mine.noun} whose {edge.column.role} has {theirs.noun}"
    query = replace(_join(edge, "COUNT(*)"), where=(mine.sql, theirs.sql))
    return Draft(query, {"np": phrase}, (mine.sort, theirs.sort))


def _join_top_one(draw: Draw) -> Draft:
    """The child row with the highest value, and something about its parent."""
    edge = draw.edge()
    column = draw.column(edge.child, Kind.DATE, *NUMBERS, nullable=False)
    word, descending = draw.superlative(column)
    shown = draw.shown(edge.parent)
    order = _full(edge.child, column)
    query = replace(_join(edge, _full(edge.parent, shown)), order=order, descending=descending, limit=1)
    slots = {
        "theirs": shown.words,
        "role": edge.column.role,
        "one": edge.child.singular,
        "best": f"{word} {column.words}",
    }
    return Draft(query, slots)


JOINED_FORMS = (
    Form("join_count_where", _join_count_where, COUNT_TEMPLATES, weight=3),
    Form("join_list_where", _join_list_where, LIST_TEMPLATES, weight=3),
    Form("join_aggregate_where", _join_aggregate_where, AGGREGATE_TEMPLATES, weight=2),
    Form("join_list", _join_list, (
        "Show the {mine} of each {one} and the {theirs} of the {role}.", "List the {mine} of every {one} with the {theirs} of the {role}.",
        "For each {one}, show the {mine} and the {theirs} of the {role}.", "Give the {mine} of all {many} and the {theirs} of their {role}."),
        weight=8),
    Form("join_group_count", _join_group_count, (
        "How many {many} are there for each {column} of the {role}?", "For each {column} of the {role}, count the {many}.",
        "Show each {column} of the {role} with the number of {many}.", "Count the {many} per {column} of the {role}."), weight=3),
    Form("join_group_aggregate", _join_group_aggregate, (
        "What is the {aggregate} of {many} for each {column} of the {role}?",
        "For each {column} of the {role}, show the {aggregate} of {many}.",
        "Show the {aggregate} of {many} for each {column} of the {role}.",
        "Give the {aggregate} of {many} per {column} of the {role}."), weight=2),
    Form("join_each", _join_each, (
        "For every {one} that has {many}, give the {label} and the number of {many}.",
        "Show the {label} of each {one} with {many} and the number of {many}.",
        "For each {one} with {many}, show the {label} and the number of {many}.",
        "List the {label} and the number of {many} for each {one} with {many}."), weight=4),
    Form("join_top", _join_top, (
        "Which {one} has the most {many}? Show the {label}.", "Show the {label} of the {one} with the most {many}.",
        "What is the {label} of the {one} with the most {many}?", "Find the {label} of the {one} that has the most {many}."), weight=3),
    Form("join_top_total", _join_top_total, (
        "Which {one} has the {best} of {many}? Show the {label}.", "Show the {label} of the {one} with the {best} of {many}.",
        "What is the {label} of the {one} with the {best} of {many}?", "Find the {label} of the {one} with the {best} of its {many}."),
        weight=2),
    Form("join_having", _join_having, (
        "Show the {label} of {parents} with {number} {many}.", "List the {label} of {parents} that have {number} {many}.",
        "Find the {label} of each {one} with {number} {many}.", "Which {parents} have {number} {many}? Show the {label}."), weight=3),
    Form("without_any", _without_any, (
        "Show the {column} of {parents} without any {many}.", "List the {column} of {parents} that have no {many}.",
        "Find the {column} of {parents} with no {many}.", "Which {parents} have no {many}? Show the {column}."), weight=3),
    Form("with_some", _with_some, (
        "Show the {column} of {parents} that have at least one {child} with {noun}.",
        "List the {column} of {parents} with at least one {child} with {noun}.",
        "Find the {column} of {parents} that have some {child} with {noun}.",
        "Which {parents} have at least one {child} with {noun}? Show the {column}."), weight=3),
    Form("two_joins", _two_joins, LIST_TEMPLATES, weight=2),
    Form("join_where_both", _join_where_both, COUNT_TEMPLATES, weight=2),
    Form("join_top_one", _join_top_one, (
        "Show the {theirs} of the {role} of the {one} with the {best}.", "What is the {theirs} of the {role} of the {one} with the {best}?",
        "Which {one} has the {best}? Show the {theirs} of the {role}.", "Find the {theirs} of the {role} of the {one} that has the {best}."),
        weight=2),
)  # fmt: skip
