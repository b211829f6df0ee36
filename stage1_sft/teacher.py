"""Traces from episodes that were played and judged (rejection sampling): by a teacher, or by the model itself.

A question is played up to `teacher.tries` times until one episode is right by the reward's rule, on the perturbed
copies of its database too, and its trace passes the checks of a synthesised one. In a self-taught round the model that
stage 1 has just trained plays each question `sft.round_samples` times, and its shortest right episode is taught
(rejection-sampling fine-tuning, Yuan et al. 2023; the rationales of STaR, Zelikman et al. 2022, are filtered alike).

Turns with a failed call stay in the trace as what the next turn recovers from, but are not trained. Each episode is
appended to a file of the run as it ends, so an interrupted run plays no finished episode twice."""

from __future__ import annotations

import asyncio
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
from shared.processes.vllm_server import vllm_server
from shared.records import Episode, JsonlTail, Question, StopReason, append_jsonl, write_jsonl
from shared.reward.reward import judge
from shared.runs.manifest import RunDirectory, fingerprint
from shared.sql.database import Database
from stage1_sft.traces import Trace, answers_gold, calls_of, flaw, make_trace


def teach(
    questions: Sequence[Question], config: Config, tokenizer: Tokenizer, run: RunDirectory
) -> tuple[dict[str, Trace], dict[str, Any]]:
    """Accepted traces by question id, in the order of the questions, and the bill of their cost since the first start.

    Raises UserError when the endpoint fails for good; the next call continues.
    """
    lessons = Lessons(questions, config, tokenizer, lesson_file(config, run))
    asyncio.run(lessons.play(str(config.teacher.endpoint), config.teacher.model, config.teacher.concurrency))
    return lessons.traces(), lessons.bill()


def play_round(
    model: Path, questions: Sequence[Question], config: Config, folder: Path
) -> tuple[dict[str, Trace], dict[str, Any]]:
    """The shortest right episode of each question as `model` plays it, by question id, and the bill of the round.

    The server starts only if an episode is missing in `folder`, which gets the episodes and its log.
    """
    lessons = Lessons(questions, config, Tokenizer.from_folder(model), folder / "episodes.jsonl", own=True)
    if lessons.waiting:
        one_gpu = config.vllm.model_copy(update={"tensor_parallel": 1})  # this process has hidden the others
        with vllm_server(model, config.model_copy(update={"vllm": one_gpu}), folder) as url:
            asyncio.run(lessons.play(url, "auto", config.evaluate.concurrency))
    return lessons.traces(), lessons.bill()


def bill_line(bill: dict[str, Any]) -> str:
    """What was played, accepted and paid, as one line."""
    tokens, episodes, solved = bill["prompt_tokens"] + bill["completion_tokens"], bill["episodes"], bill["solved"]
    rejected = ", ".join(f"{reason} {count}" for reason, count in bill["rejected"].items()) or "none"
    cost = f", cost {bill['cost']:g}" if "cost" in bill else ""
    return (
        f"{solved} of {bill['asked']} questions solved in {episodes} episodes ({bill['right_share']:.0%} accepted; "
        f"rejected: {rejected}); {bill['requests']:,} requests, {bill['prompt_tokens']:,} prompt and "
        f"{bill['completion_tokens']:,} completion tokens, {tokens // max(1, solved):,} for each trace{cost}"
    )


def lesson_file(config: Config, run: RunDirectory) -> Path:
    """Where the episodes of this teacher are kept: one file for each teacher, temperature, prompt and set of limits."""
    mark = fingerprint(settings=config.part_of("teacher"), prompt=prompts_of(config.agent).mark)
    return run.path / f"teacher-{mark[:12]}.jsonl"


def shortest(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The accepted episode with the fewest turns, then the fewest tokens written; the earliest of equals."""
    accepted = [row for row in rows if row["trace"]]
    return min(accepted, key=lambda row: (row["requests"], row["completion_tokens"]), default=None)


class Lessons:
    """Episodes played so far about these questions, in memory and on disk.

    A row holds `question_id`, `asked` (a hash of text, gold and database contents: other data may use the same ids),
    `reason` (why it was rejected, "" if it was not), submitted_sql, requests, prompt_tokens, completion_tokens, trace.
    """

    def __init__(
        self, questions: Sequence[Question], config: Config, tokenizer: Tokenizer, file: Path, *, own: bool = False
    ) -> None:
        self._config, self._tokenizer, self._file, self._own = config, tokenizer, file, own
        self._tries = config.sft.round_samples if own else config.teacher.tries
        contents = {path: fingerprint(file=Path(path)) for path in {question.database for question in questions}}
        self._asked = {q.id: fingerprint(asked=[q.id, q.question, q.gold_sql, contents[q.database]]) for q in questions}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, stored := JsonlTail(file).new_rows())  # completes a half-written last line
        self._rows: dict[str, list[dict[str, Any]]] = {}
        for question in questions:
            rows = [row for row in stored if row.get("asked") == self._asked[question.id]]
            for row in rows:  # another tokenizer may cut observations elsewhere
                if row["trace"] and (reason := flaw(row["trace"], question, config, tokenizer)):
                    row |= {"trace": None, "reason": reason}
            self._rows[question.id] = rows
        self.waiting = [question for question in questions if self._wants(question)]

    def traces(self) -> dict[str, Trace]:
        """The trace of each solved question by its id, in the order of the questions."""
        best = {name: shortest(rows) for name, rows in self._rows.items()}
        return {name: row["trace"] for name, row in best.items() if row}

    def bill(self) -> dict[str, Any]:
        """`asked` and `solved` questions, `episodes`, the share of right ones, those `rejected` by reason, answered
        `requests`, tokens and, of a teacher with teacher.*_price, the `cost`."""
        rows, teacher = [row for rows in self._rows.values() for row in rows], self._config.teacher
        requests, prompt, completion = (
            sum(row[kind] for row in rows) for kind in ("requests", "prompt_tokens", "completion_tokens")
        )
        bill: dict[str, Any] = {
            "asked": len(self._rows),
            "solved": len(self.traces()),
            "episodes": len(rows),
            "right_share": round(sum(not row["reason"] for row in rows) / max(1, len(rows)), 4),
            "rejected": dict(Counter(row["reason"] for row in rows if row["reason"])),
            "requests": requests,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
        }
        if not self._own and (teacher.prompt_price or teacher.completion_price):
            bill["cost"] = teacher.cost(prompt, completion)
        return bill

    async def play(self, endpoint: str, model: str, concurrency: int) -> None:
        """Play the questions that need another episode, at most `concurrency` at a time."""
        async with ChatClient(endpoint, os.environ.get(API_KEY, ""), model) as chat:
            await play_all(self.waiting, lambda question: self._play(question, chat), concurrency, "episodes")

    def _wants(self, question: Question) -> bool:
        rows = self._rows[question.id]
        return len(rows) < self._tries and (self._own or not any(row["trace"] for row in rows))

    async def _play(self, question: Question, chat: ChatClient) -> None:
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
                    f"The {'model' if self._own else 'teacher'} {chat.base_url} failed ({episode.error}); mend that "
                    "and run the same command again, it continues."
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
            self._rows[question.id].append(row)
            append_jsonl(self._file, row)

    def _judged(self, question: Question, episode: Episode, database: Database) -> tuple[str, Trace | None]:
        """Why an episode is not taught ("" if it is), and its trace.

        A turn is trained unless one of its calls failed or, in an episode of the model itself, was a query with
        another result than the gold's; a teacher may look around.
        """
        if episode.stop is not StopReason.ANSWERED:
            return episode.stop.value, None
        if any(turn.malformed for turn in episode.turns):
            return "unreadable call", None
        if not judge(question, episode, database, self._config.grpo).correct:
            return "wrong", None
        turns, trained = iter(episode.turns), list[bool]()
        for message in episode.messages:
            right = message["role"] == "assistant" and all(next(turns).ok)
            queries = (
                [call.arguments["sql"] for call in calls_of(message) if call.name == "execute_sql"] if right else []
            )
            wrong = self._own and not all(answers_gold(database, question.gold_sql, sql) for sql in queries)
            trained.append(right and not wrong)
        source = {"self_taught": True} if self._own else {"teacher": self._config.teacher.model}
        trace = make_trace(question, episode.messages, trained, self._config, source)
        reason = flaw(trace, question, self._config, self._tokenizer)
        return reason, None if reason else trace
