"""The processes that stage 2 owns: Agent Lightning's gateway, our controller, and the trainer with its Ray.

All of them listen only on the loopback address, on free ports, behind a random key, and end with the `with` block or
with the runner. The one exception is torch's rendezvous socket, which torch binds to every address.

Two settings move parts elsewhere. With grpo.ray_address the trainer's workers belong to a Ray cluster, and the gateway
listens on the address that the cluster sees. With grpo.gateway_url gateway and controller are external. They read
model, temperature and settings when they start, so a changed run needs them restarted.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from shared.config.schema import Config
from shared.errors import UserError
from shared.processes.owned_process import OwnedProcess, free_port, random_key
from stage2_grpo.rollouts.agent import SETTINGS_FILE, AgentSettings
from stage2_grpo.training import actor_engine, cpu_backend

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Rollouts:
    """A gateway and the controller that serves it."""

    settings_file: Path  # read by controller, agents and trainer
    key: str
    processes: tuple[OwnedProcess, ...]

    def check(self, advice: str = "") -> None:
        """Raise UserError, with advice, when one of them has died: the trainer would wait for its episodes for ever."""
        for process in self.processes:
            process.check(advice)

    def client(self, timeout: float) -> httpx.Client:
        """The trainer's view of the gateway; `timeout` in seconds for each request."""
        url, headers = AgentSettings.load(self.settings_file).gateway_url, {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)


@contextlib.contextmanager
def gateway_and_controller(config: Config, model: Path, folder: Path) -> Iterator[Rollouts]:
    """Start both and keep them for the block, or check that the gateway of grpo.gateway_url is there."""
    logs, settings_file, host = folder / "logs", folder / SETTINGS_FILE, address_towards(config.grpo.ray_address)
    url = config.grpo.gateway_url or f"http://{host}:{free_port()}"
    AgentSettings(url, model, config, folder / "episodes.jsonl").save(settings_file)
    gateway_argv = [*gateway_arguments(config, model, url), f"hydra.run.dir='{logs / 'gateway'}'"]
    if config.grpo.gateway_url:
        key = _key_of_external_gateway(url, gateway_argv, settings_file)
        if config.grpo.job_template:
            print(
                "grpo: Jobs (grpo.job_template) record no episodes, so accuracy is unknown: only NaN and entropy stop "
                "the run, safety.patience is off, and the newest step is exported",
                flush=True,
            )
        yield Rollouts(settings_file, key, ())
        return
    key, controller_log = random_key(), logs / "controller.log"
    gateway = OwnedProcess(
        [sys.executable, str(Path(sys.executable).parent / "agl-server"), *gateway_argv],
        name="the Agent Lightning gateway",
        log=logs / "gateway.log",
        env={"AGL_KEY": key},
        health=f"{url}/healthz",
    )
    controller = OwnedProcess(
        [sys.executable, "-m", "stage2_grpo.rollouts.controller", "--settings", str(settings_file)],
        name="the rollout controller",
        log=controller_log,
        env={"AGL_KEY": key},
        health=lambda: controller_log.exists() and b"controller ready" in controller_log.read_bytes(),
    )
    with gateway, controller:
        yield Rollouts(settings_file, key, (gateway, controller))


def gateway_arguments(config: Config, model: Path, url: str) -> list[str]:
    """Arguments of `agl-server`; its key comes from AGL_KEY in its environment.

    An https address belongs to a proxy, which forwards to agl-server's usual port.
    """
    address = urlsplit(url)
    host, port = ("0.0.0.0", 8080) if address.scheme == "https" else (address.hostname, address.port or 80)
    return [
        f"host={host}",
        f"port={port}",
        f"default_proxy.model_name='{model}'",  # must equal actor_rollout_ref.model.path byte for byte
        f"default_proxy.train.temperature={config.grpo.temperature}",
        "default_proxy.val.temperature=0.0",  # Agent Lightning validates at 0.7
        "key=${oc.env:AGL_KEY}",
    ]


def _key_of_external_gateway(url: str, argv: list[str], settings_file: Path) -> str:
    """The key from the environment; raises UserError when the gateway does not answer or expects another key."""
    how = (
        f"Start it with the same AGL_KEY as this run: agl-server {shlex.join(argv)} — and its controller: "
        f"python -m stage2_grpo.rollouts.controller --settings {settings_file} --drain 60"
    )
    key = os.environ.get("AGL_KEY", "")
    if not key:
        raise UserError(
            f"AGL_KEY is not set, but a gateway that others can reach (grpo.gateway_url {url}) needs one. {how}"
        )
    try:
        headers = {"Authorization": f"Bearer {key}"}
        listed = httpx.get(f"{url}/api/rollouts?state_in=queuing&limit=1", headers=headers, trust_env=False)
    except httpx.HTTPError as error:
        raise UserError(f"The gateway {url} (grpo.gateway_url) does not answer ({error}). {how}") from error
    if not listed.is_success:
        raise UserError(f"The gateway {url} (grpo.gateway_url) answers with status {listed.status_code}. {how}")
    return key


def address_towards(ray_address: str | None) -> str:
    """The address of this machine on the way to a Ray cluster; loopback when there is none."""
    if ray_address is None:
        return "127.0.0.1"
    host, _, port = ray_address.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"Setting grpo.ray_address names {host}, which cannot be reached ({error}).") from error


@contextlib.contextmanager
def trainer(config: Config, folder: Path, rollouts: Rollouts, questions: tuple[Path, Path]) -> Iterator[OwnedProcess]:
    """Start the trainer process on (train, validation) questions, with a Ray of its own unless a cluster is named."""
    environment = trainer_environment(config, folder, rollouts.key)
    with contextlib.ExitStack() as stack:
        if config.grpo.ray_address is None:
            environment |= stack.enter_context(_private_ray(folder))
        process = OwnedProcess(
            [sys.executable, "-m", "stage2_grpo.training", str(rollouts.settings_file), *map(str, questions)],
            name="the trainer",
            log=folder / "logs" / "trainer.log",
            env=environment,
            grace=30.0,
        )
        yield stack.enter_context(process)


@contextlib.contextmanager
def _private_ray(folder: Path) -> Iterator[dict[str, str]]:
    """Environment for a private Ray in a short temporary folder; keeps its logs.

    The folder is in /tmp, because Ray's socket paths must stay below 108 bytes. A note of its path lets the next start
    remove the folder of a killed run.
    """
    note = folder / "ray_folder"
    left = note.read_text(encoding="utf-8") if note.exists() else ""
    if re.fullmatch(r"/tmp/firstcall-\w+", left):
        shutil.rmtree(left, ignore_errors=True)
    ray_folder = Path(tempfile.mkdtemp(prefix="firstcall-", dir="/tmp"))
    note.write_text(str(ray_folder), encoding="utf-8")
    try:
        yield {
            "RAY_TMPDIR": str(ray_folder),
            "RAY_ADDRESS": "",  # never join another Ray
            "RAY_worker_niceness": "0",  # Ray's default of 15 starves trainer and vLLM as soon as anything else runs
        }
    finally:
        with contextlib.suppress(OSError):
            shutil.copytree(ray_folder / "session_latest" / "logs", folder / "logs" / "ray", dirs_exist_ok=True)
        shutil.rmtree(ray_folder, ignore_errors=True)


def trainer_environment(config: Config, folder: Path, key: str) -> dict[str, str]:
    """Environment of the trainer. Ray passes it on to its workers, and they pass it on to vLLM."""
    environment = {
        "AGL_KEY": key,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        actor_engine.FOLDER: str(folder),
        "VERL_FILE_LOGGER_PATH": str(folder / "trainer_metrics.jsonl"),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "HYDRA_FULL_ERROR": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    if address_towards(config.grpo.ray_address) == "127.0.0.1":
        environment |= {
            "VLLM_HOST_IP": "127.0.0.1",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray take the loopback address
        }
        if config.device == "gpu":
            environment["NCCL_SOCKET_IFNAME"] = "lo"  # else it listens on another interface, or finds none
    if config.device == "gpu":
        # VERL asks for CUDA when it is imported, in Ray's workers before Ray has chosen their GPU. This way it touches
        # no driver.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if config.device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        environment |= {
            cpu_backend.SWITCH: "1",
            "OMP_NUM_THREADS": str(len(cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(config.vllm.cpu_kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # `auto` leaves a core idle
            "TORCHDYNAMO_DISABLE": "1",  # a few functions would compile C++ even in eager mode
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_prestart_worker_first_driver": "0",  # no idle workers: each costs memory and seconds of imports
            "RAY_enable_worker_prestart": "0",
        }
    return environment
