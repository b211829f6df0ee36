"""Watching a GRPO run: one line and one row of metrics.jsonl for each step and validation, while the trainer runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from shared.errors import UserError
from shared.metrics import MetricsLog
from shared.records import JsonlTail, write_jsonl
from shared.services import OwnedProcess
from shared.settings import Config
from stage2_grpo.progress import skipped_line, step_line, step_metrics, validation_line
from stage2_grpo.safety import Row
from stage2_grpo.timing import step_shares

_POLL_SECONDS = 0.5


def follow(config: Config, folder: Path, process: OwnedProcess, last: int, total: int) -> Iterator[Row | None]:
    """Print and log one line per step after step `last` until the trainer ends.

    Yields the figures of each step and validation as they come, and None twice a second meanwhile.
    """
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
            rows = trainer_rows.new_rows()  # before the episodes, so that those of a step are there with its row
            for episode in episode_rows.new_rows():
                episodes[episode["split"]].append(episode)
                bar.update()
            for row in rows:
                bar.set_description(f"grpo: step {row['step']} of {total}")
                values: dict[str, float | None] = {}
                if "training/reward" in row["data"]:  # else a validation before the first step
                    played, episodes["train"] = by_step(row["data"], episodes["train"])
                    for skipped in range(last + 1, row["step"]):
                        bar.write(skipped_line(skipped, total))
                    if row["step"] > last + 1:
                        played = ended_since(row["data"]["timing/step_start_wall"], played)
                    last = row["step"]
                    values = step_figures(config, row["data"], played)
                    refuse_silent_model(row["step"], values)
                    bar.write(step_line(row["step"], total, values))
                if validation := episodes.pop("val", []):
                    bar.write(validation_line(row["step"], step_metrics({}, validation)))
                    values |= validation_figures(validation)
                log.log(row["step"], values)
                yield {"step": row["step"], **values}
            yield None
            time.sleep(_POLL_SECONDS)
        for skipped in range(last + 1, total + 1) if process.wait() == 0 else ():
            bar.write(skipped_line(skipped, total))


def settle(config: Config, folder: Path, saved: int) -> list[Row]:
    """Make metrics.jsonl hold the steps up to `saved`, the last one that a killed run has saved, and no others.

    Steps that it made but did not save are dropped: they are made again. Those that it saved but had no time to record are
    recorded from what trainer and controller wrote. Returns all rows.
    """
    metrics = folder / "metrics.jsonl"
    rows = [row for row in JsonlTail(metrics).new_rows() if row["step"] <= saved]
    if metrics.exists():
        write_jsonl(metrics, rows)
    if missed := _unrecorded(config, folder, max((row["step"] for row in rows), default=0), saved):
        with MetricsLog(folder, tensorboard=config.logging.tensorboard, wandb=False) as log:
            for step, values in missed:
                log.log(step, values)
    (folder / "trainer_metrics.jsonl").unlink(missing_ok=True)  # VERL writes it anew
    return list(JsonlTail(metrics).new_rows())


def _unrecorded(config: Config, folder: Path, recorded: int, saved: int) -> list[tuple[int, dict[str, float | None]]]:
    """The figures of the steps after `recorded` up to `saved`; their episodes are found by the time at which they ended."""
    episodes, found = JsonlTail(folder / "episodes.jsonl").new_rows(), []
    for row in reversed(JsonlTail(folder / "trainer_metrics.jsonl").new_rows()):
        if "training/reward" not in row["data"]:
            continue
        began = row["data"]["timing/step_start_wall"]
        ended = ended_since(began, episodes)
        episodes = [episode for episode in episodes if episode["finished_at"] < began]
        if recorded < row["step"] <= saved:
            played, _ = by_step(row["data"], [one for one in ended if one["split"] == "train"])
            validation = [one for one in ended if one["split"] == "val"]
            values = step_figures(config, row["data"], played)
            found.append((row["step"], values | (validation_figures(validation) if validation else {})))
    return found[::-1]


def step_figures(config: Config, data: Mapping[str, Any], played: list[dict[str, Any]]) -> dict[str, float | None]:
    """What metrics.jsonl records of a step: `data` is the trainer's, `played` are its episodes."""
    return step_metrics(data, played) | step_shares(data, played, config.grpo.concurrency)


def validation_figures(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """What metrics.jsonl records of a validation."""
    checked = step_metrics({}, episodes)
    return {f"validation_{name}": checked[name] for name in ("reward", "execution_accuracy", "episodes")}


def ended_since(start: float, episodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The episodes that ended after `start` (seconds since 1970), without those of a skipped step before it."""
    return [episode for episode in episodes if episode["finished_at"] >= start]


def by_step(
    data: Mapping[str, Any], episodes: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Episodes that ended within the rollout of the step, and those of the next one, which may be there before its row."""
    end = data["timing/rollout_phase_end_wall"]
    return [one for one in episodes if one["finished_at"] <= end], [one for one in episodes if one["finished_at"] > end]


def refuse_silent_model(step: int, values: Mapping[str, float | None]) -> None:
    """GRPO compares episodes that used tools; a first step without a single call has nothing to learn from."""
    if step == 1 and values["episodes"] and not values["calls"]:
        raise UserError(
            "No episode of the first GRPO step made a single tool call, so there is nothing to learn from; train stage 1 "
            "longer (sft.epochs, sft.max_traces), or start from a checkpoint that calls tools."
        )
