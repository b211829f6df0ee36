"""Database servers of a test's own: installed programs, on the loopback address, with all their files in one folder.

An address in FIRSTCALL_TEST_POSTGRESQL or FIRSTCALL_TEST_MYSQL is taken instead. Its role must be allowed to create
roles and tables in an empty database of its own, like mysql://admin:secret@127.0.0.1:3306/scratch.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data.live import _SCHEMES
from shared.processes.owned_process import OwnedProcess, free_port

_PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/usr/libexec"])


def given_address(name: str) -> str:
    """The address in FIRSTCALL_TEST_<name>, as SQLAlchemy needs it; "" where none is set."""
    pytest.importorskip("sqlalchemy")
    address = os.environ.get(f"FIRSTCALL_TEST_{name}", "")
    scheme, _, rest = address.partition("://")
    return f"{_SCHEMES[scheme][0]}://{rest}" if address else ""


@contextmanager
def mysql_server(folder: Path) -> Iterator[str]:
    """A MariaDB or MySQL server, if one is installed; yields the address of its administrator in an empty database."""
    import sqlalchemy

    found = shutil.which("mariadbd", path=_PLACES) or shutil.which("mysqld", path=_PLACES)
    if not found:
        pytest.skip("no server: neither mariadbd nor mysqld is installed, and FIRSTCALL_TEST_MYSQL is not set")
    program, port = Path(found).resolve(), free_port()
    base = ["--no-defaults", f"--basedir={program.parents[1]}", f"--datadir={folder / 'data'}"]
    base += ["--user=root"] if os.geteuid() == 0 else []
    if program.name == "mariadbd":
        installer = shutil.which("mariadb-install-db", path=f"{program.parents[1] / 'bin'}:{_PLACES}")
        assert installer, "mariadb-install-db comes with mariadbd"
        fill = [installer, *base, "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
    else:
        fill = [str(program), *base, "--initialize-insecure"]
    subprocess.run(fill, check=True, stdout=subprocess.DEVNULL, stderr=(folder / "fill.log").open("wb"))
    own = [
        f"--port={port}",
        "--bind-address=127.0.0.1",
        "--socket=s",
        "--loose-mysqlx=OFF",
        "--innodb-buffer-pool-size=32M",
    ]
    with OwnedProcess(
        [str(program), *base, *own], name="MySQL", log=folder / "server.log", health=lambda: _listens(port)
    ):
        engine = sqlalchemy.create_engine(f"mysql+pymysql://root@127.0.0.1:{port}/mysql")
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE DATABASE scratch CHARACTER SET utf8mb4")
        engine.dispose()
        yield f"mysql+pymysql://root@127.0.0.1:{port}/scratch"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
