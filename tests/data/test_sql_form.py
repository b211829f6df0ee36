"""Normal forms and difficulty."""

import pytest

from data.sql_form import gold_key, is_explain, is_repeatable, question_key, rate


def test_questions_differ_by_words_only() -> None:
    assert question_key("How many  Singers are there?") == question_key("how many singers are there")
    assert question_key("How many singers?") != question_key("How many songs?")


@pytest.mark.parametrize(
    "other",
    [
        "select COUNT( * ) from SINGER where name = 'Bob' ;",
        'SELECT count(*) FROM singer WHERE name = "Bob"',
        "SELECT count(*) FROM singer\n  WHERE Name='Bob' -- all of them",
    ],
)
def test_golds_written_differently_are_the_same(other: str) -> None:
    assert gold_key(other) == gold_key("SELECT count(*) FROM singer WHERE name = 'Bob'")


@pytest.mark.parametrize("other", ["SELECT count(*) FROM singer WHERE name = 'bob'", "SELECT count(*) FROM singer"])
def test_golds_with_another_meaning_differ(other: str) -> None:
    assert gold_key(other) != gold_key("SELECT count(*) FROM singer WHERE name = 'Bob'")


def test_unreadable_sql_still_has_a_key() -> None:
    assert gold_key("SELEC (( x") == gold_key("selec ((  X")


@pytest.mark.parametrize(
    ("difficulty", "sql"),
    [
        ("easy", "SELECT COUNT(*) FROM t WHERE a = 1"),
        ("easy", "SELECT DISTINCT a FROM t"),
        ("medium", "SELECT a FROM t WHERE a = 1 AND b = 2"),
        ("medium", "SELECT a, COUNT(*) FROM t GROUP BY a HAVING COUNT(*) > 2"),
        ("medium", "SELECT t.a FROM t JOIN u ON t.id = u.id WHERE u.b = 1"),
        ("hard", "SELECT u.b, COUNT(*) FROM t JOIN u ON t.id = u.id GROUP BY u.b"),
        ("hard", "SELECT a FROM t WHERE a > (SELECT AVG(a) FROM t)"),
        ("hard", "SELECT a FROM t EXCEPT SELECT a FROM u"),
    ],
)
def test_difficulty_follows_what_the_sql_needs(difficulty: str, sql: str) -> None:
    assert rate(sql) == difficulty


@pytest.mark.parametrize(
    "expression",
    [
        "random()",
        "RandomBlob(3)",
        "date('now', '-1 day')",
        "DATETIME('Now')",
        'time("now")',
        "julianday('now') - julianday(d)",
        "unixepoch()",
        "timediff('now', d)",
        "strftime('%Y', 'now')",
        "strftime('%Y', 'now', '-1 year')",
        "strftime('%s')",
        "current_date",
        "CURRENT_TIME",
        "count(*) FILTER (WHERE d > CURRENT_TIMESTAMP)",
        "(SELECT a FROM t ORDER BY random() LIMIT 1)",
    ],
)
def test_time_and_chance_are_found(expression: str) -> None:
    assert not is_repeatable(f"SELECT {expression} FROM t")


@pytest.mark.parametrize(
    "expression",
    [
        "'random()'",
        "a -- random()\n",
        "a /* date('now') */",
        "random",
        '"current_date"',
        "t.current_date",
        "d AS current_date",
        "date(d)",
        "strftime('%Y', d)",
        "replace(d, 'now', 'then')",
        "date(d) || 'now'",
        "((",
    ],
)
def test_what_only_looks_like_time_or_chance_is_not(expression: str) -> None:
    assert is_repeatable(f"SELECT {expression} FROM t")


@pytest.mark.parametrize(
    ("sql", "explains"),
    [
        ("EXPLAIN QUERY PLAN SELECT 1", True),
        (" -- why\n/* not */ explain select 1", True),
        ("SELECT explain FROM t", False),
        ("-- explain", False),
        ("/**/" * 1000 + "SELECT 1", False),
    ],
)
def test_an_explain_is_told_from_a_query(sql: str, explains: bool) -> None:
    assert is_explain(sql) is explains
