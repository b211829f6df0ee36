"""Time and memory of stages."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shared.runs.manifest import RunDirectory, begin_stage, finish_stage
from shared.runs.usage import PeakMemory, machine, measured, read_usage, tree_memory


def finish(folder: Path) -> None:
    begin_stage(folder, "x")
    finish_stage(folder, "x", seconds=0, outputs={})


def test_a_stage_that_worked_is_recorded(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with measured(run, "sft", run.sft):
        time.sleep(0.05)
        finish(run.sft)
    usage = read_usage(run)["sft"]
    assert usage["seconds"] >= 0.0
    assert usage["peak_bytes"] > 2**20
    assert usage["complete"]


def test_a_stage_that_had_nothing_to_do_keeps_its_record(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with measured(run, "sft", run.sft):
        finish(run.sft)
    before = read_usage(run)
    with measured(run, "sft", run.sft):
        time.sleep(0.2)
    assert read_usage(run) == before


def test_attempts_of_an_interrupted_stage_add_up_and_a_new_run_starts_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt), measured(run, "sft", run.sft):
        time.sleep(5)
    assert not read_usage(run)["sft"]["complete"]
    with measured(run, "sft", run.sft):
        finish(run.sft)
    assert read_usage(run)["sft"]["seconds"] >= 1.0
    (run.sft / "manifest.json").unlink()
    with measured(run, "sft", run.sft):
        finish(run.sft)
    assert read_usage(run)["sft"]["seconds"] < 1.0


def test_memory_of_child_processes_counts() -> None:
    before = tree_memory()
    code = "x = bytearray(80 << 20); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_memory() > before + (70 << 20)
        child.communicate(b"\n")
    with PeakMemory() as peak:
        pass
    assert 0 <= peak.bytes < before + (70 << 20)


def test_the_machine_is_described() -> None:
    here = machine()
    assert here["processor"]
    assert here["cores"] >= 1
    assert here["memory_bytes"] > 2**28


def test_an_unreadable_record_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "usage.json").write_text("{")
    assert read_usage(RunDirectory(tmp_path)) == {}
