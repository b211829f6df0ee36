"""Runs SQL in sandbox processes (shared/sql/sandbox.py), which are reused and end with this process.

Calls may come from any thread; each query has a process to itself. A query that cannot be stopped otherwise takes only
its own process with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from shared.sql.sandbox import TIMEOUT, receive, send

_START_SECONDS = 120.0  # for a start on a busy machine; no query's time
_GRACE_SECONDS = 10.0  # a process that outlives its own alarm by more is killed


class SqlError(Exception):
    """SQL that could not be run; `str(error)` is a message a model can act on.

    `kind` is "error" (SQLite refused it), "denied" (not a read), "timeout" or "too_large".
    """

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind


class SandboxError(RuntimeError):
    """The process that runs the SQL could not start or broke; nobody's query is to blame."""


def ask(request: str, uri: str, sql: str | tuple[str, ...], seconds: float, *rest: Any) -> Any:
    """The answer of a function of shared/sql/sandbox.py. Raises SqlError when the query ended its process."""
    worker = _idle_worker() or _Worker()
    result, reusable = worker.ask((request, uri, sql, seconds, *rest))
    if reusable:
        _idle.append(worker)
    else:
        worker.close()
    return result


class _Worker:
    """One sandbox process. It ends itself when its stdin closes, so none outlives this process."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        program = f"import sys; sys.path.append({root!r}); from shared.sql.sandbox import serve; serve()"
        # Libraries preloaded for vLLM would use up the sandbox's memory before it starts.
        variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout
        try:
            self._receive(_START_SECONDS)
        except (EOFError, TimeoutError) as error:
            code = self.close()
            raise SandboxError(
                f"the SQL sandbox did not start, it ended with exit code {code}; its message stands above"
            ) from error

    def ask(self, request: tuple[Any, ...]) -> Any:
        """Send one request and wait for its answer. Raises SqlError when the query ended the process."""
        seconds = request[3]
        try:
            send(self._requests, request)
            return self._receive(seconds + _GRACE_SECONDS)
        except (EOFError, TimeoutError, BrokenPipeError) as error:
            code = self.close()
            if isinstance(error, TimeoutError) or code == -signal.SIGALRM:
                raise SqlError(TIMEOUT.format(seconds), "timeout") from None
            if code < 0 and not isinstance(error, BrokenPipeError):
                message = "The query used up the memory of the sandbox; select less at once."
                raise SqlError(message, "too_large") from None
            raise SandboxError(f"the SQL sandbox ended with exit code {code}; its message stands above") from error
        except BaseException:  # interrupted: an answer still to come must not reach the next request
            self.process.kill()
            self.close()
            raise

    def _receive(self, seconds: float) -> Any:
        """Wait for one value. Kills the process and raises TimeoutError when it stays silent for so long."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if not poll.poll(seconds * 1000):
            self.process.kill()
            raise TimeoutError
        return receive(self._answers)

    def close(self) -> int:
        """End the process and return its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()
        return self.process.wait()


_idle: list[_Worker] = []  # append and pop are atomic


def _idle_worker() -> _Worker | None:
    """A process that waits for work; those that something else has ended meanwhile are dropped."""
    with contextlib.suppress(IndexError):
        while worker := _idle.pop():
            if worker.process.poll() is None:
                return worker
            worker.close()
    return None


os.register_at_fork(after_in_child=_idle.clear)  # the pipes belong to the parent
