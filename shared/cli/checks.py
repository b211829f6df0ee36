"""The one check command: formatter, linter, type checker, tests."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from shared.cli.command_line import Parser, add_profile
from shared.config.device import default_profile, device_of

PARTS = ("lint", "types", "fast", "slow")


def parser() -> argparse.ArgumentParser:
    """The options of `check`."""
    parser = Parser("run_pipeline.py check", __doc__)
    parser.add_argument("--fast", action="store_true", help="leave out the tests that take minutes")
    parser.add_argument("--part", choices=PARTS, help="run one part only, as the jobs of a CI service do")
    add_profile(parser)
    return parser


def check(root: Path, args: argparse.Namespace) -> int:
    """Run the checks that the options name on the repository at `root`; returns the status of the first failure."""
    gpu = [] if device_of(args.profile or default_profile()) == "gpu" else ["not gpu"]
    speed = {"fast": ["not slow"], "slow": ["slow"]}.get("fast" if args.fast else args.part, [])
    # Slow tests of the group "servers" use all cores themselves, but not all the time.
    workers = ["--numprocesses=auto", "--dist=worksteal"] if speed == ["not slow"] else ["-n2", "--dist=loadgroup"]
    tests = ["pytest", "-m", " and ".join([*gpu, *speed]), *workers]
    lint, types = [["ruff", "format", "--check"], ["ruff", "check"]], [["mypy"]]
    chosen = {None: [*lint, *types, tests], "lint": lint, "types": types}.get(args.part, [tests])
    # Without bytecode, each of the hundreds of processes that tests start would compile all modules anew.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    for tool in chosen:
        print(f"== {' '.join(tool[:2]).removesuffix(' -m')} ==", flush=True)
        status = subprocess.run([sys.executable, "-m", *tool], cwd=root, env=environment).returncode
        if status != 0:
            return status
    return 0
