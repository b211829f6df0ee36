"""The SQL sandbox: what stops hostile statements, and what it costs ordinary ones.

    python -m tests.bench.sandbox_limits [--spider FOLDER]

Prints a table of hostile statements with outcome, milliseconds beyond the deadline and memory of the sandbox process at
its peak; then seconds for ordinary queries (the golds of the demo, or of a folder in Spider layout) against plain
sqlite3 in the same run, once opening the file for each query as a program without a pool would, once on a connection
kept open; then simple queries per second from 32 threads. Exit status 1 when a statement is stopped later than 200 ms
after its deadline, a process needs more than 256 MB, a file changed, opening for each query is more than 1.5 times as
fast as the sandbox, or fewer than 500 simple queries run per second.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from data.stage import prepare
from shared.config.load import load_config
from shared.config.schema import Config
from shared.records import Question, read_questions
from shared.sql.database import Database, SqlError
from tests.shared.examples import insurance
from tests.shared.sql.hostile import HOSTILE

ROOT = Path(__file__).resolve().parents[2]
LATE_SECONDS, PEAK_BYTES, OVERHEAD, PER_SECOND = 0.2, 256e6, 1.5, 500
DEADLINE, THREADS, SIMPLE, ROUNDS = 0.5, 32, 4000, 5


def main() -> None:
    """Measure and print; exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spider", type=Path, help="measure the golds of this folder instead of the demo's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(ROOT / "pipeline.yaml", "cpu", [f"data.sources={args.spider}"] if args.spider else [])
        database = insurance(Path(folder))
        passed = [hostile(database), ordinary(Path(folder) / "data", config), crowd(database)]
    sys.exit(0 if all(passed) else 1)


def hostile(database: Database) -> bool:
    """The table of hostile statements; True when all are stopped in time and memory and nothing changed."""
    folder = database.path.parent
    database.limits = database.limits.model_copy(update={"timeout_seconds": DEADLINE})
    before = _state(folder)
    worst_late = worst_peak = 0.0
    print(f"{'statement':24}{'outcome':>12}{'late ms':>10}{'peak MB':>10}")
    for name, sql in HOSTILE.items():
        database.execute("SELECT 1")
        with _peak_memory() as peak:
            start = time.monotonic()
            try:
                database.execute(sql)
                outcome = "RAN"
            except SqlError as error:
                outcome = error.kind
            late = time.monotonic() - start - DEADLINE
            time.sleep(0.005)  # for one last look at the memory of a quick one
        worst_late, worst_peak = max(worst_late, late), max(worst_peak, peak())
        print(f"{name:24}{outcome:>12}{max(0.0, late * 1000):10.0f}{peak() / 1e6:10.0f}")
        assert database.execute("SELECT count(*) FROM claims").rows == ((3,),), f"the query after {name} failed"
    unchanged = _state(folder) == before
    print(f"{len(HOSTILE)} statements, at most {worst_late * 1000:.0f} ms late, at most {worst_peak / 1e6:.0f} MB, "
          f"files {'unchanged' if unchanged else 'CHANGED'}")  # fmt: skip
    return worst_late <= LATE_SECONDS and worst_peak <= PEAK_BYTES and unchanged


def ordinary(folder: Path, config: Config) -> bool:
    """Time of ordinary queries against plain sqlite3, the best of a few rounds each."""
    prepare(config, folder)
    questions = [q for split in ("train", "val", "test") for q in read_questions(folder / f"{split}.jsonl")]
    databases = {path: Database(path, config.sandbox) for path in {question.database for question in questions}}
    kept = {path: sqlite3.connect(f"file:{path}?mode=ro", uri=True) for path in databases}
    ways: dict[str, Callable[[Question], object]] = {
        "sandbox": lambda q: databases[q.database].execute(q.gold_sql, config.sandbox.max_compare_rows),
        "plain, opened for each": _plain,
        "plain, kept open": lambda q: kept[q.database].execute(q.gold_sql).fetchall(),
    }
    seconds = {name: min(_timed(way, questions) for _ in range(ROUNDS)) for name, way in ways.items()}
    for name, total in seconds.items():
        print(f"{name:24}{total / len(questions) * 1e6:8.0f} µs for one of {len(questions)} ordinary queries")
    ratio = seconds["sandbox"] / seconds["plain, opened for each"]
    print(f"overhead {ratio:.2f} x plain sqlite3")
    return ratio <= OVERHEAD


def crowd(database: Database) -> bool:
    """Simple queries per second from many threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: database.execute("SELECT 1"), range(THREADS * 4)))
        start = time.monotonic()
        list(pool.map(lambda i: database.execute(f"SELECT amount FROM claims WHERE claim_id = {i}"), range(SIMPLE)))
        rate = SIMPLE / (time.monotonic() - start)
    print(f"{rate:.0f} simple queries per second from {THREADS} threads")
    return rate >= PER_SECOND


def _plain(question: Question) -> object:
    with contextlib.closing(sqlite3.connect(f"file:{question.database}?mode=ro", uri=True)) as connection:
        return connection.execute(question.gold_sql).fetchall()


def _timed(way: Callable[[Question], object], questions: Sequence[Question]) -> float:
    start = time.monotonic()
    for question in questions:
        way(question)
    return time.monotonic() - start


def _state(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


@contextlib.contextmanager
def _peak_memory() -> Iterator[Callable[[], float]]:
    """Watches the sandbox processes; the function gives the most bytes that one of them held in memory."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            for process in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    yield lambda: peak[0]
    done.set()
    thread.join()


if __name__ == "__main__":
    main()
