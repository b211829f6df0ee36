"""`python -m data import`: bring a data set in, looked at first.

    python -m data import SOURCE --check                    the data report alone
    python -m data import SOURCE --out FOLDER               … and a folder in Spider layout for data.spider_dir, with
                                                            questions.jsonl for `python -m shared.evaluation --questions`
    python -m data import SOURCE --databases ADDRESS …      questions on a live database, which is read once (data/live.py)

The databases are linked, not copied; rows that cannot be used stop the import with their file and line, or are left out
and listed in FOLDER/skipped.jsonl with --bad-rows skip.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data import live
from data.check import UNUSABLE, Checked, check
from data.sources import find_source
from data.spider import identity_of, question_record
from shared.cli.command_line import common_parser, resolve
from shared.errors import UserError
from shared.records import Question, write_jsonl


def main(arguments: Sequence[str]) -> None:
    """Read, check, report, and write unless --check."""
    parser = common_parser("python -m data import", "Bring a data set in, looked at first; see data/importing.py.")
    parser.add_argument("source", type=_path, help="folder in Spider or BIRD layout, or a .jsonl, .json or .csv file")
    parser.add_argument(
        "--databases", help="folder of SQLite files, the one file of all questions, or an address like postgresql://…"
    )
    parser.add_argument(
        "--tables", default="", help="with an address: the tables to read, parted by commas (default: all)"
    )
    parser.add_argument("--out", type=_path, help="folder to write, for data.spider_dir")
    parser.add_argument("--check", action="store_true", help="print the data report and write nothing")
    parser.add_argument(
        "--bad-rows", choices=("fail", "skip"), default="fail", help="what unusable rows do (default: fail)"
    )
    args = parser.parse_args(arguments)
    if not args.check and args.out is None:
        raise UserError("python -m data import needs --out FOLDER to write to, or --check for the report alone.")
    if args.check and args.out is not None:
        raise UserError(
            f"--check writes nothing: leave it out to write to {args.out}, or leave out --out for the report alone."
        )
    if not args.source.exists():
        raise UserError(f"There is no {args.source}; give a folder or a question file.")
    if not args.check:
        _refuse_existing(args.out)
    config, _ = resolve(args)
    if args.dry_run:
        print(f"reads {args.source}, writes {'nothing' if args.check else args.out}")
        return
    with tempfile.TemporaryDirectory(prefix="firstcall-") as passing:
        databases = _databases(args.databases, args.tables, Path(passing) if args.check else args.out)
        checked = check(find_source(args.source, databases), config)
        print(checked.report())
        if not checked.rows:
            raise UserError("No row can be used; correct what the report lists.")
        if not args.check:
            write(checked, args.out, skip=args.bad_rows == "skip")


def _path(text: str) -> Path:
    if not text.strip():
        raise UserError("An empty path was given, as by a variable that is not set; name the file or folder.")
    return Path(text)


def _databases(given: str | None, tables: str, place: Path) -> Path | None:
    """Where the databases are; one behind an address becomes a snapshot in `place`."""
    if given is None or not live.is_address(given):
        return None if given is None else _path(given)
    names = [name.strip() for name in tables.split(",") if name.strip()]
    return live.snapshot(given, place / "snapshot", names)


def write(checked: Checked, folder: Path, *, skip: bool) -> None:
    """Write the usable rows as dev.json beside links to their databases. Raises UserError for bad rows unless `skip`."""
    bad = checked.findings.get(UNUSABLE, [])
    if bad and not skip:
        place, reason = bad[0]
        raise UserError(
            f"{len(bad)} rows cannot be used, the first is {place}: {reason}; or leave them out with --bad-rows skip."
        )
    _refuse_existing(folder)
    names = _names(checked)
    for path, name in names.items():
        link = folder / "database" / name / f"{name}.sqlite"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    rows: list[dict[str, Any]] = [
        {"db_id": names[path], "question": row.question, "query": row.gold_sql,
         **({"evidence": row.evidence} if row.evidence else {}),
         **({"difficulty": row.difficulty} if row.difficulty else {}), "source": str(row.place)}
        for row, path in checked.rows
    ]  # fmt: skip
    if bad:
        write_jsonl(folder / "skipped.jsonl", [{"file": p.file, "row": p.line, "reason": why} for p, why in bad])
    write_jsonl(folder / "questions.jsonl", _questions(rows, folder.resolve() / "database"))
    partial = folder / "dev.json.partial"
    partial.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    partial.replace(folder / "dev.json")
    setting, questions = (shlex.quote(str(text)) for text in (f"data.spider_dir={folder}", folder / "questions.jsonl"))
    print(f"{len(rows)} questions written, {len(bad)} rows skipped; next, to train on them or to ask them:\n"
          f"    python run_pipeline.py --set {setting}\n"
          f"    .venv/bin/python -m shared.evaluation --model FOLDER --questions {questions}")  # fmt: skip


def _questions(rows: Sequence[dict[str, Any]], databases: Path) -> Iterator[Question]:
    """The rows as an evaluation asks them, under the ids that the pipeline would give them."""
    for number, row in enumerate(rows, start=1):
        path = databases / row["db_id"] / f"{row['db_id']}.sqlite"
        yield question_record(identity_of("dev.json", number), row, path)


def _refuse_existing(folder: Path) -> None:
    if (folder / "dev.json").exists():
        raise UserError(f"{folder / 'dev.json'} exists already; choose another --out or remove that folder.")


def _names(checked: Checked) -> dict[Path, str]:
    """A folder name for each database file; files of one name in different folders get a number."""
    names: dict[Path, str] = {}
    for _, path in checked.rows:
        if path not in names:
            twins = sum(other.stem == path.stem for other in names)
            names[path] = path.stem + (f"_{twins + 1}" if twins else "")
    return names
