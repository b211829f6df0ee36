"""Processes that a run starts and owns: they come up healthy or fail with their last words, and never outlive it.

Every service runs below a supervisor (`shared/processes/supervise.py`) that ends it, with everything it started, when
the `with` block ends or when this process dies, however it dies. Nothing else on the machine is ever signalled. No
shell, no port but on the loopback address. Linux only, as vLLM and Ray are here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil
from tqdm import tqdm

from shared.errors import UserError
from shared.processes import supervise

_PR_SET_PDEATHSIG = 1
_LOG_LINES = 20
_LOCK_VARIABLE = "FIRSTCALL_LOCKED_RUN"  # tells the stages that a runner starts that their run is already held
_ORPHAN_PATIENCE_SECONDS = 120.0
_held_lock: IO[str] | None = None


def die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it dies; for workers of a process pool."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_port() -> int:
    """A TCP port that was free on 127.0.0.1 a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def random_key() -> str:
    """A secret for one service of one run."""
    return secrets.token_urlsafe(24)


class OwnedProcess:
    """One command that lives as long as the `with` block.

    `log` receives stdout and stderr (None: they stay this process's); that of the start before is kept as
    `*.before.log`. `health` is a URL that answers 200 or a function that returns True; without it the process counts as
    up at once. `grace` is how many seconds it may take to end after SIGTERM. `env` is added to this process's
    environment.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        health: str | Callable[[], bool] | None = None,
        start_timeout: float = 60.0,
        grace: float = 20.0,
    ) -> None:
        self.argv = list(argv)
        self.name = name
        self.log = log
        self.env = {**os.environ, **(env or {})}
        self.health = health
        self.start_timeout = start_timeout
        self.grace = grace
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start and wait for health; raises UserError with the log's last lines when it does not come up."""
        try:
            self._start()
            if self.health is not None:
                self._await_health()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the command still runs."""
        return self._process is not None and self._process.poll() is None

    def check(self, advice: str = "") -> None:
        """Raise UserError with `advice` and the log's last lines when the service has died."""
        if not self.running:
            raise UserError(
                f"{self.name} ended unexpectedly ({self._status()}){advice and f'; {advice}'}.{self._last_words()}"
            )

    def wait(self) -> int:
        """Wait until the command ends by itself and return its exit status (128 + n when signal n ended it)."""
        assert self._process is not None, "wait() belongs inside the with block"
        return self._process.wait()

    def stop(self) -> None:
        """SIGTERM for the process group, SIGKILL after the grace; returns when all of it is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

    def _start(self) -> None:
        supervisor = [sys.executable, "-I", "-S", supervise.__file__, str(self.grace), *self.argv]
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                if self.log.exists():
                    self.log.replace(self.log.with_stem(f"{self.log.stem}.before"))
                output = stack.enter_context(self.log.open("wb"))
            self._process = subprocess.Popen(
                supervisor,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env=self.env,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends its services in order
                pass_fds=[_held_lock.fileno()] if _held_lock else [],  # the run stays locked until they are gone
            )

    def _await_health(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        with tqdm(desc=f"starting {self.name}", bar_format="{desc} {elapsed}", leave=False, disable=None) as clock:
            while not self._healthy():
                if not self.running:
                    raise UserError(f"{self.name} did not start ({self._status()}).{self._last_words()}")
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.name} was not ready after {self.start_timeout:.0f} s and was ended; if the machine is "
                        f"just slow, raise the start timeout.{self._last_words()}"
                    )
                time.sleep(0.25)
                clock.update()

    def _healthy(self) -> bool:
        assert self.health is not None
        return answers(self.health) if isinstance(self.health, str) else self.health()

    def _status(self) -> str:
        status = self._process.poll() if self._process else None
        if status is None:
            return "stopped"
        return f"ended by {signal.Signals(status - 128).name}" if status > 128 else f"exit status {status}"

    def _last_words(self) -> str:
        if self.log is None or not self.log.exists():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-_LOG_LINES:]
        return f" The last lines of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)


def answers(url: str) -> bool:
    """Whether `url` answers 200 within two seconds; never through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run directory for this process, its services and the stages it starts; others get a UserError.

    The kernel drops the lock when the last of them is gone, so a killed runner leaves nothing to clean up: its
    successor only waits until its services have ended.
    """
    global _held_lock
    if os.environ.get(_LOCK_VARIABLE) == str(folder):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        _acquire(lock, folder)
        lock.truncate(0)
        lock.write(f"{os.getpid()} {psutil.Process().create_time()}")
        lock.flush()
        _held_lock, os.environ[_LOCK_VARIABLE] = lock, str(folder)
        try:
            yield
        finally:
            _held_lock = None
            del os.environ[_LOCK_VARIABLE]


def _acquire(lock: IO[str], folder: Path) -> None:
    deadline = time.monotonic() + _ORPHAN_PATIENCE_SECONDS
    announced = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(lock)
            if holder or time.monotonic() > deadline:
                raise UserError(
                    f"Run directory {folder} is in use by {f'process {holder}' if holder else 'another process'}; wait "
                    "for it or choose another --run-name."
                ) from None
        if not announced:
            print("waiting for the services of an interrupted run to end ...", flush=True)
            announced = True
        time.sleep(0.2)


def _holder(lock: IO[str]) -> str:
    """The pid of the live process that wrote the lock file, or "" when only its services are left."""
    lock.seek(0)
    pid, _, started = lock.read().partition(" ")
    try:
        process = psutil.Process(int(pid))
        same = str(process.create_time()) == started and process.status() != psutil.STATUS_ZOMBIE
        return pid if same else ""
    except (ValueError, psutil.NoSuchProcess):
        return ""
