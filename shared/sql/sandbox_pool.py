"""Runs SQL in sandbox processes (shared/sql/sandbox_worker.py) that are kept for the next query and end with this one.

Calls may come from any thread; each query has a process to itself. A query that cannot be stopped otherwise takes only
its own process with it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from shared.sql import sandbox
from shared.sql import sandbox_worker as sandbox_process

_GRACE_SECONDS = 10.0  # for a start on a busy machine; a process that outlives its own alarm clock by more is killed


class SqlError(Exception):
    """SQL that could not be run; `str(error)` is a message a model can act on.

    `kind` is "error" (SQLite refused it), "denied" (not a read), "timeout" or "too_large".
    """

    def __init__(self, message: str, kind: str = "error") -> None:
        super().__init__(message)
        self.kind = kind


class SandboxError(RuntimeError):
    """The process that runs the SQL could not start or broke; nobody's query is to blame."""


class _EndedIdle(Exception):
    """The process ended before it took up the request."""


def ask(request: str, uri: str, sql: str | tuple[str, ...], seconds: float, *rest: Any) -> Any:
    """The answer of a function of shared/sql/sandbox.py or shared/sql/sandbox_official.py; raises SqlError when the query ended its process."""
    while True:
        idle = _take_idle()
        worker = idle or _Worker()
        try:
            result = worker.ask((request, uri, sql, seconds, *rest))
        except _EndedIdle as error:
            if idle:  # it ended while it waited: take another one
                continue
            raise SandboxError("the SQL sandbox ended at once; its message stands above") from error
        _idle.append(worker)
        return result


class _Worker:
    """One sandbox process. It ends itself when its stdin closes, so none outlives this process."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        program = f"import sys; sys.path.append({root!r}); from shared.sql.sandbox_worker import serve; serve()"
        command = [sys.executable, "-I", "-S", "-c", program]
        # Libraries preloaded for vLLM would use up the sandbox's memory before it starts.
        variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def ask(self, request: tuple[Any, ...]) -> Any:
        """Send one request and wait for its answer; raises SqlError when the query ended the process."""
        seconds = request[3]
        silent = False
        try:
            sandbox_process.send(_open(self._process.stdin), request)
            silent = not self._answers_within(seconds + _GRACE_SECONDS)
            return sandbox_process.receive(_open(self._process.stdout))
        except (EOFError, BrokenPipeError) as error:
            code = self.close()
            if silent or code == -signal.SIGALRM:
                raise SqlError(sandbox.timeout_message(f"{seconds:g}"), "timeout") from None
            if code == 0 or isinstance(error, BrokenPipeError):
                raise _EndedIdle from error
            if code < 0:
                message = "The query used up the memory of the sandbox; select less at once."
                raise SqlError(message, "too_large") from None
            raise SandboxError(f"the SQL sandbox ended with exit code {code}; its message stands above") from error
        except BaseException:  # interrupted: an answer still to come must not reach the next request
            self._process.kill()
            self.close()
            raise

    def _answers_within(self, seconds: float) -> bool:
        """True when there is something to read; a process that stays silent for so long is killed."""
        poll = select.poll()
        poll.register(_open(self._process.stdout), select.POLLIN)
        if poll.poll(seconds * 1000):
            return True
        self._process.kill()
        return False

    def close(self) -> int:
        """End the process and return its exit code."""
        with contextlib.suppress(BrokenPipeError):
            _open(self._process.stdin).close()
        _open(self._process.stdout).close()
        return self._process.wait()


def _open(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


_idle: list[_Worker] = []  # append and pop are atomic


def _take_idle() -> _Worker | None:
    try:
        return _idle.pop()
    except IndexError:
        return None


def _close_idle() -> None:
    while worker := _take_idle():
        worker.close()


atexit.register(_close_idle)
os.register_at_fork(after_in_child=_idle.clear)  # the pipes belong to the parent
