"""`python -m stage2_grpo smoke`: does the reference configuration run end to end on this GPU?

Needs one NVIDIA GPU with 40 GB or more, 60 GB of disk, the environment of the profile `gpu`, and the reference model
(`model` in pipeline.yaml) in the Hugging Face cache or within reach. Plays data, stage 1 and stage 2 in small: a
short LoRA SFT and two GRPO steps with real weight syncs and the verified export. Ends with a report to paste into an
issue, also when a phase fails: stage 2 itself stops when the rollout server does not follow the trainer or the export
differs from the policy.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence

from shared.cli.command_line import common_parser, resolve
from shared.cli.machine import Gpu, Needs, look, refuse
from shared.errors import UserError
from shared.records import JsonlTail
from shared.runs.manifest import installed_versions

LEAST_GIB = 38  # what a "40 GB" card reports
SMALL = (
    "data.questions_per_database=20", "sft.max_traces=160", "sft.epochs=1", "grpo.total_steps=2", "grpo.epochs=1",
    "grpo.val_before_train=false", "grpo.test_every=-1", "grpo.save_every=2", "gate.questions=0",
    "grpo.binary_groups=false",  # the dense rewards differ within a group, so that both steps make an update
)  # fmt: skip
PHASES = {"data": 20, "stage1_sft": 300, "stage2_grpo": 500}  # expected seconds, computed: 820 of the 900
LIMIT_SECONDS = 900.0
FIGURES = ("reward", "tool_call_rate", "policy_moved", "server_moved", "weight_gap", "idle_share", "seconds")


def main(arguments: Sequence[str]) -> None:
    """Look at the machine, run the stages, report their seconds and the figures of the steps."""
    parser = common_parser("python -m stage2_grpo smoke", (__doc__ or "").split("\n\n")[1])
    parser.set_defaults(run_name=f"smoke-{time.strftime('%Y%m%d-%H%M%S')}", profile="gpu")
    args = parser.parse_args(arguments)
    args.overrides = [*SMALL, *args.overrides]
    config, run = resolve(args)
    options = ["--config", str(args.config), "--profile", config.profile, "--run-name", args.run_name]
    options += [part for setting in args.overrides for part in ("--set", setting)]
    commands = {phase: [sys.executable, "-m", phase, *options] for phase in PHASES}
    if args.dry_run:
        print(*(" ".join(argv) for argv in commands.values()), sep="\n")
    machine = look()
    refuse(machine, Needs(config.profile))
    refuse_gpu(machine.gpus)
    if args.dry_run:
        return
    lines = [
        f"{machine.gpus}, {machine.cores} cores, {machine.free_gib:.0f} GiB free, {platform.platform()}",
        str(installed_versions()),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "SFT_MODEL_PATH"}  # of another run
    deadline, status = time.monotonic() + LIMIT_SECONDS, "0"
    for phase, argv in commands.items():
        began = time.monotonic()
        try:
            status = str(subprocess.run(argv, env=environment, timeout=deadline - began).returncode)
        except subprocess.TimeoutExpired:
            status = f"ended, the limit of {LIMIT_SECONDS:.0f} s is over"
        lines.append(f"{phase}: status {status}, {time.monotonic() - began:.0f} s (expected {PHASES[phase]} s)")
        if status != "0":
            break
    for row in JsonlTail(run.grpo / "metrics.jsonl").new_rows():
        lines.append(f"step {row['step']}: " + ", ".join(f"{key} {row.get(key)}" for key in FIGURES))
    if status != "0" and (log := run.grpo / "logs" / "trainer.log").exists():
        lines += log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    lines.append("passed" if status == "0" else "failed")
    report = run.path / "smoke.txt"
    run.path.mkdir(parents=True, exist_ok=True)
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(*lines, f"this report is in {report}", sep="\n")
    if status != "0":
        raise UserError(f"The smoke test failed in {phase}; its messages stand above, its logs in {run.path}.")


def refuse_gpu(gpus: Sequence[Gpu]) -> None:
    """Raise UserError for a GPU that cannot hold the reference configuration."""
    if gpus and gpus[0].gib and gpus[0].gib < LEAST_GIB:
        raise UserError(f"The smoke test needs a GPU of 40 GB or more; {gpus[0].name} has {gpus[0].gib:.0f} GiB.")
