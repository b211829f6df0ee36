"""Loss and gradients of a batch whose sequences all begin alike, with that beginning computed once. For CPUs.

Every trace starts with the same system prompt and tool list, two fifths of its tokens with the small model. In a causal
model their keys and values don't depend on what follows. So the beginning runs once for the whole batch; then each
sequence runs forward and backward alone behind it, adding to the gradients of the shared keys and values, which at last
flow back through the beginning. Loss and gradients are those of the plain batch up to rounding.

One sequence at a time means no padding, the activations of one sequence in memory instead of those of a batch, and
tensors that fit the caches. Logits are computed only where a token is trained; over a vocabulary of 49,000 they are the
largest tensors of all. Limit: the key-value cache excludes gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from stage1_sft.dataset import IGNORED

CPU_ATTENTION = "causal_matmul"

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, shape (1, key heads, tokens, head width)."""


def summed_loss(
    model: PreTrainedModel, ids: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], scale: float = 1.0
) -> float:
    """`scale` times the summed cross-entropy in nats of the trained tokens; its gradients are added to the model's.

    `model` is a causal language model with a decoder and an output head; each sequence has the shape (tokens,). Without
    grad mode only the loss is computed.
    """
    shared = shared_length(ids, labels)
    beginning = _keys_values(model, ids[0][:shared])
    held = [(keys.detach(), values.detach()) for keys, values in beginning]
    if torch.is_grad_enabled():
        held = [(keys.requires_grad_(), values.requires_grad_()) for keys, values in held]
    total = 0.0
    for row, targets in zip(ids, labels, strict=True):
        loss = scale * _row_loss(model, held, row[shared:], targets[shared:])
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    outputs = [tensor for pair in beginning for tensor in pair if tensor.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [tensor.grad for pair in held for tensor in pair])
    return total


def shared_length(ids: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> int:
    """Leading tokens that all sequences share, ending early enough that each trained token is predicted after them."""
    length = min(len(row) for row in ids)
    same = torch.stack([row[:length] for row in ids]).eq(ids[0][:length]).all(0)
    trained = [int((row != IGNORED).nonzero()[0]) for row in labels if (row != IGNORED).any()]
    return max(0, min([int(same.long().cumprod(0).sum()), length - 1, *[first - 1 for first in trained]]))


def _keys_values(model: PreTrainedModel, beginning: torch.Tensor) -> KeysValues:
    if not len(beginning):
        return []
    with _products_in_dtype_of(model):
        cache = model.get_decoder()(input_ids=beginning[None], use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def _row_loss(model: PreTrainedModel, before: KeysValues, row: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed loss of one sequence behind the keys and values `before`; its first token is not predicted."""
    cache = DynamicCache()
    for i, (keys, values) in enumerate(before):
        cache.update(keys, values, layer_idx=i)
    kept = targets[1:] != IGNORED
    with _products_in_dtype_of(model):
        hidden = model.get_decoder()(input_ids=row[None], past_key_values=cache, use_cache=True).last_hidden_state[0]
        logits = model.get_output_embeddings()(hidden[:-1][kept])  # (trained tokens, vocabulary)
    return cross_entropy(logits.float(), targets[1:][kept], reduction="sum")


def _products_in_dtype_of(model: PreTrainedModel) -> torch.autocast:
    """Rounds a float32 adapter to the base's bfloat16 for each product, instead of widening every input to float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16)


def _causal_matmul(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention as plain matrix products, for training on CPUs.

    PyTorch's own kernel is written for inference: its backward pass takes five times as long as these products, which use
    the matrix units. Query heads that share a key head are stacked, so keys are never copied. The queries are the last
    ones of the keys; `attention_mask` is not needed and ignored.
    """
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    stack = heads // key_heads
    hidden = torch.full((queries, keys), float("-inf"), dtype=query.dtype).triu(keys - queries + 1).repeat(stack, 1)
    flat = (query * scaling).reshape(batch * key_heads, stack * queries, width)
    scores = torch.baddbmm(hidden.expand(len(flat), -1, -1), flat, key.reshape(len(flat), keys, width).mT)
    weights = torch.nn.functional.dropout(scores.softmax(-1), dropout)
    mixed = weights.bmm(value.reshape(len(flat), keys, width))
    return mixed.view(batch, heads, queries, width).transpose(1, 2), None


AttentionInterface.register(CPU_ATTENTION, _causal_matmul)
