"""Figures over episodes, and the log they go to.

Everything is counted over episodes that the infrastructure did not end; those are only counted themselves. A share with
nothing to count is None, never 0. What the stock Hermes grammar would have read is known only where the server returned
token ids (`Turn.hermes_calls`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.records import Episode, Question, StopReason, Turn
from shared.reward.reward import Reward


@dataclass(frozen=True)
class Summary:
    """What one model did on one set of questions."""

    n: int  # judged episodes
    infrastructure_failures: int  # further episodes, excluded from everything else
    execution_accuracy: float | None
    interval: tuple[float, float] | None  # 95 % bootstrap interval of the accuracy
    tool_call_rate: float | None  # episodes with at least one call that the stock Hermes grammar reads
    fallback_share: float | None  # executed calls that it does not read
    merged_share: float | None  # turns after the first whose prompt continues the tokens before it
    mean_turns: float | None
    mean_completion_tokens: float | None  # per episode
    mean_prompt_tokens: float | None  # prompt of the last turn
    mean_seconds: float | None  # per episode
    accuracy_by_split: dict[str, float]  # by Question.split_kind, where it is set
    accuracy_by_difficulty: dict[str, float]
    stops: dict[str, int]  # judged episodes by how they ended


def bootstrap_interval(values: Sequence[float], samples: int, seed: int) -> tuple[float, float]:
    """95 % percentile interval of the mean: `samples` resamples of `values`, the same for the same seed."""
    if not values:
        raise ValueError("an interval needs at least one value")
    draw = random.Random(seed)
    means = sorted(math.fsum(draw.choices(values, k=len(values))) / len(values) for _ in range(samples))
    return means[int(0.025 * (samples - 1))], means[math.ceil(0.975 * (samples - 1))]


def summarise(
    episodes: Sequence[Episode],
    rewards: Sequence[Reward | None],
    questions: Iterable[Question],
    *,
    samples: int = 2000,
    seed: int = 0,
) -> Summary:
    """Figures of `episodes`; `rewards` stands parallel to it, None after an infrastructure failure.

    Raises ValueError when an episode lacks its reward or its question.
    """
    by_id = {question.id: question for question in questions}
    judged: list[tuple[Episode, Reward, Question]] = []
    for episode, reward in zip(episodes, rewards, strict=True):
        if episode.stop is StopReason.INFRASTRUCTURE:
            continue
        if reward is None or episode.question_id not in by_id:
            raise ValueError(f"the episode of question {episode.question_id} lacks its reward or its question")
        judged.append((episode, reward, by_id[episode.question_id]))
    kept = [episode for episode, _, _ in judged]
    correct = [float(reward.correct) for _, reward, _ in judged]
    turns = [turn for episode in kept for turn in episode.turns]
    return Summary(
        n=len(kept),
        infrastructure_failures=len(episodes) - len(kept),
        execution_accuracy=mean(correct),
        interval=bootstrap_interval(correct, samples, seed) if correct else None,
        tool_call_rate=tool_call_rate(kept),
        fallback_share=fallback_share(turns),
        merged_share=merged_share(turns),
        mean_turns=mean(float(len(episode.turns)) for episode in kept),
        mean_completion_tokens=mean(float(sum(t.completion_tokens for t in episode.turns)) for episode in kept),
        mean_prompt_tokens=mean(float(episode.turns[-1].prompt_tokens) for episode in kept if episode.turns),
        mean_seconds=mean(episode.seconds for episode in kept),
        accuracy_by_split=_accuracy_by(judged, lambda question: question.split_kind),
        accuracy_by_difficulty=_accuracy_by(judged, lambda question: question.difficulty),
        stops=_count(episode.stop.value for episode in kept),
    )


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def percent(share: float | None) -> str:
    """A share for people: `12.5%`, or a dash where there was nothing to count."""
    return "–" if share is None else f"{share:.1%}"


def tool_call_rate(episodes: Iterable[Episode]) -> float | None:
    """Share of the episodes with at least one call that the stock Hermes grammar reads; those without text do not count."""
    hermes = [[turn.hermes_calls for turn in episode.turns if turn.hermes_calls is not None] for episode in episodes]
    return mean(float(any(calls)) for calls in hermes if calls)


def fallback_share(turns: Iterable[Turn]) -> float | None:
    """Share of the executed calls that the stock Hermes grammar does not read."""
    known = [(len(turn.calls), turn.hermes_calls) for turn in turns if turn.hermes_calls is not None]
    executed = sum(calls for calls, _ in known)
    unseen = sum(max(0, calls - hermes) for calls, hermes in known)
    return unseen / executed if executed else None


def merged_share(turns: Iterable[Turn]) -> float | None:
    """Share of the turns after the first whose prompt continues the tokens before it."""
    return mean(float(turn.merged) for turn in turns if turn.merged is not None)


def _accuracy_by(
    judged: Iterable[tuple[Episode, Reward, Question]], group: Callable[[Question], str]
) -> dict[str, float]:
    groups: dict[str, list[float]] = defaultdict(list)
    for _, reward, question in judged:
        groups[group(question)].append(float(reward.correct))
    return {name: sum(values) / len(values) for name, values in sorted(groups.items()) if name}


def _count(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name] += 1
    return dict(sorted(counts.items()))


class MetricsLog:
    """Appends figures to `<folder>/metrics.jsonl`, and to TensorBoard and Weights & Biases where asked for.

    A context manager. Raises UserError when a package or the key of a wanted service is missing.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, wandb: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._closing = contextlib.ExitStack()
        self._scalar_logs: list[Callable[[int, Mapping[str, float]], None]] = []
        if tensorboard:
            self._scalar_logs.append(_tensorboard(folder / "tensorboard", self._closing))
        if wandb:
            self._scalar_logs.append(_wandb(folder, self._closing))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the figures of one step. Texts and None reach only the JSONL file; NaN and infinity become null there."""
        row = {"step": step, "time": round(time.time(), 3), **{key: _jsonable(value) for key, value in values.items()}}
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        scalars = {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}
        for write in self._scalar_logs:
            write(step, scalars)

    def close(self) -> None:
        """Flush and close; may be called twice."""
        self._closing.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path, closing: contextlib.ExitStack) -> Callable[[int, Mapping[str, float]], None]:
    """A TensorBoard writer from the `tensorboard` package itself; torch's wrapper would import torch."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary as TensorBoardSummary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError(
            "logging.tensorboard is true but tensorboard is not installed; install it or switch it off."
        ) from error
    writer = EventFileWriter(str(folder))
    closing.callback(writer.close)

    def write(step: int, scalars: Mapping[str, float]) -> None:
        summary = TensorBoardSummary(
            value=[TensorBoardSummary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
        )
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()

    return write


def _wandb(folder: Path, closing: contextlib.ExitStack) -> Callable[[int, Mapping[str, float]], None]:
    if not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") != "offline":
        raise UserError("logging.wandb is true but WANDB_API_KEY is not set; set it or switch logging.wandb off.")
    try:
        import wandb
    except ImportError as error:
        raise UserError("logging.wandb is true but wandb is not installed; install it or switch it off.") from error
    run = wandb.init(project="firstcall", name=folder.parent.name, dir=str(folder))
    closing.callback(run.finish)
    return lambda step, scalars: run.log(dict(scalars), step=step)
