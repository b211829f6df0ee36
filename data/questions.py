"""Turn the rows of a source into questions whose golds run: each database is opened once, each gold is run once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from data.sources import BadRowError, Place, Source, SourceRow, find_source, read_rows
from data.sql_form import is_explain, rate
from shared.config.schema import SandboxConfig
from shared.errors import UserError
from shared.records import Question
from shared.sql.database import Database, QueryResult, SqlError

EVIDENCE = "\nEvidence: "  # between a question and BIRD's hint for it


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

    def run_gold(self, name: str, sql: str) -> QueryResult:
        """The whole result of a gold; raises BadRowError when it fails, answers nothing or is too large to compare."""
        if is_explain(sql):
            raise BadRowError("its gold SQL is an EXPLAIN, which gives a plan and no answer; give the query itself")
        try:
            result = self.get(name).execute(sql, self._sandbox.max_compare_rows)
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
        return result


@dataclass
class Loaded:
    """The questions of a data set and the rows that could not be used."""

    questions: list[Question] = field(default_factory=list)
    bad_rows: list[tuple[Place, str]] = field(default_factory=list)
    empty_golds: int = 0  # golds that run but return no row; they are kept


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
            result = databases.run_gold(row.database, row.gold_sql)
        except BadRowError as reason:
            if not skip_bad_rows:
                raise UserError(
                    f"{path}: {place}: {reason}, or leave such rows out with --set data.bad_rows=skip."
                ) from None
            loaded.bad_rows.append((place, str(reason)))
            continue
        usable.append((row, databases.get(row.database).path))
        loaded.empty_golds += not result.rows
    names = database_names(file for _, file in usable)
    loaded.questions = [question_of(row, names[file], file) for row, file in usable]
    return loaded


def question_of(row: SourceRow, db_id: str, database: Path) -> Question:
    """The question of a usable row; its id is made of the file's stem and the row's number."""
    text = row.question + (EVIDENCE + row.evidence if row.evidence else "")
    identity = f"{Path(row.place.file).stem}-{row.place.line:05d}"
    return Question(identity, db_id, text, row.gold_sql, str(database), row.difficulty or rate(row.gold_sql), "spider")


def database_names(files: Iterable[Path]) -> dict[Path, str]:
    """A name for each database file: its stem, with a number where several files share it."""
    names: dict[Path, str] = {}
    for file in files:
        if file not in names:
            twins = sum(other.stem == file.stem for other in names)
            names[file] = file.stem + (f"_{twins + 1}" if twins else "")
    return names
