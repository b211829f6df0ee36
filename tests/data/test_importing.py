"""`python -m data import`: what the sources are read as, what the report says, what is written."""

from __future__ import annotations

import json
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from data import importing, sources
from data.check import Checked, check
from data.questions import load
from data.sources import find_source, read_rows
from data.stage import prepare
from shared.errors import UserError
from shared.evaluation import __main__ as evaluate
from shared.records import read_questions
from shared.sql.database import Database
from tests.beside import REAL_DATA, needs_real_data
from tests.data.conftest import ROOT, Command, settings

CONFIG = settings()
GOOD = {"database": "pets", "question": "How many pets?", "sql": "SELECT count(*) FROM pets"}


def database(path: Path, rows: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE pets (pet_id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO pets VALUES (?, ?, ?)", [(i, f"pet {i}", 7) for i in range(rows)])
    return path


def jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def checked(path: Path, databases: Path | None = None) -> Checked:
    source = find_source(path, databases)
    return check(source, [*read_rows(source)], CONFIG)


@pytest.mark.parametrize("name", ["pets.sqlite", "pets.db", "pets/pets.sqlite", "databases/pets.sqlite"])
def test_a_jsonl_file_finds_its_databases_by_name(name: str, tmp_path: Path) -> None:
    database(tmp_path / name)
    (row, path) = checked(jsonl(tmp_path, GOOD)).rows[0]
    assert (row.question, row.gold_sql, str(row.place)) == (GOOD["question"], GOOD["sql"], "questions.jsonl:1")
    assert path == (tmp_path / name).resolve()


def test_a_csv_file_with_line_breaks_in_cells_keeps_its_line_numbers(tmp_path: Path) -> None:
    database(tmp_path / "pets.sqlite")
    file = tmp_path / "questions.csv"
    file.write_text(
        'question,sql,database\n"How\nmany?",SELECT count(*) FROM pets,pets\nNames?,SELECT nam FROM pets,pets\n'
    )
    result = checked(file)
    assert [row.question for row, _ in result.rows] == ["How\nmany?"]
    assert [(str(place), what) for place, what in result.findings["unusable"]] == [
        ("questions.csv:4", "its gold SQL fails (no such column: nam); correct the query")
    ]


def test_a_long_cell_is_read_and_one_beyond_the_bound_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database(tmp_path / "pets.sqlite")
    file = tmp_path / "questions.csv"
    file.write_text(f'question,sql,database\n"{"How many? " * 100_000}",SELECT count(*) FROM pets,pets\n')
    ((row, _),) = checked(file).rows
    assert len(row.question) == 999_999
    monkeypatch.setattr(sources, "_LONGEST_CELL", 999_998)
    with pytest.raises(UserError, match=r"quote its texts, each of at most 999998 characters"):
        checked(file)


def test_a_gold_is_found_beside_the_parse_that_spider_gives_with_it(tmp_path: Path) -> None:
    database(tmp_path / "pets.sqlite")
    file = tmp_path / "questions.json"
    file.write_text(json.dumps([{"db_id": "pets", "question": "How many?", "query": GOOD["sql"], "sql": {"from": []}}]))
    ((row, _),) = checked(file).rows
    assert row.gold_sql == GOOD["sql"]


def test_one_database_may_serve_all_questions(tmp_path: Path) -> None:
    path = database(tmp_path / "mine.db")
    file = jsonl(tmp_path, {"question": "How many?", "query": "SELECT count(*) FROM pets"})
    assert checked(file, path).rows[0][1] == path.resolve()


def test_bird_layout_keeps_evidence_and_difficulty(tmp_path: Path) -> None:
    database(tmp_path / "bird" / "dev_databases" / "pets" / "pets.sqlite")
    row = {"db_id": "pets", "question": "How many old pets?", "evidence": "old means age > 5",
           "difficulty": "challenging", "SQL": "SELECT count(*) FROM pets WHERE age > 5", "question_id": 4}  # fmt: skip
    (tmp_path / "bird" / "mini_dev_sqlite.json").write_text(json.dumps([row]))
    importing.main([str(tmp_path / "bird"), "--out", str(tmp_path / "out"), "--config", str(ROOT / "pipeline.yaml")])
    (question,) = load(tmp_path / "out", CONFIG.sandbox, skip_bad_rows=False).questions
    assert question.question == "How many old pets?\nEvidence: old means age > 5"
    assert (question.difficulty, question.db_id) == ("hard", "pets")


def test_what_was_imported_can_be_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = database(tmp_path / "pets.sqlite")
    before = path.read_bytes()
    rows = [
        GOOD | {"question": f"How many above {i}?", "sql": f"SELECT count(*) FROM pets WHERE age > {i}"}
        for i in range(60)
    ]
    importing.write(checked(jsonl(tmp_path, *rows)), tmp_path / "out", skip=False)
    counts = prepare(settings(f"data.sources={tmp_path / 'out'}", "data.copies=0"), tmp_path / "prepared")
    assert "0 of 1 databases held out for tests" in capsys.readouterr().out
    for_evaluation = list(read_questions(tmp_path / "out" / "questions.jsonl"))
    assert for_evaluation == load(tmp_path / "out", CONFIG.sandbox, skip_bad_rows=False).questions
    assert sum(counts["questions"].values()) == 60
    assert path.read_bytes() == before


FINDINGS = [
    ("empty", "Old?", "SELECT name FROM pets WHERE age > 99"),
    ("constant", "What?", "SELECT 1 + 1"),
    ("one scalar", "Sum?", "SELECT sum(age) FROM pets"),
    ("unrepeatable", "How long ago?", "SELECT pet_id, julianday('now') - age FROM pets"),
    ("order-ambiguous", "Oldest?", "SELECT name FROM pets ORDER BY age LIMIT 1"),
    ("trivial", "All?", "SELECT pet_id, name, age FROM pets WHERE age = 7"),
    ("duplicated", "how many PETS", "select COUNT(*) from pets"),
    ("contradictory", "How many pets?", "SELECT count(*) + 1 FROM pets"),
]


@pytest.mark.parametrize(("kind", "question", "gold"), FINDINGS)
def test_odd_rows_are_found_with_their_line(kind: str, question: str, gold: str, tmp_path: Path) -> None:
    database(tmp_path / "pets.sqlite")
    result = checked(jsonl(tmp_path, GOOD, GOOD | {"question": question, "sql": gold}))
    assert len(result.rows) == 2
    assert "questions.jsonl:2" in [str(place) for place, _ in result.findings[kind]]
    found_in_the_first = {name for name, places in result.findings.items() if places[0][0].line == 1}
    assert found_in_the_first == {"one scalar"}


def test_schemas_too_large_for_the_context_are_named(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "wide.sqlite")) as connection:
        connection.execute(f"CREATE TABLE t ({', '.join(f'a_rather_long_name_{i} INTEGER' for i in range(200))})")
    result = checked(jsonl(tmp_path, GOOD | {"database": "wide", "sql": "SELECT count(*) FROM t"}))
    assert list(result.large_schemas) == ["wide"]
    assert "wide: about" in result.report()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it is not a JSON object"),
        ('{"question": "A?", "sql": "SELECT 1", "question": "B?", "database": "pets"}', "it names 'question' twice"),
        ({"\ud800": "x"}, r"only under \ud800;"),
        ({"question": "x", "database": "pets"}, 'it has no text under "sql"'),
        (GOOD | {"question": 1}, 'it has no text under "question"'),
        (GOOD | {"database": "zoo"}, r"its database 'zoo' is not in"),
        (GOOD | {"database": "../pets"}, "is not in"),
        (GOOD | {"database": "p" * 5000}, "is not in"),
        (GOOD | {"question": "\ud800"}, "half a character"),
        (GOOD | {"sql": "DROP TABLE pets"}, "its gold SQL fails"),
        (GOOD | {"sql": "explain SELECT 1"}, "its gold SQL is an EXPLAIN"),
    ],
)
def test_bad_rows_are_listed_and_stop_or_are_skipped(
    row: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database(tmp_path / "pets.sqlite")
    result = checked(jsonl(tmp_path, GOOD, "", row))
    ((place, what),) = result.findings["unusable"]
    assert (str(place), reason.split("'")[0] in what) == ("questions.jsonl:3", True)
    with pytest.raises(UserError, match=r"1 rows cannot be used, the first is questions\.jsonl:3: .*--bad-rows skip"):
        importing.write(result, tmp_path / "out", skip=False)
    assert not (tmp_path / "out").exists()
    importing.write(result, tmp_path / "out", skip=True)
    assert json.loads((tmp_path / "out" / "skipped.jsonl").read_text())["row"] == 3
    assert "1 questions written, 1 rows skipped" in capsys.readouterr().out
    assert result.report().encode()
    with pytest.raises(UserError, match=r"dev\.json already exists"):
        importing.write(result, tmp_path / "out", skip=True)


def test_a_wrong_name_is_reported_once_and_nothing_usable_is_no_success(tmp_path: Path) -> None:
    database(tmp_path / "pets.sqlite")
    file = jsonl(tmp_path, *[{"Question": "How many?", "SQL": GOOD["sql"], "database": "pets"}] * 20)
    reason = (
        'it has no text under "question", only under Question, SQL, database; a row needs question, sql and database'
    )
    assert checked(file).report().count(reason) == 1
    assert f"questions.jsonl:1 and 19 more: {reason}" in checked(file).report()
    with pytest.raises(UserError, match="No row can be used"):
        importing.main([str(file), "--check", "--config", str(ROOT / "pipeline.yaml")])


def test_two_databases_of_one_name_stay_apart(tmp_path: Path) -> None:
    paths = [database(tmp_path / folder / "pets.sqlite", rows) for folder, rows in (("a", 1), ("b", 2))]
    rows = [GOOD | {"database": str(path), "question": f"How many in {path.parent.name}?"} for path in paths]
    importing.write(checked(jsonl(tmp_path, *rows)), tmp_path / "out", skip=False)
    loaded = load(tmp_path / "out", CONFIG.sandbox, skip_bad_rows=False)
    assert [question.db_id for question in loaded.questions] == ["pets", "pets_2"]


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"\xff", "q.jsonl", "give a UTF-8 file"),
        (b"{", "q.json", "cannot be read as JSON"),
        (b"{}", "q.json", "must hold a JSON list"),
        (b'question,sql,database\n"a"b,c,d\n', "q.csv", r"after line 1: this is not CSV"),
        (b"How many?,SELECT 1,pets\n", "q.csv", r"line 1: the header .* it names How many\?, SELECT 1, pets\."),
        (b"question,database\nHow many?,pets\n", "q.csv", "must name question, sql and database"),
        (b"question,sql\nHow many?,SELECT 1\n", "q.csv", "Without a database column, give the one .* --databases FILE"),
        (b"SQLite format 3\0\xff", "q.jsonl", "is a SQLite database, not a question file; give the questions as"),
        (b"question;sql;database\na;b;c\n", "q.csv", "must name question, sql and database, separated by commas"),
        (b"question,sql,database,sql,,\n", "q.csv", "line 1: the header names sql twice"),
        (b"", "q.csv", r"q\.csv holds no rows"),
        (b"question,sql,database\n", "q.csv", r"q\.csv holds no rows"),
        (b"", "q.jsonl", r"q\.jsonl holds no rows"),
        (b" \n\n", "q.jsonl", r"q\.jsonl holds no rows"),
        (b"[]", "q.json", r"q\.json holds no rows"),
    ],
)
def test_files_that_cannot_be_read_are_named(content: bytes, name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        checked(tmp_path / name)


def test_the_commands_to_go_on_with_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    database(tmp_path / "pets.sqlite")
    folder = tmp_path / "my $pets; (old)"
    importing.write(checked(jsonl(tmp_path, GOOD)), folder, skip=False)
    _, *commands = capsys.readouterr().out.splitlines()
    train, ask = map(shlex.split, commands)
    assert train == ["python", "run_pipeline.py", "--set", f"data.sources={folder}"]
    assert [source.path for source in settings(*train[3:]).data.sources] == [str(folder)]
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [*ask[2:], "--dry-run", "--profile=cpu", "--config", str(ROOT / "pipeline.yaml")])
    with pytest.raises(UserError, match="FOLDER"):  # all that is left to say is which model
        evaluate.main()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", ""], "The path is empty"),
        (["--databases", "", "--check"], "The path is empty"),
        (["--out", "x", "--check"], "Give either --out FOLDER"),
        ([], "Give either --out FOLDER"),
    ],
)
def test_where_to_write_must_be_clear(options: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        importing.main([str(jsonl(tmp_path, GOOD)), *options, "--config", str(ROOT / "pipeline.yaml")])


def test_a_folder_of_databases_alone_asks_nothing(tmp_path: Path) -> None:
    database(tmp_path / "pets.sqlite")
    with pytest.raises(UserError, match="Databases alone are not enough: give a JSONL or CSV file"):
        find_source(tmp_path, None)
    with pytest.raises(UserError, match="does not exist"):
        find_source(jsonl(tmp_path, GOOD), tmp_path / "none")


def test_the_command_prints_the_report_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    database(tmp_path / "pets.sqlite")
    source = jsonl(tmp_path, GOOD)
    done = command("import", source, "--check")
    assert done.returncode == 0
    assert done.stdout.startswith("usable questions: 1, databases: 1\n")
    assert "too few to train on: 20 questions are the smallest useful number" in done.stdout
    assert done.stdout.endswith("next: the same command with `--out imported` instead of --check\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["pets.sqlite", "questions.jsonl"]
    refused = command("import", source)
    assert (refused.returncode, "Give either --out FOLDER" in refused.stderr) == (2, True)


@needs_real_data
@pytest.mark.parametrize(
    ("source", "usable", "unusable"), [("spider_sample", 575, 0), ("defog_sample", 183, 0), ("bird_sample", 0, 284)]
)
def test_the_given_data_sets_are_read(source: str, usable: int, unusable: int) -> None:
    result = checked(REAL_DATA / source)
    assert (len(result.rows), len(result.findings["unusable"])) == (usable, unusable)


def test_golds_in_another_dialect_are_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database(tmp_path / "pets.sqlite")
    rows = (GOOD | {"sql": "SELECT IF(age > 5, CONCAT(name, '!'), 'young') FROM `pets`"}, GOOD | {"sql": "SELECT ((1"})
    options = ["--dialect", "mysql", "--out", str(tmp_path / "out"), "--bad-rows", "skip"]
    importing.main([str(jsonl(tmp_path, *rows)), *options, "--config", str(ROOT / "pipeline.yaml")])
    output = capsys.readouterr().out
    assert "golds are translated from mysql to SQLite" in output
    assert "questions.jsonl:2: its gold SQL is not mysql" in output
    (question,) = load(tmp_path / "out", CONFIG.sandbox, skip_bad_rows=False).questions
    assert Database(Path(question.database), CONFIG.sandbox).execute(question.gold_sql, 9).rows[0] == ("pet 0!",)
    with pytest.raises(UserError, match=r"--dialect tsqll is unknown; choose one of .*mysql"):
        importing.main([str(tmp_path / "questions.jsonl"), "--check", "--dialect", "tsqll"])


@pytest.mark.parametrize("out", [".", "link"])
def test_an_import_into_the_folder_of_its_source_changes_nothing(out: str, tmp_path: Path) -> None:
    """The path of the database in the written layout is the user's own database here."""
    mine = tmp_path / "mine"
    path = database(mine / "database" / "pets" / "pets.sqlite")
    (mine / "link").symlink_to(mine)
    file = jsonl(mine, GOOD | {"my_own_notes": "irreplaceable"})
    before = path.read_bytes(), file.read_text()
    with pytest.raises(UserError, match=r"it would replace .*, which this command reads; choose another place"):
        importing.main([str(file), "--out", str(mine / out)])
    assert (path.read_bytes(), file.read_text(), path.is_symlink()) == (*before, False)
    importing.main([str(file), "--out", str(mine / "imported")])
    assert (mine / "imported" / "dev.json").exists()


def test_an_import_replaces_no_file_that_it_did_not_write(tmp_path: Path) -> None:
    database(tmp_path / "pets.sqlite")
    file = jsonl(tmp_path, GOOD)
    notes = tmp_path / "out" / "questions.jsonl"
    notes.parent.mkdir()
    notes.write_text("other questions")
    with pytest.raises(UserError, match=r"questions\.jsonl already exists; choose another --out"):
        importing.main([str(file), "--out", str(tmp_path / "out")])
    assert [path.read_text() for path in notes.parent.iterdir()] == ["other questions"]


def test_a_slow_gold_names_the_time_limit(tmp_path: Path) -> None:
    database(tmp_path / "pets.sqlite")
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c, pets"
    file = jsonl(tmp_path, GOOD | {"sql": endless})
    source = find_source(file, None)
    found = check(source, [*read_rows(source)], settings("sandbox.timeout_seconds=0.2"))
    ((_, reason),) = found.findings["unusable"]
    assert reason == "its gold SQL takes longer than 0.2 s; raise sandbox.timeout_seconds"
