"""Whether an interrupted run may go on: it must find the data and settings with which it began, unless told otherwise.

`started.json` of the stage notes what the run depends on. `safety.changed` says what becomes of a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared import runs
from shared.config import to_dict
from shared.errors import UserError
from shared.prompts import SYSTEM_PROMPT, TOOLS
from shared.settings import Config
from stage2_grpo.checkpoints import newest_step, step_folder

_OPERATIONAL = {
    "gate": ("min_pass", "min_mixed", "min_tool_calls", "min_turns"),
    "grpo": (
        "model",
        "concurrency",
        "call_timeout_seconds",
        "episode_timeout_seconds",
        "step_timeout_seconds",
        "sync_tolerance",
        "keep_checkpoints",
        "save_every",
        "ray_address",
        "gateway_url",
        "job_template",
    ),
    "vllm": ("gpu_memory_utilization", "num_gpu_blocks_override", "cpu_kv_cache_gib", "start_timeout_seconds"),
}
_ORDER = ("data", "train", "seed", "gate", "grpo.train_batch_size")  # what the order of the training rows depends on


def stage_inputs(config: Config, model: Path, train: Path, validation: Path) -> dict[str, Any]:
    """Everything the trained policy depends on, as plain values; not how fast or how patiently the run goes about it."""
    parts = {key: to_dict(config)[key] for key in ("profile", "seed", "agent", "sandbox", "grpo", "gate", "vllm")}
    for section, names in _OPERATIONAL.items():
        parts[section] = {key: value for key, value in parts[section].items() if key not in names}
    data = (runs.read_manifest(train.parent) or {}).get("fingerprint")  # covers the databases, too
    contents = {"prompts": [SYSTEM_PROMPT, TOOLS], "train": train, "validation": validation, "start": model}
    return {**parts, "data": data, **{name: runs.fingerprint(it=value) for name, value in contents.items()}}


def begin(folder: Path, inputs: Mapping[str, Any], changed: str) -> int:
    """Open the stage folder for a run that depends on `inputs`, nested plain values.

    An unfinished run of other inputs that has saved a step is refused, continued or started anew, as `changed` says; raises
    UserError naming the differences. Returns the step from which the run goes on with changed inputs, 0 if they are the same.
    """
    mark = runs.fingerprint(**inputs)
    before = runs.read_started(folder)
    adopted = before.get("adopted_step", 0) if before.get("fingerprint") == mark else 0
    step = 0 if runs.read_manifest(folder) else newest_step(folder / "checkpoints")
    if step and before.get("fingerprint") != mark:
        differences = list(differing(before.get("inputs", {}), inputs))
        if changed == "refuse":
            raise UserError(
                f"The interrupted run in {folder} (step {step} saved) began with other data or settings: "
                f"{'; '.join(differences[:5])}. Restore them, or give --set safety.changed=continue to go on with the new "
                "ones, or --set safety.changed=restart to throw its steps away."
            )
        if changed == "continue":
            _adopt(folder, mark, step, differences)
            adopted = step
    runs.begin_stage(folder, mark, inputs=dict(inputs), adopted_step=adopted)
    return adopted


def differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One phrase for each input that changed: `grpo.learning_rate 1e-05 -> 1e-06`, or its bare name where it is a hash."""
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differing(old, new, f"{prefix}{key}.")
        elif old != new:
            is_setting = prefix or key in ("profile", "seed")
            yield f"{prefix}{key} {old} -> {new}" if is_setting else key


def _adopt(folder: Path, mark: str, step: int, differences: list[str]) -> None:
    """Make the new inputs those of the interrupted run; where its rows changed, their order begins anew."""
    print(f"grpo: goes on after step {step} with changed {'; '.join(differences)}", flush=True)
    if any(difference.startswith(_ORDER) for difference in differences):
        (step_folder(folder / "checkpoints", step) / "data.pt").unlink(missing_ok=True)
    runs.write_json(folder / runs.STARTED, {"fingerprint": mark})
