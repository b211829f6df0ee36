"""What episodes are worth."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.config.schema import GrpoConfig
from shared.errors import UserError
from shared.records import Episode, Question, Reward, StopReason, ToolCall, Turn
from shared.reward.perturbed_copies import make_copies
from shared.reward.reward import EMPTY_GOLD_REWARD, gold_result, judge, self_test
from shared.sql.database import Database
from tests.beside import REAL_DATA, needs_real_data
from tests.shared.examples import LIMITS, insurance, insurance_file

GRPO: GrpoConfig = load_config(Path(__file__).resolve().parents[3] / "pipeline.yaml", "cpu").grpo
COUNT = "SELECT count(*) FROM claims"
JOIN = "SELECT c.amount FROM claims c JOIN policies p ON p.policy_id = c.policy_id WHERE p.kind = 'car'"
EMPTY = "SELECT c.note FROM claims c JOIN policies p USING (policy_id) WHERE p.kind = 'boat'"


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return insurance(tmp_path)


def question(gold: str, database: Path | str = "") -> Question:
    return Question("q1", "insurance", "How many?", gold, str(database))


def turn(*calls: ToolCall, ok: bool = True, malformed: int = 0) -> Turn:
    faults = ("The arguments are not JSON.",) * malformed
    observations = ("...",) * (len(calls) + malformed)
    results = (ok,) * len(calls) + (False,) * malformed
    return Turn("", "", calls, faults, observations, results, len(calls), 100, 20, None)


def episode(sql: str | None, *turns: Turn, stop: StopReason = StopReason.ANSWERED) -> Episode:
    return Episode("q1", turns, stop, sql)


def query(sql: str) -> ToolCall:
    return ToolCall("execute_sql", {"sql": sql})


def reward(gold: str, submitted: str | None, database: Database, *turns: Turn) -> Reward:
    return judge(question(gold), episode(submitted, *turns), database, GRPO)


@pytest.mark.parametrize(
    ("gold", "submitted"),
    [
        (COUNT, COUNT),
        (COUNT, "SELECT sum(1) FROM claims"),
        (COUNT, "SELECT (SELECT count(claim_id) FROM claims)"),
        (JOIN, "SELECT amount FROM claims WHERE policy_id IN (SELECT policy_id FROM policies WHERE kind = 'car')"),
        (
            JOIN,
            "WITH cars AS (SELECT * FROM policies WHERE kind = 'car') "
            "SELECT amount FROM cars JOIN claims USING (policy_id)",
        ),
        (
            "SELECT kind FROM policies UNION SELECT city FROM customers",
            "SELECT city FROM customers UNION SELECT kind FROM policies",
        ),
        ("SELECT 1 + 1", "SELECT 2"),
    ],
)
def test_the_right_answer_is_worth_exactly_one(gold: str, submitted: str, database: Database) -> None:
    verdict = reward(gold, submitted, database, turn(malformed=1))
    assert verdict.correct
    assert verdict.total == 1.0


@pytest.mark.parametrize(
    "submitted",
    [
        "SELECT 3",
        "VALUES (3)",
        "SELECT 3 FROM claims LIMIT 1",
        "SELECT 3 WHERE EXISTS (SELECT 1 FROM claims)",
        "SELECT 3 FROM claims UNION SELECT 3 FROM claims",
        "WITH claims AS (SELECT 3 AS n) SELECT n FROM claims",
        "SELECT count(*) FROM (SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3)",
        "SELECT 3; SELECT count(*) FROM claims",
    ],
)
def test_a_constant_is_never_correct(submitted: str, database: Database) -> None:
    verdict = reward(COUNT, submitted, database)
    assert not verdict.correct
    assert verdict.total <= GRPO.reward_right_tables


def test_an_empty_gold_needs_its_tables_and_counts_half(database: Database) -> None:
    assert reward(EMPTY, EMPTY, database) == Reward(True, 0.0, 0.0, 1.0, 0.5)
    lazy = reward(EMPTY, "SELECT note FROM claims WHERE claim_id = 99", database)
    assert not lazy.correct
    assert lazy.total < 0.5


def test_dense_terms_add_up_below_half_a_right_answer(database: Database) -> None:
    wrong = "SELECT claim_id FROM claims"
    verdict = reward(COUNT, wrong, database, turn(query(wrong)))
    dense = GRPO.reward_valid_call + GRPO.reward_executed + GRPO.reward_right_tables
    assert verdict == Reward(False, 1.0, 1.0, 1.0, pytest.approx(dense))
    assert dense < 0.5


def test_each_dense_term_is_paid_for_its_own_merit(database: Database) -> None:
    failed = turn(query("SELECT"), ok=False, malformed=3)
    assert reward(COUNT, None, database) == Reward(False, 0.0, 0.0, 0.0, 0.0)
    assert reward(COUNT, None, database, turn(malformed=2)).total == 0.0
    assert reward(COUNT, None, database, failed) == Reward(False, 0.25, 0.0, 0.0, 0.25 * GRPO.reward_valid_call)
    searched = turn(ToolCall("search_schema", {"query": "x"}))
    assert reward(COUNT, None, database, searched).total == GRPO.reward_valid_call
    ran = turn(query("SELECT 1"))
    assert reward(COUNT, None, database, ran).total == GRPO.reward_valid_call + GRPO.reward_executed


def test_right_tables_is_an_overlap(database: Database) -> None:
    assert reward(JOIN, "SELECT claim_id FROM claims", database).right_tables == pytest.approx(2 / 3)
    assert reward(JOIN, "SELECT 1 FROM customers", database).right_tables == 0.0
    assert reward(JOIN, "SELECT nothing FROM claims, policies", database).right_tables == 0.0  # it does not run


def test_the_order_of_rows_counts_only_where_the_gold_orders(database: Database) -> None:
    down = "SELECT claim_id FROM claims ORDER BY amount DESC"
    assert not reward("SELECT claim_id FROM claims ORDER BY amount", down, database).correct
    assert reward("SELECT claim_id FROM claims", down, database).correct


def test_a_turn_limit_is_judged_by_what_was_submitted(database: Database) -> None:
    late = episode(COUNT, turn(query(COUNT)), stop=StopReason.TURN_LIMIT)
    assert judge(question(COUNT), late, database, GRPO).total == 1.0


def test_an_infrastructure_ending_has_no_reward(database: Database) -> None:
    with pytest.raises(ValueError, match="infrastructure"):
        judge(question(COUNT), episode(COUNT, stop=StopReason.INFRASTRUCTURE), database, GRPO)


@pytest.mark.parametrize(
    "gold", ["SELECT gone FROM claims", "DELETE FROM claims", "SELECT 1 FROM claims a, claims b, claims c"]
)
def test_a_gold_that_cannot_be_used_is_the_users_problem(gold: str, tmp_path: Path) -> None:
    database = insurance(tmp_path, limits=LIMITS.model_copy(update={"max_compare_rows": 10}))
    with pytest.raises(UserError, match="Gold SQL"):
        reward(gold, COUNT, database)


def test_a_slow_gold_names_the_time_limit(database: Database) -> None:
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    with pytest.raises(UserError, match=r"takes longer than 0\.5 s; raise sandbox\.timeout_seconds or remove"):
        reward(endless, COUNT, database)


def test_gold_results_are_run_once_until_the_file_changes(tmp_path: Path) -> None:
    database = insurance(tmp_path)
    first = gold_result(database, 1, COUNT)
    assert gold_result(database, 1, COUNT) is first
    database.path.unlink()
    insurance_file(tmp_path, "DELETE FROM claims WHERE claim_id = 1;")
    assert gold_result(database, 2, COUNT).rows == ((2,),)
    assert judge(question(COUNT), episode("SELECT count(*) - 1 + 1 FROM claims"), database, GRPO).correct


def test_the_self_test_passes_on_usable_golds(tmp_path: Path) -> None:
    path = insurance_file(tmp_path)
    golds = (
        COUNT,
        JOIN,
        EMPTY,
        "SELECT 1",
        "SELECT note, amount FROM claims ORDER BY 2",
        "SELECT city FROM customers WHERE city IS NULL",
    )
    self_test([question(gold, path) for gold in golds], GRPO, LIMITS)


def test_the_self_test_names_a_gold_that_depends_on_chance(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Question q1 gives its own gold SQL the reward"):
        self_test([question("SELECT random() FROM claims", insurance_file(tmp_path))], GRPO, LIMITS)


def test_a_lucky_answer_is_a_wrong_answer_with_a_name(tmp_path: Path) -> None:
    database = insurance(tmp_path)
    make_copies(database.path, [COUNT], tmp_path / "copies", 3, seed=0)
    audited = dataclasses.replace(question(COUNT, database.path), copies=str(tmp_path / "copies"))
    lucky = judge(audited, episode("SELECT count(note) + 1 FROM claims"), database, GRPO)
    assert (lucky.correct, lucky.lucky, lucky.total) == (False, True, GRPO.reward_right_tables)
    honest = judge(audited, episode("SELECT sum(1) FROM claims"), database, GRPO)
    assert (honest.correct, honest.lucky, honest.total) == (True, False, 1.0)


CHEATS = {
    "constant": "SELECT 3",
    "constant of a table": "SELECT 3 FROM claims LIMIT 1",
    "constant in a condition": "SELECT 3 WHERE EXISTS (SELECT 1 FROM claims)",
    "constant behind an aggregate": "SELECT max(3) FROM claims",
    "constant by case": "SELECT CASE WHEN count(*) > 0 THEN 3 END FROM claims",
    "constant sum": "SELECT 3 + 0 * count(*) FROM claims",
    "literals in the gold's shape": "SELECT column1 FROM (VALUES (3))",
    "renamed literal": "WITH claims AS (SELECT 3 AS n) SELECT n FROM claims",
    "another count": "SELECT count(*) FROM policies",
    "count of a filter that happens to fit": "SELECT count(*) FROM claims WHERE amount > 50",
    "empty result": "SELECT claim_id FROM claims WHERE 0",
    "null": "SELECT NULL",
    "query stuffing": "SELECT count(*) FROM claims; SELECT count(*) FROM policies",
    "all counts at once": "SELECT count(*) FROM claims UNION ALL SELECT count(*) FROM policies",
    "everything": "SELECT * FROM claims, policies, customers",
    "deleting": "DELETE FROM claims",
    "nothing": "",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_earns_no_more_than_an_honest_mistake(cheat: str, tmp_path: Path) -> None:
    database = insurance(tmp_path)
    make_copies(database.path, [COUNT], tmp_path / "copies", 3, seed=0)
    audited = dataclasses.replace(question(COUNT, database.path), copies=str(tmp_path / "copies"))
    mistake = "SELECT count(note) FROM claims"
    honest = judge(audited, episode(mistake, turn(query(mistake))), database, GRPO)
    stuffed = [turn(query(sql)) for sql in CHEATS.values() if sql]
    cheated = judge(audited, episode(CHEATS[cheat], *stuffed), database, GRPO)
    assert not cheated.correct
    assert cheated.total <= honest.total < EMPTY_GOLD_REWARD


@needs_real_data
def test_every_gold_of_the_spider_sample_passes_the_self_test() -> None:
    rows = json.loads((REAL_DATA / "spider_sample/dev.json").read_text("utf-8"))[::5]
    folder = REAL_DATA / "spider_sample/database"
    questions = [
        Question(
            str(i), row["db_id"], row["question"], row["query"], str(folder / row["db_id"] / f"{row['db_id']}.sqlite")
        )
        for i, row in enumerate(rows)
    ]
    limits = LIMITS.model_copy(update={"timeout_seconds": 10, "max_compare_rows": 20000, "max_result_bytes": 4_000_000})
    self_test(questions, GRPO, limits)


FINER = GRPO.model_copy(update={"reward_right_result": 0.2})
AMOUNTS = "SELECT claim_id, amount FROM claims WHERE amount > 500"


def right_result(gold: str, submitted: str, database: Database) -> float:
    verdict = judge(question(gold), episode(submitted), database, FINER)
    assert verdict.total < 0.5 or verdict.correct
    return verdict.right_result


def test_the_finer_reward_ranks_wrong_results_by_columns_rows_and_cells(database: Database) -> None:
    everything = right_result(AMOUNTS, "SELECT * FROM claims", database)
    no_filter = right_result(AMOUNTS, "SELECT claim_id, amount FROM claims", database)
    other_column = right_result(AMOUNTS, "SELECT claim_id, note FROM claims WHERE amount > 500", database)
    nothing_shared = right_result(AMOUNTS, "SELECT full_name FROM customers", database)
    assert nothing_shared == 0.0 < everything < min(no_filter, other_column)
    assert max(no_filter, other_column) < 1.0
    ordered = "SELECT claim_id FROM claims ORDER BY amount DESC"
    assert right_result(ordered, "SELECT claim_id FROM claims", database) == 1.0  # only the order is missing


@pytest.mark.parametrize(
    "submitted", ["SELECT 3", "SELECT 3 FROM claims LIMIT 1", "SELECT claim_id FROM claims WHERE 0"]
)
def test_a_constant_and_an_empty_result_have_no_overlap(submitted: str, database: Database) -> None:
    assert right_result(COUNT, submitted, database) == 0.0


def test_the_finer_reward_lies_below_a_right_answer_and_is_off_by_default(database: Database) -> None:
    assert judge(question(AMOUNTS), episode(AMOUNTS), database, FINER).total == 1.0
    assert GRPO.reward_right_result == 0.0
    wrong = "SELECT claim_id, amount FROM claims"
    without, finer = (judge(question(AMOUNTS), episode(wrong), database, grpo) for grpo in (GRPO, FINER))
    assert finer.total == pytest.approx(without.total + 0.2 * finer.right_result)
    with pytest.raises(UserError, match="must stay below half"):
        load_config(Path(__file__).resolve().parents[3] / "pipeline.yaml", "cpu", ["grpo.reward_right_result=0.3"])
