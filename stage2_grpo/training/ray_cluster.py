"""Joining a Ray cluster that runs already (grpo.ray_address), instead of the private one-machine Ray of a usual run.

This machine must be a node of the cluster, and all nodes must have the same environment and see models, runs and
databases under the same paths. Ray ends the run's workers with the run; nothing else in the cluster changes.

Ray is joined here and not through VERL's config, because the workers of a cluster inherit nothing from this process.
What they need travels as Ray's runtime environment, which holds the gateway's key and would be logged with the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.config.schema import GrpoConfig
from shared.errors import UserError
from stage2_grpo.training.worker_setup import HOOK


def join(grpo: GrpoConfig, environment: Mapping[str, str]) -> None:
    """Connect this process; `environment` reaches every worker. Raises UserError without a cluster of that size."""
    import ray
    from verl.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV

    runtime_env = {
        "env_vars": {**PPO_RAY_RUNTIME_ENV["env_vars"], **environment},
        "worker_process_setup_hook": HOOK,
    }
    try:
        ray.init(address=grpo.ray_address, runtime_env=runtime_env)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"No Ray cluster could be joined at grpo.ray_address {grpo.ray_address} ({' '.join(str(error).split())}); "
            "start one with `ray start --head`, and this machine as one of its nodes."
        ) from error
    refuse_small_cluster(ray.nodes(), grpo)


def refuse_small_cluster(nodes: list[dict[str, Any]], grpo: GrpoConfig) -> None:
    """VERL would wait for ever for nodes that are not there; `nodes` as `ray.nodes()` lists them."""
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]]
    fitting = [count for count in gpus if count >= grpo.gpus_per_node]
    if len(fitting) < grpo.nodes:
        raise UserError(
            f"The Ray cluster at {grpo.ray_address} has {len(gpus)} nodes with {gpus} GPUs; grpo.nodes {grpo.nodes} x "
            f"grpo.gpus_per_node {grpo.gpus_per_node} do not fit: add nodes or lower the settings."
        )
