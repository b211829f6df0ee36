"""What a rollout does: run the agent on the rollout's question and judge the answer.

The episode loop is `shared.agent.episode`, or the function that grpo.agent names (see harness.py). Agent Lightning can start it in
two ways: `make_handler` for the pooled controller, where many episodes share one process, and `SqlAgent` for Agent
Lightning's own controllers (local process or Kubernetes job), which start one process per rollout and read everything
from environment variables; `python -m stage2_grpo.rollouts.agent` runs it.

The sampling temperature is the gateway's (`default_proxy`); what the agent asks for is overridden there.
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
from shared.agent.tools import Toolbox
from shared.cli.command_line import run_main
from shared.config.load import config_from_dict, to_dict
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, Question, StopReason
from shared.reward.reward import judge
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
        write_json(path, {**dataclasses.asdict(self), "config": to_dict(self.config)})

    @staticmethod
    def load(path: Path) -> AgentSettings:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return AgentSettings(
                gateway_url=values["gateway_url"],
                model_folder=Path(values["model_folder"]),
                config=config_from_dict(values["config"]),
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

    async def run(self, question: Question, openai_base_url: str, key: str) -> Episode:
        """The judged episode; it has no reward after an infrastructure failure."""
        database = self._database(question.database)
        episode = await self._play(question, database, openai_base_url, key)
        if episode.stop is StopReason.INFRASTRUCTURE:
            return episode
        started = time.monotonic()
        reward = await asyncio.to_thread(judge, question, episode, database, self._config.grpo)
        return replace(episode, reward=reward, reward_seconds=time.monotonic() - started)

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
                temperature=grpo.temperature,
            )

    def _database(self, path: str) -> Database:
        if path not in self._databases:
            self._databases[path] = Database(path, self._config.sandbox)
        return self._databases[path]


def make_handler(
    config: Config, model_folder: Path, record: Callable[[Episode], None]
) -> Callable[[RolloutTask], Coroutine[Any, Any, float | None]]:
    """A handler for the pooled controller; `record` gets every episode, lost ones included.

    A try after which there is another one leaves no row, nor does a rollout whose step ended before it could start.
    """
    runner = EpisodeRunner(config, model_folder)

    async def handle(task: RolloutTask) -> float | None:
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
        return episode.reward.total if episode.reward else None

    return handle


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
        episode = await runner.run(question, _environment("AGL_OPENAI_BASE_URL"), key)
        if episode.reward is None:
            raise RuntimeError(f"infrastructure failure: {episode.error}")
        event = {"event_type": "reward", "data": {"value": episode.reward.total}}
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
