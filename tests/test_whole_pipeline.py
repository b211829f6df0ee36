"""From a database without questions to a trained checkpoint and its report, as docs/your-data.md says, on a tiny model.

The pipeline is killed (kill -9) in every stage and started again with the same command.

Each stage is killed as it begins, GRPO also after its first saved step, from which it must go on.

Nothing is replaced: SFT, vLLM, Agent Lightning and VERL are real. The questions are synthesized. The model was taught
one tool call, so GRPO has episodes with calls; it is never right, so the update comes from the entropy bonus.
"""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

import run_pipeline
from shared.runs.manifest import RunDirectory, read_manifest
from shared.runs.usage import read_usage
from tests.processes import command_line, of_run, wait_for
from tests.stage2_grpo.small_run import differing_weights, options, rows, taught_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

REPO = Path(__file__).resolve().parents[1]
SETTINGS = {
    "agent.max_turns": 5,
    "agent.max_turn_tokens": 192,  # the tiny tokenizer knows few words
    "agent.observation_tokens": 512,
    "agent.context_tokens": 3072,
    "sft.max_traces": 8,
    "sft.learning_rate": 1e-3,
    "sft.eval_steps": 1,
    "grpo.total_steps": 2,
    "grpo.train_batch_size": 2,
    "grpo.mini_batch_size": 1,
    "grpo.rollouts_per_question": 2,
    "grpo.entropy_coeff": 0.05,
    "grpo.learning_rate": 1e-3,
    "grpo.val_questions": 2,
    "grpo.test_every": 1,
    "grpo.save_every": 1,
    "grpo.weight_bucket_mb": 64,
    "vllm.cpu_kv_cache_gib": 1,
    "evaluate.questions": 4,
}
KILLED = [stage for stage in run_pipeline.STAGES if stage not in ("data", "report")]
BEGUN_SECONDS = 0.5  # after a stage opened its folder: its processes are starting; SFT is over in 2 s on a fast machine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("pipeline")
    taught_model(folder / "tiny")
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection, connection:
        connection.executescript("""
            CREATE TABLE "tbl_Product" (ProdID INTEGER, "product name" TEXT, kind TEXT, price REAL);
            CREATE TABLE "order" (id INTEGER PRIMARY KEY, ProdID INTEGER, "order date" TEXT, pieces INTEGER);
        """)
        products = [(i, f"Item {i}", ("tool", "toy", "book")[i * i % 3], 1.5 * i) for i in range(1, 31)]
        orders = [(i, 1 + i * i % 23, f"2024-0{1 + i % 9}-1{i % 10}", 1 + i % 7) for i in range(90)]
        connection.executemany('INSERT INTO "tbl_Product" VALUES (?, ?, ?, ?)', products)
        connection.executemany('INSERT INTO "order" VALUES (?, ?, ?, ?)', orders)
    synthesize = ["data", "synthesize", "--database", folder / "shop.sqlite", "--out", folder / "shop_questions"]
    subprocess.run([sys.executable, "-m", *map(str, synthesize), "--questions", "80"], cwd=REPO, check=True)
    return RunDirectory(folder / "runs" / "main")


def command(directory: RunDirectory) -> list[str]:
    home = directory.path.parents[1]
    paths = {"runs_dir": directory.path.parent, "model": home / "tiny", "data.sources": home / "shop_questions"}
    settings = SETTINGS | paths
    chosen = options(*(f"{key}={value}" for key, value in settings.items()))
    return [sys.executable, str(REPO / "run_pipeline.py"), "--profile", "cpu", *chosen]


def kill_in(stage: str, directory: RunDirectory, log: Path, *, after_a_step: bool = False) -> None:
    """Start the pipeline, let it reach the stage, kill the runner, and see that nothing of it lives on.

    With `after_a_step` the stage's own process is killed too, with the runner; alone, the runner takes it along.
    """
    folder = run_pipeline.folder(stage, directory)
    marker = folder / ("metrics.jsonl" if after_a_step else "started.json")  # a step is logged right after it was saved
    with log.open("w") as output:
        runner = subprocess.Popen(command(directory), cwd=REPO, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 600
    while not (marker.exists() and marker.read_text()):
        assert runner.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    if after_a_step:
        for process in (psutil.Process(runner.pid), _process_of(stage, runner.pid)):
            process.kill()
    else:
        time.sleep(BEGUN_SECONDS)
        runner.kill()
    runner.wait()
    assert read_manifest(folder) is None, f"{stage} was over before it could be killed"
    assert wait_for(lambda: not of_run(directory.path), 120), of_run(directory.path)


def _process_of(stage: str, runner: int) -> psutil.Process:
    """The process of a stage, which the runner started."""
    started = psutil.Process(runner).children(recursive=True)
    (found,) = [child for child in started if command_line(child).startswith(f"{sys.executable} -m stage2_{stage} ")]
    return found


def test_killed_in_every_stage_the_same_command_still_ends_in_a_whole_result(
    directory: RunDirectory, tmp_path: Path
) -> None:
    for stage in KILLED:
        kill_in(stage, directory, tmp_path / f"{stage}.log")
        if stage == "grpo":
            kill_in(stage, directory, tmp_path / "first_step.log", after_a_step=True)
    ended = subprocess.run(command(directory), cwd=REPO, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    resumed = (tmp_path / "grpo-eval.log").read_text()
    assert "grpo: continues after step 1 of 2" in resumed
    assert f"GRPO_MODEL_PATH={directory.grpo / 'model'}" in resumed
    assert of_run(directory.path) == []

    usage = read_usage(directory)
    assert all(usage[stage]["complete"] for stage in run_pipeline.STAGES if stage != "report")
    facts = json.loads((directory.report / "report.json").read_text())
    assert [model["name"] for model in facts["models"]] == ["base", "sft", "grpo"]
    assert {model["summary"]["n"] for model in facts["models"]} == {4}
    _check_grpo(directory)

    finished = {stage: read_manifest(run_pipeline.folder(stage, directory)) for stage in KILLED}
    again = subprocess.run(command(directory), cwd=REPO, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert finished == {stage: read_manifest(run_pipeline.folder(stage, directory)) for stage in KILLED}


def _check_grpo(directory: RunDirectory) -> None:
    """Both steps trained on questions of their own, and the export is what they made of the model of stage 1."""
    steps, episodes = (rows(directory.grpo / name) for name in ("metrics.jsonl", "episodes.jsonl"))
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["execution_accuracy"] > 0 or (step["mixed_groups"], step["zero_advantage_groups"]) == (0.0, 2)
        assert (step["episodes"], step["validation_episodes"]) == (4, 2)
        assert min(step["policy_moved"], step["server_moved"]) > 0
        assert step["weight_gap"] < 0.08
    first, second = (
        [row["question_id"] for row in episodes if (row["split"], row["step"]) == ("train", step)] for step in (1, 2)
    )
    assert (len(first), len(set(first)), len(second), len(set(second))) == (4, 2, 4, 2)
    assert set(first).isdisjoint(second)  # the order of the questions goes on where the killed run was
    manifest = read_manifest(directory.grpo)
    assert manifest is not None
    assert manifest["export"]["largest_weight_change"] > 0
    assert manifest["export"]["greedy_regret"] < 0.25
    assert differing_weights(directory.sft / "merged", directory.grpo / "model")
