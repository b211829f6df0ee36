"""What stage 2 starts from: the checkpoint, the user's agent and the number of steps that the questions make."""

from __future__ import annotations

import math
import os
from pathlib import Path

from shared.agent.tools import load_function
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.folder import check_model_folder, local_path
from shared.runs import manifest as runs
from shared.runs.manifest import RunDirectory

SMALLEST = 4  # questions that may fill a batch smaller than grpo.train_batch_size


def starting_model(config: Config, run: RunDirectory) -> Path:
    """The checkpoint to start from; raises UserError when there is none or it is an unmerged adapter."""
    if named := os.environ.get("SFT_MODEL_PATH"):
        source = "SFT_MODEL_PATH"
    elif named := config.grpo.model:
        source = "grpo.model"
    else:
        named, source = newest_stage1(run), "the newest finished stage 1"
    folder = local_path(named, source).resolve()
    check_model_folder(folder, source)
    return folder


def newest_stage1(run: RunDirectory) -> str:
    """Merged checkpoint of this run's stage 1, else of the newest finished one beside it."""
    others = sorted(run.path.parent.glob(f"*/sft/{runs.MANIFEST}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for folder in [run.sft, *(file.parent for file in others)]:
        if manifest := runs.read_manifest(folder):
            return str(manifest["outputs"]["model"])
    raise UserError("Stage 2 has no checkpoint to start from: run `python -m stage1_sft` first, or set SFT_MODEL_PATH.")


def planned_model(config: Config, run: RunDirectory) -> tuple[Path, bool]:
    """What the settings name and is there: the checkpoint of this run (True), else its base model (False).

    Unlike `starting_model` never another run's checkpoint, nor one of another base model. Raises UserError for neither.
    """
    manifest = runs.read_manifest(run.sft)
    made_here = manifest is not None and manifest.get("model_setting", config.model) == config.model
    if os.environ.get("SFT_MODEL_PATH") or config.grpo.model or made_here:
        return starting_model(config, run), True
    for folder in (local_path(config.model), runs.model_cache(config) / config.model):
        if folder.is_dir():
            return folder.resolve(), False

    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(config.model, local_files_only=True)), False
    except (OSError, ValueError):  # not in the hub's cache; no hub id
        raise UserError(
            f"{run.sft} holds no checkpoint of {config.model} yet, and the model is not on this machine either; run "
            "`python -m stage1_sft`, which fetches it, or name a folder."
        ) from None


def refuse_missing_agent(config: Config) -> None:
    """Raise UserError for a grpo.agent that cannot be loaded, before the gate is played."""
    if config.grpo.agent and not config.grpo.gateway_url:
        load_function("grpo.agent", config.grpo.agent)


def fit_to_questions(config: Config, questions: int) -> Config:
    """The settings with a batch and epochs that fit few questions; grpo.total_steps holds, over more epochs if need be.

    Raises UserError when fewer than SMALLEST questions do not fill a batch.
    """
    grpo = config.grpo
    batch = min(grpo.train_batch_size, questions)
    if batch < min(grpo.train_batch_size, SMALLEST):
        raise UserError(
            f"{questions} training questions do not fill one batch (grpo.train_batch_size {grpo.train_batch_size}); "
            f"GRPO needs at least {SMALLEST}: bring more questions or lower the batch."
        )
    mini = grpo.mini_batch_size if batch == grpo.train_batch_size else min(grpo.mini_batch_size, batch // 2)
    oversample = min(grpo.oversample, questions // batch)
    epochs = max(grpo.epochs, math.ceil((grpo.total_steps or 0) / (questions // (batch * oversample))))
    sizes = {
        "train_batch_size": batch,
        "mini_batch_size": mini,
        "micro_batch_size": math.gcd(grpo.micro_batch_size, mini * grpo.rollouts_per_question),
        "epochs": epochs,
        "oversample": oversample,
    }
    return config.model_copy(update={"grpo": grpo.model_copy(update=sizes)})


def fitted(config: Config, fit: Config) -> str:
    """What `fit_to_questions` changed, as `grpo.epochs 1 -> 4`; "" for nothing."""
    names = ("train_batch_size", "oversample", "mini_batch_size", "micro_batch_size", "epochs")
    pairs = [(name, getattr(config.grpo, name), getattr(fit.grpo, name)) for name in names]
    return ", ".join(f"grpo.{name} {old} -> {new}" for name, old, new in pairs if old != new)


def total_steps(config: Config, questions: int) -> int:
    """Steps of the whole training, with settings from `fit_to_questions`."""
    grpo = config.grpo
    return grpo.total_steps or questions // (grpo.train_batch_size * grpo.oversample) * grpo.epochs
