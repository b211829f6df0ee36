"""The command lines of `ask` and `serve`; the standard library alone, because options are read before set-up."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared.cli.command_line import Parser, add_settings


def ask_parser() -> argparse.ArgumentParser:
    """The options of `ask`."""
    parser = Parser("run_pipeline.py ask", "Ask the trained agent about a database.")
    parser.add_argument("question", nargs="?", help="without one, a prompt asks for one after the other")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object for each question, with all rows and steps"
    )
    return _with_subject(parser)


def serve_parser() -> argparse.ArgumentParser:
    """The options of `serve`."""
    text = "Serve the trained agent on 127.0.0.1: a web page, an OpenAI-compatible endpoint, an MCP server."
    parser = Parser("run_pipeline.py serve", text)
    parser.add_argument("--port", type=int, default=8080, help="default: 8080; 0 takes a free one")
    parser.add_argument("--no-key", action="store_true", help="let every program on this machine ask")
    parser.add_argument("--stdio", action="store_true", help="only the tools, as an MCP server on stdin and stdout")
    return _with_subject(parser)


def _with_subject(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--database", required=True, help="SQLite file, or an address like postgresql://…, which is copied first"
    )
    parser.add_argument("--refresh", action="store_true", help="copy a live database anew")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--model", type=Path, help="model folder (default: the newest trained model of all runs)")
    who.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible endpoint, ending in /v1, instead of a model")
    parser.add_argument("--tokenizer", type=Path, help="with --endpoint: folder with the model's tokenizer.json")
    parser.add_argument("--served-name", default="auto", help="with --endpoint: the model to ask for")
    add_settings(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be used and start nothing")
    return parser
