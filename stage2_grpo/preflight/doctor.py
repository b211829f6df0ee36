"""`python -m stage2_grpo doctor`: the table of checks, and the quick part of it that every run goes through first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

from shared.cli import machine
from shared.cli.command_line import ROOT, common_parser, resolve
from shared.cli.machine import Answer, Problem
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.shape import read_shape
from shared.records import Question, read_questions
from shared.runs.manifest import RunDirectory, question_file
from stage2_grpo.inputs import base_folder, refuse_missing_agent, starting_model
from stage2_grpo.preflight import experiment, installation
from stage2_grpo.preflight.findings import Case, Finding, Severity
from stage2_grpo.preflight.memory import GIB, main_memory
from stage2_grpo.preflight.rehearsal import rehearse

Check = Callable[[Case], Answer]
EXIT_CODES = {Severity.OK: 0, Severity.WARNING: 3, Severity.ERROR: 2}  # 1 is Python's own, for a bug
_DESCRIPTION = """Finds what would spoil a stage-2 run before it starts: packages, machine, checkpoint, settings, rewards, and a
dress rehearsal of one episode with the real gateway, controller and vLLM server. Exit code 0: all is well, 2: at least
one error, 3: warnings only."""


def check_machine(name: str, case: Case) -> Answer:
    """One check of the machine, for what this run needs of it."""
    main = main_memory(read_shape(case.model), case.config) / GIB if case.model and name == "memory" else None
    needs = machine.Needs(case.config.profile, installation.wanted_gpus(case), main)
    return machine.check(name, case.machine, needs)


QUICK: dict[str, Check] = {  # under three seconds together, no torch
    "python": installation.check_python,
    "packages": installation.check_packages,
    "plugins": installation.check_plugins,
    "checkpoint": experiment.check_checkpoint,  # before those that would only say that its weights cannot be read
    "template": experiment.check_template,
    **{name: partial(check_machine, name) for name in machine.CHECKS},
    "gpu memory": installation.check_gpu_memory,
    "disk": installation.check_disk,
    "endpoints": installation.check_endpoints,
    "names": experiment.check_names,
    "batches": experiment.check_batches,
    "context": experiment.check_context,
}
_OF_CHECKPOINT = ("checkpoint", "template", "context")
_OF_MODEL = ("gpu memory", "disk", "names", *_OF_CHECKPOINT)


def main(arguments: Sequence[str]) -> int:
    """Examine, print, and return the exit code."""
    parser = common_parser("python -m stage2_grpo doctor", _DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="only what takes seconds: no reward test, no server")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(arguments)
    config, run = resolve(args)
    checks = QUICK if args.quick else QUICK | {"rewards": experiment.check_rewards}
    if args.dry_run:
        print("\n".join([*checks, *([] if args.quick else ["rehearsal"])]))
        return 0
    began, findings = time.monotonic(), []
    case, missing = open_case(config, run)
    rehearsal = () if args.quick or not (case.model and case.trained and case.train) else rehearse(case)
    for finding in chain(missing, examine(case, checks), rehearsal):
        findings.append(finding)
        if not args.json:
            print("\n".join(finding.lines()), flush=True)
    worst = max((finding.severity for finding in findings), default=Severity.OK)
    seconds = round(time.monotonic() - began, 1)
    if args.json:
        rows = [{**asdict(finding), "severity": finding.severity.name.lower()} for finding in findings]
        about = {"profile": config.profile, "model": case.model and str(case.model), "seconds": seconds}
        print(json.dumps({**about, "worst": worst.name.lower(), "findings": rows}, indent=2, ensure_ascii=False))
    else:
        print(f"{len(findings)} findings in {seconds:.0f} s, worst: {worst.name.lower()}")
    return EXIT_CODES[worst]


def open_case(config: Config, run: RunDirectory) -> tuple[Case, list[Finding]]:
    """What is to be examined, and an error for each part of it that is missing."""
    missing: list[Finding] = []
    case = Case(config, run, ROOT, None, (), (), trained=False)

    def note(check: str, problem: Exception, why: str, fix: str) -> None:
        missing.append(Finding.of(check, Problem(str(problem), why, fix)))

    try:
        case = replace(case, model=starting_model(config, run, own=True), trained=True)
    except UserError as problem:
        note("checkpoint", problem, "stage 2 trains and serves a whole model.", "run `python -m stage1_sft`, or set SFT_MODEL_PATH.")
        with suppress(UserError):
            case = replace(case, model=base_folder(config))
    try:
        refuse_missing_agent(config)
    except UserError as problem:
        note("agent", problem, "it is what plays the episodes.", "mend what the message names.")
    try:
        case = replace(case, **{name: tuple(read_questions(question_file(run, split))) for name, split in (("train", "train"), ("validation", "val"))})
    except (UserError, ValueError) as problem:
        note("questions", problem, "there is nothing to train on.", "run `python -m data` first.")
    return case, missing


def examine(case: Case, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """The findings of all checks in order; what keeps several of them from looking is reported once."""
    said: set[str] = set()
    for name, check in checks.items():
        if (name in _OF_MODEL and not case.model) or (name in _OF_CHECKPOINT and not case.trained):
            continue
        began = time.monotonic()
        try:
            answer = check(case)
        except (UserError, OSError) as problem:
            answer = Problem(str(problem), "this could not be examined.", "change what the message names.")
        if answer is not None and str(answer) not in said:
            said.add(str(answer))
            yield Finding.of(name, answer, round(time.monotonic() - began, 1))


def before_run(config: Config, run: RunDirectory, model: Path, train: Sequence[Question]) -> None:
    """The quick checks; prints warnings and raises UserError for the first error."""
    case = Case(config, run, ROOT, model, tuple(train), tuple(read_questions(question_file(run, "val"))))
    findings = [finding for finding in examine(case, QUICK) if finding.severity > Severity.OK]
    for finding in findings:
        print("\n".join(finding.lines()), flush=True)
    for finding in findings:
        if finding.severity is Severity.ERROR:
            raise UserError(str(Problem(finding.what, finding.why, finding.fix)))
