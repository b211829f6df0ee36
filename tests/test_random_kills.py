"""The parts of tests/bench/random_kills.py that need no run: whom it kills when, and what it takes for a clean end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.processes import supervise
from tests.bench.random_kills import (
    PHASES,
    VICTIMS,
    Start,
    faults_of_end,
    faults_of_metrics,
    faults_of_order,
    plan,
    victims,
)
from tests.processes import command_line, wait_for
from tests.stage2_grpo.checkpoints.checkpoint_folder import save_steps

SENTENCE = "error: the trainer ended\n"


def started(grpo: Path, saved: int = 0) -> Start:
    """A start that found `saved` steps."""
    if saved:
        save_steps(grpo / "checkpoints", saved)
    return Start(grpo, 8)


def play(grpo: Path, step: int, questions: str) -> None:
    """Record an episode of the step for each of these questions."""
    rows = [
        {"rollout_id": f"{step} {place} {question}", "split": "train", "step": step, "question_id": question}
        for place, question in enumerate(questions)
    ]
    with (grpo / "episodes.jsonl").open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_seed_draws_the_same_kills_and_ten_of_them_spare_nobody() -> None:
    kills = plan(10, seed=3)
    assert kills == plan(10, seed=3) != plan(10, seed=4)
    assert {kill.victim for kill in kills} == set(VICTIMS)
    assert {kill.phase for kill in kills} == set(PHASES)
    assert (kills[-1].phase, kills[-1].victim in ("runner", "stage")) == ("export", True)
    assert [kill.phase for kill in plan(1, seed=0)] == ["export"]


def test_descendants_are_found_by_their_name_but_no_supervisors(tmp_path: Path) -> None:
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)', *extra, '/agl-' + 'server ', 'x']"
    code = (
        f"import subprocess, sys, time\nfor extra in ([], {[supervise.__file__]}): subprocess.Popen({sleeper})\n"
        "time.sleep(60)"
    )
    command = subprocess.Popen([sys.executable, "-c", code])
    below = psutil.Process(command.pid)
    try:
        assert wait_for(
            lambda: sum("/agl-server " in command_line(one) for one in below.children()) == 2, 10, pause=0.02
        )
        (gateway,) = victims(below, "gateway")
        assert (gateway.ppid(), supervise.__file__ in command_line(gateway)) == (command.pid, False)
        assert victims(below, "controller") == []
    finally:
        for process in (*below.children(), command):
            process.kill()
        command.wait()


def test_the_files_of_a_run_tell_its_phase(tmp_path: Path) -> None:
    play(tmp_path, 3, "wxyz")  # by an earlier start, which was killed
    start = started(tmp_path, saved=2)
    assert start.look() == "start-up"
    (tmp_path / "episodes.jsonl").unlink()  # as the next start drops what was not saved
    for questions, phase in (("ab", "rollout"), ("cd", "update")):
        play(tmp_path, 3, questions)
        assert start.look() == phase
    assert start.played == [(3, "a"), (3, "b"), (3, "c"), (3, "d")]
    folder = tmp_path / "checkpoints" / "global_step_3"
    folder.mkdir()
    assert start.look() == "save"
    folder.rmdir()
    save_steps(tmp_path / "checkpoints", 3)
    assert (start.look(), start.saved_before, start.saved) == ("rollout", 2, 3)
    save_steps(tmp_path / "checkpoints", 8)
    assert start.look() == "export"


@pytest.mark.parametrize(
    ("victim", "status", "said", "left", "fault"),
    [
        ("gateway", 2, SENTENCE, (), None),
        ("runner", -9, "", (), None),
        ("gateway", 0, SENTENCE, (), "reported no failure"),
        ("vLLM", 130, SENTENCE, (), "had to be asked to end"),
        ("vLLM", 2, "", (), "said 0 sentences"),
        ("stage", 2, SENTENCE + "Traceback (most recent call last):\n", (), "wrote a traceback"),
        ("runner", -9, "", ("a process",), "1 processes are left"),
    ],
)
def test_an_end_is_clean_or_has_its_fault_named(
    tmp_path: Path, victim: str, status: int, said: str, left: tuple[str, ...], fault: str | None
) -> None:
    faults = faults_of_end(victim, status, said, left, started(tmp_path))
    assert fault in faults[0] if fault else not faults, faults


def test_a_lost_step_is_a_fault(tmp_path: Path) -> None:
    start = started(tmp_path, saved=2)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    start.look()
    assert faults_of_end("runner", -9, "", (), start) == ["step 2 was saved before"]


def test_metrics_hold_every_step_once_with_all_its_episodes() -> None:
    def row(step: int, episodes: float = 4.0) -> dict[str, Any]:
        return {"step": step, "episodes": episodes, "lost_episodes": 0.0}

    assert faults_of_metrics([row(1), row(2)], 2) == []
    assert faults_of_metrics([row(1)], 2) == ["steps [1] are recorded"]
    assert faults_of_metrics([row(1), row(2), row(2)], 2) == ["steps [1, 2, 2] are recorded"]
    assert faults_of_metrics([row(1), row(2, 3.0)], 2) == ["step 2 has 3 episodes"]


def test_the_order_of_the_questions_goes_on_where_the_saved_steps_end(tmp_path: Path) -> None:
    def played(**steps: str) -> Start:
        start = started(tmp_path)
        start.played = [(int(step[1:]), question) for step, questions in steps.items() for question in questions]
        return start

    first = played(s1="aabb", s2="cc")  # killed in its second step
    assert faults_of_order([first, played(s2="ccdd")], 2) == []
    faults = ["step 2 asked 3 questions", "steps 1 and 2 asked the same question"]
    assert faults_of_order([first, played(s2="aadd")], 2) == faults
