"""Which golds of a folder in Spider layout become verified traces, and how many kinds of traces they become.

    python -m tests.bench.trace_yield FOLDER [--profile cpu] [--model FOLDER] [--set sft.parallel_share=0.5]

Builds and verifies one trace per question with the limits and shares of the profile, as stage 1 does. Prints the share that
is kept, each reason of the others with an example, and the diversity of what is kept. Exit status 1 below 97 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from data.questions import load
from shared.cli.command_line import run_main
from shared.config.device import PROFILES
from shared.config.load import load_config
from shared.models.tokenizer import Tokenizer
from shared.runs.manifest import MODEL_CACHE
from stage1_sft.base_model import BUILT_IN, resolve
from stage1_sft.synthesize import verified
from stage1_sft.traces import Dropped, Trace

ROOT = Path(__file__).resolve().parents[2]
WANTED = 0.97


def main() -> None:
    """Measure and print; exit status 1 when too few golds become traces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder in Spider layout")
    parser.add_argument("--profile", choices=PROFILES, default="cpu", help="whose limits count (default: cpu)")
    parser.add_argument("--model", default=BUILT_IN, help="whose tokens count: folder or built-in name")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    config = load_config(ROOT / "pipeline.yaml", args.profile, args.overrides)
    questions = load(args.folder, config.sandbox, skip_bad_rows=True).questions
    tokenizer = Tokenizer.from_folder(resolve(args.model, ROOT / "runs" / MODEL_CACHE))
    started = time.monotonic()
    traces: list[Trace] = []
    dropped: dict[str, list[str]] = {}
    for question in tqdm(questions, "traces", unit=" traces", leave=False, disable=None):
        try:
            trace = verified(question, config, tokenizer)
        except Dropped as reason:
            dropped.setdefault(str(reason), []).append(f"{question.id}: {question.question} | {question.gold_sql}")
        else:
            traces.append(trace)
    share = len(traces) / len(questions)
    print(f"{len(traces)} of {len(questions)} golds became a verified trace: {share:.1%}, "
          f"{time.monotonic() - started:.0f} s, profile {args.profile}")  # fmt: skip
    for reason, places in sorted(dropped.items(), key=lambda item: -len(item[1])):
        print(f"  {len(places):4} {reason}, e.g. {places[0]}")
    print("\n".join(diversity(traces)))
    sys.exit(0 if share >= WANTED else 1)


def diversity(traces: Sequence[Trace]) -> list[str]:
    """How much the traces differ, as lines."""
    orders = Counter(map(_tools_called, traces))
    thoughts = Counter(message["content"] for trace in traces for message in trace["messages"]
                       if message["role"] == "assistant" and message.get("tool_calls") and message["content"])  # fmt: skip
    provenance = [trace["provenance"] for trace in traces]
    mistakes = Counter(row["mistake"] for row in provenance if row["mistake"])
    return [
        f"  {len(orders)} orders of calls, the commonest in {orders.most_common(1)[0][1] / len(traces):.0%} of the traces",
        f"  {len(thoughts)} phrasings of {thoughts.total()} thoughts",
        f"  {sum(row['search_miss'] for row in provenance)} missed searches, "
        f"{sum(row['parallel_columns'] for row in provenance)} parallel turns, mistakes {dict(mistakes)}",
    ]


def _tools_called(trace: Trace) -> tuple[str, ...]:
    return tuple(call["function"]["name"] for message in trace["messages"] for call in message.get("tool_calls", ()))


if __name__ == "__main__":
    run_main(main)
