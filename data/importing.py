"""`python -m data import`: report on a data set and bring it into the layout that the pipeline reads.

    python -m data import SOURCE --check                  print the data report and write nothing
    python -m data import SOURCE --out FOLDER             also write a folder in Spider layout for data.sources,
                                                          with questions.jsonl for `python -m shared.evaluation`
    python -m data import SOURCE --databases ADDRESS …    questions on a live database, which is copied (data/live.py)

Databases are linked, not copied. Rows that cannot be used stop the import with their file and line, or with
`--bad-rows skip` are left out and listed in FOLDER/skipped.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import sqlglot
from sqlglot.errors import SqlglotError

from data import live
from data.check import UNUSABLE, Checked, check
from data.questions import database_names, question_of
from data.sources import BadRowError, Place, SourceRow, find_source, read_rows
from shared.cli.command_line import common_parser, resolve
from shared.errors import UserError
from shared.records import write_jsonl
from shared.runs.output_paths import refuse_overwriting


def main(arguments: Sequence[str]) -> None:
    """Read, check and report; without --check, also write."""
    parser = common_parser("python -m data import", "Report on a data set and import it; see data/importing.py.")
    parser.add_argument("source", type=_path, help="folder in Spider or BIRD layout, or a .jsonl, .json or .csv file")
    parser.add_argument(
        "--databases", help="folder of SQLite files, the one file of all questions, or an address like postgresql://…"
    )
    parser.add_argument("--tables", default="", help="tables of a live database to copy, by commas (default: all)")
    parser.add_argument(
        "--dialect",
        help="SQL dialect of the golds, such as mysql; they are translated to SQLite (default: the address's)",
    )
    parser.add_argument("--out", type=_path, help="folder to write, for data.sources")
    parser.add_argument("--check", action="store_true", help="print the data report and write nothing")
    parser.add_argument(
        "--bad-rows", choices=("fail", "skip"), default="fail", help="for unusable rows (default: fail)"
    )
    args = parser.parse_args(arguments)
    if args.check == (args.out is not None):
        raise UserError(
            "Give either --out FOLDER, to write the imported data, or --check, to print the report and write nothing."
        )
    if not args.source.exists():
        raise UserError(f"There is no {args.source}; give a folder or a question file.")
    if args.out:
        refuse_existing(args.out)
    if args.dialect and args.dialect not in sqlglot.Dialect.classes:
        known = ", ".join(sorted(filter(None, sqlglot.Dialect.classes)))
        raise UserError(f"--dialect {args.dialect} is unknown; choose one of {known}.")
    config, _ = resolve(args)
    if args.dry_run:
        print(f"reads {args.source}, writes {args.out or 'nothing'}")
        return
    with tempfile.TemporaryDirectory(prefix="firstcall-") as temporary:
        databases = None if args.databases is None else _path(args.databases)
        dialect = args.dialect
        if args.databases and live.is_address(args.databases):
            tables = [name.strip() for name in args.tables.split(",") if name.strip()]
            databases = live.snapshot(args.databases, (args.out or Path(temporary)) / "snapshot", tables)
            dialect = dialect or live.dialect(args.databases)
        source = find_source(args.source, databases)
        rows = [*read_rows(source)]
        if dialect not in (None, "sqlite"):
            rows = [(place, _translated(row, dialect)) for place, row in rows]
            print(f"golds are translated from {dialect} to SQLite")
        checked = check(source, rows, config)
        print(checked.report())
        if not checked.rows:
            raise UserError("No row can be used; correct what the report lists.")
        if args.out:
            write(checked, args.out, skip=args.bad_rows == "skip", reads=source.files)
        else:
            skip = " --bad-rows skip" if checked.findings.get(UNUSABLE) else ""
            print(f"next: the same command with `--out imported{skip}` instead of --check")


def _path(text: str) -> Path:
    if not text.strip():
        raise UserError("The path is empty, as from a variable that is not set; name the file or folder.")
    return Path(text)


def _translated(row: SourceRow | BadRowError, dialect: str) -> SourceRow | BadRowError:
    """The row with its gold in SQLite's dialect; BadRowError when the gold cannot be read in its own."""
    if isinstance(row, BadRowError):
        return row
    try:
        return dataclasses.replace(row, gold_sql=sqlglot.transpile(row.gold_sql, read=dialect, write="sqlite")[0])
    except (SqlglotError, RecursionError) as error:
        first = str(error).splitlines()[0].rstrip(".")
        return BadRowError(f"its gold SQL is not {dialect} ({first}); correct the query or --dialect")


def write(checked: Checked, folder: Path, *, skip: bool, reads: Sequence[Path] = ()) -> None:
    """Write the usable rows as dev.json beside links to their databases.

    Raises UserError for bad rows unless `skip`, and when a file is in the way; above all one of `reads`, from which the
    rows come, or a database.
    """
    bad = checked.findings.get(UNUSABLE, [])
    if bad and not skip:
        place, reason = bad[0]
        raise UserError(
            f"{len(bad)} rows cannot be used, the first is {place}: {reason}; or leave them out with --bad-rows skip."
        )
    refuse_existing(folder)
    names = database_names(path for _, path in checked.rows)
    links = {path: folder / "database" / name / f"{name}.sqlite" for path, name in names.items()}
    outputs = [*links.values(), *(folder / name for name in ("questions.jsonl", "skipped.jsonl", "dev.json"))]
    refuse_overwriting(outputs, [*reads, *names])
    if taken := [output for output in outputs if output.exists() and not output.is_symlink()]:
        raise UserError(f"{taken[0]} already exists; choose another --out.")
    for path, link in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    rows, questions = [], []
    for number, (row, path) in enumerate(checked.rows, start=1):
        values = {"db_id": names[path], "question": row.question, "query": row.gold_sql}
        values |= {key: text for key in ("evidence", "difficulty") if (text := getattr(row, key))}
        rows.append(values | {"source": str(row.place)})
        # The id that the pipeline gives to this row of dev.json.
        questions.append(question_of(dataclasses.replace(row, place=Place("dev.json", number)), names[path], path))
    if bad:
        write_jsonl(folder / "skipped.jsonl", [{"file": p.file, "row": p.line, "reason": why} for p, why in bad])
    write_jsonl(folder / "questions.jsonl", questions)
    partial = folder / "dev.json.partial"
    partial.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    partial.replace(folder / "dev.json")
    setting, asked = (shlex.quote(str(text)) for text in (f"data.sources={folder}", folder / "questions.jsonl"))
    print(
        f"{len(rows)} questions written, {len(bad)} rows skipped; next, to train on them or to ask them:\n"
        f"    python run_pipeline.py --set {setting}\n"
        f"    .venv/bin/python -m shared.evaluation --model FOLDER --questions {asked}"
    )


def refuse_existing(folder: Path) -> None:
    """Raise UserError when `folder` already holds an imported data set."""
    if (folder / "dev.json").exists():
        raise UserError(f"{folder / 'dev.json'} already exists; choose another --out.")
