"""The questions of any database: answerable, varied, repeatable, and readable by the pipeline."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from data.questions import load
from data.sql_form import gold_key, question_key
from data.synthesis.compose import Draw
from data.synthesis.generate import ALL_FORMS, FAMILIES, WORDINGS, Taken, ask, drafts_of, generate
from data.synthesis.schema import Understanding
from shared.records import Question
from shared.sql.database import Database
from tests.data.conftest import Command, settings


@pytest.fixture(scope="module")
def questions(strange: Database, about: Understanding) -> list[Question]:
    return generate(strange, about, 150, 0, Taken())


def test_a_small_strange_database_gives_many_different_questions(questions: list[Question]) -> None:
    assert len(questions) == 150
    assert len({question_key(question.question) for question in questions}) == 150
    assert len({gold_key(question.gold_sql) for question in questions}) == 150
    assert len({question.form for question in questions}) >= 15
    assert min(Counter(question.difficulty for question in questions).values()) >= 15


def test_every_gold_answers_in_the_sandbox(strange: Database, questions: list[Question]) -> None:
    for question in questions:
        result = strange.execute(question.gold_sql)
        assert result.rows, question
        assert not result.truncated


def test_strange_names_are_quoted_and_people_are_female(questions: list[Question]) -> None:
    assert any('"order"' in question.gold_sql and '"order date"' in question.gold_sql for question in questions)
    assert any("female" in question.question and "gender = 'F'" in question.gold_sql for question in questions)
    assert not any("scan" in question.gold_sql for question in questions)


def test_questions_are_sentences(questions: list[Question]) -> None:
    for question in questions:
        assert re.fullmatch(r"[A-Z0-9][^{}]*[.?]", question.question), question
        assert "  " not in question.question
        assert "⟦" not in question.gold_sql


def test_every_wording_has_alternatives_and_belongs_to_a_form() -> None:
    assert all(len(set(alternatives)) >= 4 for alternatives in WORDINGS.values())
    assert {family.removesuffix(" joined") for families in FAMILIES.values() for family in families} == {
        *ALL_FORMS, "average",
    }  # fmt: skip


def test_one_wording_has_one_gold_form(strange: Database, about: Understanding) -> None:
    """A question of `top` with "maximum" compares with it, any other sorts; absence is NOT IN, "except" is EXCEPT."""
    draw = Draw(random.Random(0), about)
    for level, family in (
        ("hard", "without"),
        ("medium", "top"),
        ("hard", "top"),
        ("hard", "parent_of_top"),
        ("medium", "parents_of"),
    ):
        for draft in drafts_of(draw, level, family):  # type: ignore[arg-type]
            sql, question = draft.query.sql, ask(draft, draw.rng)
            assert ("EXCEPT" in sql) == ("except" in question)
            assert ("LEFT JOIN" in sql) == ("no order refer" in question)
            assert (" = (SELECT M" in sql) == ("the maximum" in question or "the minimum" in question)
            assert family != "parents_of" or "SELECT DISTINCT" in sql or "COUNT(DISTINCT" in sql


def test_the_same_seed_gives_the_same_questions_and_another_seed_others(
    strange: Database, about: Understanding
) -> None:
    first, again, other = (generate(strange, about, 20, seed, Taken()) for seed in (3, 3, 4))
    assert first == again
    assert {question.question for question in first} != {question.question for question in other}


def test_the_command_writes_what_the_pipeline_reads(command: Command, strange_file: Path, tmp_path: Path) -> None:
    done = command("synthesize", "--database", strange_file, "--out", tmp_path / "made", "--questions", 20)
    assert done.returncode == 0, done.stderr
    assert "20 questions written" in done.stdout
    loaded = load(tmp_path / "made", settings().sandbox, skip_bad_rows=False)
    rows = [json.loads(line) for line in (tmp_path / "made" / "questions.jsonl").read_text().splitlines()]
    assert [question.id for question in loaded.questions] == [row["id"] for row in rows]
    assert {row["db_id"] for row in rows} == {"strange"}
    again = command("synthesize", "--database", strange_file, "--out", tmp_path / "made")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)


def test_the_check_prints_what_was_understood_and_writes_nothing(
    command: Command, strange_file: Path, tmp_path: Path
) -> None:
    done = command("synthesize", "--database", strange_file, "--check")
    assert done.returncode == 0
    assert "  order:  # 60 rows" in done.stdout
    assert "# empty_table is left out: it has no rows" in done.stdout


@pytest.mark.parametrize("arguments", [("--check", "--out", "x"), (), ("--out", "x", "--questions", "0")])
def test_contradictory_options_end_in_one_sentence(
    command: Command, strange_file: Path, arguments: tuple[str, ...]
) -> None:
    done = command("synthesize", "--database", strange_file, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
