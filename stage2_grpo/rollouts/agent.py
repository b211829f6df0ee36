"""What a rollout does: run the agent on the rollout's question and judge the answer.

The episode loop is `shared.agent.episode`, or the function that grpo.agent names (see harness.py). Agent Lightning can start it in
two ways: `make_handler` for the pooled controller, where many episodes share one process, and `SqlAgent` for Agent
Lightning's own controllers (local process or Kubernetes job), which start one process per rollout and read everything
from environment variables; `python -m stage2_grpo.rollouts.agent` runs it.

The gateway sets the sampling temperature (`default_proxy`), so the agent asks for none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from shared.agent.chat_client import ChatClient
from shared.agent.episode import run_episode
from shared.agent.tools import Toolbox
from shared.cli.command_line import run_main
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, Question, StopReason
from shared.reward.reward import Reward, judge
from shared.runs.manifest import write_json
from shared.sql.database import Database
from stage2_grpo.rollouts.custom_agent import Assignment, RecordingTools, load_agent, play


@dataclass(frozen=True)
class RolloutTask:
    """One claimed rollout of the gateway."""

    rollout_id: str
    input: Any  # the training row: the fields of a Question, and the trainer's step
    is_train: bool
    openai_base_url: str  # the gateway's proxy for exactly this rollout
    key: str = field(repr=False)
    timeout_seconds: float
    last_try: bool = True  # after an infrastructure failure there is no other


@dataclass(frozen=True)
class AgentSettings:
    """The file that the trainer writes and the processes of the agents read. The gateway's key is never in it."""

    gateway_url: str
    model_folder: Path  # for its tokenizer
    config: Config
    episodes: Path  # JSONL, one line per finished episode, appended by the pooled controller

    def save(self, path: Path) -> None:
        write_json(path, {**dataclasses.asdict(self), "config": self.config.model_dump()})

    @staticmethod
    def load(path: Path) -> AgentSettings:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return AgentSettings(
                gateway_url=values["gateway_url"],
                model_folder=Path(values["model_folder"]),
                config=Config.model_validate(values["config"]),
                episodes=Path(values["episodes"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"Settings file {path} cannot be used ({error!r}); `python -m stage2_grpo` writes it."
            ) from error


def question_of(row: Mapping[str, Any]) -> Question:
    """The question in a training row; fields that the trainer added are left out. Raises TypeError when one lacks."""
    return Question(**{name.name: row[name.name] for name in dataclasses.fields(Question) if name.name in row})


class EpisodeRunner:
    """Runs and judges episodes; databases and the tokenizer are opened once per process."""

    def __init__(self, config: Config, model_folder: Path) -> None:
        self._config = config
        self._tokenizer = Tokenizer.from_folder(model_folder)
        self._databases: dict[str, Database] = {}
        self._agent = load_agent(config.grpo.agent) if config.grpo.agent else None

    async def run(self, question: Question, openai_base_url: str, key: str) -> tuple[Episode, Reward | None]:
        """The episode and its reward; no reward after an infrastructure failure."""
        database = self._database(question.database)
        episode = await self._play(question, database, openai_base_url, key)
        if episode.stop is StopReason.INFRASTRUCTURE:
            return episode, None
        return episode, await asyncio.to_thread(judge, question, episode, database, self._config.grpo)

    async def _play(self, question: Question, database: Database, openai_base_url: str, key: str) -> Episode:
        limits, grpo = self._config.agent, self._config.grpo
        toolbox = Toolbox(database, self._tokenizer, limits.observation_tokens)
        if self._agent:
            task = Assignment(
                question, RecordingTools(toolbox), openai_base_url, key, limits, grpo.call_timeout_seconds
            )
            return await play(self._agent, task, self._tokenizer)
        async with ChatClient(openai_base_url, api_key=key, timeout_seconds=grpo.call_timeout_seconds) as chat:
            return await run_episode(
                question,
                toolbox=toolbox,
                chat=chat,
                tokenizer=self._tokenizer,
                limits=limits,
                temperature=None,
            )

    def _database(self, path: str) -> Database:
        if path not in self._databases:
            self._databases[path] = Database(path, self._config.sandbox)
        return self._databases[path]


def make_handler(
    config: Config, model_folder: Path, record: Callable[[dict[str, Any]], None]
) -> Callable[[RolloutTask], Coroutine[Any, Any, float | None]]:
    """A handler for the pooled controller; `record` gets one row per episode, lost ones included (see `episode_row`).

    A try after which there is another one leaves no row, nor does a rollout whose step ended before it could start.
    """
    runner = EpisodeRunner(config, model_folder)

    async def handle(task: RolloutTask) -> float | None:
        question = question_of(task.input)
        cut_off = Episode(question.id, (), StopReason.INFRASTRUCTURE, None, error="cut off; see the log")
        started, episode, reward = time.monotonic(), cut_off, None
        try:
            episode, reward = await runner.run(question, task.openai_base_url, task.key)
        finally:
            if reward or episode is cut_off or task.last_try:
                record(episode_row(task, episode, reward, time.monotonic() - started))
        return reward.total if reward else None

    return handle


def episode_row(task: RolloutTask, episode: Episode, reward: Reward | None, seconds: float) -> dict[str, Any]:
    """What the trainer's step line needs to know of one episode, as plain JSON values; `seconds` is how long all of it took.

    `fallback_calls` counts executed calls that the stock Hermes grammar does not see; `merged_turns` of `later_turns`
    (the second turn on) continue the previous turn's tokens; turns without token ids count in neither. `step` is that of the
    trainer, for a validation the last one before it; None where no trainer asks.
    """
    turns = episode.turns
    seen = [(len(turn.calls), turn.hermes_calls) for turn in turns if turn.hermes_calls is not None]
    merged = [turn.merged for turn in turns if turn.merged is not None]
    return {
        "rollout_id": task.rollout_id,
        "question_id": episode.question_id,
        "split": "train" if task.is_train else "val",
        "step": task.input.get("step"),
        "stop": episode.stop.value,
        "error": episode.error,
        "reward": dataclasses.asdict(reward) if reward else None,
        "turns": len(turns),
        "calls": sum(len(turn.calls) for turn in turns),
        "hermes_calls": sum(hermes for _, hermes in seen),
        "fallback_calls": sum(max(0, calls - hermes) for calls, hermes in seen),
        "malformed_calls": sum(len(turn.malformed) for turn in turns),
        "later_turns": len(merged),
        "merged_turns": sum(merged),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "completion_tokens": sum(turn.completion_tokens for turn in turns),
        "seconds": round(seconds, 3),
        "reward_seconds": round(seconds - episode.seconds, 3) if reward else 0.0,
    }


class SqlAgent:
    """The agent class that Agent Lightning's own controllers start, one process per rollout.

    Environment: AGL_OPENAI_BASE_URL, AGL_EVENT_URL and AGL_KEY from the controller, FIRSTCALL_QUESTION (the training row
    as JSON) through `env_map`, FIRSTCALL_SETTINGS (path of the AgentSettings file) from the controller's own environment.
    """

    async def run(self) -> None:
        """One episode; posts its reward. Raises after an infrastructure failure, so that the rollout is FAILED."""
        settings = AgentSettings.load(Path(_environment("FIRSTCALL_SETTINGS")))
        question = question_of(json.loads(_environment("FIRSTCALL_QUESTION")))
        key = os.environ.get("AGL_KEY", "")
        runner = EpisodeRunner(settings.config, settings.model_folder)
        episode, reward = await runner.run(question, _environment("AGL_OPENAI_BASE_URL"), key)
        if reward is None:
            raise RuntimeError(f"infrastructure failure: {episode.error}")
        event = {"event_type": "reward", "data": {"value": reward.total}}
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as http:
            (await http.post(_environment("AGL_EVENT_URL"), json=event)).raise_for_status()


def _environment(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise UserError(
            f"Environment variable {name} is not set; SqlAgent is started by an Agent Lightning controller."
        ) from None


if __name__ == "__main__":
    run_main(lambda: asyncio.run(SqlAgent().run()))
