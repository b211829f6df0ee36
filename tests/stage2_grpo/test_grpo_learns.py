"""Real GRPO of a tiny model that is right in half of its episodes, so that groups differ and updates have a direction.

One run is stopped by a tripwire, goes on as the message says, and ends early with the best step; another is played by
LangGraph.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from shared.records import read_episodes
from shared.runs.manifest import read_manifest
from stage2_grpo.checkpoints.files import saved_steps
from stage2_grpo.monitoring.tripwires import best_step
from tests.processes import of_run
from tests.stage2_grpo.small_run import rows
from tests.stage2_grpo.test_grpo_end_to_end import ROOT, command
from tests.stage2_grpo.undecided import write_undecided_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

SETTINGS = (
    "grpo.epochs=6",
    "grpo.train_batch_size=2",
    "grpo.rollouts_per_question=6",
    "grpo.mini_batch_size=1",
    "grpo.micro_batch_size=2",
    "grpo.save_every=1",
    "grpo.val_questions=1",
    "grpo.weight_bucket_mb=64",
    "agent.max_turns=3",
    "agent.max_turn_tokens=96",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_undecided_run(folder / "e2e" / "data", folder / "tiny")
    return folder


def trained(runs: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    argv = command("stage2_grpo", runs, f"grpo.model={runs / 'tiny'}", *SETTINGS, *settings)
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_a_tripped_run_goes_on_from_its_last_good_step_and_ends_early_with_the_best(runs: Path) -> None:
    grpo = runs / "e2e" / "grpo"
    checkpoints = grpo / "checkpoints"
    refilled = ("grpo.oversample=2", "grpo.epochs=12")  # all four questions are played in each step, and two train
    touchy = ("safety.window=2", "safety.length_factor=0.5")  # episodes that do not even halve count as growing
    stopped = trained(runs, "grpo.learning_rate=5e-4", *refilled, *touchy)
    assert stopped.returncode == 2, stopped.stdout + stopped.stderr
    said = stopped.stderr.splitlines()[-1]
    assert re.search(r"Stopped after step 4: the episodes grew to \d\.\d times their tokens in the last 2 steps", said)
    assert "lower grpo.learning_rate, or agent.max_turn_tokens. Step 1 is the last good checkpoint" in said
    assert saved_steps(checkpoints) == [1]
    assert {folder.name for folder in checkpoints.glob("tripped_*")} >= {f"tripped_step_{step}" for step in (2, 3, 4)}
    assert read_manifest(grpo) is None
    assert not of_run(runs)

    lower = ("grpo.learning_rate=3e-4", "safety.changed=continue")  # as the message says
    again = trained(runs, *refilled, *lower, "grpo.test_every=1", "safety.patience=1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.search(r"goes on after step 1 with changed .*grpo\.learning_rate 0\.0005 -> 0\.0003", again.stdout)
    assert "grpo: ends early, 1 validations without a better one (safety.patience)" in again.stdout
    made = rows(grpo / "metrics.jsonl")
    assert [row["step"] for row in made] == [*range(1, len(made) + 1)]
    assert 3 <= len(made) < 12
    assert [(row["episodes"], row["discarded_groups"]) for row in made] == [(24, 2)] * len(made)
    assert any(
        row["policy_moved"] > 0 and row["server_moved"] > 0 for row in made
    )  # not all: a step may have no mixed group
    manifest, best = read_manifest(grpo), best_step(made, saved_steps(checkpoints))
    assert manifest is not None
    assert manifest["steps"] == best
    assert f"exporting step {best}, the best by validation" in again.stdout
    assert manifest["export"]["largest_weight_change"] > 0
    assert not of_run(runs)


def test_an_agent_written_with_langgraph_is_trained(runs: Path) -> None:
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    grpo = runs / "e2e" / "grpo"
    agent = "grpo.agent=stage2_grpo.examples.langgraph_agent:play"
    small = ("grpo.total_steps=1", "grpo.rollouts_per_question=8", "grpo.learning_rate=5e-4", "safety.changed=restart")
    stage = trained(runs, agent, *small)
    assert stage.returncode == 0, stage.stdout + stage.stderr
    (row,) = rows(grpo / "metrics.jsonl")
    assert (row["episodes"], row["lost_episodes"]) == (16, 0)
    assert row["mixed_groups"] > 0
    assert min(row["policy_moved"], row["server_moved"]) > 0
    assert row["weight_gap"] < 0.08
    merged = [[turn.merged for turn in episode.turns] for episode in read_episodes(grpo / "episodes.jsonl")]
    assert sum(turns.count(True) for turns in merged) >= 8
    # So small a model sometimes writes a call in other tokens than it is read back in; both sides agree on how often.
    apart = [turns.count(False) for turns in merged]
    (figures,) = (entry["data"] for entry in rows(grpo / "trainer_metrics.jsonl"))
    assert figures["training/n_unmerged_rollouts"] == sum(map(bool, apart))
    assert figures["training/n_sample"] == 16 + sum(apart)  # one row for each episode that is one sequence of tokens
    manifest = read_manifest(grpo)
    assert manifest is not None
    assert manifest["export"]["largest_weight_change"] > 0
