"""`python -m stage2_grpo doctor`: finds what would spoil a run; every run goes through the quick part first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from shared.cli.command_line import ROOT, common_parser, resolve
from shared.config.schema import Config
from shared.errors import UserError
from shared.records import Question, read_questions
from shared.runs.manifest import RunDirectory, question_file
from stage2_grpo.inputs import planned_model, refuse_missing_agent
from stage2_grpo.preflight.checks import QUICK, Case, Finding, check_rewards, examine, found
from stage2_grpo.preflight.rehearsal import rehearse

_DESCRIPTION = """Finds what would spoil a stage-2 run before it starts: packages, machine, checkpoint, settings,
rewards, and a dress rehearsal of one episode with the real gateway, controller and vLLM server. Exit code 0: all is
well, 2: at least one error, 3: warnings only."""


EXIT_CODES = {"ok": 0, "warning": 3, "error": 2}  # by the worst severity, the last; 1 is Python's own, for a bug


def main(arguments: Sequence[str]) -> int:
    """Examine, print, and return the exit code."""
    parser = common_parser("python -m stage2_grpo doctor", _DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="only what takes seconds: no reward test, no server")
    args = parser.parse_args(arguments)
    config, run = resolve(args)
    chosen = QUICK if args.quick else QUICK | {"rewards": check_rewards}
    if args.dry_run:
        print("\n".join([*chosen, *([] if args.quick else ["rehearsal"])]))
        return 0
    findings = list[Finding]()
    case, missing = open_case(config, run)
    rehearsal = rehearse(case) if not args.quick and case.trained and case.train else ()
    for finding in chain(missing, examine(case, chosen), rehearsal):
        findings.append(finding)
        print(finding, flush=True)
    worst = max((finding.severity for finding in findings), key=[*EXIT_CODES].index)
    print(f"{len(findings)} findings, worst: {worst}")
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


def before_run(config: Config, run: RunDirectory, model: Path, train: Sequence[Question]) -> None:
    """The quick checks; prints warnings and raises UserError for the first error."""
    case = Case(config, run, ROOT, model, tuple(train), tuple(read_questions(question_file(run, "val"))))
    findings = [finding for finding in examine(case, QUICK) if finding.severity != "ok"]
    for finding in findings:
        print(finding, flush=True)
    for finding in findings:
        if finding.severity == "error":
            raise UserError(finding.what)
