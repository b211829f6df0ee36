"""One printed line and one row of metrics.jsonl for each step and validation of a running GRPO trainer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.config.schema import Config
from shared.errors import UserError
from shared.processes.owned_process import OwnedProcess
from shared.records import Episode, JsonlTail, episode_from_row, write_jsonl
from shared.runs.metrics_log import MetricsLog
from stage2_grpo.monitoring.step_metrics import step_line, step_metrics, validation_line, validation_metrics
from stage2_grpo.monitoring.tripwires import Row

_POLL_SECONDS = 0.5


def stream_steps(config: Config, folder: Path, process: OwnedProcess, last: int, total: int) -> Iterator[Row | None]:
    """Print and log one line per step after step `last` until the trainer ends.

    Yields the figures of each step and validation as they come, and None twice a second in between.
    """
    trainer_rows, episode_rows = JsonlTail(folder / "trainer_metrics.jsonl"), JsonlTail(folder / "episodes.jsonl")
    episode_rows.new_rows()  # of an interrupted run
    played: defaultdict[tuple[str, int], list[Episode]] = defaultdict(list)  # by split and step
    with (
        MetricsLog(folder, tensorboard=config.logging.tensorboard, wandb=False) as log,  # VERL writes to wandb itself
        tqdm(desc="grpo: starting Ray, trainer and vLLM", unit=" episodes", leave=False, disable=None) as bar,
    ):
        alive = True
        while alive:
            alive = process.running  # read first, so that the last rows are still picked up
            rows = trainer_rows.new_rows()  # before the episodes, so that a step's episodes are there with its row
            for episode in map(episode_from_row, episode_rows.new_rows()):
                played[episode.split, episode.step or 0].append(episode)
                bar.update()
            for row in rows:
                step, data = row["step"], row["data"]
                bar.set_description(f"grpo: step {step} of {total}")
                values: dict[str, float | None] = {}
                if _is_step(data):
                    _report_skipped(bar, range(last + 1, step), total)
                    last = step
                    values = step_metrics(data, played.pop(("train", step), []), config.grpo.concurrency)
                    refuse_silent_model(step, values)
                    bar.write(step_line(step, total, values))
                if validation := played.pop(("val", step), []):
                    bar.write(validation_line(step, validation))
                    values |= validation_metrics(validation)
                log.log(step, values)
                yield {"step": step, **values}
            yield None
            time.sleep(_POLL_SECONDS)
        if process.wait() == 0:
            _report_skipped(bar, range(last + 1, total + 1), total)


def reconcile_logs(config: Config, folder: Path, saved: int) -> list[Row]:
    """Make metrics.jsonl and episodes.jsonl hold exactly the steps up to `saved`, the last that a killed run saved.

    Rows of later steps are dropped, because those steps are made again. Steps that were saved but not recorded are
    recorded from what the trainer and the controller wrote. Returns all rows of metrics.jsonl.
    """
    kept: dict[str, list[Any]] = {}
    for name in ("metrics.jsonl", "episodes.jsonl"):
        kept[name] = [row for row in JsonlTail(folder / name).new_rows() if row.get("step", 0) <= saved]
        if (folder / name).exists():
            write_jsonl(folder / name, kept[name])
    trainer_rows = JsonlTail(folder / "trainer_metrics.jsonl").new_rows()
    made = {row["step"]: row["data"] for row in trainer_rows if _is_step(row["data"])}
    with MetricsLog(folder, tensorboard=config.logging.tensorboard, wandb=False) as log:
        for step in range(max((row["step"] for row in kept["metrics.jsonl"]), default=0) + 1, saved + 1):
            played = [episode_from_row(row) for row in kept["episodes.jsonl"] if row.get("step") == step]
            train, validation = (
                [episode for episode in played if episode.split == split] for split in ("train", "val")
            )
            if step in made or (step == saved and train):  # the trainer saves a step before it writes its row
                values = step_metrics(made.get(step, {}), train, config.grpo.concurrency)
                log.log(step, values | (validation_metrics(validation) if validation else {}))
    (folder / "trainer_metrics.jsonl").unlink(missing_ok=True)  # VERL starts a new one
    return list(JsonlTail(folder / "metrics.jsonl").new_rows())


def _is_step(data: Mapping[str, Any]) -> bool:
    """Whether the trainer's row is a step's. The validation before the first step has a row as well."""
    return "training/reward" in data


def _report_skipped(bar: Any, steps: range, total: int) -> None:
    for step in steps:
        bar.write(
            f"step {step}/{total}  no update: its rewarded episodes did not fill one mini batch (grpo.mini_batch_size)"
        )


def refuse_silent_model(step: int, values: Mapping[str, float | None]) -> None:
    """Raise UserError when the first step made no tool call at all: there is nothing to learn from."""
    if step == 1 and values["episodes"] and not values["calls"]:
        raise UserError(
            "No episode of the first GRPO step made a single tool call, so there is nothing to learn from; train stage "
            "1 longer (sft.epochs, sft.max_traces), or start from a checkpoint that calls tools."
        )
