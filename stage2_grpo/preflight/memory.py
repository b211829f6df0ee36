"""How much memory and disk a run takes: rollout server and trainer take turns on the same GPUs.

    while vLLM generates    weights (bf16) + workspace + KV cache, within vllm.gpu_memory_utilization of the card
    while the trainer runs  weights (fp32) + a bf16 copy + gradient and optimizer + logits and activations of one pass

KV cache and checkpoint sizes are exact, and the bytes per logit were counted in VERL's code path. The rest is
estimated; no figure here has been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.schema import Config
from shared.models.shape import ModelShape

GIB = 2**30
CARDS = (16, 24, 40, 48, 80)  # GiB
BLOCK_TOKENS = {"gpu": 16, "cpu": 128}  # of one KV-cache block in vLLM 0.20.2
_USABLE = 0.97  # of a card's memory; the driver keeps the rest
_SERVER_WORKSPACE = 1.5 * GIB  # CUDA context and the activations of vLLM's profiling pass
_TRAINER_WORKSPACE = 2.0 * GIB  # CUDA context, allocator slack, what vLLM keeps in sleep mode
_LOGIT_BYTES = 29  # alive at the peak for each logit: log-probabilities, entropy in fp32, and their gradients
_FULL_LAYER = 16  # activations of a layer while it is recomputed, in units of the hidden size ...
_FULL_MLP = 4  # ... and of the intermediate size, two bytes each
_PROCESSES = 8 * GIB  # main memory of Ray, gateway, controller and all libraries, measured on a CPU
_CUDA_PROCESSES = 6 * GIB  # what CUDA adds to those of trainer and server


@dataclass(frozen=True)
class Fit:
    """What one card of `gib` GiB holds."""

    gib: float
    cache_gib: float  # left for the KV cache while vLLM generates
    cache_blocks: int  # of BLOCK_TOKENS tokens
    episodes: int  # of agent.context_tokens that the cache holds at once
    pass_gib: float  # left for logits and activations while the trainer runs
    pass_tokens: int  # that one forward and backward pass can take
    rows: int  # whole training rows in a pass
    fits: bool  # an episode can be played, and a pass takes grpo.micro_batch_size of the longest rows


def fit(shape: ModelShape, config: Config, gib: float) -> Fit:
    """Both halves of a step on a card of `gib` GiB, with the settings as they are."""
    grpo, server, usable = config.grpo, config.vllm, gib * _USABLE * GIB
    cards = grpo.nodes * grpo.gpus_per_node
    weights = 2 * shape.parameters / server.tensor_parallel
    cache = max(0.0, server.gpu_memory_utilization * usable - weights - _SERVER_WORKSPACE)
    blocks = int(cache // (BLOCK_TOKENS["gpu"] * shape.kv_bytes / server.tensor_parallel))
    episodes = blocks // -(-config.agent.context_tokens // BLOCK_TOKENS["gpu"])
    weights = (4 / cards + 2) * shape.parameters
    optimizer = 12 * trained_parameters(shape, config) / cards  # gradient and two moments, fp32
    room = max(0.0, usable - weights - optimizer - _TRAINER_WORKSPACE)
    tokens = int(room // pass_bytes(shape, config))
    rows = tokens // config.agent.context_tokens
    fits = episodes >= 1 and rows >= grpo.micro_batch_size
    return Fit(gib, cache / GIB, blocks, episodes, room / GIB, tokens, rows, fits)


def pass_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes of logits and activations for each token of a pass."""
    layer = 2 * (_FULL_LAYER * shape.hidden + _FULL_MLP * shape.intermediate)
    kept = 2 * shape.hidden * shape.layers + layer if config.grpo.gradient_checkpointing else layer * shape.layers
    return _LOGIT_BYTES * shape.vocabulary + kept


def trained_parameters(shape: ModelShape, config: Config) -> int:
    """Weights that have a gradient: the adapter's, or all."""
    return shape.adapter_parameters(config.grpo.lora_rank) if config.grpo.lora_rank else shape.parameters


def main_memory(shape: ModelShape, config: Config) -> float:
    """Bytes of main memory that all processes of a run take together."""
    grpo = config.grpo
    if config.profile == "cpu":  # weights, their copies and the pass of the trainer, and the server's cache
        usual = grpo.micro_batch_size * config.agent.context_tokens / 2  # tokens; few episodes fill their context
        cache = config.vllm.cpu_kv_cache_gib * GIB
        return _PROCESSES + 10 * shape.parameters + cache + usual * pass_bytes(shape, config)
    copies = 4 * shape.parameters * (2 if grpo.param_offload else 1)  # loaded in fp32, and offloaded
    moments = 8 * trained_parameters(shape, config) if grpo.optimizer_offload else 0
    return _PROCESSES + _CUDA_PROCESSES + grpo.gpus_per_node * copies + moments


def checkpoint_bytes(shape: ModelShape, config: Config) -> int:
    """One saved step: all weights in fp32 (VERL writes a tied embedding twice), adapter, two optimizer moments."""
    tied = shape.vocabulary * shape.hidden if shape.tied else 0
    adapter = shape.adapter_parameters(config.grpo.lora_rank) if config.grpo.lora_rank else 0
    return 4 * (shape.parameters + tied + adapter) + 8 * trained_parameters(shape, config)


def run_bytes(shape: ModelShape, config: Config) -> int:
    """Disk for a whole run: the newest checkpoints, up to four more (safety.kept_steps), the exported model twice."""
    return (config.grpo.keep_checkpoints + 4) * checkpoint_bytes(shape, config) + 2 * 2 * shape.parameters
