"""`python -m data synthesize`: questions and golds for a database that has none.

    python -m data synthesize --database FILE --check         what was understood, as a hints file to correct
    python -m data synthesize --database FILE --out FOLDER    questions in Spider layout, for data.sources

Everything is read with the limits of the sandbox. The same database, hints and seed give the same questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from data.check import Checked
from data.importing import refuse_existing, write
from data.paraphrase import JOURNAL, paraphrase
from data.sources import Place, SourceRow
from data.synthesis.generate import SHARES, Taken, generate
from data.synthesis.hints import read_hints, report
from data.synthesis.schema import understand
from shared.cli.command_line import common_parser, resolve
from shared.config.schema import check_address
from shared.errors import UserError
from shared.sql.database import Database


def main(arguments: Sequence[str]) -> None:
    """Understand the database, and report or write questions."""
    parser = common_parser(
        "python -m data synthesize", "Make questions and golds for any SQLite database; see data/synthesis/command.py."
    )
    parser.add_argument("--database", type=Path, required=True, help="the SQLite file")
    parser.add_argument("--out", type=Path, help="folder to write, for data.sources")
    parser.add_argument("--questions", type=int, default=600, help="how many are wanted (default: 600)")
    parser.add_argument(
        "--check", action="store_true", help="print what was understood, as a hints file, and write nothing"
    )
    parser.add_argument("--hints", type=Path, help="corrections: a file like the one that --check prints")
    parser.add_argument(
        "--paraphrase", metavar="URL", help="endpoint that rewords the questions; see data/paraphrase.py"
    )
    args = parser.parse_args(arguments)
    if args.paraphrase is not None:
        check_address("--paraphrase", args.paraphrase)
    if args.check == (args.out is not None):
        raise UserError(
            "python -m data synthesize needs either --out FOLDER to write to or --check for the report alone."
        )
    if args.questions < 1:
        raise UserError(f"--questions {args.questions} asks for none; give a positive number.")
    if args.out is not None:
        refuse_existing(args.out)
    config, _ = resolve(args)
    if args.dry_run:
        print(f"reads {args.database}, writes {'nothing' if args.check else args.out}")
        return
    sandbox = config.sandbox.model_copy(update={"timeout_seconds": min(5.0, config.sandbox.timeout_seconds)})
    database = Database(args.database, sandbox)
    about = understand(database, read_hints(args.hints, database))
    if args.check:
        print("\n".join(report(about)))
        print("# next: save this as hints.yaml, correct it, and give the same command with "
              f"`--hints hints.yaml --out {args.database.stem}_questions` instead of --check")  # fmt: skip
        return
    questions = generate(database, about, args.questions, config.seed, Taken())
    if not questions:
        raise UserError(
            f"{args.database} yields no question; see what was understood with --check and correct it with --hints."
        )
    if args.paraphrase:
        questions, bill = paraphrase(questions, database, config, args.paraphrase, args.out / JOURNAL)
        print(bill)
    rows = []
    for number, asked in enumerate(questions, start=1):
        place = Place(args.database.name, number)
        row = SourceRow(place, asked.db_id, asked.question, asked.gold_sql, "", asked.difficulty)
        rows.append((row, args.database.resolve()))
    counts = Counter(question.difficulty for question in questions)
    print("of these, " + ", ".join(f"{counts[difficulty]} are {difficulty}" for difficulty in SHARES))
    if len(questions) < args.questions:
        size = f"{len(about.tables)} tables with {sum(table.rows for table in about.tables)} rows"
        print(f"{args.questions} were asked for, but {size} give no more different questions with a clear answer "
              "in the time there is for their golds; "
              "see what was understood with --check.")  # fmt: skip
    write(Checked(rows), args.out, skip=False, reads=[args.hints] if args.hints else [])
