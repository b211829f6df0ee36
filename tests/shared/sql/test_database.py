"""The sandbox: what it reads, what it refuses, when it stops."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.sql import sandbox_pool
from shared.sql.database import Column, Database, SqlError
from tests.shared.examples import LIMITS, insurance, insurance_file
from tests.shared.sql.hostile import HOSTILE, QUICK


def state(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def seconds_taken(database: Database, attack: str) -> float:
    database.execute("SELECT 1")  # a worker is there: its start is no part of the deadline
    start = time.monotonic()
    with pytest.raises(SqlError, match=r"\w"):
        database.execute(attack)
    return time.monotonic() - start


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Database:
    """One database for all hostile statements: what one left behind, the next would see."""
    return insurance(tmp_path_factory.mktemp("attacked"), limits=LIMITS.model_copy(update={"timeout_seconds": 0.1}))


@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in HOSTILE]
)
def test_hostile_sql_is_refused_or_stopped_and_leaves_no_trace(
    attack: str, attacked: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = attacked.path.parent
    monkeypatch.chdir(folder)
    before = state(folder)
    assert any(
        seconds_taken(attacked, HOSTILE[attack]) < 0.1 + 0.2 for _ in range(5)
    )  # a busy machine may be late now and then
    assert state(folder) == before
    assert attacked.execute("SELECT count(*) FROM claims").rows == ((3,),)


@pytest.mark.parametrize(
    ("sql", "kind", "words"),
    [
        ("DROP TABLE claims", "denied", "DROP is not allowed"),
        ("SELECT load_extension('x')", "denied", "load_extension"),
        ("SELECT * FROM pragma_table_info('claims')", "denied", "This statement is not allowed"),
        (HOSTILE["endless"], "timeout", "stopped after 0.5 s"),
        (HOSTILE["instr bomb"], "timeout", "stopped after 0.5 s"),
        (HOSTILE["fat sort"], "too_large", "memory"),
        (HOSTILE["long"], "too_large", "too large"),
        ("SELECT printf('%40000000d', 1) || printf('%40000000d', 1)", "too_large", "too big"),
        ("SELECT amout FROM claims", "error", "no such column: amout"),
        ("SELECT 1; SELECT 2", "error", "one statement per call"),
        ("SELECT * FROM claims WHERE amount > ?", "error", "Parameters"),
        ("-- nothing", "error", "no query"),
        ("", "error", "no query"),
        ("SELECT '\0'", "error", "character"),
        ("SELECT '\ud800'", "error", "character"),
    ],
)
def test_refusals_say_what_to_change(sql: str, kind: str, words: str, tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"timeout_seconds": 30.0}) if kind == "too_large" else LIMITS
    with pytest.raises(SqlError, match=words) as caught:
        insurance(tmp_path, limits=limits).execute(sql)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM claims;",
        "WITH big AS (SELECT * FROM claims WHERE amount > 0) SELECT count(*) FROM big -- note",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 3) SELECT max(x) FROM c",
        "SELECT count(*) FROM (SELECT rank() OVER (ORDER BY amount) FROM claims)",
        "SELECT count(*) FROM claims JOIN policies USING (policy_id) WHERE filed_on LIKE '2024%'",
        "SELECT json_array_length('[1, 2, 3]')",
        "SELECT max(value) FROM json_each('[1, 2, 3]')",
        "SELECT count(*) FROM sqlite_master",
        "VALUES (3)",
    ],
)
def test_ordinary_reading_works(sql: str, tmp_path: Path) -> None:
    assert insurance(tmp_path).execute(sql).rows == ((3,),)


def test_rows_beyond_the_cap_are_left_out_and_reported(tmp_path: Path) -> None:
    database = insurance(tmp_path)
    assert not database.execute("SELECT claim_id FROM claims", max_rows=3).truncated
    result = database.execute("SELECT claim_id FROM claims", max_rows=2)
    assert (result.rows, result.truncated) == (((1,), (2,)), True)
    assert len(database.execute("SELECT 1 FROM claims a, claims b, claims c").rows) == LIMITS.max_rows


def test_bytes_beyond_the_cap_are_left_out_and_reported(tmp_path: Path) -> None:
    result = insurance(tmp_path).execute("SELECT printf('%60000d', claim_id) FROM claims")
    assert (len(result.rows), result.truncated) == (1, True)


def test_schema_lists_types_keys_and_references(tmp_path: Path) -> None:
    schema = insurance(
        tmp_path, "CREATE VIEW large AS SELECT amount FROM claims; CREATE VIEW broken AS SELECT 1 FROM gone;"
    ).schema
    assert [table.name for table in schema.tables] == ["customers", "policies", "claims", "large"]
    policies = schema.table("POLICIES")
    assert policies is not None
    assert policies.column("Customer_ID") == Column("customer_id", "INTEGER", False, "customers.customer_id", False)
    customers = schema.table("customers")
    assert customers is not None
    assert customers.columns[:2] == (
        Column("customer_id", "INTEGER", True, None, False),
        Column("full_name", "TEXT", False, None, True),
    )
    assert schema.table("nothing") is None
    assert customers.column("nothing") is None


def test_a_text_that_is_not_utf8_is_still_readable(tmp_path: Path) -> None:
    database = insurance(tmp_path, "UPDATE customers SET city = CAST(x'42e9' AS TEXT) WHERE customer_id = 1;")
    assert database.execute("SELECT city, x'00ff' FROM customers WHERE customer_id = 1").rows == (
        ("B\ufffd", b"\x00\xff"),
    )


@pytest.mark.parametrize("name", ["with space.sqlite", "50%.sqlite", "what?.sqlite", "a#b.sqlite", "é&mode=rwc.db"])
def test_a_path_is_taken_literally(name: str, tmp_path: Path) -> None:
    path = insurance_file(tmp_path).rename(tmp_path / name)
    assert Database(path, LIMITS).execute("SELECT count(*) FROM claims").rows == ((3,),)
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("content", [b"", b"not a database, just text" * 99, b"SQLite format 3\0" + b"\7" * 8000])
def test_a_file_that_is_no_database_is_the_users_problem(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.sqlite"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.sqlite"):
        Database(path, LIMITS)


def test_a_missing_file_is_the_users_problem(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Database(tmp_path / "none.sqlite", LIMITS)


def test_damage_found_by_a_query_is_no_wrong_query(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(UserError, match="restore or replace"):
        Database(path, LIMITS).execute("SELECT * FROM claims")


def test_changes_still_in_the_write_ahead_log_are_seen(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("DELETE FROM claims WHERE claim_id > 1")
        writer.commit()
        before = state(tmp_path)
        assert Database(path, LIMITS).execute("SELECT count(*) FROM claims").rows == ((1,),)
        assert state(tmp_path) == before


def test_a_locked_database_shows_its_last_committed_state(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("DELETE FROM claims")
        assert Database(path, LIMITS).execute("SELECT count(*) FROM claims").rows == ((3,),)


def test_many_threads_share_one_database(tmp_path: Path) -> None:
    database = insurance(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda i: database.execute(f"SELECT {i} + count(*) FROM claims").rows[0][0], range(80))
        assert list(results) == [i + 3 for i in range(80)]


def test_a_sandbox_that_died_while_idle_is_replaced(tmp_path: Path) -> None:
    database = insurance(tmp_path)
    database.execute("SELECT 1")
    for worker in sandbox_pool._idle:
        worker.process.kill()
        worker.process.wait()
    assert database.execute("SELECT 1").rows == ((1,),)


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    database = insurance(tmp_path)
    assert database.execute("SELECT count(*) FROM claims").rows == ((3,),)
    (tmp_path / "new").mkdir()
    insurance_file(tmp_path / "new", "DELETE FROM claims WHERE claim_id = 1;").replace(database.path)
    assert database.execute("SELECT count(*) FROM claims").rows == ((2,),)
    database.path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        database.execute("SELECT count(*) FROM claims")


def test_a_sandbox_may_map_only_little_more_than_it_has(tmp_path: Path) -> None:
    insurance(tmp_path).execute("SELECT 1")
    process = Path(f"/proc/{sandbox_pool._idle[-1].process.pid}")
    limits = {line[:25].strip(): line[26:].split()[0] for line in (process / "limits").read_text().splitlines()[1:]}
    mapped = int((process / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    assert int(limits["Max address space"]) - mapped <= 200 << 20
    assert (limits["Max file size"], limits["Max core file size"], limits["Max open files"]) == ("0", "0", "32")


def test_a_sandbox_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_pool, "_GRACE_SECONDS", 0.1)
    database = insurance(tmp_path)
    database.execute("SELECT 1")
    os.kill(sandbox_pool._idle[-1].process.pid, signal.SIGSTOP)
    with pytest.raises(SqlError, match=r"stopped after 0\.5 s"):
        database.execute("SELECT 1")
    monkeypatch.undo()
    assert database.execute("SELECT 1").rows == ((1,),)


def test_official_statements_run_on_a_private_copy(tmp_path: Path) -> None:
    database = insurance(tmp_path)
    before = state(tmp_path)
    statements = ("DELETE FROM claims WHERE claim_id > 1 RETURNING claim_id", "SELECT claim_id FROM claims")
    assert database.official(statements, 1.0, "strict") == [((2,), (3,)), ((1,),)]
    assert database.official(("PRAGMA cache_size = 1", "VACUUM INTO 'x.db'"), 1.0, "strict") == [(), ()]
    for hostile in ("DETACH main", "SELECT load_extension('x')", HOSTILE["fat sort"], "SELECT zeroblob(1000000001)"):
        with pytest.raises(SqlError):
            database.official((hostile,), 0.5, "strict")
    assert state(tmp_path) == before


NUMBERS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 3000000) "


@pytest.mark.parametrize(
    "sql",
    [
        f"{NUMBERS} SELECT group_concat(x) OVER (ORDER BY x) FROM c",
        f"{NUMBERS} SELECT hex(randomblob(1000000)) FROM c LIMIT 120",
        f"{NUMBERS} SELECT x, x, x FROM c",
    ],
)
def test_the_deadline_of_official_statements_covers_the_way_of_their_result(sql: str, tmp_path: Path) -> None:
    database = insurance(tmp_path)
    database.official(("SELECT 1",), 5.0, "strict")  # the sandbox has started
    started = time.monotonic()
    with pytest.raises(SqlError) as refused:
        database.official((sql,), 0.3, "strict")
    assert refused.value.kind in ("timeout", "too_large")
    assert time.monotonic() - started < 1.3


def test_no_sandbox_outlives_a_killed_owner(tmp_path: Path) -> None:
    script = (
        "import sys, time; from shared.sql import database as d, sandbox_pool as p; from tests.shared.examples import "
        "LIMITS\nd.Database(sys.argv[1], LIMITS).execute('SELECT 1'); print(p._idle[0].process.pid, flush=True); "
        "time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(insurance_file(tmp_path))], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert _ends(pid)


def _ends(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if (
                "(python" in (stat := Path(f"/proc/{pid}/stat").read_text())
                and stat.rsplit(")", 1)[1].split()[0] == "Z"
            ):
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("sql", "name"),
    [
        ('SELECT "amout" FROM claims', "amout"),
        ('SELECT amount FROM claims WHERE note = "hail"', "hail"),
        ('SELECT "amount" FROM claims', None),
        ("SELECT amount FROM claims WHERE note = 'say \"hail\"'", None),
        ("SELECT amount FROM claims", None),
    ],
)
def test_a_double_quoted_name_that_is_no_column_is_found(sql: str, name: str | None, tmp_path: Path) -> None:
    assert insurance(tmp_path).text_in_double_quotes(sql) == name


VIRTUAL = """
CREATE VIRTUAL TABLE docs USING fts5(title, body);
INSERT INTO docs VALUES ('First steps', 'open the box'), ('Second steps', 'close the box');
CREATE VIRTUAL TABLE notes USING fts4(title, body); INSERT INTO notes VALUES ('A', 'red apple');
CREATE VIRTUAL TABLE places USING rtree(id, minx, maxx); INSERT INTO places VALUES (1, 0, 1), (2, 5, 6);
"""


def test_full_text_and_rtree_tables_are_read_and_their_storage_is_not_offered(tmp_path: Path) -> None:
    database = insurance(tmp_path, VIRTUAL)
    names = [table.name for table in database.schema.tables]
    assert names == ["customers", "policies", "claims", "docs", "notes", "places"]
    for sql, rows in {
        "SELECT title FROM docs": (("First steps",), ("Second steps",)),
        "SELECT title FROM docs WHERE docs MATCH 'close' ORDER BY bm25(docs)": (("Second steps",),),
        "SELECT snippet(docs, 1, '<', '>', '', 9) FROM docs WHERE docs MATCH 'open'": (("<open> the box",),),
        "SELECT title FROM notes WHERE notes MATCH 'apple'": (("A",),),
        "SELECT id FROM places WHERE minx > 4": ((2,),),
        "SELECT count(*) FROM docs, places": ((4,),),
    }.items():
        assert database.execute(sql).rows == rows
        assert database.official((sql,), 5.0, "strict") == [rows]
    for sql in ("DELETE FROM docs", "INSERT INTO docs(docs) VALUES ('rebuild')", "SELECT optimize(notes) FROM notes"):
        with pytest.raises(SqlError):
            database.execute(sql)


def test_a_cell_of_many_bytes_does_not_stop_queries_beside_it(tmp_path: Path) -> None:
    extra = "CREATE TABLE papers (id INTEGER PRIMARY KEY, body, scan BLOB);"
    path = insurance_file(tmp_path, extra)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO papers VALUES (1, ?, ?)", ("word " * 500_000, b"\1" * 20_000_000))
    limits = LIMITS.model_copy(update={"timeout_seconds": 10.0})
    database = Database(path, limits)
    query = "SELECT id, length(body), length(scan) FROM papers WHERE body LIKE '%word%'"
    assert database.execute(query).rows == ((1, 2_500_000, 20_000_000),)
    result = database.execute("SELECT id, body FROM papers")
    assert (result.rows, result.truncated) == ((), True)


@pytest.mark.parametrize("length", [200, 4000])
def test_column_names_and_error_texts_are_capped_in_the_sandbox(length: int, tmp_path: Path) -> None:
    """Names multiplied by sub-queries: 343 columns, each with a name as long as the query's text allows."""
    name = " " * length
    seven = {table: ", ".join(f"{table} {x}" for x in "abcdefg") for table in "tuv"}
    bomb = (
        f'WITH t AS (SELECT 1 AS "{name}"), u AS (SELECT * FROM {seven["t"]}), v AS (SELECT * FROM {seven["u"]}) '
        f"SELECT * FROM {seven['v']}"
    )
    database = insurance(tmp_path)
    with pytest.raises(SqlError, match="names of the result's columns are too long") as caught:
        database.execute(bomb)
    assert caught.value.kind == "too_large"
    with pytest.raises(SqlError, match="no such column") as caught:
        database.execute(f'SELECT claims."{"x" * 40_000}" FROM claims')
    assert len(str(caught.value)) <= 1_000


def test_the_time_of_a_query_is_told_without_the_start_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = insurance(tmp_path)
    sandbox_pool._idle.clear()
    start = sandbox_pool._Worker.__init__

    def slow_start(worker: sandbox_pool._Worker) -> None:
        time.sleep(0.3)  # a loaded machine
        start(worker)

    monkeypatch.setattr(sandbox_pool._Worker, "__init__", slow_start)
    assert database.execute("SELECT count(*) FROM claims").seconds < 0.2


CODE = {
    "extension": "SELECT load_extension('evil.so')",
    "tokenizer address": "SELECT fts3_tokenizer('simple')",
    "tokenizer pointer": "SELECT fts3_tokenizer('simple', x'4141414141414141')",
    "fts5 pointer": "SELECT fts5(1)",
    "log": "SELECT sqlite_log(1, 'x')",
    "r-tree node": "SELECT rtreenode(2, x'00')",
}
ENTRIES = {
    "house": lambda database, sql: database.execute(sql),
    "official": lambda database, sql: database.official((sql,), 1.0, "ignore"),
    "official after a write": lambda database, sql: database.official(("DELETE FROM claims", sql), 1.0, "strict"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("attack", CODE)
def test_functions_that_are_not_on_the_list_are_refused_at_every_entry(attack: str, entry: str, tmp_path: Path) -> None:
    database = insurance(tmp_path)
    with pytest.raises(SqlError, match=r"not authorized to use function|no such function"):
        ENTRIES[entry](database, CODE[attack])
    with pytest.raises(SqlError):  # hidden in a sub-query, too
        ENTRIES[entry](database, f"SELECT 1 WHERE ({CODE[attack]}) IS NULL")


@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in HOSTILE]
)
def test_hostile_sql_leaves_no_trace_through_the_official_entry(
    attack: str, attacked: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = attacked.path.parent
    monkeypatch.chdir(folder)
    before = state(folder)
    start = time.monotonic()
    with contextlib.suppress(SqlError):  # what stays within the private copy is allowed
        attacked.official((HOSTILE[attack],), 0.3, "strict")
    assert time.monotonic() - start < 5
    assert state(folder) == before
    assert attacked.official(("SELECT count(*) FROM claims",), 5.0, "strict") == [((3,),)]
