"""Check the parser against case files, or report how a model writes its calls."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .report import HEADING, SQL_AGENT, fault, read_cases, write_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a case fails, 2 with one sentence for a file that is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cases", type=Path, metavar="FILE.jsonl", help="parser cases with expected calls and content")
    what.add_argument("--report", type=Path, metavar="FILE.jsonl", help="texts or recorded episodes of a model")
    parser.add_argument("--stream", action="store_true", help="with --cases: also cut each text in many ways")
    parser.add_argument("--out", type=Path, help="with --report: where to write the table (default: beside the file)")
    args = parser.parse_args(arguments)
    try:
        if args.report:
            beside = args.report.with_suffix(".calls.md")
            if args.out and args.out.exists():
                raise ValueError(f"--out {args.out} already exists; name a new file.")
            if (
                not args.out
                and beside.exists()
                and HEADING not in beside.read_text("utf-8", "replace").split("\n", 1)[0]
            ):
                raise ValueError(f"{beside} already exists and is no such report; name a new file with --out.")
            tools = [{"name": name, "parameters": parameters} for name, parameters in SQL_AGENT.items()]
            table, out = write_table(args.report, tools, args.out)
            print(table, f"written to {out}", sep="\n")
            return 0
        results = [(bool(case["expect_calls"]), fault(case, stream=args.stream)) for case in read_cases(args.cases)]
        if not results:
            raise ValueError(f"{args.cases} holds no parser case; write one JSON object a line.")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    calls, negatives = ([not wrong for has_calls, wrong in results if has_calls is kind] for kind in (True, False))
    print(*(wrong for _, wrong in results if wrong), sep="\n", end="\n" if any(wrong for _, wrong in results) else "")
    print(f"calls {sum(calls)}/{len(calls)} negatives {sum(negatives)}/{len(negatives)}")
    return int(not all(calls + negatives))


if __name__ == "__main__":
    sys.exit(main())
