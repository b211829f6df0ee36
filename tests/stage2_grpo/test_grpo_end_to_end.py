"""Real GRPO steps of the whole stack on a tiny model: Agent Lightning gateway, pooled controller, Ray, VERL, vLLM.

A run of a model that never saw stage 1 is interrupted after its first step and must leave no process.
tests/test_whole_pipeline.py kills one and lets it resume to the end.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.records import read_questions
from stage2_grpo.checkpoints.files import newest_step
from tests.processes import of_run, wait_for
from tests.stage2_grpo.small_run import SETTINGS, options, taught_model, untaught_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

ROOT = Path(__file__).resolve().parents[2]
ADAPTER_MODE = """
from stage2_grpo.training import import_hooks

def adapter_mode(module):
    right = module.overrides
    def overrides(config, paths):
        values = right(config, paths)
        values["actor_rollout_ref"]["model"]["lora"]["merge"] = False
        values["actor_rollout_ref"]["actor"]["strategy"] = "fsdp2"
        return values
    import_hooks.replace(module, "overrides", overrides)

import_hooks.install({"stage2_grpo.training.verl_config": adapter_mode})
"""


def command(module: str, runs: Path, *settings: str) -> list[str]:
    chosen = options(f"runs_dir={runs}", *settings)
    return [sys.executable, "-m", module, "--profile", "cpu", "--run-name", "e2e", *chosen]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    taught_model(folder / "tiny")
    subprocess.run(command("data", folder, "data.questions_per_database=10"), cwd=ROOT, check=True, timeout=120)
    return folder


def test_without_stage_1_our_parser_alone_makes_the_episodes_and_an_interrupted_run_leaves_no_process(
    runs: Path,
) -> None:
    questions = [row.question for row in read_questions(runs / "e2e" / "data" / "train.jsonl")]
    model = untaught_model(runs / "untaught", questions)
    unsaved = ("grpo.total_steps=4", "grpo.save_every=4", "seed=7")
    metrics = runs / "e2e" / "grpo" / "metrics.jsonl"
    argv = command("stage2_grpo", runs, *SETTINGS, f"grpo.model={model}", *unsaved)
    stage = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert wait_for(lambda: (metrics.exists() and metrics.read_text()) or stage.poll() is not None, 600)
    stage.send_signal(signal.SIGTERM)
    output = stage.communicate(timeout=90)[0]
    assert stage.returncode == 130, output
    assert not of_run(runs)

    step = json.loads(metrics.read_text().splitlines()[0])
    assert (step["tool_call_rate"], step["fallback_share"]) == (0.0, 1.0)  # the stock Hermes grammar sees no call
    assert step["calls"] >= step["episodes"] == 4
    assert step["turns"] > 1  # the calls were run and answered


def test_lora_in_adapter_mode_stops_the_run_at_its_first_update(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        ADAPTER_MODE
    )  # Python imports it when it starts, in the run's processes alone
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    argv = command("stage2_grpo", runs, f"grpo.model={runs / 'tiny'}", *SETTINGS, "seed=8")
    stage = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert stage.returncode == 2, stage.stdout + stage.stderr
    said = stage.stderr.splitlines()[-1]
    assert "The trainer stopped after step 0 of 2 saved" in said
    assert "After the update of step 1 the server's log-probabilities of the probe text are unchanged" in said
    assert "LoRA must run with strategy fsdp and lora.merge=True" in said
    assert newest_step(runs / "e2e" / "grpo" / "checkpoints") == 0
    assert not of_run(runs)


def test_a_model_that_is_never_right_does_not_pass_the_gate(runs: Path) -> None:
    gate = ("gate.questions=4", "gate.samples=2", "gate.min_tool_calls=0", "gate.min_turns=0")
    argv = command("stage2_grpo", runs, f"grpo.model={runs / 'tiny'}", *SETTINGS, *gate, "seed=9")
    stage = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert stage.returncode == 2, stage.stdout + stage.stderr
    assert "grpo: gate  pass@1 0.0%  pass@2 0.0%  mixed groups 0.0%" in stage.stdout
    assert "2 episodes solve only 0.0% of the questions (gate.min_pass 0.3); bring easier questions" in stage.stderr
    (probe,) = (runs / "e2e" / "gate").glob("*/gate.json")
    saved = json.loads(probe.read_text())
    assert len(saved["solved"]) == saved["readiness"]["questions"] == 4

    again = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (again.returncode, "starting" in again.stderr) == (2, False)  # the probe is not played twice
