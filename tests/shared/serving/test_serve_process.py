"""`serve` as a process of its own, killed in the middle of a question."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from shared.processes.owned_process import answers, free_port
from tests.processes import of_run, wait_for
from tests.scripted_server import scripted_server
from tests.shared.examples import insurance_file, tokenizer_folder
from tests.shared.serving.running import KEY, ROOT, client, events, says_sql

COUNT = says_sql("SELECT count(*) FROM claims")


def started(folder: Path, model: str, port: int) -> subprocess.Popen[bytes]:
    """A server that answers, or the test has failed."""
    argv = [sys.executable, "run_pipeline.py", "serve", "--database", str(folder / "insurance.sqlite")]
    argv += ["--endpoint", model, "--tokenizer", str(folder), "--port", str(port), "--profile", "cpu"]
    argv += ["--set", f"runs_dir={folder / 'runs'}", "--set", "agent.context_tokens=20000"]
    server = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "FIRSTCALL_SERVE_KEY": KEY}, stdout=subprocess.DEVNULL)
    assert wait_for(lambda: answers(f"http://127.0.0.1:{port}/"), 60, pause=0.1), server.poll()
    return server


def asked(port: int) -> Any:
    """The answer of the server to a question."""
    with client(f"http://127.0.0.1:{port}") as http:
        return events(http.post("/api/ask", json={"question": "How many claims?"}).text)[-1][1]


def test_a_killed_server_loses_only_the_question_in_flight_and_leaves_no_process(tmp_path: Path) -> None:
    insurance_file(tmp_path)
    tokenizer_folder(tmp_path)
    reached, released, port = threading.Event(), threading.Event(), free_port()

    def slow(request: dict[str, Any]) -> Any:
        reached.set()
        released.wait(60)
        return COUNT(request)

    lost: list[Exception] = []

    def ask() -> None:
        try:
            asked(port)
        except httpx.HTTPError as error:
            lost.append(error)

    with scripted_server(slow) as model:
        first = started(tmp_path, model, port)
        thread = threading.Thread(target=ask)
        thread.start()
        assert reached.wait(30)
        first.send_signal(signal.SIGKILL)
        first.wait()
        thread.join(30)
        released.set()
        assert len(lost) == 1
        assert wait_for(lambda: not of_run(tmp_path), 10), of_run(tmp_path)
        second = started(tmp_path, model, port)
        try:
            assert asked(port)["rows"] == [[3]]
        finally:
            second.terminate()
            assert second.wait(30) == 130
    assert wait_for(lambda: not of_run(tmp_path), 10), of_run(tmp_path)
