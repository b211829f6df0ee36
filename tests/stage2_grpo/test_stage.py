"""Stage 2 before any process starts: where the model comes from, how many steps there are, what a failure says."""

import dataclasses
import re
from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.run import evaluation_fingerprint
from shared.records import Question, write_jsonl
from shared.runs.manifest import RunDirectory, begin_stage, finish_stage, finished, question_file, write_json
from stage2_grpo import inputs, stage
from stage2_grpo.checkpoints import resume
from stage2_grpo.checkpoints.files import saved_steps
from stage2_grpo.monitoring.tripwires import Trip
from stage2_grpo.preflight.gate import probe_settings, readiness_of
from tests.stage2_grpo.checkpoints.checkpoint_folder import healthy_case, save_steps

PIPELINE = Path(__file__).resolve().parents[2] / "pipeline.yaml"


@pytest.fixture
def config() -> Config:
    return load_config(PIPELINE, "cpu")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.delenv("SFT_MODEL_PATH", raising=False)
    return RunDirectory(tmp_path / "runs" / "this")


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (path / name).write_text("{}")
    return path


def finished_stage1(run: RunDirectory) -> Path:
    merged = model_folder(run.sft / "merged")
    finish_stage(run.sft, "mark", seconds=1, outputs={"model": str(merged)})
    return merged


def with_data(run: RunDirectory) -> Path:
    """Give a run a question, and a stage 1, whose model is returned."""
    run.data.mkdir(parents=True)
    for split in ("train", "val"):
        write_jsonl(run.data / f"{split}.jsonl", [Question("q1", "zoo", "How many?", "SELECT 1", "zoo.sqlite")])
    return finished_stage1(run)


def test_the_plan_says_what_is_missing_and_how_to_turn_on_the_gate(run: RunDirectory) -> None:
    config = load_config(PIPELINE, "cpu", ["grpo.model=nowhere"])
    start, gate, steps, *_ = stage.plan(config, run)
    assert start == "grpo: start from nowhere (not there yet)"
    assert "off (gate.questions is 0; --set gate.questions=32 turns it on)" in gate
    assert steps.strip() == "4 steps, each of 3 questions x 4 episodes"


def test_sft_model_path_wins(
    config: Config, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_stage1(run)
    named = model_folder(tmp_path / "named")
    monkeypatch.setenv("SFT_MODEL_PATH", str(named))
    assert inputs.starting_model(config, run) == named


def test_the_home_of_nobody_is_refused(run: RunDirectory) -> None:
    config = load_config(PIPELINE, "cpu", ["grpo.model=~no-such-user/model"])
    with pytest.raises(
        UserError, match=r"grpo\.model '~no-such-user/model' starts in the home of a user who does not exist"
    ):
        inputs.starting_model(config, run)


def test_the_setting_comes_before_stage_1(run: RunDirectory, tmp_path: Path) -> None:
    finished_stage1(run)
    named = model_folder(tmp_path / "named")
    assert inputs.starting_model(load_config(PIPELINE, "cpu", [f"grpo.model={named}"]), run) == named


def test_this_runs_stage_1_comes_before_a_newer_one_beside_it(config: Config, run: RunDirectory) -> None:
    merged = finished_stage1(run)
    finished_stage1(RunDirectory(run.path.parent / "other"))
    assert inputs.starting_model(config, run) == merged


def test_a_finished_stage_1_of_another_run_serves(config: Config, run: RunDirectory) -> None:
    merged = finished_stage1(RunDirectory(run.path.parent / "other"))
    assert inputs.starting_model(config, run) == merged


def test_without_any_checkpoint_the_message_says_what_to_run(config: Config, run: RunDirectory) -> None:
    with pytest.raises(UserError, match="stage1_sft"):
        inputs.starting_model(config, run)


def test_an_adapter_is_refused_with_the_way_to_merge_it(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="stage1_sft merge"):
        inputs.starting_model(load_config(PIPELINE, "cpu", [f"grpo.model={tmp_path}"]), run)


def test_an_agent_that_cannot_be_loaded_stops_before_anything_is_played(run: RunDirectory) -> None:
    with_data(run)
    with pytest.raises(UserError, match=r"grpo\.agent is 'tests\.no_agent:play', which cannot be loaded"):
        stage.run(load_config(PIPELINE, "cpu", ["grpo.agent=tests.no_agent:play", "gate.questions=1"]), run)
    assert not run.grpo.exists()


def test_a_start_model_that_the_gate_refuses_leaves_the_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SFT_MODEL_PATH", raising=False)
    case = healthy_case(
        tmp_path, "gate.questions=12", "gate.min_pass=0.5", f"grpo.model={tmp_path / 'runs/main/sft/merged'}"
    )
    run, solved = case.run, {question.id: [False, False] for question in case.train}
    run.data.mkdir()
    for split, questions in (("train", case.train), ("val", case.validation)):
        write_jsonl(run.data / f"{split}.jsonl", questions)
    begin_stage(run.grpo, "of other settings")
    finish_stage(run.grpo, "of other settings", seconds=1, outputs={})
    assert case.model
    mark = evaluation_fingerprint(case.train, probe_settings(case.config), model=case.model)
    readiness = dataclasses.asdict(readiness_of(solved, tool_call_rate=1.0, mean_turns=3.0))
    probe = run.path / "gate" / mark[:12] / "gate.json"
    probe.parent.mkdir(parents=True)
    write_json(probe, {"fingerprint": mark, "readiness": readiness, "solved": solved})
    with pytest.raises(UserError, match="not ready for GRPO"):
        stage.run(case.config, run)
    assert finished(run.grpo, "of other settings")


def test_missing_questions_are_named(run: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"train\.jsonl.*python -m data"):
        question_file(run, "train")


def test_steps_are_whole_batches_of_every_epoch() -> None:
    config = load_config(PIPELINE, "gpu")
    assert inputs.total_steps(config, 8 * 5 + 7) == 15


@pytest.mark.parametrize(("questions", "epochs", "steps"), [(8, 2, 4), (5, 4, 4), (12, 1, 4)])
def test_few_questions_are_played_in_more_epochs(config: Config, questions: int, epochs: int, steps: int) -> None:
    fit = inputs.fit_to_questions(config, questions)
    assert (fit.grpo.epochs, inputs.total_steps(fit, questions)) == (epochs, steps)
    changes = inputs.fitted(config, fit)
    assert changes == ("" if epochs == 1 else f"grpo.epochs 1 -> {epochs}")


def test_fewer_questions_than_a_batch_make_a_smaller_batch() -> None:
    config = load_config(PIPELINE, "gpu", ["grpo.train_batch_size=8", "grpo.mini_batch_size=4"])
    fit = inputs.fit_to_questions(config, 5)
    assert (fit.grpo.train_batch_size, fit.grpo.mini_batch_size) == (5, 2)
    assert 2 * fit.grpo.rollouts_per_question % fit.grpo.micro_batch_size == 0
    assert "grpo.train_batch_size 8 -> 5, grpo.mini_batch_size 4 -> 2" in inputs.fitted(config, fit)


def test_the_plan_counts_the_steps_that_the_questions_make(config: Config, run: RunDirectory) -> None:
    run.data.mkdir(parents=True)
    write_jsonl(run.data / "train.jsonl", [Question(f"q{i}", "d", "?", "SELECT 1", "d") for i in range(8)])
    shown = stage.plan(config, run)
    assert "      8 training questions, so grpo.epochs 1 -> 2" in shown
    assert "      4 steps, each of 3 questions x 4 episodes" in shown


def test_the_plan_does_not_refuse_questions_that_the_data_stage_may_replace(config: Config, run: RunDirectory) -> None:
    run.data.mkdir(parents=True)
    write_jsonl(run.data / "train.jsonl", [Question("q", "d", "?", "SELECT 1", "d")])
    (said,) = (line for line in stage.plan(config, run) if "stage 2 refuses them" in line)
    assert "1 training questions do not fill one batch" in said


@pytest.mark.parametrize(("oversample", "played", "steps"), [(1, 3, 8), (2, 6, 4), (9, 24, 1)])
def test_oversampled_questions_make_fewer_steps(oversample: int, played: int, steps: int) -> None:
    config = load_config(PIPELINE, "cpu", [f"grpo.oversample={oversample}", "grpo.total_steps=null"])
    fit = inputs.fit_to_questions(config, 24)
    assert fit.grpo.train_batch_size * fit.grpo.oversample == played
    assert inputs.total_steps(fit, 24) == steps


@pytest.mark.parametrize("questions", [0, 2])
def test_too_few_questions_are_refused_with_the_smallest_number(config: Config, questions: int) -> None:
    with pytest.raises(UserError, match=r"do not fill one batch.*at least 4"):
        inputs.fit_to_questions(config, questions)


def test_changed_settings_that_leave_no_step_are_refused() -> None:
    stage.refuse_nothing_to_train(0, 16)
    stage.refuse_nothing_to_train(8, 16)
    with pytest.raises(UserError, match=r"No step is left.*step 16 is saved"):
        stage.refuse_nothing_to_train(16, 16)


def test_a_stopped_run_goes_back_to_its_last_good_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 4, 8, 12)
    message = stage.roll_back(tmp_path, Trip("the entropy collapsed", since=9))
    assert message.startswith("the entropy collapsed. Step 8 is the last good checkpoint")
    assert saved_steps(tmp_path) == [4, 8]
    assert (tmp_path / "tripped_step_12").exists()


def test_a_run_that_went_wrong_from_the_start_starts_anew(tmp_path: Path) -> None:
    save_steps(tmp_path, 4)
    message = stage.roll_back(tmp_path, Trip("x", since=1))
    assert message == "x. No checkpoint is older than the fault: run again with such a change, it starts anew."
    assert saved_steps(tmp_path) == []


def test_patience_ends_a_run_that_no_longer_improves(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": step, "validation_execution_accuracy": value} for step, value in ((0, 0.3), (4, 0.5), (8, 0.5))]
    impatient, endless = (load_config(PIPELINE, "cpu", [f"safety.patience={steps}"]) for steps in (1, 0))
    assert not stage.out_of_patience(impatient, rows[:2])
    assert stage.out_of_patience(impatient, rows)
    assert not stage.out_of_patience(endless, rows)
    assert capsys.readouterr().out.count("ends early, 1 validations") == 1


@pytest.fixture
def saved(config: Config, run: RunDirectory) -> RunDirectory:
    """An interrupted run that has saved two steps."""
    model = with_data(run)
    resume.begin(
        run.grpo, resume.stage_inputs(config, model, run.data / "train.jsonl", run.data / "val.jsonl"), "refuse"
    )
    save_steps(run.grpo / "checkpoints", 4, 8)
    return run


def test_an_export_of_a_finished_run_is_refused_and_leaves_it(saved: RunDirectory) -> None:
    finish_stage(saved.grpo, "mark", seconds=1, outputs={"model": str(saved.grpo / "model")})
    with pytest.raises(UserError, match="no unfinished run with a saved step"):
        stage.run_export(load_config(PIPELINE, "cpu", ["seed=7"]), saved)
    assert saved_steps(saved.grpo / "checkpoints") == [4, 8]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("restart", "safety.changed is restart.*safety.changed=continue"),
        ("refuse", "other data or settings: seed 0 -> 7"),
    ],
)
def test_an_export_never_throws_saved_steps_away(saved: RunDirectory, changed: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        stage.run_export(load_config(PIPELINE, "cpu", ["seed=7", f"safety.changed={changed}"]), saved)
    assert saved_steps(saved.grpo / "checkpoints") == [4, 8]


@pytest.mark.parametrize(
    ("log", "status", "cause"),
    [
        (
            "x\n\x1b[36mstage2_grpo.trainer.WeightsOutOfSync: stale\x1b[0m\nRuntimeError: x\n",
            137,
            r"\S+OutOfSync: stale",
        ),
        ("RuntimeError: long ago\n", 137, "it was ended by SIGKILL, most likely for lack of memory"),
        ("RuntimeError: now\nbye\n", 1, "RuntimeError: now"),
        (
            "ray.exceptions.OutOfMemoryError: 3 worker(s) were killed\nRuntimeError: Found no NVIDIA driver\n",
            1,
            r"\S+OutOfMemoryError: 3 worker\(s\) were killed",
        ),
        ("starting\n", 1, "starting"),
        ("[2026-11-30 06:22:34,169 E 1 2] rpc_client.h:204: Failed to connect.\n", 1, r"Failed to connect\."),
        (
            "ray.exceptions.ActorDiedError: It died.\n\tclass_name: vLLMHttpServer\n\tactor_id: 1\n",
            1,
            r"ray\.exceptions\.ActorDiedError: It died\. It was vLLMHttpServer, which ran out of memory, most likely\.",
        ),
    ],
)
def test_a_failure_quotes_weight_guard_or_memory_then_the_death_then_the_last_error(
    tmp_path: Path, log: str, status: int, cause: str
) -> None:
    (tmp_path / "trainer.log").write_text(log)
    message = stage.failure(tmp_path / "trainer.log", status, 1, 4)
    assert re.match(rf"The trainer stopped after step 1 of 4 saved: {cause} \(whole log", message)
    assert message.endswith("Mend the cause; the same command continues after step 1.")
