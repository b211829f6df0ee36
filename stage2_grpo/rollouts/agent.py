"""One rollout: run the agent on the rollout's question and judge the answer.

The episode loop is `shared.agent.episode`, or the function that grpo.agent names (custom_agent.py). It starts in two
ways. `make_handler` serves the pooled controller, where many episodes share one process. `SqlAgent` serves Agent
Lightning's own controllers (local process or Kubernetes Job), which start one process per rollout and pass everything
in environment variables; `python -m stage2_grpo.rollouts.agent` runs it.

The gateway sets the sampling temperature (`default_proxy`), so the agent requests none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from shared.agent.chat_client import ChatClient
from shared.agent.episode import run_episode
from shared.agent.tools import Toolbox, load_function
from shared.cli.command_line import run_main
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, Question, Reward, StopReason
from shared.reward.reward import judge
from shared.runs.manifest import write_json
from shared.sql.database import Database
from stage2_grpo.rollouts.custom_agent import Assignment, RecordingTools, play

SETTINGS_FILE = "agents.json"  # the AgentSettings, in the folder of the stage


@dataclass(frozen=True)
class RolloutTask:
    """One claimed rollout of the gateway."""

    rollout_id: str
    input: Any  # the training row: the fields of a Question, and the trainer's step
    is_train: bool
    openai_base_url: str  # the gateway's proxy for exactly this rollout
    key: str = field(repr=False)
    timeout_seconds: float
    last_try: bool = True  # no further attempt follows an infrastructure failure


@dataclass(frozen=True)
class AgentSettings:
    """The file that stage 2 writes and that trainer, controller and agents read. It never holds the gateway's key."""

    gateway_url: str
    model_folder: Path  # for its tokenizer
    config: Config
    episodes: Path  # JSONL of Episode, appended by the pooled controller

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
    """The question in a training row, without the trainer's own fields. Raises TypeError when a field is missing."""
    return Question(**{name.name: row[name.name] for name in dataclasses.fields(Question) if name.name in row})


class EpisodeRunner:
    """Runs and judges episodes; databases and the tokenizer are opened once per process."""

    def __init__(self, config: Config, model_folder: Path) -> None:
        self._config = config
        self._tokenizer = Tokenizer.from_folder(model_folder)
        self._databases: dict[str, Database] = {}
        self._agent = load_function("grpo.agent", config.grpo.agent) if config.grpo.agent else None

    async def run(self, question: Question, openai_base_url: str, key: str) -> Episode:
        """The judged episode; it has no reward after an infrastructure failure."""
        limits, grpo = self._config.agent, self._config.grpo
        if question.database not in self._databases:
            self._databases[question.database] = Database(question.database, self._config.sandbox)
        database = self._databases[question.database]
        toolbox = Toolbox(database, self._tokenizer, limits, question.question)
        if self._agent:
            tools = RecordingTools(toolbox)
            task = Assignment(question, tools, openai_base_url, key, limits, grpo.call_timeout_seconds)
            episode = await play(self._agent, task, self._tokenizer)
        else:
            async with ChatClient(openai_base_url, api_key=key, timeout_seconds=grpo.call_timeout_seconds) as chat:
                episode = await run_episode(
                    question,
                    toolbox=toolbox,
                    chat=chat,
                    tokenizer=self._tokenizer,
                    limits=limits,
                    temperature=None,
                )
        if episode.stop is StopReason.INFRASTRUCTURE:
            return episode
        started = time.monotonic()
        reward = await asyncio.to_thread(judge, question, episode, database, grpo)
        return replace(episode, reward=reward, reward_seconds=time.monotonic() - started)


def make_handler(
    config: Config, model_folder: Path, record: Callable[[Episode], None]
) -> Callable[[RolloutTask], Coroutine[Any, Any, Reward | None]]:
    """A handler for the pooled controller; `record` gets every episode, lost ones included.

    An attempt that another one follows leaves no row, nor does a rollout whose step ended before it could start.
    """
    runner = EpisodeRunner(config, model_folder)

    async def handle(task: RolloutTask) -> Reward | None:
        question = question_of(task.input)
        cut_off = Episode(question.id, (), StopReason.INFRASTRUCTURE, None, error="cut off; see the log")
        started, episode = time.monotonic(), cut_off
        try:
            episode = await runner.run(question, task.openai_base_url, task.key)
        finally:
            if episode is cut_off or episode.reward or task.last_try:
                split, step = "train" if task.is_train else "val", task.input.get("step")
                seconds = episode.seconds or time.monotonic() - started
                record(replace(episode, rollout_id=task.rollout_id, split=split, step=step, seconds=seconds))
        return episode.reward

    return handle


def reward_event(reward: Reward) -> dict[str, Any]:
    """The event that reports a reward to the gateway.

    The trainer optimises `value` and compares groups by `correct`.
    """
    return {"event_type": "reward", "data": {"value": reward.total, "correct": reward.correct}}


class SqlAgent:
    """The agent class that Agent Lightning's own controllers start, one process per rollout.

    Environment: AGL_OPENAI_BASE_URL, AGL_EVENT_URL and AGL_KEY from the controller, FIRSTCALL_QUESTION (the training
    row as JSON) through `env_map`, FIRSTCALL_SETTINGS (path of the AgentSettings file) from the controller's own
    environment.
    """

    async def run(self) -> None:
        """One episode; posts its reward. Raises after an infrastructure failure, so that the rollout is FAILED."""
        names = ("FIRSTCALL_SETTINGS", "FIRSTCALL_QUESTION", "AGL_OPENAI_BASE_URL", "AGL_EVENT_URL")
        if missing := [name for name in names if name not in os.environ]:
            raise UserError(f"{missing[0]} is not set in the environment; the controller that starts SqlAgent sets it.")
        settings_file, row, base_url, event_url = (os.environ[name] for name in names)
        settings, key = AgentSettings.load(Path(settings_file)), os.environ.get("AGL_KEY", "")
        runner = EpisodeRunner(settings.config, settings.model_folder)
        episode = await runner.run(question_of(json.loads(row)), base_url, key)
        if episode.reward is None:
            raise RuntimeError(f"infrastructure failure: {episode.error}")
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as http:
            (await http.post(event_url, json=reward_event(episode.reward))).raise_for_status()


if __name__ == "__main__":
    run_main(lambda: asyncio.run(SqlAgent().run()))
