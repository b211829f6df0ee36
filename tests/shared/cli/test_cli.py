"""The common command line: exit codes, interruption, run names."""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.cli.command_line import READER_GONE, check_name, common_parser, resolve, run_main
from shared.errors import UserError

REPO = Path(__file__).resolve().parents[3]


def run(body: str) -> subprocess.CompletedProcess[str]:
    code = f"from shared.cli.command_line import run_main\nfrom shared.errors import UserError\n{body}\nrun_main(main)"
    return subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Puts back what `run_main` changes in this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def parse(*arguments: str) -> argparse.Namespace:
    return common_parser("x", "y").parse_args([*arguments, "--config", str(REPO / "pipeline.yaml"), "--profile", "cpu"])


def test_success_exits_0() -> None:
    assert run("def main(): print('done')").returncode == 0


def test_a_users_problem_is_one_sentence_and_exits_2() -> None:
    ended = run("def main(): raise UserError('Database x is missing; restore it.')")
    assert (ended.returncode, ended.stderr) == (2, "error: Database x is missing; restore it.\n")


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "/data/x"),
        RuntimeError("write failed: No space left on device (/data/x)"),  # torch
        ValueError("I/O error: /data/x (os error 28)"),  # safetensors
    ],
)
def test_a_full_disk_is_a_users_problem_whatever_library_met_it(
    error: Exception, sigterm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == 2
    assert re.search("The disk is full .*/data/x.*free some space", capsys.readouterr().err)


def test_a_bug_keeps_its_traceback() -> None:
    ended = run("def main(): raise KeyError('x')")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


@pytest.mark.parametrize("work", ["print(*range(99999), sep='\\n')", "print('short')", "print('short'); sys.exit(3)"])
def test_output_that_nobody_reads_any_more_ends_the_command_without_a_word(work: str) -> None:
    read, write = os.pipe()
    os.close(read)
    code = f"import sys\nfrom shared.cli.command_line import run_main\ndef main(): {work}\nrun_main(main)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (READER_GONE, "")


@pytest.mark.parametrize("work", ["print(*range(99999), sep='\\n')", "print('short')"])
def test_output_into_a_file_on_a_full_disk_ends_the_command_with_one_sentence(work: str) -> None:
    code = f"from shared.cli.command_line import run_main\ndef main(): {work}\nrun_main(main)"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert re.fullmatch(r"error: The disk is full .*\n", ended.stderr)


def test_a_pipe_that_breaks_elsewhere_is_a_bug() -> None:
    ended = run("def main(): raise BrokenPipeError('a socket')")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


@pytest.mark.parametrize(
    "module",
    [
        "data",
        "stage1_sft",
        "stage2_grpo",
        "shared.evaluation",
        "shared.report",
    ],
)
def test_another_python_is_told_which_one_to_use(module: str) -> None:
    ended = subprocess.run([sys.executable, "-S", "-m", module], cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 2
    assert re.fullmatch(
        r"error: This Python .* cannot run this \(No module named .*\); use .*\.venv/bin/python, .*\n", ended.stderr
    )


def test_a_python_too_old_for_our_code_is_told_which_one_to_use() -> None:
    code = "from shared.cli.command_line import run_main; run_main(lambda: exec('a new form of Python'))"
    ended = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 2
    assert re.match(
        r"error: This Python .* cannot run this \(invalid syntax .*\); use .*\.venv/bin/python", ended.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_unwinds_and_exits_130(number: int) -> None:
    ended = run(f"""
import os
def main():
    try:
        os.kill(os.getpid(), {number})
        import time; time.sleep(10)
    finally:
        print("services ended")
""")
    assert ended.returncode == 130
    assert ended.stdout == "services ended\n"
    assert "the same command continues where it stopped" in ended.stderr


DROPPING = {
    "a destructor": "type('Careless', (), {'__del__': lambda _: os.kill(os.getpid(), 15)})()",
    "a library": "\n    try: os.kill(os.getpid(), 15)\n    except BaseException: pass",
}


@pytest.mark.parametrize("dropped", DROPPING.values(), ids=DROPPING)
def test_a_termination_that_was_dropped_is_tried_again_but_never_cuts_short_what_ends_the_services(
    dropped: str,
) -> None:
    ended = run(f"""
import os, shared.cli.command_line, time
shared.cli.command_line._AGAIN_SECONDS = 0.05
def main():
    {dropped}
    try:
        time.sleep(10)
    finally:
        time.sleep(0.2)
        print("services ended")
""")
    assert (ended.returncode, ended.stdout) == (130, "services ended\n")


def test_options_name_settings_and_run_directory() -> None:
    config, directory = resolve(parse("--set", "sft.epochs=7", "--set", "runs_dir=out", "--run-name", "a.1"))
    assert config.sft.epochs == 7
    assert directory.path == Path("out").resolve() / "a.1"


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b"])
def test_a_run_name_is_no_path(name: str) -> None:
    with pytest.raises(UserError, match="may hold only letters"):
        resolve(parse("--run-name", name))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/x", "x" * 101])
def test_a_name_that_is_no_single_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="--name"):
        check_name("--name", name)


@pytest.mark.parametrize(("old", "new"), [("evaluate", "evaluation"), ("analyse", "report --rules")])
def test_an_old_command_names_the_new_one(old: str, new: str) -> None:
    ended = subprocess.run([sys.executable, "-m", f"shared.{old}", "--help"], cwd=REPO, capture_output=True, text=True)
    sentence = f"error: `python -m shared.{old}` is now `python -m shared.{new}`.\n"
    assert (ended.returncode, ended.stderr) == (2, sentence)
