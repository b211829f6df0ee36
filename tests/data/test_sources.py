"""Several sources of questions in one run: their uses, weights, clashes and what is wrong with them."""

import json
import re
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from data.stage import plan, prepare
from shared.config.load import load_config
from shared.errors import UserError
from shared.records import Question, read_questions
from shared.runs.manifest import RunDirectory
from tests.data.conftest import ROOT, settings


def source(folder: Path, *questions: tuple[str, str], database: str = "shop", rows: int = 9) -> Path:
    """A file of questions and golds beside a database with one table of `rows` items."""
    (folder / "database").mkdir(parents=True)
    with closing(sqlite3.connect(folder / "database" / f"{database}.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, price REAL)")
        connection.executemany("INSERT INTO items VALUES (?, ?)", [(i, i * 1.5) for i in range(rows)])
    lines = [json.dumps({"question": text, "sql": sql, "database": database}) for text, sql in questions]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    return folder / "questions.jsonl"


def above(name: str, count: int) -> list[tuple[str, str]]:
    return [(f"Which {name} cost more than {i}?", f"SELECT {i}, '{name}' FROM items LIMIT 1") for i in range(count)]


def prepared(tmp_path: Path, sources: str, *others: str) -> tuple[dict[str, list[Question]], dict[str, Any]]:
    """The splits that these settings give, and the counts."""
    folder = tmp_path / "data"
    config = settings(f"data.sources={sources}", "data.copies=0", "data.unseen_databases=0", *others)
    counts = prepare(config, folder)
    return {split: list(read_questions(folder / f"{split}.jsonl")) for split in ("train", "val", "test")}, counts


def test_labelled_questions_are_kept_for_the_test_alone(tmp_path: Path) -> None:
    labelled = source(tmp_path / "labelled", *above("pens", 10))
    made = source(tmp_path / "made", *above("cups", 40), ("which PENS cost more than 3", "SELECT 3"))
    splits, counts = prepared(tmp_path, f"[{{path: {labelled}, use: test}}, {{path: {made}, use: train}}]")
    assert {question.question for question in splits["test"]} == {text for text, _ in above("pens", 10)}
    assert len(splits["train"]) + len(splits["val"]) == 40
    assert splits["val"]
    assert counts["decontaminated"] == 1
    assert {question.split_kind for question in splits["test"]} == {"seen_database"}  # equal files are one database
    assert len({question.database for split in splits.values() for question in split}) == 1


def test_a_database_of_test_questions_alone_is_unseen(tmp_path: Path) -> None:
    labelled = source(tmp_path / "labelled", *above("pens", 10), database="office")
    made = source(tmp_path / "made", *above("cups", 40))
    splits, counts = prepared(tmp_path, f"[{{path: {labelled}, use: test}}, {made}]")
    kinds = Counter((question.db_id, question.split_kind) for question in splits["test"])
    assert kinds["office", "unseen_database"] == 10
    assert kinds["shop", "seen_database"] == kinds.total() - 10 > 0
    assert counts["unseen_databases"] == ["office"]


def test_weights_set_the_ratio_of_the_training_questions(tmp_path: Path) -> None:
    few, many = source(tmp_path / "few", *above("pens", 40)), source(tmp_path / "many", *above("cups", 120))
    whole, _ = prepared(tmp_path, f"[{few}, {many}]")
    splits, _ = prepared(tmp_path, f"[{{path: {few}, weight: 2}}, {{path: {many}, weight: 1}}]")
    before, after = (Counter("pens" in q.question for q in each["train"]) for each in (whole, splits))
    assert after[True] == before[True]
    assert after[False] == pytest.approx(after[True] / 2, abs=1)
    assert splits["test"] == whole["test"]


def test_a_source_without_a_weight_is_taken_whole(tmp_path: Path) -> None:
    few, many = source(tmp_path / "few", *above("pens", 40)), source(tmp_path / "many", *above("cups", 120))
    whole, _ = prepared(tmp_path, f"[{few}, {many}]")
    splits, _ = prepared(tmp_path, f"[{few}, {{path: {many}, weight: 1}}]")
    assert {question.id for question in splits["train"]} == {question.id for question in whole["train"]}


def test_a_question_of_two_sources_stays_in_one_split(tmp_path: Path) -> None:
    first, second = (source(tmp_path / name, *above("pens", 60)) for name in ("first", "second"))
    splits, counts = prepared(tmp_path, f"[{first}, {second}]")
    texts = [{question.question for question in split} for split in splits.values()]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 60
    assert sum(counts["questions"].values()) == 120
    assert len({question.id for split in splits.values() for question in split}) == 120


def test_a_question_for_training_alone_takes_its_twins_out_of_the_test(tmp_path: Path) -> None:
    first, second = (source(tmp_path / name, *above("pens", 60)) for name in ("first", "second"))
    splits, counts = prepared(tmp_path, f"[{first}, {{path: {second}, use: train}}]", "data.test_share=0")
    assert (splits["test"], counts["decontaminated"]) == ([], 0)


def test_two_databases_of_one_name_stay_apart(tmp_path: Path) -> None:
    first, second = (
        source(tmp_path / "first", *above("pens", 40)),
        source(tmp_path / "second", *above("cups", 40), rows=5),
    )
    splits, counts = prepared(tmp_path, f"[{first}, {second}]")
    assert set(counts["databases"]) == {"shop", "shop_2"}
    files = {(question.db_id, question.database) for split in splits.values() for question in split}
    assert {Path(file).parts[-3] for _, file in files} == {"first", "second"}
    assert len(files) == 2


def test_unseen_databases_are_named(tmp_path: Path) -> None:
    first = source(tmp_path / "first", *above("pens", 40))
    second = source(tmp_path / "second", *above("cups", 10), database="office")
    sources = f"[{first}, {{path: {second}, use: train}}]"
    splits, counts = prepared(tmp_path, f"[{first}, {second}]", "data.unseen_databases=office")
    assert counts["unseen_databases"] == ["office"]
    assert sum(question.db_id == "office" for question in splits["test"]) == 10
    _, counts = prepared(tmp_path, sources, "data.unseen_databases=[office]")
    assert counts["decontaminated"] == 10
    with pytest.raises(
        UserError, match=r"data\.unseen_databases names zoo, which no source has; choose .*office, shop"
    ):
        prepared(tmp_path, sources, "data.unseen_databases=[zoo]")


def test_the_demo_is_a_source_among_others(tmp_path: Path) -> None:
    mine = source(tmp_path / "mine", *above("pens", 10), database="insurance")  # as one of the demo is called
    sources = f"[demo, {{path: {mine}, use: test}}]"
    splits, counts = prepared(tmp_path, sources, "data.questions_per_database=6")
    assert {"insurance", "insurance_2"} <= set(counts["databases"])
    assert sum(question.db_id == "insurance_2" for question in splits["test"]) == 10
    lines = plan(settings(f"data.sources={sources}"), RunDirectory(tmp_path / "run"))
    assert lines[1:3] == ["  source: demo databases, 110 questions each", f"  source: {mine} (test)"]


def test_training_questions_without_a_test_are_refused(tmp_path: Path) -> None:
    made = source(tmp_path / "made", *above("cups", 40))
    with pytest.raises(UserError, match=r"The test split of 40 questions is empty; .*data\.sources"):
        prepared(tmp_path, f"[{{path: {made}, use: train}}]")


def test_a_source_that_holds_only_what_is_avoided_is_refused(tmp_path: Path) -> None:
    made = source(tmp_path / "made", *above("cups", 40))
    avoided = shutil.copy(made, tmp_path / "avoided.jsonl")  # has no databases beside it
    with pytest.raises(UserError, match=r"train split of 40 questions is empty after \d+ were removed"):
        prepared(tmp_path, f"[{made}, {{path: {avoided}, use: avoid}}]")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda file: file.write_text("{}"), r"questions\.jsonl: questions\.jsonl:1: it has no text under"),
        (lambda file: file.write_bytes(b"\xff\xfe\x00"), r"questions\.jsonl cannot be read .*give a UTF-8 file"),
        (lambda file: file.write_text(""), r"second.*holds no usable question"),
        (lambda file: shutil.rmtree(file.parent / "database"), r"its database 'shop' is not in"),
    ],
)
def test_an_unreadable_source_is_named_in_one_sentence(tmp_path: Path, spoil: Any, says: str) -> None:
    first, second = source(tmp_path / "first", *above("pens", 40)), source(tmp_path / "second", *above("cups", 5))
    spoil(second)
    with pytest.raises(UserError, match=says) as raised:
        prepared(tmp_path, f"[{first}, {{path: {second}, use: test}}]")
    assert "\n" not in str(raised.value)


def test_both_spellings_of_the_documentation_mean_the_same(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your-data.md").read_text()
    block, (line,) = page.split("```yaml\n")[1].split("```")[0], re.findall(r"--set '(data\.sources=.*?)'", page)
    shipped = yaml.safe_load((ROOT / "pipeline.yaml").read_text())
    shipped["data"] |= yaml.safe_load(block)["data"]
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(shipped))
    sources = load_config(tmp_path / "pipeline.yaml", "cpu").data.sources
    assert sources == settings(line).data.sources
    assert [(source.path, source.use) for source in sources] == [("shop_questions", "train"), ("labelled.csv", "test")]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.sources=[]", r"data\.sources is \(\); write demo, a path, or a list like"),
        ("data.sources=[3]", r"data\.sources cannot hold 3; write demo, a path, or a list like"),
        ("data.sources=[{use: test}]", r"data\.sources cannot hold {'use': 'test'}; write"),
        (
            "data.sources=[{path: a, use: dev}]",
            r"data\.sources cannot hold use: 'dev'; write .*use: split, train, test, avoid",
        ),
        ("data.sources=[{path: a, weigth: 2}]", r"data\.sources cannot hold weigth: 2; write"),
        ("data.sources=[{path: a, weight: 0}]", r"data\.sources cannot hold weight: 0; write"),
        ("data.sources=[a, a]", r"data\.sources names a twice; keep one"),
        ("data.unseen_databases=-1", r"data\.unseen_databases cannot hold -1; write a number or a list of names"),
        ("data.spider_dir=x", r"data\.spider_dir: it is now data\.sources=PATH"),
        ("data.avoid=x", r"data\.avoid: it is now a source: .*use: avoid"),
    ],
)
def test_a_wrong_setting_of_sources_is_named(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        settings(override)


def test_a_path_may_look_like_anything() -> None:
    assert settings("data.sources=7").data.sources[0].path == "7"
    assert settings("data.sources=a: b").data.sources[0].path == "a: b"
