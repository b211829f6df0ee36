#!/usr/bin/env python3
"""The whole pipeline, start to end. The same command continues where an interrupted one stopped.

Any Python >= 3.11 can start it: the first start makes the environment with the pinned packages and goes on inside it,
so packages are imported where they are used. The training stages are processes of their own: their memory is given
back.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.cli import checks, environment, machine
from shared.cli.command_line import READER_GONE, Parser, add_profile, common_parser, resolve, run_main
from shared.config.device import default_profile, device_of
from shared.errors import UserError
from shared.packaging.options import package_parser
from shared.runs.manifest import RunDirectory, read_manifest, set_aside, write_json
from shared.serving.options import ask_parser, serve_parser

if TYPE_CHECKING:
    from shared.config.schema import Config

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Pipeline:
    """One run: its settings, its directory, and the options that every stage command takes."""

    config: Config
    run: RunDirectory
    options: tuple[str, ...]


def prepare_data(pipeline: Pipeline) -> None:
    """Databases and questions, split so that nothing leaks from training into the test."""
    import data.stage

    data.stage.run(pipeline.config, pipeline.run)


def evaluate_base(pipeline: Pipeline) -> None:
    """The untrained model: usually not a single tool call."""
    evaluate(pipeline, "base", base_model(pipeline.config))


def train_sft(pipeline: Pipeline) -> None:
    """Stage 1: executed tool-call traces, LoRA SFT, merged checkpoint."""
    command(pipeline, "stage1_sft")


def evaluate_sft(pipeline: Pipeline) -> None:
    """The cold-started model, which must call tools before GRPO is worth its time."""
    if evaluate(pipeline, "sft", checkpoint(pipeline.run.sft))["tool_calls"] == 0:
        raise UserError(
            "The stage-1 model made no tool call in any test episode, so GRPO would have nothing to learn from; train "
            "it longer (sft.epochs, sft.max_traces) or with another sft.learning_rate."
        )


def train_grpo(pipeline: Pipeline) -> None:
    """Stage 2: GRPO with real rollouts, from the stage-1 checkpoint."""
    named = os.environ.get("SFT_MODEL_PATH") or pipeline.config.grpo.model
    command(pipeline, "stage2_grpo", SFT_MODEL_PATH=str(named or checkpoint(pipeline.run.sft)))


def evaluate_grpo(pipeline: Pipeline) -> None:
    """The final model."""
    evaluate(pipeline, "grpo", checkpoint(pipeline.run.grpo))


def report(pipeline: Pipeline) -> None:
    """One table and one HTML page."""
    from shared.report.__main__ import write_report

    write_report(pipeline.config, pipeline.run)


STAGES: dict[str, Callable[[Pipeline], None]] = {
    "data": prepare_data,
    "base-eval": evaluate_base,
    "sft": train_sft,
    "sft-eval": evaluate_sft,
    "grpo": train_grpo,
    "grpo-eval": evaluate_grpo,
    "report": report,
}


def folder(stage: str, run: RunDirectory) -> Path:
    """Where a stage writes."""
    who, _, is_evaluation = stage.partition("-")
    return run.evaluation(who) if is_evaluation else run.path / stage


def evaluate(pipeline: Pipeline, who: str, model: Path) -> dict[str, Any]:
    """Evaluate one model on the test questions of the run; returns the summary."""
    import shared.evaluation.run

    return shared.evaluation.run.evaluate_subject(model, pipeline.config, pipeline.run, who)


def command(pipeline: Pipeline, module: str, **variables: str) -> None:
    """Run `python -m module` with the options of this run; it has said why when it fails."""
    from shared.processes.owned_process import OwnedProcess

    argv = [sys.executable, "-m", module, *pipeline.options]
    with OwnedProcess(argv, name=module, env=variables, grace=90.0) as process:
        status = process.wait()
    if status > 128 and status != READER_GONE:
        raise UserError(
            f"{module} was ended by signal {status - 128}, most likely for lack of memory; see its messages."
        )
    if status != 0:
        sys.exit(status)


def checkpoint(stage: Path) -> Path:
    """The merged model that a training stage left; raises UserError when it has not finished."""
    manifest = read_manifest(stage)
    if manifest is None:
        raise UserError(f"{stage} holds no finished checkpoint; run the pipeline with --from {stage.name} first.")
    return Path(manifest["outputs"]["model"])


def base_model(config: Config) -> Path:
    """The folder of the base model; found in a process of its own, because unpacking it takes torch."""
    from shared.processes.owned_process import die_with_parent
    from shared.runs.manifest import model_cache
    from stage1_sft.base_model import resolve

    with ProcessPoolExecutor(1, get_context("spawn"), die_with_parent) as pool:
        return pool.submit(resolve, config.model, model_cache(config)).result()


def run(args: argparse.Namespace) -> None:
    """The main job: every stage in turn; finished ones say so and are skipped."""
    from shared.processes.owned_process import locked
    from shared.runs.usage import measured

    config, directory = resolve(args)
    settings = [part for setting in args.overrides for part in ("--set", setting)]
    options = ("--config", str(args.config), "--profile", config.profile, "--run-name", args.run_name, *settings)
    pipeline = Pipeline(config, directory, options)
    names = list(STAGES)
    redone = names[names.index(args.first) :] if args.first else []
    if args.dry_run:
        kept = [name for name in names if redone and name not in redone and read_manifest(folder(name, directory))]
        print("\n".join(plan(pipeline, [name for name in args.only or names if name not in kept])))
        return
    if not args.only:
        plan(pipeline, names)  # refuses wrong paths and a missing agent before anything is moved or made
        if config.grpo.gpus_per_node > 1:  # before set-up no settings are read, so one GPU was looked for
            machine.refuse(machine.look(), machine.needs_of(config))
    with locked(directory.path):
        write_json(directory.path / "config.json", config.model_dump())
        if args.first:
            print(f"starts anew from {args.first} on; what was finished there is kept as <folder>.old", flush=True)
        for stage in redone:
            if folder(stage, directory).exists():
                set_aside(folder(stage, directory))
        for stage in [name for name in names if name in (args.only or names)]:
            print(f"\n== {stage} ==", flush=True)
            with nullcontext() if stage == "report" else measured(directory, stage, folder(stage, directory)):
                STAGES[stage](pipeline)


def run_parser() -> argparse.ArgumentParser:
    """The options of `run`, which is what the script does without a command; needs no package."""
    commands = {name: command.help for name, command in COMMANDS.items()}
    parser = common_parser("run_pipeline.py", __doc__.partition("\n")[0], commands)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--from", dest="first", choices=STAGES, metavar="STAGE", help="redo this stage and later ones")
    choice.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"some of {', '.join(STAGES)}")
    return parser


def plan(pipeline: Pipeline, stages: list[str]) -> list[str]:
    """What `run` would do in these stages and where; changes nothing."""
    import data.stage
    import stage1_sft.stage
    import stage2_grpo.stage

    config, run = pipeline.config, pipeline.run
    plans = {"data": data.stage.plan, "sft": stage1_sft.stage.plan, "grpo": stage2_grpo.stage.plan}
    lines = [
        f"profile {config.profile}, model {config.model}, seed {config.seed}, run directory {run.path}",
        f"at most {config.agent.context_tokens} tokens (agent.context_tokens) in an episode, and so on the server, in "
        f"a trace and in a training row; at most {config.agent.max_turn_tokens} (agent.max_turn_tokens) in an answer",
    ]
    for stage in [name for name in STAGES if name in stages]:
        lines += plans[stage](config, run) if stage in plans else [f"{stage}: writes {folder(stage, run)}"]
    return lines


def setup_parser() -> argparse.ArgumentParser:
    """The options of `setup`."""
    parser = Parser("run_pipeline.py setup", COMMANDS["setup"].help)
    add_profile(parser)
    return parser


def ask(args: argparse.Namespace) -> None:
    """Ask the trained agent."""
    from shared.serving.ask import ask

    copy_live_database(args)
    ask(args)


def serve(args: argparse.Namespace) -> None:
    """Serve the trained agent."""
    from shared.serving.server import serve

    copy_live_database(args)
    serve(args)


def package(args: argparse.Namespace) -> None:
    """Make files of the trained model for other programs."""
    from shared.packaging.command import package

    package(args)


def copy_live_database(args: argparse.Namespace) -> None:
    """Where --database is an address, replace it by the file of its copy."""
    from data import live
    from shared.config.load import load_config

    if live.is_address(args.database):
        runs = Path(load_config(args.config, args.profile, args.overrides).runs_dir)
        args.database = str(live.local_copy(args.database, runs / "serving" / "copies", anew=args.refresh))


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Its parser is built before the environment exists, by the standard library; `work` runs inside it.
    """

    help: str
    parser: Callable[[], argparse.ArgumentParser]
    work: Callable[[argparse.Namespace], object]


COMMANDS = {
    "run": Command("prepare data, train both stages, evaluate before, between and after, report", run_parser, run),
    "check": Command(
        "formatter, linter, types and all tests", checks.parser, lambda args: sys.exit(checks.check(ROOT, args))
    ),
    "setup": Command("make the environment and nothing else", setup_parser, lambda _: print("ready")),
    "ask": Command("ask the trained agent about a database", ask_parser, ask),
    "serve": Command("the same for browsers, programs and assistants", serve_parser, serve),
    "package": Command("GGUF files and a model card, or a push to a model hub", package_parser, package),
}


def main() -> None:
    """Read the command line, enter the environment, made first where it is missing, and carry the command out."""
    name, *rest = sys.argv[1:] or ["run"]
    if name not in COMMANDS:
        name, rest = "run", sys.argv[1:]
    args = COMMANDS[name].parser().parse_args(rest)  # refused, or helped, before anything is set up
    profile, dry_run = args.profile or default_profile(), getattr(args, "dry_run", False)
    works = name == "setup" or (name == "run" and not dry_run and not {*(args.only or ["all"])} <= {"data", "report"})
    if works and not environment.entered(ROOT):  # once, before anything is downloaded
        needs = machine.Needs(profile, before_setup=not environment.is_inside(ROOT))
        machine.refuse(machine.look(), needs, only_warn=name == "setup")  # which may be made for another machine
    environment.enter(ROOT, device_of(profile), dry_run=dry_run)
    COMMANDS[name].work(args)


if __name__ == "__main__":
    run_main(main)
