import random

import pytest

from shared.sql.database import Column, Schema, Table
from stage1_sft.gold import Needed, mistakes, needed, tidy
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


def test_mistakes_are_a_lost_join_a_wrong_case_and_a_misspelt_column() -> None:
    made = {m.kind: m.sql for m in mistakes(JOIN, needed(JOIN, SCHEMA), SCHEMA, random.Random(0))}
    assert made["missing_join"] == "SELECT customers.full_name FROM policies WHERE policies.kind = 'home'"
    assert made["literal_case"] == JOIN.replace("'home'", "'Home'")
    assert made["misspelt_column"] != JOIN
    assert "JOIN customers" in made["misspelt_column"]


def test_a_misspelt_column_is_no_column_of_the_database() -> None:
    sql = "SELECT city FROM customers"
    for seed in range(20):
        (mistake,) = mistakes(sql, Needed(("customers",), ("customers.city",)), SCHEMA, random.Random(seed))
        assert mistake.sql == "SELECT cities FROM customers"
