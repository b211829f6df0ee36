"""`python -m stage2_grpo`: GRPO from the stage-1 checkpoint; `doctor` examines a run beforehand, `budget` its lengths,
`gate` compares checkpoints of stage 1, `export` finishes a run with what it has saved."""

import sys

from shared.cli.command_line import carry_out, common_parser, run_main

_DESCRIPTION = """Stage 2: train the SQL agent with GRPO from the stage-1 checkpoint.
`python -m stage2_grpo doctor` finds what would spoil a run, `python -m stage2_grpo budget` measures the lengths of episodes
and suggests limits, `python -m stage2_grpo gate` says which checkpoint to start from; each has a --help of its own.
`python -m stage2_grpo export` finishes an interrupted or stopped run with the best step that it has saved."""


def main() -> None:
    """Choose between the stage and its helpers."""
    if sys.argv[1:2] == ["doctor"]:
        from stage2_grpo.preflight.doctor.command import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    if sys.argv[1:2] == ["budget"]:
        from stage2_grpo.preflight.budget.command import main as budget

        budget(sys.argv[2:])
        return
    if sys.argv[1:2] == ["gate"]:
        from stage2_grpo.preflight.gate import main as gate

        gate(sys.argv[2:])
        return
    is_export = sys.argv[1:2] == ["export"]
    parser = common_parser("python -m stage2_grpo", _DESCRIPTION)
    args = parser.parse_args(sys.argv[2:] if is_export else None)

    from stage2_grpo import stage

    if is_export:
        carry_out(args, stage.plan_export, stage.run_export)
    else:
        carry_out(args, stage.plan, stage.run)


if __name__ == "__main__":
    run_main(main)
