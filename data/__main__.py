"""`python -m data`: prepare the data of a run, import a data set, or make questions for a database."""

import sys

from shared.cli.command_line import carry_out, common_parser, run_main

_DESCRIPTION = "Prepare the databases and questions of a run, from all data.sources."
_COMMANDS = {
    "import": "report on a data set and bring it into the layout that the pipeline reads",
    "synthesize": "make questions and golds for a SQLite database that has none",
}


def main() -> None:
    """Prepare, or with --dry-run say what would be prepared."""
    from data import importing, stage
    from data.synthesis import command

    commands = {"import": importing.main, "synthesize": command.main}
    if sys.argv[1:2] and sys.argv[1] in commands:
        return commands[sys.argv[1]](sys.argv[2:])
    args = common_parser("python -m data", _DESCRIPTION, _COMMANDS).parse_args()
    return carry_out(args, stage.plan, stage.run)


if __name__ == "__main__":
    run_main(main)
