"""A pretended GPU: what of the GPU profiles runs on a machine without one, in a process of its own.

`pretend` compiles a stub of the driver's libnvidia-ml and writes an `nvidia-smi`, which answer with the number and
compute capability of the cards that the environment names. Through them torch counts devices and vLLM chooses platform,
dtype and attention as on a real machine. The CPU build of torch has no CUDA runtime, so its entry points are planted
here and record who calls them.

Out of reach: every kernel, memory of the device, NCCL, FlashInfer and FlashAttention (not in the CPU wheels), CUDA
graphs, vLLM's sleep mode, Ray's choice of devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

CAPABILITIES = (75, 80, 89, 90, 100, 120)
COUNTS = (1, 2, 8)
PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
_LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
static int number(const char *name) { return atoi(getenv(name)); }
int nvmlInit(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("PRETENDED_GPUS"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) { snprintf(uuid, size, "GPU-%p", handle); return 0; }
int nvmlDeviceGetName(void *handle, char *name, unsigned size) { snprintf(name, size, "Pretended"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = number("PRETENDED_CAPABILITY") / 10;
    *minor = number("PRETENDED_CAPABILITY") % 10;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[0] = memory[1] = 80ull << 30;
    memory[2] = 0;
    return 0;
}
"""
_NVIDIA_SMI = """#!/bin/sh
for i in $(seq 0 $((PRETENDED_GPUS - 1))); do
    major=$((PRETENDED_CAPABILITY / 10)) minor=$((PRETENDED_CAPABILITY % 10))
    echo "$i, Pretended, 81920, 81000, 580.65.06, $major.$minor, Default"
done
"""


# Variables of the test process that would decide what a process sees of the GPU.
_LEFT_OUT = ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")


def pretend(folder: Path) -> dict[str, str]:
    """Make the stubs in `folder`; returns the environment of a process that sees them."""
    (folder / "nvml.c").write_text(_LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    (folder / "nvidia-smi").write_text(_NVIDIA_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    folders = [path for path in os.environ["PATH"].split(os.pathsep) if not Path(path, "nvcc").exists()]
    return environment | {
        "LD_LIBRARY_PATH": str(folder),
        "PATH": os.pathsep.join([str(folder), *folders]),
        "PRETENDED_GPUS": "1",
        "PRETENDED_CAPABILITY": "80",
    }


def plant() -> list[str]:
    """Give this process's torch the entry points of a CUDA build; returns the names of those that are called."""
    import torch

    called: list[str] = []

    def entry_point(name: str) -> Any:
        def call(*_: object) -> int:
            called.append(name)
            return int(os.environ["PRETENDED_GPUS"])

        return call

    for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getDevice", "_cuda_setDevice"):
        setattr(torch._C, name, entry_point(name))
    return called


def hook() -> dict[str, Any]:
    """What a Ray worker does before Ray has chosen its GPU, and how many it sees after that."""
    called = plant()
    import torch

    from stage2_grpo.training import worker_setup

    worker_setup.setup()
    before = [*called]
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    from verl.utils import device

    return {"called": before, "device": device.get_device_name(), "left": torch.cuda.device_count()}


def stage1(folder: Path) -> dict[str, Any]:
    """The GPUs that the Trainer's settings of stage 1 see."""
    from shared.config.device import keep_one_gpu

    keep_one_gpu()
    plant()
    import torch

    torch.cuda.is_bf16_supported = lambda including_emulation=True: True  # asks the device for its properties
    from shared.config.load import load_config
    from stage1_sft.train import _arguments

    return {"seen": torch.cuda.device_count(), "bf16": _arguments(load_config(PIPELINE, "gpu"), folder).bf16}


def plans(model: Path) -> list[dict[str, Any]]:
    """vLLM's and VERL's reading of the GPU profile, for each compute capability and number of GPUs."""
    plant()
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # not in the CPU wheel
    import vllm.platforms
    from vllm.platforms import cuda

    vllm.platforms._current_platform = cuda.CudaPlatform()
    return [
        _plan(model, profile, capability, count)
        for profile in ("gpu", "gpu24")
        for capability in CAPABILITIES
        for count in COUNTS
    ]


def needs() -> dict[str, Any]:
    """What VERL and vLLM ask of a machine that `shared/cli/machine.py` checks for them."""
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # not in the CPU wheel
    from verl.single_controller.ray.base import ResourcePoolManager
    from vllm.platforms.cuda import CudaPlatform

    os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-8932f937"
    reads_uuids = True
    try:
        CudaPlatform.device_id_to_physical_device_id(0)
    except ValueError:
        reads_uuids = False
    return {"cores": ResourcePoolManager({"gpus": [8]}, {}).max_colocate_count, "reads uuids": reads_uuids}


def _plan(model: Path, profile: str, capability: int, count: int) -> dict[str, Any]:
    import torch
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import cuda
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from shared.cli import machine
    from shared.config.load import load_config
    from shared.errors import UserError
    from shared.processes.vllm_server import server_argv
    from stage2_grpo.training.verl_config import TrainerPaths, compose

    os.environ |= {"PRETENDED_CAPABILITY": str(capability), "PRETENDED_GPUS": str(count)}
    cuda.CudaPlatform.get_device_capability.cache_clear()
    parallel = max(1, count // 4)
    config = load_config(PIPELINE, profile, [f"grpo.gpus_per_node={count}", f"vllm.tensor_parallel={parallel}"])
    machine_says = ""
    try:
        machine.check("gpu", machine.look(), machine.needs_of(config))
    except UserError as problem:
        machine_says = str(problem)
    parser = make_arg_parser(FlexibleArgumentParser())
    served = parser.parse_args(server_argv(model, config, 8000)[3:])
    validate_parsed_serve_args(served)
    composed = compose(config, TrainerPaths(model, Path("runs/x/grpo"), "http://127.0.0.1:1"))
    OmegaConf.resolve(composed)
    validate_config(composed, use_reference_policy=False, use_critic=False)
    rollout: Any = omega_conf_to_dataclass(composed.actor_rollout_ref.rollout)
    # VERL turns these into arguments of `vllm serve` in this way; its own function needs extensions that are not here.
    words = [
        [f"--{key}"] if value is True else [f"--{key}", value] for key, value in rollout.engine_kwargs["vllm"].items()
    ]
    rolled = parser.parse_args([str(word) for pair in words for word in pair])
    return {
        "profile": profile,
        "capability": capability,
        "gpus": torch.cuda.device_count(),
        "machine": machine_says,
        "bfloat16": torch.bfloat16 in cuda.CudaPlatform().supported_dtypes,
        "vllm would choose": cuda._get_backend_priorities(False, cuda.CudaPlatform.get_device_capability())[0].name,
        "told": [AsyncEngineArgs.from_cli_args(each).attention_backend for each in (served, rolled)],
        "workers": composed.trainer.n_gpus_per_node,
        "servers": count // rollout.tensor_model_parallel_size,
    }


if __name__ == "__main__":
    work, *arguments = sys.argv[1:]
    print(json.dumps(globals()[work](*map(Path, arguments))))
