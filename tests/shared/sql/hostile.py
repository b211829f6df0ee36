"""Statements that try to do harm, each of which the sandbox must refuse or stop.

For the insurance database of examples.py.
"""

from __future__ import annotations

_ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
_FAT = "printf('%900000d', x)"
_DEEP_CTES = "WITH c0 AS (SELECT 1 x), " + ", ".join(
    f"c{i} AS (SELECT a.x FROM c{i - 1} a, c{i - 1} b)" for i in range(1, 40)
)

WRITING = {
    "drop": "DROP TABLE claims",
    "delete": "DELETE FROM claims",
    "delete returning": "DELETE FROM claims RETURNING note",
    "insert": "INSERT INTO claims (claim_id) VALUES (9)",
    "update": "UPDATE claims SET amount = 0",
    "replace": "REPLACE INTO customers VALUES (1, 'x', 'y')",
    "cte delete": "WITH x AS (SELECT 1) DELETE FROM claims",
    "create": "CREATE TABLE t (x)",
    "create temp": "CREATE TEMP TABLE t AS SELECT * FROM claims",
    "create temp view": "CREATE TEMP VIEW claims AS SELECT 3",
    "create index": "CREATE INDEX i ON claims (amount)",
    "create trigger": "CREATE TRIGGER t AFTER INSERT ON claims BEGIN SELECT 1; END",
    "create virtual": "CREATE VIRTUAL TABLE t USING fts5(x)",
    "create virtual csv": "CREATE VIRTUAL TABLE t USING csv(filename='/etc/passwd')",
    "alter": "ALTER TABLE claims ADD COLUMN x",
    "alter drop": "ALTER TABLE claims DROP COLUMN amount",
    "schema table": "UPDATE sqlite_master SET sql = 'x'",
    "schema delete": "DELETE FROM sqlite_schema",
    "pages": "UPDATE sqlite_dbpage SET data = x'00' WHERE pgno = 1",
    "analyze": "ANALYZE",
    "reindex": "REINDEX",
    "begin": "BEGIN EXCLUSIVE",
    "savepoint": "SAVEPOINT s",
    "explain write": "EXPLAIN DELETE FROM claims",
    "two statements": "SELECT 1; DROP TABLE claims",
    "commented write": "/* SELECT */ -- SELECT\nDROP TABLE claims",
    "write after null": "SELECT 1\0; DROP TABLE claims",
}
OUTSIDE = {
    "attach new": "ATTACH DATABASE 'attached.db' AS a",
    "attach expression": "ATTACH 'at' || 'tached.db' AS a",
    "attach uri": "ATTACH 'file:attached.db?mode=rwc' AS a",
    "attach memory": "ATTACH ':memory:' AS a",
    "attach subquery": "ATTACH (SELECT full_name FROM customers) AS a",
    "detach": "DETACH main",
    "vacuum": "VACUUM",
    "vacuum into": "VACUUM INTO 'copy.db'",
    "pragma": "PRAGMA journal_mode = WAL",
    "pragma writable": "PRAGMA writable_schema = 1",
    "pragma query_only": "PRAGMA query_only = 0",
    "pragma limit": "PRAGMA hard_heap_limit = 1",
    "pragma temp": "PRAGMA temp_store_directory = '/tmp'",
    "pragma function": "SELECT * FROM pragma_journal_mode",
    "extension": "SELECT load_extension('evil.so')",
    "extension in view": "WITH x AS (SELECT load_extension('evil') y) SELECT y FROM x",
    "readfile": "SELECT readfile('/etc/passwd')",
    "writefile": "SELECT writefile('stolen.txt', 'x')",
    "edit": "SELECT edit('x', 'touch stolen.txt')",
    "fsdir": "SELECT * FROM fsdir('/')",
    "tokenizer": "SELECT fts3_tokenizer('simple', x'4141414141414141')",
}
EATING = {
    "zeroblob": "SELECT zeroblob(900000000)",
    "randomblob": "SELECT hex(randomblob(500000000))",
    "doubling": "SELECT replace(replace(replace(printf('%900000d', 1), ' ', 'xxxxxxxx'), 'x', 'yyyyyyyy'), "
    "'y', 'zzzzzzzz')",
    "group_concat": f"{_ENDLESS} SELECT group_concat(x) FROM c",
    "json array": f"{_ENDLESS} SELECT json_group_array(x) FROM c",
    "json object": f"{_ENDLESS} SELECT json_group_object(x, x) FROM c",
    "endless": f"{_ENDLESS} SELECT max(x) FROM c",
    "endless rows": f"{_ENDLESS} SELECT x FROM c WHERE x < 0",
    "endless subquery": f"SELECT full_name FROM customers WHERE customer_id IN ({_ENDLESS} SELECT x FROM c)",
    "endless union": "WITH RECURSIVE c(x) AS (SELECT 1 UNION SELECT x + 1 FROM c) SELECT max(x) FROM c",
    "endless sort": f"{_ENDLESS} SELECT x FROM c ORDER BY x",
    "endless group": f"{_ENDLESS} SELECT count(*) FROM c GROUP BY x",
    "endless distinct": f"{_ENDLESS} SELECT count(DISTINCT x) FROM c",
    "endless window": f"{_ENDLESS} SELECT sum(x) OVER (ORDER BY x DESC) FROM c",
    "fat queue": "WITH RECURSIVE c(x) AS (SELECT printf('%900000d', 1) UNION ALL SELECT x || '' FROM c, claims) "
    "SELECT max(x) FROM c",
    "fat sort": f"{_ENDLESS} SELECT {_FAT} AS fat FROM c ORDER BY fat",
    "fat distinct": f"{_ENDLESS} SELECT count(*) FROM (SELECT DISTINCT {_FAT} FROM c)",
    "fat group": f"{_ENDLESS} SELECT {_FAT}, count(*) FROM c GROUP BY 1",
    "fat window": f"{_ENDLESS} SELECT max({_FAT}) OVER () FROM c",
    "fat row": "SELECT " + ", ".join(["printf('%999000d', 1)"] * 390),
    "cross join": "SELECT count(*) FROM " + ", ".join(f"claims t{i}" for i in range(40)),
    "too many joins": "SELECT count(*) FROM " + ", ".join(f"claims t{i}" for i in range(100)),
    "planner bomb": f"{_DEEP_CTES} SELECT count(*) FROM c39",
    "like bomb": f"SELECT printf('%0900000d', 0) LIKE '%{'0' * 900}1'",
    "glob bomb": f"SELECT printf('%0900000d', 0) GLOB '*{'0' * 900}1'",
    "instr bomb": "SELECT instr(printf('%0900000d', 0), printf('%0450000d', 1))",
    "replace bomb": "SELECT replace(printf('%0900000d', 0), printf('%0450000d', 1), 'x')",
    "deep": "SELECT " + "(" * 2000 + "1" + ")" * 2000,
    "deep minus": "SELECT " + "- " * 20_000 + "1",
    "deep select": "SELECT * FROM (" * 300 + "SELECT 1" + ")" * 300,
    "deep json": f"SELECT json('{'[' * 20_000}')",
    "compound": " UNION ALL ".join(["SELECT 1"] * 400),
    "wide": "SELECT " + ", ".join(["1"] * 5000),
    "wide in": f"SELECT 1 IN ({', '.join(['random()'] * 9000)}) FROM claims a, claims b, claims c" + ", claims d" * 60,
    "long": f"SELECT '{'x' * 200_000}'",
    "longer": f"SELECT '{'x' * 30_000_000}'",
    "half a character": "SELECT '\ud800'",
}
HOSTILE = WRITING | OUTSIDE | EATING

# Enough for the fast tests: all that is refused at once, and one of each kind that has to be stopped.
_OF_EACH_KIND = {
    "zeroblob", "doubling", "group_concat", "endless", "fat queue", "fat row", "cross join", "planner bomb",
    "instr bomb", "deep", "deep json", "compound", "wide", "longer", "half a character",
}  # fmt: skip
QUICK = {*WRITING, *OUTSIDE, *_OF_EACH_KIND}
