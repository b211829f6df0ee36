"""`python -m stage2_grpo doctor`, and the quick part of it that every run goes through first."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shared.cli.command_line import common_parser, resolve
from shared.config.schema import Config
from shared.errors import UserError
from shared.records import Question, read_questions
from shared.runs.manifest import RunDirectory, question_file
from stage2_grpo.inputs import refuse_missing_agent, starting_model
from stage2_grpo.preflight.doctor import arithmetic, checkpoint, machine, packages
from stage2_grpo.preflight.doctor.findings import (
    EXIT_CODES,
    Case,
    Finding,
    Severity,
    as_json,
    as_lines,
    error,
    timed,
    worst,
)

Check = Callable[[Case], Iterable[Finding]]

QUICK: tuple[Check, ...] = (  # under three seconds together, no torch
    packages.check_python,
    packages.check_packages,
    packages.check_plugins,
    checkpoint.check_merged,  # before those that would say of damaged weights only that they cannot look
    machine.check_gpu,
    machine.check_disk,
    machine.check_memory,
    machine.check_endpoints,
    checkpoint.check_template,
    arithmetic.check_names,
    arithmetic.check_batches,
    arithmetic.check_context,
)

_DESCRIPTION = """Finds what would spoil a stage-2 run before it starts: packages, machine, checkpoint, settings, rewards, and a
dress rehearsal of one episode with the real gateway, controller and vLLM server. Exit code 0: all is well, 2: at least
one error, 3: warnings only."""


def main(arguments: Sequence[str]) -> int:
    """Examine, print, and return the exit code."""
    args = _parser().parse_args(arguments)
    config, run = resolve(args)
    if args.dry_run:
        print("\n".join(_first_line(check) for check in _checks(args.quick)))
        return 0
    started = time.monotonic()
    case, findings = open_case(config, run)
    for finding in [*findings]:
        _print(finding, args.json)
    for finding in timed(examine(case, _checks(args.quick))):
        findings.append(finding)
        _print(finding, args.json)
    seconds = round(time.monotonic() - started, 1)
    if args.json:
        print(json.dumps(as_json(findings, profile=config.profile, model=case.model and str(case.model), seconds=seconds),
                         indent=2, ensure_ascii=False))  # fmt: skip
    else:
        print(f"{len(findings)} findings in {seconds:.0f} s, worst: {worst(findings).name.lower()}")
    return EXIT_CODES[worst(findings)]


def open_case(config: Config, run: RunDirectory) -> tuple[Case, list[Finding]]:
    """What is to be examined, and an error for each part of it that is missing."""
    findings: list[Finding] = []
    case = Case(config, run, Path(__file__).resolve().parents[3], None, (), ())
    try:
        case = replace(case, model=starting_model(config, run))
    except UserError as problem:
        why, fix = "stage 2 trains and serves a whole model.", "run `python -m stage1_sft`, or set SFT_MODEL_PATH."
        findings.append(error("checkpoint", str(problem), why=why, fix=fix))
    try:
        refuse_missing_agent(config)
    except UserError as problem:
        why, fix = "it is what plays the episodes.", "mend what the message names."
        findings.append(error("agent", str(problem), why=why, fix=fix))
    try:
        case = replace(case, train=_questions(run, "train"), validation=_questions(run, "val"))
    except (UserError, TypeError, ValueError) as problem:
        findings.append(
            error("questions", str(problem), why="there is nothing to train on.", fix="run `python -m data` first.")
        )
    return case, findings


def examine(case: Case, checks: Iterable[Check]) -> Iterator[Finding]:
    """The findings of all checks in order; what keeps checks from looking is a finding, too, once."""
    said: set[str] = set()
    for check in checks:
        try:
            for finding in check(case):
                said.add(finding.what)
                yield finding
        except (UserError, OSError) as problem:
            if str(problem) not in said:
                name = check.__name__.removeprefix("check_")
                yield error(name, str(problem), why="this could not be examined.", fix="mend what the message names.")
            said.add(str(problem))


def before_run(config: Config, run: RunDirectory, model: Path, train: Sequence[Question]) -> None:
    """The quick checks; prints warnings and raises UserError for errors."""
    validation = _questions(run, "val")
    case = Case(config, run, Path(__file__).resolve().parents[3], model, tuple(train), validation)
    findings = [finding for finding in examine(case, QUICK) if finding.severity > Severity.OK]
    for finding in findings:
        print("\n".join(as_lines(finding)), flush=True)
    if errors := [finding for finding in findings if finding.severity is Severity.ERROR]:
        first = errors[0]
        raise UserError(f"{first.what} Why it matters: {first.why} To mend it: {first.fix}")


def _checks(quick: bool) -> tuple[Check, ...]:
    if quick:
        return QUICK
    from stage2_grpo.preflight.doctor.rehearsal import rehearse

    return (*QUICK, rehearse)


def _parser() -> argparse.ArgumentParser:
    parser = common_parser("python -m stage2_grpo doctor", _DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="only what takes seconds: no reward test, no server")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return parser


def _first_line(check: Check) -> str:
    return f"{check.__name__.removeprefix('check_'):<12} {(check.__doc__ or '').splitlines()[0]}"


def _print(finding: Finding, as_json_later: bool) -> None:
    if not as_json_later:
        print("\n".join(as_lines(finding)), flush=True)


def _questions(run: RunDirectory, split: str) -> tuple[Question, ...]:
    return tuple(read_questions(question_file(run, split)))
