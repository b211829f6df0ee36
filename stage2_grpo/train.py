"""The trainer process: `python -m stage2_grpo.train SETTINGS.json`, started and owned by stage.py.

SETTINGS.json holds the resolved settings and paths; the gateway's key comes through the environment (AGL_KEY).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from shared.config import config_from_dict
from shared.records import read_questions
from stage2_grpo import worker_setup


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    worker_setup.setup()
    from agentlightning.verl.entrypoint import run_ppo

    from stage2_grpo.verl_config import TrainerPaths, compose

    config = config_from_dict(settings["config"])
    paths = TrainerPaths(
        model=Path(settings["model"]),
        folder=Path(settings["folder"]),
        gateway_url=settings["gateway_url"],
        gateway_key=os.environ["AGL_KEY"],
    )
    train, validation = rows(settings["train"]), rows(settings["validation"])
    run_ppo(compose(config, paths), train, validation[: config.grpo.val_questions])


def rows(path: str) -> list[dict[str, Any]]:
    """The questions of a JSONL file as plain dictionaries, the form in which Agent Lightning sends them to an agent."""
    return [vars(question) for question in read_questions(Path(path))]



if __name__ == "__main__":
    main()
