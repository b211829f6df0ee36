"""LoRA supervised fine-tuning with TRL's SFTTrainer on tokenised traces; resumable, best checkpoint kept.

The examples carry their own labels, so TRL prepares nothing. Without gradient checkpointing the loss is that of
`shared_prefix`; with it (the GPU profile) TRL's own chunked loss. The adapter is kept in float32, the base weights in
`sft.dtype`, products run in bfloat16. Resuming from the newest complete checkpoint gives the same weights as an
uninterrupted run on the same machine. Limit: one process, one device.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each trainer it makes; read when hub is imported

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch.utils.data import Sampler, SequentialSampler
from tqdm import tqdm
from trl import SFTConfig, SFTTrainer

from shared.config.schema import Config
from shared.errors import UserError
from shared.runs.metrics_log import MetricsLog
from stage1_sft.dataset import Example
from stage1_sft.shared_prefix import token_loss

_CHECKPOINT_FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt")
_GROUPS = 8  # batches whose examples are sorted by length together


def train(
    base: Path, examples: Sequence[Example], val: Sequence[Example], config: Config, folder: Path
) -> tuple[Path, dict[str, float]]:
    """Fine-tune `base` on the examples; returns the folder of the best adapter and figures for the manifest.

    Checkpoints go to `folder`/checkpoints, metrics to `folder`/metrics.jsonl. Continues from the newest complete
    checkpoint there. Raises UserError when the loss is not finite or the profile's device is missing.
    """
    checkpoints, sft = folder / "checkpoints", config.sft
    resume = newest_checkpoint(checkpoints)
    lengths = [len(example["input_ids"]) for example in examples]
    order = batch_order(lengths, sft.batch_size, sft.epochs, config.seed)
    transformers.set_seed(config.seed)
    metrics = MetricsLog(folder, tensorboard=config.logging.tensorboard, wandb=config.logging.wandb)
    with metrics, tqdm(desc="SFT", unit="step") as bar:
        trainer = _Trainer(
            model=load_model(base, config),
            args=_arguments(config, checkpoints),
            train_dataset=Dataset.from_list([examples[i] for i in order]),
            eval_dataset=Dataset.from_list(sorted(val, key=lambda example: len(example["input_ids"]))),
            processing_class=transformers.AutoTokenizer.from_pretrained(base),
            callbacks=[_Watch(metrics, bar)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if resume:
            print(f"continuing from {resume.name}", flush=True)
        result = trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    best, loss = trainer.state.best_model_checkpoint, trainer.state.best_metric
    if best is None or loss is None or not math.isfinite(loss):
        raise UserError(
            f"Training diverged (no finite validation loss); lower sft.learning_rate ({sft.learning_rate:g}) and "
            f"delete {checkpoints}."
        )
    tokens, seconds = sum(lengths) * sft.epochs, result.metrics["train_runtime"]
    figures = {"eval_loss": round(loss, 4), "train_loss": round(result.training_loss, 4), "train_seconds": seconds}
    figures |= {"steps": trainer.state.global_step, "tokens": tokens}
    return Path(best), figures if resume else {**figures, "tokens_per_second": round(tokens / seconds, 1)}


def load_model(base: Path, config: Config) -> PeftModel:
    """The base in `sft.dtype` with a fresh adapter on every linear layer but the output head.

    PyTorch's attention keeps no table of queries by keys for the backward pass.
    """
    sft = config.sft
    if config.device == "gpu" and not torch.cuda.is_available():
        raise UserError(f"Profile {config.profile} needs a CUDA device and PyTorch sees none; use --profile cpu.")
    dtype = getattr(torch, sft.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="sdpa")
    size = {"r": sft.lora_rank, "lora_alpha": sft.lora_alpha, "lora_dropout": sft.lora_dropout}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **size))


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The last checkpoint that was written completely; incomplete ones are deleted."""
    newest = None
    for folder in sorted(checkpoints.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1])):
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))  # written after everything else
            complete = all((folder / name).exists() for name in _CHECKPOINT_FILES)
        except (FileNotFoundError, json.JSONDecodeError):
            complete = False
        if complete:
            newest = folder
        else:
            shutil.rmtree(folder)
    return newest


def batch_order(lengths: Sequence[int], batch_size: int, epochs: int, seed: int) -> list[int]:
    """Example numbers of all epochs, so that each batch holds like lengths; every epoch has another order.

    What fills no batch joins the next epoch, so only the very last batch can be short.
    """
    rng, order, rest = random.Random(seed), list[int](), list[int]()
    for _ in range(epochs):
        pool = list(range(len(lengths)))
        rng.shuffle(pool)
        batches: list[tuple[int, ...]] = []
        for group in itertools.batched(rest + pool, _GROUPS * batch_size):
            batches += itertools.batched(sorted(group, key=lambda i: lengths[i]), batch_size)
        rest = [*batches.pop()] if len(batches[-1]) < batch_size else []
        rng.shuffle(batches)
        order += itertools.chain.from_iterable(batches)
    return order + rest


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


def _arguments(config: Config, checkpoints: Path) -> SFTConfig:
    sft = config.sft
    return SFTConfig(
        output_dir=str(checkpoints),
        per_device_train_batch_size=sft.batch_size,
        per_device_eval_batch_size=sft.batch_size,
        gradient_accumulation_steps=sft.gradient_accumulation,
        num_train_epochs=1,  # `batch_order` lines up all epochs
        learning_rate=sft.learning_rate,
        lr_scheduler_type="cosine",
        warmup_ratio=sft.warmup_share,
        gradient_checkpointing=sft.gradient_checkpointing,
        bf16=sft.dtype == "bfloat16",
        use_cpu=config.device == "cpu",
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
        max_length=None,  # traces that are too long were dropped before
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=config.seed,
        report_to="none",  # MetricsLog reports
        disable_tqdm=True,
        dataloader_pin_memory=config.device == "gpu",
    )


class _Trainer(SFTTrainer):
    """SFTTrainer that takes the examples in their order and, without gradient checkpointing, the shared-prefix loss."""

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        return SequentialSampler(train_dataset or self.train_dataset)

    def compute_loss(
        self, model: PeftModel, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.args.gradient_checkpointing:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = adapter_loss(model, inputs["input_ids"], inputs["labels"], num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss


@dataclass
class _Watch(transformers.TrainerCallback):
    """Progress bar and metrics; also has the last step evaluated, so that the last checkpoint can be the best."""

    metrics: MetricsLog
    bar: tqdm[Any]

    def on_step_end(
        self, _: Any, state: transformers.TrainerState, control: transformers.TrainerControl, **__: Any
    ) -> None:
        control.should_evaluate |= state.global_step >= state.max_steps
        self.bar.total = state.max_steps
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, _: Any, state: transformers.TrainerState, __: Any, *, logs: dict[str, float], **___: Any) -> None:
        self.metrics.log(state.global_step, {f"sft/{key}": value for key, value in logs.items()})
        self.bar.set_postfix({key: f"{value:.3f}" for key, value in logs.items() if key.endswith("loss")})
