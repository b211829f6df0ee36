"""Compares the judges with verdicts that the official evaluators gave.

A case is one JSON object per line: `db_id`, `gold_sql`, `pred_sql`, the verdicts `spider_exec`, `bird_ex` and
`spider_testsuite` (true, false, or absent), and optionally `id` and `order_fragile` (the verdict hangs on the order in
which SQLite returns unordered rows).
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.errors import UserError
from shared.evaluation.judges.bird import bird_ex
from shared.evaluation.judges.spider import spider_ex, spider_test_suite
from shared.records import json_lines

_FIELDS = {"spider": "spider_exec", "bird": "bird_ex", "testsuite": "spider_testsuite"}
_TEXTS = ("db_id", "gold_sql", "pred_sql")


@dataclass
class Agreement:
    """How often one judge agreed with the recorded verdicts."""

    equal: int = 0
    total: int = 0


def compare_verdicts(cases: Path, databases: Path, testsuite: Path | None) -> dict[str, Agreement]:
    """Judge all cases, print each disagreement and one closing line of agreements, return these.

    `databases` holds <db_id>/<db_id>.sqlite; `testsuite`, which may be left out, a folder <db_id>/ with all variants of
    a database or the archive <db_id>.tar.gz. Raises UserError for files that are missing or cannot be read,
    and when nothing was compared.
    """
    rows = list(read_cases(cases))
    agreements = {judge: Agreement() for judge in _FIELDS}
    with suites(testsuite) as variants:
        for row in tqdm(rows, "judging", unit=" cases", leave=False, disable=None):
            suite = variants(row["db_id"])
            if testsuite and not suite:
                raise UserError(
                    f"{testsuite} holds neither {row['db_id']}/*.sqlite nor {row['db_id']}.tar.gz; check --testsuite."
                )
            judges = _judges(row, _base(databases, row["db_id"]), suite)
            for name, judge in judges.items():
                expected = row.get(_FIELDS[name])
                if expected is not None:
                    _count(agreements[name], name, row, expected, judge)
    if not any(found.total for found in agreements.values()):
        raise UserError(f"{cases} holds no case with a verdict to compare with; a truncated file must be restored.")
    print(" ".join(f"{name} {found.equal}/{found.total}" for name, found in agreements.items()))
    return agreements


def read_cases(file: Path) -> Iterator[dict[str, Any]]:
    """The cases of a JSONL file; raises UserError naming the line that is not one."""
    for number, row in json_lines(file):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in _TEXTS):
            raise UserError(f"{file}, line {number} lacks the text of {', '.join(_TEXTS)}; correct the line.")
        yield {"id": f"line {number}"} | row


def _judges(row: dict[str, Any], base: Path, suite: list[Path]) -> dict[str, Callable[[], bool]]:
    gold, prediction = row["gold_sql"], row["pred_sql"]
    judges: dict[str, Callable[[], bool]] = {
        "spider": lambda: spider_ex(gold, prediction, base),
        "bird": lambda: bird_ex(gold, prediction, base),
    }
    return judges | ({"testsuite": lambda: spider_test_suite(gold, prediction, suite)} if suite else {})


def _count(agreement: Agreement, name: str, row: dict[str, Any], expected: object, judge: Callable[[], bool]) -> None:
    agreement.total += 1
    note = ""
    try:
        verdict = judge()
    except UserError as error:  # the original fails on such a gold, which counts as false
        verdict, note = False, f" ({error})"
    if verdict == bool(expected):
        agreement.equal += 1
        return
    fragile = ", order fragile" if row.get("order_fragile") else ""
    print(f"{row['id']} {name}: recorded {bool(expected)}, judged {verdict}{fragile}{note}\n"
          f"    gold {_short(row['gold_sql'])}\n    prediction {_short(row['pred_sql'])}")  # fmt: skip


def _short(sql: str) -> str:
    line = " ".join(sql.split())
    return line if len(line) <= 300 else f"{line[:300]} …"


def _base(databases: Path, db_id: str) -> Path:
    for path in (databases / db_id / f"{db_id}.sqlite", databases / f"{db_id}.sqlite"):
        if path.is_file():
            return path
    raise UserError(f"Database {databases / db_id / f'{db_id}.sqlite'} does not exist; check --databases.")


@contextmanager
def suites(folder: Path | None) -> Iterator[Callable[[str], list[Path]]]:
    """Gives the function from db_id to its variants, the original first, or none; archives are unpacked meanwhile."""
    with tempfile.TemporaryDirectory(prefix="firstcall-") as unpacked:

        def variants(db_id: str) -> list[Path]:
            if folder is None:
                return []
            archive = folder / f"{db_id}.tar.gz"
            place = Path(unpacked) if archive.is_file() else folder
            if archive.is_file() and not (place / db_id).is_dir():
                _unpack(archive, place)
            return sorted((place / db_id).glob("*.sqlite"), key=lambda path: (path.stem != db_id, path.name))

        yield variants


def _unpack(archive: Path, place: Path) -> None:
    try:
        with tarfile.open(archive) as content:
            content.extractall(place, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{archive} cannot be unpacked ({error}); restore the file.") from error
