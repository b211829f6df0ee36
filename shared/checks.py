"""The one check command: formatter, linter, type checker, tests."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from shared.environment import default_profile


def check(root: Path, arguments: list[str]) -> int:
    """Run all checks of the repository at `root`; stops at the first that fails and returns its status."""
    parser = argparse.ArgumentParser(prog="run_pipeline.py check", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out the tests that take minutes")
    parser.add_argument("--profile", default=default_profile(), help="default: gpu if CUDA is there, else cpu")
    args = parser.parse_args(arguments)
    marks = [] if args.profile == "gpu" else ["not gpu"]
    tests = ["pytest", "-m", " and ".join([*marks, *(["not slow"] if args.fast else [])])]
    if args.fast:  # the slow ones use all cores themselves
        tests += ["--numprocesses=auto", "--dist=worksteal"]
    for tool in (["ruff", "format", "--check"], ["ruff", "check"], ["mypy"], tests):
        print(f"== {' '.join(tool[:2]).removesuffix(' -m')} ==", flush=True)
        status = subprocess.run([sys.executable, "-m", *tool], cwd=root).returncode
        if status != 0:
            return status
    return 0
