"""The smoke test as far as a machine without a GPU can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.errors import UserError
from stage2_grpo.preflight import smoke
from tests.tiny_model import save_tiny_model

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"


def test_the_small_run_is_the_reference_configuration_but_for_its_size() -> None:
    config, reference = load_config(PIPELINE, "gpu", smoke.SMALL), load_config(PIPELINE, "gpu")
    assert (config.model, config.vllm, config.agent) == (reference.model, reference.vllm, reference.agent)
    assert (config.grpo.total_steps, config.gate.questions) == (2, 0)


def test_the_phases_fit_the_limit() -> None:
    assert sum(smoke.PHASES.values()) <= smoke.LIMIT_SECONDS <= 900


def test_a_machine_that_cannot_run_it_is_told_so_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"needs 1 NVIDIA GPU.*but 0 are visible here"):
        smoke.main(["--config", str(PIPELINE), "--dry-run", "--set", "model=folder"])
    assert "--set model=folder" in capsys.readouterr().out


def test_a_phase_that_fails_leaves_a_report_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--profile", "cpu", "--config", str(PIPELINE), "--run-name", "tried", "--set", f"runs_dir={tmp_path}"]
    with pytest.raises(UserError, match=r"failed in data; paste .*smoke\.txt into an issue"):
        smoke.main([*line, "--set", "data.sources=nowhere"])
    report = (tmp_path / "tried" / "smoke.txt").read_text()
    assert "profile cpu, model smollm2-135m" in report
    assert re.search(r"data: status 2, \d+ s, as expected \(at most 30 s\)", report)
    assert re.search(r"-- the end of data\.log\n.*nowhere", report, re.DOTALL)
    assert report.endswith("failed in data\n")
    assert report in capsys.readouterr().out


@pytest.mark.slow
def test_the_phases_run_on_a_cpu_with_a_tiny_model_until_one_fails(tmp_path: Path) -> None:
    """Stage 2 is stopped before its servers start; tests/stage2_grpo/test_grpo_end_to_end.py goes on from there."""
    model = save_tiny_model(tmp_path / "tiny")
    changes = [f"runs_dir={tmp_path}", f"model={model}", "sft.max_traces=16", "grpo.agent=tests.no_agent:play"]
    line = ["--profile", "cpu", "--config", str(PIPELINE), "--run-name", "tried"]
    with pytest.raises(UserError, match="failed in stage2_grpo"):
        smoke.main([*line, *(part for change in changes for part in ("--set", change))])
    report = (tmp_path / "tried" / "smoke.txt").read_text()
    assert re.findall(r"^\w+: status (\d+)", report, re.MULTILINE) == ["0", "0", "2"]
    assert "grpo.agent" in report
    assert (tmp_path / "tried" / "sft" / "manifest.json").exists()
