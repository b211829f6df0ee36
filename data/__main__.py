"""`python -m data`: prepare the questions and databases of a run."""

from data.stage import plan, run
from shared.cli import common_parser, resolve, run_main
from shared.services import locked


def main() -> None:
    """Prepare, or with --dry-run say what would be prepared."""
    parser = common_parser(
        "python -m data", "Prepare databases and questions: built-in demo, or a folder in Spider layout."
    )
    args = parser.parse_args()
    config, directory = resolve(args)
    if args.dry_run:
        print("\n".join(plan(config, directory)))
        return
    with locked(directory.path):
        run(config, directory)


if __name__ == "__main__":
    run_main(main)
