"""Check the parser against case files, or report how a model writes its calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.agent.prompts import TOOLS
from shared.cli.command_line import run_main
from shared.errors import UserError
from shared.tool_calls.cases import run_cases
from shared.tool_calls.report import HEADING, table_beside, write_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a case fails; raises UserError or OSError for a file that is not what it should be."""
    parser = argparse.ArgumentParser(prog="python -m shared.tool_calls", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cases", type=Path, metavar="FILE.jsonl", help="parser cases with expected calls and content")
    what.add_argument("--report", type=Path, metavar="FILE.jsonl", help="texts or recorded episodes of a model")
    parser.add_argument("--stream", action="store_true", help="with --cases: also cut each text in many ways")
    parser.add_argument("--out", type=Path, help="with --report: where to write the table (default: beside the file)")
    args = parser.parse_args(arguments)
    return _check(args.cases, args.stream) if args.cases else _report(args.report, args.out)


def _check(path: Path, stream: bool) -> int:
    faults, totals = run_cases(path, stream=stream)
    print(*faults, totals, sep="\n")
    return 1 if faults else 0


def _report(path: Path, out: Path | None) -> int:
    _refuse_to_replace(path, out)
    table, out = write_table(path, TOOLS, out)
    print(table, f"written to {out}", sep="\n")
    return 0


def _refuse_to_replace(path: Path, out: Path | None) -> None:
    """Raise UserError for a file in the way; only an earlier report beside its input gives place to the new one."""
    beside = table_beside(path)
    if out and out.exists():
        raise UserError(f"--out {out} already exists; name a new file.")
    if not out and beside.exists() and HEADING not in beside.read_text("utf-8", "replace").splitlines()[:1]:
        raise UserError(f"{beside} already exists and is no such report; name a new file with --out.")


if __name__ == "__main__":
    run_main(lambda: sys.exit(main()))
