"""How `data synthesize` copes with a schema of 300 tables, a table of 500 columns, and a file of 5 GB.

    python -m tests.bench.large_databases [--gigabytes 5] [--questions 200]

The databases are built in a temporary folder, which is deleted afterwards. For each one the size, the seconds until the
schema is understood and until the questions are written, their number and the peak memory of the command are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
_KINDS = ("small", "large", "round", "flat", "new")


def main() -> None:
    """Build, measure and print; exit status 1 when a command fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5, help="size of the large file (default: 5)")
    parser.add_argument("--questions", type=int, default=200, help="of each database (default: 200)")
    args = parser.parse_args()

    def large(connection: sqlite3.Connection) -> None:
        big_file(connection, round(args.gigabytes * 1e6))

    print(f"{'database':14}{'size':>10}{'understood':>12}{'written':>10}{'questions':>11}{'memory':>10}")
    failed = 0
    for name, build in (("many_tables", many_tables), ("many_columns", many_columns), ("big_file", large)):
        with tempfile.TemporaryDirectory(prefix="firstcall-") as folder:
            failed += not measure(name, build, Path(folder), args.questions)
    raise SystemExit(failed > 0)


def measure(name: str, build: Callable[[sqlite3.Connection], None], folder: Path, questions: int) -> bool:
    """Print one row of the table; False when the command fails."""
    file, out = folder / f"{name}.sqlite", folder / "questions"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("PRAGMA journal_mode = OFF")
        build(connection)
    understood, _, checked = run("--database", str(file), "--check")
    seconds, memory, code = run("--database", str(file), "--out", str(out), "--questions", str(questions))
    count = len(json.loads((out / "dev.json").read_text())) if code == 0 else 0
    size = file.stat().st_size / 1e6
    print(f"{name:14}{size:7.0f} MB{understood:10.1f} s{seconds:8.1f} s{count:11}{memory / 1e6:7.0f} MB", flush=True)
    return checked == code == 0


def run(*arguments: str) -> tuple[float, int, int]:
    """Seconds, peak resident bytes of the command and its sandboxes together, and the exit status."""
    started, peak = time.monotonic(), 0
    process = subprocess.Popen(
        [sys.executable, "-m", "data", "synthesize", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while process.poll() is None:
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            peak = max(peak, sum(member.memory_info().rss for member in family))
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.5)
    return time.monotonic() - started, peak, process.returncode


def many_tables(connection: sqlite3.Connection) -> None:
    """300 tables of 40 rows; each refers to the one before it."""
    for number in range(300):
        parent = f"REFERENCES part_{max(0, number - 1)} (part_{max(0, number - 1)}_id)"
        connection.execute(
            f"CREATE TABLE part_{number} (part_{number}_id INTEGER PRIMARY KEY, name TEXT, kind TEXT, weight REAL, "
            f"made_on TEXT, previous_id INTEGER {parent})"
        )
        rows = [
            (i, f"Part {number} {i}", _KINDS[i * i % 5], i * 1.5, f"20{10 + i % 9}-0{1 + i % 8}-11", i * i % 40)
            for i in range(40)
        ]
        connection.executemany(f"INSERT INTO part_{number} VALUES (?, ?, ?, ?, ?, ?)", rows)


def many_columns(connection: sqlite3.Connection) -> None:
    """One table of 500 columns, numbers and texts in turn."""
    draw = random.Random(0)
    columns = [f"reading_{i} REAL" if i % 2 else f"state_{i} TEXT" for i in range(498)]
    connection.execute(f"CREATE TABLE station (station_id INTEGER PRIMARY KEY, name TEXT, {', '.join(columns)})")
    for row in range(400):
        cells = [draw.randint(0, 5000) / 10 if i % 2 else draw.choice(_KINDS) for i in range(498)]
        connection.execute(f"INSERT INTO station VALUES ({', '.join('?' * 500)})", [row, f"Station {row}", *cells])


def big_file(connection: sqlite3.Connection, rows: int) -> None:
    """`rows` events of about 1 kB each, on 50 devices."""
    connection.execute("CREATE TABLE device (device_id INTEGER PRIMARY KEY, name TEXT, kind TEXT, price REAL)")
    devices = [(i, f"Device {i}", _KINDS[i * i % 5], i * 2.5) for i in range(50)]
    connection.executemany("INSERT INTO device VALUES (?, ?, ?, ?)", devices)
    connection.execute(
        "CREATE TABLE event (event_id INTEGER PRIMARY KEY, device_id INTEGER REFERENCES device, level INTEGER, "
        "happened_on TEXT, body TEXT)"
    )
    connection.execute(
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) INSERT INTO event "
        "SELECT i, i * 7 % 50, i * i % 90, date('2020-01-01', (i % 1500) || ' days'), printf('%0960d', i) FROM n",
        (rows,),
    )


if __name__ == "__main__":
    main()
