"""What every command line of the pipeline shares: the common options and the exit codes.

Exit codes: 0 done, 2 a problem the user can fix (one sentence on stderr), 130 interrupted, 141 the reader of the output
has gone (`| head`); anything else is a bug. Importing this takes the standard library alone: options are read before
set-up.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from shared.config.device import PROFILES
from shared.errors import UserError, did_you_mean, disk_is_full, print_sentence
from shared.runs.manifest import MODEL_CACHE, RunDirectory

if TYPE_CHECKING:
    from shared.config.schema import Config

READER_GONE = 128 + signal.SIGPIPE
ROOT = Path(__file__).resolve().parents[2]
_AGAIN_SECONDS = 0.5

_WORDING = {
    r"argument (.+): expected .+": r"\1 needs a value",
    r"argument (.+): invalid (\w+) value: (.+)": r"\1 is \3, which is not of type \2",
    r"argument (.+): not allowed with argument (.+)": r"\1 and \2 exclude each other",
    r"one of the arguments (.+) is required": r"one of \1 is missing",
    r"the following arguments are required: (.+)": r"\1 is missing",
}
"""The messages of argparse, and how we say them."""


class Parser(argparse.ArgumentParser):
    """Refuses a wrong command line in one sentence. `commands`: each subcommand and one line about it, for --help."""

    def __init__(self, prog: str, description: str, commands: Mapping[str, str] | None = None) -> None:
        self.commands = commands or {}
        lines = [f"  {name:<14}{meaning}" for name, meaning in self.commands.items()]
        super().__init__(
            prog=prog,
            description=textwrap.fill(" ".join(description.split()), 100),
            epilog="\n".join(["commands (each has its own --help):", *lines]) if lines else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # the overloads of typeshed need both forms
        """The options. Raises UserError for a word or an option that does not exist, with the nearest one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        word = unknown[0].partition("=")[0]
        if word.startswith("-"):
            raise UserError(f"`{self.prog}` has no option {word}{did_you_mean(word, self._option_string_actions)}")
        if word in self.commands:
            raise UserError(f"The command {word} must come first: `{self.prog} {word} ...`.")
        kind = "command" if self.commands else "argument"
        raise UserError(f"`{self.prog}` has no {kind} {word!r}{did_you_mean(word, self.commands)}")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong as a UserError."""
        if choice := re.match(r"argument (.+): invalid choice: '(.*)' \(choose from (.+)\)", message):
            names = re.findall(r"[\w.-]+", choice[3])
            nearest = did_you_mean(choice[2], names)
            raise UserError(f"{choice[1]} cannot be {choice[2]!r}{nearest} The choices are {', '.join(names)}.")
        for pattern, wording in _WORDING.items():
            message = re.sub(f"^{pattern}$", wording, message)
        raise UserError(f"{message}; `{self.prog} --help` explains it.")


def common_parser(prog: str, description: str, commands: Mapping[str, str] | None = None) -> Parser:
    """Parser with --config, --profile, --set, --run-name and --dry-run."""
    parser = Parser(prog, description, commands)
    add_settings(parser)
    parser.add_argument("--run-name", default="main", help="folder under runs_dir (default: main)")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and every path, change nothing")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add --config, --profile and --set."""
    parser.add_argument(
        "--config", type=Path, default=Path("pipeline.yaml"), help="settings file (default: pipeline.yaml)"
    )
    add_profile(parser)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
                        help="change one setting for this run, e.g. --set sft.epochs=3; may be repeated")  # fmt: skip


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add --profile."""
    parser.add_argument(
        "--profile", choices=PROFILES, help="default: gpu if CUDA is there, else cpu; gpu24: one 24 GB card"
    )


def resolve(args: argparse.Namespace) -> tuple[Config, RunDirectory]:
    """The settings and the run directory that the common options name."""
    from shared.config.load import load_config

    check_name("--run-name", args.run_name)
    config = load_config(args.config, args.profile, args.overrides)
    return config, RunDirectory(Path(config.runs_dir).resolve() / args.run_name)


def carry_out(
    args: argparse.Namespace,
    plan: Callable[[Config, RunDirectory], list[str]],
    work: Callable[[Config, RunDirectory], object],
) -> None:
    """Do a stage's work with its run locked, or with --dry-run print its plan."""
    config, run = resolve(args)
    if args.dry_run:
        print("\n".join(plan(config, run)))
        return

    from shared.processes.owned_process import locked

    with locked(run.path):
        work(config, run)


def check_name(option: str, name: str) -> None:
    """Raise UserError unless `name` is fit to be the name of one folder and not taken by the cache of base models."""
    if option == "--run-name" and name == MODEL_CACHE:
        raise UserError(f"{option} {name!r} is the folder of the unpacked base models; choose another name.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UserError(
            f"{option} {name!r} may hold only letters, digits, '.', '_' and '-', must start with one of the first two, "
            "and has at most 100 characters."
        )


def run_main(main: Callable[[], None]) -> None:
    """Run a command's main function and turn its ending into an exit code; SIGTERM unwinds like Ctrl-C."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            main()
        except KeyboardInterrupt:
            print("interrupted; the same command continues where it stopped", file=sys.stderr)
            sys.exit(130)
        except Exception as error:  # torch, safetensors and sqlite have errors of their own for a full disk
            if print_sentence(error):
                sys.exit(2)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(end="", flush=True)  # here, where a reader that has gone can still be noticed
    except OSError as error:
        gone = isinstance(error, BrokenPipeError) and _reader_is_gone()
        if not gone and not disk_is_full(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        if not gone and not isinstance(error.__context__, SystemExit):  # else it has been told
            print_sentence(error)
        sys.exit(READER_GONE if gone else 2)


def _reader_is_gone() -> bool:
    """Whether nobody reads the output any more, as after `| head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are always reported
    return bool(output.poll(0))


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Unwind, and try again until that happens: a destructor or a library's `except` may have dropped the exception.

    A coroutine that was hit and waits in its clean-up does not show that it unwinds; it is cancelled after half a
    second.
    """
    if not _is_unwinding():
        signal.signal(signal.SIGALRM, _terminate)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        raise KeyboardInterrupt


def _is_unwinding() -> bool:
    error = sys.exception()
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
