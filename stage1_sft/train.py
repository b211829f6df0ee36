"""LoRA supervised fine-tuning with TRL's SFTTrainer on tokenised traces; resumable, best checkpoint kept.

The examples carry their own labels, so TRL prepares nothing. Where no gradient checkpointing is asked for, the loss is
that of `shared_prefix`; else TRL's own chunked loss runs (the GPU profile). The adapter is kept in float32, the base
weights in `sft.dtype`, products run in bfloat16. Resuming from the newest complete checkpoint gives the same weights as
an uninterrupted run on the same machine. Limit: one process, one device.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each trainer it makes; read when hub is imported

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from peft.helpers import disable_input_dtype_casting
from torch.utils.data import Sampler
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from shared.config.schema import Config
from shared.errors import UserError
from shared.runs.metrics_log import MetricsLog
from stage1_sft.dataset import Example
from stage1_sft.shared_prefix import CPU_ATTENTION, token_loss

_CHECKPOINT_FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt")
_GROUPS = 8  # batches whose examples are sorted by length together


@dataclass(frozen=True)
class Trained:
    """What a training left: the folder of the best adapter, and figures for the manifest."""

    adapter: Path
    figures: dict[str, float]


def train(base: Path, examples: Sequence[Example], val: Sequence[Example], config: Config, folder: Path) -> Trained:
    """Fine-tune `base` on the examples; checkpoints go to `folder`/checkpoints, figures to `folder`/metrics.jsonl.

    Continues from the newest complete checkpoint there. Raises UserError when the loss is not finite or the profile's
    device is missing.
    """
    checkpoints = folder / "checkpoints"
    resume = newest_checkpoint(checkpoints)
    set_seed(config.seed)
    with MetricsLog(folder, tensorboard=config.logging.tensorboard, wandb=config.logging.wandb) as log:
        trainer = _Trainer(
            model=load_base(base, config),
            args=_arguments(config, checkpoints),
            train_dataset=Dataset.from_list(list(examples)),
            eval_dataset=Dataset.from_list(sorted(val, key=lambda example: len(example["input_ids"]))),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=lora_config(config),
            callbacks=[_Watch(log)],
        )
        trainer.remove_callback(PrinterCallback)
        if resume:
            print(f"continuing from {resume.name}", flush=True)
        result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    best = trainer.state.best_model_checkpoint
    loss = trainer.state.best_metric
    if best is None or loss is None or not math.isfinite(loss):
        raise UserError(
            f"Training diverged (no finite validation loss); lower sft.learning_rate ({config.sft.learning_rate:g}) and "
            f"delete {checkpoints}."
        )
    tokens = sum(len(example["input_ids"]) for example in examples) * config.sft.epochs
    seconds = result.metrics["train_runtime"]
    figures = {"eval_loss": round(loss, 4), "train_loss": round(result.training_loss, 4), "train_seconds": seconds}
    figures |= {"steps": trainer.state.global_step, "tokens": tokens}
    if not resume:
        figures["tokens_per_second"] = round(tokens / seconds, 1)
    return Trained(Path(best), figures)


def load_base(base: Path, config: Config, attention: str | None = None) -> PreTrainedModel:
    """The model to fine-tune, in `sft.dtype`; by default with the attention that trains fastest on the device."""
    if config.profile == "gpu" and not torch.cuda.is_available():
        raise UserError("Profile gpu needs a CUDA device and PyTorch sees none; use --profile cpu.")
    plain = config.profile == "gpu" or config.sft.gradient_checkpointing
    attention = attention or ("sdpa" if plain else CPU_ATTENTION)
    return AutoModelForCausalLM.from_pretrained(
        base, dtype=getattr(torch, config.sft.dtype), attn_implementation=attention
    )


def lora_config(config: Config) -> LoraConfig:
    """An adapter on every linear layer but the output head."""
    sft = config.sft
    return LoraConfig(
        r=sft.lora_rank,
        lora_alpha=sft.lora_alpha,
        lora_dropout=sft.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The last checkpoint that was written to its end; half-written ones are deleted."""
    found = sorted(checkpoints.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    complete = [folder for folder in found if _is_complete(folder)]
    for folder in found:
        if folder not in complete:
            shutil.rmtree(folder)
    return complete[-1] if complete else None


def _is_complete(checkpoint: Path) -> bool:
    """transformers writes trainer_state.json after everything else."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return all((checkpoint / name).exists() for name in _CHECKPOINT_FILES)


def _arguments(config: Config, checkpoints: Path) -> SFTConfig:
    sft = config.sft
    return SFTConfig(
        output_dir=str(checkpoints),
        per_device_train_batch_size=sft.batch_size,
        per_device_eval_batch_size=sft.batch_size,
        gradient_accumulation_steps=sft.gradient_accumulation,
        num_train_epochs=sft.epochs,
        learning_rate=sft.learning_rate,
        lr_scheduler_type="cosine",
        warmup_ratio=sft.warmup_share,
        gradient_checkpointing=sft.gradient_checkpointing,
        bf16=sft.dtype == "bfloat16",
        use_cpu=config.profile == "cpu",
        eval_strategy="steps",
        eval_steps=sft.eval_steps,
        save_strategy="steps",
        save_steps=sft.eval_steps,
        save_total_limit=sft.keep_checkpoints + 1,  # and the best one
        load_best_model_at_end=True,
        prediction_loss_only=True,
        logging_steps=1,
        logging_nan_inf_filter=False,
        loss_type="chunked_nll",
        max_length=None,  # too long traces were dropped before
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=config.seed,
        report_to="none",  # MetricsLog reports
        disable_tqdm=True,
        dataloader_pin_memory=config.profile == "gpu",
    )


class _Trainer(SFTTrainer):
    """SFTTrainer with batches of like lengths and, without gradient checkpointing, the shared-prefix loss."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        lengths = [len(ids) for ids in (train_dataset or self.train_dataset)["input_ids"]]
        return LengthGroups(lengths, self.args.train_batch_size, self.args.seed)

    def compute_loss(
        self, model: PeftModel, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.args.gradient_checkpointing:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = adapter_loss(model, inputs["input_ids"], inputs["labels"], num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss


def adapter_loss(
    model: PeftModel, input_ids: torch.Tensor, labels: torch.Tensor, tokens: torch.Tensor | int | None = None
) -> torch.Tensor:
    """`token_loss` of the adapted model, with products in the base's dtype.

    Autocast rounds the float32 adapter for each product; PEFT on its own would widen every input to float32 instead.
    """
    base = model.get_base_model()
    with contextlib.ExitStack() as stack:
        if base.dtype == torch.bfloat16:
            stack.enter_context(torch.autocast(input_ids.device.type, torch.bfloat16))
            stack.enter_context(disable_input_dtype_casting(model))
        return token_loss(base, input_ids, labels, tokens)


class LengthGroups(Sampler[int]):
    """Example numbers in batches of like length; another order each epoch, always the same under one seed."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch, also when resuming."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        rng, size = random.Random(f"{self._seed} {self._epoch}"), self._batch_size
        order = list(range(len(self._lengths)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for start in range(0, len(order), _GROUPS * size):
            group = sorted(order[start : start + _GROUPS * size], key=lambda i: self._lengths[i])
            batches += [group[first : first + size] for first in range(0, len(group), size)]
        short = [batch for batch in batches if len(batch) < size]
        full = [batch for batch in batches if len(batch) == size]
        rng.shuffle(full)
        for batch in full + short:  # a short batch between full ones would shift all later ones
            yield from batch


class _Watch(TrainerCallback):
    """Progress bar and metrics; also has the last step evaluated, so that the last checkpoint can be the best."""

    def __init__(self, log: MetricsLog) -> None:
        self._log = log
        self._bar: tqdm[Any] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar = tqdm(total=state.max_steps, initial=state.global_step, desc="SFT", unit="step")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True
        if self._bar:
            self._bar.update()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        figures = {f"sft/{key}": value for key, value in (logs or {}).items()}
        self._log.log(state.global_step, figures)
        if self._bar and logs:
            self._bar.set_postfix({key: f"{value:.3f}" for key, value in logs.items() if key.endswith("loss")})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar:
            self._bar.close()
