"""A GRPO step on a Ray cluster of two nodes (two raylets on this machine), which outlives the run."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.processes.owned_process import OwnedProcess
from shared.runs.manifest import read_manifest
from tests.processes import of_run, wait_for
from tests.stage2_grpo.small_run import SETTINGS
from tests.stage2_grpo.test_grpo_end_to_end import ROOT, command, runs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("servers")]

__all__ = ["runs"]  # a fixture


@pytest.fixture
def cluster() -> Iterator[Path]:
    """The status file of a running cluster."""
    folder = Path(tempfile.mkdtemp(prefix="firstcall-", dir="/tmp"))  # Ray's socket paths must stay short
    program = [sys.executable, str(Path(__file__).with_name("two_nodes.py")), str(folder)]
    status = folder / "status.json"
    try:
        with OwnedProcess(program, name="the cluster", log=folder / "log", health=status.exists, start_timeout=120):
            yield status
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_step_runs_on_both_nodes_and_the_cluster_stays(cluster: Path, runs: Path) -> None:
    def status() -> dict[str, Any]:
        return json.loads(cluster.read_text())  # type: ignore[no-any-return]

    own = ["grpo.total_steps=1", "grpo.micro_batch_size=1", "grpo.nodes=2", "grpo.rollouts_per_question=6"]
    address = f"grpo.ray_address={status()['address']}"
    argv = command("stage2_grpo", runs, f"grpo.model={runs / 'tiny'}", *SETTINGS, *own, address)
    stage = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert stage.returncode == 0, stage.stdout + stage.stderr
    assert len(status()["placed"]) == 2
    grpo = runs / "e2e" / "grpo"

    (step,) = [json.loads(line) for line in (grpo / "metrics.jsonl").read_text().splitlines()]
    assert step["policy_moved"] > 0
    assert step["server_moved"] > 0  # the smaller of both rollout servers
    manifest = read_manifest(grpo)
    assert manifest is not None
    assert manifest["export"]["probe_gap"] < 0.08

    assert wait_for(lambda: not of_run(runs), 30), of_run(runs)
    time.sleep(1)  # until the cluster tells its state anew
    assert status()["alive"] == 2
