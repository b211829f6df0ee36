"""An interrupted run resumes only if its data and settings are unchanged; `safety.changed` decides otherwise.

`started.json` of the stage records the inputs of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.agent.prompts import prompts_of
from shared.config.schema import Config
from shared.errors import UserError
from shared.runs import manifest as runs
from stage2_grpo.checkpoints.files import newest_step, step_folder

# What the order of the training rows depends on.
_ORDER = ("data", "train", "seed", "gate", "grpo.train_batch_size", "grpo.oversample")


def stage_inputs(config: Config, model: Path, train: Path, validation: Path) -> dict[str, Any]:
    """Everything the trained policy depends on, as plain values; not the speed or patience of the run."""
    data = (runs.read_manifest(train.parent) or {}).get("fingerprint")  # covers the databases, too
    contents = {"prompts": prompts_of(config.agent).mark, "train": train, "validation": validation, "start": model}
    prints = {name: runs.fingerprint(it=value) for name, value in contents.items()}
    return {**config.part_of("grpo"), "data": data, **prints}


def adopted_step(folder: Path, inputs: Mapping[str, Any], changed: str) -> int:
    """The step from which a run of `inputs` (nested plain values) resumes one with other inputs; 0 if there is none.

    Raises UserError naming the differences when an unfinished run of other inputs has saved a step and `changed` is
    refuse. Changes nothing.
    """
    before = runs.read_started(folder)
    if before.get("fingerprint") == runs.fingerprint(**inputs):
        return int(before.get("adopted_step", 0))
    step = 0 if runs.read_manifest(folder) else newest_step(folder / "checkpoints")
    if step and changed == "refuse":
        differences = list(differing(before.get("inputs", {}), inputs))
        raise UserError(
            f"The interrupted run in {folder} (step {step} saved) began with other data or settings: "
            f"{'; '.join(differences[:5])}. Restore them, or give --set safety.changed=continue to go on with "
            "the new ones, or --set safety.changed=restart to throw its steps away."
        )
    return step if changed == "continue" else 0


def begin(folder: Path, inputs: Mapping[str, Any], changed: str) -> None:
    """Open the stage folder for a run of `inputs`: resume where `adopted_step` allows it, else start anew."""
    fingerprint, before = runs.fingerprint(**inputs), runs.read_started(folder)
    adopted = adopted_step(folder, inputs, changed)
    noted = {"inputs": dict(inputs), "adopted_step": adopted}
    if adopted and before.get("fingerprint") != fingerprint:
        differences = list(differing(before.get("inputs", {}), inputs))
        print(f"grpo: goes on after step {adopted} with changed {'; '.join(differences)}", flush=True)
        if any(difference.startswith(_ORDER) for difference in differences):  # the order of the rows begins anew
            (step_folder(folder / "checkpoints", adopted) / "data.pt").unlink(missing_ok=True)
        runs.write_json(folder / runs.STARTED, {"fingerprint": fingerprint, **noted})
    runs.begin_stage(folder, fingerprint, **noted)


def differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One phrase for each changed input: `grpo.learning_rate 1e-05 -> 1e-06`, or its bare name where it is a hash."""
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differing(old, new, f"{prefix}{key}.")
        elif old != new:
            is_setting = prefix or key in ("profile", "seed")
            yield f"{prefix}{key} {old} -> {new}" if is_setting else key
