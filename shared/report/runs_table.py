"""Several runs in one table: `python -m shared.report --runs runs/a runs/b`, for instance one run per seed.

Every run is read from its own finished evaluations. Intervals are 95 % bootstrap intervals over questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.errors import UserError
from shared.evaluation.metrics import compare_pairs, interval, mean
from shared.evaluation.run import SAMPLE_FILE, correctness, read_summary
from shared.report.page import Table, points
from shared.runs.manifest import RunDirectory, read_manifest, read_object

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
        gain = None
        if {"sft", "grpo"} <= {*names}:
            gain = compare_pairs(*(correctness(run.evaluation(name)) for name in ("sft", "grpo"))).difference
            gains.append(gain.mean)
        for name in names:
            accuracy = read_summary(run.evaluation(name))["accuracy"]
            cells = [interval(accuracy), str(accuracy["n"]), *_sampled(run.evaluation(name))]
            rows.append([run.path.name, name, *cells, points(vars(gain)) if gain and name == "grpo" else ""])
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


def _sampled(evaluation: Path) -> tuple[str, str]:
    """k and mean@k of an evaluation; empty where each question was played once."""
    figures = read_object(evaluation / SAMPLE_FILE)
    return (str(figures["samples"]), interval(figures["mean@k"])) if "mean@k" in figures else ("", "")
