"""Each wrong episode has exactly one way of failing, the first that applies."""

from __future__ import annotations

import dataclasses

import pytest

from shared.evaluation.failures import WAYS, way_of_failing
from shared.records import Episode, Question, Reward, StopReason, ToolCall, Turn
from shared.sql.database import Schema
from tests.shared.examples import insurance

GOLD = "SELECT full_name FROM customers WHERE city = 'Bern' ORDER BY full_name LIMIT 2"
LOOK = ToolCall("search_schema", {"query": "customers"})


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Schema:
    return insurance(tmp_path_factory.mktemp("db")).schema


def question(gold: str = GOLD) -> Question:
    return Question("q1", "insurance", "Which 2 customers live in Bern?", gold, "x")


def turn(*calls: tuple[ToolCall, str, bool], content: str = "", malformed: tuple[str, ...] = ()) -> Turn:
    texts, ok = tuple(text for _, text, _ in calls), tuple(ok for _, _, ok in calls)
    return Turn(None, content, tuple(call for call, _, _ in calls), malformed, texts, ok, None, 10, 5, None)


def query(sql: str, text: str = "full_name\nAnn\n(1 row)", ok: bool = True) -> tuple[ToolCall, str, bool]:
    return ToolCall("execute_sql", {"sql": sql}), text, ok


def episode(
    *turns: Turn, stop: StopReason = StopReason.ANSWERED, sql: str | None = None, right: bool = False
) -> Episode:
    return Episode("q1", turns, stop, sql, reward=Reward(right, 1.0, 1.0, 1.0, float(right)))


def answering(sql: str, answer: str = "Ann.", shown: str = "full_name\nAnn\n(1 row)", right: bool = False) -> Episode:
    return episode(turn((LOOK, "customers", True)), turn(query(sql, shown)), turn(content=answer), sql=sql, right=right)


LOOKED = turn((LOOK, "customers", True))
FAILED = turn(query("SELECT 1 FROM x", "Error: no such table: x. Tables: customers.", ok=False))
AGAIN = turn(query("SELECT 1 FROM x", "Error: You made this call before, it fails again in the same way.", ok=False))
LIMIT, FULL = StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT


@pytest.mark.parametrize(
    ("played", "way"),
    [
        (episode(turn(content="I do not know.")), "no call"),
        (episode(turn(content="```sql\nSELECT 1\n```"), sql="SELECT 1"), "no call"),
        (episode(LOOKED, turn(malformed=("no JSON",)), turn(content="?")), "malformed call"),
        (episode(turn(query("SELECT 1")), turn(content="1"), sql="SELECT 1"), "wrong tool order"),
        (episode(LOOKED, turn(content="Ann.")), "wrong tool order"),
        (episode(LOOKED, FAILED, AGAIN, stop=LIMIT), "table not found"),
        (episode(LOOKED, turn(query("SELECT a", "Error: no such column: a.", ok=False)), stop=FULL), "column invented"),
        (episode(LOOKED, turn(query("SELECT (", "Error: syntax", ok=False)), stop=LIMIT), "SQL error never repaired"),
        (episode(LOOKED, FAILED, turn(query(GOLD)), LOOKED, stop=LIMIT, sql=GOLD), "gave up at the turn limit"),
        (episode(LOOKED, LOOKED, stop=LIMIT), "gave up at the turn limit"),
        (episode(LOOKED, LOOKED, stop=FULL), "context full"),
        (episode(turn((ToolCall("get_columns", {"table": "x"}), "Error: no such table: x.", False)), stop=LIMIT),
         "table not found"),
    ],
)  # fmt: skip
def test_the_course_of_an_episode_names_its_way(played: Episode, way: str) -> None:
    assert way_of_failing(played, question()) == way
    assert way in WAYS


@pytest.mark.parametrize(
    ("gold", "submitted", "way"),
    [
        (GOLD, "SELECT kind FROM policies", "wrong tables"),
        (GOLD, "SELECT kind FROM policies JOIN customers USING (customer_id)", "wrong tables"),
        (GOLD, "SELECT full_name FROM customers ORDER BY 1 LIMIT 2", "wrong filter"),
        (GOLD, "SELECT c.full_name FROM customers c WHERE c.city = \"Bern\" ORDER BY full_name LIMIT 3", "wrong order"),
        (GOLD, "SELECT Full_Name FROM Customers WHERE 'Bern' = city ORDER BY full_name DESC LIMIT 2", "wrong order"),
        (GOLD, "SELECT city FROM customers WHERE city = 'Bern' ORDER BY full_name LIMIT 2", "wrong columns"),
        (GOLD, "SELECT DISTINCT full_name FROM customers WHERE city = 'Bern' ORDER BY 1 LIMIT 2", "wrong columns"),
        ("SELECT max(premium) FROM policies", "SELECT min(premium) FROM policies", "wrong aggregate"),
        ("SELECT kind, count(*) FROM policies GROUP BY kind", "SELECT count(*) FROM policies", "wrong grouping"),
        ("SELECT kind FROM policies GROUP BY kind HAVING count(*) > 1", "SELECT kind FROM policies GROUP BY 1",
         "wrong grouping"),
        ("SELECT kind FROM policies", "SELECT kind FROM policies ORDER BY kind", "wrong structure"),
        ("SELECT amount FROM claims c JOIN policies p ON c.policy_id = p.policy_id",
         "SELECT amount FROM claims c JOIN policies p ON c.claim_id = p.policy_id", "wrong join"),
        ("SELECT city FROM customers WHERE customer_id NOT IN (SELECT customer_id FROM policies)",
         "SELECT city FROM customers JOIN policies USING (customer_id)", "wrong join"),
        ("SELECT kind FROM policies WHERE premium > (SELECT avg(premium) FROM policies)",
         "SELECT kind FROM policies WHERE premium > (SELECT avg(premium) FROM policies WHERE kind = 'car')",
         "wrong filter"),
        ("SELECT amount FROM claims JOIN policies USING (policy_id) WHERE kind = 'car' AND premium > 5",
         "SELECT p.kind FROM policies AS p, claims c WHERE p.premium > 5 AND c.policy_id = p.policy_id "
         "AND p.kind = 'car'",
         "wrong columns"),
        (GOLD, "SELECT (", "wrong structure"),
    ],
)  # fmt: skip
def test_a_wrong_query_is_named_by_the_first_part_that_differs(
    gold: str, submitted: str, way: str, schema: Schema
) -> None:
    assert way_of_failing(answering(submitted), question(gold), schema) == way
    assert way in WAYS


def test_a_submission_that_fails_is_named_by_its_error() -> None:
    played = episode(LOOKED, turn(content="```sql\nSELECT age FROM customers\n```"), sql="SELECT age FROM customers")
    assert way_of_failing(played, question(), error="no such column: age") == "column invented"
    assert way_of_failing(played, question(), error="near SELECT: syntax error") == "SQL error never repaired"


def test_a_lucky_result_and_lost_or_right_episodes_are_told_apart() -> None:
    reward = Reward(False, 1.0, 1.0, 1.0, 0.3, lucky=True)
    assert way_of_failing(dataclasses.replace(answering(GOLD), reward=reward), question()) == "lucky"
    assert way_of_failing(dataclasses.replace(answering(GOLD), reward=None), question()) == ""
    assert way_of_failing(answering(GOLD, right=True), question()) == ""


@pytest.mark.parametrize(
    ("shown", "answer", "disagrees"),
    [
        ("full_name\nAnn\n(1 row)", "It is ann.", False),
        ("full_name\nAnn\n(1 row)", "It is Bo.", True),
        ("n\n1234.567\n(1 row)", "There are 1,234.57.", False),
        ("n\n0.256\n(1 row)", "About 25.6 percent of the 2 customers.", False),
        ("n\n7\n(1 row)", "There are 8.", True),
        ("n\n7\n(1 row)", "Seven.", False),
        ("a | b\nAnn | 2024-01-03\nBo | 2024-02-04\n(2 rows)", "1. Ann (3 January 2024)\n2. Bo (2024-02-04)", False),
        ("a | b\nAnn | 2024-01-03\n(1 row)", "Ann (5)", True),
        ("a\nNULL\n(1 row)", "There is none.", False),
        ("a\n(0 rows)", "There are 0.", False),
    ],
)
def test_a_right_query_with_another_answer_is_found(shown: str, answer: str, disagrees: bool) -> None:
    found = way_of_failing(answering(GOLD, answer, shown, right=True), question())
    assert found == ("answer disagrees with its result" if disagrees else "")


def test_every_way_says_what_it_means_and_what_helps() -> None:
    assert all(text.endswith(".") for texts in WAYS.values() for text in texts)
    assert {len(texts) for texts in WAYS.values()} == {2}


def test_queries_can_be_compared_without_a_schema() -> None:
    assert way_of_failing(answering("SELECT city FROM customers"), question("SELECT full_name FROM customers")) == (
        "wrong columns"
    )
