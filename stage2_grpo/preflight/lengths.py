"""How long episodes are, in the model's own tokens, and the limits that follow.

An episode is its first prompt, then turn after turn what the model writes (end-of-turn token included) and what comes
back (observations and the template's markup around them). Recorded observations were cut to a limit; their calls are
run again without one, so that a better limit can be chosen.

The traces of stage 1 are an expert's, and a policy that explores takes wrong turns. So the context gets room for two
turns more than the longest expert needs, and a turn half as much again as the longest expert's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shared.agent.prompts import prompts_of
from shared.agent.tools import Toolbox
from shared.config.schema import AgentConfig, Config, SandboxConfig
from shared.models.chat_template import ChatTemplate
from shared.models.tokenizer import Tokenizer
from shared.records import JsonlTail, Message, Question, ToolCall
from shared.sql.database import Database

LIMITS = ("agent.max_turns", "agent.max_turn_tokens", "agent.observation_tokens", "agent.context_tokens")
Limits = Mapping[str, int]
"""Settings that bound an episode, by their dotted names."""
_NO_LIMIT = 100_000  # tokens of an observation
_EXTRA_TURNS = 2
_TURN_HEADROOM = 1.5
_SMALLEST_OBSERVATION = 64  # tokens; an error message has to fit


@dataclass(frozen=True)
class EpisodeLengths:
    """Tokens of one episode. `growths[i]`: what the prompt gains from turn i to i + 1 besides turn i's answer."""

    first_prompt: int
    answers: tuple[int, ...]  # one per turn
    growths: tuple[int, ...]  # one fewer
    observations: tuple[int, ...] = ()  # each tool answer as recorded
    uncut: tuple[int, ...] = ()  # the same without a limit; as recorded where they could not be run again

    def total(self, observation_tokens: int = _NO_LIMIT) -> int:
        """The context that the episode needs with observations cut to so many tokens."""
        observed = sum(min(uncut, observation_tokens) for uncut in self.uncut) - sum(self.observations)
        return self.first_prompt + sum(self.answers) + sum(self.growths) + observed


class Counter:
    """Counts conversations as the server will: with chat template and tokenizer of a model folder, and the tools."""

    def __init__(self, folder: Path, agent: AgentConfig) -> None:
        self.agent, self._prompts = agent, prompts_of(agent)
        self.tokenizer = Tokenizer.from_folder(folder)
        self._template = ChatTemplate.from_folder(folder)
        self._end = self._template.special_tokens.get("eos_token", "")

    def opening(self, question: str) -> int:
        """Tokens of the first prompt for a question."""
        return self.tokenizer.count(
            self._template.render(self._prompts.opening(question), self._prompts.tools, prompt=True)
        )

    def prompts_and_answers(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Tokens of prompt and answer of each turn; what the template writes after an answer is the next prompt's."""
        counts = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._template.render(messages[:i], self._prompts.tools, prompt=True)
                text = self._template.render(messages[: i + 1], self._prompts.tools)[len(prompt) :]
                if self._end in text:
                    text = text[: text.rfind(self._end) + len(self._end)]
                counts.append((self.tokenizer.count(prompt), self.tokenizer.count(text)))
        return counts


def measure(
    files: Iterable[Path], questions: Iterable[Question], counter: Counter, sandbox: SandboxConfig
) -> Iterator[EpisodeLengths]:
    """The lengths of all episodes in traces and recordings, with their observations run again without a limit."""
    databases = {question.id: question.database for question in questions}
    unlimited = counter.agent.model_copy(update={"observation_tokens": _NO_LIMIT})

    @cache
    def opened(database: str) -> Database:
        return Database(database, sandbox)

    @cache
    def uncut(database: str, name: str, arguments: str) -> int:
        toolbox = Toolbox(opened(database), counter.tokenizer, unlimited)  # a fresh one has seen no call before
        return counter.tokenizer.count(toolbox.run(ToolCall(name, json.loads(arguments))).text)

    for row in (row for file in files for row in JsonlTail(file).new_rows()):
        messages: list[Message] = row["messages"]
        counts = counter.prompts_and_answers(messages)
        if not counts:
            continue
        prompts, answers = zip(*counts, strict=True)
        growths = tuple(after - before - answer for (before, answer), after in zip(counts, prompts[1:], strict=False))
        observed = tuple(counter.tokenizer.count(m["content"]) for m in messages if m["role"] == "tool")
        calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
        database = databases.get(row.get("id") or row["question_id"])
        whole = observed
        if database and len(calls) == len(observed):
            whole = tuple(uncut(database, call["name"], call["arguments"]) for call in calls)
        yield EpisodeLengths(prompts[0], answers, growths, observed, whole)


def derive(episodes: Sequence[EpisodeLengths], openings: Sequence[int], share: float) -> dict[str, int]:
    """Limits under which `share` (0 to 1) of the measured episodes run to their end.

    `openings` are the first-prompt tokens of all questions of the run: none of them may be too long.
    """
    answers = [answer for episode in episodes for answer in episode.answers]
    observation = _up(
        max(_SMALLEST_OBSERVATION, quantile([u for episode in episodes for u in episode.uncut], share)), 16
    )
    answer = _up(_TURN_HEADROOM * quantile([max(episode.answers) for episode in episodes], share))
    growth = quantile([growth for episode in episodes for growth in episode.growths], share)
    needed = quantile([episode.total(observation) for episode in episodes], share)
    more = _EXTRA_TURNS * (quantile(answers, share) + growth)
    context = _up(max(needed + more, max(openings) + answer + observation))
    values = (
        quantile([len(episode.answers) for episode in episodes], share) + _EXTRA_TURNS,
        answer,
        observation,
        context,
    )
    return dict(zip(LIMITS, values, strict=True))


def current(config: Config) -> dict[str, int]:
    """The limits that the settings hold now."""
    return {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in LIMITS}


def overflow(episodes: Sequence[EpisodeLengths], openings: Sequence[int], limits: Limits) -> dict[str, float]:
    """Shares (0 to 1) of questions, episodes and tool answers that do not fit; observations count as cut."""
    turns, turn, observation, context = (limits[name] for name in LIMITS)
    faults = {
        "episodes: more turns than agent.max_turns": [len(episode.answers) > turns for episode in episodes],
        "episodes: a turn is cut": [max(episode.answers) > turn for episode in episodes],
        "episodes: end at the context limit": [episode.total(observation) > context for episode in episodes],
    }
    shares = {
        "questions: first prompt too long, dropped": [opening >= context for opening in openings],
        **faults,
        "episodes: any of these three": [any(row) for row in zip(*faults.values(), strict=True)],
        "tool answers: shortened": [length > observation for episode in episodes for length in episode.uncut],
    }
    return {name: sum(flags) / max(1, len(flags)) for name, flags in shares.items()}


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed (nearest rank); 0 of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0


def _up(value: float, step: int = 32) -> int:
    """The next multiple of `step`."""
    return step * math.ceil(value / step)
