"""The translation into VERL's keys: both profiles compose in struct mode, and the values that guard a run are there."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from shared.config.load import load_config
from shared.errors import UserError
from stage2_grpo.training import verl_config
from stage2_grpo.training.verl_config import TrainerPaths, compose, overrides

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
PATHS = TrainerPaths(Path("some/model"), Path("runs/x/grpo"), "http://127.0.0.1:1")


@cache
def composed(profile: str, *changes: str) -> Any:
    """For reading only: composing takes half a second."""
    config = compose(load_config(PIPELINE, profile, changes), PATHS)
    OmegaConf.set_readonly(config, True)
    return config


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_lora_runs_in_the_mode_in_which_vllm_samples_the_trained_policy(profile: str) -> None:
    actor = composed(profile).actor_rollout_ref
    assert (actor.actor.strategy, actor.model.lora.merge, actor.model.lora_rank) == ("fsdp", True, 16)


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_prompts_and_rows_may_fill_the_context(profile: str) -> None:
    config, context = composed(profile), {"cpu": 1536, "gpu": 8192}[profile]
    rows = config.agentlightning.trace_aggregator
    assert (rows.trajectory_max_prompt_length, rows.trajectory_max_response_length) == (context, context)
    assert (config.data.max_prompt_length, config.actor_rollout_ref.rollout.max_model_len) == (context, context)


def test_the_gpu_profile_holds_the_reference_configuration() -> None:
    config = composed("gpu")
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward) == ("grpo", False)
    assert (config.data.train_batch_size, config.data.max_prompt_length, config.data.max_response_length) == (
        8,
        8192,
        1024,
    )
    assert (rollout.name, rollout.n, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == (
        "vllm",
        8,
        1,
        0.6,
    )
    assert (rollout.multi_turn.format, rollout.enforce_eager, rollout.max_model_len) == ("hermes", True, 8192)
    assert rollout.engine_kwargs.vllm == {"enable_auto_tool_choice": True, "tool_call_parser": "qwen25_coder"}
    assert (actor.optim.lr, actor.use_kl_loss, actor.entropy_coeff) == (1e-5, False, 0)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert actor.fsdp_config.param_offload
    assert actor.fsdp_config.optimizer_offload
    assert (config.trainer.n_gpus_per_node, config.trainer.total_epochs, config.trainer.test_freq) == (1, 3, 16)
    assert config.trainer.logger == ["console", "file", "tensorboard"]


@pytest.mark.parametrize(
    ("average", "mode", "aggregation"),
    [
        ("episode", "per_rollout_mean", "token-mean"),
        ("token", "vanilla", "token-mean"),
        ("constant", "vanilla", "seq-mean-token-sum-norm"),
    ],
)
def test_loss_and_advantages_follow_the_settings(average: str, mode: str, aggregation: str) -> None:
    config = composed("gpu", f"grpo.loss_average={average}", "grpo.std_advantages=false", "grpo.importance_cap=1.5")
    actor = config.actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.loss_agg_mode) == (mode, aggregation)
    assert config.algorithm.norm_adv_by_std_in_grpo is False
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold, correction.bypass_mode) == ("token", 1.5, False)


@pytest.mark.parametrize(("average", "constant"), [("episode", None), ("token", None), ("constant", 8192)])
def test_only_the_constant_average_divides_by_a_constant_length(average: str, constant: int | None) -> None:
    assert composed("gpu", f"grpo.loss_average={average}").actor_rollout_ref.actor.loss_scale_factor == constant


@pytest.mark.slow
def test_a_token_counts_alike_whatever_the_length_of_its_micro_batch() -> None:
    import torch
    from verl.trainer.ppo.core_algos import agg_loss

    actor = composed("gpu", "grpo.loss_average=constant").actor_rollout_ref.actor
    short, long = (
        agg_loss(
            torch.ones(1, width),
            torch.nn.functional.pad(torch.ones(1, 10), (0, width - 10)),  # ten trained tokens in a row of any width
            actor.loss_agg_mode,
            global_batch_size=2,
            loss_scale_factor=actor.loss_scale_factor,
        )
        for width in (10, 400)
    )
    assert short == long == pytest.approx(10 / 2 / 8192)


def test_without_a_cap_there_is_no_importance_weight() -> None:
    assert composed("gpu").algorithm.rollout_correction.rollout_is is None


@pytest.mark.parametrize("change", ["grpo.temperature=0.9", "grpo.importance_cap=2.0"])
def test_log_probabilities_of_the_server_that_would_be_wrong_are_refused(change: str) -> None:
    with pytest.raises(UserError, match=r"grpo\.rollout_log_probs needs grpo\.temperature 1\.0"):
        load_config(PIPELINE, "gpu", ["grpo.rollout_log_probs=true", change])


def test_a_lost_episode_does_not_skip_a_step() -> None:
    config = composed("gpu")
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size < config.data.train_batch_size
    assert config.agentlightning.max_ppo_update_times == 2


def test_number_of_gpu_blocks_can_be_set() -> None:
    config = composed("gpu", "vllm.num_gpu_blocks_override=512")
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override == 512


def test_a_key_that_verl_does_not_declare_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_config, "overrides", lambda config, paths: {"trainer": {"test_frequency": 1}})
    with pytest.raises(UserError, match="test_frequency"):
        compose(load_config(PIPELINE, "cpu"), PATHS)


MACHINES = {
    "one GPU": [],
    "two GPUs": ["grpo.gpus_per_node=2"],
    "eight GPUs": ["grpo.gpus_per_node=8", "vllm.tensor_parallel=2"],
    "two nodes": ["grpo.nodes=2", "grpo.gpus_per_node=8", "vllm.tensor_parallel=4", "grpo.ray_address=10.0.0.1:6379"],
}


@pytest.mark.parametrize(
    ("machines", "nodes", "gpus", "servers"),
    [("one GPU", 1, 1, 1), ("two GPUs", 1, 2, 2), ("eight GPUs", 1, 8, 4), ("two nodes", 2, 8, 4)],
)
def test_machines_become_nodes_gpus_and_rollout_servers(machines: str, nodes: int, gpus: int, servers: int) -> None:
    """That VERL knows these keys shows in the test below."""
    values = overrides(load_config(PIPELINE, "gpu", MACHINES[machines]), PATHS)
    assert (values["trainer"]["nnodes"], values["trainer"]["n_gpus_per_node"]) == (nodes, gpus)
    assert nodes * gpus // values["actor_rollout_ref"]["rollout"]["tensor_model_parallel_size"] == servers


def test_a_joined_cluster_keeps_its_own_resources() -> None:
    assert "runtime_env" in composed("cpu").ray_kwargs.ray_init
    assert set(composed("cpu", "grpo.ray_address=127.0.0.1:6379").ray_kwargs.ray_init) == {"num_cpus"}  # VERL's own key


def test_the_gateways_key_is_not_in_the_config_that_is_logged() -> None:
    assert composed("gpu").agentlightning.agl_key == ""


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "machines"), [*(("gpu", machines) for machines in MACHINES), ("cpu", "one GPU")])
def test_verl_accepts_the_configuration_without_a_gpu(profile: str, machines: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = compose(load_config(PIPELINE, profile, MACHINES[machines]), PATHS)
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).n == config.actor_rollout_ref.rollout.n
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).strategy == "fsdp"


@pytest.mark.slow
def test_the_trainer_takes_the_gateways_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.verl import trainer as module
    from agentlightning.verl.agl_rollout_manager import AglRolloutManager

    from stage2_grpo.training.guarded_trainer import guarded

    monkeypatch.setenv("AGL_KEY", "secret")
    kind, _ = guarded(module.AgentLightningRayPPOTrainer, module.RolloutAdapter)
    trainer = kind.__new__(kind)  # without Ray and workers
    trainer.config, trainer.global_steps, trainer._hooks = composed("gpu"), 1, None
    manager = trainer._make_rollout_manager(AglRolloutManager)
    assert manager.client.headers["Authorization"] == "Bearer secret"
