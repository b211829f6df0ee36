"""`python run_pipeline.py ask "How many …?" --database shop.sqlite`: ask the trained agent and watch it work.

Without a question it prompts for one after the other, with a history; questions may also come through a pipe. `--json`
prints one object per question. Text of the model and of the database is shown without control characters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import readline
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from shared.config.schema import Config
from shared.errors import UserError
from shared.records import Message, StopReason
from shared.serving.answering import Agent, Answer, chosen, describe, serving

HISTORY_FILE = "ask_history"  # in runs_dir
_SHOWN_ROWS = 40


def ask(args: argparse.Namespace) -> None:
    """Answer the question of the command line, or those that come one by one."""
    config, subject, database = chosen(args)
    if args.dry_run:
        print(describe(config, subject, database))
        return
    with serving(subject, config) as endpoint:
        agent, console = Agent(config, endpoint, database), Console(highlight=False)
        for question in [args.question] if args.question else _questions(config):
            steps: list[Message] = []
            show = steps.append if args.json else lambda message: _show_step(console, message)
            answer = asyncio.run(agent.answer(question, show))
            if args.json:
                print(json.dumps({**dataclasses.asdict(answer), "steps": steps}, ensure_ascii=False), flush=True)
            else:
                _show_answer(console, answer)
            if args.question and answer.stop == StopReason.INFRASTRUCTURE:
                raise UserError(f"{answer.problem}; see to the model server and ask again.")


def _questions(config: Config) -> Iterator[str]:
    """Questions that the user types, until Ctrl-D; from a pipe one per line."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    history = Path(config.runs_dir).resolve() / HISTORY_FILE
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)
    with contextlib.suppress(EOFError):
        while True:
            if question := input("question> ").strip():
                with contextlib.suppress(OSError):
                    readline.write_history_file(history)
                yield question
    print()


def _show_step(console: Console, message: Message) -> None:
    calls = message.get("tool_calls", ())
    if calls and message["content"].strip():
        console.print(_text(message["content"].strip(), "italic"))
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        console.print(_text(f"→ {call['function']['name']}({listed})", "cyan"))
    if message["role"] == "tool":
        console.print(_text("  " + message["content"].replace("\n", "\n  "), "dim"))


def _show_answer(console: Console, answer: Answer) -> None:
    if answer.sql:
        console.print(Syntax(printable(answer.sql), "sql", word_wrap=True, background_color="default"))
    if answer.columns:
        table = Table(*(Column(_text(name)) for name in answer.columns))
        for row in answer.rows[:_SHOWN_ROWS]:
            table.add_row(
                *(_text("NULL" if cell is None else str(cell), "" if cell is not None else "dim") for cell in row)
            )
        console.print(table)
        count = f"{len(answer.rows)}{'+' if answer.truncated else ''}"
        if len(answer.rows) > _SHOWN_ROWS:
            console.print(f"the first {_SHOWN_ROWS} of {count} rows; --json gives all", style="dim")
    console.print(_text(answer.text or answer.problem, "bold" if answer.text else "red"))
    if answer.text and answer.problem:
        console.print(_text(answer.problem, "red"))
    console.print(f"{answer.seconds:.1f} s", style="dim")


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def printable(text: Any) -> str:
    """The text without characters that could steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(text))
