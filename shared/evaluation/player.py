"""Playing questions with one model: bounded concurrency, every episode on disk as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from shared.agent.chat_client import ChatClient
from shared.agent.episode import run_episode
from shared.agent.tools import Toolbox
from shared.config.schema import Config
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, JsonlTail, Question, StopReason, episode_from_row, to_json, write_jsonl
from shared.sql.database import Database


def read_episodes(file: Path) -> dict[str, Episode]:
    """Episodes by question id. A half line, left by a killed process, and infrastructure endings do not count."""
    episodes = map(episode_from_row, JsonlTail(file).new_rows())
    return {episode.question_id: episode for episode in episodes if episode.stop is not StopReason.INFRASTRUCTURE}


async def play_all(
    questions: Sequence[Question], play: Callable[[Question], Awaitable[None]], concurrency: int, label: str
) -> None:
    """`play` each question, at most `concurrency` at a time, under a bar called `label`; the first error ends them all."""
    slots = asyncio.Semaphore(concurrency)

    async def in_turn(question: Question) -> None:
        async with slots:
            await play(question)

    tasks = [asyncio.create_task(in_turn(question)) for question in questions]
    try:
        for ending in tqdm(asyncio.as_completed(tasks), label, len(tasks), unit=" questions", disable=not tasks):
            await ending
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
        await play_all(waiting, self._play_one, self._config.evaluate.concurrency, "episodes")

    def _is_missing(self, question: Question) -> bool:
        episode = self.episodes.get(question.id)
        return episode is None or episode.stop is StopReason.INFRASTRUCTURE

    async def _play_one(self, question: Question) -> None:
        config = self._config
        episode = await run_episode(
            question,
            toolbox=Toolbox(self._databases[question.database], self._tokenizer, config.agent.observation_tokens),
            chat=self._chat,
            tokenizer=self._tokenizer,
            limits=config.agent,
            temperature=config.evaluate.temperature,
        )
        self.episodes[question.id] = episode
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(to_json(episode) + "\n")
