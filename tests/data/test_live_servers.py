"""Snapshots from real servers, by a role that may only read. Each test skips where its server is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from data import importing
from data.live import _connected, snapshot
from shared.errors import UserError
from shared.sql.database import Database
from tests.data.conftest import ROOT
from tests.data.live_examples import check_snapshot, create, foreign_key_problems
from tests.data.servers import given_address, mysql_server
from tests.shared.examples import LIMITS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("live")]


def carry_out(address: str, statements: Sequence[str]) -> None:
    import sqlalchemy

    engine = sqlalchemy.create_engine(address)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%"))
    engine.dispose()


def reader_of(admin: str) -> str:
    """The address of `admin`'s database for the role firstcall_reader."""
    import sqlalchemy

    url = sqlalchemy.make_url(admin).set(username="firstcall_reader", password="only@read")
    return url.render_as_string(hide_password=False)


@pytest.fixture
def postgresql() -> Iterator[tuple[str, str]]:
    """Addresses of an administrator and of a reader."""
    admin = given_address("POSTGRESQL")
    if not admin:
        pytest.skip("no server: FIRSTCALL_TEST_POSTGRESQL is not set")
    create(admin, r"'\x00ff'::bytea", "BYTEA")
    carry_out(admin, ["CREATE ROLE firstcall_reader LOGIN PASSWORD 'only@read'",
                      "GRANT SELECT ON ALL TABLES IN SCHEMA public TO firstcall_reader"])  # fmt: skip
    yield admin, reader_of(admin)
    carry_out(admin, ["DROP OWNED BY firstcall_reader", "DROP ROLE firstcall_reader"])


@pytest.fixture(scope="module")
def mysql_admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if given := given_address("MYSQL"):
        yield given
        return
    with mysql_server(tmp_path_factory.mktemp("mysql")) as address:
        yield address


@pytest.fixture
def mysql(mysql_admin: str) -> Iterator[tuple[str, str]]:
    create(mysql_admin, "x'00ff'", "VARBINARY(10)")
    database = mysql_admin.rsplit("/", 1)[1]
    carry_out(mysql_admin, ["CREATE USER firstcall_reader IDENTIFIED BY 'only@read'",
                            f"GRANT SELECT, SHOW VIEW ON {database}.* TO firstcall_reader"])  # fmt: skip
    yield mysql_admin, reader_of(mysql_admin)
    carry_out(mysql_admin, ["DROP USER firstcall_reader"])


@pytest.mark.parametrize("server", ["postgresql", "mysql"])
def test_a_server_is_read_by_a_role_that_may_only_read(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    admin, reader = request.getfixturevalue(server)
    check_snapshot(reader, tmp_path / "new")
    with pytest.raises(UserError, match="can write; give one that may only SELECT"):
        snapshot(admin, tmp_path / "admin")
    assert not list((tmp_path / "admin").iterdir())


@pytest.mark.parametrize("grant", ["INSERT ON kinds", "UPDATE (name) ON kinds", "TRUNCATE ON kinds"])
def test_one_way_to_write_is_enough_to_be_refused(grant: str, postgresql: tuple[str, str], tmp_path: Path) -> None:
    admin, reader = postgresql
    carry_out(admin, [f"GRANT {grant} TO firstcall_reader"])
    with pytest.raises(UserError, match="can write"):
        snapshot(reader, tmp_path)


@pytest.mark.parametrize(
    "grants",
    [
        ["GRANT INSERT ON kinds TO firstcall_reader"],
        ["GRANT UPDATE (name) ON kinds TO firstcall_reader"],
        ["GRANT FILE ON *.* TO firstcall_reader"],
        ["CREATE ROLE IF NOT EXISTS writes", "GRANT DELETE ON kinds TO writes", "GRANT writes TO firstcall_reader",
         "SET DEFAULT ROLE writes FOR firstcall_reader"],
    ],
)  # fmt: skip
def test_mysqls_ways_to_write_are_refused(grants: list[str], mysql: tuple[str, str], tmp_path: Path) -> None:
    admin, reader = mysql
    carry_out(admin, grants)
    with pytest.raises(UserError, match="can write"):
        snapshot(reader, tmp_path)


def test_not_even_the_administrator_can_write_while_tables_are_read(mysql: tuple[str, str]) -> None:
    import sqlalchemy
    import sqlalchemy.exc

    url = sqlalchemy.make_url(mysql[0])
    with pytest.raises(sqlalchemy.exc.SQLAlchemyError, match="READ ONLY"), _connected(url, sqlalchemy) as live:
        live.exec_driver_sql("DELETE FROM kinds")


ODD_TABLES = [
    "SET SESSION sql_mode = ''",  # zero dates
    "DROP TABLE IF EXISTS odd, `order`, vacant",
    "CREATE TABLE `order` (`group` INT UNSIGNED, `key` SMALLINT, `select` TEXT, PRIMARY KEY (`group`, `key`))",
    """CREATE TABLE odd (id BIGINT UNSIGNED PRIMARY KEY, flag TINYINT(1), bits BIT(10), size ENUM('s', 'm'),
       tags SET('red', 'blue'), price DECIMAL(12, 2) UNSIGNED, took TIME, fine TIME(3), seen DATETIME, day DATE,
       made YEAR, raw BLOB, word VARCHAR(20), doubled INT AS (flag * 2) VIRTUAL, `group` INT UNSIGNED, `key` SMALLINT,
       FOREIGN KEY (`group`, `key`) REFERENCES `order` (`group`, `key`)) CHARACTER SET utf8mb4""",
    "CREATE TABLE vacant (id INT)",
    "INSERT INTO `order` VALUES (1, 2, 'where')",
    """INSERT INTO odd (id, flag, bits, size, tags, price, took, fine, seen, day, made, raw, word, `group`, `key`)
       VALUES (18446744073709551615, 1, 513, 'm', 'blue,red', 2.50, '25:06:17', '-00:00:01.5', 0, '2024-00-15', 2024,
               x'00ff', 'Zoë 😀', 1, 2)""",
    "INSERT INTO odd (id) VALUES (7)",
]


def test_what_only_mysql_has_arrives_as_it_shows_it(mysql: tuple[str, str], tmp_path: Path) -> None:
    admin, reader = mysql
    carry_out(admin, ODD_TABLES)
    copy = Database(snapshot(reader, tmp_path, ["odd", "order", "vacant"]), LIMITS)
    assert copy.execute("SELECT * FROM odd ORDER BY id").rows == (
        (7, *[None] * 15),
        (float(2**64), 1, 513, "m", "red,blue", 2.5, "25:06:17", "-00:00:01.500000", "0000-00-00 00:00:00",
         "2024-00-15", 2024, b"\x00\xff", "Zoë 😀", 2, 1, 2),
    )  # fmt: skip
    assert copy.execute('SELECT "select" FROM "order" JOIN odd USING ("group", "key")').rows == (("where",),)
    assert copy.execute("SELECT count(*) FROM vacant").rows == ((0,),)
    assert foreign_key_problems(copy.path) == []


def test_golds_that_only_mysql_runs_are_named(
    mysql: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "How many?", "sql": "SELECT count(*) FROM kinds"},
        {"question": "When?", "sql": "SELECT DATE_FORMAT(seen, '%Y') FROM kinds"},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    importing.main([str(file), "--databases", mysql[1], "--config", str(ROOT / "pipeline.yaml"), "--check"])
    report = capsys.readouterr().out
    assert "usable questions: 1, databases: 1" in report
    assert "questions.jsonl:2: its gold SQL fails" in report
