"""The settings tree: names and types of everything in pipeline.yaml, where each one's meaning stands beside its value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PROFILES = ("gpu", "cpu")


@dataclass(frozen=True)
class DataConfig:
    spider_dir: str | None
    bad_rows: Literal["fail", "skip"]
    avoid: str | None
    questions_per_database: int
    copies: int
    unseen_databases: int
    test_share: float
    val_share: float


@dataclass(frozen=True)
class SandboxConfig:
    timeout_seconds: float
    max_rows: int
    max_compare_rows: int
    max_result_bytes: int


@dataclass(frozen=True)
class AgentConfig:
    max_turns: int
    max_turn_tokens: int
    context_tokens: int
    observation_tokens: int


@dataclass(frozen=True)
class SftConfig:
    max_traces: int
    wrong_turn_share: float
    search_miss_share: float
    parallel_share: float
    lora_rank: int
    lora_alpha: int
    lora_dropout: float
    learning_rate: float
    warmup_share: float
    epochs: int
    batch_size: int
    gradient_accumulation: int
    max_length: int
    gradient_checkpointing: bool
    dtype: Literal["bfloat16", "float32"]
    eval_steps: int
    keep_checkpoints: int


@dataclass(frozen=True)
class TeacherConfig:
    endpoint: str | None
    model: str
    tries: int
    temperature: float
    concurrency: int
    prompt_price: float
    completion_price: float


@dataclass(frozen=True)
class GrpoConfig:
    model: str | None
    train_batch_size: int
    rollouts_per_question: int
    temperature: float
    max_prompt_length: int
    max_response_length: int
    trajectory_response_length: int
    mini_batch_size: int
    micro_batch_size: int
    max_token_len_per_gpu: int
    learning_rate: float
    clip_low: float
    clip_high: float
    entropy_coeff: float
    lora_rank: int
    lora_alpha: int
    param_offload: bool
    optimizer_offload: bool
    gradient_checkpointing: bool
    weight_bucket_mb: int
    epochs: int
    total_steps: int | None
    val_before_train: bool
    val_questions: int
    test_every: int
    save_every: int
    keep_checkpoints: int
    nodes: int
    gpus_per_node: int
    ray_address: str | None
    agent: str | None
    concurrency: int
    call_timeout_seconds: float
    episode_timeout_seconds: float
    step_timeout_seconds: float
    gateway_url: str | None
    job_template: str | None
    sync_tolerance: float
    reward_valid_call: float
    reward_executed: float
    reward_right_tables: float
    binary_groups: bool


@dataclass(frozen=True)
class GateConfig:
    questions: int
    samples: int
    min_pass: float
    min_mixed: float
    min_tool_calls: float
    min_turns: float
    flat_share: float


@dataclass(frozen=True)
class SafetyConfig:
    patience: int
    window: int
    entropy_share: float
    length_factor: float
    tool_call_share: float
    changed: Literal["refuse", "continue", "restart"]


@dataclass(frozen=True)
class VllmConfig:
    tool_call_parser: Literal["qwen25_coder", "hermes"]
    tensor_parallel: int
    gpu_memory_utilization: float
    enforce_eager: bool
    max_model_len: int
    max_num_seqs: int
    num_gpu_blocks_override: int | None
    cpu_kv_cache_gib: int
    start_timeout_seconds: float


@dataclass(frozen=True)
class EvaluateConfig:
    questions: int
    samples: int
    concurrency: int
    temperature: float
    bootstrap_samples: int


@dataclass(frozen=True)
class LoggingConfig:
    tensorboard: bool
    wandb: bool


@dataclass(frozen=True)
class Config:
    """All settings of one run; `profile` is the device the values were resolved for."""

    profile: Literal["gpu", "cpu"]
    model: str
    seed: int
    runs_dir: str
    data: DataConfig
    sandbox: SandboxConfig
    agent: AgentConfig
    sft: SftConfig
    teacher: TeacherConfig
    grpo: GrpoConfig
    gate: GateConfig
    safety: SafetyConfig
    vllm: VllmConfig
    evaluate: EvaluateConfig
    logging: LoggingConfig
