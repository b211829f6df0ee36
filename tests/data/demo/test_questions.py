"""The demo questions: enough, varied, answerable, and their words give the gold away."""

import datetime
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from data.sql_form import gold_key, question_key
from data.synthesis.compose import Draft, Draw
from data.synthesis.conditions import SORTS
from data.synthesis.demo import SCRIPTS, demo_questions
from data.synthesis.generate import FAMILIES, SHARES, drafts_of
from data.synthesis.schema import understand
from data.synthesis.words import date_said
from shared.errors import UserError
from shared.sql.database import Database
from tests.data.conftest import Prepared, settings


def test_the_shipped_settings_give_at_least_600_questions_on_8_databases(demo: Prepared) -> None:
    assert len(demo.questions) >= 600
    assert len({question.db_id for question in demo.questions}) == len(SCRIPTS) >= 8


def test_every_gold_runs_in_the_sandbox_and_returns_rows(demo: Prepared) -> None:
    limits = settings().sandbox
    databases = {path: Database(path, limits) for path in {question.database for question in demo.questions}}
    for question in demo.questions:
        result = databases[question.database].execute(question.gold_sql)
        assert result.rows, question
        assert not result.truncated


def test_no_two_questions_share_text_or_gold(demo: Prepared) -> None:
    assert len({question_key(question.question) for question in demo.questions}) == len(demo.questions)
    assert len({gold_key(question.gold_sql) for question in demo.questions}) == len(demo.questions)


def test_difficulties_come_in_the_planned_shares(demo: Prepared) -> None:
    counts = Counter(question.difficulty for question in demo.questions)
    for difficulty, share in SHARES.items():
        assert counts[difficulty] / len(demo.questions) == pytest.approx(share, abs=0.01)


def test_the_questions_teach_few_families_each_with_many_examples(demo: Prepared) -> None:
    counts = Counter((question.difficulty, question.form) for question in demo.questions)
    assert len(counts) >= 24
    assert min(counts.values()) >= 3 * len(SCRIPTS)
    for split in ("train", "test"):
        share = len(demo.splits[split]) / len(demo.questions)
        found = Counter((question.difficulty, question.form) for question in demo.splits[split])
        assert all(found[family] == pytest.approx(share * count, rel=0.3, abs=1) for family, count in counts.items())


def test_more_than_a_third_of_the_questions_need_two_tables(demo: Prepared) -> None:
    several = sum(len(set(re.findall(r" (?:FROM|JOIN) (\S+)", q.gold_sql))) > 1 for q in demo.questions)
    assert several > len(demo.questions) / 3


def test_every_family_and_every_sort_of_condition_can_be_drawn(demo: Prepared) -> None:
    drafts: list[Draft] = []
    missing = {(level, family) for level, families in FAMILIES.items() for family in families}
    missing.remove(("hard", "days"))  # no demo table has two dates that are always known
    for path in sorted({question.database for question in demo.questions}):
        draw = Draw(random.Random(path[-9:]), understand(Database(path, settings().sandbox), {}))
        found = {due: list(drafts_of(draw, *due)) for due in missing}
        missing = {due for due in missing if not found[due]}
        drafts += [draft for several in found.values() for draft in several]
    assert not missing
    assert {sort for draft in drafts for sort in draft.sorts} >= set(SORTS) - {"flag"}  # no demo column is one


LANGUAGE = (
    "COUNT(*)", "COUNT(DISTINCT", "AVG(", "SUM(", "MIN(", "MAX(", "SELECT DISTINCT", "LIKE", "BETWEEN", "strftime(",
    " JOIN ", "GROUP BY", "HAVING", "ORDER BY", "LIMIT", " IN (SELECT", "NOT IN (SELECT", "(SELECT AVG", "IS NULL",
    "IS NOT NULL", "CASE WHEN", " OR ",
)  # fmt: skip


@pytest.mark.parametrize("feature", LANGUAGE)
def test_golds_cover_the_language(demo: Prepared, feature: str) -> None:
    assert sum(feature in question.gold_sql for question in demo.questions) >= 10


def test_every_value_of_a_gold_stands_in_its_question(demo: Prepared) -> None:
    for question in demo.questions:
        sql = re.sub(r"strftime\('%Y'|LIMIT 1\b|THEN 1 ELSE 0|\* 100\b", "", question.gold_sql)
        for text, number in re.findall(r"'%?([^'%]+)%?'|\b(\d+(?:\.\d+)?)\b", sql):
            value = text or number
            is_day = re.fullmatch(r"\d{4}-\d\d-\d\d", value) and datetime.date.fromisoformat(value)
            said = date_said(value) if is_day else value
            assert value.lower() in question.question.lower() or said in question.question, question


def test_the_words_of_filtered_columns_stand_in_the_question(demo: Prepared) -> None:
    for question in demo.questions:
        condition = question.gold_sql.partition(" WHERE ")[2]
        for column in re.findall(r"(?:\w+\.)?(\w+) (?:=|!=|LIKE|BETWEEN|IS|<|>)", condition):
            words = re.sub(r" (name|title|id)$", "", column.replace("_", " "))
            shorter = words.partition(" ")[2] or words  # the "type" of a donor is in donor_type
            text = question.question.lower()
            assert words in text or shorter in text or " from " in text, question


def test_questions_are_sentences(demo: Prepared) -> None:
    for question in demo.questions:
        assert re.fullmatch(r"[A-Z][^{}]*[^ .?][.?]( (Show|Give) [^{}.]*\.)?", question.question), question
        assert "  " not in question.question


def test_too_many_questions_are_refused_with_the_number_there_are(tmp_path: Path) -> None:
    script = tmp_path / "cats.sql"
    script.write_text(
        "CREATE TABLE cats (cat_id INTEGER PRIMARY KEY, color TEXT); INSERT INTO cats VALUES (1, 'a'), (2, 'b');"
    )
    with pytest.raises(UserError, match=r"cats yields only \d+ of 110.*lower data.questions_per_database"):
        demo_questions(settings(), tmp_path / "databases", [script])
