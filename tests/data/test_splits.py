"""Splits: held-out databases, no leak, balanced prefixes."""

import dataclasses
import random
from collections import Counter

import pytest

from data.splits import LeakageError, choose_unseen, leakage_check, make_splits, paraphrase_groups
from data.synthesis.generate import SHARES
from shared.config.schema import DataConfig
from shared.errors import UserError
from shared.records import Question
from tests.data.conftest import Prepared, settings


def question(identity: str, text: str = "", sql: str = "", db_id: str = "a", kind: str = "") -> Question:
    return Question(identity, db_id, text or f"question {identity}?", sql or f"SELECT {identity!r}", f"{db_id}.sqlite",
                    "easy", "", kind)  # fmt: skip


def many(databases: str, per_database: int) -> list[Question]:
    return [question(f"{db}{i}", db_id=db) for db in databases for i in range(per_database)]


def data_settings(**changes: object) -> DataConfig:
    return settings().data.model_copy(update=changes)  # type: ignore[arg-type]


def test_unseen_databases_are_only_in_the_test_split(demo: Prepared) -> None:
    seen = {q.db_id for split in ("train", "val") for q in demo.splits[split]}
    unseen = {q.db_id for q in demo.splits["test"] if q.split_kind == "unseen_database"}
    assert len(unseen) == settings().data.unseen_databases
    assert not seen & unseen
    assert {q.db_id for q in demo.splits["test"] if q.split_kind == "seen_database"} == seen
    assert {q.split_kind for split in ("train", "val") for q in demo.splits[split]} == {""}


def test_shares_within_seen_databases_are_as_configured(demo: Prepared) -> None:
    seen_tests = sum(q.split_kind == "seen_database" for q in demo.splits["test"])
    total = seen_tests + len(demo.splits["train"]) + len(demo.splits["val"])
    assert seen_tests / total == pytest.approx(settings().data.test_share, abs=0.02)
    assert len(demo.splits["val"]) / total == pytest.approx(settings().data.val_share, abs=0.02)


def test_difficulties_are_alike_in_every_split(demo: Prepared) -> None:
    for questions in demo.splits.values():
        easy = sum(q.difficulty == "easy" for q in questions) / len(questions)
        assert easy == pytest.approx(SHARES["easy"], abs=0.06)


@pytest.mark.parametrize("length", [16, 40, 96, 200])
def test_any_prefix_of_the_test_split_is_balanced(demo: Prepared, length: int) -> None:
    prefix = demo.splits["test"][:length]
    kinds = Counter(q.split_kind for q in prefix)
    assert kinds["seen_database"] == kinds["unseen_database"]
    assert sum(q.difficulty == "easy" for q in prefix) / length == pytest.approx(SHARES["easy"], abs=0.15)
    assert len({q.db_id for q in prefix if q.split_kind == "unseen_database"}) == settings().data.unseen_databases


def test_the_demo_has_no_leak(demo: Prepared) -> None:
    leakage_check(demo.splits["train"], demo.splits["val"], demo.splits["test"])


def test_a_planted_question_is_found(demo: Prepared) -> None:
    stolen = dataclasses.replace(demo.splits["test"][0], id="planted", gold_sql="SELECT 1", db_id="x")
    stolen = dataclasses.replace(stolen, question=stolen.question.upper().rstrip(".?") + " !")
    with pytest.raises(LeakageError, match=rf"planted \(train\) and {demo.splits['test'][0].id} \(test\).*question"):
        leakage_check([*demo.splits["train"], stolen], demo.splits["val"], demo.splits["test"])


def test_a_planted_gold_is_found(demo: Prepared) -> None:
    victim = demo.splits["train"][3]
    stolen = dataclasses.replace(
        victim, id="planted", question="Something else?", gold_sql=victim.gold_sql.lower() + " ;"
    )
    if "'" in victim.gold_sql:  # literals keep their case
        stolen = dataclasses.replace(stolen, gold_sql=victim.gold_sql.replace("SELECT", "select  "))
    with pytest.raises(LeakageError, match=rf"{victim.id} \(train\) and planted \(val\) share the same gold"):
        leakage_check(demo.splits["train"], [*demo.splits["val"], stolen], demo.splits["test"])


def test_training_on_an_unseen_database_is_found() -> None:
    test = [question("t", db_id="b", kind="unseen_database")]
    with pytest.raises(LeakageError, match=r"x trains on b, unseen by t"):
        leakage_check([question("x", db_id="b")], [], test)


def test_paraphrases_form_one_group_through_text_and_gold() -> None:
    rows = [
        question("1", "How many?", "SELECT 1"),
        question("2", "Count them.", "select 1"),
        question("3", "count THEM", "SELECT 2"),
        question("4", "Other", "SELECT 4"),
    ]
    assert [[q.id for q in group] for group in paraphrase_groups(rows)] == [["1", "2", "3"], ["4"]]


def test_paraphrases_stay_on_one_side_and_follow_an_unseen_database() -> None:
    rows = many("abcd", 40)
    rows += [question(f"{db}same", f"How many in {db}?", "SELECT COUNT(*) FROM t", db) for db in "abcd"]
    splits = make_splits(rows, data_settings(unseen_databases=1), 0, {db: i for i, db in enumerate("abcd")})
    leakage_check(splits.train, splits.val, splits.test)
    assert {q.id for q in splits.test} >= {"asame", "bsame", "csame", "dsame"}
    assert len(splits.train + splits.val + splits.test) == len(rows)


def test_splits_depend_on_nothing_but_questions_settings_and_seed() -> None:
    rows, sizes = many("abcd", 30), dict.fromkeys("abcd", 1)
    first, again, other = (make_splits(rows, data_settings(), seed, sizes) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_unseen_databases_are_small_and_large_ones() -> None:
    sizes = {f"db{i:02}": i for i in range(12)}
    chosen = sorted(sizes[name] // 4 for name in choose_unseen(sizes, dict.fromkeys(sizes, 9), 3, random.Random(0)))
    assert chosen == [0, 1, 2]


@pytest.mark.parametrize(("databases", "held_out"), [("a", 0), ("ab", 0), ("abc", 1), ("abcdef", 2)])
def test_a_few_databases_leave_some_to_train_on(databases: str, held_out: int) -> None:
    splits = make_splits(many(databases, 40), data_settings(unseen_databases=3), 0, dict.fromkeys(databases, 1))
    assert len({q.db_id for q in splits.test if q.split_kind == "unseen_database"}) == held_out
    assert len({q.db_id for q in splits.train}) == len(databases) - held_out


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(UserError, match=r"split of 2 questions is empty; add questions .*data.unseen_databases"):
        make_splits(many("ab", 1), data_settings(unseen_databases=1), 0, dict.fromkeys("ab", 1))


def test_no_database_has_to_be_held_out() -> None:
    splits = make_splits(many("ab", 50), data_settings(unseen_databases=0), 0, dict.fromkeys("ab", 1))
    assert {q.split_kind for q in splits.test} == {"seen_database"}
