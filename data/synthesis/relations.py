"""Question forms about how rows of several tables belong together: joined lists, parents by their children, absence."""

from __future__ import annotations

from dataclasses import replace

from data.synthesis import conditions
from data.synthesis.compose import Draft, Draw, Edge, Form, called, counted
from data.synthesis.conditions import NoFit
from data.synthesis.query import Query
from data.synthesis.schema import Column, Meaning
from data.synthesis.words import plural

_SHOWN = (Meaning.NAME, Meaning.CATEGORY, Meaning.LEVEL, Meaning.QUANTITY, Meaning.DATE, Meaning.KEY)


def _names(edge: Edge, draw: Draw, count: int = 1) -> list[Column]:
    """Columns that show which parent is meant."""
    shown = [*edge.parent.title]
    if not shown:
        raise NoFit
    more = [c for c in edge.parent.of(*_SHOWN) if c not in shown]
    return shown + draw.rng.sample(more, min(len(more), count - 1))


def _children(draw: Draw) -> tuple[Edge, str]:
    """A reference read from its parent, with the plural for the child rows of one parent: "invoices".

    Rows of a link table stand for the rows at its other end; one that links rows of one table goes by its own name.
    """
    edge = draw.edge()
    first, *others = [e for e in draw.edges if e.child is edge.child]
    if edge.child.is_link and edge.alone and others:
        return edge, plural(next(e for e in (first, *others) if e is not edge).role)
    if not edge.alone and not (edge.child.is_link and edge is first):
        raise NoFit
    return edge, draw.many(edge.child)


def _joined_list(draw: Draw) -> Draft:
    """Something about each child and about its parent."""
    edge = draw.edge(links=False)
    mine = draw.shown(edge.child, draw.one((1, 1, 2)))
    theirs = _names(edge, draw)
    if draw.rng.random() < 0.3:
        theirs = [draw.column(edge.parent, Meaning.NAME, Meaning.CATEGORY, Meaning.LEVEL)]
    phrase = draw.phrase(edge.child, "plain plain own", mine)
    query = Query(tuple(c.ref for c in (*mine, *theirs)), edge.child.name, (edge.join,), phrase.where)
    slots = {"mine": called(draw, mine), "theirs": called(draw, theirs), "one": edge.child.singular, "np": phrase.words,
             "role": edge.role}  # fmt: skip
    return Draft(query, slots, phrase.sorts, "joined_list_where" if phrase.where else "joined_list")


def _parents_of(draw: Draw) -> Draft:
    """Which parents have children of some kind, how many, or something about them."""
    edge, many = _children(draw)
    if edge.child.is_link:
        raise NoFit
    found, _ = draw.condition(edge.child)
    shown = _names(edge, draw, draw.one((1, 1, 2)))
    inner = Query((edge.column.ref,), edge.child.name, where=(found.sql,)).sql
    nested = Query(tuple(c.ref for c in shown), edge.parent.name, where=(f"{edge.target.ref} IN ({inner})",))
    joined = replace(nested, table=edge.child.name, joins=(edge.join,), where=(found.sql,), distinct=True)
    slots = {"columns": called(draw, shown, many=True), "parents": edge.parent.plural, "child": edge.child.singular,
             "noun": found.noun, "np": many}  # fmt: skip
    unique = any(c.is_unique for c in shown)
    if draw.rng.random() < 0.2:
        query = Query((f"COUNT(DISTINCT {edge.column.ref})",), edge.child.name, where=(found.sql,))
        return Draft(query, slots, (found.sort,), "parents_counted", replace(nested, select=("COUNT(*)",)).sql)
    if unique and not draw.varies(0.4):
        return Draft(joined, slots, (found.sort,), twin=nested.sql)
    return Draft(nested, slots, (found.sort,), twin=joined.sql if unique else "")


def _without(draw: Draw) -> Draft:
    """Parents that have no child, or no child of some kind; by NOT IN, EXCEPT or an outer join."""
    edge, many = _children(draw)
    found = draw.condition(edge.child)[0] if draw.rng.random() < 0.4 and not edge.child.is_link else None
    shown = _names(edge, draw, draw.one((1, 1, 2)))
    inner = Query((edge.column.ref,), edge.child.name, where=(found.sql,) if found else ())
    query = Query(tuple(c.ref for c in shown), edge.parent.name, where=(f"{edge.target.ref} NOT IN ({inner.sql})",))
    slots = {"columns": called(draw, shown, many=True), "parents": edge.parent.plural,
             "np": f"{many} with {found.noun}" if found else many}  # fmt: skip
    sorts = (found.sort,) if found else ()
    left = replace(query, joins=(f"LEFT {edge.join_child}",), where=(f"{edge.column.ref} IS NULL",))
    if draw.rng.random() < 0.25:
        twin = "" if found else replace(left, select=("COUNT(*)",)).sql
        return Draft(replace(query, select=("COUNT(*)",)), slots, sorts, "without_counted", twin)
    if draw.varies(0.35) and any(c.is_unique for c in shown):
        second = Query(query.select, edge.child.name, (edge.join,), inner.where)
        return Draft(replace(query, where=(), then=("EXCEPT", second)), slots, sorts, twin=query.sql)
    if draw.varies(0.3) and not found:
        return Draft(left, slots, twin=query.sql)
    return Draft(query, slots, sorts, twin="" if found else left.sql)


def _per_parent(draw: Draw, several: bool = False) -> tuple[Query, dict[str, str], Edge, str]:
    """One group for each parent row that has children, and a number of them: their count, or a total or average.

    A parent without children is in no group, so the words never ask for few or none ("fewer than", "lowest total").
    """
    edge, many = _children(draw)
    shown = _names(edge, draw, draw.one((1, 1, 1, 2)))
    found = draw.condition(edge.child)[0] if draw.rng.random() < 0.15 and not edge.child.is_link else None
    where = (found.sql,) if found else ()
    query = Query(tuple(c.ref for c in shown), edge.child.name, (edge.join,), where, group=(edge.target.ref,))
    np = f"{many} with {found.noun}" if found else many
    columns = called(draw, shown, several)
    slots = {"columns": columns, "one": edge.parent.singular, "parents": edge.parent.plural, "np": np, "tail": "",
             "measure": f"number of {np}"}  # fmt: skip
    numbers = [c for c in edge.child.columns if c.is_number and not c.has_null]
    if not numbers or draw.rng.random() < 0.6:
        return query, slots, edge, "COUNT(*)"
    column = draw.one(numbers)
    adds = column.meaning is Meaning.QUANTITY and draw.rng.random() < 0.6
    words = column.measured(draw.rng)
    if words.startswith("total" if adds else "average"):
        raise NoFit
    of = "" if not found and edge.child.singular in words else f" of {np}"
    slots["measure"] = f"{'total' if adds else 'average'} {words}{of}"
    return query, slots, edge, f"{'SUM' if adds else 'AVG'}({column.number})"


def _each_parent(draw: Draw) -> Draft:
    query, slots, _, measure = _per_parent(draw)
    query = replace(query, select=(*query.select, measure))
    if draw.rng.random() < 0.25:
        return Draft(replace(query, order=measure, descending=True), slots, wording="each_parent_ordered")
    return Draft(query, slots)


def _top_parent(draw: Draw) -> Draft:
    count = draw.one((1, 1, 1, 2, 3))
    query, slots, _, measure = _per_parent(draw, several=count > 1)
    slots["best"] = f"most {slots['np']}" if measure == "COUNT(*)" else f"highest {slots['measure']}"
    query = replace(query, order=measure, descending=True, limit=count)
    if draw.rng.random() < 0.25:
        query = replace(query, select=(*query.select, measure))
        slots["tail"] = f" and the {slots['measure']}"
    slots["count"] = str(count)
    return Draft(query, slots, wording="top_parent" if count == 1 else "top_parent_many")


def _having_parent(draw: Draw) -> Draft:
    query, slots, edge, _ = _per_parent(draw, several=True)
    share = max(1, edge.child.rows // max(1, edge.parent.rows))
    tail, slots["number"] = counted(max(share, 2), 2 * share + 1, draw, few=False)
    if draw.rng.random() < 0.2:
        query = replace(query, select=(*query.select, "COUNT(*)"))
        slots["tail"] = f" and the number of {slots['np']}"
    return Draft(replace(query, having=f"COUNT(*) {tail}"), slots)


def _parent_of_top(draw: Draw) -> Draft:
    """The child row with the highest value, and something about its parent."""
    edge = draw.edge(links=False)
    column = draw.ordered(edge.child)
    word, descending = draw.superlative(column)
    shown = _names(edge, draw) if draw.rng.random() < 0.7 else draw.shown(edge.parent, 1)
    phrase = draw.phrase(edge.child, "plain plain own", (column,))
    query = Query(tuple(c.ref for c in shown), edge.child.name, (edge.join,), phrase.where)
    query = replace(query, order=column.number, descending=descending, limit=1)
    slots = {"theirs": called(draw, shown), "role": edge.role, "one": edge.child.singular, "np": phrase.words,
             "best": f"{word} {column.measured(draw.rng)}"}  # fmt: skip
    return Draft(query, slots, phrase.sorts, "parent_of_top_where" if phrase.where else "parent_of_top")


def _through(draw: Draw) -> Draft:
    """Rows that a third table connects with a row given by a condition."""
    edge = draw.edge()
    far = draw.one([e for e in draw.up(edge.child) if e.parent is not edge.parent])
    found, column = draw.condition(far.parent)
    shown = _names(edge, draw, draw.one((1, 1, 2)))
    query = Query(tuple(c.ref for c in shown), edge.child.name, (edge.join, far.join), (found.sql,), distinct=True)
    named = found.sort == "equal" and column in far.parent.title and len(far.parent.title) == 1
    if edge.child.is_link:
        words = (
            f"linked to {f'the {far.role} {found.value}' if named else f'at least one {far.role} with {found.noun}'}"
        )
    else:
        condition = f"is {found.value}" if named else f"has {found.noun}"
        words = f"that have {draw.many(edge.child)} whose {far.role} {condition}"
    slots = {"columns": called(draw, shown, many=True), "np": f"{plural(edge.role)} {words}"}
    if draw.rng.random() < 0.2:
        query = replace(query, select=(f"COUNT(DISTINCT {edge.column.ref})",), distinct=False)
        return Draft(query, slots, (found.sort,), "count")
    if not any(c.is_unique for c in shown):
        raise NoFit
    return Draft(query, slots, (found.sort,), "list")


def _both_children(draw: Draw) -> Draft:
    """Parents that have children of one kind and of another, or of one but not of the other."""
    edge, many = _children(draw)
    if edge.child.is_link:
        raise NoFit
    column = draw.column(edge.child, Meaning.CATEGORY, Meaning.DATE, Meaning.LEVEL, nullable=False)
    first, second = conditions.draw(draw.rng, column), conditions.draw(draw.rng, column)
    shown = _names(edge, draw)
    if (
        first.sql == second.sql
        or not {first.sort, second.sort} <= {"equal", "year", "compare"}
        or not any(c.is_unique for c in shown)
    ):
        raise NoFit
    select = tuple(c.ref for c in shown)
    left, right = (Query(select, edge.child.name, (edge.join,), (found.sql,)) for found in (first, second))
    inner = [Query((edge.column.ref,), edge.child.name, where=(found.sql,)).sql for found in (first, second)]
    operator, also, wording = draw.one((("INTERSECT", "IN", "children_both"), ("EXCEPT", "NOT IN", "children_but")))
    where = (f"{edge.target.ref} IN ({inner[0]})", f"{edge.target.ref} {also} ({inner[1]})")
    twin = Query(select, edge.parent.name, where=where)
    slots = {"columns": called(draw, shown, many=True), "parents": edge.parent.plural, "child": edge.child.singular,
             "np": many, "first": first.noun, "second": second.noun}  # fmt: skip
    return Draft(replace(left, then=(operator, right)), slots, (first.sort, second.sort), wording, twin.sql)


RELATIONS = (
    Form("joined_list", _joined_list, 4),
    Form("parents_of", _parents_of, 3),
    Form("without", _without, 3),
    Form("each_parent", _each_parent, 3),
    Form("top_parent", _top_parent, 4),
    Form("having_parent", _having_parent, 3),
    Form("parent_of_top", _parent_of_top, 2),
    Form("through", _through, 3),
    Form("both_children", _both_children, 2),
)
