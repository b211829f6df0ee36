"""What fits a GPU: an estimate of the memory of rollout server and trainer, which take turns on the same cards.

    while vLLM generates   weights (bf16) + workspace + KV cache            within gpu_memory_utilization of the card
    while the trainer runs weights (fp32) + a bf16 copy + adapter or full optimizer + logits and activations of one pass

The KV cache and the checkpoint sizes are exact (bytes per number are known). Logits and activations are an estimate from the
code path that stage 2 uses: VERL without padding removal computes log-probabilities of every token of the pass in bf16,
which keeps about five arrays of the size of the logits alive. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.config.schema import Config
from shared.models.shape import ModelShape

GIB = 2**30
CARDS = (16, 24, 40, 80)  # GiB
BLOCK_TOKENS = {"gpu": 16, "cpu": 128}  # of one KV-cache block in vLLM 0.20.2
_USABLE = 0.97  # of a card's memory; the rest is the driver's
_SERVER_WORKSPACE = 1.5 * GIB  # CUDA context and the activations of vLLM's profiling pass
_TRAINER_WORKSPACE = 2.0 * GIB  # CUDA context, allocator slack, vLLM's remains in sleep mode
_LOGIT_BYTES = 10  # per logit: five bf16 arrays
_FULL_LAYER = 16  # activations of a layer while it is recomputed, in units of hidden size ...
_FULL_MLP = 4  # ... and of intermediate size, two bytes each


@dataclass(frozen=True)
class Fit:
    """What one card of `gib` GiB holds."""

    gib: float
    cache_blocks: int  # of BLOCK_TOKENS tokens
    episodes: int  # of agent.context_tokens that the cache holds at once
    pass_tokens: int  # that one forward and backward pass can take
    rows: int  # whole training rows in a pass
    fits: bool  # an episode can be played, and a pass takes grpo.micro_batch_size of the longest rows


def fit(shape: ModelShape, config: Config, gib: float) -> Fit:
    """Both halves of a step on a card of `gib` GiB, with the settings as they are."""
    block = BLOCK_TOKENS["gpu"]
    blocks = max(0, int(cache_room(shape, config, gib) // (block * kv_bytes(shape, config))))
    tokens = max(0, int(pass_room(shape, config, gib) // pass_bytes(shape, config)))
    per_episode = math.ceil(config.agent.context_tokens / block)
    episodes, rows = blocks // per_episode, tokens // row_tokens(config)
    return Fit(gib, blocks, episodes, tokens, rows, episodes >= 1 and rows >= config.grpo.micro_batch_size)


def kv_bytes(shape: ModelShape, config: Config) -> float:
    """Bytes of cache per token on one card."""
    return shape.kv_bytes / config.vllm.tensor_parallel


def row_tokens(config: Config) -> int:
    """The longest training row: an episode from first prompt to last token."""
    grpo = config.grpo
    return min(grpo.max_prompt_length + grpo.trajectory_response_length, config.agent.context_tokens)


def cache_room(shape: ModelShape, config: Config, gib: float) -> float:
    """Bytes for the KV cache on a card."""
    weights = 2 * shape.parameters / config.vllm.tensor_parallel
    return config.vllm.gpu_memory_utilization * gib * _USABLE * GIB - weights - _SERVER_WORKSPACE


def pass_room(shape: ModelShape, config: Config, gib: float) -> float:
    """Bytes for logits and activations of one pass on a card."""
    cards = config.grpo.nodes * config.grpo.gpus_per_node
    weights = (4 / cards + 2) * shape.parameters
    optimizer = 12 * trained_parameters(shape, config) / cards  # gradient and two moments, fp32
    return gib * _USABLE * GIB - weights - optimizer - _TRAINER_WORKSPACE


def pass_bytes(shape: ModelShape, config: Config) -> float:
    """Bytes of logits and activations for each token of a pass."""
    layer = 2 * (_FULL_LAYER * shape.hidden + _FULL_MLP * shape.intermediate)
    kept = 2 * shape.hidden * shape.layers + layer if config.grpo.gradient_checkpointing else layer * shape.layers
    return _LOGIT_BYTES * shape.vocabulary + kept


def trained_parameters(shape: ModelShape, config: Config) -> int:
    """Weights that have a gradient: the adapter's, or all."""
    return shape.adapter_parameters(config.grpo.lora_rank) if config.grpo.lora_rank else shape.parameters


def checkpoint_bytes(shape: ModelShape, config: Config) -> int:
    """One saved step: all weights in fp32 (VERL writes a tied embedding twice), adapter, two optimizer moments."""
    tied = shape.vocabulary * shape.hidden if shape.tied else 0
    adapter = shape.adapter_parameters(config.grpo.lora_rank) if config.grpo.lora_rank else 0
    return 4 * (shape.parameters + tied + adapter) + 8 * trained_parameters(shape, config)


def run_bytes(shape: ModelShape, config: Config) -> int:
    """Disk for a whole run: the newest checkpoints, up to four more (safety.kept_steps), the exported model twice."""
    return (config.grpo.keep_checkpoints + 4) * checkpoint_bytes(shape, config) + 2 * 2 * shape.parameters
