"""What the model reads after a tool call."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from shared.agent.tools import Toolbox
from shared.records import ToolCall
from shared.sql.database import Database, SqlError, quoted
from tests.shared.examples import LIMITS, insurance, insurance_file, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    return Toolbox(insurance(tmp_path), TOKENIZER, 400)


def sql(toolbox: Toolbox, query: str) -> str:
    return toolbox.run(ToolCall("execute_sql", {"sql": query})).text


def test_a_search_names_tables_columns_and_the_reason(toolbox: Toolbox) -> None:
    observation = toolbox.run(ToolCall("search_schema", {"query": "total claim amounts per policy kind"}))
    assert observation.ok
    assert observation.text.splitlines() == [
        'claims (claim_id, policy_id, amount): matches "claim", "amount", "policy"',
        'policies (policy_id, kind): matches "policy", "kind"',
    ]


def test_a_search_without_a_match_says_so_and_lists_the_tables(toolbox: Toolbox) -> None:
    observation = toolbox.run(ToolCall("search_schema", {"query": "zebra"}))
    assert observation.ok
    assert observation.text == 'Nothing matches "zebra". Tables: customers, policies, claims.'


def test_a_search_shows_at_most_five_tables(tmp_path: Path) -> None:
    extra = "".join(f"CREATE TABLE extra_{i} (claim TEXT);" for i in range(9))
    text = Toolbox(insurance(tmp_path, extra), TOKENIZER, 400).run(ToolCall("search_schema", {"query": "claims"})).text
    assert len(text.splitlines()) == 5
    assert text.startswith("claims (")


@pytest.mark.parametrize(
    ("query", "first"),
    [("policies", "policies"), ("customerId", "customers"), ("filed", "claims"), ("NAME", "customers")],
)
def test_a_search_ignores_plural_case_and_word_separators(query: str, first: str, toolbox: Toolbox) -> None:
    assert toolbox.run(ToolCall("search_schema", {"query": query})).text.startswith(f"{first} (")


def test_columns_come_with_types_keys_samples_and_the_row_count(toolbox: Toolbox) -> None:
    text = toolbox.run(ToolCall("get_columns", {"table": "Claims"})).text
    assert text.splitlines() == [
        "claims: 3 rows",
        "claim_id INTEGER PK, e.g. 1, 2, 3",
        "policy_id INTEGER → policies.policy_id, e.g. 1, 3",
        "amount REAL, e.g. 120.5, 88.0, 940.25",
        "filed_on TEXT, e.g. '2024-01-03', '2024-02-11', '2024-02-20'",
        "note TEXT, e.g. 'hail', 'rear bumper, two witnesses and'...",
    ]
    assert "full_name TEXT, e.g. 'Ann O''Hara'" in toolbox.run(ToolCall("get_columns", {"table": '"customers"'})).text


def test_an_unknown_table_is_answered_with_the_nearest_one(toolbox: Toolbox) -> None:
    observation = toolbox.run(ToolCall("get_columns", {"table": "claim"}))
    assert not observation.ok
    assert observation.text == "Error: no such table: claim. Did you mean claims? Tables: customers, policies, claims."


def test_names_that_need_quotes_are_shown_in_quotes(tmp_path: Path) -> None:
    extra = 'CREATE TABLE "order" ("First Name" TEXT, "group" INT, plain); INSERT INTO "order" VALUES (\'x\', 1, x\'00ff\');'
    toolbox = Toolbox(insurance(tmp_path, extra), TOKENIZER, 400)
    assert toolbox.run(ToolCall("get_columns", {"table": "order"})).text.splitlines() == [
        '"order": 1 row',
        "\"First Name\" TEXT, e.g. 'x'",
        '"group" INT, e.g. 1',
        "plain, e.g. <blob of 2 bytes>",
    ]


def test_rows_come_with_a_header_and_a_count(toolbox: Toolbox) -> None:
    assert (
        sql(toolbox, "SELECT claim_id, note FROM claims WHERE claim_id < 3")
        == "claim_id | note\n1 | NULL\n2 | hail\n(2 rows)"
    )
    assert sql(toolbox, "SELECT 'two\nlines' AS x") == "x\ntwo\\nlines\n(1 row)"
    assert sql(toolbox, "SELECT note FROM claims WHERE claim_id = 9") == "note\n(0 rows)"


def test_more_rows_than_shown_are_counted(toolbox: Toolbox) -> None:
    assert sql(toolbox, "SELECT 1 AS x FROM claims a, claims b, claims c").splitlines()[-1] == "(first 20 of 20+ rows)"


@pytest.mark.parametrize("cap", [5, 12, 24, 60, 120, 400])
@pytest.mark.parametrize(
    "call",
    [
        ToolCall("execute_sql", {"sql": "SELECT *, note || note || note FROM claims a, claims b"}),
        ToolCall("execute_sql", {"sql": "SELECT printf('%9000d', 1) AS " + "long" * 40}),
        ToolCall("execute_sql", {"sql": "SELECT " + ", ".join(f"{i} AS column_{i}" for i in range(90))}),
        ToolCall("execute_sql", {"sql": "SELECT nothing FROM claims, policies, customers"}),
        ToolCall("execute_sql", {"sql": "SELECT '🦀€ß' || note FROM claims"}),
        ToolCall("get_columns", {"table": "claims"}),
        ToolCall("get_columns", {"table": "gone"}),
        ToolCall("search_schema", {"query": "claim policy customer"}),
        ToolCall("search_schema", {"query": "zebra " * 200}),
    ],
)
def test_no_answer_exceeds_the_cap(call: ToolCall, cap: int, tmp_path: Path) -> None:
    text = Toolbox(insurance(tmp_path), TOKENIZER, cap).run(call).text
    assert 0 < TOKENIZER.count(text) <= cap


def test_a_cut_result_keeps_header_and_count(tmp_path: Path) -> None:
    toolbox = Toolbox(insurance(tmp_path), TOKENIZER, 60)
    lines = sql(toolbox, "SELECT a.claim_id, a.note FROM claims a, claims b").splitlines()
    assert lines[0] == "claim_id | note"
    assert 0 < len(lines) - 2 < 9
    assert lines[-1] == f"(first {len(lines) - 2} of 9 rows)"


def test_long_values_are_shortened_before_rows_are_dropped_entirely(tmp_path: Path) -> None:
    lines = sql(
        Toolbox(insurance(tmp_path), TOKENIZER, 50),
        "SELECT note || note || note AS story FROM claims WHERE claim_id = 3",
    )
    assert lines.splitlines()[0] == "story"
    assert lines.splitlines()[1].endswith("...")
    assert lines.splitlines()[2] == "(1 row)"


def test_cut_columns_are_counted(tmp_path: Path) -> None:
    lines = (
        Toolbox(insurance(tmp_path), TOKENIZER, 45).run(ToolCall("get_columns", {"table": "claims"})).text.splitlines()
    )
    assert lines[0] == "claims: 3 rows"
    assert lines[-1].startswith("... ")
    assert "more column" in lines[-1]


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        (
            "SELECT amout FROM claims",
            "no such column: amout. Did you mean amount? Columns of claims: claim_id, policy_id, amount, filed_on, note.",
        ),
        (
            "SELECT c.kind FROM claims c",
            "no such column: c.kind. kind is a column of policies. "
            "Columns of claims: claim_id, policy_id, amount, filed_on, note.",
        ),
        ("SELECT 1 FROM claim", "no such table: claim. Did you mean claims? Tables: customers, policies, claims."),
        (
            "SELECT policy_id FROM claims JOIN policies USING (customer_id) ",
            "cannot join using column customer_id - column not present in both tables",
        ),
        (
            "SELECT policy_id FROM claims JOIN policies",
            "ambiguous column name: policy_id. Write one of policies.policy_id, claims.policy_id.",
        ),
        ("SELECT year(filed_on) FROM claims", "no such function: year; use strftime('%Y', x)."),
        ("SELECT FROM claims", 'near "FROM": syntax error'),
        ("DELETE FROM claims", "DELETE is not allowed, the database is read-only; only SELECT works."),
    ],
)
def test_errors_say_what_may_have_been_meant(query: str, answer: str, toolbox: Toolbox) -> None:
    observation = toolbox.run(ToolCall("execute_sql", {"sql": query}))
    assert not observation.ok
    assert observation.text == f"Error: {answer}"


def test_a_double_quoted_name_read_as_a_text_is_pointed_out(toolbox: Toolbox) -> None:
    observation = toolbox.run(ToolCall("execute_sql", {"sql": 'SELECT claim_id FROM claims WHERE "colour" = 1'}))
    assert observation.ok
    assert observation.text == 'Note: "colour" is no column and was read as a text.\nclaim_id\n(0 rows)'


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall("drop_all", {}), "Tools: search_schema, get_columns, execute_sql"),
        (ToolCall("execute_sql", {}), 'needs the argument "sql"'),
        (ToolCall("execute_sql", {"sql": 7}), 'needs the argument "sql"'),
        (ToolCall("execute_sql", {"sql": "  "}), 'needs the argument "sql"'),
        (ToolCall("get_columns", {"table": "claims", "limit": 3}), 'only the argument "table"'),
    ],
)
def test_a_wrong_call_is_answered_not_raised(call: ToolCall, words: str, toolbox: Toolbox) -> None:
    observation = toolbox.run(call)
    assert not observation.ok
    assert words in observation.text


def test_a_slow_query_is_answered_with_advice(toolbox: Toolbox) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"
    assert sql(toolbox, endless) == "Error: The query was stopped after 0.5 s; filter earlier or join on keys."


def test_the_row_cap_of_the_settings_reaches_the_model(tmp_path: Path) -> None:
    database = insurance(tmp_path, limits=LIMITS.model_copy(update={"max_rows": 2}))
    assert sql(Toolbox(database, TOKENIZER, 400), "SELECT claim_id FROM claims").endswith("(first 2 of 2+ rows)")
    with pytest.raises(SqlError):
        database.execute("SELECT")


@pytest.mark.parametrize(
    "name", ["Budget [EUR]", "[old] orders", "`odd`", 'say "hi"', "trailing ", "main.orders", "'x'"]
)
def test_a_table_of_any_name_is_reached_as_it_is_called_and_as_it_is_shown(name: str, tmp_path: Path) -> None:
    table = quoted(name)
    box = Toolbox(insurance(tmp_path, f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, x TEXT);"), TOKENIZER, 400)
    for written in (name, table, f"main.{table}"):
        found = box.run(ToolCall("get_columns", {"table": written}))
        assert found.ok
        assert found.text.splitlines()[0] == f"{table}: 0 rows"
    assert sql(box, f"SELECT count(*) FROM {table}").splitlines()[-2:] == ["0", "(1 row)"]


def test_columns_are_shown_beside_a_cell_of_many_bytes(tmp_path: Path) -> None:
    extra = "CREATE TABLE papers (id INTEGER PRIMARY KEY, title TEXT, body);"
    path = insurance_file(tmp_path, extra)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO papers VALUES (1, 'lake', ?), (2, 'sea', 'short')", ("word " * 500_000,))
    limits = LIMITS.model_copy(update={"timeout_seconds": 10.0})
    found = Toolbox(Database(path, limits), TOKENIZER, 400).run(ToolCall("get_columns", {"table": "papers"}))
    assert found.text.splitlines() == [
        "papers: 2 rows",
        "id INTEGER PK, e.g. 1, 2",
        "title TEXT, e.g. 'lake', 'sea'",
        "body, e.g. 'short'",
    ]


def test_full_text_tables_are_shown_as_tables(tmp_path: Path) -> None:
    extra = (
        "CREATE VIRTUAL TABLE docs USING fts5(title, body); INSERT INTO docs VALUES ('First steps', 'open the box');"
    )
    found = Toolbox(insurance(tmp_path, extra), TOKENIZER, 400).run(ToolCall("get_columns", {"table": "docs"}))
    assert found.text.splitlines()[:2] == ["docs: 1 row", "title, e.g. 'First steps'"]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT " + ", ".join(f'1 AS "{"x" * 120}{i}"' for i in range(390)),
        "SELECT printf('%190d', claim_id) FROM claims a, claims b" + ", claims c" * 3,
    ],
)
def test_a_large_answer_is_cut_in_time(query: str, tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"timeout_seconds": 5.0, "max_rows": 20_000, "max_result_bytes": 4_000_000})
    box = Toolbox(insurance(tmp_path, limits=limits), TOKENIZER, 400)
    box.run(ToolCall("execute_sql", {"sql": "SELECT 1"}))
    start = time.monotonic()
    text = sql(box, query)
    assert time.monotonic() - start < 3
    assert TOKENIZER.count(text) <= 400


def test_columns_of_a_slow_view_come_within_the_time_limit(tmp_path: Path) -> None:
    slow = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 150000) SELECT"
    columns = ", ".join(f"max(x) AS c{i}" for i in range(40))
    box = Toolbox(insurance(tmp_path, f"CREATE VIEW slow AS {slow} {columns} FROM c;"), TOKENIZER, 400)
    box.run(ToolCall("execute_sql", {"sql": "SELECT 1"}))
    start = time.monotonic()
    box.run(ToolCall("get_columns", {"table": "slow"}))
    assert time.monotonic() - start < 4 * LIMITS.timeout_seconds
