"""The Spider loader: good rows in, bad rows named."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.questions import load
from data.splits import leakage_check
from data.stage import prepare
from shared.errors import UserError
from shared.records import read_questions
from tests.beside import REAL_DATA, needs_real_data
from tests.data.conftest import SpiderWriter, settings

GOOD = {"db_id": "pets", "question": "How many pets?", "query": "SELECT count(*) FROM pets"}
SANDBOX = settings().sandbox


def test_rows_become_questions(spider_folder: SpiderWriter) -> None:
    folder = spider_folder([GOOD, GOOD | {"question": "Old pets?", "query": "SELECT name FROM pets WHERE age > 99;"}])
    loaded = load(folder, SANDBOX, skip_bad_rows=False)
    first = loaded.questions[0]
    assert (first.id, first.db_id, first.question, first.difficulty) == ("dev-00001", "pets", "How many pets?", "easy")
    assert Path(first.database) == folder / "database" / "pets" / "pets.sqlite"
    assert loaded.empty_golds == 1


def test_both_files_are_read(spider_folder: SpiderWriter) -> None:
    spider_folder([GOOD], file="train_spider.json")
    loaded = load(spider_folder([GOOD]), SANDBOX, skip_bad_rows=False)
    assert [question.id for question in loaded.questions] == ["train_spider-00001", "dev-00001"]


BAD_ROWS: list[tuple[Any, str]] = [
    ({"db_id": "pets", "question": "How many?"}, r'no text under "sql", only under db_id, question; a row needs'),
    (GOOD | {"query": "  "}, r'no text under "query"'),
    (GOOD | {"question": None}, r'no text under "question"'),
    (GOOD | {"db_id": 7}, r'no text under "db_id"'),
    (GOOD | {"query": "SELECT nam FROM pets"}, r"gold SQL fails \(no such column: nam\); correct the query"),
    (GOOD | {"query": "DROP TABLE pets"}, r"gold SQL fails \(.*read-only"),
    (GOOD | {"db_id": "zoo"}, r"its database 'zoo' is not in .*; put it there"),
    (GOOD | {"db_id": "../pets"}, r"is not in .*correct the name"),
    (GOOD | {"db_id": ".."}, r"is not in"),
    (GOOD | {"db_id": "pets" * 70}, r"is not in"),
    (GOOD | {"db_id": "pets\0"}, r"is not in"),
    (GOOD | {"question": "How many \ud83d?"}, r"question holds half a character .*; write the whole character"),
    ("How many?", r"not a JSON object; write one"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_ends_in_one_sentence_with_file_row_reason_and_way_out(
    spider_folder: SpiderWriter, row: Any, reason: str
) -> None:
    folder = spider_folder([GOOD, row])
    with pytest.raises(
        UserError, match=rf"dev\.json, row 2: .*{reason}.*, or leave such rows out .*data\.bad_rows=skip"
    ):
        load(folder, SANDBOX, skip_bad_rows=False)


def test_a_damaged_database_is_a_bad_row(spider_folder: SpiderWriter) -> None:
    folder = spider_folder([GOOD])
    (folder / "database" / "pets" / "pets.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(
        UserError, match=r"row 1: .*pets\.sqlite cannot be read .*; restore or replace the file, or leave"
    ):
        load(folder, SANDBOX, skip_bad_rows=False)


def test_a_gold_too_large_to_compare_is_a_bad_row(spider_folder: SpiderWriter) -> None:
    query = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30000) SELECT i FROM n"
    with pytest.raises(UserError, match=r"row 1: .*too much to be compared"):
        load(spider_folder([GOOD | {"query": query}]), SANDBOX, skip_bad_rows=False)


def test_skipped_rows_are_listed_printed_and_counted(
    spider_folder: SpiderWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [
        GOOD | {"question": f"How many above {i}?", "query": f"SELECT count(*) FROM pets WHERE age > {i}"}
        for i in range(60)
    ]
    folder = spider_folder([*good, *(row for row, _ in BAD_ROWS)])
    config = settings(f"data.sources={folder}", "data.bad_rows=skip", "data.unseen_databases=0")
    counts = prepare(config, tmp_path / "out")
    assert counts["skipped"] == len(BAD_ROWS)
    assert sum(counts["questions"].values()) == 60
    lines = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(61, 61 + len(BAD_ROWS)))
    assert "skipped dev.json, row 61: it has no text under" in capsys.readouterr().out


def test_questions_of_an_evaluation_set_are_taken_out_of_training(spider_folder: SpiderWriter, tmp_path: Path) -> None:
    rows = [GOOD | {"question": f"Above {i}?", "query": f"SELECT name FROM pets WHERE age > {i}"} for i in range(60)]
    folder = spider_folder(rows)
    config = settings(f"data.sources={folder}", "data.unseen_databases=0", "data.copies=0")
    prepare(config, tmp_path / "whole")
    first, second, third, *_ = read_questions(tmp_path / "whole" / "train.jsonl")
    avoided = tmp_path / "evaluation.jsonl"
    others = [
        {"db_id": "x", "question": first.question.upper(), "sql": "SELECT 1"},
        {"db_id": "x", "question": "Other words?", "sql": second.gold_sql.replace("SELECT", "select")},
    ]
    avoided.write_text("".join(json.dumps(row) + "\n" for row in others))
    sources = f"data.sources=[{folder}, {{path: {avoided}, use: avoid}}]"
    config = settings(sources, "data.unseen_databases=0", "data.copies=0")
    assert prepare(config, tmp_path / "clean")["decontaminated"] == 2
    kept = {question.id for question in read_questions(tmp_path / "clean" / "train.jsonl")}
    assert {first.id, second.id}.isdisjoint(kept)
    assert third.id in kept


def test_a_file_without_any_usable_row_is_refused(spider_folder: SpiderWriter, tmp_path: Path) -> None:
    config = settings(f"data.sources={spider_folder([{}])}", "data.bad_rows=skip")
    with pytest.raises(UserError, match="no usable question"):
        prepare(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "reason"), [("[{", "cannot be read as JSON"), ('{"a": 1}', "must hold a JSON list")]
)
def test_a_broken_question_file_is_named(spider_folder: SpiderWriter, content: str, reason: str) -> None:
    folder = spider_folder([GOOD])
    (folder / "dev.json").write_text(content)
    with pytest.raises(UserError, match=rf"dev\.json {reason}.*restore the file"):
        load(folder, SANDBOX, skip_bad_rows=False)


def test_a_row_that_names_something_twice_is_a_bad_row(spider_folder: SpiderWriter) -> None:
    folder = spider_folder([GOOD])
    (folder / "dev.json").write_text(json.dumps([GOOD]).replace("{", '{"question": "Which?", '))
    with pytest.raises(UserError, match=r"dev\.json, row 1: it names 'question' twice; keep one of them"):
        load(folder, SANDBOX, skip_bad_rows=False)


def test_a_folder_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no question file .*dev\.json"):
        load(tmp_path, SANDBOX, skip_bad_rows=False)


@needs_real_data
def test_the_real_spider_sample_is_split_without_leak(tmp_path: Path) -> None:
    counts = prepare(settings(f"data.sources={REAL_DATA / 'spider_sample'}", "data.copies=0"), tmp_path)
    splits = [list(read_questions(tmp_path / f"{name}.jsonl")) for name in ("train", "val", "test")]
    assert sum(map(len, splits)) == 575
    assert len(counts["databases"]) == 11
    assert len(counts["unseen_databases"]) == 2  # three would take more than a third of the questions
    assert 0 < counts["empty_golds"] < 20
    leakage_check(*splits)
