"""Watching a GRPO run: one line and one row of metrics.jsonl for each step and validation, while the trainer runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.config.schema import Config
from shared.errors import UserError
from shared.processes.owned_process import OwnedProcess
from shared.records import Episode, JsonlTail, episode_from_row, write_jsonl
from shared.runs.metrics_log import MetricsLog
from stage2_grpo.monitoring.step_metrics import skipped_line, step_line, step_metrics, validation_line
from stage2_grpo.monitoring.step_timing import step_shares
from stage2_grpo.monitoring.tripwires import Row

_POLL_SECONDS = 0.5


def follow(config: Config, folder: Path, process: OwnedProcess, last: int, total: int) -> Iterator[Row | None]:
    """Print and log one line per step after step `last` until the trainer ends.

    Yields the figures of each step and validation as they come, and None twice a second meanwhile.
    """
    trainer_rows, episode_rows = JsonlTail(folder / "trainer_metrics.jsonl"), JsonlTail(folder / "episodes.jsonl")
    episode_rows.new_rows()  # those of an interrupted run belong to its steps
    episodes: defaultdict[tuple[str, int], list[Episode]] = defaultdict(list)  # by split and step
    with (
        MetricsLog(folder, tensorboard=config.logging.tensorboard, wandb=False) as log,  # VERL talks to wandb itself
        tqdm(desc="grpo: starting Ray, trainer and vLLM", unit=" episodes", leave=False, disable=None) as bar,
    ):
        alive = True
        while alive:
            alive = process.running  # read first: what was written before the end is still picked up
            rows = trainer_rows.new_rows()  # before the episodes, so that those of a step are there with its row
            for episode in episode_rows.new_rows():
                episodes[episode["split"], episode["step"]].append(episode_from_row(episode))
                bar.update()
            for row in rows:
                step, data = row["step"], row["data"]
                bar.set_description(f"grpo: step {step} of {total}")
                values: dict[str, float | None] = {}
                if _of_step(row):
                    for skipped in range(last + 1, step):
                        bar.write(skipped_line(skipped, total))
                    last = step
                    values = step_figures(config, data, episodes.pop(("train", step), []))
                    refuse_silent_model(step, values)
                    bar.write(step_line(step, total, values))
                if validation := episodes.pop(("val", step), []):
                    bar.write(validation_line(step, step_metrics({}, validation)))
                    values |= validation_figures(validation)
                log.log(step, values)
                yield {"step": step, **values}
            yield None
            time.sleep(_POLL_SECONDS)
        for skipped in range(last + 1, total + 1) if process.wait() == 0 else ():
            bar.write(skipped_line(skipped, total))


def settle(config: Config, folder: Path, saved: int) -> list[Row]:
    """Make metrics.jsonl and episodes.jsonl hold the steps up to `saved`, the last one that a killed run has saved.

    Steps that it made but did not save are dropped: they are made again. Those that it saved but had no time to record are
    recorded from what trainer and controller wrote. Returns all rows of metrics.jsonl.
    """
    metrics = _up_to(saved, folder / "metrics.jsonl")
    episodes = _up_to(saved, folder / "episodes.jsonl")
    made = {row["step"]: row["data"] for row in JsonlTail(folder / "trainer_metrics.jsonl").new_rows() if _of_step(row)}
    for step in range(max((row["step"] for row in metrics), default=0) + 1, saved + 1):
        played = [episode_from_row(row) for row in episodes if row.get("step") == step]
        train, validation = ([one for one in played if one.split == split] for split in ("train", "val"))
        if step in made or (step == saved and train):  # the trainer saves a step before it writes its row
            values = step_figures(config, made.get(step, {}), train)
            with MetricsLog(folder, tensorboard=config.logging.tensorboard, wandb=False) as log:
                log.log(step, values | (validation_figures(validation) if validation else {}))
    (folder / "trainer_metrics.jsonl").unlink(missing_ok=True)  # VERL writes it anew
    return list(JsonlTail(folder / "metrics.jsonl").new_rows())


def _of_step(row: Row) -> bool:
    """Whether a row of the trainer is that of a step, not of the validation before the first one."""
    return "training/reward" in row["data"]


def _up_to(saved: int, file: Path) -> list[dict[str, Any]]:
    """The rows of the steps up to `saved`, and from now on all that the file holds; those of 0.1.0 name no step and stay."""
    rows = [row for row in JsonlTail(file).new_rows() if row.get("step", 0) <= saved]
    if file.exists():
        write_jsonl(file, rows)
    return rows


def step_figures(config: Config, data: Mapping[str, Any], played: Sequence[Episode]) -> dict[str, float | None]:
    """What metrics.jsonl records of a step: `data` is the trainer's, `played` are its episodes."""
    return step_metrics(data, played) | step_shares(data, played, config.grpo.concurrency)


def validation_figures(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """What metrics.jsonl records of a validation."""
    checked = step_metrics({}, episodes)
    return {f"validation_{name}": checked[name] for name in ("reward", "execution_accuracy", "episodes")}


def refuse_silent_model(step: int, values: Mapping[str, float | None]) -> None:
    """GRPO compares episodes that used tools; a first step without a single call has nothing to learn from."""
    if step == 1 and values["episodes"] and not values["calls"]:
        raise UserError(
            "No episode of the first GRPO step made a single tool call, so there is nothing to learn from; train stage 1 "
            "longer (sft.epochs, sft.max_traces), or start from a checkpoint that calls tools."
        )
