"""How much memory and disk a run takes. Four moments decide whether a GPU is large enough:

    SFT trains        base model, adapter, activations of a batch of the longest traces
    vLLM generates    its share of the card (vllm.gpu_memory_utilization) beside what the trainer leaves there
    GRPO trains       float32 weights, copies of a few layers, adapter, logits and activations of the longest rows
    weights are sent  float32 weights, a merged copy, and the server's weights

Checkpoints and KV cache are exact. Bytes per logit and per activation, and the copies of the weights, are what torch
allocates on a CPU (tests/stage2_grpo/preflight/test_measured_memory.py). No figure has been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.schema import Config
from shared.models.shape import ModelShape
from stage2_grpo.training.actor_engine import CHUNK

GIB = 2**30
CARDS = {16: 15.0, 24: 22.5, 40: 39.4, 48: 44.9, 80: 79.2}  # GB in the name -> GiB that the smallest such card reports
MADE_FOR = {
    "gpu": 80,
    "gpu24": 24,
    "cpu": 80,
    "evening": 80,
}  # the card whose arithmetic is shown where no GPU is visible
BLOCK_TOKENS = {"gpu": 16, "cpu": 128}  # of one KV-cache block in vLLM 0.20.2
LOGIT_BYTES = 4  # of a trained token's logit: itself and its gradient, bfloat16
CHUNK_BYTES = {False: 12, True: 18}  # of a logit in the chunk that is computed in float32; True: the entropy is trained
LAYER_BYTES = (44, 14)  # of a token in a layer that is computed again, times (hidden size, intermediate size)
_USABLE = 0.97  # of a card's memory; the driver keeps the rest
_CONTEXT = 1.0 * GIB  # CUDA context and allocator slack of one process
_SERVER_WORKSPACE = 1.5 * GIB  # CUDA context and the activations of vLLM's profiling pass
_SFT_CHUNK = 256  # tokens whose logits TRL's chunked loss holds at a time
_PROCESSES = 8 * GIB  # main memory of Ray, gateway, controller and all libraries, measured on a CPU
_CUDA_PROCESSES = 6 * GIB  # what CUDA adds to those of trainer and server


@dataclass(frozen=True)
class Fit:
    """What one card of `gib` GiB holds."""

    gib: float
    cache_blocks: int  # KV-cache blocks of BLOCK_TOKENS tokens
    episodes: int  # of agent.context_tokens that the cache holds at once
    moments: dict[str, dict[str, float]]  # moment -> what lies on the card -> GiB

    @property
    def usable(self) -> float:
        """GiB that the driver leaves."""
        return _USABLE * self.gib

    @property
    def fits(self) -> bool:
        """Whether an episode can be played and no moment needs more than there is."""
        return self.episodes >= 1 and all(self.needed(moment) <= self.usable for moment in self.moments)

    def needed(self, moment: str) -> float:
        """GiB of one moment."""
        return sum(self.moments[moment].values())


def fit(shape: ModelShape, config: Config, gib: float) -> Fit:
    """All moments of a run on a card of `gib` GiB, with the longest texts that the settings allow."""
    grpo, server, sft, context = config.grpo, config.vllm, config.sft, config.agent.context_tokens
    cards, size, adapter = grpo.nodes * grpo.gpus_per_node, shape.parameters, trained_parameters(shape, config)
    served = 2 * size / server.tensor_parallel
    share = server.gpu_memory_utilization * _USABLE * gib * GIB
    cache = max(0.0, share - served - _SERVER_WORKSPACE)
    blocks = int(cache // (BLOCK_TOKENS["gpu"] * shape.kv_bytes / server.tensor_parallel))
    embedding, layer = shape.vocabulary * shape.hidden, (size - shape.vocabulary * shape.hidden) / shape.layers
    sft_adapter, rows = shape.adapter_parameters(sft.lora_rank), grpo.micro_batch_size * context
    moments = {
        "SFT trains": {
            f"weights, {sft.dtype}": (2 if sft.dtype == "bfloat16" else 4) * size,
            "adapter with gradient and moments, float32: 16 B a weight": 16 * sft_adapter,
            **_activations(shape, sft.batch_size, context, recomputed=sft.gradient_checkpointing),
            f"logits of {_SFT_CHUNK} tokens at a time": CHUNK_BYTES[False] * _SFT_CHUNK * shape.vocabulary,
            "CUDA context": _CONTEXT,
        },
        "vLLM generates": {
            "weights, bfloat16": served,
            "CUDA context and workspace": _SERVER_WORKSPACE,
            f"KV cache, {shape.kv_bytes} B a token": cache,
            "trainer: CUDA context": _CONTEXT,
            "trainer: weights (grpo.param_offload)": 0 if grpo.param_offload else 4 * size / cards,
            "trainer: moments (grpo.optimizer_offload)": 0 if grpo.optimizer_offload else 8 * adapter / cards,
        },
        "GRPO trains": {
            "weights, float32": 4 * size / cards,
            "bfloat16 copies of the embedding and two layers": 2 * embedding + 4 * layer,
            "gradient and moments, float32: 12 B a trained weight": 12 * adapter / cards,
            **_activations(shape, grpo.micro_batch_size, context, recomputed=grpo.gradient_checkpointing),
            f"logits of {rows} trained tokens, {LOGIT_BYTES} B each": LOGIT_BYTES * shape.vocabulary * rows,
            f"logits of {CHUNK} tokens at a time, float32": chunk_bytes(shape, config),
            "CUDA contexts of trainer and server": 2 * _CONTEXT,
        },
        "weights are sent": {
            "weights, float32": 4 * size / cards,
            "merged copy, float32": 4 * (size + (embedding if shape.tied else 0)),
            "server's weights, bfloat16": served,
            "bucket (grpo.weight_bucket_mb)": 0 if grpo.param_offload else grpo.weight_bucket_mb * 2**20,
            "CUDA contexts of trainer and server": 2 * _CONTEXT,
        },
    }
    in_gib = {moment: {name: size / GIB for name, size in parts.items()} for moment, parts in moments.items()}
    return Fit(gib, blocks, blocks // -(-context // BLOCK_TOKENS["gpu"]), in_gib)


def _activations(shape: ModelShape, rows: int, length: int, *, recomputed: bool) -> dict[str, float]:
    """Bytes that the layers keep for `rows` rows of `length` tokens until the backward half of a pass."""
    tokens = rows * length
    masks = {} if rows == 1 else {f"attention mask of {rows} padded rows, 3 B an entry": 3.0 * tokens * length}
    if not recomputed:
        all_layers = tokens * layer_bytes(shape) * shape.layers
        return {f"activations of {tokens} tokens, {shape.layers} layers": all_layers, **masks}
    return {
        f"inputs of {shape.layers} layers, {tokens} tokens": 2 * shape.hidden * shape.layers * tokens,
        f"one layer computed again, {layer_bytes(shape)} B a token": tokens * layer_bytes(shape),
        **masks,
    }


def layer_bytes(shape: ModelShape) -> int:
    """Bytes of activations and their gradients that one layer holds for one token."""
    return LAYER_BYTES[0] * shape.hidden + LAYER_BYTES[1] * shape.intermediate


def chunk_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes of the chunk of logits that actor_engine.py computes in float32."""
    return CHUNK_BYTES[config.grpo.entropy_coeff != 0] * CHUNK * shape.vocabulary


def trained_parameters(shape: ModelShape, config: Config) -> int:
    """Weights that have a gradient: the adapter's, or all."""
    return shape.adapter_parameters(config.grpo.lora_rank) if config.grpo.lora_rank else shape.parameters


def main_memory(shape: ModelShape, config: Config) -> float:
    """Bytes of main memory that all processes of a run take together."""
    grpo = config.grpo
    if config.device == "cpu":  # weights, their copies and the pass of the trainer, and the server's cache
        usual = config.agent.context_tokens // 2  # tokens; few episodes fill their context
        rows, recomputed = grpo.micro_batch_size, grpo.gradient_checkpointing
        activations = sum(_activations(shape, rows, usual, recomputed=recomputed).values())
        logits = LOGIT_BYTES * shape.vocabulary * rows * usual + chunk_bytes(shape, config)
        return _PROCESSES + 10 * shape.parameters + config.vllm.cpu_kv_cache_gib * GIB + activations + logits
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
