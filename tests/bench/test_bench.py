"""What the measurements decide: the GPU smoke test as far as a machine without a GPU can tell, and which figure wins."""

from pathlib import Path

import pytest

from shared.config.load import load_config
from shared.errors import UserError
from stage2_grpo.preflight.doctor.machine import Gpu
from tests.bench.gpu_smoke import SMALL, command, refuse_machine
from tests.bench.rollout_concurrency import Level, suggested

PIPELINE = Path(__file__).resolve().parents[2] / "pipeline.yaml"


def test_the_small_run_is_the_reference_configuration_but_for_its_size() -> None:
    config, reference = load_config(PIPELINE, "gpu", SMALL), load_config(PIPELINE, "gpu")
    assert (config.model, config.vllm, config.agent) == (reference.model, reference.vllm, reference.agent)
    assert (config.grpo.total_steps, config.gate.questions) == (2, 0)
    assert "model=folder" in command("data", "name", "folder")


def test_a_machine_that_cannot_run_it_is_told_so_in_one_sentence() -> None:
    with pytest.raises(UserError, match="needs an NVIDIA GPU, and no driver answers here"):
        refuse_machine([])
    with pytest.raises(UserError, match="40 GB or more; L4 has 22 GiB"):
        refuse_machine([Gpu("L4", 22.0, 580)])
    refuse_machine([Gpu("A100", 39.4, 580)])


def test_the_smallest_value_that_is_nearly_as_fast_as_the_fastest_is_suggested() -> None:
    seconds = {1: 100.0, 2: 60.0, 4: 50.5, 8: 50.0, 16: 55.0}
    levels = [Level(at, 16, 0, 2000, took, 5.0, 1.0, 0.0, 0.1, 0.0) for at, took in seconds.items()]
    assert suggested(levels) == 4
    assert (
        suggested([*levels, Level(32, 16, 8, 1000, 30.0, 5.0, 1.0, 0.0, 0.1, 0.0)]) == 4
    )  # lost episodes are no speed
