"""`python -m stage2_grpo smoke`: does the pipeline run end to end on this GPU?

Needs one NVIDIA GPU of 24 GB or more, four CPU cores, 60 GB of disk, the environment of the GPU profiles, and the model
(`model` in pipeline.yaml) in the Hugging Face cache or within reach. Plays data, stage 1 and stage 2 in small, at most
15 minutes: a short LoRA SFT and two GRPO steps with real weight syncs and the verified export. Ends with a report to
paste into an issue, also when a phase fails or takes too long. Without --profile it takes the one that fits the card.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence

from shared.cli.command_line import common_parser, resolve
from shared.cli.machine import fitting_profile, look, needs_of, refuse
from shared.errors import UserError
from shared.records import JsonlTail
from shared.runs.manifest import installed_versions

SMALL = (
    "data.questions_per_database=20", "sft.max_traces=160", "sft.epochs=1", "grpo.total_steps=2", "grpo.epochs=1",
    "grpo.val_before_train=false", "grpo.test_every=-1", "grpo.save_every=2", "gate.questions=0",
    "grpo.binary_groups=false",  # the dense rewards differ within a group, so that both steps make an update
)  # fmt: skip
PHASES = {"data": 30, "stage1_sft": 320, "stage2_grpo": 550}
"""Seconds that each may take, computed for an L4 (30 TFLOP/s of its 121 in use; docs/gpu.md has the formulas).

stage1_sft: 160 traces x 1,600 tokens x 6 x 1.54e9 operations = 80 s, download 120 s, load, merge and verify 100 s.
stage2_grpo: server and trainer start 200 s; two steps of 64 episodes x 1,600 tokens x 8 x 1.54e9 operations = 42 s, and
60 s of rollouts each; weight syncs, checkpoint and export 140 s.
"""
LIMIT_SECONDS = 900.0
FIGURES = ("reward", "tool_call_rate", "policy_moved", "server_moved", "weight_gap", "idle_share", "seconds")
_TAIL = 20  # lines of a failed phase's logs in the report


def main(arguments: Sequence[str]) -> None:
    """Look at the machine, run the stages, report their seconds and the figures of the steps."""
    parser = common_parser("python -m stage2_grpo smoke", (__doc__ or "").split("\n\n")[1])
    parser.set_defaults(run_name=f"smoke-{time.strftime('%Y%m%d-%H%M%S')}")
    args = parser.parse_args(arguments)
    machine = look()
    args.profile = args.profile or next(map(fitting_profile, machine.gpus), None) or "gpu24"
    args.overrides = [*SMALL, *args.overrides]
    config, run = resolve(args)
    options = ["--config", str(args.config), "--profile", config.profile, "--run-name", args.run_name]
    options += [part for setting in args.overrides for part in ("--set", setting)]
    commands = {phase: [sys.executable, "-m", phase, *options] for phase in PHASES}
    if args.dry_run:
        print(*(" ".join(argv) for argv in commands.values()), sep="\n")
    refuse(machine, needs_of(config))
    if args.dry_run:
        return
    run.path.mkdir(parents=True)
    lines = [
        f"profile {config.profile}, model {config.model}",
        f"{machine.gpus}, {machine.cores} cores, {machine.free_gib:.0f} GiB free, {platform.platform()}",
        str(installed_versions()),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "SFT_MODEL_PATH"}  # of another run
    deadline, status = time.monotonic() + LIMIT_SECONDS, "0"
    for phase, argv in commands.items():
        log = run.path / f"{phase}.log"
        print(f"{phase}: at most {PHASES[phase]} s expected, log in {log}", flush=True)
        began = time.monotonic()
        try:
            with log.open("w") as output:
                ended = subprocess.run(argv, env=environment, timeout=deadline - began, stdout=output, stderr=output)
            status = str(ended.returncode)
        except subprocess.TimeoutExpired:
            status = f"ended, the limit of {LIMIT_SECONDS:.0f} s is over"
        took = time.monotonic() - began
        verdict = "as expected" if took <= PHASES[phase] else "slower than expected"
        lines.append(f"{phase}: status {status}, {took:.0f} s, {verdict} (at most {PHASES[phase]} s)")
        if status != "0":
            break
    for row in JsonlTail(run.grpo / "metrics.jsonl").new_rows():
        lines.append(f"step {row['step']}: " + ", ".join(f"{key} {row.get(key)}" for key in FIGURES))
    if status != "0":
        for file in [log, *sorted(run.grpo.glob("logs/*.log"))]:  # trainer, gateway and controller
            text = file.read_text(encoding="utf-8", errors="replace")
            lines += [f"-- the end of {file.name}", *text.splitlines()[-_TAIL:]]
    lines.append("passed" if status == "0" else f"failed in {phase}")
    report = run.path / "smoke.txt"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(*lines, f"this report is in {report}", sep="\n")
    if status != "0":
        raise UserError(
            f"The smoke test failed in {phase}; paste {report} into an issue, or read the logs in {run.path}."
        )
