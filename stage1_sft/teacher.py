"""Traces from a teacher: an OpenAI-compatible endpoint plays the questions as the agent; what the judge accepts is
taught.

Rejection sampling: a question is played up to `teacher.tries` times until one episode is right by the reward's rule,
on the perturbed copies of its database too, and its trace passes the checks of a synthesised one. Turns with a failed
call stay in the trace as what the next turn recovers from, but are not trained. Each episode is appended to a file of
the run as it ends. That file depends only on what the teacher was asked, so an interrupted or changed run pays for no
finished episode twice."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.agent.chat_client import API_KEY, ChatClient
from shared.agent.episode import run_episode
from shared.agent.prompts import prompts_of
from shared.agent.tools import Toolbox
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.run import play_all
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, JsonlTail, Question, StopReason, write_jsonl
from shared.reward.reward import judge
from shared.runs.manifest import RunDirectory, fingerprint
from shared.sql.database import Database
from stage1_sft.traces import Trace, flaw, make_trace


def teach(
    questions: Sequence[Question], config: Config, tokenizer: Tokenizer, run: RunDirectory
) -> tuple[dict[str, Trace], dict[str, Any]]:
    """Accepted traces by question id, in the order of the questions, and the bill: their cost since the first start.

    The bill holds `asked` and `solved` questions, `episodes`, those `rejected` by reason, answered `requests`, tokens
    and, with teacher.*_price, the `cost`. Raises UserError when the endpoint fails for good; the next call continues.
    """
    lessons, teacher = _Lessons(questions, config, tokenizer, lesson_file(config, run)), config.teacher
    asyncio.run(lessons.play(questions))
    rows, accepted = lessons.rows, lessons.accepted
    prompt, completion = (sum(row[kind] for row in rows) for kind in ("prompt_tokens", "completion_tokens"))
    bill: dict[str, Any] = {
        "asked": len(questions),
        "solved": len(accepted),
        "episodes": len(rows),
        "rejected": dict(Counter(row["reason"] for row in rows if row["reason"])),
        "requests": sum(row["requests"] for row in rows),
        "prompt_tokens": prompt,
        "completion_tokens": completion,
    }
    if teacher.prompt_price or teacher.completion_price:
        bill["cost"] = round((prompt * teacher.prompt_price + completion * teacher.completion_price) / 1e6, 6)
    return {question.id: accepted[question.id] for question in questions if question.id in accepted}, bill


def bill_line(bill: dict[str, Any]) -> str:
    """What the teacher did and cost, as one line."""
    tokens, episodes, solved = bill["prompt_tokens"] + bill["completion_tokens"], bill["episodes"], bill["solved"]
    rejected = ", ".join(f"{reason} {count}" for reason, count in bill["rejected"].items()) or "none"
    cost = f", cost {bill['cost']:g}" if "cost" in bill else ""
    share = f"{solved / max(1, episodes):.0%}"
    return (
        f"teacher: {solved} of {bill['asked']} questions solved in {episodes} episodes ({share} accepted; rejected: "
        f"{rejected}); {bill['requests']:,} requests, {bill['prompt_tokens']:,} prompt and "
        f"{bill['completion_tokens']:,} completion tokens, {tokens // max(1, solved):,} for each trace{cost}"
    )


def lesson_file(config: Config, run: RunDirectory) -> Path:
    """Where the episodes of this teacher are kept: one file for each teacher, temperature, prompt and set of limits."""
    mark = fingerprint(settings=config.part_of("teacher"), prompt=prompts_of(config.agent).mark)
    return run.path / f"teacher-{mark[:12]}.jsonl"


class _Lessons:
    """Episodes played so far about these questions and the traces accepted from them, in memory and on disk.

    A row holds `question_id`, `asked` (a hash of text, gold and database contents: other data may use the same ids),
    `reason` (why it was rejected, "" if it was not), submitted_sql, requests, prompt_tokens, completion_tokens, trace.
    """

    def __init__(self, questions: Sequence[Question], config: Config, tokenizer: Tokenizer, file: Path) -> None:
        self._config, self._tokenizer, self._file = config, tokenizer, file
        contents = {path: fingerprint(file=Path(path)) for path in {question.database for question in questions}}
        self._asked = {q.id: fingerprint(asked=[q.id, q.question, q.gold_sql, contents[q.database]]) for q in questions}
        stored, asked = JsonlTail(file).new_rows(), set(self._asked.values())
        self.rows = [row for row in stored if row.get("asked") in asked]
        self._tries = Counter(row["question_id"] for row in self.rows)
        kept = {row["question_id"]: row["trace"] for row in self.rows if row["trace"]}
        self.accepted: dict[str, Trace] = {  # another tokenizer may cut observations elsewhere
            q.id: kept[q.id] for q in questions if q.id in kept and not flaw(kept[q.id], q, config, tokenizer)
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, stored)  # completes a half-written last line

    async def play(self, questions: Sequence[Question]) -> None:
        """Play the questions that are neither solved nor out of tries."""
        teacher = self._config.teacher
        waiting = [question for question in questions if self._wants(question)]
        async with ChatClient(str(teacher.endpoint), os.environ.get(API_KEY, ""), teacher.model) as chat:
            await play_all(waiting, lambda question: self._teach(question, chat), teacher.concurrency, "teacher")

    def _wants(self, question: Question) -> bool:
        return question.id not in self.accepted and self._tries[question.id] < self._config.teacher.tries

    async def _teach(self, question: Question, chat: ChatClient) -> None:
        config = self._config
        while self._wants(question):
            database = Database(question.database, config.sandbox)
            episode = await run_episode(
                question,
                toolbox=Toolbox(database, self._tokenizer, config.agent, question.question),
                chat=chat,
                tokenizer=self._tokenizer,
                limits=config.agent,
                temperature=config.teacher.temperature,
            )
            if episode.stop is StopReason.INFRASTRUCTURE:
                raise UserError(
                    f"The teacher {chat.base_url} failed ({episode.error}); mend that and run the same command "
                    "again, it continues."
                )
            reason, trace = await asyncio.to_thread(self._judged, question, episode, database)
            row = {
                "question_id": question.id,
                "asked": self._asked[question.id],
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

    def _judged(self, question: Question, episode: Episode, database: Database) -> tuple[str, Trace | None]:
        """Why an episode is not taught ("" if it is), and its trace, in which turns whose calls all worked are
        trained."""
        if episode.stop is not StopReason.ANSWERED:
            return episode.stop.value, None
        if any(turn.malformed for turn in episode.turns):
            return "unreadable call", None
        if not judge(question, episode, database, self._config.grpo).correct:
            return "wrong", None
        turns = iter(episode.turns)
        trained = [message["role"] == "assistant" and all(next(turns).ok) for message in episode.messages]
        trace = make_trace(question, episode.messages, trained, self._config, {"teacher": self._config.teacher.model})
        reason = flaw(trace, question, self._config, self._tokenizer)
        return reason, None if reason else trace
