"""What a check examines and what it reports."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shared.cli.machine import Machine, Problem, look
from shared.config.schema import Config
from shared.records import Question
from shared.runs.manifest import RunDirectory


class Severity(enum.IntEnum):
    """How bad a finding is; the worst one decides about the exit code."""

    OK = 0
    WARNING = 1  # the run works, but worse than it could
    ERROR = 2  # the run fails, or trains something other than it says


@dataclass(frozen=True)
class Case:
    """What is examined. `model` is the checkpoint to start from, else the base model, else None."""

    config: Config
    run: RunDirectory
    root: Path  # of the repository, for requirements/
    model: Path | None
    train: tuple[Question, ...]
    validation: tuple[Question, ...]
    trained: bool = True  # `model` is a checkpoint of stage 1
    machine: Machine = field(default_factory=look)

    @property
    def folder(self) -> Path:
        """The model, in checks that run only where there is one."""
        assert self.model is not None
        return self.model


@dataclass(frozen=True)
class Finding:
    """One result of one check. `why` and `fix` are empty where all is well."""

    check: str
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    seconds: float = 0.0  # that it took to find

    @classmethod
    def of(cls, check: str, answer: str | Problem, seconds: float = 0.0) -> Finding:
        """The finding for a check's answer."""
        if isinstance(answer, str):
            return cls(check, Severity.OK, answer, seconds=seconds)
        severity = Severity.ERROR if answer.fatal else Severity.WARNING
        return cls(check, severity, answer.what, answer.why, answer.fix, seconds)

    def lines(self) -> Iterator[str]:
        """The finding as text for a terminal."""
        head = f"{self.severity.name.lower():<8} {self.check:<12} "
        took = f" [{self.seconds:.0f} s]" if self.seconds >= 1 else ""
        texts = {head: self.what + took, " " * len(head) + "why: ": self.why, " " * len(head) + "fix: ": self.fix}
        for start, text in texts.items():
            if text:
                indent = " " * len(start)
                yield textwrap.fill(text, 120, initial_indent=start, subsequent_indent=indent, break_long_words=False)
