"""The smoke test as far as a machine without a GPU can tell, and which value of grpo.concurrency is suggested."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.cli.machine import Gpu
from shared.config.load import load_config
from shared.errors import UserError
from stage2_grpo.preflight import smoke
from stage2_grpo.preflight.concurrency import suggested

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
    with pytest.raises(UserError, match="40 GB or more; L4 has 22 GiB"):
        smoke.refuse_gpu([Gpu("L4", 22.0, 22.0, 580, 8.9)])
    smoke.refuse_gpu([Gpu("A100", 39.4, 39.0, 580, 8.0)])


def test_the_smallest_value_that_is_nearly_as_fast_as_the_fastest_is_suggested() -> None:
    seconds = {1: 100.0, 2: 60.0, 4: 50.5, 8: 50.0, 16: 55.0}
    rows = [{"in flight": at, "tokens/s": 2000 / took} for at, took in seconds.items()]
    assert suggested(rows) == 4
    assert suggested([*rows, {"in flight": 32, "tokens/s": 1000 / 30}]) == 4  # lost episodes are no speed
