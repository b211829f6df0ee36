"""The processes that stage 2 owns: Agent Lightning's gateway, our controller, and the trainer with its Ray.

All of them listen on the loopback address only (torch's rendezvous socket, which it binds to every address, is the one
exception), on ports that were free, behind a random key, and end with the `with` block or with the runner.

Two settings let parts of it live elsewhere. With grpo.ray_address the trainer's workers are those of a Ray cluster, and the
gateway listens on the address that the cluster sees. With grpo.gateway_url gateway and controller are somebody else's; they
read model, temperature and settings when they start, so a changed run needs them started again.
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
from stage2_grpo.rollouts.agent import AgentSettings
from stage2_grpo.training import cpu_backend

_ROOT = Path(__file__).resolve().parents[1]
_UNRECORDED = (
    "Jobs (grpo.job_template) record no episodes, so nothing is known of accuracy: only NaN and entropy stop the run, "
    "safety.patience is off, and the newest step is exported"
)


@dataclass(frozen=True)
class Rollouts:
    """A gateway and the controller that serves it."""

    settings_file: Path  # what controller, agents and trainer read
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


def register(http: httpx.Client, model: str, endpoint: str) -> None:
    """Tell the gateway of a rollout server as the trainer does: its model name, and its address that ends in /v1."""
    http.post("/api/models", json=[{"model": model, "endpoint": endpoint}]).raise_for_status()


@contextlib.contextmanager
def gateway_and_controller(config: Config, model: Path, folder: Path) -> Iterator[Rollouts]:
    """Start both and keep them for the block, or make sure that the gateway of grpo.gateway_url is there."""
    logs, settings_file, host = folder / "logs", folder / "agents.json", address_towards(config.grpo.ray_address)
    url = config.grpo.gateway_url or f"http://{host}:{free_port()}"
    AgentSettings(url, model, config, folder / "episodes.jsonl").save(settings_file)
    gateway_argv = [*gateway_arguments(config, model, url), f"hydra.run.dir='{logs / 'gateway'}'"]
    if config.grpo.gateway_url:
        key = _key_of_foreign_gateway(url, gateway_argv, settings_file)
        if config.grpo.job_template:
            print(f"grpo: {_UNRECORDED}", flush=True)
        yield Rollouts(settings_file, key, ())
        return
    key = random_key()
    gateway = OwnedProcess(
        [*_python_script("agl-server"), *gateway_argv],
        name="the Agent Lightning gateway",
        log=logs / "gateway.log",
        env={"AGL_KEY": key},
        health=f"{url}/healthz",
    )
    controller = OwnedProcess(
        [sys.executable, "-m", "stage2_grpo.rollouts.controller", "--settings", str(settings_file)],
        name="the rollout controller",
        log=logs / "controller.log",
        env={"AGL_KEY": key},
        health=lambda: "controller ready" in _text(logs / "controller.log"),
    )
    with gateway, controller:
        yield Rollouts(settings_file, key, (gateway, controller))


def gateway_arguments(config: Config, model: Path, url: str) -> list[str]:
    """Arguments of `agl-server`; its key comes from AGL_KEY in its environment.

    An https address is that of a proxy, which forwards to agl-server's usual port.
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


def _key_of_foreign_gateway(url: str, argv: list[str], settings_file: Path) -> str:
    """The key from the environment; raises UserError when the gateway does not answer or wants another one."""
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
    """Start the trainer process on (train, validation) questions."""
    with _private_ray(folder, wanted=config.grpo.ray_address is None) as ray:
        process = OwnedProcess(
            [sys.executable, "-m", "stage2_grpo.training", str(rollouts.settings_file), *map(str, questions)],
            name="the trainer",
            log=folder / "logs" / "trainer.log",
            env=trainer_environment(config, folder, rollouts.key) | ray,
            grace=30.0,
        )
        with process:
            yield process


@contextlib.contextmanager
def _private_ray(folder: Path, *, wanted: bool) -> Iterator[dict[str, str]]:
    """Environment for a Ray of the trainer's own, in a short temporary path; keeps its logs. Empty unless wanted."""
    if not wanted:
        yield {}
        return
    ray_folder = _ray_folder(folder / "ray_folder")
    try:
        yield {
            "RAY_TMPDIR": str(ray_folder),
            "RAY_ADDRESS": "",  # never join a Ray that is not ours
            "RAY_worker_niceness": "0",  # Ray's default of 15 starves trainer and vLLM as soon as anything else runs
        }
    finally:
        with contextlib.suppress(OSError):
            shutil.copytree(ray_folder / "session_latest" / "logs", folder / "logs" / "ray", dirs_exist_ok=True)
        shutil.rmtree(ray_folder, ignore_errors=True)


def _ray_folder(note: Path) -> Path:
    """A fresh folder whose path `note` keeps, so that the next start can remove what a killed run left.

    In /tmp, because Ray's socket paths must stay below 108 bytes.
    """
    left = note.read_text(encoding="utf-8") if note.exists() else ""
    if re.fullmatch(r"/tmp/firstcall-\w+", left):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="firstcall-", dir="/tmp"))
    note.write_text(str(folder), encoding="utf-8")
    return folder


def trainer_environment(config: Config, folder: Path, key: str) -> dict[str, str]:
    """Environment of the trainer; Ray hands it on to its workers, they to vLLM."""
    environment = {
        "AGL_KEY": key,
        "PYTHONPATH": os.pathsep.join(
            [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),  # workers run this code
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
    return environment | (_cpu_environment(config) if config.profile == "cpu" else {})


def _cpu_environment(config: Config) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    return {
        cpu_backend.SWITCH: "1",
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(config.vllm.cpu_kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # `auto` leaves a core idle
        "TORCHDYNAMO_DISABLE": "1",  # a few functions would compile C++ even in eager mode
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_prestart_worker_first_driver": "0",  # no idle workers: each costs memory and seconds of imports
        "RAY_enable_worker_prestart": "0",
    }


def _python_script(name: str) -> list[str]:
    """A console script of this environment, run by this interpreter."""
    return [sys.executable, str(Path(sys.executable).parent / name)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
