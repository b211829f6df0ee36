"""From measured lengths to the limits of an episode and of a training row. Pure arithmetic.

The traces are an expert's; a policy that explores takes wrong turns. So the context gets room for two turns more than the
longest expert needs, and a turn half as much again as the longest expert's. Every limit is rounded up to a round number
of tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.config.schema import Config
from stage2_grpo.preflight.budget.lengths import EpisodeLengths

_EXTRA_TURNS = 2
_TURN_HEADROOM = 1.5
_STEP = 32  # tokens; limits are multiples of it
_OBSERVATION_STEP = 16
_SMALLEST_OBSERVATION = 64  # tokens; an error message has to fit


@dataclass(frozen=True)
class Limits:
    """The settings that bound an episode, with the names and units they have in pipeline.yaml."""

    max_turns: int
    max_turn_tokens: int
    observation_tokens: int
    context_tokens: int
    max_prompt_length: int
    max_response_length: int
    trajectory_response_length: int
    max_model_len: int

    def settings(self) -> dict[str, int]:
        """The same by the dotted name of the setting."""
        sections = {"max_turns": "agent", "max_turn_tokens": "agent", "observation_tokens": "agent"}
        sections |= {"context_tokens": "agent", "max_model_len": "vllm"}
        return {f"{sections.get(name, 'grpo')}.{name}": value for name, value in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class Overflow:
    """Shares (0 to 1) of the questions or episodes that a set of limits cannot hold."""

    prompts: float  # of the questions: the first prompt is too long, every episode is dropped
    turns: float  # of the episodes: more turns than allowed
    answers: float  # an answer longer than a turn may be
    context: float  # longer than the context
    rows: float  # its part after the first prompt is cut in training
    any: float  # at least one of the last four
    observations: float  # of the tool answers: cut, which loses detail but ends nothing


def derive(episodes: Sequence[EpisodeLengths], openings: Mapping[str, int], config: Config, share: float) -> Limits:
    """Limits under which `share` (0 to 1) of the measured episodes run to their end.

    `openings` are first-prompt tokens by question, of all questions of the run: none of them may be too long.
    """
    observation = _round(max(_SMALLEST_OBSERVATION, quantile([*_uncut(episodes)], share)), _OBSERVATION_STEP)
    turns = quantile([episode.turns for episode in episodes], share) + _EXTRA_TURNS
    answer = _round(_TURN_HEADROOM * quantile([max(episode.answers) for episode in episodes], share))
    growth = quantile([growth for episode in episodes for growth in episode.growths] or [0], share)
    longest, shortest = max(openings.values()), min(openings.values())
    needed = quantile([_total(episode, observation) for episode in episodes], share)
    usual = quantile([answer for episode in episodes for answer in episode.answers], share)
    context = _round(max(needed + _EXTRA_TURNS * (usual + growth), longest + answer + observation))
    later = quantile([_total(episode, observation) - episode.answers[-1] for episode in episodes], share)
    return Limits(
        max_turns=turns,
        max_turn_tokens=answer,
        observation_tokens=observation,
        context_tokens=context,
        max_prompt_length=_round(max(longest, later)),  # a turn that cannot be merged is a row with its whole prompt
        max_response_length=answer,
        trajectory_response_length=context - shortest,
        max_model_len=context,
    )


def current(config: Config) -> Limits:
    """The limits that the settings hold now."""
    sections = (config.agent, config.grpo, config.vllm)
    names = [field.name for field in dataclasses.fields(Limits)]
    found = {name: getattr(section, name) for section in sections for name in names if hasattr(section, name)}
    return Limits(**found)


def overflow(episodes: Sequence[EpisodeLengths], openings: Mapping[str, int], limits: Limits) -> Overflow:
    """What does not fit the limits; observations count as cut to them."""
    totals = [_total(episode, limits.observation_tokens) for episode in episodes]
    turns = [episode.turns > limits.max_turns for episode in episodes]
    answers = [max(episode.answers) > limits.max_turn_tokens for episode in episodes]
    context = [total > limits.context_tokens for total in totals]
    rows = [
        total - episode.first_prompt > limits.trajectory_response_length
        for total, episode in zip(totals, episodes, strict=True)
    ]
    return Overflow(
        prompts=_share([opening > limits.max_prompt_length for opening in openings.values()]),
        turns=_share(turns),
        answers=_share(answers),
        context=_share(context),
        rows=_share(rows),
        any=_share([any(faults) for faults in zip(turns, answers, context, rows, strict=True)]),
        observations=_share([length > limits.observation_tokens for length in _uncut(episodes)]),
    )


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _uncut(episodes: Sequence[EpisodeLengths]) -> Iterator[int]:
    """Lengths of all tool answers, uncut where they were replayed; 0 when there is none."""
    lengths = [length for episode in episodes for length in episode.uncut or episode.observations]
    yield from lengths or [0]


def _total(episode: EpisodeLengths, observation_tokens: int) -> int:
    return episode.capped(observation_tokens)


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _round(value: float, step: int = _STEP) -> int:
    return step * math.ceil(value / step)
