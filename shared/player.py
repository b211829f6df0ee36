"""Playing questions with one model: bounded concurrency, every episode on disk as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from shared.agent import run_episode
from shared.chat import ChatClient
from shared.database import Database
from shared.records import Episode, JsonlTail, Question, StopReason, episode_from_row, to_json, write_jsonl
from shared.settings import Config
from shared.tokens import Tokenizer
from shared.tools import Toolbox


def read_episodes(file: Path) -> dict[str, Episode]:
    """Episodes by question id. A half line, left by a killed process, and infrastructure endings do not count."""
    episodes = map(episode_from_row, JsonlTail(file).new_rows())
    return {episode.question_id: episode for episode in episodes if episode.stop is not StopReason.INFRASTRUCTURE}


class Player:
    """Plays questions with bounded concurrency and keeps the episodes, in memory and line by line on disk."""

    def __init__(
        self, chat: ChatClient, tokenizer: Tokenizer, config: Config, databases: Mapping[str, Database], file: Path
    ) -> None:
        self.episodes = read_episodes(file)
        self._chat = chat
        self._tokenizer = tokenizer
        self._config = config
        self._databases = databases
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, self.episodes.values())  # ends half lines, drops lost episodes

    async def play(self, questions: Sequence[Question]) -> None:
        """Play what has no episode yet or lost it to the infrastructure."""
        waiting = [question for question in questions if self._is_missing(question)]
        slots = asyncio.Semaphore(self._config.evaluate.concurrency)
        tasks = [asyncio.create_task(self._play_one(question, slots)) for question in waiting]
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                for ending in tqdm(
                    asyncio.as_completed(tasks), "episodes", len(tasks), unit=" episodes", disable=not tasks
                ):
                    episode = await ending
                    self.episodes[episode.question_id] = episode
                    stream.write(to_json(episode) + "\n")
                    stream.flush()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_missing(self, question: Question) -> bool:
        episode = self.episodes.get(question.id)
        return episode is None or episode.stop is StopReason.INFRASTRUCTURE

    async def _play_one(self, question: Question, slots: asyncio.Semaphore) -> Episode:
        config = self._config
        async with slots:
            return await run_episode(
                question,
                toolbox=Toolbox(self._databases[question.database], self._tokenizer, config.agent.observation_tokens),
                chat=self._chat,
                tokenizer=self._tokenizer,
                limits=config.agent,
                temperature=config.evaluate.temperature,
            )
