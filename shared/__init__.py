"""What both stages use; works without torch."""

import sys

if sys.argv[:1] == ["-m"]:  # `python -m shared.…` imports that module next, for which this Python may lack packages
    from shared.cli import command_line as cli

    sys.excepthook = cli.explain
