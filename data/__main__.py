"""`python -m data`: prepare the data of a run, import a data set, or make questions for a database."""

import sys

from shared.cli.command_line import carry_out, common_parser, run_main

_COMMANDS = {
    "import": "report on a data set and bring it into the layout that the pipeline reads",
    "synthesize": "make questions and golds for a SQLite database that has none",
}


def main() -> None:
    """Prepare, or with --dry-run say what would be prepared."""
    if sys.argv[1:2] == ["import"]:
        from data import importing

        importing.main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["synthesize"]:
        from data.synthesis import command

        command.main(sys.argv[2:])
        return
    description = "Prepare the databases and questions of a run: the built-in demo, or a folder in Spider layout."
    args = common_parser("python -m data", description, _COMMANDS).parse_args()

    from data.stage import plan, run

    carry_out(args, plan, run)


if __name__ == "__main__":
    run_main(main)
