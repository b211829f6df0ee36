"""Ways of failing: why an episode is wrong, as one name out of a fixed list.

An episode gets the first way of WAYS that applies to it. An episode whose query is right gets none, except when its
answer disagrees with its own result. Wrong queries are compared with the gold part by part, after sqlglot has resolved
aliases, stars and column owners.

Limit: parts are compared as text. Where a query differs from the gold in a harmless part too, that part may be named.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, cast

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.qualify import qualify

from shared.records import Episode, Question, StopReason, ToolCall
from shared.reward.queries import gold_is_ordered, parse
from shared.sql.database import Schema

_DISAGREES = "answer disagrees with its result"
WAYS = {
    "lucky": (
        "The result is right on this database only; on perturbed copies it differs.",
        "Raise data.copies, so that training rewards no lucky query.",
    ),
    "no call": (
        "The episode holds no tool call at all.",
        "Train stage 1 longer, and check that the chat template shows the tools.",
    ),
    "malformed call": (
        "The last tool call could not be read.",
        "Train stage 1 on more traces; episodes.calls.md lists the reasons.",
    ),
    "wrong tool order": (
        "The last query was written before any look at the schema, or no query was run before the answer.",
        "Check that the traces search the schema first; raise grpo.reward_executed.",
    ),
    "table not found": (
        "The last query names a table that does not exist.",
        "Add traces that search the schema on databases with many tables.",
    ),
    "column invented": (
        "The last query names a column that does not exist.",
        "Add traces that call get_columns before the query, and traces that repair such an error.",
    ),
    "SQL error never repaired": (
        "The last query failed for another reason, such as its syntax.",
        "Add traces that hold an error and its repair, or raise agent.max_turns.",
    ),
    "context full": (
        "The context window or the tokens of one turn were used up.",
        "Raise agent.context_tokens or agent.max_turn_tokens, or lower agent.observation_tokens.",
    ),
    "gave up at the turn limit": (
        "The last allowed turn still called a tool.",
        "Look for repeated calls; raise agent.max_turns, or train with GRPO for longer.",
    ),
    "wrong tables": (
        "The query reads other tables than the gold.",
        "Add training questions that join these tables; check the names that search_schema finds.",
    ),
    "wrong join": (
        "The tables are right, but they are joined on other columns or in another way.",
        "Add training questions with joins; declare foreign keys, which get_columns shows.",
    ),
    "wrong filter": (
        "The tables are right, but a condition is missing, extra or different.",
        "Add training questions with such conditions; check that sample values show how texts are written.",
    ),
    "wrong aggregate": (
        "The tables are right, but another aggregate is computed.",
        "Add training questions that count, sum or average.",
    ),
    "wrong order": (
        "The tables are right, but the sorting or the number of rows differs.",
        "Add training questions that ask for the first, last, highest or lowest rows.",
    ),
    "wrong grouping": (
        "The tables are right, but GROUP BY or HAVING differs.",
        "Add training questions with groups.",
    ),
    "wrong columns": (
        "The tables are right, but the query shows other columns, or duplicates.",
        "Check that the questions name the columns they want.",
    ),
    "wrong structure": (
        "The parts agree with the gold, but they are combined in another way.",
        "Read the examples; sub-queries and set operations need training questions of their own.",
    ),
    _DISAGREES: (
        "The query is right, but the answer states a value that its result does not hold.",
        "Raise agent.observation_tokens, so that the result is shown whole; accuracy does not count this.",
    ),
}
"""From each way of failing to its meaning and what usually helps, in the order in which they are tried."""
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_LIST_MARK = re.compile(r"^\s*\d+[.)]\s", re.MULTILINE)
_FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)


def way_of_failing(episode: Episode, question: Question, schema: Schema | None = None, error: str = "") -> str:
    """The name of the first way that applies; "" for an episode that is right or was never judged.

    `error` is what the submitted query fails with, "" if it runs. With `schema` columns without a table's name are
    told apart in joins.
    """
    if episode.reward is None:
        return ""
    if episode.reward.correct:
        return _DISAGREES if _answer_disagrees(episode, question) else ""
    if episode.reward.lucky:
        return "lucky"
    return _of_process(episode, error) or _of_query(question.gold_sql, episode.submitted_sql or "", schema)


def _outcomes(episode: Episode) -> Iterator[tuple[ToolCall, str, bool]]:
    """Each readable call with its observation and whether the tool ran without error."""
    for turn in episode.turns:
        yield from zip(turn.calls, turn.observations, turn.ok, strict=False)


def _of_process(episode: Episode, error: str) -> str:
    """The way that the course of the episode shows; "" where a query was submitted that runs."""
    asking = [turn for turn in episode.turns if turn.calls or turn.malformed]
    if not asking:
        return "no call"
    if not asking[-1].calls:
        return "malformed call"
    outcomes = list(_outcomes(episode))
    queries = [place for place, (call, _, _) in enumerate(outcomes) if call.name == "execute_sql"]
    before = outcomes[: queries[-1]] if queries else outcomes
    looked = any(ok for call, _, ok in before if call.name in ("search_schema", "get_columns"))
    submits_block = episode.submitted_sql is not None and not queries
    if (queries or submits_block) and not looked:
        return "wrong tool order"
    failed = ""
    for _, text, ok in outcomes if not queries else (outcomes[place] for place in queries):
        failed = "" if ok else f"{failed} {text}"  # a repeated call answers without its error
    failed = error or failed
    if "no such table" in failed:
        return "table not found"
    if "no such column" in failed:
        return "column invented"
    if error or (failed and queries):
        return "SQL error never repaired"
    if episode.stop in (StopReason.CONTEXT_LIMIT, StopReason.LENGTH):
        return "context full"
    if episode.stop is StopReason.TURN_LIMIT:
        return "gave up at the turn limit"
    return "wrong tool order" if episode.submitted_sql is None else ""


def _answer_disagrees(episode: Episode, question: Question) -> bool:
    """True when the answer states a number that its result lacks, or lacks the only text of the result."""
    results = [text for call, text, ok in _outcomes(episode) if ok and episode.submitted_sql in call.arguments.values()]
    if episode.stop is not StopReason.ANSWERED or not results:
        return False
    answer = _LIST_MARK.sub("", _FENCED.sub("", episode.turns[-1].content))
    known = [float(one.replace(",", "")) for one in _NUMBER.findall(f"{results[0]} {question.question}")]
    for written in (one.replace(",", "") for one in _NUMBER.findall(answer)):
        digits = len(written.partition(".")[2])
        near = 0.51 * 10**-digits + 1e-9
        if not any(abs(scale * value - float(written)) <= near for value in known for scale in (1, 100)):
            return True
    header, *rows = results[0].split("\n")[:-1]
    is_text = len(rows) == 1 and "|" not in header and not _NUMBER.search(rows[0])
    return bool(answer.strip()) and is_text and rows[0] not in ("NULL", "") and rows[0].lower() not in answer.lower()


def _of_query(gold_sql: str, submitted_sql: str, schema: Schema | None) -> str:
    gold, submitted = _parts(gold_sql, schema), _parts(submitted_sql, schema)
    if gold is None or submitted is None:
        return "wrong structure"
    if not gold_is_ordered(gold_sql):  # sorting alone is then no fault
        gold, submitted = ({**part, "wrong order": _limited(part["wrong order"])} for part in (gold, submitted))
    return next((name for name in gold if gold[name] != submitted[name]), "wrong structure")


def _limited(sorts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(keys, limit) for keys, limit in sorts if limit]


@lru_cache(maxsize=20_000)  # the gold of a question is needed once per episode
def _parts(sql: str, schema: Schema | None) -> dict[str, Any] | None:
    """The parts of a query in a form that can be compared, by the way that a difference is called, in order of WAYS.

    None for an unreadable query. Parts of all levels count, sub-queries included; the shown columns are those of the
    whole query.
    """
    tree = _resolved(sql, schema)
    if tree is None:
        return None
    joins: Counter[Any] = Counter()
    filters: Counter[Any] = Counter()
    sides = [join.side for join in tree.find_all(exp.Join) if join.side]
    conditions = [join.args["on"] for join in tree.find_all(exp.Join) if join.args.get("on")]
    conditions += [where.this for where in tree.find_all(exp.Where)]
    for condition in conditions:
        for one in _conjuncts(condition):
            pair = _joined_columns(one)
            joins.update([pair] if pair else [])
            filters.update([] if pair else [_equality(one)])
    outputs = [output for select in tree.find_all(exp.Select) for output in select.expressions]
    groups = [key for group in tree.find_all(exp.Group) for key in group.expressions]
    havings = [one for having in tree.find_all(exp.Having) for one in _conjuncts(having.this)]
    queries = [query for query in tree.find_all(exp.Query) if query.args.get("order") or query.args.get("limit")]
    with_names = {cte.alias_or_name for cte in tree.find_all(exp.CTE)}
    return {
        "wrong tables": {table.name for table in tree.find_all(exp.Table)} - with_names,
        "wrong join": (joins, Counter(sides)),
        "wrong filter": filters,
        "wrong aggregate": Counter(_text(one) for output in outputs for one in output.find_all(exp.AggFunc)),
        "wrong order": sorted((_argument(query, "order"), _argument(query, "limit")) for query in queries),
        "wrong grouping": (set(map(_text, groups)), set(map(_text, havings))),
        "wrong columns": (Counter(_text(output.unalias()) for output in tree.selects), _argument(tree, "distinct")),
    }


def _resolved(sql: str, schema: Schema | None) -> exp.Query | None:
    """The syntax tree with lower-case names, full column names and no aliases of tables or in ORDER BY."""
    tree = parse(sql)
    known = schema.tables if schema else ()
    tables = {table.name: {column.name: column.type or "TEXT" for column in table.columns} for table in known}
    names = {name.lower() for columns in tables.values() for name in columns}
    for column in list(tree.find_all(exp.Column)) if tree and known else ():
        if column.this.quoted and not column.table and column.name.lower() not in names:
            column.replace(exp.Literal.string(column.name))  # SQLite reads an unknown name in double quotes as a text
    with contextlib.suppress(SqlglotError, RecursionError):  # otherwise it is compared as it is written
        tree = tree and qualify(
            tree.copy(),
            schema=cast("dict[str, object]", tables),
            dialect="sqlite",
            validate_qualify_columns=False,
            quote_identifiers=False,
            identify=False,
        )
    if not isinstance(tree, exp.Query):
        return None
    owners = {table.alias_or_name: table.name for table in tree.find_all(exp.Table)}
    for column in tree.find_all(exp.Column):
        if column.table:
            column.set("table", exp.to_identifier(owners.get(column.table, column.table)))
    for order in tree.find_all(exp.Order):
        outputs = {one.alias: one.this for one in getattr(order.parent, "selects", ()) if isinstance(one, exp.Alias)}
        for column in list(order.find_all(exp.Column)):
            if not column.table and column.name in outputs:
                column.replace(outputs[column.name].copy())
    for count in tree.find_all(exp.Count):
        if not isinstance(count.this, exp.Distinct):
            count.set("this", exp.Star())
    for name in list(tree.find_all(exp.Identifier)):
        name.set("quoted", False)
    return tree


def _conjuncts(condition: exp.Expression) -> Iterable[exp.Expression]:
    condition = condition.unnest()
    return map(exp.Expression.unnest, condition.flatten()) if isinstance(condition, exp.And) else [condition]


def _joined_columns(condition: exp.Expression) -> tuple[str, frozenset[str]] | None:
    """The two columns that a condition joins, by equality or by IN with a sub-query; None for another condition."""
    sign = "not" if isinstance(condition, exp.Not) else ""
    inner = condition.this.unnest() if sign else condition
    sides: list[exp.Expression] = []
    if isinstance(inner, exp.EQ):
        sides = [inner.left, inner.right]
    elif isinstance(inner, exp.In) and inner.args.get("query"):
        sides = [inner.this, *(output.unalias() for output in inner.args["query"].unnest().selects)]
    if len(sides) != 2 or not all(isinstance(side, exp.Column) for side in sides):
        return None
    return sign, frozenset(map(_text, sides))


def _equality(condition: exp.Expression) -> Any:
    """The text of a condition; the sides of an equality in any order."""
    if isinstance(condition, (exp.EQ, exp.NEQ)):
        return condition.key, frozenset((_text(condition.left), _text(condition.right)))
    return _text(condition)


def _argument(query: exp.Expression, name: str) -> str:
    part = query.args.get(name)
    return _text(part) if part else ""


def _text(part: exp.Expression) -> str:
    """SQL of a part in which sub-queries are left blank: their own parts are compared by themselves."""
    blank = part.transform(lambda node: exp.Var(this="query") if isinstance(node, exp.Query) else node)
    return cast("str", blank.sql(dialect="sqlite"))
