"""Ten minutes on one GPU: does the reference configuration run end to end?

    python run_pipeline.py setup --profile gpu && .venv/bin/python -m tests.bench.gpu_smoke

Needs one NVIDIA GPU with 40 GB or more, 60 GB of disk, the environment of the profile `gpu`, and the reference model
(`model` in pipeline.yaml) in the Hugging Face cache or within reach; --model names a local folder instead. Plays data,
stage 1 and stage 2 in small: a short LoRA SFT and two GRPO steps with real weight syncs and the verified export. Passes when
every stage does, within the limit: stage 2 itself stops when the rollout server does not follow the trainer or the export
differs from the trained policy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared.cli.command_line import run_main
from shared.errors import UserError
from shared.records import JsonlTail
from stage2_grpo.preflight.doctor.machine import Gpu, find_gpus

ROOT = Path(__file__).resolve().parents[2]
LEAST_GIB = 38  # what a "40 GB" card reports
LIMIT_SECONDS = 600.0
SMALL = (
    "data.questions_per_database=20", "sft.max_traces=160", "sft.epochs=1", "grpo.total_steps=2", "grpo.epochs=1",
    "grpo.val_before_train=false", "grpo.test_every=-1", "grpo.save_every=2", "gate.questions=0",
    f"runs_dir={ROOT / 'runs'}",
)  # fmt: skip
FIGURES = ("reward", "tool_call_rate", "policy_moved", "server_moved", "weight_gap", "idle_share", "seconds")


def main() -> None:
    """Look at the machine, run the stages, print their seconds and the figures of the steps."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_smoke", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="hub id or local folder in place of pipeline.yaml's")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, then look at the machine alone")
    args = parser.parse_args()
    name = f"gpu-smoke-{time.strftime('%Y%m%d-%H%M%S')}"
    commands = {stage: command(stage, name, args.model) for stage in ("data", "stage1_sft", "stage2_grpo")}
    if args.dry_run:
        print(*(" ".join(argv) for argv in commands.values()), sep="\n")
    refuse_machine(find_gpus())
    if args.dry_run:
        return
    deadline = time.monotonic() + LIMIT_SECONDS
    for stage, argv in commands.items():
        began = time.monotonic()
        run(argv, deadline - began)
        print(f"gpu_smoke: {stage} took {time.monotonic() - began:.0f} s", flush=True)
    for row in JsonlTail(ROOT / "runs" / name / "grpo" / "metrics.jsonl").new_rows():
        print(f"gpu_smoke: step {row['step']}: " + ", ".join(f"{key} {row.get(key)}" for key in FIGURES))
    print("gpu_smoke: passed")


def command(stage: str, run_name: str, model: str | None) -> list[str]:
    """One stage of the small run."""
    settings = [*SMALL, *([f"model={model}"] if model else [])]
    options = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", stage, "--profile", "gpu", "--run-name", run_name, *options]


def refuse_machine(gpus: Sequence[Gpu]) -> None:
    """Raise UserError when the reference configuration cannot run here."""
    if not gpus:
        raise UserError("gpu_smoke needs an NVIDIA GPU, and no driver answers here: run it on a machine with one.")
    if gpus[0].gib < LEAST_GIB:
        raise UserError(f"gpu_smoke needs a GPU of 40 GB or more; {gpus[0].name} has {gpus[0].gib:.0f} GiB.")


def run(argv: Sequence[str], seconds: float) -> None:
    """One stage; raises UserError when it fails or the time is over."""
    environment = {name: value for name, value in os.environ.items() if name != "SFT_MODEL_PATH"}  # of another run
    try:
        status = subprocess.run(argv, cwd=ROOT, env=environment, timeout=max(1.0, seconds)).returncode
    except subprocess.TimeoutExpired:
        raise UserError(f"gpu_smoke took more than {LIMIT_SECONDS:.0f} s and was ended in {argv[2]}.") from None
    if status:
        raise UserError(f"gpu_smoke failed: {argv[2]} ended with status {status}; see its messages above.")


if __name__ == "__main__":
    run_main(main)
