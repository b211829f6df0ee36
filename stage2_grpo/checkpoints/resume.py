"""Whether an interrupted run may go on: it must find the data and settings with which it began, unless told otherwise.

`started.json` of the stage notes what the run depends on. `safety.changed` says what becomes of a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.agent.prompts import SYSTEM_PROMPT, TOOLS
from shared.config.schema import Config
from shared.errors import UserError
from shared.runs import manifest as runs
from stage2_grpo.checkpoints.files import newest_step, step_folder

_ORDER = ("data", "train", "seed", "gate", "grpo.train_batch_size")  # what the order of the training rows depends on


def stage_inputs(config: Config, model: Path, train: Path, validation: Path) -> dict[str, Any]:
    """Everything the trained policy depends on, as plain values; not how fast or how patiently the run goes about it."""
    data = (runs.read_manifest(train.parent) or {}).get("fingerprint")  # covers the databases, too
    contents = {"prompts": [SYSTEM_PROMPT, TOOLS], "train": train, "validation": validation, "start": model}
    return {
        **config.part_of("grpo"),
        "data": data,
        **{name: runs.fingerprint(it=value) for name, value in contents.items()},
    }


def adopted_step(folder: Path, inputs: Mapping[str, Any], changed: str) -> int:
    """The step from which a run of `inputs`, nested plain values, goes on although other inputs made it; 0 if there is none.

    Raises UserError naming the differences when an unfinished run of other inputs has saved a step and `changed` is refuse.
    Changes nothing.
    """
    before = runs.read_started(folder)
    if before.get("fingerprint") == runs.fingerprint(**inputs):
        return int(before.get("adopted_step", 0))
    step = 0 if runs.read_manifest(folder) else newest_step(folder / "checkpoints")
    if step and changed == "refuse":
        raise UserError(
            f"The interrupted run in {folder} (step {step} saved) began with other data or settings: "
            f"{'; '.join(_differences(before, inputs)[:5])}. Restore them, or give --set safety.changed=continue to go on with "
            "the new ones, or --set safety.changed=restart to throw its steps away."
        )
    return step if changed == "continue" else 0


def begin(folder: Path, inputs: Mapping[str, Any], changed: str) -> None:
    """Open the stage folder for a run that depends on `inputs`: one that `adopted_step` allows goes on, else it starts anew."""
    mark, before, adopted = runs.fingerprint(**inputs), runs.read_started(folder), adopted_step(folder, inputs, changed)
    noted = {"inputs": dict(inputs), "adopted_step": adopted}
    if adopted and before.get("fingerprint") != mark:
        differences = _differences(before, inputs)
        print(f"grpo: goes on after step {adopted} with changed {'; '.join(differences)}", flush=True)
        if any(difference.startswith(_ORDER) for difference in differences):  # the order of the rows begins anew
            (step_folder(folder / "checkpoints", adopted) / "data.pt").unlink(missing_ok=True)
        runs.write_json(folder / runs.STARTED, {"fingerprint": mark, **noted})
    runs.begin_stage(folder, mark, **noted)


def differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One phrase for each input that changed: `grpo.learning_rate 1e-05 -> 1e-06`, or its bare name where it is a hash."""
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differing(old, new, f"{prefix}{key}.")
        elif old != new:
            is_setting = prefix or key in ("profile", "seed")
            yield f"{prefix}{key} {old} -> {new}" if is_setting else key


def _differences(before: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[str]:
    return list(differing(before.get("inputs", {}), inputs))
