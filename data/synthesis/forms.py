"""Question forms about the rows of one noun phrase: counts, lists, aggregates, groups, orders, comparisons.

The phrase may need other tables ("claims whose policy has status 'open'"), so every form also exists with joins.
"""

from __future__ import annotations

from dataclasses import replace

from data.synthesis import conditions
from data.synthesis.compose import Draft, Draw, Form, Phrase, called, counted
from data.synthesis.conditions import NoFit, date_parts, threshold
from data.synthesis.query import Query, literal
from data.synthesis.schema import Column, Meaning, Stored, Table
from data.synthesis.words import listed, plural


def _all(phrase: Phrase, draw: Draw) -> str:
    """The phrase in a place where plain "customers" would sound unfinished: "all customers"."""
    return phrase.words if phrase.where else draw.one((f"all {phrase.words}", f"the {phrase.words}"))


def _count(draw: Draw) -> Draft:
    phrase = draw.phrase(draw.table())
    return Draft(phrase.query("COUNT(*)"), {"np": phrase.words}, phrase.sorts)


def _list(draw: Draw) -> Draft:
    table = draw.table()
    phrase = draw.phrase(table)
    shown = draw.shown(table, draw.one((1, 1, 1, 2, 2, 3, 4)), phrase.columns)
    query = phrase.query(*(column.ref for column in shown))
    return Draft(query, {"columns": called(draw, shown, many=True), "np": _all(phrase, draw)}, phrase.sorts)


def _everything(draw: Draw) -> Draft:
    phrase = draw.phrase(draw.table(), "own two own")
    return Draft(phrase.query("*"), {"np": phrase.words}, phrase.sorts)


def _lookup(draw: Draw) -> Draft:
    """Something about the one row that a name points at."""
    table = draw.table()
    if not table.title or table.title[0].meaning is Meaning.KEY:
        raise NoFit
    where: tuple[str, ...]
    if len(table.title) == 2:
        values = draw.one(list(zip(*(column.values for column in table.title), strict=False)))
        where = tuple(f"{c.ref} = {literal(v)}" for c, v in zip(table.title, values, strict=True))
        one = f"{table.singular} {draw.one(('', 'named '))}{values[0]} {values[1]}"
    else:
        found = conditions.equal(draw.rng, table.title[0])
        where = (found.sql,)
        one = f"{table.singular} {draw.one((found.value, f'with {found.noun}', f'whose {found.clause}'))}"
    targets = draw.shown(table, draw.one((1, 1, 2, 3)), without=table.title)
    slots = {"columns": called(draw, targets), "is": "is" if len(targets) == 1 else "are", "one": one}
    return Draft(Query(tuple(c.ref for c in targets), table.name, where=where), slots, ("equal",))


def _aggregate(draw: Draw) -> Draft:
    """One to three aggregates, of one column or of two, sometimes with the count."""
    table = draw.table()
    phrase = draw.phrase(table)
    function, word, column = draw.aggregate(table, phrase.columns)
    select, words, wording = [f"{function}({column.number})"], [f"{word} {column.measured(draw.rng)}"], "aggregate"
    extra = draw.rng.random()
    if extra < 0.3 and column.is_number:
        names = {"AVG": "average", "MIN": "minimum", "MAX": "maximum"}
        functions = draw.one((("MAX", "MIN"), ("MIN", "MAX"), ("AVG", "MIN", "MAX"), ("AVG", "MAX")))
        select = [f"{name}({column.number})" for name in functions]
        words = [f"{listed([names[name] for name in functions])} {column.measured(draw.rng)}"]
        wording = "aggregates"
    elif extra < 0.42:
        other, second, target = draw.aggregate(table, (*phrase.columns, column))
        select.append(f"{other}({target.number})")
        words.append(f"{second} {target.measured(draw.rng)}")
        wording = "aggregates"
    elif extra < 0.48 and draw.wide:
        select.insert(0, "COUNT(*)")
        return Draft(
            phrase.query(*select), {"aggregate": words[0], "np": phrase.words}, phrase.sorts, "aggregate_counted"
        )
    return Draft(phrase.query(*select), {"aggregate": listed(words), "np": _all(phrase, draw)}, phrase.sorts, wording)


def _distinct(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Meaning.CATEGORY, nullable=False)
    phrase = draw.phrase(table, "plain own two parent", (column,))
    query = replace(phrase.query(column.ref), distinct=True)
    return Draft(query, {"columns": plural(draw.one(column.words)), "np": phrase.words}, phrase.sorts)


def _count_distinct(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Meaning.CATEGORY, Meaning.REFERENCE, nullable=False)
    words = column.role if column.meaning is Meaning.REFERENCE else draw.one(column.words)
    phrase = draw.phrase(table, "plain plain own parent", (column,))
    query = phrase.query(f"COUNT(DISTINCT {column.ref})")
    return Draft(query, {"columns": plural(words), "np": phrase.words}, phrase.sorts)


def _grouped(draw: Draw) -> tuple[Table, Column, str, Query, Phrase]:
    """A table, a column to group its rows by with its words, and the query and phrase of the rows.

    The column is most often one of the table's own, else one of a row it refers to.
    """
    table = draw.table()
    edges = draw.up(table)
    if edges and draw.rng.random() < 0.4:
        edge = draw.one(edges)
        column = draw.column(edge.parent, Meaning.CATEGORY, Meaning.CATEGORY, Meaning.NAME, nullable=False)
        words = draw.one(column.words)
        if column.meaning is Meaning.NAME:
            if column not in edge.parent.title or not column.is_unique:
                raise NoFit
            words = draw.one((edge.role, words if edge.role in words else f"{edge.role} {words}"))
        elif edge.role not in words:
            words = f"{edge.role} {words}"
        phrase = Phrase(draw.many(table), table, joins=(edge.join,))
    else:
        column = draw.column(table, Meaning.CATEGORY, nullable=False)
        words, phrase = draw.one(column.words), draw.phrase(table, "plain plain plain own", (column,))
    return table, column, words, replace(phrase.query(column.ref), group=(column.ref,)), phrase


def _group(draw: Draw) -> Draft:
    """A number for each group: a count or an aggregate, of all rows or of some, in any order or by that number."""
    table, column, words, query, phrase = _grouped(draw)
    slots, wording = {"column": words, "np": phrase.words, "measure": "number"}, "group"
    measures = ["COUNT(*)"]
    if draw.rng.random() < 0.5:
        function, word, target = draw.aggregate(table, (column, *phrase.columns))
        measures, wording = [f"{function}({target.number})"], "group_measured"
        slots["measure"] = f"{word} {target.measured(draw.rng)}"
    how = draw.rng.random()
    if how < 0.3:
        descending = how < 0.2
        slots["direction"] = "from highest to lowest" if descending else "from lowest to highest"
        query = replace(query, order=measures[0], descending=descending)
        wording = "group_ordered"
    elif how < 0.45 and wording == "group_measured":
        measures.insert(0, "COUNT(*)")
        wording = "group_both"
    elif how < 0.6 and draw.wide and not query.joins and not query.where:
        second = draw.column(table, Meaning.CATEGORY, nullable=False, without=(column,))
        query = replace(query, select=(column.ref, second.ref), group=(column.ref, second.ref))
        slots["column"] = f"combination of {words} and {draw.one(second.words)}"
    return Draft(replace(query, select=(*query.select, *measures)), slots, phrase.sorts, wording)


def _group_having(draw: Draw) -> Draft:
    """The groups that are large enough, or whose average is."""
    table, column, words, query, phrase = _grouped(draw)
    slots = {"column": words, "columns": plural(words), "np": phrase.words, "tail": ""}
    if draw.rng.random() < 0.25:
        query = replace(query, select=(*query.select, "COUNT(*)"))
        slots["tail"] = f" Show the number of {draw.many(table)} as well."
    if draw.rng.random() < 0.65:
        share = max(1, table.rows // max(1, len(set(column.values))))
        sql, slots["number"] = counted(max(2, share // 2), max(3, share * 3 // 2), draw)
        return Draft(replace(query, having=f"COUNT(*) {sql}"), slots, phrase.sorts)
    target = draw.one([c for c in table.columns if c.is_number and not c.has_null])
    limit = literal(threshold(target, draw.rng.uniform(0.4, 0.65)))
    operator, word = draw.one(((">", "above"), ("<", "below"), (">", "greater than")))
    slots |= {"measure": f"average {target.measured(draw.rng)}", "number": f"{word} {limit}"}
    query = replace(query, having=f"AVG({target.number}) {operator} {limit}")
    return Draft(query, slots, phrase.sorts, "group_having_average")


def _group_top(draw: Draw) -> Draft:
    """The most frequent group, or the ones with the highest average or total."""
    table, column, words, query, phrase = _grouped(draw)
    word, descending = draw.one((("most", True), ("most", True), ("fewest", False)))
    measure, best = "COUNT(*)", f"{word} {phrase.words}"
    if draw.rng.random() < 0.35:
        function, name, target = draw.aggregate(table, (column,))
        if function not in ("AVG", "SUM") or target.has_null:
            raise NoFit
        measure = f"{function}({target.number})"
        best = f"{'highest' if descending else 'lowest'} {name} {target.measured(draw.rng)} of {phrase.words}"
    limit = draw.one((1, 1, 1, 2, 3))
    slots = {"column": words, "columns": plural(words), "best": best, "count": str(limit), "tail": ""}
    if draw.rng.random() < 0.3:
        query = replace(query, select=(*query.select, measure))
        slots["tail"] = " Show the number as well." if measure == "COUNT(*)" else " Show that value as well."
    query = replace(query, order=measure, descending=descending, limit=limit)
    return Draft(query, slots, phrase.sorts, "group_top" if limit == 1 else "group_top_many")


def _year_group(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Meaning.DATE, nullable=False)
    year, words = date_parts(column)[1], draw.one(column.words)
    if not year:
        raise NoFit
    unit = words if column.stored is Stored.YEAR else f"year of the {words}"
    slots = {"column": unit, "np": draw.many(table)}
    return Draft(Query((year, "COUNT(*)"), table.name, group=(year,)), slots, wording="group")


def _order(draw: Draw) -> Draft:
    table = draw.table()
    phrase = draw.phrase(table, "plain plain own parent")
    names = [c for c in table.title if c.meaning is Meaning.NAME]
    column = draw.one(names) if names and draw.rng.random() < 0.3 else draw.ordered(table, phrase.columns)
    shown = draw.shown(table, draw.one((1, 1, 2, 3)), phrase.columns)
    descending = draw.rng.random() < 0.5
    direction = draw.one(("in descending order",) if descending else ("in ascending order",))
    if column.meaning is Meaning.DATE and draw.rng.random() < 0.6:
        direction = "from latest to earliest" if descending else "from earliest to latest"
    elif column.is_number and draw.rng.random() < 0.6:
        direction = "from highest to lowest" if descending else "from lowest to highest"
    elif column in names:
        direction = "in reverse alphabetical order" if descending else "in alphabetical order"
    query = replace(phrase.query(*(c.ref for c in shown)), order=column.number, descending=descending)
    slots = {"columns": called(draw, shown, many=True), "key": column.measured(draw.rng), "direction": direction}
    return Draft(query, slots | {"np": _all(phrase, draw)}, phrase.sorts)


def _top(draw: Draw) -> Draft:
    """The rows with the highest or lowest value, by ORDER BY or by comparing with MAX."""
    table = draw.table()
    phrase = draw.phrase(table, "plain plain plain own parent own")
    column = draw.ordered(table, phrase.columns)
    word, descending = draw.superlative(column)
    count = draw.one((1, 1, 1, 2, 3, 5))
    shown = draw.shown(table, draw.one((1, 1, 2, 3)), (column, *phrase.columns))
    if draw.rng.random() < 0.15:
        shown.append(column)
    query = replace(phrase.query(*(c.ref for c in shown)), order=column.number, descending=descending, limit=count)
    best = f"{word} {column.measured(draw.rng)}"
    slots = {"columns": called(draw, shown, many=count > 1), "one": table.singular, "best": best, "np": phrase.words,
             "count": str(count)}  # fmt: skip
    if count > 1:
        return Draft(query, slots, phrase.sorts, "top_many_where" if phrase.where else "top_many")
    inner = phrase.query(f"{'MAX' if descending else 'MIN'}({column.number})").sql
    twin = replace(query, order="", limit=0, where=(*query.where, f"{column.number} = ({inner})"))
    wording = "top_where" if phrase.where else "top"
    if draw.varies(0.25):
        return Draft(twin, slots, phrase.sorts, wording, query.sql)
    return Draft(query, slots, phrase.sorts, wording, twin.sql)


def _share(draw: Draw) -> Draft:
    """What percentage of rows meet a condition, or how many more meet one than another."""
    table = draw.table()
    phrase = draw.phrase(table, "plain plain own parent")
    meanings = (Meaning.CATEGORY, Meaning.FLAG, Meaning.QUANTITY, Meaning.LEVEL)
    column = draw.column(table, *meanings, nullable=False, without=phrase.columns)
    found = conditions.draw(draw.rng, column)
    slots = {
        "np": phrase.words,
        "all": _all(phrase, draw),
        "verb": f"are {found.being}" if found.being else f"have {found.noun}",
    }
    if found.sort == "equal" and column.meaning is Meaning.CATEGORY and not phrase.where and draw.rng.random() < 0.4:
        other = conditions.equal(draw.rng, column)
        sums = [f"SUM(CASE WHEN {each.sql} THEN 1 ELSE 0 END)" for each in (found, other)]
        slots |= {"first": found.noun, "second": other.noun}
        return Draft(phrase.query(" - ".join(sums)), slots, ("equal", "equal"), "difference")
    select = f"CAST(SUM(CASE WHEN {found.sql} THEN 1 ELSE 0 END) AS REAL) * 100 / COUNT(*)"
    return Draft(phrase.query(select), slots, (*phrase.sorts, found.sort), "share_where" if phrase.where else "share")


def _days(draw: Draw) -> Draft:
    """The average number of days between two dates of a row."""
    table = draw.table()
    days = [c for c in table.of(Meaning.DATE) if c.stored in (Stored.DAY, Stored.TIME) and not c.has_null]
    first, second = draw.one(days), draw.one(days)
    pairs = [(x, y) for x, y in zip(first.values, second.values, strict=False) if x[:10] < y[:10]]
    if first is second or len(pairs) < len(first.values) * 0.9:
        raise NoFit
    function, word = draw.one((("AVG", "average"), ("MAX", "maximum"), ("MIN", "minimum")))
    phrase = draw.phrase(table, "plain own", (first, second))
    select = f"{function}(JULIANDAY({second.ref}) - JULIANDAY({first.ref}))"
    slots = {"np": _all(phrase, draw), "word": word, "first": draw.one(first.words), "second": draw.one(second.words)}
    return Draft(phrase.query(select), slots, phrase.sorts)


def _sets(draw: Draw) -> Draft:
    """Values of a category that rows of one kind have and rows of another kind have too, or have not."""
    table = draw.table()
    column = draw.column(table, Meaning.CATEGORY, nullable=False)
    first, second = (draw.condition(table, (column,))[0] for _ in range(2))
    if first.sql == second.sql or {first.sort, second.sort} & {"null", "not_null", "unequal"}:
        raise NoFit
    operator, wording = draw.one((("INTERSECT", "sets_both"), ("INTERSECT", "sets_both"), ("EXCEPT", "sets_but")))
    second_query = Query((column.ref,), table.name, where=(second.sql,))
    query = replace(second_query, where=(first.sql,), then=(operator, second_query))
    slots = {
        "columns": plural(draw.one(column.words)),
        "np": draw.many(table),
        "first": first.noun,
        "second": second.noun,
    }
    return Draft(query, slots, (first.sort, second.sort), wording)


def _like_best(draw: Draw) -> Draft:
    """Rows that share a category with the most frequent one, or with the row that has the highest value."""
    table = draw.table()
    column = draw.column(table, Meaning.CATEGORY, nullable=False)
    words, many = draw.one(column.words), draw.many(table)
    if draw.rng.random() < 0.5:
        inner = Query((column.ref,), table.name, group=(column.ref,), order="COUNT(*)", descending=True, limit=1)
        np = draw.one((f"{many} with the most common {words}", f"{many} whose {words} is the most frequent one"))
    else:
        best = draw.ordered(table, (column,))
        word, descending = draw.superlative(best)
        inner = Query((column.ref,), table.name, order=best.number, descending=descending, limit=1)
        np = f"{many} with the same {words} as the {table.singular} with the {word} {best.measured(draw.rng)}"
    where = (f"{column.ref} = ({inner.sql})",)
    if draw.rng.random() < 0.4:
        return Draft(Query(("COUNT(*)",), table.name, where=where), {"np": np}, ("nested",), "count")
    shown = draw.shown(table, draw.one((1, 2)), (column,))
    query = Query(tuple(c.ref for c in shown), table.name, where=where)
    return Draft(query, {"columns": called(draw, shown, many=True), "np": np}, ("nested",), "list")


FORMS = (
    Form("count", _count, 6),
    Form("list", _list, 11),
    Form("everything", _everything, 0.5),
    Form("lookup", _lookup, 3),
    Form("aggregate", _aggregate, 6),
    Form("distinct", _distinct, 1.5),
    Form("count_distinct", _count_distinct, 1.5),
    Form("group", _group, 6),
    Form("group_having", _group_having, 2),
    Form("group_top", _group_top, 3),
    Form("year_group", _year_group, 1),
    Form("order", _order, 3),
    Form("top", _top, 6),
    Form("share", _share, 1.5),
    Form("days", _days, 0.7),
    Form("sets", _sets, 1.5),
    Form("like_best", _like_best, 1.5),
)
