"""The GPU smoke test as far as a machine without a GPU can tell: its settings exist, and its refusals are clear."""

from pathlib import Path

import pytest

from bench.gpu_smoke import SMALL, command, refuse_machine
from shared.config import load_config
from shared.errors import UserError
from stage2_grpo.doctor.machine import Gpu

PIPELINE = Path(__file__).resolve().parents[1] / "pipeline.yaml"


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
