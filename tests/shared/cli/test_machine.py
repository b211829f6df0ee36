"""What is refused of a machine before anything is downloaded, with planted answers of its driver and files."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from shared.cli import machine
from shared.cli.machine import CHECKS, Drawback, Machine, Needs
from shared.config.device import Gpu, attention_backend, default_profile, keep_one_gpu, read_gpus
from shared.config.load import load_config
from shared.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
A100 = "0, NVIDIA A100-SXM4-80GB, 81920, 81000, 580.65.06, 8.0\n"
T4 = "1, Tesla T4, 15360, 15000, 580.65.06, 7.5\n"
L4 = "0, NVIDIA L4, 23034, 22500, 580.65.06, 8.9\n"
B200 = "0, NVIDIA B200, 183359, 183000, 580.65.06, 10.0\n"
WELL = Machine(
    tuple(read_gpus(A100)), True, cores=16, free_gib=200.0, shared_gib=100.0, compiler=True, python_header=True
)


def smi(text: str) -> tuple[Gpu, ...]:
    return tuple(read_gpus(text))


PLANTED = {
    "no GPU": ({"gpus": (), "driver_loaded": False}, "gpu", "1 NVIDIA GPU.*0 are visible.*--profile cpu"),
    "a container without its GPU": ({"gpus": ()}, "gpu", "container with `--gpus all`"),
    "an old driver": ({"gpus": smi(A100.replace("580.65", "535.10"))}, "gpu", "driver 535 is too old.*driver 580"),
    "a driver that knows no compute_cap": (
        {"gpus": smi("0, Tesla V100, 40960, 40000, 470.82.01\n")}, "gpu", "driver 470 is too old"),
    "no bfloat16": (
        {"gpus": smi(A100.replace("8.0", "7.5"))}, "gpu", "A100.* capability 7.5, and bfloat16.*--profile cpu"),
    "GPUs named by uuid": (
        {"gpus": (), "visible": "GPU-8932f937"}, "gpu", "is 'GPU-8932f937'.*but numbers.*nvidia-smi -L"),
    "a slice of a GPU": ({"gpus": (), "visible": "MIG-aa/1/0"}, "gpu", "a slice .* cannot be used"),
    "a GPU for one process": (
        {"gpus": smi(A100.strip() + ", Exclusive_Process")}, "gpu", "only one process.*nvidia-smi -c DEFAULT"),
    "a 24 GB card": ({"gpus": smi(L4)}, "gpu memory", "NVIDIA L4 has 22 GiB .* needs 38 GiB.*use --profile gpu24"),
    "a 16 GB card": (
        {"gpus": smi(L4.replace("23034", "16376"))}, "gpu memory", "has 16 GiB .*gpu24 with a smaller model"),
    "no C compiler": ({"compiler": False}, "compiler", "no C compiler.*apt install gcc"),
    "no Python.h": ({"python_header": False}, "compiler", r"Python\.h is missing.*python3\.12-dev"),
    "three cores": ({"cores": 3}, "cores", "3 CPU cores.*wait for ever"),
    "a GPU in use": ({"gpus": smi(A100.replace("81000", "20000"))}, "free gpu", "Only 20 of 80 GiB"),
    "little main memory": ({"free_gib": 12.0}, "memory", "12.0 GiB of main memory are free.*26.0 GiB"),
}  # fmt: skip


def test_a_cpu_without_libnuma_is_told_to_install_it() -> None:
    slim = dataclasses.replace(WELL, libnuma=False)
    with pytest.raises(UserError, match=r"libnuma\.so\.1 is missing.*apt install libnuma1"):
        machine.refuse(slim, Needs("cpu"))
    machine.refuse(slim, Needs("gpu"))
    assert machine.look().libnuma


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_one_sentence_with_its_fix(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, name, says = PLANTED[fault]
    planted = dataclasses.replace(WELL, **changes)  # type: ignore[arg-type]
    with pytest.raises(UserError) as problem:
        machine.check(name, planted, Needs("gpu"))
    assert re.search(says, str(problem.value))
    assert "; " in str(problem.value)
    for other in CHECKS.keys() - {name}:
        machine.check(other, planted, Needs("gpu"))
    machine.refuse(planted, Needs("gpu"), only_warn=True)
    assert capsys.readouterr().out == f"warning: {problem.value}\n"
    if isinstance(problem.value, Drawback):
        machine.refuse(planted, Needs("gpu"))
    else:
        with pytest.raises(UserError):
            machine.refuse(planted, Needs("gpu"))


def test_a_good_machine_passes_and_a_laptop_needs_only_memory() -> None:
    assert machine.check("gpu", WELL, Needs("gpu")) == "1 x NVIDIA A100-SXM4-80GB, driver 580"
    machine.refuse(WELL, Needs("gpu"))
    machine.refuse(Machine((), False, 1, 15.0, 0.06, False, False), Needs("cpu"))
    machine.refuse(dataclasses.replace(WELL, gpus=(), cores=2), Needs("gpu", gpus=0))  # those of a Ray cluster
    machine.refuse(dataclasses.replace(WELL, python_header=False), Needs("gpu", before_setup=True))


@pytest.mark.parametrize(("gpus", "enough"), [(1, 4), (2, 7), (8, 25)])
def test_ray_needs_three_cores_for_each_gpu_and_one(gpus: int, enough: int) -> None:
    cards = WELL.gpus * gpus
    machine.refuse(dataclasses.replace(WELL, gpus=cards, cores=enough), Needs("gpu", gpus))
    with pytest.raises(UserError, match=rf"{enough - 1} CPU cores and would wait for ever for the {enough} "):
        machine.check("cores", dataclasses.replace(WELL, gpus=cards, cores=enough - 1), Needs("gpu", gpus))


def test_several_gpus_of_a_container_need_shared_memory(capsys: pytest.CaptureFixture[str]) -> None:
    small = dataclasses.replace(WELL, gpus=WELL.gpus * 2, shared_gib=0.0625)
    machine.refuse(small, Needs("gpu", 1))
    assert capsys.readouterr().out == ""
    machine.refuse(small, Needs("gpu", 2))
    assert re.search(r"/dev/shm holds 0.06 GiB.*; start the container with `--shm-size=8g`", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ([], 1),
        (["grpo.gpus_per_node=8", "vllm.tensor_parallel=2"], 8),
        (["grpo.nodes=2", "grpo.ray_address=head:6379", "grpo.gpus_per_node=8"], 0),
    ],
)
def test_the_settings_say_how_many_gpus_are_needed(changes: list[str], gpus: int) -> None:
    assert machine.needs_of(load_config(ROOT / "pipeline.yaml", "gpu", changes)) == Needs("gpu", gpus)


def test_the_drivers_answer_is_read_with_what_it_does_not_know() -> None:
    assert read_gpus(A100) == [Gpu("NVIDIA A100-SXM4-80GB", 80.0, 81000 / 1024, 580, 8.0)]
    assert not read_gpus(A100.strip() + ", Default")[0].exclusive
    unified = "0, NVIDIA GB10, [N/A], [N/A], 580.95.05, 12.1\n"
    assert read_gpus(unified) == [Gpu("NVIDIA GB10", None, None, 580, 12.1)]
    assert read_gpus("No devices were found\n") == []


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA A100-SXM4-80GB", "Tesla T4"]),
        ("1", ["Tesla T4"]),
        ("1,0", ["Tesla T4", "NVIDIA A100-SXM4-80GB"]),
        ("", []),
        ("-1", []),
        ("1,7", ["Tesla T4"]),
    ],
)
def test_only_visible_gpus_count(visible: str | None, names: list[str]) -> None:
    assert [gpu.name for gpu in read_gpus(A100 + T4, visible)] == names


def test_blackwell_without_a_compiler_for_flashinfer_gets_another_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [attention_backend(smi(text)) for text in (A100, L4, B200)] == [None, None, "TRITON_ATTN"]
    (tmp_path / "nvcc").write_text("")
    (tmp_path / "nvcc").chmod(0o755)
    assert attention_backend(smi(B200)) is None


@pytest.mark.parametrize(("visible", "left"), [(None, "0"), ("2,3", "2"), ("GPU-aa,GPU-bb", "GPU-aa"), ("", "")])
def test_stage_1_keeps_the_first_visible_gpu(visible: str | None, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    keep_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


def test_the_limits_of_a_container_count(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 8 kB\nMemAvailable:   67108864 kB\n",
        "sys/fs/cgroup/memory.max": f"{16 * 2**30}\n",
        "sys/fs/cgroup/memory.stat": f"anon {4 * 2**30}\nfile {9 * 2**30}\n",
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
        "proc/driver/nvidia/version": "NVRM version",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    here = machine.look(tmp_path)
    assert (here.free_gib, here.cores, here.driver_loaded) == (12.0, 1, True)
    for limit in ("memory.max", "cpu.max"):
        (tmp_path / "sys/fs/cgroup" / limit).write_text("max 100000\n" if limit == "cpu.max" else "max\n")
    assert machine.look(tmp_path).free_gib == 64.0


def test_the_profile_follows_the_gpu_that_is_visible(tmp_path: Path) -> None:
    """The driver in /proc is the host's; in WSL2 the device is another one."""

    def planted(*files: str) -> str:
        root = tmp_path / str(len(files)) / files[0].replace("/", "_")
        for name in files:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        return default_profile(root)

    assert planted("proc/driver/nvidia/version") == "cpu"
    assert planted("dev/nvidiactl") == "gpu"
    assert planted("dev/dxg") == "cpu"
    assert planted("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1") == "gpu"


def test_the_oldest_driver_is_the_one_for_the_pinned_cuda() -> None:
    pins = (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8")
    assert re.search(r"^cuda-toolkit==13\.", pins, re.MULTILINE)
    assert machine.OLDEST_DRIVER == 580
