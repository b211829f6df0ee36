"""Traces from a teacher: any OpenAI-compatible endpoint plays the questions as the agent, and what the judge accepts is taught.

Rejection sampling. A question is played up to `teacher.tries` times until one episode is right by the reward's rule, on the
perturbed copies of its database too, and its trace passes the checks of a synthesised one. Turns with a failed call are
kept, as what the next turn recovers from, but not trained. Each episode is appended to a file of the run as it ends, which
depends on nothing but what the teacher was asked: an interrupted or changed run pays for no finished episode twice.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shared.agent.chat_client import API_KEY, ChatClient
from shared.agent.episode import run_episode
from shared.agent.prompts import SYSTEM_PROMPT, TOOLS
from shared.agent.tools import Toolbox
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.run import play_all
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, JsonlTail, Question, StopReason, write_jsonl
from shared.reward.reward import judge
from shared.runs.manifest import RunDirectory, fingerprint
from shared.sql.database import Database
from stage1_sft.traces import Dropped, Trace, make_trace, verify

ACCEPTED = ""  # the reason of a row whose trace is taught


def teach(
    questions: Sequence[Question], config: Config, tokenizer: Tokenizer, run: RunDirectory
) -> tuple[dict[str, Trace], dict[str, Any]]:
    """Accepted traces by question id, in the order of the questions, and the bill: what they cost, from the first start on.

    The bill holds `asked` and `solved` questions, `episodes`, those `rejected` by reason, answered `requests`, tokens, and with
    teacher.*_price the `cost`. Raises UserError when the endpoint fails for good; the next call continues.
    """
    lessons = _Lessons(questions, config, tokenizer, lesson_file(config, run))
    asyncio.run(lessons.play())
    rows, teacher = lessons.rows, config.teacher
    prompt, completion = (sum(row[kind] for row in rows) for kind in ("prompt_tokens", "completion_tokens"))
    bill: dict[str, Any] = {
        "asked": len(questions),
        "solved": len(lessons.accepted),
        "episodes": len(rows),
        "rejected": dict(Counter(row["reason"] for row in rows if row["reason"])),
        "requests": sum(row.get("requests", 0) for row in rows),
        "prompt_tokens": prompt,
        "completion_tokens": completion,
    }
    if teacher.prompt_price or teacher.completion_price:
        bill["cost"] = round((prompt * teacher.prompt_price + completion * teacher.completion_price) / 1e6, 6)
    traces = {question.id: lessons.accepted[question.id] for question in questions if question.id in lessons.accepted}
    return traces, bill


def bill_line(bill: dict[str, Any]) -> str:
    """What the teacher did and cost, as one line."""
    tokens, episodes, solved = bill["prompt_tokens"] + bill["completion_tokens"], bill["episodes"], bill["solved"]
    cost = f", cost {bill['cost']:g}" if "cost" in bill else ""
    return (
        f"teacher: {solved} of {bill['asked']} questions solved in {episodes} episodes ({solved / max(1, episodes):.0%} "
        f"accepted, rejected {bill['rejected'] or 'none'}); {bill['requests']:,} requests, {bill['prompt_tokens']:,} prompt "
        f"and {bill['completion_tokens']:,} completion tokens, {tokens // max(1, solved):,} for each trace{cost}"
    )


def lesson_file(config: Config, run: RunDirectory) -> Path:
    """Where the episodes of this teacher are kept: one file for each teacher, temperature, prompt and set of limits."""
    mark = fingerprint(settings=config.part_of("teacher"), prompt=[SYSTEM_PROMPT, TOOLS])
    return run.path / f"teacher-{mark[:12]}.jsonl"


def _marks(questions: Sequence[Question]) -> dict[str, str]:
    """By question id, what was asked: text, gold and contents of the database; other data may use the same ids."""
    databases = {path: fingerprint(file=Path(path)) for path in {question.database for question in questions}}
    return {
        question.id: fingerprint(
            asked=[question.id, question.question, question.gold_sql, databases[question.database]]
        )
        for question in questions
    }


class _Lessons:
    """Episodes played so far about these very questions and the traces accepted from them, in memory and on disk."""

    def __init__(self, questions: Sequence[Question], config: Config, tokenizer: Tokenizer, file: Path) -> None:
        stored = JsonlTail(file).new_rows()
        self._marks = _marks(questions)
        asked = set(self._marks.values())
        self.rows = [row for row in stored if row.get("asked") in asked]
        self.accepted: dict[str, Trace] = {}
        self._questions, self._config, self._tokenizer, self._file = questions, config, tokenizer, file
        self._tries = Counter(row["question_id"] for row in self.rows)
        kept = {row["question_id"]: row["trace"] for row in self.rows if row["reason"] == ACCEPTED}
        for question in questions:
            if question.id in kept and not self._flaw(kept[question.id], question):  # cut by another tokenizer
                self.accepted[question.id] = kept[question.id]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, stored)  # ends a half line

    async def play(self) -> None:
        """Play what is neither solved nor out of tries."""
        teacher = self._config.teacher
        waiting = [question for question in self._questions if self._wants(question)]
        key = os.environ.get(API_KEY, "")
        async with ChatClient(str(teacher.endpoint), api_key=key, model=teacher.model) as chat:
            await play_all(waiting, partial(self._teach, chat), teacher.concurrency, "teacher")

    def _wants(self, question: Question) -> bool:
        return question.id not in self.accepted and self._tries[question.id] < self._config.teacher.tries

    async def _teach(self, chat: ChatClient, question: Question) -> None:
        config = self._config
        while self._wants(question):
            database = Database(question.database, config.sandbox)
            episode = await run_episode(
                question,
                toolbox=Toolbox(database, self._tokenizer, config.agent.observation_tokens),
                chat=chat,
                tokenizer=self._tokenizer,
                limits=config.agent,
                temperature=config.teacher.temperature,
            )
            if episode.stop is StopReason.INFRASTRUCTURE:
                raise UserError(
                    f"The teacher {chat.base_url} failed ({episode.error}); see to it and run the same command again, it "
                    "continues."
                )
            reason, trace = await asyncio.to_thread(self._lesson, question, episode, database)
            self._keep(question, episode, reason, trace)

    def _lesson(self, question: Question, episode: Episode, database: Database) -> tuple[str, Trace | None]:
        """Why an episode is not taught ("" if it is), and its trace."""
        if episode.stop is not StopReason.ANSWERED:
            return episode.stop.value, None
        if any(turn.malformed for turn in episode.turns):
            return "unreadable call", None
        if not judge(question, episode, database, self._config.grpo).correct:
            return "wrong", None
        trace = _trace(question, episode, self._config)
        flaw = self._flaw(trace, question)
        return flaw, None if flaw else trace

    def _flaw(self, trace: Trace, question: Question) -> str:
        try:
            verify(trace, question, self._config, self._tokenizer)
        except Dropped as reason:
            return str(reason)
        return ACCEPTED

    def _keep(self, question: Question, episode: Episode, reason: str, trace: Trace | None) -> None:
        row = {
            "question_id": question.id,
            "asked": self._marks[question.id],
            "reason": reason,
            "submitted_sql": episode.submitted_sql,
            "requests": len(episode.turns),
            "prompt_tokens": sum(turn.prompt_tokens for turn in episode.turns),
            "completion_tokens": sum(turn.completion_tokens for turn in episode.turns),
            "trace": trace,
        }
        self.rows.append(row)
        self._tries[question.id] += 1
        if trace:
            self.accepted[question.id] = trace
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def _trace(question: Question, episode: Episode, config: Config) -> Trace:
    """The episode as a trace; trained are the turns whose calls all worked."""
    turns = iter(episode.turns)
    trained = [message["role"] == "assistant" and all(next(turns).ok) for message in episode.messages]
    provenance = {"difficulty": question.difficulty, "form": question.form, "teacher": config.teacher.model}
    return make_trace(question, episode.messages, trained, provenance)
