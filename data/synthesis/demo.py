"""The demo: invented databases that lie in data/demo as SQL text, and questions made like those of any database."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from data.synthesis.generate import Taken, generate
from data.synthesis.hints import read_hints
from data.synthesis.schema import understand
from shared.config.schema import Config
from shared.errors import UserError
from shared.records import Question
from shared.sql.database import Database

SCRIPTS = tuple(sorted(Path(__file__).parents[1].joinpath("demo").glob("*.sql")))


def write_database(script: Path, path: Path) -> None:
    """Build the SQLite file of a script; a reader sees all of it or nothing. The same script gives the same bytes."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(partial)) as connection:
        text = script.read_text(encoding="utf-8")
        connection.executescript(f"PRAGMA synchronous = OFF; BEGIN; {text} COMMIT;")
    partial.replace(path)


def demo_questions(config: Config, folder: Path, scripts: Sequence[Path] = SCRIPTS) -> list[Question]:
    """Build the databases in `folder` and draw their questions.

    Raises UserError when a database does not yield as many questions as data.questions_per_database asks for.
    """
    folder.mkdir(exist_ok=True)
    count, taken, questions = config.data.questions_per_database, Taken(), []
    for script in tqdm(scripts, desc="making demo databases", unit="database", delay=2):
        path = folder / f"{script.stem}.sqlite"
        write_database(script, path)
        database, hints = Database(path, config.sandbox), script.with_suffix(".yaml")
        about = understand(database, read_hints(hints if hints.exists() else None, database))
        drawn = generate(database, about, count, config.seed, taken)
        if len(drawn) < count:
            raise UserError(
                f"The demo database {script.stem} yields only {len(drawn)} of {count} different questions; "
                f"lower data.questions_per_database to {len(drawn)} or less."
            )
        questions += drawn
    return questions
