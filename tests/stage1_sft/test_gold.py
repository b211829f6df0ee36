import random

import pytest

from shared.sql.database import Column, Schema, Table
from stage1_sft.gold import Needed, mistakes, needed, plain, tidy
from tests.stage1_sft.examples import JOIN


def _table(name: str, *columns: str) -> Table:
    return Table(name, tuple(Column(column, "TEXT", False, None, False) for column in columns))


SCHEMA = Schema(
    (
        _table("customers", "customer_id", "full_name", "city"),
        _table("policies", "policy_id", "customer_id", "kind", "premium"),
        _table("claims", "claim_id", "policy_id", "amount"),
    )
)


@pytest.mark.parametrize(
    ("sql", "tables", "columns"),
    [
        ("SELECT count(*) FROM Claims", ("claims",), ()),
        (
            "SELECT T1.FULL_NAME FROM customers AS T1 JOIN policies AS T2 ON T1.customer_id = T2.customer_id",
            ("customers", "policies"),
            ("customers.full_name", "customers.customer_id", "policies.customer_id"),
        ),
        (
            "SELECT T1.city FROM customers AS T1 UNION SELECT T1.kind FROM policies AS T1",
            ("customers", "policies"),
            ("customers.city", "policies.kind"),
        ),
        (
            "SELECT city FROM customers WHERE customer_id NOT IN (SELECT customer_id FROM policies)",
            ("customers", "policies"),
            ("customers.city", "customers.customer_id", "policies.customer_id"),
        ),
        (
            "WITH big AS (SELECT policy_id FROM claims WHERE amount > 5) SELECT count(*) FROM big",
            ("claims",),
            ("claims.policy_id", "claims.amount"),
        ),
        (
            'SELECT city FROM customers WHERE full_name = "Bo Li"',
            ("customers",),
            ("customers.city", "customers.full_name"),
        ),
    ],
)
def test_needed_tables_and_columns_are_those_of_the_schema(
    sql: str, tables: tuple[str, ...], columns: tuple[str, ...]
) -> None:
    found = needed(sql, SCHEMA)
    assert found.tables == tables
    assert sorted(found.columns) == sorted(columns)


@pytest.mark.parametrize("sql", ["SELECT FROM WHERE", "DROP TABLE claims"])
def test_sql_that_is_no_readable_select_is_refused(sql: str) -> None:
    with pytest.raises(ValueError, match=r"unreadable SQL|not a SELECT"):
        needed(sql, SCHEMA)


def test_tidying_leaves_quoted_texts_alone() -> None:
    assert tidy("SELECT a ,  b FROM t WHERE c = 'x  , y;' ;") == "SELECT a, b FROM t WHERE c = 'x  , y;'"


@pytest.mark.parametrize(
    ("sql", "one_way"),
    [
        ("SELECT a FROM t WHERE (t.b = 'x, y' OR t.b = 'z')", "SELECT a FROM t WHERE t.b IN ('x, y', 'z')"),
        ("SELECT a FROM t WHERE (b = 2 OR c = 3)", "SELECT a FROM t WHERE (b = 2 OR c = 3)"),
        ("SELECT a FROM t WHERE LOWER(b) LIKE '%yo%'", "SELECT a FROM t WHERE b LIKE '%Yo%'"),
        ("SELECT \"format\" FROM \"my t\" WHERE b = '\"a\"'", "SELECT format FROM \"my t\" WHERE b = '\"a\"'"),
    ],
)  # fmt: skip
def test_what_golds_spell_in_several_ways_is_taught_in_one(sql: str, one_way: str) -> None:
    assert plain(sql, "Which b contains 'Yo'?") == one_way


def test_mistakes_are_a_missing_table_a_wrong_text_and_a_misspelt_name() -> None:
    found = [*mistakes(JOIN, needed(JOIN, SCHEMA), SCHEMA, random.Random(0))]
    made = {m.kind: m for m in found}
    assert found[0].kind == "missing_table"
    assert made["missing_table"].sql == "SELECT full_name FROM policies WHERE kind = 'home'"
    assert made["literal_case"].sql == JOIN.replace("'home'", "'Home'")
    assert made["literal_case"].look == "SELECT DISTINCT kind FROM policies LIMIT 10"
    assert made["wrong_column"].sql != JOIN
    assert made["wrong_column"].sql.endswith(" = 'home'")
    for kind in ("misspelt_column", "misspelt_table"):
        assert made[kind].sql != JOIN
        assert "= 'home'" in made[kind].sql


def test_a_condition_on_another_table_can_lose_its_subquery() -> None:
    sql = "SELECT city FROM customers AS c WHERE c.customer_id IN (SELECT customer_id FROM policies WHERE kind = 'car')"
    made = {m.kind: m.sql for m in mistakes(sql, needed(sql, SCHEMA), SCHEMA, random.Random(0))}
    assert made["missing_table"] == "SELECT city FROM customers WHERE kind = 'car'"


def test_a_misspelt_name_is_no_name_of_the_database() -> None:
    known = {table.name for table in SCHEMA.tables} | {
        column.name for table in SCHEMA.tables for column in table.columns
    }
    sql, wanted = "SELECT kind FROM policies", Needed(("policies",), ("policies.kind",))
    found = {mistake.sql for seed in range(20) for mistake in mistakes(sql, wanted, SCHEMA, random.Random(seed))}
    assert "SELECT kinds FROM policies" in found
    assert "SELECT policie_kind FROM policies" in found
    assert "SELECT kind FROM policie" in found
    assert all({*query.split()[1::2]} - known for query in found)
