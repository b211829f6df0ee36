"""A small process that owns one command and everything the command starts (Linux).

    python supervise.py GRACE_SECONDS COMMAND [ARGUMENT ...]

Its standard input is a pipe whose other end the owner holds. When that end closes, because the owner says stop or
because the owner died (kill -9 included), the command's process group gets SIGTERM and, after the grace, every process
below gets SIGKILL. As a "child subreaper" this process inherits whatever the command leaves behind, so nothing slips
out by starting its own session (as Ray's daemons do). It touches only its own descendants. Exits with the command's
status.

Standard library only, and run with `-I -S`, so that it costs some milliseconds and a few MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVER_GRACE_SECONDS = 3.0  # for processes that outlive the command
_KILL_PATIENCE_SECONDS = 10.0  # a process stuck in the kernel cannot be waited for


def main() -> int:
    command = Command(sys.argv[2:])
    command.wait(owner=True)
    if command.status is None:
        _signal_group(command.pid, signal.SIGTERM)
        command.wait(seconds=float(sys.argv[1]))
    if command.status is not None:  # what it left behind deserves the same politeness
        _signal_descendants(signal.SIGTERM)
        command.wait_for_descendants(_LEFTOVER_GRACE_SECONDS)
    command.wait_for_descendants(_KILL_PATIENCE_SECONDS, signal.SIGKILL)
    status = command.status if command.status is not None else -signal.SIGKILL
    return 128 - status if status < 0 else status


class Command:
    """The running command; `status` is None until it ended."""

    def __init__(self, argv: list[str]) -> None:
        self._wake, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._terminated = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides what Ctrl-C means
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes the loop
        signal.signal(signal.SIGTERM, self._terminate)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # should this process be killed
        )
        self.pid = self._process.pid
        self.status: int | None = None

    def wait(self, *, owner: bool = False, seconds: float | None = None) -> None:
        """Return when the command ended, after `seconds`, or (`owner`) when the owner is gone or says stop."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._reap()
        while self.status is None and not (owner and self._terminated):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            readable, _, _ = select.select([self._wake, *([0] if owner else [])], [], [], left)
            if 0 in readable and not os.read(0, 1):
                return
            if self._wake in readable:
                os.read(self._wake, 512)
            self._reap()

    def wait_for_descendants(self, seconds: float, signal_number: int | None = None) -> None:
        """Wait until nothing is left below this process, sending `signal_number` again and again meanwhile."""
        deadline = time.monotonic() + seconds
        while _descendants() and time.monotonic() < deadline:
            if signal_number is not None:
                _signal_descendants(signal_number)
            time.sleep(0.05)
            self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)

    def _terminate(self, *_: object) -> None:
        self._terminated = True


def _descendants() -> list[int]:
    children, found = _children(), [os.getpid()]
    for pid in found:
        found.extend(children.get(pid, []))
    return found[1:]


def _children() -> dict[int, list[int]]:
    """Every parent's child processes, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as stream:
                parent = int(stream.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry))
    return children


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _signal_descendants(number: int) -> None:
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
