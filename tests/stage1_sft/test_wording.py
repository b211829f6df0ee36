import random
from typing import Any

import pytest

from shared.sql.database import QueryResult
from stage1_sft.wording import LANGUAGES, answer, language_of, poor_query, search_query


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


def say(
    rows: list[tuple[object, ...]], language: str = "English", *, shown: int | None = None, ordered: bool = False,
    longest: int = 60, truncated: bool = False,
) -> str:  # fmt: skip
    """The answer of at most `longest` characters to a result of which the first `shown` rows were read."""
    columns = tuple(f"c{i}" for i in range(len(rows[0]) if rows else 1))
    result = QueryResult(columns, tuple(rows), truncated)
    seen = len(rows) if shown is None else shown
    return answer(result, language, shown=seen, ordered=ordered, fits=lambda text: len(text) <= longest)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "There are none."),
        ([(42,)], "The answer is 42."),
        ([("Bern", 3.14159)], "The answer is Bern (3.14)."),
        ([(3.14159, "Bern")], "The answer is Bern (3.14)."),
        ([(1, 5, 3.0)], "The answer is 1, 5 and 3."),
        ([(None,)], "The answer is unknown."),
        ([(0.00123,)], "The answer is 0.0012."),
        ([(1200.0,)], "The answer is 1200."),
        ([("a",), (None,)], "The answers are a and unknown."),
        ([(i,) for i in range(5)], "The answers are 0, 1, 2, 3 and 4."),
        ([("Speedy Express", 249), ("Acme S.A.", 7)], "The answers are Speedy Express (249) and Acme S.A. (7)."),
        ([("Li, Bo",), ("Diaz, Cleo",)], "The answers are Li, Bo and Diaz, Cleo."),
        ([("Li, Bo",), ("Diaz, Cleo",), ("Ann",)], "The answers are Li, Bo; Diaz, Cleo and Ann."),
        ([(249, "Express"), (7, "Post")], "The answers are Express (249) and Post (7)."),
        ([(2018, 25), (2019, 18)], "The answers are 2018 (25) and 2019 (18)."),
        ([("Acme S.A.",)], "The answer is Acme S.A."),
        ([("x" * 50,)], f"The answer is {'x' * 40}…"),
    ],
)
def test_an_answer_is_one_sentence_that_holds_all_of_a_short_result(
    rows: list[tuple[object, ...]], sentence: str
) -> None:
    assert say(rows) == sentence


@pytest.mark.parametrize(
    ("rows", "how", "sentence"),
    [
        ([(i,) for i in (40, 7, 30)] * 10, {}, "There are 30, from 7 to 40."),
        ([(f"2024-01-{day}",) for day in range(31, 10, -1)], {}, "There are 21, from 2024-01-11 to 2024-01-31."),
        ([(f"n{i}", i) for i in range(40)], {"ordered": True}, "There are 40, from n0 (0) to n39 (39)."),
        ([(f"n{i}",) for i in range(40)], {}, "There are 40; the first are n0, n1 and n2."),
        ([(i,) for i in range(9)], {"shown": 2}, "There are 9; the first are 0 and 1."),
        ([(i,) for i in range(20)], {"truncated": True}, "There are more than 20; the first are 0, 1 and 2."),
    ],
)
def test_of_a_long_result_the_number_and_the_range_are_said_where_they_were_read(
    rows: list[tuple[object, ...]], how: dict[str, Any], sentence: str
) -> None:
    assert say(rows, **how) == sentence


@pytest.mark.parametrize(
    ("question", "language", "sentence"),
    [
        ("How many orders did each shipper carry?", "English", "The answers are a (1) and b (2)."),
        ("Wie viele Kunden gibt es in jeder Stadt?", "German", "Die Antworten sind a (1) und b (2)."),
        ("Combien de clients y a-t-il dans chaque ville ?", "French", "Les réponses sont a (1) et b (2)."),
        ("¿Cuántos clientes hay en cada ciudad?", "Spanish", "Las respuestas son a (1) y b (2)."),
        ("Quanti clienti ci sono in ogni città?", "Italian", "Le risposte sono a (1) e b (2)."),
        ("Quantos clientes há em cada cidade?", "Portuguese", "As respostas são a (1) e b (2)."),
        ("Hoeveel klanten zijn er per stad?", "Dutch", "De antwoorden zijn a (1) en b (2)."),
        ("每个城市有多少客户？", "", "a (1), b (2)."),
        ("Ilu klientów?", "", "a (1), b (2)."),
    ],
)
def test_an_answer_is_in_the_language_of_its_question_or_in_bare_values(
    question: str, language: str, sentence: str
) -> None:
    assert language_of(question) == language
    assert say([("a", 1), ("b", 2)], language) == sentence


@pytest.mark.parametrize("language", [*LANGUAGES, ""])
def test_every_language_words_every_kind_of_answer(language: str) -> None:
    many = [(f"n{i}",) for i in range(40)]
    kinds = [say([], language), say([(None,)], language), say(many[:2], language), say(many, language)]
    kinds += [say(many, language, ordered=True), say(many, language, truncated=True)]
    assert len(set(kinds)) == 6
    assert all("{" not in kind for kind in kinds)
    assert all("40" in kind for kind in kinds[3:])


def test_a_german_search_leaves_out_the_words_of_asking() -> None:
    assert search_query("Welche Kunden haben mehr als drei Bestellungen?") == "kunden als drei bestellungen"
