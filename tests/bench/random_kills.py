"""Kill -9 at random moments of a GRPO run: does it end in order each time, and go on to a whole result?

    python -m tests.bench.random_kills --kills 10 --seed 0

The pipeline runner trains a tiny model on a CPU with the real gateway, controller, Ray, VERL and vLLM. Again and again
one of its processes is killed, drawn by the seed as is the moment, and the same command is started again. An end is
clean when the command ends by itself with one sentence and a status other than 0 (unless it was the victim), nothing of
the run is left a minute later, and no saved step is lost. At last the run is left alone: it must complete, with every
step recorded once and the questions of an unbroken run. Signals go only to the command that was started here and its
descendants. Exit status 1 unless all is well.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from shared.cli.command_line import run_main
from shared.errors import UserError
from shared.processes import supervise
from shared.records import JsonlTail
from stage2_grpo.checkpoints.files import newest_step
from tests.processes import command_line, of_run, wait_for
from tests.stage2_grpo.small_run import SETTINGS, differing_weights, options, taught_model

ROOT = Path(__file__).resolve().parents[2]
VICTIMS = {  # by command line; of several that fit one is drawn
    "runner": r"run_pipeline\.py",
    "stage": r"-m stage2_grpo ",
    "gateway": r"/agl-server ",
    "controller": r"-m stage2_grpo\.controller ",
    "trainer": r"-m stage2_grpo\.train ",
    "trainer's Ray actor": r"^ray::\S*(TaskRunner|WorkerDict)",
    "vLLM": r"^(VLLM::|ray::vLLM)",
    "Ray": r"/raylet/raylet |/gcs_server ",
}
PHASES = {
    "start-up": 60.0,
    "rollout": 1.0,
    "update": 4.0,
    "save": 0.1,
    "export": 8.0,
}  # seconds in which the kill falls
QUESTIONS, EPISODES = 2, 4  # of a step
MOMENT_SECONDS = 400.0  # until the moment must have come
END_SECONDS = 180.0  # until a command of which a part was killed must have ended
GONE_SECONDS = 60.0  # until nothing of it may be left
SEARCH_SECONDS = 1.0  # between two searches for the victim
WHOLE_SECONDS = 900.0  # of the start that is left alone


@dataclass(frozen=True)
class Kill:
    """One planned kill: in `phase`, when its start has saved `after` steps, after `wait` of the phase's seconds."""

    victim: str
    phase: str
    after: int
    wait: float


@dataclass
class Start:
    """One start of the command as its files show it; `look` again to see how far it is."""

    grpo: Path
    steps: int
    began: float = field(default_factory=time.monotonic)
    played: list[tuple[int, str]] = field(default_factory=list)  # step and question of its training episodes
    saved_before: int = 0
    saved: int = 0

    def __post_init__(self) -> None:
        self._seen = {row["rollout_id"] for row in self._episodes()}  # of earlier starts
        self.look()
        self.saved_before = self.saved

    def look(self) -> str:
        """The phase that the run is in."""
        for row in self._episodes():
            if row["split"] == "train" and row["rollout_id"] not in self._seen:
                self._seen.add(row["rollout_id"])
                self.played.append((row["step"], row["question_id"]))
        self.saved = newest_step(self.grpo / "checkpoints")
        if self.saved >= self.steps:
            return "export"
        if sum(step == self.saved + 1 for step, _ in self.played) < EPISODES:
            return "rollout" if self.played else "start-up"
        return "save" if (self.grpo / "checkpoints" / f"global_step_{self.saved + 1}").exists() else "update"

    def _episodes(self) -> list[dict[str, Any]]:
        return JsonlTail(self.grpo / "episodes.jsonl").new_rows()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.random_kills", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="GRPO steps of the run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.kills < 1 or args.steps < 2 * args.kills:  # a kill may let two be saved, and one of Ray many
        raise UserError("random_kills needs --kills of at least 1 and --steps of at least twice as many.")
    bench = Bench(Path(tempfile.mkdtemp(prefix="random-kills-")), args.steps, args.seed)
    kills = plan(args.kills, args.seed)
    clean = sum(bench.strike(f"kill {number}/{len(kills)}", kill) for number, kill in enumerate(kills, start=1))
    faults = bench.complete()
    for fault in faults:
        print(f"fault: {fault}")
    print(f"{clean} of {len(kills)} kills ended clean; steps 1..{args.steps} continuous: {'no' if faults else 'yes'}")
    if faults or clean < len(kills):
        print(f"the run is kept in {bench.folder}")
        sys.exit(1)
    shutil.rmtree(bench.folder)


def plan(kills: int, seed: int) -> list[Kill]:
    """Victims and phases as two shuffled packs deal them, so that all get their turn; the last is in the export."""
    draw = random.Random(seed)
    victims, phases = (_deal(draw, pack, kills - 1) for pack in (list(VICTIMS), list(PHASES)[:-1]))
    planned = [Kill(*drawn, draw.randint(0, 1), draw.random()) for drawn in zip(victims, phases, strict=True)]
    return [*planned, Kill(draw.choice(["runner", "stage"]), "export", 0, draw.random())]


def _deal(draw: random.Random, pack: list[str], count: int) -> list[str]:
    cards: list[str] = []
    while len(cards) < count:
        cards += draw.sample(pack, len(pack))
    return cards[:count]


class Bench:
    """One run in `folder`, started again and again."""

    def __init__(self, folder: Path, steps: int, seed: int) -> None:
        self.folder, self._steps, self._draw = folder, steps, random.Random(seed)
        self._grpo = folder / "runs" / "kills" / "grpo"
        self._model = taught_model(folder / "tiny")
        self._starts: list[Start] = []
        if subprocess.run(self._command("data"), cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise UserError(
                f"random_kills could not prepare the questions of its run in {folder}; the runner says why above."
            )

    def strike(self, name: str, kill: Kill) -> bool:
        """Start the command, kill as planned, tell how it ended; returns whether that was clean."""
        with self._started() as (command, log, start):
            victim = self._await_moment(command, start, kill)
            if victim is None:
                print(f"{name}: {kill.victim} in {kill.phase}: the moment did not come, see {log}", flush=True)
                return False
            age = time.monotonic() - start.began
            moment = f"{start.look()} of step {min(start.saved + 1, self._steps)}, {age:.0f} s old"
            victim.kill()
            struck = time.monotonic()
            wait_for(lambda: command.poll() is not None, END_SECONDS, pause=0.1)
            ended = time.monotonic()
            wait_for(lambda: not of_run(self.folder), GONE_SECONDS, pause=0.1)
            gone = time.monotonic()
        start.look()
        said = log.read_text(encoding="utf-8", errors="replace")
        faults = faults_of_end(kill.victim, command.returncode, said, of_run(self.folder), start)
        print(
            f"{name}: {kill.victim} (pid {victim.pid}) in {moment}: exit {command.returncode} after "
            f"{ended - struck:.1f} s, all gone {gone - ended:.1f} s later, {start.saved} steps saved: "
            f"{'; '.join(faults) or 'clean'}\n    {_sentence(said)}",
            flush=True,
        )
        return not faults

    def complete(self) -> list[str]:
        """Start the command for the last time and leave it alone; everything that is wrong with the end."""
        with self._started() as (command, log, start):
            wait_for(lambda: command.poll() is not None, WHOLE_SECONDS)
            seconds = time.monotonic() - start.began
        start.look()
        print(f"left alone: exit {command.returncode} after {seconds:.0f} s, {start.saved} steps saved", flush=True)
        if command.returncode:
            return [f"the last start ended with {command.returncode}, see {log}"]
        rows = JsonlTail(self._grpo / "metrics.jsonl").new_rows()
        faults = [*faults_of_metrics(rows, self._steps), *faults_of_order(self._starts, self._steps)]
        faults += [f"process {process} is left" for process in of_run(self.folder)]
        if not differing_weights(self._model, self._grpo / "model"):
            faults.append("the exported model is the start model")
        return faults

    def _command(self, stage: str) -> list[str]:
        runner = [sys.executable, str(ROOT / "run_pipeline.py"), "--profile", "cpu", "--run-name", "kills"]
        run = (f"runs_dir={self.folder / 'runs'}", f"grpo.model={self._model}", f"grpo.total_steps={self._steps}")
        # A policy that is never right must stay as it is for so many steps.
        return [*runner, *options(*SETTINGS, *run, "grpo.learning_rate=3e-4", "safety.window=0"), "--only", stage]

    @contextlib.contextmanager
    def _started(self) -> Iterator[tuple[subprocess.Popen[bytes], Path, Start]]:
        """The command, its output and what it does; it is asked to end with the block if it has not ended."""
        log, start = self.folder / f"start-{len(self._starts) + 1}.log", Start(self._grpo, self._steps)
        self._starts.append(start)
        with log.open("wb") as output:
            command = subprocess.Popen(self._command("grpo"), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield command, log, start
        finally:
            if command.poll() is None:
                command.terminate()
            command.wait()

    def _await_moment(self, command: subprocess.Popen[bytes], start: Start, kill: Kill) -> psutil.Process | None:
        """The process to be killed now; None when the command ended before, or the moment does not come."""
        found: list[psutil.Process] = []
        searched = -SEARCH_SECONDS

        def come() -> bool:
            nonlocal found, searched
            if command.poll() is not None:
                return True
            if time.monotonic() > searched + SEARCH_SECONDS:  # beforehand, for the moment may be short
                found, searched = victims(psutil.Process(command.pid), kill.victim), time.monotonic()
            far_enough = start.look() == kill.phase and start.saved >= start.saved_before + kill.after
            return bool(found) and (far_enough or kill.phase == "start-up")

        wait_for(come, MOMENT_SECONDS, pause=0.02)
        passed = time.monotonic() - start.began if kill.phase == "start-up" else 0.0
        time.sleep(kill.wait * max(0.0, PHASES[kill.phase] - passed))
        alive = [process for process in found if process.is_running()]
        return self._draw.choice(alive) if alive and command.poll() is None else None


def victims(command: psutil.Process, name: str) -> list[psutil.Process]:
    """The processes of this name among the command and its descendants."""
    return [
        process
        for process in [command, *command.children(recursive=True)]
        if supervise.__file__ not in (line := command_line(process)) and re.search(VICTIMS[name], line)
    ]


def faults_of_end(victim: str, status: int, said: str, left: Sequence[object], start: Start) -> list[str]:
    """What is not clean about the end of a start; `said` is the command's output, `left` are its living processes."""
    sentences = re.findall("^error: ", said, re.MULTILINE)
    wrong = {
        "the command reported no failure": status == 0,
        "the command had to be asked to end": status in (130, -15),
        f"it said {len(sentences)} sentences instead of one": len(sentences) != 1 and victim != "runner",
        "it wrote a traceback": bool(re.search("^Traceback ", said, re.MULTILINE)),
        f"{len(left)} processes are left: {left}": bool(left),
        f"step {start.saved_before} was saved before": start.saved < start.saved_before,
    }
    return [fault for fault, is_so in wrong.items() if is_so]


def faults_of_metrics(rows: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    """What is wrong with metrics.jsonl of a complete run."""
    recorded = [row["step"] for row in rows]
    faults = [f"steps {recorded} are recorded"] if recorded != list(range(1, steps + 1)) else []
    counts = {row["step"]: row["episodes"] + row["lost_episodes"] for row in rows}
    return faults + [f"step {step} has {count:g} episodes" for step, count in counts.items() if count != EPISODES]


def faults_of_order(starts: Sequence[Start], steps: int) -> list[str]:
    """Whether every start went on with the questions of the step after the last saved one, and none came twice."""
    asked: defaultdict[int, set[str]] = defaultdict(set)
    for start in starts:
        for step, question in start.played:
            asked[step].add(question)
    counts = {step: len(asked[step]) for step in range(1, steps + 1)}
    faults = [f"step {step} asked {count} questions" for step, count in counts.items() if count != QUESTIONS]
    twice = [pair for pair in combinations(range(1, steps + 1), 2) if asked[pair[0]] & asked[pair[1]]]
    return faults + [f"steps {one} and {other} asked the same question" for one, other in twice]


def _sentence(said: str) -> str:
    """The first line of the failure that was told, "" when there is none."""
    return next((line for line in said.splitlines() if line.startswith("error: ")), "")


if __name__ == "__main__":
    run_main(main)
