"""The whole pipeline on a tiny model, killed (kill -9) in every stage and started again with the same command.

Nothing is replaced: SFT, vLLM, Agent Lightning and VERL are real, and so are the data, which are Spider's where the sample
is there, else the demo databases. The model was taught one tool call, so GRPO has episodes with calls; it is never
right, so the update comes from the entropy bonus.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run_pipeline
from shared.runs import RunDirectory, read_manifest
from shared.usage import read_usage
from tests.beside import REAL_DATA
from tests.processes import of_run
from tests.stage2_grpo.small_run import options, taught_model

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[1]
SETTINGS = {
    "data.questions_per_database": 10,
    "agent.max_turns": 5,
    "agent.max_turn_tokens": 192,  # the tiny tokenizer knows few words
    "agent.observation_tokens": 512,
    "agent.context_tokens": 3072,
    "vllm.max_model_len": 3072,
    "sft.max_length": 3072,
    "sft.max_traces": 8,
    "sft.learning_rate": 1e-3,
    "sft.eval_steps": 1,
    "grpo.total_steps": 1,
    "grpo.train_batch_size": 2,
    "grpo.mini_batch_size": 1,
    "grpo.rollouts_per_question": 2,
    "grpo.entropy_coeff": 0.05,
    "grpo.learning_rate": 1e-3,
    "grpo.val_questions": 2,
    "grpo.test_every": 1,
    "grpo.save_every": 1,
    "grpo.trajectory_response_length": 2717,
    "grpo.weight_bucket_mb": 64,
    "vllm.cpu_kv_cache_gib": 1,
    "evaluate.questions": 4,
}
KILLED = [stage for stage in run_pipeline.STAGES if stage not in ("data", "report")]
BEGUN_SECONDS = 2.0  # after a stage opened its folder: its processes are starting, its files half written


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("pipeline")
    taught_model(folder / "tiny")
    return RunDirectory(folder / "runs" / "main")


def command(directory: RunDirectory) -> list[str]:
    settings = SETTINGS | {"runs_dir": directory.path.parent, "model": directory.path.parents[1] / "tiny"}
    if REAL_DATA.exists():
        settings["data.spider_dir"] = REAL_DATA / "spider_sample"
    chosen = options(*(f"{key}={value}" for key, value in settings.items()))
    return [sys.executable, str(REPO / "run_pipeline.py"), "--profile", "cpu", *chosen]


def kill_in(stage: str, directory: RunDirectory, log: Path) -> None:
    """Start the pipeline, let it reach the stage, and kill the runner alone."""
    started = run_pipeline.folder(stage, directory) / "started.json"
    with log.open("w") as output:
        runner = subprocess.Popen(command(directory), cwd=REPO, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 400
    while not started.exists():
        assert runner.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    time.sleep(BEGUN_SECONDS)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert read_manifest(started.parent) is None, f"{stage} was over before it could be killed"


def test_killed_in_every_stage_the_same_command_still_ends_in_a_whole_result(
    directory: RunDirectory, tmp_path: Path
) -> None:
    for stage in KILLED:
        kill_in(stage, directory, tmp_path / f"{stage}.log")
    ended = subprocess.run(command(directory), cwd=REPO, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert of_run(directory.path) == []

    usage = read_usage(directory)
    assert all(usage[stage]["complete"] for stage in run_pipeline.STAGES if stage != "report")
    facts = json.loads((directory.report / "report.json").read_text())
    assert [model["who"] for model in facts["models"]] == ["base", "sft", "grpo"]
    assert {model["all"]["n"] for model in facts["models"]} == {4}
    (step,) = facts["steps"]
    assert step["policy_moved"] > 0
    assert step["server_moved"] > 0
    assert step["validation_episodes"] == 2

    finished = {stage: read_manifest(run_pipeline.folder(stage, directory)) for stage in KILLED}
    again = subprocess.run(command(directory), cwd=REPO, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert finished == {stage: read_manifest(run_pipeline.folder(stage, directory)) for stage in KILLED}
