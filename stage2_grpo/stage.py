"""Stage 2: GRPO from the stage-1 checkpoint, through Agent Lightning, VERL and vLLM, to a plain Hugging Face folder.

model (SFT_MODEL_PATH > grpo.model > newest finished stage 1) → quick checks, reward self-test → gateway + controller + trainer
→ one line per step → export, verified → manifest
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared import runs
from shared.config import to_dict
from shared.errors import UserError
from shared.metrics import MetricsLog
from shared.model_folder import check_model_folder, local_path
from shared.prompts import SYSTEM_PROMPT, TOOLS
from shared.records import JsonlTail, read_questions, write_jsonl
from shared.reward import self_test
from shared.runs import RunDirectory, question_file
from shared.services import OwnedProcess
from shared.settings import Config
from stage2_grpo.export import PROBE_FILE, export, newest_checkpoint
from stage2_grpo.progress import skipped_line, step_line, step_metrics, validation_line
from stage2_grpo.services import gateway_and_controller, trainer
from stage2_grpo.timing import step_shares

_POLL_SECONDS = 0.5
_OPERATIONAL = {
    "grpo": (
        "model",
        "concurrency",
        "call_timeout_seconds",
        "episode_timeout_seconds",
        "step_timeout_seconds",
        "sync_tolerance",
        "keep_checkpoints",
        "save_every",
        "ray_address",
        "gateway_url",
        "job_template",
    ),
    "vllm": ("gpu_memory_utilization", "num_gpu_blocks_override", "cpu_kv_cache_gib", "start_timeout_seconds"),
}


def run(config: Config, run: RunDirectory) -> Path:
    """Train and export; returns the checkpoint folder. A finished stage is skipped, an interrupted one resumes."""
    model = starting_model(config, run)
    print(f"grpo: starts from {model}", flush=True)
    train, validation = (question_file(run, split) for split in ("train", "val"))
    mark = stage_fingerprint(config, model, train, validation)
    if manifest := runs.finished(run.grpo, mark):
        print(f"grpo: finished before, {manifest['outputs']['model']}")
        return Path(manifest["outputs"]["model"])
    from stage2_grpo.doctor.command import before_run  # which itself needs this module

    questions = list(read_questions(train))
    total = total_steps(config, len(questions))
    before_run(config, run, model, questions)
    self_test(questions, config.grpo, config.sandbox)
    runs.begin_stage(run.grpo, mark)
    started = time.monotonic()
    train_policy(config, run.grpo, model, (train, validation), total)
    checked = export_policy(config, run.grpo, model, total)
    outputs, seconds = {"model": str(run.grpo / "model")}, time.monotonic() - started
    runs.finish_stage(
        run.grpo, mark, seconds=seconds, outputs=outputs, start_model=str(model), steps=total, export=checked
    )
    print(f"GRPO_MODEL_PATH={run.grpo / 'model'}")
    return run.grpo / "model"


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


def stage_fingerprint(config: Config, model: Path, train: Path, validation: Path) -> str:
    """Everything the trained policy depends on; not how fast or how patiently the run goes about it."""
    parts = {key: to_dict(config)[key] for key in ("profile", "seed", "agent", "sandbox", "grpo", "vllm")}
    for section, names in _OPERATIONAL.items():
        parts[section] = {key: value for key, value in parts[section].items() if key not in names}
    data = (runs.read_manifest(train.parent) or {}).get("fingerprint")  # covers the databases, too
    prompts = [SYSTEM_PROMPT, TOOLS]
    return runs.fingerprint(**parts, prompts=prompts, data=data, train=train, validation=validation, start=model)


def total_steps(config: Config, questions: int) -> int:
    """Steps of the whole training; raises UserError when not even one full batch is there."""
    grpo = config.grpo
    per_epoch = questions // grpo.train_batch_size
    if per_epoch == 0:
        raise UserError(
            f"{questions} training questions do not fill one batch (grpo.train_batch_size {grpo.train_batch_size}); "
            "lower the batch or bring more questions."
        )
    available = per_epoch * grpo.epochs
    if grpo.total_steps is not None and grpo.total_steps > available:
        raise UserError(
            f"grpo.total_steps is {grpo.total_steps}, but {questions} questions make {available} steps in "
            f"{grpo.epochs} epoch(s); raise grpo.epochs or lower grpo.total_steps."
        )
    return available if grpo.total_steps is None else grpo.total_steps


def train_policy(config: Config, folder: Path, model: Path, questions: tuple[Path, Path], total: int) -> None:
    """Run the trainer until its last step is saved; nothing to do when it is already."""
    done = newest_checkpoint(folder / "checkpoints")
    if done and done[0] >= total:
        return
    if done:
        print(f"grpo: continues after step {done[0]} of {total}")
    first = done[0] if done else 0
    forget_steps_after(first, folder)
    with (
        gateway_and_controller(config, model, folder) as rollouts,
        trainer(config, folder, rollouts, questions) as process,
    ):
        for _ in follow(config, folder, process, first, total):
            rollouts.check()
        status = process.wait()
    reached = newest_checkpoint(folder / "checkpoints")
    if status or not reached or reached[0] < total:
        raise UserError(failure(folder / "logs" / "trainer.log", reached[0] if reached else 0, total))


def follow(config: Config, folder: Path, process: OwnedProcess, last: int, total: int) -> Iterator[None]:
    """Print and log one line per step after step `last` until the trainer ends; yields twice a second meanwhile."""
    trainer_rows, episode_rows = JsonlTail(folder / "trainer_metrics.jsonl"), JsonlTail(folder / "episodes.jsonl")
    episode_rows.new_rows()  # those of an interrupted run belong to its steps
    episodes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)  # by split, since the last line
    with (
        MetricsLog(folder, tensorboard=config.logging.tensorboard, wandb=False) as log,  # VERL talks to wandb itself
        tqdm(desc="grpo: starting Ray, trainer and vLLM", unit=" episodes", leave=False, disable=None) as bar,
    ):
        alive = True
        while alive:
            alive = process.running  # read first: what was written before the end is still picked up
            for episode in episode_rows.new_rows():
                episodes[episode["split"]].append(episode)
                bar.update()
            for row in trainer_rows.new_rows():
                bar.set_description(f"grpo: step {row['step']} of {total}")
                values: dict[str, float | None] = {}
                if "training/reward" in row["data"]:  # else a validation before the first step
                    for skipped in range(last + 1, row["step"]):
                        bar.write(skipped_line(skipped, total))
                    last = row["step"]
                    played = episodes.pop("train", [])
                    values = step_metrics(row["data"], played)
                    values |= step_shares(row["data"], played, config.grpo.concurrency)
                    refuse_silent_model(row["step"], values)
                    bar.write(step_line(row["step"], total, values))
                if validation := episodes.pop("val", []):
                    checked = step_metrics({}, validation)
                    bar.write(validation_line(row["step"], checked))
                    values |= {
                        f"validation_{name}": checked[name] for name in ("reward", "execution_accuracy", "episodes")
                    }
                log.log(row["step"], values)
            yield
            time.sleep(_POLL_SECONDS)
        for skipped in range(last + 1, total + 1) if process.wait() == 0 else ():
            bar.write(skipped_line(skipped, total))


def refuse_silent_model(step: int, values: Mapping[str, float | None]) -> None:
    """GRPO compares episodes that used tools; a first step without a single call has nothing to learn from."""
    if step == 1 and values["episodes"] and not values["calls"]:
        raise UserError(
            "No episode of the first GRPO step made a single tool call, so there is nothing to learn from; train stage 1 "
            "longer (sft.epochs, sft.max_traces), or start from a checkpoint that calls tools."
        )


def forget_steps_after(step: int, folder: Path) -> None:
    """Drop the figures of steps that an interrupted run made but did not save: they are made again."""
    (folder / "trainer_metrics.jsonl").unlink(missing_ok=True)  # VERL writes it anew
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        write_jsonl(metrics, [row for row in JsonlTail(metrics).new_rows() if row["step"] <= step])


def export_policy(config: Config, folder: Path, model: Path, total: int) -> dict[str, float]:
    """Merge and verify the last checkpoint into `<folder>/model`."""
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None, "train_policy returned without a checkpoint"
    print(f"grpo: exporting step {newest[0]} of {total}")
    grpo = config.grpo
    return export(
        newest[1],
        model,
        folder / "model",
        lora_rank=grpo.lora_rank,
        lora_alpha=grpo.lora_alpha,
        probe=folder / PROBE_FILE,
    )


def failure(log: Path, reached: int, total: int) -> str:
    """One sentence on why the trainer ended early: the guard's own words, else the last error in its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    errors = [
        line for line in lines if re.search(r"(WeightsOutOfSync|CpuBackendError|PinnedCodeChanged|Error): ", line)
    ]
    guard = [line for line in errors if "WeightsOutOfSync" in line]
    cause = (guard or errors or lines or ["it wrote no log"])[-1].strip()
    return (
        f"The trainer stopped after step {reached} of {total} saved: {cause} (whole log: {log}). Mend the cause and run the "
        "same command again; it continues from the last checkpoint."
    )


def plan(config: Config, run: RunDirectory) -> list[str]:
    """What `run` would do, for --dry-run; touches nothing."""
    grpo = config.grpo
    named = os.environ.get("SFT_MODEL_PATH") or grpo.model or f"the checkpoint of {run.sft}"
    steps = grpo.total_steps or f"all steps of {grpo.epochs} epoch(s)"
    return [
        f"grpo: start from {named}",
        f"      {steps}, {grpo.train_batch_size} questions x {grpo.rollouts_per_question} episodes a step",
        f"      questions {run.data / 'train.jsonl'}, validation {run.data / 'val.jsonl'}",
        f"      writes {run.grpo}: checkpoints/, logs/, metrics.jsonl, episodes.jsonl, model/, {runs.MANIFEST}",
    ]
