"""Every setting of the pipeline: its type, its bounds, its meaning and the stages whose result it shapes.

The values stand in pipeline.yaml, beside comments that `python -m shared.config` copies from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from shared.config.device import Profile, device_of
from shared.errors import UserError

Stage = Literal["data", "teacher", "sft", "grpo", "evaluation"]


class PartOf:
    """Marks a setting that shapes the results of these stages; on a section: all its settings without an own mark."""

    def __init__(self, *stages: Stage) -> None:
        self.stages = stages


OPERATIONAL = PartOf()  # how fast or how patiently a stage works, not what comes out

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
Number = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=10**6)]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(pattern=r"\S")]
OptionalText = Annotated[str | None, Field(pattern=r"\S")]
ADDRESS = r"^https?://([\w.-]+|\[[0-9a-f:]+\])(:\d{1,5})?(/\S*)?$"


def check_address(option: str, url: str) -> None:
    """Raise UserError unless `url`, the value of a command's option, can be the address of an endpoint."""
    if not re.fullmatch(ADDRESS, url):
        raise UserError(f"{option} {url!r} is not an address like http://127.0.0.1:8000/v1; correct it.")


class Section(BaseModel):
    """Settings that stand together; an unknown key or a value of another type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def settings(cls, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
        """The dotted name and the field of each setting."""
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                yield from field.annotation.settings(f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", field

    def part_of(self, stage: Stage, inherited: PartOf = OPERATIONAL) -> dict[str, Any]:
        """The values of the settings that shape the result of `stage`, nested like the settings themselves."""
        part: dict[str, Any] = {}
        plain = self.model_dump()
        for name, field in type(self).model_fields.items():
            mark = next((mark for mark in field.metadata if isinstance(mark, PartOf)), inherited)
            value = getattr(self, name)
            if isinstance(value, Section):
                part |= {name: inner} if (inner := value.part_of(stage, mark)) else {}
            elif stage in mark.stages:
                part[name] = plain[name]
        return part


class DataSource(Section):
    """One source of questions."""

    path: Text  # a folder or question file that `data import` reads, or "demo"
    use: Literal["split", "train", "test", "avoid"] = "split"  # train: validation too; avoid: kept out of training
    weight: float | None = Field(default=None, gt=0)  # relative share of the training questions; None = all of them


def _listed(value: Any) -> Any:
    """A lone text as the list that it stands for, and lists as tuples."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _as_sources(value: Any) -> Any:
    listed = _listed(value)
    return tuple({"path": each} if isinstance(each, str) else each for each in listed) if listed is not value else value


class DataConfig(Section):
    """Databases and questions."""

    sources: Annotated[tuple[DataSource, ...], BeforeValidator(_as_sources)] = Field(
        min_length=1,
        examples=[
            "demo, a path, or a list like [demo, {path: my.csv, use: test, weight: 2}]; use: split, train, test, avoid"
        ],
        description="demo, or data sets that `data import` reads, each with its use and weight (docs/your-data.md)",
    )
    bad_rows: Literal["fail", "skip"] = Field(
        description="rows without gold, with failing gold or missing database: fail | skip (skipped rows are listed)"
    )
    questions_per_database: Positive = Field(description="of the demo databases")
    copies: Count = Field(
        le=100, description="perturbed copies of each database on which a rewarded answer must also agree; 0 = none"
    )
    unseen_databases: Annotated[Count | tuple[Text, ...], BeforeValidator(_listed)] = Field(
        examples=["a number or a list of names like [shop, school]"],
        description="databases kept out of training: names, or a number (at most a third of databases and questions)",
    )
    test_share: Share = Field(description="share of the questions of each seen database")
    val_share: Share = Field(description="share of the questions of each seen database")

    @model_validator(mode="after")
    def _leave_training_questions(self) -> Self:
        paths = [source.path for source in self.sources]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            raise UserError(f"Setting data.sources names {twice} twice; keep one of them.")
        if self.test_share + self.val_share >= 1:
            raise UserError(
                "data.test_share and data.val_share leave no question to train on; their sum must be below 1."
            )
        return self


class SandboxConfig(Section):
    """Limits of one SQL statement."""

    timeout_seconds: Seconds = Field(description="a statement that takes longer is ended")
    max_rows: Positive = Field(description="rows fetched for the model; comparisons fetch up to max_compare_rows")
    max_compare_rows: Positive = Field(description="rows compared with the gold's; a longer result counts as wrong")
    max_result_bytes: Positive = Field(description="bytes of all cells of a result")


class AgentConfig(Section):
    """One episode; the same limits in synthesis, RL and evaluation."""

    max_turns: Positive = Field(description="model turns, the final answer included")
    max_turn_tokens: Positive = Field(description="tokens the model may write in one turn")
    context_tokens: Positive = Field(
        description="prompt and answer of the last turn; also the limit of the server, of a trace and of a training row"
    )
    observation_tokens: Positive = Field(description="a tool's answer is cut beyond this, and says so")
    tools: str | None = Field(
        pattern=r"^[\w.]+:\w+(, ?[\w.]+:\w+)*$",
        examples=["module:function, several with a comma between"],
        description="own tools as module:function, several with a comma between (docs/use.md); null = none",
    )


class SftConfig(Section):
    """Stage 1: traces and LoRA training."""

    max_traces: Positive = Field(
        description="traces; at most one per training question, chosen so that forms and databases are balanced"
    )
    wrong_turn_share: Share = Field(
        description="share of traces with a plausible mistake and its fix; the mistake is not trained"
    )
    search_miss_share: Share = Field(description="share of traces whose first schema search finds nothing useful")
    parallel_share: float = Field(
        ge=0, le=1, description="share of multi-table traces that ask for all columns in one turn"
    )
    lora_rank: Positive = Field(description="adapters on every linear layer")
    lora_alpha: Positive = Field(description="the adapter's output is scaled by alpha / rank")
    lora_dropout: Share = Field(description="share of the adapter's inputs that are dropped")
    learning_rate: PositiveNumber = Field(description="peak; cosine decay after the warm-up")
    warmup_share: Share = Field(description="share of all steps")
    epochs: Positive = Field(le=1000, description="passes over the traces")
    batch_size: Positive = Field(description="sequences per optimizer step and device")
    gradient_accumulation: Positive = Field(description="batches per optimizer step")
    gradient_checkpointing: bool = Field(description="recompute activations: less memory, a third slower")
    dtype: Literal["bfloat16", "float32"] = Field(
        description="of the base weights: bfloat16 | float32; the adapter is float32"
    )
    eval_steps: Positive = Field(description="steps between validations and between checkpoints")
    keep_checkpoints: Positive = Field(description="the newest; the best is kept as well")
    rounds: Count = Field(
        le=100,
        description="self-taught rounds: right episodes of the model on its training questions replace their traces",
    )
    round_samples: Positive = Field(
        le=1000, description="episodes per question and round, at teacher.temperature; the shortest right one is taught"
    )
    round_questions: int | None = Field(gt=0, description="the first of those with a trace; null = all")


class TeacherConfig(Section):
    """A stronger model that plays the training questions; stage 1 teaches what the judge accepts."""

    endpoint: Annotated[str | None, PartOf("teacher", "sft")] = Field(
        pattern=ADDRESS,
        examples=["an address like http://127.0.0.1:8000/v1"],
        description="OpenAI-compatible, ending in /v1 (its key in FIRSTCALL_API_KEY); null = synthesised traces only",
    )
    model: Annotated[Text, PartOf("teacher", "sft")] = Field(
        description="name to ask the endpoint for; auto = the only one it serves"
    )
    tries: Positive = Field(
        le=1000, description="episodes per question until one is accepted; if none is, the trace is synthesised"
    )
    temperature: Annotated[Number, PartOf("teacher", "sft")] = Field(description="sampling temperature")
    concurrency: Annotated[Positive, OPERATIONAL] = Field(description="episodes in flight")
    prompt_price: Annotated[Number, OPERATIONAL] = Field(
        description="per million prompt tokens, in your currency; with both prices 0 no cost is shown"
    )
    completion_price: Annotated[Number, OPERATIONAL] = Field(description="per million completion tokens")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """The price of these tokens, in the currency of the prices."""
        return round((prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6, 6)


class GrpoConfig(Section):
    """Stage 2: GRPO with rollouts of the real agent."""

    model: Annotated[OptionalText, OPERATIONAL] = Field(
        description="checkpoint folder to start from; null = the newest finished stage 1. SFT_MODEL_PATH wins"
    )
    train_batch_size: Positive = Field(description="questions per step that train")
    oversample: Positive = Field(
        description="questions played for each one that trains; mixed groups come first, discarded groups are counted"
    )
    rollouts_per_question: int = Field(
        ge=2, description="episodes that GRPO compares; with 2, most groups have identical outcomes and teach nothing"
    )
    temperature: PositiveNumber = Field(description="sampling temperature of the rollouts; validation is greedy")
    mini_batch_size: Positive = Field(
        description="questions per optimizer step; half the batch, because with 8 of 8 one lost episode skips the step"
    )
    micro_batch_size: Positive = Field(description="training rows per forward and backward pass")
    learning_rate: PositiveNumber = Field(description="constant")
    clip_low: Number = Field(description="the policy ratio is clipped to [1 - clip_low, 1 + clip_high]")
    clip_high: Number = Field(description="see clip_low")
    entropy_coeff: Number = Field(description="weight of the entropy bonus")
    std_advantages: bool = Field(description="divide a group's advantages by the standard deviation of its rewards")
    loss_average: Literal["episode", "token", "constant"] = Field(
        description="what counts alike in the loss: every episode, every token, or every token over a constant length"
    )
    rollout_log_probs: bool = Field(
        description="take the old log-probabilities from the rollout server, which saves a pass; needs temperature 1.0"
    )
    importance_cap: float | None = Field(
        gt=0,
        description="cap of a token's importance weight, trainer / server (truncated sampling); null = no weight",
    )
    lora_rank: Count = Field(description="0 trains all weights")
    lora_alpha: Positive = Field(description="the adapter's output is scaled by alpha / rank")
    param_offload: bool = Field(description="weights wait in CPU memory while vLLM generates")
    optimizer_offload: bool = Field(description="the optimizer state waits there, too")
    gradient_checkpointing: bool = Field(description="recompute activations: less memory, slower")
    weight_bucket_mb: Positive = Field(description="must hold the largest tensor (the embedding, in bfloat16)")
    epochs: Positive = Field(le=1000, description="passes over the training questions")
    total_steps: int | None = Field(gt=0, description="null = all steps of all epochs")
    val_before_train: bool = Field(description="one validation before the first step")
    val_questions: Positive = Field(description="the first of the validation split")
    test_every: int = Field(
        ge=-1, description="steps between validations, a multiple of save_every so that the best is saved; -1 = none"
    )
    save_every: Annotated[Positive, OPERATIONAL] = Field(description="steps; the last step is always saved")
    keep_checkpoints: Annotated[Positive, OPERATIONAL] = Field(
        description="the newest; also kept: the best by validation, and two to roll back to when a tripwire fires"
    )
    nodes: Positive = Field(description="machines; more than 1 needs ray_address")
    gpus_per_node: Positive = Field(
        description="every vllm.tensor_parallel GPUs of all machines make one rollout server"
    )
    ray_address: Annotated[str | None, OPERATIONAL] = Field(
        pattern=r"^\S+:\d{1,5}$",
        examples=["host:port of the cluster's head node"],
        description="host:port of a running Ray cluster that includes this machine; null = the run starts its own Ray",
    )
    agent: str | None = Field(
        pattern=r"^[\w.]+:\w+$",
        examples=["module:function"],
        description="module:function that replaces the built-in episode loop (stage2_grpo/rollouts/custom_agent.py)",
    )
    concurrency: Annotated[Positive, OPERATIONAL] = Field(description="episodes in flight")
    call_timeout_seconds: Annotated[Seconds, OPERATIONAL] = Field(
        description="for one request to the model, which is retried three times"
    )
    episode_timeout_seconds: Annotated[Seconds, OPERATIONAL] = Field(
        description="an episode that takes longer is lost, not wrong"
    )
    step_timeout_seconds: Annotated[Seconds, OPERATIONAL] = Field(
        description="then the remaining episodes of the step are lost"
    )
    gateway_url: Annotated[str | None, OPERATIONAL] = Field(
        pattern=ADDRESS,
        examples=["an address like http://gateway:8080"],
        description="a gateway with its controller elsewhere, AGL_KEY in the environment; null = both start here",
    )
    job_template: Annotated[OptionalText, OPERATIONAL] = Field(
        description="Kubernetes Job of one episode, for Agent Lightning's own controller (stage2_grpo/kubernetes)"
    )
    sync_tolerance: Annotated[Number, OPERATIONAL] = Field(
        description="largest mean |logprob| gap of server and trainer on the probe text, "
        "or 3 x the gap before the first step if that is more"
    )
    reward_valid_call: Annotated[Number, PartOf("grpo", "evaluation")] = Field(
        description="dense reward for valid calls; a correct answer gives 1.0, the dense rewards together less than 0.5"
    )
    reward_executed: Annotated[Number, PartOf("grpo", "evaluation")] = Field(
        description="dense reward for a query that ran"
    )
    reward_right_tables: Annotated[Number, PartOf("grpo", "evaluation")] = Field(
        description="dense reward for the overlap with the gold's tables"
    )
    reward_right_result: Annotated[Number, PartOf("grpo", "evaluation")] = Field(
        description="dense reward for the overlap of a wrong result with the gold's columns, rows and cells; 0 = off"
    )
    binary_groups: bool = Field(
        description="groups that are all right or all wrong are excluded from the update, whatever their dense rewards"
    )

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        rows = self.mini_batch_size * self.rollouts_per_question
        if rows % self.micro_batch_size:
            raise UserError(
                f"Setting grpo.micro_batch_size ({self.micro_batch_size}) must divide the rows of a mini batch "
                f"(grpo.mini_batch_size x grpo.rollouts_per_question = {rows})."
            )
        if self.mini_batch_size > self.train_batch_size:
            raise UserError(
                f"Setting grpo.mini_batch_size ({self.mini_batch_size}) exceeds grpo.train_batch_size "
                f"({self.train_batch_size}), so every step would be skipped; lower it."
            )
        if self.rollout_log_probs and (self.temperature != 1.0 or self.importance_cap is not None):
            raise UserError(
                "Setting grpo.rollout_log_probs needs grpo.temperature 1.0, because the server reports "
                "log-probabilities at that temperature, and no grpo.importance_cap, which corrects log-probabilities "
                "of the trainer; set it to false."
            )
        if self.test_every > 0 and self.test_every % self.save_every:
            raise UserError(
                f"Setting grpo.test_every ({self.test_every}) must be a multiple of grpo.save_every "
                f"({self.save_every}): only a saved step can be kept and exported as the best by validation."
            )
        return self

    @model_validator(mode="after")
    def _check_rest(self) -> Self:
        if self.nodes > 1 and not self.ray_address:
            raise UserError(
                f"Setting grpo.nodes is {self.nodes}, but without grpo.ray_address the run's own Ray has this machine "
                "alone; start a Ray cluster and give its address as grpo.ray_address."
            )
        if self.job_template and not self.gateway_url:
            raise UserError(
                "Setting grpo.job_template needs grpo.gateway_url: the jobs of a cluster cannot reach a gateway on "
                "the loopback address."
            )
        dense = (self.reward_valid_call, self.reward_executed, self.reward_right_tables, self.reward_right_result)
        if sum(dense) >= 0.5:
            raise UserError(
                "The dense rewards grpo.reward_* add up to 0.5 or more; they must stay below half a correct answer."
            )
        return self


class GateConfig(Section):
    """Before GRPO the start model plays training questions as the rollouts will; not ready = stop."""

    questions: Count = Field(description="the first of the training split; 0 = no gate, as in the cpu profile")
    samples: Positive = Field(le=1000, description="episodes per question, at grpo.temperature")
    min_pass: Annotated[Share, OPERATIONAL] = Field(
        description="pass@samples: share of questions with at least one correct episode"
    )
    min_mixed: Annotated[Share, OPERATIONAL] = Field(
        description="share of questions with correct and wrong episodes, the only ones that GRPO learns from"
    )
    min_tool_calls: Annotated[Share, OPERATIONAL] = Field(
        description="share of episodes with a call that the stock Hermes grammar reads"
    )
    min_turns: Annotated[Number, OPERATIONAL] = Field(description="mean turns of an episode")
    flat_share: Share = Field(description="largest share of training questions that the probe always or never solved")

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.questions and self.samples < 2:
            raise UserError(
                f"Setting gate.samples is {self.samples}; a mixed group needs at least 2 samples of a question, or "
                "set gate.questions to 0 to do without the gate."
            )
        return self


class SafetyConfig(Section):
    """A run that goes wrong or no longer improves ends with its last good checkpoint kept."""

    patience: Count = Field(
        description="validations without a better one until the run ends and exports its best; 0 = never"
    )
    window: Count = Field(
        description="steps: the tripwires compare the last `window` steps with the first; 0 = only NaN stops"
    )
    entropy_share: Share = Field(description="stop when the entropy falls below this share of the first steps'")
    length_factor: PositiveNumber = Field(
        description="stop when the episodes grow to this many times the first steps' tokens"
    )
    tool_call_share: Share = Field(
        description="stop when the tool-call rate falls below this share of the first steps'"
    )
    changed: Literal["refuse", "continue", "restart"] = Field(
        description="data or settings that differ from an interrupted run's: refuse | continue | restart"
    )


class VllmConfig(Section):
    """The rollout and evaluation server."""

    tool_call_parser: Annotated[Literal["qwen25_coder", "hermes"], PartOf("grpo", "evaluation")] = Field(
        description="vLLM's tool-call parser: qwen25_coder | hermes"
    )
    tensor_parallel: Positive = Field(description="GPUs per server")
    gpu_memory_utilization: Annotated[Share, OPERATIONAL] = Field(
        description="share of the GPU's memory for weights and KV cache"
    )
    enforce_eager: bool = Field(description="no CUDA graphs and no compilation: the server starts faster")
    max_num_seqs: Positive = Field(description="requests decoded together")
    num_gpu_blocks_override: Annotated[int | None, OPERATIONAL] = Field(
        gt=0, description="KV-cache blocks; null = what fits"
    )
    cpu_kv_cache_gib: Annotated[Positive, OPERATIONAL] = Field(description="GiB of KV cache; CPU only")
    start_timeout_seconds: Annotated[Seconds, OPERATIONAL] = Field(
        description="the server must answer within this time"
    )


class EvaluateConfig(Section):
    """Playing and judging the test questions."""

    questions: Annotated[Positive, OPERATIONAL] = Field(
        description="at most; of the test split, the same ones for every model"
    )
    samples: Positive = Field(
        le=1000,
        description="episodes per question; from 2 on also mean@k, pass@k, majority vote; needs a temperature above 0",
    )
    concurrency: Annotated[Positive, OPERATIONAL] = Field(description="episodes in flight")
    temperature: Number = Field(description="0 = greedy")
    bootstrap_samples: Positive = Field(description="resamples for the 95 % intervals")


class LoggingConfig(Section):
    """Where the figures of training go besides the run directory."""

    tensorboard: bool = Field(description="event files in the run directory")
    wandb: bool = Field(description="needs WANDB_API_KEY")


class Config(Section):
    """All settings of one run."""

    profile: Annotated[Profile, PartOf("grpo")] = Field(description="the device that the values were resolved for")
    model: Annotated[Text, PartOf("sft")] = Field(
        description="hub id, local folder, or `smollm2-135m` (comes with the environment, no hub)"
    )
    seed: Annotated[Count, PartOf("data", "sft", "grpo", "evaluation")] = Field(
        le=2**32 - 1, description="of the data, the traces, the training order and the sampling server"
    )
    runs_dir: Text = Field(description="every run writes under <runs_dir>/<run name>")
    data: Annotated[DataConfig, PartOf("data")]
    sandbox: Annotated[SandboxConfig, PartOf("data", "teacher", "sft", "grpo", "evaluation")]
    agent: Annotated[AgentConfig, PartOf("teacher", "sft", "grpo", "evaluation")]
    sft: Annotated[SftConfig, PartOf("sft")]
    teacher: Annotated[TeacherConfig, PartOf("sft")]
    grpo: Annotated[GrpoConfig, PartOf("grpo")]
    gate: Annotated[GateConfig, PartOf("grpo")]
    safety: SafetyConfig
    vllm: Annotated[VllmConfig, PartOf("grpo")]
    evaluate: Annotated[EvaluateConfig, PartOf("evaluation")]
    logging: LoggingConfig

    @property
    def device(self) -> str:
        """`gpu` or `cpu`."""
        return device_of(self.profile)

    @model_validator(mode="after")
    def _check_sections_together(self) -> Self:
        gpus = self.grpo.nodes * self.grpo.gpus_per_node
        if gpus % self.vllm.tensor_parallel:
            raise UserError(
                f"Setting vllm.tensor_parallel ({self.vllm.tensor_parallel}) must divide all GPUs (grpo.nodes x "
                f"grpo.gpus_per_node = {gpus}): that many rollout servers share them."
            )
        return self
