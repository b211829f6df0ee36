"""`python -m data`: prepare the questions and databases of a run; `python -m data import` looks at a data set first,
`python -m data synthesize` makes questions for a database that has none.
"""

import sys

from shared.cli.command_line import carry_out, common_parser, run_main


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
    parser = common_parser(
        "python -m data", "Prepare databases and questions: built-in demo, or a folder in Spider layout."
    )
    args = parser.parse_args()

    from data.stage import plan, run

    carry_out(args, plan, run)


if __name__ == "__main__":
    run_main(main)
