"""`python -m stage2_grpo`: GRPO from the stage-1 checkpoint."""

from shared.cli import carry_out, common_parser, run_main
from stage2_grpo import stage


def main() -> None:
    parser = common_parser(
        "python -m stage2_grpo", "Stage 2: train the SQL agent with GRPO from the stage-1 checkpoint."
    )
    carry_out(parser.parse_args(), stage.plan, stage.run)


if __name__ == "__main__":
    run_main(main)
