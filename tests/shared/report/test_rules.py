"""Finished evaluations judged by the official rules."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.config.schema import Config
from shared.records import Episode, Question, Reward, StopReason, write_jsonl
from shared.report.rules import rules_table
from shared.runs.manifest import RunDirectory
from tests.shared.examples import insurance_file

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
KINDS = "SELECT DISTINCT kind FROM policies"
ALL_KINDS = "SELECT kind FROM policies"


@pytest.fixture
def config() -> Config:
    return load_config(PIPELINE, "cpu", ["evaluate.bootstrap_samples=100"])


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """An evaluation that was judged wrong by the house's rule, and whose queries return the golds' sets of rows."""
    run = RunDirectory(tmp_path / "main")
    database = str(insurance_file(tmp_path))
    questions = [
        Question("q1", "insurance", "How many claims?", "SELECT count(*) FROM claims", database),
        Question("q2", "other", "Which kinds?", KINDS, database),
    ]
    episodes = [
        Episode(name, (), StopReason.ANSWERED, sql, reward=Reward(False, 1.0, 1.0, 1.0, 0.0))
        for name, sql in (("q1", "SELECT 3"), ("q2", ALL_KINDS))
    ]
    run.evaluation("sft").mkdir(parents=True)
    write_jsonl(run.evaluation("sft") / "questions.jsonl", questions)
    write_jsonl(run.evaluation("sft") / "episodes.jsonl", episodes)
    return run


def shares(rows: list[list[str]]) -> dict[str, tuple[str, str]]:
    return {name: (value.split(" ")[0], count) for name, value, count in rows}


def test_every_rule_judges_what_was_submitted(config: Config, run: RunDirectory) -> None:
    table = rules_table(config, run, ["sft"], None)
    assert shares(table.rows) == {
        "sft, house": ("0.0%", "2"),
        "sft, Spider": ("100.0%", "2"),
        "sft, BIRD": ("100.0%", "2"),
        "sft, soft F1": ("100.0%", "2"),
    }
    assert table.notes == ["sft: the rules disagree on 2 questions: q1, q2"]


def test_the_test_suite_judges_where_variants_are_given(config: Config, run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "suite" / "insurance").mkdir(parents=True)
    fewer = insurance_file(tmp_path / "suite", "DELETE FROM claims WHERE claim_id = 1;")
    fewer.rename(tmp_path / "suite" / "insurance" / "fewer.sqlite")
    found = shares(rules_table(config, run, ["sft"], tmp_path / "suite").rows)
    assert found["sft, Spider"] == ("100.0%", "2")
    assert found["sft, Spider, test suite"] == ("0.0%", "1")


def test_a_question_without_submission_is_wrong_by_every_rule(config: Config, run: RunDirectory) -> None:
    file = run.evaluation("sft") / "episodes.jsonl"
    lost = Episode("q1", (), StopReason.TURN_LIMIT, None, reward=Reward(False, 0.0, 0.0, 0.0, 0.0))
    write_jsonl(file, [lost, dataclasses.replace(lost, question_id="q2")])
    table = rules_table(config, run, ["sft"], None)
    assert {share for share, _ in shares(table.rows).values()} == {"0.0%"}
    assert table.notes == ["sft: the rules disagree on 0 questions"]
