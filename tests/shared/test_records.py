"""Records on disk."""

import json
from pathlib import Path

import pytest

from shared.records import JsonlTail, Question, read_questions, to_json, write_jsonl


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    tail = JsonlTail(file)
    assert tail.new_rows() == []
    file.write_text(json.dumps({"a": 1}) + '\n{"a":')
    assert tail.new_rows() == [{"a": 1}]
    with file.open("a") as stream:
        stream.write(" 2}\n")
    assert tail.new_rows() == [{"a": 2}]
    assert tail.new_rows() == []


def test_a_line_cut_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "rew{"step": 2}\n7\n\n{"step": 3}\n')
    assert JsonlTail(file).new_rows() == [{"step": 1}, {"step": 3}]


def test_only_a_newline_ends_a_row(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u2029c\x85d"}, {"text": "e\r\nf"}]
    assert write_jsonl(tmp_path / "rows.jsonl", rows) == 2
    assert JsonlTail(tmp_path / "rows.jsonl").new_rows() == rows


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            '{"question": "How many?", "sql": "SELECT 1"}',
            "not an object with the texts id, db_id, question, gold_sql, database",
        ),
        (
            '{"id": 1, "db_id": "pets", "question": "How many?", "gold_sql": "SELECT 1", "database": "p"}',
            "not an object",
        ),
        ("[]", "not an object"),
        ("{", "Expecting"),
    ],
)
def test_a_line_that_is_no_question_is_named(row: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(f"{to_json(Question('1', 'pets', 'How many?', 'SELECT 1', 'pets.sqlite'))}\n\n{row}\n")
    with pytest.raises(ValueError, match=f"line 3: .*{reason}"):
        list(read_questions(file))
