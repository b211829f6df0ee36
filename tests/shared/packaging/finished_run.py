"""A finished run on disk, with a model of random weights, made in a second."""

from pathlib import Path

from shared.config.load import load_config
from shared.records import write_jsonl
from shared.report.__main__ import write_report
from shared.runs.manifest import RunDirectory, finish_stage, write_json
from tests.shared.report.test_report import PIPELINE, QUESTIONS, evaluated
from tests.stage2_grpo.checkpoints.checkpoint_folder import checkpoint


def finished_run(runs: Path) -> RunDirectory:
    """Data, a GRPO model, evaluations of SFT (a quarter right) and GRPO (half), and their report."""
    run = RunDirectory(runs / "trial")
    run.data.mkdir(parents=True)
    for split in ("train", "test"):
        write_jsonl(run.data / f"{split}.jsonl", QUESTIONS)
    config = load_config(PIPELINE, "cpu", ["evaluate.bootstrap_samples=300"])
    write_json(run.path / "config.json", config.model_dump())
    evaluated(run, "sft", lambda i: i % 4 == 0)
    evaluated(run, "grpo", lambda i: i % 2 == 0)
    finish_stage(run.grpo, "f", seconds=1, outputs={"model": checkpoint(run.grpo / "model")})
    write_report(config, run)
    return run
