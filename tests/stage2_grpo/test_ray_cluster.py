"""A GRPO step on a Ray cluster of two nodes (two raylets on this machine), which outlives the run.

The cluster is started as somebody else would have started it: nothing of this project is in its environment.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.runs import read_manifest
from tests.stage2_grpo.test_grpo_end_to_end import ROOT, SETTINGS, command, of_this_run, runs, wait_for

pytestmark = pytest.mark.slow

__all__ = ["runs"]  # a fixture
NODE = {
    "num_cpus": 8,
    "num_gpus": 1,  # pretended
    "object_store_memory": 150 * 2**20,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    for name in ("RAY_enable_worker_prestart", "RAY_prestart_worker_first_driver", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    folder = Path(tempfile.mkdtemp(prefix="firstcall-", dir="/tmp"))  # Ray's socket paths must stay short
    (folder / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    started = Cluster(initialize_head=True, head_node_args=NODE)
    started.add_node(**NODE)
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def nodes_of_workers() -> list[str]:
    """The nodes on which VERL has placed its workers, one for each pretended GPU."""
    import ray

    groups = ray.util.placement_group_table().values()
    return [node for group in groups if group["state"] == "CREATED" for node in group["bundles_to_node_id"].values()]


def test_a_step_runs_on_both_nodes_and_the_cluster_stays(cluster: Any, runs: Any) -> None:
    import ray

    own = [f"grpo.model={runs / 'tiny'}", "grpo.total_steps=1", "grpo.micro_batch_size=1", "grpo.nodes=2"]
    argv = command("stage2_grpo", runs, *SETTINGS, *own, f"grpo.ray_address={cluster.address}")
    stage = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert wait_for(lambda: len(nodes_of_workers()) == 2 or stage.poll() is not None, 200)
        placed = nodes_of_workers()
        output = stage.communicate(timeout=400)[0]
    finally:
        stage.kill()
    grpo = runs / "e2e" / "grpo"
    assert stage.returncode == 0, output
    assert len(set(placed)) == 2, output
    assert [node["Alive"] for node in ray.nodes()] == [True, True]
    assert wait_for(lambda: not of_this_run(runs), 30), of_this_run(runs)

    (step,) = [json.loads(line) for line in (grpo / "metrics.jsonl").read_text().splitlines()]
    assert step["policy_moved"] > 0
    assert step["server_moved"] > 0  # the smaller of both rollout servers
    manifest = read_manifest(grpo)
    assert manifest is not None
    assert manifest["export"]["probe_gap"] < 0.08
