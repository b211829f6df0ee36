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
from functools import partial
from pathlib import Path
from textwrap import shorten

from tqdm import tqdm

from shared.errors import UserError
from shared.evaluation.judges.bird import bird_ex
from shared.evaluation.judges.spider import spider_ex, spider_test_suite
from shared.records import json_lines

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
    agreements = {judge: Agreement() for judge in ("spider", "bird", "testsuite")}
    with suites(testsuite) as variants:
        for number, row in tqdm(list(json_lines(cases)), "judging", unit=" cases", leave=False, disable=None):
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in _TEXTS):
                raise UserError(f"{cases}, line {number} lacks the text of {', '.join(_TEXTS)}; correct the line.")
            name, gold, prediction = (row[key] for key in _TEXTS)
            base = databases / name / f"{name}.sqlite"
            if not base.is_file() and not (databases / base.name).is_file():
                raise UserError(f"Database {base} does not exist; check --databases.")
            base = base if base.is_file() else databases / base.name
            suite = variants(name)
            if testsuite and not suite:
                raise UserError(f"{testsuite} holds neither {name}/*.sqlite nor {name}.tar.gz; check --testsuite.")
            judges: list[tuple[str, str, Callable[[], bool]]] = [
                ("spider", "spider_exec", partial(spider_ex, gold, prediction, base)),
                ("bird", "bird_ex", partial(bird_ex, gold, prediction, base)),
                ("testsuite", "spider_testsuite", partial(spider_test_suite, gold, prediction, suite)),
            ]
            for judge_name, field, judge in judges[: 3 if suite else 2]:
                if row.get(field) is None:
                    continue
                verdict, note = False, ""
                try:
                    verdict = judge()
                except UserError as error:  # the original fails on such a gold, which counts as false
                    note = f" ({error})"
                agreements[judge_name].total += 1
                agreements[judge_name].equal += verdict == bool(row[field])
                if verdict != bool(row[field]):
                    fragile = ", order fragile" if row.get("order_fragile") else ""
                    case = row.get("id", f"line {number}")
                    print(f"{case} {judge_name}: recorded {bool(row[field])}, judged {verdict}{fragile}{note}")
                    print(f"    gold {shorten(gold, 300)}\n    prediction {shorten(prediction, 300)}")
    if not any(found.total for found in agreements.values()):
        raise UserError(f"{cases} holds no case with a verdict to compare with; a truncated file must be restored.")
    print(" ".join(f"{name} {found.equal}/{found.total}" for name, found in agreements.items()))
    return agreements


@contextmanager
def suites(folder: Path | None) -> Iterator[Callable[[str], list[Path]]]:
    """Gives the function from db_id to its variants, the original first, or none; archives are unpacked meanwhile.

    The function raises UserError for an archive that cannot be unpacked.
    """
    with tempfile.TemporaryDirectory(prefix="firstcall-") as unpacked:

        def variants(db_id: str) -> list[Path]:
            if folder is None:
                return []
            archive, place = folder / f"{db_id}.tar.gz", folder / db_id
            if archive.is_file():
                place = Path(unpacked) / db_id
                if not place.is_dir():
                    try:
                        with tarfile.open(archive) as content:
                            content.extractall(unpacked, filter="data")
                    except (tarfile.TarError, EOFError, OSError) as error:
                        raise UserError(f"{archive} cannot be unpacked ({error}); restore the file.") from error
            return sorted(place.glob("*.sqlite"), key=lambda path: (path.stem != db_id, path.name))

        yield variants
