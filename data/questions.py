"""Turn the rows of the sources into questions whose golds run.

Each database is opened once and each gold is run once. Several sources become one data set: their questions get unique
ids and their databases unique names. Files of one name and one content are one database.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path

from tqdm import tqdm

from data.sources import BadRowError, Place, Source, SourceRow, find_source, read_rows
from data.sql_form import gold_key, is_explain, question_key, rate
from data.synthesis.demo import demo_questions
from shared.config.schema import Config, DataSource, SandboxConfig
from shared.errors import UserError
from shared.records import Question, write_jsonl
from shared.sql.database import Database, QueryResult, SqlError

_EVIDENCE = "\nEvidence: "  # between a question and BIRD's hint for it
_LISTED = 20  # skipped rows printed; all of them are in skipped.jsonl


class Databases:
    """The databases of a source, each opened when its first row needs it."""

    def __init__(self, source: Source, sandbox: SandboxConfig) -> None:
        self.opened: dict[str, Database] = {}
        self._broken: dict[str, str] = {}
        self._source = source
        self._sandbox = sandbox

    def get(self, name: str) -> Database:
        """The database called `name`; raises BadRowError when it is missing or damaged."""
        if name in self._broken:
            raise BadRowError(self._broken[name])
        if name not in self.opened:
            try:
                self.opened[name] = Database(self._source.database(name), self._sandbox)
            except (BadRowError, UserError) as reason:
                self._broken[name] = str(reason).rstrip(".")
                raise BadRowError(self._broken[name]) from None
        return self.opened[name]

    def run_gold(self, row: SourceRow) -> tuple[Database, QueryResult]:
        """The database of a row and the whole result of its gold.

        Raises BadRowError when the database is unusable, and when the gold fails or returns too much to compare.
        """
        if is_explain(row.gold_sql):
            raise BadRowError("its gold SQL is an EXPLAIN, which gives a plan and no answer; give the query itself")
        database = self.get(row.database)
        try:
            result = database.execute(row.gold_sql, self._sandbox.max_compare_rows)
        except SqlError as error:
            if error.kind == "timeout":
                seconds = f"{self._sandbox.timeout_seconds:g} s"
                raise BadRowError(f"its gold SQL takes longer than {seconds}; raise sandbox.timeout_seconds") from None
            raise BadRowError(f"its gold SQL fails ({str(error).rstrip('.')}); correct the query") from None
        except UserError as error:
            raise BadRowError(str(error).rstrip(".")) from None
        if result.truncated:
            raise BadRowError(
                "its gold SQL returns too much to be compared; narrow the query or raise sandbox.max_compare_rows and "
                "sandbox.max_result_bytes"
            )
        return database, result


@dataclass
class Loaded:
    """The questions of a data set and the rows that could not be used."""

    questions: list[Question] = field(default_factory=list)
    bad_rows: list[tuple[Place, str]] = field(default_factory=list)
    empty_golds: int = 0  # golds that run but return no row; they are kept
    origins: dict[str, DataSource] = field(default_factory=dict)  # question id -> source; filled by load_sources


def load(path: Path, sandbox: SandboxConfig, *, skip_bad_rows: bool) -> Loaded:
    """All usable questions of a folder in Spider or BIRD layout or of a question file.

    Raises UserError for the first bad row, unless `skip_bad_rows` collects them instead.
    """
    source = find_source(path)
    databases = Databases(source, sandbox)
    loaded, usable = Loaded(), []
    for place, row in tqdm([*read_rows(source)], desc="running golds", unit="question", delay=2):
        try:
            if isinstance(row, BadRowError):
                raise row
            database, result = databases.run_gold(row)
        except BadRowError as reason:
            if not skip_bad_rows:
                raise UserError(
                    f"{path}: {place}: {reason}, or leave such rows out with --set data.bad_rows=skip."
                ) from None
            loaded.bad_rows.append((place, str(reason)))
            continue
        usable.append((row, database.path))
        loaded.empty_golds += not result.rows
    names = database_names(file for _, file in usable)
    loaded.questions = [question_of(row, names[file], file) for row, file in usable]
    return loaded


def load_sources(config: Config, folder: Path) -> Loaded:
    """The questions of all data.sources but those to avoid; skipped rows are listed in `folder`/skipped.jsonl.

    The demo databases are made in `folder`/databases. Raises UserError for a bad row (data.bad_rows=fail) and for a
    source without any usable question.
    """
    whole, skipped = Loaded(), []
    for number, source in enumerate(config.data.sources, start=1):
        if source.use == "avoid":
            continue
        if source.path == "demo":
            part = Loaded(demo_questions(config, folder.resolve() / "databases"))
        else:
            part = load(Path(source.path), config.sandbox, skip_bad_rows=config.data.bad_rows == "skip")
        for place, reason in part.bad_rows:
            skipped.append({"source": source.path, "file": place.file, "row": place.line, "reason": reason})
            if len(skipped) <= _LISTED:
                print(f"skipped {place}: {reason}")
        if not part.questions:
            raise UserError(f"{source.path} holds no usable question; correct its rows.")
        for question in part.questions:
            unique = f"{number}-{question.id}" if question.id in whole.origins else question.id
            whole.questions.append(replace(question, id=unique))
            whole.origins[unique] = source
        whole.bad_rows += part.bad_rows
        whole.empty_golds += part.empty_golds
    if skipped:
        write_jsonl(folder / "skipped.jsonl", skipped)
    if len(skipped) > _LISTED:
        print(f"skipped {len(skipped) - _LISTED} more, see {folder / 'skipped.jsonl'}")
    names = database_names(Path(question.database) for question in whole.questions)
    files = {name: str(file) for file, name in reversed(names.items())}  # of equal files the first
    for place_of, question in enumerate(whole.questions):
        name = names[Path(question.database)]
        whole.questions[place_of] = replace(question, db_id=name, database=files[name])
    return whole


def avoided_keys(config: Config) -> set[tuple[str, str]]:
    """The `keys` of all questions in the sources to avoid, which need no databases."""
    avoided: set[tuple[str, str]] = set()
    for source in config.data.sources:
        if source.use != "avoid":
            continue
        found = [*read_rows(find_source(Path(source.path)))]
        rows = [row for _, row in found if isinstance(row, SourceRow)]
        if not rows:
            why = f", the first ({found[0][0]}) because {found[0][1]}" if found else ""
            raise UserError(f"Setting data.sources: no question can be read from {source.path}{why}.")
        avoided.update(*(keys(question_of(row, row.database, Path())) for row in rows))
    return avoided


def keys(question: Question) -> tuple[tuple[str, str], tuple[str, str]]:
    """What no two splits may share: the question's text without evidence, and its gold, both in normal form."""
    text = question.question.split(_EVIDENCE)[0]
    return ("question", question_key(text)), ("gold", gold_key(question.gold_sql))


def question_of(row: SourceRow, db_id: str, database: Path) -> Question:
    """The question of a usable row; its id is made of the file's stem and the row's number."""
    text = row.question + (_EVIDENCE + row.evidence if row.evidence else "")
    identity = f"{Path(row.place.file).stem}-{row.place.line:05d}"
    return Question(identity, db_id, text, row.gold_sql, str(database), row.difficulty or rate(row.gold_sql), "spider")


def database_names(files: Iterable[Path]) -> dict[Path, str]:
    """A name for each database file: its stem, with a number where files of other content share it."""
    names: dict[Path, str] = {}
    for file in files:
        if file in names:
            continue
        twins = (other for other in names if other.stem == file.stem and filecmp.cmp(other, file, shallow=False))
        taken, numbered = set(names.values()), (f"{file.stem}_{number}" for number in count(2))
        free = (name for name in chain([file.stem], numbered) if name not in taken)
        twin = next(twins, None)
        names[file] = names[twin] if twin else next(free)
    return names
