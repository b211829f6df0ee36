"""The trainer process: `python -m stage2_grpo.training SETTINGS TRAIN VALIDATION`, started and owned by stage.py.

SETTINGS is the file that controller and agents read too; TRAIN and VALIDATION are questions as JSONL. The gateway's key
comes through the environment (AGL_KEY) and stays out of VERL's config, which is printed and logged.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shared.cli.command_line import run_main
from shared.records import read_questions
from stage2_grpo.rollouts.agent import AgentSettings
from stage2_grpo.services import trainer_environment
from stage2_grpo.training import ray_cluster, worker_setup
from stage2_grpo.training.verl_config import TrainerPaths, compose


def main() -> None:
    settings_file, *question_files = map(Path, sys.argv[1:])
    settings = AgentSettings.load(settings_file)
    config, folder = settings.config, settings_file.parent
    worker_setup.setup()
    from agentlightning.verl.entrypoint import run_ppo

    if config.grpo.ray_address:
        ray_cluster.join(config.grpo, trainer_environment(config, folder, os.environ["AGL_KEY"]))
    # Plain dictionaries are the form in which Agent Lightning sends the rows to an agent.
    train, validation = ([dict(vars(question)) for question in read_questions(file)] for file in question_files)
    paths = TrainerPaths(settings.model_folder, folder, settings.gateway_url)
    run_ppo(compose(config, paths), train, validation[: config.grpo.val_questions])


if __name__ == "__main__":
    run_main(main)
