"""The command line of `package`; the standard library alone, because options are read before set-up."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared.cli.command_line import Parser, add_settings


def package_parser() -> argparse.ArgumentParser:
    """The options of `package`."""
    parser = Parser("run_pipeline.py package", "Make files of the trained model for other programs, with a model card.")
    parser.add_argument("--to", choices=("gguf", "hub"), default="gguf", help="GGUF files (default), or a model hub")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--run-name", help="take the newest model of this run (default: of all runs)")
    which.add_argument("--model", type=Path, help="model folder")
    parser.add_argument("--out", type=Path, help="with gguf: folder to make (default: <run>/package)")
    parser.add_argument("--repo", metavar="OWNER/NAME", help="with hub: the repository, made where it is missing")
    parser.add_argument("--public", action="store_true", help="with hub: a new repository is open to everybody")
    add_settings(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be written and change nothing")
    return parser
