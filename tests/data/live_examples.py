"""Tables that any database can hold, made on a server or in a file, and what a snapshot of them has to hold."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from data.live import snapshot
from shared.sql.database import Database
from tests.shared.examples import LIMITS

TABLES = """
CREATE TABLE "odd na""me; 50% :x" ("sel ect" INTEGER PRIMARY KEY, "per%cent" VARCHAR(20) NOT NULL);
CREATE TABLE kinds (
    id INTEGER PRIMARY KEY, parent INTEGER REFERENCES "odd na""me; 50% :x" ("sel ect"),
    exact DECIMAL(12, 2), whole DECIMAL(12, 2), rough DOUBLE PRECISION, big BIGINT, yes BOOLEAN, name VARCHAR(40),
    digits VARCHAR(10), born DATE, at_time TIME, seen TIMESTAMP, doc JSON, raw {bytes}
);
INSERT INTO "odd na""me; 50% :x" VALUES (7, '100%');
INSERT INTO kinds VALUES (1, 7, 2.50, 3.00, 0.1, 9223372036854775807, TRUE, 'Zoë', '007', '1999-12-31', '23:59:58',
                          '2024-02-29 12:30:00', '{{"a": [1, "ü"]}}', {blob});
INSERT INTO kinds (id) VALUES (2);
"""
VIEW = "CREATE VIEW named AS SELECT id, name FROM kinds WHERE name IS NOT NULL"


def create(address: str, blob: str, kind: str) -> None:
    """Make the tables of TABLES on a server or in a file, whatever was there before."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(address)
    drops = ["DROP VIEW IF EXISTS named", "DROP TABLE IF EXISTS kinds", 'DROP TABLE IF EXISTS "odd na""me; 50% :x"']
    made = [part for part in TABLES.format(bytes=kind, blob=blob).split(";\n") if part.strip()]
    with engine.begin() as connection:
        if connection.dialect.name in ("mysql", "mariadb"):
            connection.exec_driver_sql("SET SESSION sql_mode = 'ANSI_QUOTES'")
        for statement in [*drops, *made, VIEW]:
            connection.execute(sqlalchemy.text(statement.replace(":", r"\:")))  # no parameters, no placeholders
    engine.dispose()


def check_snapshot(address: str, folder: Path) -> None:
    """Everything that TABLES holds arrives as SQLite knows it."""
    copy = Database(snapshot(address, folder), LIMITS)
    assert [table.name for table in copy.schema.tables] == ["kinds", 'odd na"me; 50% :x']
    rows = copy.execute("SELECT * FROM kinds ORDER BY id").rows
    doc = rows[0][12]
    assert json.loads(doc) == {"a": [1, "ü"]}
    assert rows[0] == (
        1, 7, 2.5, 3, 0.1, 2**63 - 1, 1, "Zoë", "007", "1999-12-31", "23:59:58", "2024-02-29 12:30:00", doc, b"\x00\xff"
    )  # fmt: skip
    assert rows[1] == (2, *[None] * 13)
    assert copy.execute("""SELECT "per%cent" FROM "odd na""me; 50% :x" WHERE "sel ect" = 7""").rows == (("100%",),)
    assert copy.execute("SELECT count(*) FROM kinds WHERE born < '2000-01-01' AND seen > '2024'").rows == ((1,),)
    view = Database(snapshot(address, folder / "view", ["named"]), LIMITS)
    assert view.execute("SELECT * FROM named").rows == ((1, "Zoë"),)


def foreign_key_problems(path: Path) -> list[Any]:
    """Rows whose references lead nowhere, in a SQLite file."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA foreign_key_check").fetchall()
