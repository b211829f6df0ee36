"""Owned processes: health, last words, and that nothing of them is left, however their owner ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shared.errors import UserError
from shared.processes.owned_process import OwnedProcess, answers, free_port, locked, random_key

REPO = Path(__file__).resolve().parents[3]


def server(port: int) -> list[str]:
    return [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def read_pid(file: Path) -> int:
    assert eventually(lambda: file.exists() and file.read_text().endswith("\n")), f"{file} was never written"
    return int(file.read_text())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_service_answers_inside_the_block_and_is_gone_after_it(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}/"
    with OwnedProcess(server(port), name="files", log=tmp_path / "files.log", health=url) as service:
        assert answers(url)
        service.check()
    assert not answers(url)
    assert "GET /" in (tmp_path / "files.log").read_text()


def test_a_service_that_crashes_at_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    crash = python("import sys; print('loading'); sys.exit('the model file is broken')")
    with (
        pytest.raises(UserError, match=r"(?s)reader did not start \(exit status 1\).*the model file is broken"),
        OwnedProcess(crash, name="reader", log=tmp_path / "reader.log", health="http://127.0.0.1:9/"),
    ):
        pass


def test_a_service_that_never_gets_healthy_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hang = python(f"import os, time; print(os.getpid(), file=open({str(pid_file)!r}, 'w'), flush=True); time.sleep(60)")
    with (
        pytest.raises(UserError, match="sleeper was not ready after 1 s"),
        OwnedProcess(hang, name="sleeper", log=tmp_path / "log", health=lambda: False, start_timeout=1),
    ):
        pass
    assert gone(read_pid(pid_file))


def test_a_service_that_dies_later_is_noticed(tmp_path: Path) -> None:
    short = python("print('out of memory')")
    with OwnedProcess(short, name="engine", log=tmp_path / "log") as service:
        assert service.wait() == 0
        with pytest.raises(UserError, match=r"(?s)engine ended unexpectedly \(exit status 0\).*out of memory"):
            service.check()


def test_exit_status_and_signal_of_a_command_are_passed_on(tmp_path: Path) -> None:
    with OwnedProcess(python("raise SystemExit(7)"), name="a") as process:
        assert process.wait() == 7
    with OwnedProcess(python("import os; os.kill(os.getpid(), 11)"), name="b", log=tmp_path / "log") as process:
        assert process.wait() == 128 + signal.SIGSEGV


def test_a_service_may_finish_its_work_on_sigterm(tmp_path: Path) -> None:
    polite = f"""
        import signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGTERM, lambda *_: (Path({str(tmp_path / "saved")!r}).touch(), sys.exit(0)))
        Path({str(tmp_path / "ready")!r}).touch()
        time.sleep(60)
    """
    with OwnedProcess(python(polite), name="polite", health=(tmp_path / "ready").exists):
        pass
    assert (tmp_path / "saved").exists()


def test_a_service_deaf_to_sigterm_is_killed_with_its_runaway_children(tmp_path: Path) -> None:
    deaf = f"""
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        print(child.pid, file=open({str(tmp_path / "child")!r}, "w"), flush=True)
        time.sleep(60)
    """
    with OwnedProcess(python(deaf), name="deaf", grace=0.3):
        child = read_pid(tmp_path / "child")
    assert gone(child)


def test_children_that_outlive_their_service_are_ended_too(tmp_path: Path) -> None:
    careless = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print(child.pid, file=open({str(tmp_path / "child")!r}, "w"), flush=True)
    """
    with OwnedProcess(python(careless), name="careless") as service:
        assert service.wait() == 0
    assert gone(read_pid(tmp_path / "child"))


def owner(tmp_path: Path, folder: Path) -> subprocess.Popen[bytes]:
    """A process that locks `folder` and owns a service that takes a second to end."""
    code = f"""
        import sys, time
        from pathlib import Path
        from shared.processes.owned_process import OwnedProcess, locked
        service = '''
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0)))
        print(os.getpid(), file=open({str(tmp_path / "service")!r}, "w"), flush=True)
        time.sleep(60)
        '''
        import textwrap
        with locked(Path({str(folder)!r})), OwnedProcess([sys.executable, "-c", textwrap.dedent(service)], name="s"):
            time.sleep(60)
    """
    code = textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPO)


def test_kill_9_of_the_owner_ends_its_services_and_frees_its_run(tmp_path: Path) -> None:
    process = owner(tmp_path, tmp_path / "run")
    service = read_pid(tmp_path / "service")
    with pytest.raises(UserError, match=f"in use by process {process.pid}"), locked(tmp_path / "run"):
        pass
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but not collected: it does not count as holder
    with locked(tmp_path / "run"):
        assert gone(service), "the run was free before its old services had ended"
    process.wait()


def test_a_run_is_held_by_its_holder_and_the_stages_it_starts(tmp_path: Path) -> None:
    with locked(tmp_path):
        code = (
            "from pathlib import Path; from shared.processes.owned_process import locked; "
            f"locked(Path({str(tmp_path)!r})).__enter__()"
        )
        assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
        assert os.environ["FIRSTCALL_LOCKED_RUN"] == str(tmp_path)
    assert "FIRSTCALL_LOCKED_RUN" not in os.environ
    with locked(tmp_path):
        pass


def test_a_pool_worker_dies_with_its_owner(tmp_path: Path) -> None:
    code = f"""
        import os, time
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context
        from shared.processes.owned_process import die_with_parent
        if __name__ == "__main__":
            with ProcessPoolExecutor(1, get_context("spawn"), die_with_parent) as pool:
                print(pool.submit(os.getpid).result(), file=open({str(tmp_path / "worker")!r}, "w"), flush=True)
                time.sleep(60)
    """
    (tmp_path / "owner.py").write_text(textwrap.dedent(code))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "owner.py")], env={**os.environ, "PYTHONPATH": str(REPO)}
    )
    worker = read_pid(tmp_path / "worker")
    process.kill()
    process.wait()
    assert eventually(lambda: gone(worker))


def test_keys_differ_and_ports_are_free() -> None:
    assert random_key() != random_key()
    assert not answers(f"http://127.0.0.1:{free_port()}/")
