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
from shared.records import JsonlTail
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
                    played = episodes.pop("train", [])
                    for skipped in range(last + 1, row["step"]):
                        bar.write(skipped_line(skipped, total))
                    if row["step"] > last + 1:
                        played = ended_since(row["data"]["timing/step_start_wall"], played)
                    last = row["step"]
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
                yield {"step": row["step"], **values}
            yield None
            time.sleep(_POLL_SECONDS)
        for skipped in range(last + 1, total + 1) if process.wait() == 0 else ():
            bar.write(skipped_line(skipped, total))


def ended_since(start: float, episodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The episodes that ended after `start` (seconds since 1970), without those of a skipped step before it."""
    return [episode for episode in episodes if episode["finished_at"] >= start]


def refuse_silent_model(step: int, values: Mapping[str, float | None]) -> None:
    """GRPO compares episodes that used tools; a first step without a single call has nothing to learn from."""
    if step == 1 and values["episodes"] and not values["calls"]:
        raise UserError(
            "No episode of the first GRPO step made a single tool call, so there is nothing to learn from; train stage 1 "
            "longer (sft.epochs, sft.max_traces), or start from a checkpoint that calls tools."
        )
