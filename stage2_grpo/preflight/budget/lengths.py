"""Measured lengths of episodes in the model's own tokens: what each turn adds to the context, and what tools would say.

An episode is its first prompt, then turn after turn: what the model writes (end-of-turn token included) and what comes
back (observations and the template's markup around them). Sources are the traces of stage 1, rendered and counted here, and
recorded episodes, whose counts are the server's. Both hold observations that were cut; `replayed` runs their calls
again without the limit, so that a limit can be chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.agent.prompts import TOOLS, opening_messages
from shared.agent.tools import Toolbox
from shared.config.schema import SandboxConfig
from shared.errors import UserError
from shared.models.chat_template import ChatTemplate
from shared.models.tokenizer import Tokenizer
from shared.records import Message, Question, ToolCall
from shared.sql.database import Database

_NO_LIMIT = 100_000  # tokens of an observation


@dataclass(frozen=True)
class EpisodeLengths:
    """Tokens of one episode. `growths[i]` is what the context gains between turn i and i + 1, beside turn i's own answer."""

    id: str  # of the question
    first_prompt: int
    answers: tuple[int, ...]  # one per turn
    growths: tuple[int, ...]  # one fewer
    observations: tuple[int, ...] = ()  # each tool answer as recorded
    uncut: tuple[int, ...] = ()  # the same without the limit; equal length, or empty when not replayed

    @property
    def turns(self) -> int:
        return len(self.answers)

    @property
    def prompts(self) -> tuple[int, ...]:
        """Prompt tokens of each turn, as a server counts them."""
        prompts = [self.first_prompt]
        for answer, growth in zip(self.answers, self.growths, strict=False):
            prompts.append(prompts[-1] + answer + growth)
        return tuple(prompts)

    @property
    def total(self) -> int:
        """Prompt and answer of the last turn: the context the episode needs."""
        return self.prompts[-1] + self.answers[-1]

    def capped(self, observation_tokens: int) -> int:
        """`total` with observations limited to so many tokens; needs a replay to exceed what was recorded."""
        change = sum(
            min(uncut, observation_tokens) - was for uncut, was in zip(self.uncut, self.observations, strict=False)
        )
        return self.total + change


class Counter:
    """Counts conversations as the server will: chat template and tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self._template = ChatTemplate.from_folder(folder)
        self._end = self._template.special_tokens.get("eos_token", "")

    def opening(self, question: str) -> int:
        """Tokens of the first prompt for a question."""
        return self.tokenizer.count(self._template.render(opening_messages(question), TOOLS, prompt=True))

    def episode(self, id: str, messages: Sequence[Message], tools: list[dict[str, Any]]) -> EpisodeLengths:
        """Lengths of a whole conversation; raises UserError when no assistant speaks in it."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError(f"The conversation of {id} has no assistant turn; make the traces again.")
        prompts = [self._template.render(messages[:i], tools, prompt=True) for i in turns]
        answers = [
            self._answer(self._template.render(messages[: i + 1], tools), prompt)
            for i, prompt in zip(turns, prompts, strict=True)
        ]
        counts = [self.tokenizer.count(prompt) for prompt in prompts]
        observed = [message["content"] for message in messages if message["role"] == "tool"]
        return EpisodeLengths(
            id,
            counts[0],
            tuple(answers),
            tuple(after - before - answer for before, after, answer in zip(counts, counts[1:], answers, strict=False)),
            tuple(map(self.tokenizer.count, observed)),
        )

    def _answer(self, longer: str, prompt: str) -> int:
        """Tokens of a turn up to its end-of-turn token; what the template writes after it belongs to the next prompt."""
        text = longer[len(prompt) :]
        end = text.rfind(self._end) if self._end else -1
        return self.tokenizer.count(text if end < 0 else text[: end + len(self._end)])


def from_trace(trace: Mapping[str, Any], counter: Counter) -> EpisodeLengths:
    """Lengths of one line of stage 1's traces.jsonl."""
    return counter.episode(trace["id"], trace["messages"], json.loads(trace["tools"]))


def from_record(row: Mapping[str, Any], counter: Counter) -> EpisodeLengths | None:
    """Lengths of one line of an evaluation's episodes.jsonl, by the server's own counts; None for one without turns."""
    turns = row["turns"]
    if not turns:
        return None
    prompts = [turn["prompt_tokens"] for turn in turns]
    answers = [turn["completion_tokens"] for turn in turns]
    growths = [after - before - answer for before, after, answer in zip(prompts, prompts[1:], answers, strict=False)]
    observed = [counter.tokenizer.count(text) for turn in turns for text in turn["observations"]]
    return EpisodeLengths(row["question_id"], prompts[0], tuple(answers), tuple(growths), tuple(observed))


def calls_of(row: Mapping[str, Any]) -> list[ToolCall]:
    """The calls of a trace or a recorded episode, in order."""
    if "turns" in row:
        return [ToolCall(call["name"], call["arguments"]) for turn in row["turns"] for call in turn["calls"]]
    calls = [call["function"] for message in row["messages"] for call in message.get("tool_calls") or ()]
    return [ToolCall(call["name"], json.loads(call["arguments"])) for call in calls]


class Replay:
    """Runs recorded calls again on their database, without a limit on what is shown."""

    def __init__(self, questions: Iterable[Question], tokenizer: Tokenizer, sandbox: SandboxConfig) -> None:
        self._paths = {question.id: question.database for question in questions}
        self._tokenizer = tokenizer
        self._sandbox = sandbox
        self._toolboxes: dict[str, Toolbox] = {}
        self._lengths: dict[tuple[str, str], int] = {}

    def uncut(self, episode: EpisodeLengths, calls: Sequence[ToolCall]) -> EpisodeLengths:
        """The episode with its uncut observations; as it was when its question is not at hand or a call had no answer."""
        path = self._paths.get(episode.id)
        if path is None or len(calls) != len(episode.observations):
            return episode
        return replace(episode, uncut=tuple(self._length(path, call) for call in calls))

    def _length(self, path: str, call: ToolCall) -> int:
        key = path, json.dumps([call.name, call.arguments], sort_keys=True)
        if key not in self._lengths:
            if path not in self._toolboxes:
                self._toolboxes[path] = Toolbox(Database(path, self._sandbox), self._tokenizer, _NO_LIMIT)
            self._lengths[key] = self._tokenizer.count(self._toolboxes[path].run(call).text)
        return self._lengths[key]
