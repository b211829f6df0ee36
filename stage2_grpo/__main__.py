"""`python -m stage2_grpo`: GRPO from the stage-1 checkpoint, and the commands that prepare or finish such a run."""

import importlib
import sys

from shared.cli.command_line import carry_out, common_parser, run_main

_DESCRIPTION = "Stage 2: train the SQL agent with GRPO from the stage-1 checkpoint."
_COMMANDS = {
    "doctor": "find what would spoil a run",
    "budget": "measure the lengths of episodes and suggest limits",
    "gate": "say which checkpoint to start from",
    "smoke": "try the whole path on a new GPU",
    "export": "finish an interrupted or stopped run with the best step that it has saved",
}


def main() -> None:
    """Choose between the stage and its helpers."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in _COMMANDS and command != "export":
        sys.exit(importlib.import_module(f"stage2_grpo.preflight.{command}").main(sys.argv[2:]))
    parser = common_parser("python -m stage2_grpo", _DESCRIPTION, _COMMANDS)
    args = parser.parse_args(sys.argv[2:] if command == "export" else None)

    from stage2_grpo import stage

    if command == "export":
        carry_out(args, stage.plan_export, stage.run_export)
    else:
        carry_out(args, stage.plan, stage.run)


if __name__ == "__main__":
    run_main(main)
