"""One small training, callable from a test and as a process that a test can kill."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from stage1_sft.dataset import IGNORED, Example
from tests.stage1_sft.examples import settings


def examples(count: int, seed: int = 0) -> list[Example]:
    """Sequences with the same beginning and a repeated, so learnable, ending; only the ending is trained."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [*range(5, 45), *rng.choices(range(70, 250), k=rng.randint(5, 30)), *range(60, 70)]
        made.append({"input_ids": ids, "labels": [IGNORED] * (len(ids) - 10) + ids[-10:]})
    return made


def tiny_run(model: Path, folder: Path, *overrides: str) -> tuple[Path, dict[str, float]]:
    """Twelve steps in two epochs on the CPU, a checkpoint every second one."""
    from stage1_sft.train import train

    config = settings(
        "sft.batch_size=4", "sft.epochs=2", "sft.eval_steps=2", "sft.learning_rate=0.01", "logging.tensorboard=false",
        *overrides,
    )  # fmt: skip
    return train(model, examples(24), examples(8, seed=1), config, folder)


if __name__ == "__main__":
    tiny_run(Path(sys.argv[1]), Path(sys.argv[2]))
