"""`python -m data synthesize --paraphrase URL`: an OpenAI-compatible endpoint puts the questions into other words.

The endpoint gets a question and answers with another wording. Then it gets the schema and the new wording alone, and
answers with SQL. The new wording replaces the old one only if this SQL gives the result of the gold. Every answer is
appended to a journal as it arrives, under a hash of what was asked, so an interrupted command continues and pays for no
answer twice. Model, concurrency, temperature and prices are those of the teacher.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data.sql_form import question_key
from shared.agent.chat_client import API_KEY, ChatClient, ContextOverflow, InfrastructureError
from shared.agent.episode import submitted_block
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.run import play_all
from shared.records import JsonlTail, Question, append_jsonl, write_jsonl
from shared.reward.execution_match import execution_match
from shared.reward.queries import gold_is_ordered
from shared.runs.manifest import fingerprint
from shared.sql.database import Database, SqlError, quoted

JOURNAL = "paraphrases.jsonl"
_ANSWER_TOKENS = 1024
_LONGEST = 500  # characters of a question
_REWRITE = (
    "Rewrite the user's question as another person would ask a colleague. Keep its meaning, every name, value and "
    "number, what is to be listed and in which order. Answer with the rewritten question alone."
)
_QUERY = (
    "You write SQLite queries. Answer the user's question with one query in a ```sql block. The query returns exactly "
    "the columns that the question asks for. The database:\n\n"
)


def paraphrase(
    questions: Sequence[Question], database: Database, config: Config, url: str, journal: Path
) -> tuple[list[Question], str]:
    """The questions, each in other words where these are accepted, and one line with the counts and the bill.

    Raises UserError when the endpoint fails for good; the same call with the same journal continues.
    """
    endpoint = _Endpoint(url, config, journal)
    asyncio.run(endpoint.play(questions, _schema(database)))
    taken = {question_key(question.question) for question in questions}
    refused: Counter[str] = Counter()
    reworded = []
    for question in questions:
        text, sql = endpoint.answers[question.id]
        reason = _flaw(text, taken) or _disagreement(sql, question, database)
        refused.update([reason] if reason else [])
        taken |= set() if reason else {question_key(text)}
        reworded.append(question if reason else replace(question, question=text))
    return reworded, endpoint.bill_line(len(questions), refused)


class _Endpoint:
    """The answers of one endpoint, in memory and in the journal."""

    def __init__(self, url: str, config: Config, journal: Path) -> None:
        self.answers: dict[str, tuple[str, str]] = {}  # question id -> its new wording, and the SQL that this led to
        self._url, self._teacher, self._journal = url, config.teacher, journal
        self._used: dict[str, dict[str, int]] = {}  # hash of what was asked -> tokens
        rows = JsonlTail(journal).new_rows()
        self._known = {row["asked"]: row for row in rows if {"asked", "answer"} <= set(row)}
        journal.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(journal, rows)  # drops a half-written last line

    async def play(self, questions: Sequence[Question], schema: str) -> None:
        """Fill `answers`."""
        async with ChatClient(self._url, os.environ.get(API_KEY, ""), self._teacher.model) as chat:

            async def ask(question: Question) -> None:
                text = await self._answer(chat, _REWRITE, question.question, self._teacher.temperature)
                text = " ".join(text.split()).strip('"')
                useless = _flaw(text, {question_key(question.question)})
                answer = "" if useless else await self._answer(chat, _QUERY + schema, text, 0.0)
                self.answers[question.id] = text, submitted_block(answer) or answer.strip()

            await play_all(questions, ask, self._teacher.concurrency, "paraphrasing")

    async def _answer(self, chat: ChatClient, system: str, user: str, temperature: float) -> str:
        """The answer to one request, from the journal where it is there; "" when the prompt is too long."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        asked = fingerprint(url=self._url, model=self._teacher.model, temperature=temperature, messages=messages)
        if asked not in self._known:
            try:
                completion = await chat.complete(messages, tools=(), max_tokens=_ANSWER_TOKENS, temperature=temperature)
            except ContextOverflow:
                return ""
            except InfrastructureError as error:
                raise UserError(f"{self._url} failed ({error}); mend that, then the same command continues.") from error
            row = {"asked": asked, "answer": completion.content, "prompt_tokens": completion.prompt_tokens}
            self._known[asked] = {**row, "completion_tokens": completion.completion_tokens}
            append_jsonl(self._journal, self._known[asked])
        self._used[asked] = self._known[asked]
        return str(self._known[asked]["answer"])

    def bill_line(self, asked: int, refused: Counter[str]) -> str:
        """What became of the questions and what the answers cost since the first start, as one line."""
        prompt = sum(row["prompt_tokens"] for row in self._used.values())
        completion = sum(row["completion_tokens"] for row in self._used.values())
        cost = self._teacher.cost(prompt, completion)
        reasons = ", ".join(f"{reason} {count}" for reason, count in refused.items()) or "none"
        return (
            f"paraphrase: {asked - refused.total()} of {asked} questions accepted, {refused.total()} refused "
            f"({reasons}); {len(self._used):,} requests, {prompt:,} prompt and {completion:,} completion tokens"
            + (f", cost {cost:g}" if cost else "")
        )


def _flaw(text: str, taken: set[str]) -> str:
    """Why a new wording is refused without a look at its SQL, or ""."""
    if not text or len(text) > _LONGEST:
        return "no question"
    return "asked already" if question_key(text) in taken else ""


def _disagreement(sql: str, question: Question, database: Database) -> str:
    """Why the SQL that a new wording led to does not confirm it, or ""."""
    try:
        gold, answer = (database.execute(text, database.limits.max_compare_rows) for text in (question.gold_sql, sql))
    except SqlError:
        return "no SQL that runs"
    return "" if execution_match(gold, answer, ordered=gold_is_ordered(question.gold_sql)) else "other result"


def _schema(database: Database) -> str:
    """The tables as CREATE TABLE statements."""
    statements = []
    for table in database.schema.tables:
        keys = [f"FOREIGN KEY ({quoted(c.name)}) REFERENCES {c.references}" for c in table.columns if c.references]
        columns = [f"{quoted(column.name)} {column.type}" for column in table.columns]
        statements.append(f"CREATE TABLE {quoted(table.name)} ({', '.join(columns + keys)});")
    return "\n".join(statements)
