"""Question forms about the rows of one noun phrase: counts, lists, aggregates, groups, orders, comparisons.

The phrase may need other tables ("claims whose policy has status 'open'"), so every form also exists with joins.
"""

from __future__ import annotations

from dataclasses import replace

from data.synthesis import conditions
from data.synthesis.compose import Draft, Draw, Phrase, called, counted, refs
from data.synthesis.conditions import NoFit, date_parts, threshold
from data.synthesis.query import Query, literal
from data.synthesis.schema import Column, Meaning, Stored, Table
from data.synthesis.words import listed, plural


def _all(phrase: Phrase, draw: Draw) -> str:
    """The phrase in a place where plain "customers" would sound unfinished: "all customers"."""
    return phrase.words if phrase.where else draw.one((f"all {phrase.words}", f"the {phrase.words}"))


def _count(draw: Draw) -> Draft:
    phrase = draw.phrase(draw.table())
    return phrase.draft(phrase.query("COUNT(*)"))


def _list(draw: Draw) -> Draft:
    table = draw.table()
    phrase = draw.phrase(table)
    shown = draw.shown(table, draw.one((1, 1, 1, 2, 2, 3, 4)), phrase.columns)
    return phrase.draft(phrase.query(*shown), columns=called(draw, shown, many=True), np=_all(phrase, draw))


def _everything(draw: Draw) -> Draft:
    phrase = draw.phrase(draw.table(), "own two own")
    return phrase.draft(phrase.query("*"))


def _lookup(draw: Draw) -> Draft:
    """Something about the one row that a name points at."""
    table = draw.table()
    if not table.title or table.title[0].meaning is Meaning.KEY:
        raise NoFit
    where: tuple[str, ...]
    if len(table.title) == 2:
        where, name = draw.named(table)
        one = f"{table.singular} {draw.one(('', 'named '))}{name}"
    else:
        found = conditions.equal(draw.rng, table.title[0])
        where = (found.sql,)
        one = f"{table.singular} {draw.one((found.value, f'with {found.noun}', f'whose {found.clause}'))}"
    targets = draw.shown(table, draw.one((1, 1, 2, 3)), without=table.title)
    slots = {"columns": called(draw, targets), "is": "is" if len(targets) == 1 else "are", "one": one}
    return Draft(Query(refs(targets), table.name, where=where), slots, ("equal",))


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
    elif extra < 0.48:
        return phrase.draft(phrase.query("COUNT(*)", *select), "aggregate_counted", aggregate=words[0])
    return phrase.draft(phrase.query(*select), wording, aggregate=listed(words), np=_all(phrase, draw))


def _distinct(draw: Draw) -> Draft:
    table = draw.table()
    column = draw.column(table, Meaning.CATEGORY, nullable=False)
    phrase = draw.phrase(table, "plain own two parent", (column,))
    return phrase.draft(replace(phrase.query(column), distinct=True), columns=plural(draw.one(column.words)))


def _count_distinct(draw: Draw) -> Draft:
    """How many values of one column there are, or of two."""
    table = draw.table()
    chosen = [draw.column(table, Meaning.CATEGORY, Meaning.REFERENCE, nullable=False)]
    if draw.chance(0.15):
        chosen.append(draw.column(table, Meaning.CATEGORY, nullable=False, without=chosen))
    phrase = draw.phrase(table, "plain plain own parent", chosen)
    words = listed([plural(c.role if c.meaning is Meaning.REFERENCE else draw.one(c.words)) for c in chosen])
    wording = "count_distinct" if len(chosen) == 1 else "count_distinct_two"
    return phrase.draft(phrase.query(*(f"COUNT(DISTINCT {c.ref})" for c in chosen)), wording, columns=words)


def _grouped(draw: Draw) -> tuple[Table, Column, str, Query, Phrase]:
    """A table, a column to group its rows by with its words, and the query and phrase of the rows.

    The column is most often one of the table's own, else one of a row it refers to.
    """
    table = draw.table()
    edges = [edge for edge in draw.up(table) if not edge.column.is_unique]
    if edges and draw.chance(0.4):
        edge = draw.one(edges)
        column = draw.column(edge.parent, Meaning.CATEGORY, Meaning.CATEGORY, Meaning.NAME, nullable=False)
        words = draw.one(column.words)
        if column.meaning is Meaning.NAME and not (column in edge.parent.title and column.is_unique):
            raise NoFit
        if edge.role not in words:
            words = f"{edge.role} {words}"
        if column.meaning is Meaning.NAME:
            words = draw.one((edge.role, words))
        phrase = replace(draw.phrase(table, "plain plain plain own"), joins=(edge.join,))
    else:
        column = draw.column(table, Meaning.CATEGORY, nullable=False)
        words, phrase = draw.one(column.words), draw.phrase(table, "plain plain plain own", (column,))
    return table, column, words, replace(phrase.query(column), group=(column.ref,)), phrase


def _group(draw: Draw) -> Draft:
    """A number for each group: a count or an aggregate, of all rows or of some, sorted by either or not at all."""
    table, column, words, query, phrase = _grouped(draw)
    slots, wording = {"column": words, "measure": "number"}, "group"
    measures = ["COUNT(*)"]
    if draw.chance(0.5):
        function, word, target = draw.aggregate(table, (column, *phrase.columns))
        measures, wording = [f"{function}({target.number})"], "group_measured"
        slots["measure"] = f"{word} {target.measured(draw.rng)}"
    how = draw.rng.random()
    if how < 0.3:
        descending = how < 0.2
        slots["direction"] = "from highest to lowest" if descending else "from lowest to highest"
        query = replace(query, order=measures[0], descending=descending)
        wording = "group_ordered"
    elif how < 0.4:
        query = replace(query, order=column.ref)
        wording = "group_by_name"
    elif how < 0.5 and wording == "group_measured":
        measures.insert(0, "COUNT(*)")
        wording = "group_both"
    elif how < 0.65 and not query.joins and not query.where:
        second = draw.column(table, Meaning.CATEGORY, nullable=False, without=(column,))
        query = replace(query, select=refs((column, second)), group=refs((column, second)))
        slots["column"] = f"combination of {words} and {draw.one(second.words)}"
    return phrase.draft(replace(query, select=(*query.select, *measures)), wording, **slots)


def _group_having(draw: Draw) -> Draft:
    """The groups that are large enough, or whose average is."""
    table, column, words, query, phrase = _grouped(draw)
    slots = {"column": words, "columns": plural(words), "tail": ""}
    if draw.chance(0.25):
        query = replace(query, select=(*query.select, "COUNT(*)"))
        slots["tail"] = f" Show the number of {draw.many(table)} as well."
    if draw.chance(0.65):
        share = max(1, table.rows // max(1, len(set(column.values))))
        few = not query.where and not query.joins  # else a group without any row has fewer, too
        sql, slots["number"] = counted(max(2, share // 2), max(3, share * 3 // 2), draw, few)
        return phrase.draft(replace(query, having=f"COUNT(*) {sql}"), **slots)
    target = draw.one([c for c in table.columns if c.is_number and not c.has_null])
    limit = literal(threshold(target, draw.rng.uniform(0.4, 0.65)))
    operator, word = draw.one(((">", "above"), ("<", "below"), (">", "greater than")))
    slots |= {"measure": f"average {target.measured(draw.rng)}", "number": f"{word} {limit}"}
    return phrase.draft(
        replace(query, having=f"AVG({target.number}) {operator} {limit}"), "group_having_average", **slots
    )


def _group_top(draw: Draw) -> Draft:
    """The most frequent group, or the ones with the highest average or total."""
    table, column, words, query, phrase = _grouped(draw)
    word, descending = draw.one((("most", True), ("most", True), ("fewest", False)))
    measure, best = "COUNT(*)", f"{word} {phrase.words}"
    if draw.chance(0.35):
        function, name, target = draw.aggregate(table, (column,))
        if function not in ("AVG", "SUM") or target.has_null:
            raise NoFit
        measure = f"{function}({target.number})"
        best = f"{'highest' if descending else 'lowest'} {name} {target.measured(draw.rng)} of {phrase.words}"
    if not measure.startswith("AVG") and not descending and (query.where or query.joins):
        raise NoFit  # a group without any row has fewer
    limit = draw.one((1, 1, 1, 2, 3))
    slots = {"column": words, "columns": plural(words), "best": best, "count": str(limit), "tail": ""}
    if draw.chance(0.3):
        query = replace(query, select=(*query.select, measure))
        slots["tail"] = " Show the number as well." if measure == "COUNT(*)" else " Show that value as well."
    query = replace(query, order=measure, descending=descending, limit=limit)
    return phrase.draft(query, "group_top" if limit == 1 else "group_top_many", **slots)


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
    column, slots, descending = draw.sorting(table, phrase.columns)
    shown = draw.shown(table, draw.one((1, 1, 2, 3)), phrase.columns)
    query = replace(phrase.query(*shown), order=column.number, descending=descending)
    return phrase.draft(query, columns=called(draw, shown, many=True), np=_all(phrase, draw), **slots)


def _top(draw: Draw) -> Draft:
    """The rows with the highest or lowest value, by ORDER BY; "maximum" and "minimum" ask for a comparison with it."""
    table = draw.table()
    phrase = draw.phrase(table, "plain plain plain own parent own")
    column = draw.ordered(table, phrase.columns)
    word, descending = draw.superlative(column)
    count = draw.one((1, 1, 1, 2, 3, 5))
    shown = draw.shown(table, draw.one((1, 1, 2, 3)), (column, *phrase.columns))
    if draw.chance(0.15):
        shown.append(column)
    query = replace(phrase.query(*shown), order=column.number, descending=descending, limit=count)
    key = column.measured(draw.rng)
    slots = {"columns": called(draw, shown, many=count > 1), "one": table.singular, "best": f"{word} {key}",
             "count": str(count)}  # fmt: skip
    if count > 1:
        return phrase.draft(query, "top_many_where" if phrase.where else "top_many", **slots)
    inner = phrase.query(f"{'MAX' if descending else 'MIN'}({column.number})").sql
    compared = replace(query, order="", limit=0, where=(*query.where, f"{column.number} = ({inner})"))
    if column.is_number and not phrase.where and draw.chance(0.25):
        slots["best"] = f"{'maximum' if descending else 'minimum'} {key}"
        return replace(phrase.draft(compared, "top", **slots), twin=query.sql)
    return replace(phrase.draft(query, "top_where" if phrase.where else "top", **slots), twin=compared.sql)


def _share(draw: Draw) -> Draft:
    """What percentage of rows meet a condition, or how many more meet one than another."""
    table = draw.table()
    phrase = draw.phrase(table, "plain plain own parent")
    meanings = (Meaning.CATEGORY, Meaning.FLAG, Meaning.QUANTITY, Meaning.LEVEL)
    column = draw.column(table, *meanings, nullable=False, without=phrase.columns)
    found = conditions.draw(draw.rng, column)
    slots = {"all": _all(phrase, draw), "verb": f"are {found.being}" if found.being else f"have {found.noun}"}
    if found.sort == "equal" and column.meaning is Meaning.CATEGORY and not phrase.where and draw.chance(0.4):
        other = conditions.equal(draw.rng, column)
        sums = [f"SUM(CASE WHEN {each.sql} THEN 1 ELSE 0 END)" for each in (found, other)]
        query = phrase.query(" - ".join(sums))
        return Draft(query, {**slots, "np": phrase.words, "first": found.noun, "second": other.noun},
                     ("equal", "equal"), "difference")  # fmt: skip
    select = f"CAST(SUM(CASE WHEN {found.sql} THEN 1 ELSE 0 END) AS REAL) * 100 / COUNT(*)"
    draft = phrase.draft(phrase.query(select), "share_where" if phrase.where else "share", **slots)
    return replace(draft, sorts=(*draft.sorts, found.sort))


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
    query = phrase.query(f"{function}(JULIANDAY({second.ref}) - JULIANDAY({first.ref}))")
    slots = {"word": word, "first": draw.one(first.words), "second": draw.one(second.words)}
    return phrase.draft(query, np=_all(phrase, draw), **slots)


def _sets(draw: Draw) -> Draft:
    """Values of a category that rows of one kind have and rows of another kind have too, or have not."""
    table = draw.table()
    column = draw.column(table, Meaning.CATEGORY, nullable=False)
    first, second = (draw.condition(table, (column,))[0] for _ in range(2))
    if first.sql == second.sql or {first.sort, second.sort} & {"null", "not_null", "unequal"}:
        raise NoFit
    operator, wording = draw.one((("INTERSECT", "sets_both"), ("INTERSECT", "sets_both"), ("EXCEPT", "sets_but")))
    other = Query((column.ref,), table.name, where=(second.sql,))
    query = replace(other, where=(first.sql,), then=(operator, other))
    slots = {"columns": plural(draw.one(column.words)), "np": draw.many(table), "first": first.noun,
             "second": second.noun}  # fmt: skip
    return Draft(query, slots, (first.sort, second.sort), wording)


def _like_best(draw: Draw) -> Draft:
    """Rows that share a category with the most frequent one, or with the row that has the highest value."""
    table = draw.table()
    column = draw.column(table, Meaning.CATEGORY, nullable=False)
    words, many = draw.one(column.words), draw.many(table)
    if draw.chance(0.5):
        inner = Query((column.ref,), table.name, group=(column.ref,), order="COUNT(*)", descending=True, limit=1)
        np = draw.one((f"{many} with the most common {words}", f"{many} whose {words} is the most frequent one"))
    else:
        best = draw.ordered(table, (column,))
        word, descending = draw.superlative(best)
        inner = Query((column.ref,), table.name, order=best.number, descending=descending, limit=1)
        np = f"{many} with the same {words} as the {table.singular} with the {word} {best.measured(draw.rng)}"
    where = (f"{column.ref} = ({inner.sql})",)
    if draw.chance(0.4):
        return Draft(Query(("COUNT(*)",), table.name, where=where), {"np": np}, ("nested",), "count")
    shown = draw.shown(table, draw.one((1, 2)), (column,))
    slots = {"columns": called(draw, shown, many=True), "np": np}
    return Draft(Query(refs(shown), table.name, where=where), slots, ("nested",), "list")


FORMS = (_count, _list, _everything, _lookup, _aggregate, _distinct, _count_distinct, _group, _group_having, _group_top,
         _year_group, _order, _top, _share, _days, _sets, _like_best)  # fmt: skip
