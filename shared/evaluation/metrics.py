"""Figures over episodes. Evaluation, readiness gate and GRPO steps all use the definitions of this module.

Episodes that the infrastructure ended are counted and left out of everything else. A share with nothing to count is
None, never 0. What the stock Hermes grammar would have read is known only where the server returned token ids
(`Turn.hermes_calls`).
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.agent.tools import call_key
from shared.records import Episode, Question, StopReason

_KINDS = ("split_kind", "difficulty", "form", "db_id")  # fields of a question by which accuracy is told apart


@dataclass(frozen=True)
class Estimate:
    """The mean of `n` values with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Summary:
    """What one model did on one set of questions."""

    n: int  # judged episodes
    infrastructure_failures: int  # further episodes, excluded from everything else
    accuracy: Estimate | None  # execution accuracy
    mean_reward: float | None
    mixed_share: float | None  # questions with right and wrong episodes
    tool_calls: int
    tool_call_rate: float | None  # episodes with at least one call that the stock Hermes grammar reads
    fallback_share: float | None  # calls that it does not read
    repeated_share: float | None  # calls that repeat an earlier one of their episode
    merged_share: float | None  # turns after the first whose prompt continues the tokens before it
    mean_turns: float | None
    mean_completion_tokens: float | None  # per episode
    mean_prompt_tokens: float | None  # prompt of the last turn
    mean_seconds: float | None  # per episode
    accuracy_by: dict[str, dict[str, Estimate]]  # by each of _KINDS and what it says of the question
    stops: dict[str, int]  # judged episodes by how they ended


@dataclass(frozen=True)
class Paired:
    """Two models on the questions that both answered; `difference` is the second's accuracy minus the first's."""

    both: int
    only_first: int
    only_second: int
    neither: int
    difference: Estimate  # resampled by question
    p_value: float  # exact two-sided sign test (McNemar) on the questions where they differ


def summarise(
    episodes: Sequence[Episode], questions: Iterable[Question] = (), *, samples: int = 1, seed: int = 0
) -> Summary:
    """Figures of judged episodes; the accuracy by kind of question needs the questions.

    Raises ValueError for an episode without its reward, and for one whose question is not among those given.
    """
    questions = list(questions)
    known = {question.id for question in questions}
    judged = [episode for episode in episodes if episode.stop is not StopReason.INFRASTRUCTURE]
    right: dict[str, list[float]] = defaultdict(list)
    for episode in judged:
        if episode.reward is None or (known and episode.question_id not in known):
            raise ValueError(f"the episode of question {episode.question_id} lacks its reward or its question")
        right[episode.question_id].append(float(episode.reward.correct))
    by_kind: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in _KINDS}
    for question in questions:
        for kind, groups in by_kind.items():
            if name := getattr(question, kind):
                groups[name] += right.get(question.id, ())
    correct = [value for values in right.values() for value in values]
    turns = [turn for episode in judged for turn in episode.turns]
    read = [(len(turn.calls), turn.hermes_calls) for turn in turns if turn.hermes_calls is not None]
    calls_read = sum(count for count, _ in read)
    made = [[call_key(call) for turn in episode.turns for call in turn.calls] for episode in judged]
    calls = sum(map(len, made))
    return Summary(
        n=len(judged),
        infrastructure_failures=len(episodes) - len(judged),
        accuracy=estimate(correct, samples, seed) if correct else None,
        mean_reward=mean(episode.reward.total for episode in judged if episode.reward),
        mixed_share=mean(float(len(set(values)) > 1) for values in right.values()),
        tool_calls=calls,
        tool_call_rate=mean(
            float(any(turn.hermes_calls for turn in episode.turns))
            for episode in judged
            if any(turn.hermes_calls is not None for turn in episode.turns)
        ),
        fallback_share=sum(max(0, count - hermes) for count, hermes in read) / calls_read if calls_read else None,
        repeated_share=sum(len(keys) - len({*keys}) for keys in made) / calls if calls else None,
        merged_share=mean(float(turn.merged) for turn in turns if turn.merged is not None),
        mean_turns=mean(float(len(episode.turns)) for episode in judged),
        mean_completion_tokens=mean(float(sum(t.completion_tokens for t in episode.turns)) for episode in judged),
        mean_prompt_tokens=mean(float(episode.turns[-1].prompt_tokens) for episode in judged if episode.turns),
        mean_seconds=mean(episode.seconds for episode in judged),
        accuracy_by={
            kind: {name: estimate(values, samples, seed) for name, values in sorted(groups.items()) if values}
            for kind, groups in by_kind.items()
        },
        stops=dict(sorted(Counter(episode.stop.value for episode in judged).items())),
    )


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def percent(share: float | None) -> str:
    """A share for people: `12.5%`, or a dash where there was nothing to count."""
    return "–" if share is None else f"{share:.1%}"


def interval(found: Mapping[str, Any]) -> str:
    """The fields of an Estimate of shares as "mean (low to high)" in percent."""
    return f"{found['mean']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def estimate(values: Sequence[float], samples: int, seed: int) -> Estimate:
    """Mean and percentile interval of `samples` resamples of `values`, the same for the same seed."""
    n, draw = len(values), random.Random(seed)
    if not n:
        raise ValueError("an interval needs at least one value")
    means = sorted(math.fsum(draw.choices(values, k=n)) / n for _ in range(samples))
    low, high = means[int(0.025 * (samples - 1))], means[math.ceil(0.975 * (samples - 1))]
    return Estimate(math.fsum(values) / n, low, high, n)


def compare_pairs(
    first: Mapping[str, bool], second: Mapping[str, bool], *, samples: int = 2000, seed: int = 0
) -> Paired:
    """Compare verdicts by question id; raises ValueError when no question is common to both."""
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError("the two evaluations share no question")
    differences = [float(second[name]) - float(first[name]) for name in common]
    lost, won = differences.count(-1.0), differences.count(1.0)
    both = sum(first[name] and second[name] for name in common)
    as_uneven = sum(math.comb(won + lost, i) for i in range(min(won, lost) + 1)) / 2 ** (won + lost)
    return Paired(
        both=both,
        only_first=lost,
        only_second=won,
        neither=len(common) - both - lost - won,
        difference=estimate(differences, samples, seed),
        p_value=min(1.0, 2 * as_uneven),
    )


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that k of `samples` samples, `correct` of which are right, hold a right one; needs 1 <= k <= samples.

    The unbiased estimate of Chen et al. 2021, "Evaluating Large Language Models Trained on Code".
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} cannot be told from {samples} samples with {correct} right ones")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(results: Sequence[Hashable | None]) -> int | None:
    """Place of the first sample with the commonest result; None when no sample has one."""
    votes = Counter(result for result in results if result is not None)
    return results.index(max(votes, key=lambda result: votes[result])) if votes else None
