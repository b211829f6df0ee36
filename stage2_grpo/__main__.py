"""`python -m stage2_grpo`: GRPO from the stage-1 checkpoint."""

from shared.cli import common_parser, resolve, run_main
from shared.services import locked
from stage2_grpo import stage


def main() -> None:
    parser = common_parser(
        "python -m stage2_grpo", "Stage 2: train the SQL agent with GRPO from the stage-1 checkpoint."
    )
    args = parser.parse_args()
    config, run = resolve(args)
    if args.dry_run:
        print("\n".join(stage.plan(config, run)))
        return
    with locked(run.path):
        stage.run(config, run)


if __name__ == "__main__":
    run_main(main)
