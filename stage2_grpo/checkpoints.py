"""The checkpoints of a GRPO run: which are there, which are kept, from which one it goes on.

    checkpoints/global_step_<N>/{actor/,data.pt,probe.json}   written by the trainer
    checkpoints/latest_checkpointed_iteration.txt             written last; VERL resumes from the step that it names
    checkpoints/tripped_step_<N>/                             saved by a run that went wrong, for a look at it

VERL's own rotation forgets what earlier attempts of a run saved and knows nothing of validations, so it is off and
`prune` does its work.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

MARKER = "latest_checkpointed_iteration.txt"
PROBE_FILE = "probe.json"


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where VERL saves a step."""
    return checkpoints / f"global_step_{step}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Completely saved steps, ascending: a folder beyond the marker was left half-written by a killed trainer."""
    try:
        newest = int((checkpoints / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    steps = [int(folder.name.removeprefix("global_step_")) for folder in checkpoints.glob("global_step_*")]
    return sorted(step for step in steps if step <= newest)


def newest_step(checkpoints: Path) -> int:
    """The last completely saved step; 0 when there is none."""
    return max(saved_steps(checkpoints), default=0)


def prune(checkpoints: Path, keep: Collection[int]) -> None:
    """Remove the saved steps that are not in `keep`; what the trainer is writing right now is never touched."""
    for step in saved_steps(checkpoints):
        if step not in keep:
            shutil.rmtree(step_folder(checkpoints, step))


def rewind(checkpoints: Path, step: int) -> None:
    """Make `step` the newest checkpoint (0: start anew); later ones stay as `tripped_step_<N>`, an older such is replaced."""
    later = [saved for saved in saved_steps(checkpoints) if saved > step]
    if step:
        (checkpoints / MARKER).write_text(str(step), encoding="utf-8")
    else:
        (checkpoints / MARKER).unlink(missing_ok=True)
    for old in checkpoints.glob("tripped_step_*"):
        shutil.rmtree(old)
    for saved in later:
        step_folder(checkpoints, saved).rename(checkpoints / f"tripped_step_{saved}")
