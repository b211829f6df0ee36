"""How long stage 1 takes from a folder in Spider layout to its first optimizer step: one command, everything made anew.

    python -m tests.bench.import_to_training FOLDER [--profile cpu]

Does what `run_pipeline.py --only data sft` does inside the environment, with an empty runs directory: the base model
is unpacked, every gold run, the databases copied, the traces made and verified. Stops where training begins. Exit
status 1 beyond 3 minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 180
MARKS = {
    "== sft ==": "questions read, golds run, databases copied, splits written",
    "traces to train on": "base model unpacked, traces made, verified and tokenized",
}


def main() -> None:
    """Measure and print; exit status 1 when it takes too long or does not get there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder in Spider layout")
    parser.add_argument("--profile", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="firstcall-") as runs:
        options = ["--only", "data", "sft", "--profile", args.profile, "--set", f"runs_dir={runs}"]
        options += ["--set", f"data.sources={args.folder.resolve()}"]
        command = [sys.executable, "-c", "import run_pipeline as it; it.run(it.run_parser().parse_args())", *options]
        started = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            seconds = watch(process, started)
    print(f"{seconds:.0f} s to training" if seconds else "training never began; the reason stands above")
    sys.exit(0 if seconds and seconds <= MOST_SECONDS else 1)


def watch(process: subprocess.Popen[str], started: float) -> float:
    """Print when each mark was reached and end the command at the last; returns its seconds, 0 without it."""
    marks = dict(MARKS)
    assert process.stdout is not None
    for line in process.stdout:
        reached = next((mark for mark in marks if mark in line), None)
        if reached:
            print(f"{time.monotonic() - started:6.1f} s  {marks.pop(reached)}", flush=True)
        if not marks:
            process.terminate()
            return time.monotonic() - started
    return 0.0


if __name__ == "__main__":
    main()
