"""A live PostgreSQL, MySQL or DuckDB database, read through SQLAlchemy into one SQLite file.

A snapshot and not direct execution, on purpose: an agent in training runs thousands of queries at once, some of them
hostile; the snapshot keeps that load and risk off the live server, gives every run the same rows, and lets all of the
sandbox's limits apply. The price: gold SQL must run on SQLite, and the import names each one that does not.

The role must not be able to write: that is asked of the server, and a role that can is refused. Needs SQLAlchemy and the
server's driver, which are no part of the environment.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.errors import UserError

MAX_ROWS = 1_000_000  # of one table
_BLOCK = 1_000
_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "duckdb": "duckdb-engine"}
_WRITING = ("INSERT", "UPDATE", "DELETE", "CREATE", "DROP", "ALTER", "ALL PRIVILEGES")


def is_address(text: str) -> bool:
    """True for an address like postgresql://reader@host/name, in contrast to a path."""
    return re.match(r"[a-z][a-z0-9+]*://", text) is not None


def snapshot(address: str, file: Path, tables: Sequence[str] = ()) -> Path:
    """Copy `tables` (default: all) with keys and references into the new SQLite file `file`; returns it.

    Raises UserError without SQLAlchemy or a driver, for a role that can write, a missing table, one of more than MAX_ROWS
    rows, and whatever the server refuses. Passwords never appear in a message.
    """
    alchemy = _sqlalchemy()
    shown = re.sub(r"//[^@/]*@", "//…@", address)
    partial = file.with_name(file.name + ".partial")
    partial.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        engine = alchemy.create_engine(address, **_read_only(address))
        with engine.connect() as live, contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as copy:
            _refuse_a_writing_role(live, alchemy, shown)
            inspector = alchemy.inspect(live)
            for name in _chosen(inspector.get_table_names(), tables, shown):
                _copy_table(live, inspector, alchemy, copy, name)
    except (alchemy.exc.SQLAlchemyError, ImportError) as error:
        partial.unlink(missing_ok=True)
        driver = _DRIVERS.get(address.split(":")[0].split("+")[0], "its driver")
        reason = str(getattr(error, "orig", None) or error).replace(address, shown).splitlines()[0]
        raise UserError(
            f"{shown} cannot be read ({reason}); check address, role and network, and that {driver} is installed."
        ) from error
    except UserError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(file)
    return file


def _sqlalchemy() -> Any:
    try:
        import sqlalchemy
        import sqlalchemy.exc
    except ImportError as error:
        raise UserError(
            "Reading a live database needs the package SQLAlchemy and a driver (psycopg, pymysql or duckdb-engine); install "
            "them into the environment, or give a SQLite file."
        ) from error
    return sqlalchemy


def _read_only(address: str) -> dict[str, Any]:
    return {"connect_args": {"read_only": True}} if address.startswith("duckdb") else {}


def _refuse_a_writing_role(live: Any, alchemy: Any, shown: str) -> None:
    """Ask the server what the role may do; DuckDB and SQLite are opened for reading by us and have no roles."""
    if live.dialect.name == "postgresql":
        live.execute(alchemy.text("SET TRANSACTION READ ONLY"))
        found = live.execute(
            alchemy.text(
                "SELECT rolsuper OR EXISTS (SELECT 1 FROM information_schema.role_table_grants WHERE grantee IN "
                "(current_user, 'PUBLIC') AND privilege_type IN ('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE') AND table_schema "
                "NOT IN ('pg_catalog', 'information_schema')) FROM pg_roles WHERE rolname = current_user"
            )
        ).scalar()
    elif live.dialect.name in ("mysql", "mariadb"):
        grants = " ".join(str(row[0]).split(" TO ")[0] for row in live.execute(alchemy.text("SHOW GRANTS")))
        found = any(word in grants.upper() for word in _WRITING)
    else:
        found = False
    if found:
        raise UserError(
            f"The role of {shown} can write; give one that may only SELECT, so that nothing can harm the database."
        )


def _chosen(known: Iterable[str], wanted: Sequence[str], shown: str) -> list[str]:
    names = sorted(known)
    missing = [name for name in wanted if name not in names]
    if missing or not names:
        raise UserError(
            f"{shown} holds no table {', '.join(missing) or 'at all'}; it has: {', '.join(names)[:500] or 'none'}."
        )
    return [name for name in names if not wanted or name in wanted]


def _copy_table(live: Any, inspector: Any, alchemy: Any, copy: sqlite3.Connection, name: str) -> None:
    columns = [column["name"] for column in inspector.get_columns(name)]
    copy.execute(f"CREATE TABLE {_quoted(name)} ({', '.join(_definitions(inspector, name))})")
    insert = f"INSERT INTO {_quoted(name)} VALUES ({', '.join('?' * len(columns))})"
    table = alchemy.Table(name, alchemy.MetaData(), autoload_with=live, resolve_fks=False)
    rows = live.execution_options(stream_results=True).execute(alchemy.select(table).limit(MAX_ROWS + 1))
    count = 0
    copy.execute("BEGIN")
    for block in rows.partitions(_BLOCK):
        count += len(block)
        if count > MAX_ROWS:
            raise UserError(f"Table {name} has more than {MAX_ROWS} rows; name the tables you need with --tables.")
        copy.executemany(insert, ([_plain(value) for value in row] for row in block))
    copy.execute("COMMIT")


def _definitions(inspector: Any, name: str) -> Iterator[str]:
    for column in inspector.get_columns(name):
        kind = re.sub(r"[^A-Za-z0-9_(), ]", "", str(column["type"]).split(" COLLATE")[0]) or "BLOB"
        yield f"{_quoted(column['name'])} {kind}{'' if column['nullable'] else ' NOT NULL'}"
    if key := inspector.get_pk_constraint(name)["constrained_columns"]:
        yield f"PRIMARY KEY ({_listed(key)})"
    for link in inspector.get_foreign_keys(name):
        target = f"{_quoted(link['referred_table'])} ({_listed(link['referred_columns'])})"
        yield f"FOREIGN KEY ({_listed(link['constrained_columns'])}) REFERENCES {target}"


def _plain(value: Any) -> Any:
    """The value as SQLite stores it: numbers as numbers, times as ISO 8601 text, structures as JSON."""
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value if not isinstance(value, int) or abs(value) < 2**63 else float(value)
    if isinstance(value, decimal.Decimal):
        return float(value) if value % 1 else _plain(int(value))
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat(" ") if isinstance(value, datetime.datetime) else value.isoformat()
    if isinstance(value, (memoryview, bytearray)):
        return bytes(value)
    return str(value) if isinstance(value, (uuid.UUID, datetime.timedelta)) else json.dumps(value, default=str)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(_quoted, names))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
