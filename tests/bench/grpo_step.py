"""Episodes per minute of GRPO steps and their peak memory: this checkout against an earlier commit, in one run.

    python -m tests.bench.grpo_step --run runs/main [--base c2da303] [--steps 2] [--set grpo.train_batch_size=8]

Both play the training questions of a run that has finished its stage 1, from that checkpoint, with the CPU profile and
the same settings but for `--set`, which changes this checkout's alone. The base commit is checked out into a temporary
folder. Start-up, validation and export do not count; memory is the proportional share of all processes of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import psutil

from shared.cli.command_line import run_main
from shared.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
_PAUSE_SECONDS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.grpo_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of a run with a finished stage 1")
    parser.add_argument("--base", default="c2da303", help="commit to compare with")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="a setting of this checkout's run; may be repeated")
    args = parser.parse_args()
    model, data = args.run.resolve() / "sft" / "merged", args.run.resolve() / "data"
    if not (model / "config.json").exists() or not (data / "train.jsonl").exists():
        raise UserError(f"{args.run} holds no finished stage 1; run `python run_pipeline.py --until sft` first.")
    common = [
        f"grpo.model={model}",
        f"grpo.total_steps={args.steps}",
        f"grpo.save_every={args.steps}",
        "grpo.test_every=-1",
    ]
    with tempfile.TemporaryDirectory(prefix="firstcall-") as scratch:
        base = Path(scratch) / "base"
        archive = subprocess.run(["git", "archive", args.base], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        base.mkdir()
        subprocess.run(["tar", "-x"], cwd=base, input=archive, check=True)
        rates = {}
        for name, checkout, settings in (
            (args.base, base, common),
            ("this checkout", ROOT, [*common, *args.set]),
        ):
            folder = Path(scratch) / f"runs {len(rates)}" / "bench"
            shutil.copytree(data, folder / "data")
            rates[name] = measure(name, checkout, folder, settings)
    print(f"{rates['this checkout'] / rates[args.base]:.2f} times the episodes per minute of {args.base}")


def measure(name: str, checkout: Path, run: Path, settings: Sequence[str]) -> float:
    """Run the steps with the code of a checkout; prints its figures and returns its episodes per minute."""
    metadata = run.parent / "path" / "firstcall-0.dist-info"  # vLLM finds the plug-ins of this checkout by it
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: firstcall\nVersion: 0\n")
    entry_points = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
             for group, points in entry_points.items()]  # fmt: skip
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    chosen = [part for setting in (f"runs_dir={run.parent}", *settings) for part in ("--set", setting)]
    command = [sys.executable, "-m", "stage2_grpo", "--profile", "cpu", "--run-name", run.name, *chosen]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(metadata.parent)])}
    peak = 0.0
    with (
        (run / "log").open("w") as log,
        subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            peak = max(peak, memory_gib(process.pid))
            time.sleep(_PAUSE_SECONDS)
    said = (run / "log").read_text()
    if process.returncode:
        raise UserError(f"The run of {name} failed: {said[-2000:]}")
    rows = [json.loads(line) for line in (run / "grpo" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("seconds")]
    episodes, seconds = (sum(row[key] for row in steps) for key in ("episodes", "seconds"))
    parts = {key: sum(row[key] for row in steps) for key in ("rollout_seconds", "update_seconds")}
    print(
        f"{name}: {60 * episodes / seconds:.2f} episodes/min ({episodes:.0f} in {seconds:.0f} s: rollout "
        f"{parts['rollout_seconds']:.0f} s, update {parts['update_seconds']:.0f} s), peak memory {peak:.1f} GiB",
        flush=True,
    )
    print("".join(f"    {line}\n" for line in said.splitlines() if line.startswith("step ")), end="", flush=True)
    return float(60 * episodes / seconds)


def memory_gib(pid: int) -> float:
    """Memory of a process and its descendants, with shared pages divided among those that share them."""
    total = 0.0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_full_info().pss / 2**30
    except psutil.Error:  # one ended meanwhile; the next look counts again
        return 0.0
    return total


if __name__ == "__main__":
    run_main(main)
