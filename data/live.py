"""Copy a live PostgreSQL, MySQL, MariaDB or DuckDB database into one SQLite file, through SQLAlchemy.

The copy is on purpose: an agent in training runs thousands of queries at once, some of them hostile. The copy keeps
that load and risk off the live server, gives every run the same rows, and makes all limits of the sandbox apply. The
price: gold SQL must run on SQLite; the import translates it and names each query that still fails.

A role that may write is refused. All tables are read in one read-only transaction, so their rows are consistent.
Needs the packages of requirements/live.txt.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import hashlib
import json
import re
import sqlite3
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tqdm import tqdm

from shared.errors import UserError
from shared.runs.output_paths import refuse_overwriting
from shared.sql.database import quoted

MAX_ROWS = 1_000_000  # of one table
_BLOCK = 1_000
_SCHEMES = {  # of an address: SQLAlchemy's name with the driver, and sqlglot's name of the dialect
    "postgresql": ("postgresql+psycopg", "postgres"),
    "postgres": ("postgresql+psycopg", "postgres"),
    "mysql": ("mysql+pymysql", "mysql"),
    "mariadb": ("mariadb+pymysql", "mysql"),
    "duckdb": ("duckdb", "duckdb"),
    "sqlite": ("sqlite", "sqlite"),
}
# The SQLite type of a column by the Python type of its values. Other columns get no type, so nothing is converted.
_SQLITE_TYPES: dict[type, str] = dict.fromkeys((str, uuid.UUID, dict, list), "TEXT") | {
    bool: "BOOLEAN",
    int: "INTEGER",
    float: "REAL",
    decimal.Decimal: "NUMERIC",
    bytes: "BLOB",
    datetime.datetime: "DATETIME",
    datetime.date: "DATE",
    datetime.time: "TIME",
}
_ONE_STATE = "ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_CAN_WRITE = """
    SELECT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) OR EXISTS (
        SELECT 1 FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.relkind IN ('r', 'p', 'v', 'f') AND n.nspname !~ '^(pg_|information_schema)'
        AND (has_table_privilege(c.oid, 'DELETE, TRUNCATE') OR has_any_column_privilege(c.oid, 'INSERT, UPDATE')))
"""
_WRITING = re.compile(
    r"\b(INSERT|UPDATE|DELETE|CREATE(?! TEMPORARY)|DROP|ALTER|INDEX|TRIGGER|FILE|SUPER|ALL PRIVILEGES)\b"
)


def is_address(text: str) -> bool:
    """True for an address like postgresql://reader@host/name, False for a path."""
    return re.match(r"[a-z][a-z0-9+]*://", text) is not None


def dialect(address: str) -> str:
    """The SQL dialect of an address, as sqlglot names it. Raises UserError for a database that cannot be read."""
    scheme = re.split(r"[+:]", address)[0]
    if scheme not in _SCHEMES:
        raise UserError(f"{scheme}:// is not supported; give an address that begins with {', '.join(_SCHEMES)}.")
    return _SCHEMES[scheme][1]


def snapshot(address: str, folder: Path, tables: Sequence[str] = ()) -> Path:
    """Copy `tables` (default: all tables, no views) into the new SQLite file `folder`/<database>.sqlite.

    Keys are copied, and references among the copied tables. Raises UserError without SQLAlchemy or a driver, for a role
    that may write, for a missing table, for one of more than MAX_ROWS rows or that SQLite cannot hold, and for whatever
    the server refuses; then nothing is left behind. Passwords never appear in a message.
    """
    dialect(address)
    alchemy = _sqlalchemy()
    shown = re.sub(r"//.*@", "//…@", address).split("?")[0]
    try:
        url = alchemy.make_url(address)
    except (alchemy.exc.ArgumentError, ValueError):
        raise UserError(f"{shown} is not an address like postgresql://reader@host/database; correct it.") from None
    file = folder / f"{re.sub(r'[^\w.-]', '_', Path(url.database or 'database').stem)}.sqlite"
    partial = file.with_name(file.name + ".partial")
    if url.database:
        refuse_overwriting([file], [Path(url.database)])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            _connected(url, alchemy) as live,
            contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as copy,
        ):
            can_write = False  # DuckDB and SQLite know no roles
            if live.dialect.name == "postgresql":
                can_write = bool(live.execute(alchemy.text(_CAN_WRITE)).scalar())
            elif live.dialect.name in ("mysql", "mariadb"):  # a role granted to the role is not seen
                can_write = any(map(_grants_writing, live.execute(alchemy.text("SHOW GRANTS")).scalars()))
            if can_write:
                raise UserError(f"The role of {shown} can write; give one that may only SELECT.")
            inspector = alchemy.inspect(live)
            known = sorted(inspector.get_table_names())
            missing = set(tables) - {*known, *inspector.get_view_names()}
            if missing or not (tables or known):
                raise UserError(
                    f"{shown} holds no table {', '.join(sorted(missing)) or 'at all'}; it has: "
                    f"{', '.join(known)[:500] or 'none'}."
                )
            names = list(tables) or known
            for name in tqdm(names, "reading tables", unit="table", leave=False, disable=None):
                _copy_table(inspector, copy, name, names)
        partial.replace(file)
    except (alchemy.exc.SQLAlchemyError, ImportError) as error:
        reason = str(getattr(error, "orig", None) or error).replace(address, shown).strip().splitlines()[0].rstrip(".;")
        raise UserError(
            f"{shown} cannot be read ({reason}); check address, role and network, and that the packages of "
            "requirements/live.txt are installed."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return file


def _sqlalchemy() -> Any:
    try:
        import sqlalchemy
        import sqlalchemy.dialects.mysql
        import sqlalchemy.exc
    except ImportError as error:
        raise UserError(
            "Reading a live database needs SQLAlchemy and the server's driver; install them with "
            "`uv pip install --python .venv -r requirements/live.txt`, or give a SQLite file."
        ) from error
    return sqlalchemy


def local_copy(address: str, folder: Path, *, anew: bool) -> Path:
    """The copy of a live database below `folder`, made where there is none or `anew`; says on stderr how old it is."""
    home = folder / hashlib.sha256(address.encode()).hexdigest()[:12]
    file = next(home.glob("*.sqlite"), None)
    if file is None or anew:
        file = snapshot(address, home)
    made = datetime.datetime.fromtimestamp(file.stat().st_mtime)
    age = str(datetime.datetime.now() - made).split(".")[0]
    print(f"answers come from a copy of {made:%Y-%m-%d %H:%M} ({age} old); --refresh makes a new one", file=sys.stderr)
    return file


@contextlib.contextmanager
def _connected(url: Any, alchemy: Any) -> Iterator[Any]:
    """A connection that can only read; whatever it began is rolled back at the end."""
    arguments: dict[str, Any] = {}
    if url.drivername in _SCHEMES:
        url = url.set(drivername=_SCHEMES[url.drivername][0])
    if url.drivername.startswith("duckdb"):
        arguments = {"connect_args": {"read_only": True}}
    elif url.drivername.startswith("sqlite"):
        url = url.set(database=f"file:{quote(url.database or '')}", query={"mode": "ro", "uri": "true"})
    engine = alchemy.create_engine(url, poolclass=alchemy.pool.NullPool, **arguments)
    with engine.connect() as live:
        if live.dialect.name == "postgresql":
            live.execute(alchemy.text(f"SET TRANSACTION {_ONE_STATE}"))
        elif live.dialect.name in ("mysql", "mariadb"):
            live.execute(alchemy.text(f"SET SESSION TRANSACTION {_ONE_STATE}"))
        yield live


def _grants_writing(grant: str) -> bool:
    """Whether a line like "GRANT SELECT, INSERT (`a`) ON `shop`.* TO …" grants more than reading."""
    privileges = re.sub(r"\(.*?\)", "", grant.partition(" ON ")[0])
    return _WRITING.search(privileges.upper()) is not None


def _copy_table(inspector: Any, copy: sqlite3.Connection, name: str, copied: Sequence[str]) -> None:
    """Copy one table; `copied` are the names of all that the file will hold."""
    alchemy, live = _sqlalchemy(), inspector.bind
    table = alchemy.Table(name, alchemy.MetaData(), autoload_with=live, resolve_fks=False)
    # SQLAlchemy would turn a MySQL TIME into a time of day, although it holds any duration, and split a SET.
    raw = (alchemy.dialects.mysql.TIME, alchemy.dialects.mysql.SET)
    columns = [
        alchemy.type_coerce(column, alchemy.types.NullType()) if isinstance(column.type, raw) else column
        for column in table.columns
    ]
    is_json = [isinstance(column.type, alchemy.JSON) for column in table.columns]
    insert = f"INSERT INTO {quoted(name)} VALUES ({', '.join('?' * len(columns))})"
    create = f"CREATE TABLE {quoted(name)} ({', '.join(_definitions(inspector, table, copied))})"
    # This query comes last: PyMySQL drops the rest of a streamed result at the next statement.
    rows = live.execution_options(stream_results=True).execute(alchemy.select(*columns).limit(MAX_ROWS + 1))
    count = 0
    try:
        copy.execute("BEGIN")
        copy.execute(create)
        for block in rows.partitions(_BLOCK):
            count += len(block)
            if count > MAX_ROWS:
                raise UserError(f"Table {name} has more than {MAX_ROWS} rows; name the tables you need with --tables.")
            copy.executemany(insert, ([*map(_plain, row, is_json)] for row in block))
        copy.execute("COMMIT")
    except sqlite3.Error as error:
        raise UserError(
            f"Table {name} cannot be kept in SQLite ({error}); name the tables you need with --tables."
        ) from error


def _definitions(inspector: Any, table: Any, copied: Sequence[str]) -> Iterator[str]:
    """The column, key and reference clauses of a CREATE TABLE statement."""
    for column in table.columns:
        kind = ""
        if getattr(column.type, "unsigned", False) and isinstance(column.type, _sqlalchemy().BigInteger):
            kind = "NUMERIC"  # an unsigned BIGINT of MySQL exceeds SQLite's INTEGER
        else:
            with contextlib.suppress(NotImplementedError):
                kind = _SQLITE_TYPES.get(column.type.python_type, "")
        yield f"{quoted(column.name)} {kind}{'' if column.nullable else ' NOT NULL'}"
    if table.primary_key.columns:
        yield f"PRIMARY KEY ({', '.join(quoted(column.name) for column in table.primary_key.columns)})"
    for link in inspector.get_foreign_keys(table.name):
        if link["referred_table"] in copied and not link["referred_schema"]:
            constrained, referred = (
                ", ".join(map(quoted, link[side])) for side in ("constrained_columns", "referred_columns")
            )
            yield f"FOREIGN KEY ({constrained}) REFERENCES {quoted(link['referred_table'])} ({referred})"


def _plain(value: Any, is_json: bool = False) -> Any:
    """The value as SQLite stores it: numbers stay, times become ISO 8601 text, structures JSON, the rest text."""
    if value is None:
        return None
    if is_json or isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, (float, str, bytes)):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else float(value)
    if isinstance(value, decimal.Decimal):
        return _plain(int(value)) if value.is_finite() and value == int(value) else float(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        # [-]HH:MM:SS with all of the hours, as MySQL writes a TIME, and microseconds where there are any
        seconds, micros = divmod(abs(value) // datetime.timedelta(microseconds=1), 10**6)
        text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}" + (f".{micros:06}" if micros else "")
        return f"-{text}" if value < datetime.timedelta() else text
    if isinstance(value, (memoryview, bytearray)):
        return bytes(value)
    if isinstance(value, (set, frozenset)):  # as some drivers of MySQL give a SET
        return ",".join(sorted(map(str, value)))
    return str(value)
