"""`python -m stage2_grpo doctor`: finds what would spoil a run; every run goes through the quick part first."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

from shared.cli import machine
from shared.cli.command_line import ROOT, common_parser, resolve
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.shape import read_shape
from shared.records import Question, read_questions
from shared.runs.manifest import RunDirectory, question_file
from stage2_grpo.inputs import planned_model, refuse_missing_agent
from stage2_grpo.preflight import checks
from stage2_grpo.preflight.checks import Case, Check, Finding, found
from stage2_grpo.preflight.memory import GIB, main_memory
from stage2_grpo.preflight.rehearsal import rehearse

_DESCRIPTION = """Finds what would spoil a stage-2 run before it starts: packages, machine, checkpoint, settings,
rewards, and a dress rehearsal of one episode with the real gateway, controller and vLLM server. Exit code 0: all is
well, 2: at least one error, 3: warnings only."""


def check_machine(name: str, case: Case) -> str | None:
    """One check of the machine, for what this run needs of it."""
    needs = case.needs
    if case.model and name == "memory":
        needs = replace(needs, main_gib=main_memory(read_shape(case.model), case.config) / GIB)
    return machine.check(name, case.machine, needs)


EXIT_CODES = {"ok": 0, "warning": 3, "error": 2}  # by the worst severity, the last; 1 is Python's own, for a bug
QUICK: dict[str, Check] = {  # under three seconds together, no torch
    "packages": checks.check_packages,
    "plugins": checks.check_plugins,
    "checkpoint": checks.check_checkpoint,  # before those that would only say that its weights cannot be read
    "template": checks.check_template,
    **{name: partial(check_machine, name) for name in machine.CHECKS},
    "gpu memory": checks.check_gpu_memory,
    "disk": checks.check_disk,
    "proxy": checks.check_proxy,
    "names": checks.check_names,
    "batches": checks.check_batches,
    "context": checks.check_context,
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
    chosen = QUICK if args.quick else QUICK | {"rewards": checks.check_rewards}
    if args.dry_run:
        print("\n".join([*chosen, *([] if args.quick else ["rehearsal"])]))
        return 0
    began, findings = time.monotonic(), list[Finding]()
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        case, missing = open_case(config, run)
        rehearsal = rehearse(case) if not args.quick and case.trained and case.train else ()
        for finding in chain(missing, examine(case, chosen), rehearsal):
            findings.append(finding)
            if not args.json:
                print(finding, flush=True)
    worst = max((finding.severity for finding in findings), key=[*EXIT_CODES].index)
    about = {"profile": config.profile, "model": case.model and str(case.model), "worst": worst}
    seconds = round(time.monotonic() - began, 1)
    if args.json:
        rows = {"seconds": seconds, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(about | rows, indent=2, ensure_ascii=False))
    else:
        print(f"{len(findings)} findings in {seconds:.0f} s, worst: {worst}")
    return EXIT_CODES[worst]


def open_case(config: Config, run: RunDirectory) -> tuple[Case, list[Finding]]:
    """What is to be examined, and an error for each part of it that is missing."""
    case = Case(config, run, ROOT, None, (), (), trained=False)

    def checkpoint() -> None:
        nonlocal case
        model, trained = planned_model(config, run)
        case = replace(case, model=model, trained=trained)
        if not trained:
            raise UserError(
                f"{run.sft} holds no checkpoint of {config.model} yet, so only the sizes of {model} are examined; run "
                "`python -m stage1_sft`, or set SFT_MODEL_PATH."
            )

    def questions() -> None:
        nonlocal case
        train, validation = (tuple(read_questions(question_file(run, split))) for split in ("train", "val"))
        case = replace(case, train=train, validation=validation)

    missing = [
        *found("checkpoint", checkpoint),
        *found("agent", lambda: refuse_missing_agent(config)),
        *found("questions", questions),
    ]
    return case, missing


def examine(case: Case, chosen: Mapping[str, Check]) -> Iterator[Finding]:
    """The findings of all checks in order; what keeps several of them from looking is reported once."""
    said: set[str] = set()
    for name, check in chosen.items():
        if (case.model or name not in _OF_MODEL) and (case.trained or name not in _OF_CHECKPOINT):
            for finding in found(name, partial(check, case)):
                if finding.what not in said:
                    yield finding
                said.add(finding.what)


def before_run(config: Config, run: RunDirectory, model: Path, train: Sequence[Question]) -> None:
    """The quick checks; prints warnings and raises UserError for the first error."""
    case = Case(config, run, ROOT, model, tuple(train), tuple(read_questions(question_file(run, "val"))))
    findings = [finding for finding in examine(case, QUICK) if finding.severity != "ok"]
    for finding in findings:
        print(finding, flush=True)
    for finding in findings:
        if finding.severity == "error":
            raise UserError(finding.what)
