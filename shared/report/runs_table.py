"""Several runs in one table: `python -m shared.report --runs runs/a runs/b`, for instance one run per seed.

Every run is read from its own finished evaluations. Intervals are 95 % bootstrap intervals over questions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shared.errors import UserError
from shared.evaluation.metrics import Paired, compare_pairs, interval, mean
from shared.evaluation.run import EPISODE_FILE, read_summary
from shared.records import read_episodes
from shared.report.page import Table
from shared.runs.manifest import RunDirectory, read_manifest

_MODELS = ("base", "sft", "grpo")
_NOTES = (
    "mean@k: mean accuracy of the k sampled episodes of a question; empty where evaluate.samples was 1.",
    "Gain: accuracy after GRPO minus accuracy after SFT in percentage points, paired by question.",
)


def runs_table(paths: Sequence[Path]) -> Table:
    """One row per run and model, with the gain of GRPO beside its row; the last row is the mean gain of all runs.

    Raises UserError for a folder without a finished evaluation.
    """
    rows, gains = [], []
    for run in map(RunDirectory, paths):
        names = [name for name in _MODELS if read_manifest(run.evaluation(name))]
        if not names:
            raise UserError(f"{run.path} holds no finished evaluation; give folders of runs that were evaluated.")
        gain = _gain(run) if {"sft", "grpo"} <= {*names} else None
        gains += [gain.difference.mean] if gain else []
        for name in names:
            accuracy = read_summary(run.evaluation(name))["accuracy"]
            cells = [interval(accuracy), str(accuracy["n"]), *_sampled(run.evaluation(name))]
            rows.append([run.path.name, name, *cells, _points(gain) if gain and name == "grpo" else ""])
    if len(gains) > 1:
        average = 100 * (mean(gains) or 0.0)
        rows.append([f"mean of {len(gains)} runs", "grpo", *[""] * 4, f"{average:+.1f}"])
    header = (
        "run",
        "model",
        "execution accuracy (95\u00a0%)",
        "questions",
        "k",
        "mean@k (95\u00a0%)",
        "gain (95\u00a0%)",
    )
    return Table("Runs", header, rows, _NOTES)


def _gain(run: RunDirectory) -> Paired:
    before, after = (
        {
            one.question_id: one.reward.correct
            for one in read_episodes(run.evaluation(name) / EPISODE_FILE)
            if one.reward
        }
        for name in ("sft", "grpo")
    )
    return compare_pairs(before, after)


def _sampled(evaluation: Path) -> tuple[str, str]:
    """k and mean@k of an evaluation; empty where each question was played once."""
    file = evaluation / "samples.json"
    figures = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return (str(figures["samples"]), interval(figures["mean@k"])) if "mean@k" in figures else ("", "")


def _points(gain: Paired) -> str:
    found = gain.difference
    return f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
