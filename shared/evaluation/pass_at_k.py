"""Several samples per question: pass@k and majority vote.

    evaluations/<who>/             the first sample, as every evaluation
    evaluations/<who>/sample_2/ …  the further ones
    evaluations/<who>/samples.json the figures

pass@k is the chance that at least one of k samples drawn from all of a question's is right (the unbiased estimate of Chen
et al. 2021, "Evaluating Large Language Models Trained on Code"). The vote takes the result that most samples agree on,
the earliest one among equals; samples without a result don't vote.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import Summary, mean
from shared.records import JsonlTail, Question
from shared.runs.manifest import write_json
from shared.sql.database import Database, SqlError


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that k of `samples` samples, `correct` of which are right, hold a right one; needs 1 <= k <= samples."""
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"pass@{k} cannot be told from {samples} samples with {correct} right ones")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(results: Sequence[Hashable | None]) -> int | None:
    """Place of the first sample with the commonest result; None when no sample has one."""
    votes = Counter(result for result in results if result is not None)
    return results.index(max(votes, key=lambda result: votes[result])) if votes else None


async def in_samples(
    play: Callable[[Path], Awaitable[Summary]], questions: Sequence[Question], config: Config, folder: Path
) -> Summary:
    """Play `evaluate.samples` evaluations and write their common figures; returns the summary of the first one."""
    count = config.evaluate.samples
    if count > 1 and config.evaluate.temperature <= 0:
        raise UserError(
            f"Setting evaluate.samples is {count}, but greedy decoding gives one answer; set evaluate.temperature above 0."
        )
    folders = sample_folders(folder, count)
    summaries = [await play(each) for each in folders]
    if count > 1:
        databases = {path: Database(path, config.sandbox) for path in {question.database for question in questions}}
        figures = sample_figures(questions, folders, databases)
        write_json(folder / "samples.json", figures)
        print(", ".join(f"{name} {value:.1%}" for name, value in figures.items() if isinstance(value, float)))
    return summaries[0]


def sample_folders(folder: Path, count: int) -> list[Path]:
    """The evaluations of the 1st, 2nd, … sample."""
    return [folder, *(folder / f"sample_{number}" for number in range(2, count + 1))]


def outcomes(questions: Sequence[Question], folders: Sequence[Path]) -> dict[str, list[bool]]:
    """Which samples of a question are right, by question id; only questions that have all their samples."""
    rewards = [_by_question(folder / "rewards.jsonl") for folder in folders]
    whole = [question.id for question in questions if all(question.id in sample for sample in rewards)]
    return {name: [bool(sample[name]["correct"]) for sample in rewards] for name in whole}


def sample_figures(
    questions: Sequence[Question], folders: Sequence[Path], databases: Mapping[str, Database]
) -> dict[str, float | int | None]:
    """pass@1, 2, 4, … and the accuracy of the vote, over questions that have all their samples."""
    episodes = [_by_question(folder / "episodes.jsonl") for folder in folders]
    right = outcomes(questions, folders)
    whole = [question for question in questions if question.id in right]
    sizes = [2**power for power in range(len(folders).bit_length()) if 2**power <= len(folders)]
    figures: dict[str, float | int | None] = {"questions": len(whole), "samples": len(folders)}
    for k in sizes:
        figures[f"pass@{k}"] = mean(pass_at_k(len(folders), sum(found), k) for found in right.values())
    votes = []
    for question in whole:
        submitted = [sample[question.id]["submitted_sql"] for sample in episodes]
        chosen = majority([_result(sql, databases[question.database]) for sql in submitted])
        votes.append(chosen is not None and right[question.id][chosen])
    return figures | {"majority vote": mean(map(float, votes))}


def _by_question(file: Path) -> dict[str, dict[str, Any]]:
    return {row["question_id"]: row for row in JsonlTail(file).new_rows()}


def _result(sql: str | None, database: Database) -> Hashable | None:
    """What a submission returns, whatever the order of its rows."""
    try:
        result = None if sql is None else database.execute(sql, database.limits.max_compare_rows)
    except SqlError:
        return None
    return None if result is None or result.truncated else frozenset(Counter(result.rows).items())
