"""The demo questions: enough, varied, answerable, and their words give the gold away."""

import random
import re
from collections import Counter

import pytest

from data.demo.build import make_rows
from data.demo.compose import Draw
from data.demo.conditions import SORTS
from data.demo.domains import DOMAINS
from data.demo.generate import FORMS, SHARES, Taken, ask, generate
from data.demo.query import Query, literal
from data.demo.spec import Domain, Table, category, key
from data.demo.values import pick
from data.sql_form import gold_key, question_key
from shared.errors import UserError
from shared.sql.database import Database
from tests.data.conftest import Prepared, settings


def test_the_shipped_settings_give_at_least_600_questions_on_8_databases(demo: Prepared) -> None:
    assert len(demo.questions) >= 600
    assert len({question.db_id for question in demo.questions}) >= 8


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


def test_every_form_and_every_sort_of_condition_is_used(demo: Prepared) -> None:
    parts = [question.form.split("/") for question in demo.questions]
    assert {form for form, *_ in parts} == {form.name for form in FORMS}
    assert {sort for _, *sorts in parts for sort in sorts} == set(SORTS)


LANGUAGE = (
    "COUNT(*)", "COUNT(DISTINCT", "AVG(", "SUM(", "MIN(", "MAX(", "SELECT DISTINCT", "LIKE", "BETWEEN", "strftime(", " JOIN ",
    "GROUP BY", "HAVING", "ORDER BY", "LIMIT", " IN (SELECT", "NOT IN (SELECT", "(SELECT AVG", "IS NULL", "IS NOT NULL",
)  # fmt: skip


@pytest.mark.parametrize("feature", LANGUAGE)
def test_golds_cover_the_language(demo: Prepared, feature: str) -> None:
    assert sum(feature in question.gold_sql for question in demo.questions) >= 10


def test_every_form_has_four_wordings() -> None:
    assert all(len(set(form.templates)) >= 4 for form in FORMS)


def test_wordings_vary_with_the_random_source() -> None:
    domain = DOMAINS[0]
    draw = Draw(random.Random(0), domain, {})
    form = FORMS[0]
    draft = form.compose(draw)
    assert len({ask(draft, form, draw.rng) for _ in range(60)}) == len(form.templates)


def test_every_value_of_a_gold_stands_in_its_question(demo: Prepared) -> None:
    for question in demo.questions:
        sql = re.sub(r"strftime\('%Y'|LIMIT 1$", "", question.gold_sql)
        for value in re.findall(r"'%?([^'%]+)%?'|\b(\d+(?:\.\d+)?)\b", sql):
            assert (value[0] or value[1]) in question.question, question


def test_the_words_of_filtered_columns_stand_in_the_question(demo: Prepared) -> None:
    for question in demo.questions:
        condition = question.gold_sql.partition(" WHERE ")[2]
        for column in re.findall(r"(?:\w+\.)?(\w+) (?:=|!=|LIKE|BETWEEN|IS|<|>)", condition):
            assert column.replace("_", " ") in question.question, question


def test_questions_are_sentences(demo: Prepared) -> None:
    for question in demo.questions:
        assert re.fullmatch(r"[A-Z][^{}]*[^ .?][.?]( (Show|Give) [^{}.]*\.)?", question.question), question
        assert "  " not in question.question


def test_the_same_seed_gives_the_same_questions_and_another_seed_others() -> None:
    first, again, other = (generate(DOMAINS[1], make_rows(DOMAINS[1]), 20, seed, Taken()) for seed in (3, 3, 4))
    assert first == again
    assert {q.question for q in first} != {q.question for q in other}


def test_a_domain_that_cannot_yield_enough_says_how_many_it_can() -> None:
    table = Table("cats", "cat", 5, (key("cat_id"), category("color", pick("black", "white"))))
    domain = Domain("cat_world", (table,))
    with pytest.raises(UserError, match=r"cat_world yields only \d+ of 500.*lower data.questions_per_database"):
        generate(domain, make_rows(domain), 500, 0, Taken())


def test_queries_render_in_the_canonical_style() -> None:
    query = Query(
        ("city", "COUNT(*)"), "people", where=("age > 3", "name = 'A'"), group="city", having="COUNT(*) > 1",
        order="city", descending=True, limit=2,
    )  # fmt: skip
    assert query.sql == (
        "SELECT city, COUNT(*) FROM people WHERE age > 3 AND name = 'A' GROUP BY city HAVING COUNT(*) > 1 "
        "ORDER BY city DESC LIMIT 2"
    )
    assert literal("O'Neil") == "'O''Neil'"
    assert literal(2.0) == "2"
