"""What a check examines and what it reports."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shared.cli.machine import Drawback, Machine, Needs, look
from shared.config.schema import Config
from shared.errors import UserError
from shared.records import Question
from shared.runs.manifest import RunDirectory

EXIT_CODES = {"ok": 0, "warning": 3, "error": 2}  # by the worst severity, the last; 1 is Python's own, for a bug


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

    @property
    def needs(self) -> Needs:
        """What the run asks of this machine; the GPUs of a Ray cluster are counted when it is joined."""
        grpo, server = self.config.grpo, self.config.vllm
        return Needs(self.config.profile, 0 if grpo.ray_address else max(grpo.gpus_per_node, server.tensor_parallel))


Check = Callable[[Case], str | None]
"""Says in figures how well all is; None where there is nothing to see. Raises UserError, or Drawback for a warning."""


@dataclass(frozen=True)
class Finding:
    """One result of one check. A problem is a sentence that states it, its impact and the fix."""

    check: str
    severity: str  # a key of EXIT_CODES
    what: str
    seconds: float = 0.0  # that it took to find

    def __str__(self) -> str:
        head, took = f"{self.severity:<8} {self.check:<12} ", f" [{self.seconds:.0f} s]" if self.seconds >= 1 else ""
        indent = " " * len(head)
        return textwrap.fill(
            self.what + took, 120, initial_indent=head, subsequent_indent=indent, break_long_words=False
        )


def found(name: str, check: Callable[[], str | None]) -> Iterator[Finding]:
    """The finding of one check, if it has anything to say."""
    began = time.monotonic()
    try:
        severity, what = "ok", check()
    except (UserError, OSError) as problem:
        severity, what = "warning" if isinstance(problem, Drawback) else "error", str(problem)
    if what is not None:
        yield Finding(name, severity, what, round(time.monotonic() - began, 1))
