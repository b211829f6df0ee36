"""Stage 2: GRPO from the stage-1 checkpoint, through Agent Lightning, VERL and vLLM, to a plain Hugging Face folder.

model (SFT_MODEL_PATH > grpo.model > newest finished stage 1) → quick checks, reward self-test, readiness gate → gateway
+ controller + trainer → one line per step, tripwires, the best checkpoint kept → verified export → manifest
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.config.schema import Config
from shared.errors import UserError
from shared.models.folder import local_path
from shared.records import JsonlTail, read_questions, write_jsonl
from shared.reward.reward import self_test
from shared.runs import manifest as runs
from shared.runs.manifest import RunDirectory, question_file
from shared.runs.output_paths import refuse_overwriting
from stage2_grpo.checkpoints import files, resume
from stage2_grpo.checkpoints.export import export
from stage2_grpo.inputs import fit_to_questions, fitted, refuse_missing_agent, starting_model, total_steps
from stage2_grpo.monitoring.server_watch import ServerWatch
from stage2_grpo.monitoring.step_log import reconcile_logs, stream_steps
from stage2_grpo.monitoring.tripwires import Row, Trip, best_step, kept_steps, tripped, validations_since_best
from stage2_grpo.preflight.doctor import before_run
from stage2_grpo.preflight.gate import training_questions
from stage2_grpo.services import gateway_and_controller, trainer


def run(config: Config, run: RunDirectory) -> Path:
    """Train and export; returns the checkpoint folder. A finished stage is skipped, an interrupted one resumes."""
    model = starting_model(config, run)
    print(f"grpo: starts from {model}", flush=True)
    refuse_overwriting([run.grpo], [model])
    train, validation = (question_file(run, split) for split in ("train", "val"))
    inputs = resume.stage_inputs(config, model, train, validation)
    if manifest := runs.finished(run.grpo, runs.fingerprint(**inputs)):
        print(f"grpo: finished before, {manifest['outputs']['model']}")
        return Path(manifest["outputs"]["model"])
    refuse_missing_agent(config)
    questions = list(read_questions(train))
    before_run(config, run, model, questions)
    self_test(questions, config.grpo, config.sandbox)
    adopted = resume.adopted_step(run.grpo, inputs, config.safety.changed)
    started = time.monotonic()
    kept = training_questions(config, run, model, questions)
    fit = fit_to_questions(config, len(kept))
    if changes := fitted(config, fit):
        print(f"grpo: {len(kept)} training questions, so {changes}", flush=True)
    total = total_steps(fit, len(kept))
    refuse_nothing_to_train(adopted, total)
    resume.begin(run.grpo, inputs, config.safety.changed)  # last: a refusal leaves a finished run in its place
    write_jsonl(run.grpo / "train.jsonl", kept)
    train_policy(fit, run.grpo, model, (run.grpo / "train.jsonl", validation), total)
    return export_and_finish(config, run, model, inputs, started)


def run_export(config: Config, run: RunDirectory) -> Path:
    """Finish the stage with the steps that an interrupted or stopped run has saved, without discarding any.

    Raises UserError when nothing is saved or the run is finished.
    """
    if runs.read_manifest(run.grpo) or not files.newest_step(run.grpo / "checkpoints"):
        raise UserError(f"{run.grpo} holds no unfinished run with a saved step; there is nothing to export.")
    if config.safety.changed == "restart":
        raise UserError(
            "Setting safety.changed is restart, which would throw away the saved steps that this export needs; give "
            "--set safety.changed=continue."
        )
    model = starting_model(config, run)
    inputs = resume.stage_inputs(config, model, question_file(run, "train"), question_file(run, "val"))
    resume.begin(run.grpo, inputs, config.safety.changed)
    reconcile_logs(config, run.grpo, files.newest_step(run.grpo / "checkpoints"))
    return export_and_finish(config, run, model, inputs, time.monotonic())


def export_and_finish(
    config: Config, run: RunDirectory, model: Path, inputs: Mapping[str, Any], started: float
) -> Path:
    """Merge the best checkpoint by validation, else the newest, into `<grpo>/model`, and write the manifest."""
    checkpoints, target = run.grpo / "checkpoints", run.grpo / "model"
    saved = files.saved_steps(checkpoints)
    best = best_step(JsonlTail(run.grpo / "metrics.jsonl").new_rows(), saved)
    step = saved[-1] if best is None else best
    print(f"grpo: exporting step {step}, the {'newest' if best is None else 'best by validation'} of {saved}")
    checkpoint, grpo = files.step_folder(checkpoints, step), config.grpo
    figures = export(
        checkpoint / "actor",
        model,
        target,
        lora_rank=grpo.lora_rank,
        lora_alpha=grpo.lora_alpha,
        seed=config.seed,
        probe=checkpoint / files.PROBE_FILE,
    )
    runs.finish_stage(
        run.grpo,
        runs.fingerprint(**inputs),
        seconds=time.monotonic() - started,
        outputs={"model": str(target)},
        start_model=str(model),
        steps=step,
        export=figures,
    )
    print(f"GRPO_MODEL_PATH={target}")
    return target


def refuse_nothing_to_train(adopted: int, total: int) -> None:
    """Raise UserError when changed settings end before the step that the run resumes from."""
    if adopted and adopted >= total:
        raise UserError(
            f"No step is left to train: step {adopted} is saved and the changed settings make {total} steps; raise "
            "grpo.total_steps or grpo.epochs, or take what is there with `python -m stage2_grpo export`."
        )


def train_policy(config: Config, folder: Path, model: Path, questions: tuple[Path, Path], total: int) -> None:
    """Run the trainer until its last step is saved or validation stops improving.

    Does nothing if that is so already.
    """
    checkpoints = folder / "checkpoints"
    done = files.newest_step(checkpoints)
    trip: Trip | None = None
    files.clear_remains(checkpoints)
    rows = reconcile_logs(config, folder, done)
    if done >= total or out_of_patience(config, rows):
        return
    if done:
        print(f"grpo: continues after step {done} of {total}")
    servers = ServerWatch(folder)
    with (
        gateway_and_controller(config, model, folder) as rollouts,
        trainer(config, folder, rollouts, questions) as process,
    ):
        for row in stream_steps(config, folder, process, done, total):
            reached = files.newest_step(checkpoints)
            rollouts.check(next_command(reached))
            if reached < total:  # else the servers end with the trainer
                servers.check(next_command(reached))
            if row is None:
                continue
            rows.append(row)
            if trip := tripped(rows, config.safety):
                break
            files.prune(checkpoints, kept_steps(rows, files.saved_steps(checkpoints), config))
            if out_of_patience(config, rows):
                return
        status = 0 if trip else process.wait()
    if trip:
        raise UserError(f"Stopped after step {rows[-1]['step']}: {roll_back(checkpoints, trip)}")
    reached = files.newest_step(checkpoints)
    if status or reached < total:
        raise UserError(failure(folder / "logs" / "trainer.log", status, reached, total))


def roll_back(checkpoints: Path, trip: Trip) -> str:
    """Make the last good checkpoint the newest one; returns the sentence for the user. The trainer has ended."""
    good = max((step for step in files.saved_steps(checkpoints) if step < trip.since), default=0)
    files.rewind(checkpoints, good)
    if not good:
        return f"{trip.sentence}. No checkpoint is older than the fault: run again with such a change, it starts anew."
    return (
        f"{trip.sentence}. Step {good} is the last good checkpoint (later ones are tripped_step_* in {checkpoints}): "
        "run again with such a change and --set safety.changed=continue, or take the best saved step with `python -m "
        "stage2_grpo export`."
    )


def out_of_patience(config: Config, rows: Sequence[Row]) -> bool:
    """Whether safety.patience validations have passed without a better one."""
    waited = validations_since_best(rows)
    if not config.safety.patience or waited < config.safety.patience:
        return False
    print(f"grpo: ends early, {waited} validations without a better one (safety.patience)", flush=True)
    return True


def failure(log: Path, status: int, reached: int, total: int) -> str:
    """One sentence on why the trainer ended early: weight guard, memory, its death, or the log's last error."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    errors = [
        line
        for line in lines
        if re.search(r"(WeightsOutOfSync|PolicyNotFinite|CpuBackendError|PinnedCodeChanged|Error): ", line)
    ]
    # These come before the last error, because what they end fails in other ways while it shuts down.
    first = [line for line in errors if re.search("WeightsOutOfSync|PolicyNotFinite|OutOfMemoryError", line)]
    killed = ["it was ended by SIGKILL, most likely for lack of memory"] if status == 128 + signal.SIGKILL else []
    cause = (first or killed or errors or lines or ["it wrote no log"])[-1].strip()
    cause = re.sub(r"^\[\d{4}-\S+ [^]]*\] \S+: ", "", cause)  # Ray's time stamp, process and source line
    if "ActorDiedError: " in cause and (dead := re.findall(r"^\s*class_name: (\w+)", "\n".join(lines), re.MULTILINE)):
        cause += f" It was {dead[-1]}, which ran out of memory, most likely."
    return (
        f"The trainer stopped after step {reached} of {total} saved: {cause} (whole log: {log}). Mend the cause; "
        f"{next_command(reached)}."
    )


def next_command(reached: int) -> str:
    """What to do after trainer, vLLM, gateway or controller has died; `reached` is the last saved step."""
    return f"the same command {f'continues after step {reached}' if reached else 'begins again with step 1'}"


def plan_export(config: Config, run: RunDirectory) -> list[str]:
    """What `run_export` would do, for --dry-run."""
    saved = files.saved_steps(run.grpo / "checkpoints")
    return [f"grpo: export the best of the saved steps {saved} to {run.grpo / 'model'}"]


def plan(config: Config, run: RunDirectory) -> list[str]:
    """What `run` would do, for --dry-run; touches nothing. Raises UserError for an agent that cannot be loaded."""
    refuse_missing_agent(config)
    grpo, gate = config.grpo, config.gate
    named = os.environ.get("SFT_MODEL_PATH") or grpo.model
    there = "" if not named or local_path(named).exists() else " (not there yet)"
    probe = (
        f"{gate.questions} training questions x {gate.samples} episodes before the first step, in {run.path / 'gate'}"
    )
    steps, changes = f"{grpo.total_steps} steps" if grpo.total_steps else f"all steps of {grpo.epochs} epoch(s)", ""
    if (train := run.data / "train.jsonl").exists():
        count = sum(1 for _ in read_questions(train))
        try:
            fit = fit_to_questions(config, count)
            steps, grpo, changes = f"{total_steps(fit, count)} steps", fit.grpo, fitted(config, fit)
        except UserError as problem:  # no refusal: the data stage may still make other questions
            changes = f"as they are, stage 2 refuses them: {problem}"
    played = grpo.train_batch_size * grpo.oversample
    return [
        f"grpo: start from {named or f'the checkpoint of {run.sft}'}{there}",
        f"      gate: {probe if gate.questions else 'off (gate.questions is 0; --set gate.questions=32 turns it on)'}",
        f"      {steps}, each of {played} questions x {grpo.rollouts_per_question} episodes",
        *([f"      {count} training questions, so {changes}"] if changes else []),
        f"      questions {run.data / 'train.jsonl'}, validation {run.data / 'val.jsonl'}",
        f"      writes {run.grpo}: checkpoints/, logs/, metrics.jsonl, episodes.jsonl, model/, {runs.MANIFEST}",
    ]
