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
from tests.shared.episodes import observing
from tests.shared.examples import LIMITS, insurance, insurance_file, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    return Toolbox(insurance(tmp_path), TOKENIZER, observing(400))


def sql(toolbox: Toolbox, query: str) -> str:
    return toolbox.run(ToolCall("execute_sql", {"sql": query})).text


def test_a_search_names_tables_columns_and_the_reason(toolbox: Toolbox) -> None:
    observation = toolbox.run(ToolCall("search_schema", {"query": "total claim amounts per policy kind"}))
    assert observation.ok
    assert observation.text.splitlines() == [
        'claims (claim_id, policy_id, amount): matches "claim", "amount", "policy"',
        'policies (policy_id, kind): matches "policy", "kind"',
    ]


@pytest.mark.parametrize("query", ["zebra", "Wie viele Schäden gibt es?", "有多少客户"])
def test_a_search_without_a_match_falls_back_to_all_tables_and_what_they_hold(query: str, toolbox: Toolbox) -> None:
    observation = toolbox.run(ToolCall("search_schema", {"query": query}))
    assert observation.ok
    assert observation.text.splitlines() == [
        f'Nothing matches "{query}". All tables:',
        "customers (customer_id, full_name, city)",
        "policies (policy_id, customer_id, kind, premium): refers to customers",
        "claims (claim_id, policy_id, amount, filed_on, ...): refers to policies",
    ]


def test_a_fallback_that_has_no_room_for_columns_still_names_every_table(tmp_path: Path) -> None:
    lines = (
        Toolbox(insurance(tmp_path), TOKENIZER, observing(60)).run(ToolCall("search_schema", {"query": "zebra"})).text
    )
    assert lines.startswith('Nothing matches "zebra". Tables: customers, policies, claims.')


def test_a_question_without_spaces_between_its_words_finds_its_tables(tmp_path: Path) -> None:
    customers = 'CREATE TABLE "客户" ("客户编号" INTEGER PRIMARY KEY, "姓名" TEXT);'
    toolbox = Toolbox(
        insurance(tmp_path, customers + 'CREATE TABLE "订单" ("订单编号" INTEGER, "金额" REAL);'),
        TOKENIZER,
        observing(400),
    )
    text = toolbox.run(ToolCall("search_schema", {"query": "每个客户的订单金额是多少"})).text
    assert text.splitlines() == [
        '"订单" (订单编号, 金额): matches "订单", "金额"',
        '"客户" (客户编号): matches "客户"',
    ]


def test_a_search_shows_at_most_five_tables(tmp_path: Path) -> None:
    extra = "".join(f"CREATE TABLE extra_{i} (claim TEXT);" for i in range(9))
    text = (
        Toolbox(insurance(tmp_path, extra), TOKENIZER, observing(400))
        .run(ToolCall("search_schema", {"query": "claims"}))
        .text
    )
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


WIDE = """
CREATE TABLE orders (order_id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(customer_id),
  order_date DATETIME, required_date DATETIME, ship_name NVARCHAR(40), ship_address NVARCHAR(60),
  ship_city NVARCHAR(15), ship_region NVARCHAR(15), ship_country NVARCHAR(15), freight DECIMAL(10,4));
INSERT INTO orders VALUES
  (1, 1, '2024-07-04', '2024-08-01', 'Vins et alcools', '59 rue de Rome', 'Reims', 'West', 'France', 32.38);
"""


def columns(folder: Path, cap: int, question: str, search: str = "") -> list[str]:
    toolbox = Toolbox(insurance(folder, WIDE), TOKENIZER, observing(cap), question)
    toolbox.run(ToolCall("search_schema", {"query": search}))
    text = toolbox.run(ToolCall("get_columns", {"table": "orders"})).text
    assert TOKENIZER.count(text) <= cap
    return text.splitlines()


@pytest.mark.parametrize(
    ("question", "line"),
    [
        ("How many orders went to each country?", "ship_country NVARCHAR(15), e.g. 'France'"),
        ("Total freight of all orders", "freight DECIMAL(10,4), e.g. 32.38"),
    ],
)
def test_on_a_wide_table_the_question_decides_which_columns_show_values(
    question: str, line: str, tmp_path: Path
) -> None:
    lines = columns(tmp_path, 190, question)
    assert line in lines
    assert "ship_name" in lines, "the others give their types for it"
    assert len(lines) == 11


def test_a_search_decides_it_too(tmp_path: Path) -> None:
    assert "ship_region NVARCHAR(15), e.g. 'West'" in columns(tmp_path, 190, "", search="region")


def test_a_table_that_is_too_wide_keeps_the_columns_that_were_asked_for(tmp_path: Path) -> None:
    lines = columns(tmp_path, 100, "Total freight of all orders")
    assert lines[1] == "freight DECIMAL(10,4), e.g. 32.38"
    assert lines[-1].startswith("... ")


def test_an_unknown_table_is_answered_with_the_nearest_one(toolbox: Toolbox) -> None:
    observation = toolbox.run(ToolCall("get_columns", {"table": "claim"}))
    assert not observation.ok
    assert observation.text == "Error: no such table: claim. Did you mean claims? Tables: customers, policies, claims."


def test_names_that_need_quotes_are_shown_in_quotes(tmp_path: Path) -> None:
    extra = (
        'CREATE TABLE "order" ("First Name" TEXT, "group" INT, plain);INSERT INTO "order" VALUES (\'x\', 1, x\'00ff\');'
    )
    toolbox = Toolbox(insurance(tmp_path, extra), TOKENIZER, observing(400))
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
    text = Toolbox(insurance(tmp_path), TOKENIZER, observing(cap)).run(call).text
    assert 0 < TOKENIZER.count(text) <= cap


def test_a_cut_result_keeps_header_and_count(tmp_path: Path) -> None:
    toolbox = Toolbox(insurance(tmp_path), TOKENIZER, observing(60))
    lines = sql(toolbox, "SELECT a.claim_id, a.note FROM claims a, claims b").splitlines()
    assert lines[0] == "claim_id | note"
    assert 0 < len(lines) - 2 < 9
    assert lines[-1] == f"(first {len(lines) - 2} of 9 rows)"


def test_long_values_are_shortened_before_rows_are_dropped_entirely(tmp_path: Path) -> None:
    lines = sql(
        Toolbox(insurance(tmp_path), TOKENIZER, observing(50)),
        "SELECT note || note || note AS story FROM claims WHERE claim_id = 3",
    )
    assert lines.splitlines()[0] == "story"
    assert lines.splitlines()[1].endswith("...")
    assert lines.splitlines()[2] == "(1 row)"


def test_cut_columns_are_counted(tmp_path: Path) -> None:
    lines = (
        Toolbox(insurance(tmp_path), TOKENIZER, observing(45))
        .run(ToolCall("get_columns", {"table": "claims"}))
        .text.splitlines()
    )
    assert lines[0] == "claims: 3 rows"
    assert lines[-1].startswith("... ")
    assert "more column" in lines[-1]


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        (
            "SELECT amout FROM claims",
            "no such column: amout. Did you mean amount? "
            "Columns of claims: claim_id, policy_id, amount, filed_on, note.",
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
        *(
            (query, "the schema is not read with SQL; call search_schema or get_columns.")
            for query in (
                "SELECT name FROM pragma_table_info('claims')",
                "PRAGMA table_info(claims)",
                "SHOW TABLES",
                "DESCRIBE claims",
                "SELECT * FROM information_schema.columns",
            )
        ),
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


@pytest.mark.parametrize(
    ("call", "again", "answer"),
    [
        (
            ToolCall("execute_sql", {"sql": "SELECT nothing FROM claims"}),
            ToolCall("execute_sql", {"sql": "SELECT nothing\n  FROM claims;"}),
            "Error: You made this call before, it fails again in the same way. "
            "Use other tables or columns, look at them first, or answer with your best query.",
        ),
        (
            ToolCall("execute_sql", {"sql": "SELECT 1"}),
            ToolCall("execute_sql", {"sql": "SELECT 1"}),
            "You made this call before, its answer stands above. "
            "Answer if it is what was asked for, or change the query.",
        ),
        (
            ToolCall("get_columns", {"table": "claims"}),
            ToolCall("get_columns", {"table": "claims"}),
            "You made this call before, its answer stands above. Look at another table, or write the query.",
        ),
        (
            ToolCall("search_schema", {"query": "claims"}),
            ToolCall("search_schema", {"query": "claims"}),
            "You made this call before, its answer stands above. Search for other words, or call get_columns.",
        ),
    ],
)
def test_a_repeated_call_is_told_so_and_what_to_try_instead(
    call: ToolCall, again: ToolCall, answer: str, toolbox: Toolbox
) -> None:
    toolbox.run(ToolCall("search_schema", {"query": "kind"}))
    first = toolbox.run(call)
    assert "before" not in first.text
    for _ in range(2):
        repeated = toolbox.run(again)
        assert (repeated.text, repeated.ok) == (answer, first.ok)


def test_a_slow_query_is_answered_with_advice(toolbox: Toolbox) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"
    assert sql(toolbox, endless) == "Error: The query was stopped after 0.5 s; filter earlier or join on keys."


def test_the_row_cap_of_the_settings_reaches_the_model(tmp_path: Path) -> None:
    database = insurance(tmp_path, limits=LIMITS.model_copy(update={"max_rows": 2}))
    assert sql(Toolbox(database, TOKENIZER, observing(400)), "SELECT claim_id FROM claims").endswith(
        "(first 2 of 2+ rows)"
    )
    with pytest.raises(SqlError):
        database.execute("SELECT")


@pytest.mark.parametrize(
    "name", ["Budget [EUR]", "[old] orders", "`odd`", 'say "hi"', "trailing ", "main.orders", "'x'"]
)
def test_a_table_of_any_name_is_reached_as_it_is_called_and_as_it_is_shown(name: str, tmp_path: Path) -> None:
    table = quoted(name)
    box = Toolbox(
        insurance(tmp_path, f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, x TEXT);"), TOKENIZER, observing(400)
    )
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
    found = Toolbox(Database(path, limits), TOKENIZER, observing(400)).run(ToolCall("get_columns", {"table": "papers"}))
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
    found = Toolbox(insurance(tmp_path, extra), TOKENIZER, observing(400)).run(
        ToolCall("get_columns", {"table": "docs"})
    )
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
    box = Toolbox(insurance(tmp_path, limits=limits), TOKENIZER, observing(400))
    box.run(ToolCall("execute_sql", {"sql": "SELECT 1"}))
    start = time.monotonic()
    text = sql(box, query)
    assert time.monotonic() - start < 3
    assert TOKENIZER.count(text) <= 400


def test_columns_of_a_slow_view_come_within_the_time_limit(tmp_path: Path) -> None:
    slow = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 150000) SELECT"
    columns = ", ".join(f"max(x) AS c{i}" for i in range(40))
    box = Toolbox(insurance(tmp_path, f"CREATE VIEW slow AS {slow} {columns} FROM c;"), TOKENIZER, observing(400))
    box.run(ToolCall("execute_sql", {"sql": "SELECT 1"}))
    start = time.monotonic()
    box.run(ToolCall("get_columns", {"table": "slow"}))
    assert time.monotonic() - start < 10 * LIMITS.timeout_seconds  # 40 columns, each too slow
