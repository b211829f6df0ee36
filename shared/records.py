"""The typed records that stages exchange: a question, a tool call, a turn, an episode.

Everything here is plain data without third-party imports. On disk a record is one object per line of a JSONL file.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.tool_calls import ToolCall as ToolCall  # belongs to the parser, which is also a package of its own

Message = dict[str, Any]
"""One OpenAI chat message: role, content, and for assistants optionally `tool_calls` (arguments as a JSON string)."""


@dataclass(frozen=True)
class Question:
    """One text-to-SQL task: a question about a database and the gold SQL that answers it."""

    id: str  # unique within a data set, stable across runs
    db_id: str  # name of the database
    question: str
    gold_sql: str
    database: str  # path of the SQLite file
    difficulty: str = "unknown"  # easy | medium | hard | unknown
    form: str = ""  # generator form or source, for reports
    split_kind: str = ""  # "seen_database" | "unseen_database" in the test split, else ""
    copies: str = ""  # folder of perturbed copies of the database, on which a rewarded answer must agree too; "" = none


class StopReason(enum.StrEnum):
    """Why an episode ended. Infrastructure endings are never rewarded or scored as wrong answers."""

    ANSWERED = "answered"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    LENGTH = "length"
    NO_ANSWER = "no_answer"
    INFRASTRUCTURE = "infrastructure"  # see `Episode.error`


STOP_MEANING = {
    StopReason.ANSWERED: "the model gave a final answer without a tool call",
    StopReason.TURN_LIMIT: "the last allowed turn still asked for a tool",
    StopReason.CONTEXT_LIMIT: "the next prompt would not fit the context window",
    StopReason.LENGTH: "the final turn was cut by the token limit of one turn",
    StopReason.NO_ANSWER: "the model sent an empty message",
    StopReason.INFRASTRUCTURE: "the endpoint, the sandbox or the machine failed",
}


@dataclass(frozen=True)
class Turn:
    """One model turn and what became of it."""

    text: str | None  # raw text of the model, special tokens removed; None when the server gave no token ids
    content: str  # text outside of tool calls, as the server's parser returned it
    calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]  # one sentence for each call that could not be read
    observations: tuple[str, ...]  # one per call, then one per malformed call
    ok: tuple[bool, ...]  # parallel to `observations`: the tool ran without error
    hermes_calls: int | None  # calls the stock Hermes grammar finds in `text`; None when `text` is None
    prompt_tokens: int
    completion_tokens: int
    merged: bool | None  # its prompt starts with the previous prompt + response tokens; None for the first turn


@dataclass(frozen=True)
class Reward:
    """The verdict on one episode; the dense terms lie between 0 and 1, unweighted."""

    correct: bool
    valid_call: float  # share of its calls that could be read
    executed: float  # 1.0 when any execute_sql ran without error
    right_tables: float  # overlap (F1) of the tables that the submission and the gold read
    total: float
    lucky: bool = False  # equal to the gold's result, but not on a perturbed copy of the database
    right_result: float = (
        0.0  # overlap (F1) of a wrong result with the gold's, where grpo.reward_right_result asks for it
    )


@dataclass(frozen=True)
class Episode:
    """One run of the agent on one question, a line of every `episodes.jsonl`.

    `messages` starts with the system prompt.
    """

    question_id: str
    turns: tuple[Turn, ...]
    stop: StopReason
    submitted_sql: str | None  # last ```sql block of the final answer, else last successful execute_sql
    messages: list[Message] = field(default_factory=list)
    error: str = ""  # for StopReason.INFRASTRUCTURE
    seconds: float = 0.0  # of playing
    reward: Reward | None = None  # None until the episode is judged, and for StopReason.INFRASTRUCTURE
    reward_seconds: float = 0.0  # of judging; measured in GRPO only
    rollout_id: str = ""  # of the gateway, in GRPO only, as are the next two
    split: str = ""  # "train" or "val"
    step: int | None = None  # of the trainer; for a validation the last one before it


def to_json(record: Any) -> str:
    """One JSONL line (without newline) of a record."""
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False)


def question_from_json(line: str) -> Question:
    """Inverse of `to_json` for questions; anything else raises ValueError."""
    row = json.loads(line)
    try:
        question = Question(**row)
    except TypeError:
        question = None
    if question is None or not all(isinstance(value, str) for value in row.values()):
        needed = [each.name for each in dataclasses.fields(Question) if each.default is dataclasses.MISSING]
        raise ValueError(f"it is not an object with the texts {', '.join(needed)}")
    return question


def episode_from_row(row: dict[str, Any]) -> Episode:
    """The episode of which `to_json` wrote this row; unknown or missing fields raise TypeError or KeyError."""
    turns = []
    for turn in row["turns"]:
        lists = {key: tuple(turn[key]) for key in ("malformed", "observations", "ok")}
        turns.append(Turn(**{**turn, **lists, "calls": tuple(ToolCall(**call) for call in turn["calls"])}))
    reward = Reward(**row["reward"]) if row.get("reward") else None
    return Episode(**{**row, "turns": tuple(turns), "stop": StopReason(row["stop"]), "reward": reward})


def portable(question: Question, file: Path, root: Path) -> Question:
    """The question as `file` holds it: paths below `root` are relative to the file, so that `root` can be moved."""

    def relative(named: str) -> str:
        inside = named and Path(named).is_relative_to(root.resolve())
        return os.path.relpath(named, file.parent.resolve()) if inside else named

    return dataclasses.replace(question, database=relative(question.database), copies=relative(question.copies))


def write_jsonl(path: Path, records: Iterable[Any]) -> int:
    """Write records to `path` through a temporary file (a reader never sees half a file); returns the row count."""
    partial = path.with_name(path.name + ".partial")
    count = 0
    with partial.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(_line(record))
            count += 1
    partial.replace(path)
    return count


def append_jsonl(path: Path, record: Any) -> None:
    """Add one line in one write, so that a killed process rarely leaves half of it.

    The file is opened each time, because another process may replace it meanwhile.
    """
    with path.open("a", encoding="utf-8") as stream:
        stream.write(_line(record))


def _line(record: Any) -> str:
    return (json.dumps(record, ensure_ascii=False) if isinstance(record, dict) else to_json(record)) + "\n"


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Number and JSON value of each line that is not blank.

    Raises UserError naming the line that is not JSON, or the file that is not text.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error}); restore the file.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, line {number} is not JSON ({error}); correct the line.") from error


@dataclass
class JsonlTail:
    """Reads the rows that were appended to a JSONL file since the last call; half a line waits for its end.

    A complete line that is not a JSON object, as a killed writer leaves it, is passed over.
    """

    path: Path
    _offset: int = field(default=0, init=False)

    def new_rows(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                block = stream.read()
        except FileNotFoundError:
            return []
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [row for line in complete.splitlines() if (row := _object(line)) is not None]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_questions(path: Path) -> Iterator[Question]:
    """Questions of a JSONL file written by `write_jsonl`, in order; ValueError names the first line that is none."""
    home = path.parent.resolve()
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    question = question_from_json(line)
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from error
                database, copies = (
                    named and os.path.normpath(home / named) for named in (question.database, question.copies)
                )
                yield dataclasses.replace(question, database=database, copies=copies)


def read_episodes(path: Path) -> list[Episode]:
    """The episodes of a JSONL file, none if it is missing; the half line of a killed process does not count."""
    return [episode_from_row(row) for row in JsonlTail(path).new_rows()]
