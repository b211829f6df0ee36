"""The one place that translates our settings into VERL's and Agent Lightning's keys.

The base is Agent Lightning's own Hydra config on top of VERL's ppo_trainer. `overrides` are merged in struct mode, so a
misspelt key is an error; the few keys that VERL takes without declaring them are in `additions`. Where a value departs
from the default, the reason stands beside it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config.device import attention_backend, find_gpus
from shared.config.schema import Config
from shared.errors import UserError
from stage2_grpo.training.worker_setup import HOOK

# grpo.loss_average -> policy_loss.loss_mode, loss_agg_mode. Agent Lightning's own mode ignores the second.
_LOSSES = {
    "episode": ("per_rollout_mean", "token-mean"),
    "token": ("vanilla", "token-mean"),
    "constant": ("vanilla", "seq-mean-token-sum-norm"),
}


@dataclass(frozen=True)
class TrainerPaths:
    """What a trainer process needs besides the settings."""

    model: Path  # checkpoint folder; also the model name that the gateway and vLLM must share byte for byte
    folder: Path  # <run>/grpo
    gateway_url: str  # its key is not part of the config, which VERL prints and logs; see guarded_trainer.py


def compose(config: Config, paths: TrainerPaths) -> Any:
    """The complete, resolved OmegaConf config for `run_ppo`; raises UserError for keys that VERL does not know."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError

    # Found without importing the packages: Hydra's own `pkg://verl` imports torch, which takes seconds.
    packages = {name: importlib.util.find_spec(name) for name in ("agentlightning", "verl")}
    if missing := [name for name, spec in packages.items() if spec is None]:
        raise ModuleNotFoundError(f"No module named {missing[0]!r}", name=missing[0])
    agentlightning, verl = (Path(str(spec and spec.origin)).parent for spec in packages.values())
    with initialize_config_dir(config_dir=str(agentlightning / "verl"), version_base=None):
        search = f'hydra.searchpath=["file://{verl / "trainer" / "config"}"]'
        base = hydra_compose(config_name="config", overrides=[search])
    try:
        merged = OmegaConf.merge(base, overrides(config, paths))
    except ConfigKeyError as error:
        raise UserError(
            f"VERL does not know a setting that stage 2 sends ({' '.join(str(error).split())}); "
            "install the pinned requirements again."
        ) from error
    for key, value in additions(config).items():
        OmegaConf.update(merged, key, value, force_add=True)
    return merged


def overrides(config: Config, paths: TrainerPaths) -> dict[str, Any]:
    """Values for declared keys of the composed config."""
    grpo, job_template = config.grpo, config.grpo.job_template
    if job_template is not None:
        if not Path(job_template).is_file():
            raise UserError(
                f"Setting grpo.job_template names {job_template}, which does not exist; start from "
                "stage2_grpo/kubernetes/job.yaml."
            )
        job_template = str(Path(job_template).resolve())  # Ray's workers run in another folder
    wanted = {"tensorboard": config.logging.tensorboard, "wandb": config.logging.wandb}
    return {
        "algorithm": {
            "adv_estimator": "grpo",
            "use_kl_in_reward": False,
            "norm_adv_by_std_in_grpo": grpo.std_advantages,
            "rollout_correction": {
                "rollout_is": None if grpo.importance_cap is None else "token",
                "rollout_is_threshold": grpo.importance_cap or 2.0,
            },
        },
        "data": {
            "train_batch_size": grpo.train_batch_size,
            "max_prompt_length": config.agent.context_tokens,
            "max_response_length": config.agent.max_turn_tokens,
            "truncation": "error",
            "seed": config.seed,
            "dataloader_num_workers": 0,  # rows are in memory
        },
        "actor_rollout_ref": _actor_rollout(config, paths.model),
        "reward": {"num_workers": 1},  # VERL starts 8 (0.5 GB each); rewards come from our controller
        "trainer": {
            "nnodes": grpo.nodes,
            "n_gpus_per_node": grpo.gpus_per_node,
            "total_epochs": grpo.epochs,
            "total_training_steps": grpo.total_steps,
            "val_before_train": grpo.val_before_train,
            "test_freq": grpo.test_every,
            "save_freq": grpo.save_every,
            "max_actor_ckpt_to_keep": None,  # checkpoints/files.py keeps the newest, across attempts, and the best
            "default_local_dir": str(paths.folder / "checkpoints"),
            "resume_mode": "auto",
            "logger": ["console", "file", *(name for name, is_wanted in wanted.items() if is_wanted)],
            "project_name": "firstcall",
            "experiment_name": paths.folder.parent.name,
        },
        "agentlightning": {
            "agl_base_url": paths.gateway_url,
            "rollout_timeout_seconds": int(grpo.episode_timeout_seconds),
            # A lost episode must not skip a step: rows are floored to whole mini batches, and never more than these.
            "max_ppo_update_times": max(1, grpo.train_batch_size // grpo.mini_batch_size),
            "trace_aggregator": {
                "level": "trajectory",  # one row per episode as long as every prompt continues the previous turn
                "trajectory_max_prompt_length": config.agent.context_tokens,  # default 2048 drops longer prompts
                "trajectory_max_response_length": config.agent.context_tokens,  # rows are padded to the longest only
            },
            "local": {"agent_class": "stage2_grpo.rollouts.agent.SqlAgent"},
            "k8s": {"job_template_path": job_template},
        },
    }


def _actor_rollout(config: Config, model: Path) -> dict[str, Any]:
    grpo, vllm, on_gpu = config.grpo, config.vllm, config.device == "gpu"
    loss_mode, loss_agg_mode = _LOSSES[grpo.loss_average]
    return {
        "model": {
            "path": str(model),
            "lora_rank": grpo.lora_rank,
            "lora_alpha": grpo.lora_alpha,
            # In the default adapter mode, and with merge under fsdp2, vLLM silently keeps sampling the base model.
            "lora": {"merge": True},
            "use_remove_padding": False,
            "enable_gradient_checkpointing": grpo.gradient_checkpointing,
        },
        "actor": {
            "strategy": "fsdp",
            "ppo_mini_batch_size": grpo.mini_batch_size,
            "ppo_micro_batch_size_per_gpu": grpo.micro_batch_size,
            "use_kl_loss": False,
            "policy_loss": {"loss_mode": loss_mode},
            "loss_agg_mode": loss_agg_mode,
            # The constant of "constant"; without it VERL divides by the longest row of each micro batch.
            "loss_scale_factor": config.agent.context_tokens if grpo.loss_average == "constant" else None,
            "entropy_coeff": grpo.entropy_coeff,
            "clip_ratio_low": grpo.clip_low,
            "clip_ratio_high": grpo.clip_high,
            "use_torch_compile": on_gpu,  # compiling costs minutes on a CPU
            "optim": {"lr": grpo.learning_rate},
            "fsdp_config": {
                "param_offload": grpo.param_offload,
                "optimizer_offload": grpo.optimizer_offload,
                "use_torch_compile": on_gpu,
            },
        },
        "rollout": {
            "name": "vllm",
            "n": grpo.rollouts_per_question,
            "temperature": grpo.temperature,
            "tensor_model_parallel_size": vllm.tensor_parallel,
            "gpu_memory_utilization": vllm.gpu_memory_utilization,
            "enforce_eager": vllm.enforce_eager,
            "max_model_len": config.agent.context_tokens,
            "max_num_seqs": vllm.max_num_seqs,
            "log_prob_micro_batch_size_per_gpu": grpo.micro_batch_size,
            "multi_turn": {"format": "hermes"},
            "agent": {"num_workers": 1},  # VERL starts 8 agent loops; episodes run in our controller
            "free_cache_engine": on_gpu,  # vLLM's sleep mode exists on CUDA only
            "checkpoint_engine": {"update_weights_bucket_megabytes": grpo.weight_bucket_mb},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": grpo.micro_batch_size},
    }


def additions(config: Config) -> dict[str, Any]:
    """Keys that VERL, vLLM or Ray read without declaring them."""
    grpo, on_cpu = config.grpo, config.device == "cpu"
    engine, ray = "actor_rollout_ref.rollout.engine_kwargs.vllm", "ray_kwargs.ray_init"
    added: dict[str, Any] = {
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",  # the default needs flash_attn
        f"{engine}.enable_auto_tool_choice": True,
        f"{engine}.tool_call_parser": config.vllm.tool_call_parser,
        "agentlightning.local.env_map.FIRSTCALL_QUESTION": "input",
    }
    if not on_cpu and (backend := attention_backend(find_gpus())):
        added[f"{engine}.attention_backend"] = backend
    if config.vllm.num_gpu_blocks_override is not None:
        added[f"{engine}.num_gpu_blocks_override"] = config.vllm.num_gpu_blocks_override
    if on_cpu:
        added["actor_rollout_ref.rollout.enable_sleep_mode"] = False
    if grpo.ray_address is None:  # else ray_cluster.py has joined a cluster
        added[f"{ray}.include_dashboard"] = False
        added[f"{ray}.runtime_env.worker_process_setup_hook"] = HOOK
        if on_cpu:
            added[f"{ray}.num_gpus"] = grpo.gpus_per_node  # pretended; VERL schedules by them
            added[f"{ray}.num_cpus"] = (
                8 * grpo.gpus_per_node
            )  # VERL's actors ask for more slots than a laptop has cores
            added[f"{ray}.object_store_memory"] = 300 * 2**20
    return added
