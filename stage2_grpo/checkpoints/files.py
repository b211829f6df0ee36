"""The checkpoints of a GRPO run: which exist, which are kept, and which one a run resumes from.

    checkpoints/global_step_<N>/{actor/,data.pt,probe.json}   written by the trainer
    checkpoints/latest_checkpointed_iteration.txt             written last; VERL resumes from the step that it names
    checkpoints/tripped_step_<N>/                             saved by a run that went wrong, kept for inspection
    checkpoints/removed_step_<N>/                             about to be deleted

VERL's own rotation ignores earlier attempts of a run and validations, so it is off and `prune` does its work.
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
    """Completely saved steps, ascending. A folder beyond the marker was left half-written by a killed trainer.

    A marker without a number belongs to a trainer that was killed while it wrote the marker. That comes last, so all
    steps are complete.
    """
    try:
        marked = (checkpoints / MARKER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return []
    steps = [int(folder.name.removeprefix("global_step_")) for folder in checkpoints.glob("global_step_*")]
    return sorted(step for step in steps if not marked.isdigit() or step <= int(marked))


def newest_step(checkpoints: Path) -> int:
    """The last completely saved step; 0 when there is none."""
    return max(saved_steps(checkpoints), default=0)


def prune(checkpoints: Path, keep: Collection[int]) -> None:
    """Remove the saved steps that are not in `keep`. Never touches the step that the trainer is writing."""
    for step in saved_steps(checkpoints):
        if step not in keep:
            removed = checkpoints / f"removed_step_{step}"
            step_folder(checkpoints, step).rename(
                removed
            )  # first, so that a kill leaves no half checkpoint that counts
            shutil.rmtree(removed)


def clear_remains(checkpoints: Path) -> None:
    """Prepare a killed run's folder for the next trainer: complete the marker, delete what is half-written."""
    saved = saved_steps(checkpoints)
    if saved:
        _mark(checkpoints, saved[-1])
    for folder in (*checkpoints.glob("global_step_*"), *checkpoints.glob("removed_step_*")):
        if folder not in [step_folder(checkpoints, step) for step in saved]:
            shutil.rmtree(folder)


def rewind(checkpoints: Path, step: int) -> None:
    """Make `step` the newest checkpoint (0: start anew). Later ones become `tripped_step_<N>`, replacing older ones."""
    later = [saved for saved in saved_steps(checkpoints) if saved > step]
    for old in checkpoints.glob("tripped_step_*"):
        shutil.rmtree(old)
    for saved in later:
        step_folder(checkpoints, saved).rename(checkpoints / f"tripped_step_{saved}")
    if step:  # last: after a kill, folders beyond the marker count as half-written
        _mark(checkpoints, step)
    else:
        (checkpoints / MARKER).unlink(missing_ok=True)


def _mark(checkpoints: Path, step: int) -> None:
    partial = checkpoints / f"{MARKER}.partial"
    partial.write_text(str(step), encoding="utf-8")
    partial.replace(checkpoints / MARKER)
