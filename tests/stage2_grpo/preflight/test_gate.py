"""The readiness gate: what a probe says of a model, when the stage stops, and which questions are left out."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.errors import UserError
from shared.evaluation.run import evaluation_fingerprint
from shared.records import Question, write_jsonl
from shared.runs.manifest import RunDirectory, begin_stage, write_json
from stage2_grpo.preflight.gate import (
    Readiness,
    compare,
    plan,
    probe_settings,
    readiness_of,
    shortfall,
    training_questions,
    without_flat,
)

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
CONFIG = load_config(PIPELINE, "gpu")
READY = Readiness(
    questions=128, samples=8, pass_at_1=0.5, pass_at_k=0.7, mixed_share=0.4, tool_call_rate=1.0, mean_turns=4.5
)


def finished_probe(
    run: RunDirectory, model: Path, asked: Sequence[Question], readiness: Readiness = READY, **solved: Sequence[bool]
) -> Path:
    """Give the run a finished probe of a model; returns its folder."""
    mark = evaluation_fingerprint(asked, probe_settings(CONFIG), model=model)
    folder = run.path / "gate" / mark[:12]
    begin_stage(folder, mark)
    write_json(folder / "gate.json", {"fingerprint": mark, "readiness": asdict(readiness), "solved": solved})
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder without weights, which cannot be served."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def questions(*names: str) -> list[Question]:
    return [Question(name, "db", "?", "SELECT 1", "db.sqlite") for name in names]


def test_the_figures_of_a_probe() -> None:
    solved = {"mixed": [True, False], "always": [True, True], "never": [False, False], "rarely": [False, True]}
    readiness = readiness_of(solved, tool_call_rate=0.9, mean_turns=4.0)
    assert readiness == Readiness(
        questions=4, samples=2, pass_at_1=0.5, pass_at_k=0.75, mixed_share=0.5, tool_call_rate=0.9, mean_turns=4.0
    )
    assert str(readiness) == (
        "pass@1 50.0%  pass@2 75.0%  mixed groups 50.0%  tool calls 90.0%  turns 4.0  questions 4"
    )


def test_a_probe_of_nothing_is_not_ready() -> None:
    assert shortfall(readiness_of({}, 0.0, 0.0), CONFIG.gate)


def test_a_ready_model_passes() -> None:
    assert shortfall(READY, CONFIG.gate) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_call_rate": 0.5, "pass_at_k": 0.0}, "50.0% of its episodes call a tool.*sft.epochs"),
        ({"mean_turns": 1.2}, "have 1.2 turns .*sft.epochs"),
        ({"pass_at_k": 0.1, "mixed_share": 0.1}, "8 episodes solve only 10.0% of the questions.*easier questions"),
        ({"mixed_share": 0.1, "pass_at_1": 0.9}, "10.0% of the questions have right and wrong.*harder questions"),
        ({"mixed_share": 0.1, "pass_at_1": 0.3}, "easier questions, raise grpo.temperature"),
    ],
)
def test_a_model_that_would_learn_nothing_is_refused_with_what_to_do(changes: dict[str, float], says: str) -> None:
    sentence = shortfall(replace(READY, **changes), CONFIG.gate)  # type: ignore[arg-type]
    assert sentence
    assert re.search(says, sentence)
    assert sentence.count(". ") == 0


def test_flat_questions_fill_at_most_their_share() -> None:
    flat = {f"flat{i}": [True, True] if i % 2 else [False, False] for i in range(6)}
    solved = {**flat, "mixed": [True, False]}
    asked = questions("flat0", "mixed", "flat1", "flat2", "unprobed1", "flat3", "unprobed2", "flat4", "flat5")
    kept = without_flat(asked, solved, share=0.25)
    assert [question.id for question in kept] == ["flat0", "mixed", "unprobed1", "unprobed2"]
    assert [question.id for question in without_flat(asked, solved, share=0.0)] == ["mixed", "unprobed1", "unprobed2"]
    assert without_flat(asked, solved, share=0.9) == asked


def test_a_finished_probe_is_read_again_and_shapes_the_training_rows(
    run: RunDirectory, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = questions("never", "mixed")
    finished_probe(run, model, asked, never=[False, False], mixed=[True, False])
    strict = load_config(PIPELINE, "gpu", ["gate.min_pass=0.6", "grpo.concurrency=8"])
    assert training_questions(strict, run, model, asked) == asked[1:]
    assert "1 of 2 training questions left out (gate.flat_share)" in capsys.readouterr().out


def test_a_finished_probe_of_a_model_that_is_not_ready_stops_again(run: RunDirectory, model: Path) -> None:
    finished_probe(run, model, questions("q"), replace(READY, tool_call_rate=0.1))
    with pytest.raises(UserError, match="not ready for GRPO"):
        training_questions(CONFIG, run, model, questions("q"))


@pytest.mark.parametrize(
    "change", ["gate.samples=4", "gate.questions=1", "grpo.temperature=0.5", "agent.max_turns=3", "sandbox.max_rows=9"]
)
def test_a_probe_of_something_else_is_played_again(run: RunDirectory, model: Path, change: str) -> None:
    asked = questions("a", "b")
    finished_probe(run, model, asked, a=[True, False], b=[True, False])
    with pytest.raises(UserError, match=r"no complete weights"):
        training_questions(load_config(PIPELINE, "gpu", [change]), run, model, asked)


def test_a_probe_of_another_model_is_played_again(run: RunDirectory, model: Path) -> None:
    finished_probe(run, model, questions("a"), a=[True, False])
    (model / "config.json").write_text("other")
    with pytest.raises(UserError, match=r"no complete weights"):
        training_questions(CONFIG, run, model, questions("a"))


def test_without_the_gate_every_question_is_trained(run: RunDirectory, model: Path) -> None:
    asked = questions("a", "b")
    assert training_questions(load_config(PIPELINE, "cpu"), run, model, asked) == asked


def compared(run: RunDirectory, *changes: dict[str, float]) -> Path:
    """The result of comparing checkpoints whose finished probes differ from a ready one in these figures."""
    asked, models = questions("q"), []
    run.data.mkdir(parents=True)
    write_jsonl(run.data / "train.jsonl", asked)
    for place, change in enumerate(changes):
        model = run.path / str(place)
        model.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (model / name).write_text(json.dumps(place))
        finished_probe(run, model, asked, replace(READY, **change), q=[True, False])  # type: ignore[arg-type]
        models.append(model)
    return compare(CONFIG, run, models)


def test_the_best_checkpoint_is_a_ready_one_that_solves_most_questions_then_mixes_most(run: RunDirectory) -> None:
    not_ready = {"pass_at_k": 0.9, "tool_call_rate": 0.5}
    often_right = {"pass_at_1": 0.9, "pass_at_k": 0.7, "mixed_share": 0.3}
    mixes_more = {"pass_at_1": 0.3, "pass_at_k": 0.7, "mixed_share": 0.6}
    solves_less = {"pass_at_k": 0.6, "mixed_share": 0.6}
    assert compared(run, not_ready, often_right, mixes_more, solves_less) == run.path / "2"


def test_compared_checkpoints_get_their_verdicts(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(run, {"tool_call_rate": 0.2}, {}) == run.path / "1"
    printed = capsys.readouterr().out
    assert "only 20.0% of its episodes call a tool" in printed
    assert "\n    ready\n" in printed


def test_a_comparison_of_nothing_is_refused_in_its_dry_run_too(run: RunDirectory, model: Path) -> None:
    off = CONFIG.model_copy(update={"gate": CONFIG.gate.model_copy(update={"questions": 0})})
    for work in (plan, compare):
        with pytest.raises(UserError, match=r"--model nowhere has no config\.json"):
            work(off, run, [Path("nowhere")])
        (model / "model.safetensors").touch()
        (model / "tokenizer.json").touch()
        with pytest.raises(UserError, match="The gate is off"):
            work(off, run, [model])


def test_a_comparison_without_a_ready_checkpoint_fails(run: RunDirectory) -> None:
    with pytest.raises(UserError, match="None of the 2 checkpoints is ready for GRPO"):
        compared(run, {"tool_call_rate": 0.2}, {"tool_call_rate": 0.3})
