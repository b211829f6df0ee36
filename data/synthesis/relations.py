"""Question forms about how rows of several tables belong together: joined lists, parents by their children, absence."""

from __future__ import annotations

from dataclasses import replace

from data.synthesis import conditions
from data.synthesis.compose import SHOWN, Draft, Draw, Edge, called, counted, refs
from data.synthesis.conditions import NoFit
from data.synthesis.query import Query, identifier
from data.synthesis.schema import Column, Meaning
from data.synthesis.words import plural


def _names(edge: Edge, draw: Draw, count: int = 1) -> list[Column]:
    """Columns that show which parent is meant."""
    shown = [*edge.parent.title]
    if not shown:
        raise NoFit
    more = [c for c in edge.parent.of(*SHOWN) if c not in shown and not c.is_clock]
    return shown + draw.rng.sample(more, min(len(more), count - 1))


def _children(draw: Draw) -> tuple[Edge, str]:
    """A reference read from its parent, with the plural for the child rows of one parent: "invoices".

    Rows of a link table stand for the rows at its other end; one that links rows of one table goes by its own name.
    """
    edge = draw.edge()
    if edge.column.is_unique:  # one child for each parent: nobody would count them
        raise NoFit
    first, *others = [e for e in draw.edges if e.child is edge.child]
    if edge.child.is_link and edge.alone and others:
        return edge, plural(next(e for e in (first, *others) if e is not edge).role)
    if not edge.alone and not (edge.child.is_link and edge is first):
        raise NoFit
    return edge, draw.many(edge.child)


def _joined_list(draw: Draw) -> Draft:
    """Something about each child and about its parent; of a link, about its two parents."""
    edge = draw.edge()
    theirs = _names(edge, draw)
    if edge.child.is_link:
        other = draw.one([e for e in draw.up(edge.child) if e.parent is not edge.parent])
        mine = _names(other, draw)
        query = Query(refs((*mine, *theirs)), edge.child.name, (other.join, edge.join))
        slots = {"mine": called(draw, mine), "theirs": called(draw, theirs), "one": other.role, "role": edge.role}
        return Draft(query, slots, wording="linked_list")
    if draw.chance(0.3):
        theirs = [draw.column(edge.parent, Meaning.NAME, Meaning.CATEGORY, Meaning.LEVEL)]
    mine = draw.shown(edge.child, draw.one((1, 1, 2)))
    phrase = draw.phrase(edge.child, "plain plain own own average", mine)
    query = Query(refs((*mine, *theirs)), edge.child.name, (edge.join,), phrase.where)
    slots = {"mine": called(draw, mine), "theirs": called(draw, theirs), "one": edge.child.singular, "role": edge.role}
    if phrase.where or draw.chance(0.6):
        return phrase.draft(query, "joined_list_where" if phrase.where else "joined_list", **slots)
    if draw.chance(0.5):  # only the parents, in the order of their children
        query, mine = replace(query, select=refs(theirs)), []
    column, words, descending = draw.sorting(edge.child)
    query = replace(query, order=column.number, descending=descending)
    return phrase.draft(query, "joined_list_ordered" if mine else "parents_ordered", **slots, **words)


def _parents_of(draw: Draw) -> Draft:
    """Which parents have children of some kind, how many, or something about them."""
    edge, many = _children(draw)
    if edge.child.is_link:
        raise NoFit
    found, _ = draw.condition(edge.child)
    shown = _names(edge, draw, draw.one((1, 1, 2)))
    inner = Query((edge.column.ref,), edge.child.name, where=(found.sql,)).sql
    nested = Query(refs(shown), edge.parent.name, where=(f"{edge.target.ref} IN ({inner})",))
    slots = {"columns": called(draw, shown, many=True), "parents": edge.parent.plural, "child": edge.child.singular,
             "noun": found.noun, "np": many}  # fmt: skip
    if draw.chance(0.2):
        query = Query((f"COUNT(DISTINCT {edge.column.ref})",), edge.child.name, where=(found.sql,))
        return Draft(query, slots, (found.sort,), "parents_counted", replace(nested, select=("COUNT(*)",)).sql)
    query = replace(nested, table=edge.child.name, joins=(edge.join,), where=(found.sql,), distinct=True)
    return Draft(query, slots, (found.sort,), twin=nested.sql)


def _without(draw: Draw) -> Draft:
    """Parents that have no child, or no child of some kind.

    The gold has NOT IN, but EXCEPT where the words say "except", and an outer join where no child "refers to" a parent.
    """
    edge, many = _children(draw)
    found = draw.condition(edge.child)[0] if draw.chance(0.4) and not edge.child.is_link else None
    sorts = (found.sort,) if found else ()
    shown = [edge.target] if draw.chance(0.2) else _names(edge, draw, draw.one((1, 1, 2)))
    inner = edge.children([edge.target], (found.sql,) if found else ())
    query = Query(refs(shown), edge.parent.name, where=(f"{edge.target.ref} NOT IN ({inner.sql})",))
    slots = {"columns": called(draw, shown, many=True), "parents": edge.parent.plural,
             "np": f"{many} with {found.noun}" if found else many}  # fmt: skip
    how = draw.rng.random()
    if how < 0.2:
        return Draft(replace(query, select=("COUNT(*)",)), slots, sorts, "without_counted")
    if how < 0.35:
        function, word, column = draw.aggregate(edge.parent)
        slots["measure"] = f"{word} {column.measured(draw.rng)}"
        select = (f"{function}({column.number})",)
        if draw.chance(0.5):
            return Draft(replace(query, select=select), slots, sorts, "without_measured")
        where = (query.where[0].replace(" NOT IN ", " IN "),)
        return Draft(replace(query, select=select, where=where), slots, sorts, "with_measured")
    if how < 0.6:
        split = replace(query, where=(), then=("EXCEPT", edge.children(shown, inner.where)))
        return Draft(split, slots, sorts, "without_except", query.sql)
    if how < 0.75 and not found and not edge.child.is_link:
        slots["child"] = edge.child.singular
        join = f"LEFT JOIN {identifier(edge.child.name)} ON {edge.column.ref} = {edge.target.ref}"
        left = replace(query, joins=(join,), where=(f"{edge.column.ref} IS NULL",))
        return Draft(left, slots, sorts, "without_match", query.sql)
    return Draft(query, slots, sorts)


def _per_parent(draw: Draw, several: bool = False) -> tuple[Query, dict[str, str], Edge, str]:
    """One group for each parent row that has children, and a number of them: their count, or a total or average.

    A parent without children is in no group, so the words never ask for few or none ("fewer than", "lowest total").
    """
    edge, many = _children(draw)
    shown = _names(edge, draw, draw.one((1, 1, 1, 2)))
    found = draw.condition(edge.child)[0] if draw.chance(0.15) and not edge.child.is_link else None
    where = (found.sql,) if found else ()
    query = Query(refs(shown), edge.child.name, (edge.join,), where, group=(edge.target.ref,))
    np = f"{many} with {found.noun}" if found else many
    slots = {"columns": called(draw, shown, several), "one": edge.parent.singular, "parents": edge.parent.plural,
             "np": np, "tail": "", "best": f"most {np}"}  # fmt: skip
    such = f"such {many}" if found else many
    slots["measure"] = f"number of {such}"
    numbers = [c for c in edge.child.columns if c.is_number and not c.has_null]
    if not numbers or draw.chance(0.6):
        return query, slots, edge, "COUNT(*)"
    column = draw.one(numbers)
    adds = column.meaning is Meaning.QUANTITY and draw.chance(0.6)
    words = column.measured(draw.rng)
    if words.startswith("total" if adds else "average"):
        raise NoFit
    slots["measure"] = f"{'total' if adds else 'average'} {words}"
    slots["best"] = f"highest {slots['measure']} of {np}"
    if found or edge.child.singular not in words:
        slots["measure"] += f" of {such}"
    return query, slots, edge, f"{'SUM' if adds else 'AVG'}({column.number})"


def _each_parent(draw: Draw) -> Draft:
    query, slots, _, measure = _per_parent(draw)
    query = replace(query, select=(*query.select, measure))
    if draw.chance(0.25):
        return Draft(replace(query, order=measure, descending=True), slots, wording="each_parent_ordered")
    return Draft(query, slots)


def _top_parent(draw: Draw) -> Draft:
    count = draw.one((1, 1, 1, 2, 3))
    query, slots, _, measure = _per_parent(draw, several=count > 1)
    query = replace(query, order=measure, descending=True, limit=count)
    if draw.chance(0.25):
        query = replace(query, select=(*query.select, measure))
        slots["tail"] = f" and the {slots['measure']}"
    slots["count"] = str(count)
    return Draft(query, slots, wording="top_parent" if count == 1 else "top_parent_many")


def _having_parent(draw: Draw) -> Draft:
    query, slots, edge, measure = _per_parent(draw, several=True)
    if measure != "COUNT(*)":
        raise NoFit
    share = max(1, edge.child.rows // max(1, edge.parent.rows))
    tail, slots["number"] = counted(max(share, 2), 2 * share + 1, draw, few=False)
    if draw.chance(0.2):
        query = replace(query, select=(*query.select, "COUNT(*)"))
        slots["tail"] = f" and the {slots['measure']}"
    return Draft(replace(query, having=f"COUNT(*) {tail}"), slots)


def _parent_of_top(draw: Draw) -> Draft:
    """The child row with the highest value, and something about its parent."""
    edge = draw.edge(links=False)
    column = draw.ordered(edge.child)
    word, descending = draw.superlative(column)
    shown = _names(edge, draw) if draw.chance(0.7) else draw.shown(edge.parent, 1)
    phrase = draw.phrase(edge.child, "plain plain own", (column,))
    joined = Query(refs(shown), edge.child.name, (edge.join,), phrase.where)
    query = replace(joined, order=column.number, descending=descending, limit=1)
    key = column.measured(draw.rng)
    slots = {"theirs": called(draw, shown), "role": edge.role, "one": edge.child.singular, "best": f"{word} {key}"}
    if column.is_number and not phrase.where and draw.chance(0.2):
        function, slots["best"] = ("MAX", f"maximum {key}") if descending else ("MIN", f"minimum {key}")
        inner = Query((f"{function}({column.number})",), edge.child.name).sql
        return phrase.draft(replace(joined, where=(f"{column.number} = ({inner})",)), "parent_of_top", **slots)
    return phrase.draft(query, "parent_of_top_where" if phrase.where else "parent_of_top", **slots)


def _through(draw: Draw) -> Draft:
    """Rows that a third table connects with a row given by a condition."""
    edge = draw.edge()
    far = draw.one([e for e in draw.up(edge.child) if e.parent is not edge.parent])
    found, column = draw.condition(far.parent)
    shown = _names(edge, draw, draw.one((1, 1, 2)))
    query = Query(refs(shown), edge.child.name, (edge.join, far.join), (found.sql,), distinct=True)
    named = found.sort == "equal" and column in far.parent.title and len(far.parent.title) == 1
    if edge.child.is_link:
        words = f"linked to {f'the {far.role} {found.value}' if named else f'a {far.role} with {found.noun}'}"
    else:
        condition = f"is {found.value}" if named else f"has {found.noun}"
        words = f"that have {draw.many(edge.child)} whose {far.role} {condition}"
    slots = {"columns": called(draw, shown, many=True), "np": f"{plural(edge.role)} {words}"}
    if draw.chance(0.2):
        query = replace(query, select=(f"COUNT(DISTINCT {edge.column.ref})",), distinct=False)
        return Draft(query, slots, (found.sort,), "count")
    if not any(c.is_unique for c in shown):
        raise NoFit
    return Draft(query, slots, (found.sort,), "list")


def _both_children(draw: Draw) -> Draft:
    """Parents that have children of one kind and of another, or of one but not of the other.

    The two kinds are rows of one table that meet different conditions, or rows of two tables.
    """
    edge, many = _children(draw)
    other, others = _children(draw)
    shown = [edge.target] if draw.chance(0.2) else _names(edge, draw, draw.one((1, 1, 2)))
    slots = {"columns": called(draw, shown, many=True), "parents": edge.parent.plural, "child": edge.child.singular}
    ends, kind = (edge, other), "two"
    where: list[tuple[str, ...]] = [(), ()]
    sorts: tuple[str, ...] = ()
    if edge.parent is other.parent and many != others:
        slots |= {"first": many, "second": others}
    elif edge.child.is_link:
        raise NoFit
    else:
        column = draw.column(edge.child, Meaning.CATEGORY, Meaning.DATE, Meaning.LEVEL, nullable=False)
        first, second = conditions.draw(draw.rng, column), conditions.draw(draw.rng, column)
        sorts = (first.sort, second.sort)
        if first.sql == second.sql or not set(sorts) <= {"equal", "year", "compare"}:
            raise NoFit
        ends, kind, where = (edge, edge), "children", [(first.sql,), (second.sql,)]
        slots |= {"np": many, "first": first.noun, "second": second.noun}
    left, right = (e.children(shown, w) for e, w in zip(ends, where, strict=True))
    inner = [e.children([e.target], w).sql for e, w in zip(ends, where, strict=True)]
    operator, also, wording = draw.one((("INTERSECT", "IN", "both"), ("EXCEPT", "NOT IN", "but")))
    tests = (f"{edge.target.ref} IN ({inner[0]})", f"{ends[1].target.ref} {also} ({inner[1]})")
    twin = Query(refs(shown), edge.parent.name, where=tests)
    return Draft(replace(left, then=(operator, right)), slots, sorts, f"{kind}_{wording}", twin.sql)


RELATIONS = (_joined_list, _parents_of, _without, _each_parent, _top_parent, _having_parent, _parent_of_top, _through,
             _both_children)  # fmt: skip
