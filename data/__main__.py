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
    if sys.argv[1:2] == ["import"]:
        from data import importing

        return importing.main(sys.argv[2:])
    if sys.argv[1:2] == ["synthesize"]:
        from data.synthesis import command

        return command.main(sys.argv[2:])
    args = common_parser("python -m data", _DESCRIPTION, _COMMANDS).parse_args()

    from data import stage

    return carry_out(args, stage.plan, stage.run)


if __name__ == "__main__":
    run_main(main)
