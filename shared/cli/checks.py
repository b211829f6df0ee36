"""The one check command: formatter, linter, type checker, tests."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from shared.cli.command_line import add_profile
from shared.config.device import default_profile

# Not handed on, whoever set it: each of the hundreds of processes that tests start would compile all modules anew.
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


def parser() -> argparse.ArgumentParser:
    """The options of `check`."""
    parser = argparse.ArgumentParser(prog="run_pipeline.py check", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out the tests that take minutes")
    add_profile(parser)
    return parser


def check(root: Path, args: argparse.Namespace) -> int:
    """Run the checks of the repository at `root` that the options name; stops at the first that fails, returns its status."""
    marks = [] if (args.profile or default_profile()) == "gpu" else ["not gpu"]
    tests = ["pytest", "-m", " and ".join([*marks, *(["not slow"] if args.fast else [])])]
    if args.fast:
        tests += ["--numprocesses=auto", "--dist=worksteal"]
    else:  # those of the group "servers" use all cores themselves, but not all the time
        tests += ["--numprocesses=2", "--dist=loadgroup"]
    environment = {key: value for key, value in os.environ.items() if key != _NO_BYTECODE}
    for tool in (["ruff", "format", "--check"], ["ruff", "check"], ["mypy"], tests):
        print(f"== {' '.join(tool[:2]).removesuffix(' -m')} ==", flush=True)
        status = subprocess.run([sys.executable, "-m", *tool], cwd=root, env=environment).returncode
        if status != 0:
            return status
    return 0
