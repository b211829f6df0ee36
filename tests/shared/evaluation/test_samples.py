"""Several samples per question, and two evaluations compared."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import compare_pairs, majority, pass_at_k
from shared.evaluation.run import Endpoint, play_samples, sample_figures
from shared.records import Episode, Question, Reward, StopReason, write_jsonl
from tests.scripted_server import answer, scripted_server
from tests.shared.examples import insurance_file, tokenizer_folder

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
COUNT = "SELECT count(*) FROM claims"
KINDS = "SELECT DISTINCT kind FROM policies"
SAMPLED = ("evaluate.samples=3", "evaluate.temperature=0.7", "evaluate.bootstrap_samples=100")


def config(*overrides: str) -> Config:
    return load_config(PIPELINE, "cpu", overrides or SAMPLED)


@pytest.fixture
def questions(tmp_path: Path) -> list[Question]:
    database = str(insurance_file(tmp_path))
    return [
        Question("q1", "insurance", "How many claims?", COUNT, database, difficulty="easy", form="group-by"),
        Question("q2", "insurance", "Which kinds?", KINDS, database, difficulty="medium"),
    ]


def evaluation(folder: Path, *submitted: tuple[str, str | None, bool]) -> Path:
    folder.mkdir(parents=True)
    episodes = [
        Episode(question, (), StopReason.ANSWERED, sql, reward=Reward(correct, 1.0, 1.0, 1.0, float(correct)))
        for question, sql, correct in submitted
    ]
    write_jsonl(folder / "episodes.jsonl", episodes)
    return folder


def test_pass_at_k_is_the_share_of_draws_with_a_right_sample() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(5, 0, 3) == 0.0
    draw, samples = random.Random(0), [True, True, False, False, False, False]
    share = sum(any(draw.sample(samples, 3)) for _ in range(20_000)) / 20_000
    assert pass_at_k(6, 2, 3) == pytest.approx(share, abs=0.02)
    for bad in ((2, 1, 3), (2, 3, 1), (2, 1, 0)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(*bad)


@pytest.mark.parametrize(
    ("results", "place"), [(["a", "b", "b"], 1), (["a", "b"], 0), ([None, "b", None], 1), ([None], None), ([], None)]
)
def test_the_vote_takes_the_commonest_result(results: list[str | None], place: int | None) -> None:
    assert majority(results) == place


def test_votes_are_about_results_and_not_about_texts(questions: list[Question], tmp_path: Path) -> None:
    folders = [
        evaluation(tmp_path / "1", ("q1", "SELECT 9", False), ("q2", KINDS, True)),
        evaluation(tmp_path / "2", ("q1", COUNT, True), ("q2", "SELECT gone", False)),
        evaluation(tmp_path / "3", ("q1", "SELECT sum(1) FROM claims", True), ("q2", None, False)),
        evaluation(tmp_path / "4", ("q1", COUNT, True), ("q2", "SELECT 1", False)),
    ]
    figures = sample_figures(questions, folders, config())
    assert figures.pop("mean@k") == {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 2}
    assert figures == {"questions": 2, "samples": 4, "pass@1": 0.5, "pass@2": 0.75, "pass@4": 1.0, "majority vote": 1.0}


def test_samples_are_played_into_folders_of_their_own(
    questions: list[Question], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def model(request: Any) -> Any:
        asked.append(request)
        return answer(f"```sql\n{COUNT if 2 < len(asked) <= 4 else 'SELECT 9'}\n```")  # the second sample is right

    with scripted_server(model) as url:
        summary = play_samples(questions, Endpoint(url, tokenizer_folder(tmp_path)), config(), tmp_path / "mine")
    assert len(asked) == 6
    assert sorted(file.parent.name for file in tmp_path.rglob("episodes.jsonl")) == ["mine", "sample_2", "sample_3"]
    assert summary.accuracy
    assert summary.accuracy.mean == 0.0
    figures = json.loads((tmp_path / "mine" / "samples.json").read_text())
    assert (figures["pass@1"], figures["majority vote"]) == (pytest.approx(1 / 6), 0.0)
    assert "pass@2" in capsys.readouterr().out


def test_greedy_samples_are_refused(questions: list[Question], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set evaluate\.temperature above 0"):
        play_samples(questions, Endpoint("http://127.0.0.1:9/v1", tmp_path), config("evaluate.samples=2"), tmp_path)


def test_pairs_count_who_won_where() -> None:
    found = compare_pairs({"a": True, "b": True, "c": False, "x": True}, {"c": True, "b": False, "a": True, "y": True})
    assert (found.both, found.only_first, found.only_second, found.neither) == (1, 1, 1, 0)
    assert (found.difference.mean, found.difference.n) == (0.0, 3)
    assert found.difference.low <= 0 <= found.difference.high


@pytest.mark.parametrize(
    ("won", "lost", "p"), [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (8, 2, 0.109375)]
)
def test_the_sign_test_is_exact(won: int, lost: int, p: float) -> None:
    first = {str(place): place >= won for place in range(won + lost + 3)}
    second = {name: not right if place < won + lost else right for place, (name, right) in enumerate(first.items())}
    found = compare_pairs(first, second, samples=10)
    assert (found.only_second, found.only_first, found.p_value) == (won, lost, pytest.approx(p))
