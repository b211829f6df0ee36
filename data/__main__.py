"""`python -m data`: prepare the questions and databases of a run; `python -m data import` looks at a data set first."""

import sys

from data import importing
from data.stage import plan, run
from shared.cli import carry_out, common_parser, run_main


def main() -> None:
    """Prepare, or with --dry-run say what would be prepared."""
    if sys.argv[1:2] == ["import"]:
        importing.main(sys.argv[2:])
        return
    parser = common_parser(
        "python -m data", "Prepare databases and questions: built-in demo, or a folder in Spider layout."
    )
    carry_out(parser.parse_args(), plan, run)


if __name__ == "__main__":
    run_main(main)
