import random

import pytest

from shared.sql.database import QueryResult
from stage1_sft.wording import answer, poor_query, search_query


@pytest.mark.parametrize(
    ("question", "query"),
    [
        ("How many claims are there?", "claims"),
        ("Count the claims whose claim date is in 2020 and whose cause is 'big fire'.", "claims date cause"),
        ('List the city of customers where the segment is "private".', "city customers segment"),
        ("What is it?", "What is it?"),
    ],
)
def test_a_search_holds_the_content_words_without_values(question: str, query: str) -> None:
    assert search_query(question) == query


def test_a_poor_search_asks_for_a_value_or_nothing_in_particular() -> None:
    assert poor_query("Find buyers called 'Quinn'.", random.Random(0)) == "Quinn"
    assert poor_query("How many claims are there?", random.Random(0)) in {
        "details",
        "information",
        "database",
        "overview",
    }


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "No rows match."),
        ([(42,)], "The answer is 42."),
        ([("Bern", 3.14159)], "The answer is Bern, 3.14."),
        ([("a",), (None,)], "The answers are a, NULL."),
        ([(i,) for i in range(5)], "There are 5 rows; the first is 0."),
        ([(1, 2), (3, 4)], "There are 2 rows; the first is 1, 2."),
        ([("x" * 50,)], f"The answer is {'x' * 40}...."),
    ],
)
def test_an_answer_is_one_short_sentence(rows: list[tuple[object, ...]], sentence: str) -> None:
    columns = tuple(f"c{i}" for i in range(len(rows[0]) if rows else 1))
    assert answer(QueryResult(columns, tuple(rows), False)) == sentence


def test_an_answer_says_when_more_rows_exist_than_were_read() -> None:
    result = QueryResult(("c",), tuple((i,) for i in range(20)), True)
    assert answer(result) == "There are more than 20 rows; the first is 0."
