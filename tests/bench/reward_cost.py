"""What judging an episode costs, without and with perturbed copies of the database.

    python -m tests.bench.reward_cost

Every training question of the demo is judged as if the model had submitted its gold, the dearest case: the answer is
right, so all copies are asked. Golds are run once and known afterwards, as in training.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path

from data.stage import prepare
from shared.config.load import load_config
from shared.config.schema import Config
from shared.records import Episode, Question, StopReason, read_questions
from shared.reward.reward import judge
from shared.sql.database import Database

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 3


def main() -> None:
    """Measure and print."""
    config = load_config(ROOT / "pipeline.yaml", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        prepare(config, Path(folder))
        print(f"{time.monotonic() - start:.1f} s to prepare the demo with {config.data.copies} copies of each database")
        questions = list(read_questions(Path(folder) / "train.jsonl"))
        bare = [dataclasses.replace(question, copies="") for question in questions]
        for name, asked in (("without copies", bare), (f"with {config.data.copies} copies", questions)):
            milliseconds = min(_seconds(asked, config) for _ in range(ROUNDS)) / len(asked) * 1000
            print(f"{milliseconds:.2f} ms for a right episode {name}")


def _seconds(questions: list[Question], config: Config) -> float:
    databases = {q.database: Database(q.database, config.sandbox) for q in questions}
    start = time.monotonic()
    for question in questions:
        episode = Episode(question.id, (), StopReason.ANSWERED, question.gold_sql)
        judge(question, episode, databases[question.database], config.grpo)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
