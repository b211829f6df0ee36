"""What a check reports: what was found, why it matters, how to mend it; and the exit code of them all."""

from __future__ import annotations

import enum
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shared.config.schema import Config
from shared.records import Question
from shared.runs.manifest import RunDirectory


class Severity(enum.IntEnum):
    """How bad a finding is; the worst one decides."""

    OK = 0
    WARNING = 1  # the run works, worse than it could
    ERROR = 2  # the run fails, or trains something else than it says


EXIT_CODES = {Severity.OK: 0, Severity.WARNING: 3, Severity.ERROR: 2}  # 1 is Python's own, for a bug


@dataclass(frozen=True)
class Finding:
    """One result of one check. `why` and `fix` are empty only where all is well."""

    check: str
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    seconds: float = 0.0  # that it took to find


@dataclass(frozen=True)
class Case:
    """What is examined. `model` is None when there is no checkpoint to start from."""

    config: Config
    run: RunDirectory
    root: Path  # of the repository, for requirements/
    model: Path | None
    train: tuple[Question, ...]
    validation: tuple[Question, ...]


def ok(check: str, what: str) -> Finding:
    """All is well; `what` says how well, in figures."""
    return Finding(check, Severity.OK, what)


def warning(check: str, what: str, *, why: str, fix: str) -> Finding:
    """The run works, but worse than it could."""
    return Finding(check, Severity.WARNING, what, why, fix)


def error(check: str, what: str, *, why: str, fix: str) -> Finding:
    """The run would fail, or train something else than it says."""
    return Finding(check, Severity.ERROR, what, why, fix)


def timed(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings as they come, each with the seconds since the one before."""
    began = time.monotonic()
    for finding in findings:
        yield replace(finding, seconds=round(time.monotonic() - began, 1))
        began = time.monotonic()


def worst(findings: Iterable[Finding]) -> Severity:
    """The highest severity; OK for none."""
    return max((finding.severity for finding in findings), default=Severity.OK)


def as_lines(finding: Finding) -> Iterator[str]:
    """The finding as text for a terminal."""
    head = f"{finding.severity.name.lower():<8} {finding.check:<12} "
    indent = " " * len(head)
    took = f" [{finding.seconds:.0f} s]" if finding.seconds >= 1 else ""
    yield textwrap.fill(finding.what + took, 120, initial_indent=head, subsequent_indent=indent, break_long_words=False)
    for label, text in (("why", finding.why), ("fix", finding.fix)):
        if text:
            label = f"{indent}{label}: "
            yield textwrap.fill(
                text, 120, initial_indent=label, subsequent_indent=" " * len(label), break_long_words=False
            )


def as_json(findings: Sequence[Finding], **more: Any) -> dict[str, Any]:
    """All findings as plain values; `worst` names the highest severity."""
    rows = [{**asdict(finding), "severity": finding.severity.name.lower()} for finding in findings]
    return {**more, "worst": worst(findings).name.lower(), "findings": rows}
