"""The loss of a batch whose sequences all begin alike, with that beginning computed once.

Every trace starts with the same system prompt and tool list, about 40 % of its tokens with the small model. In a causal
model their keys and values don't depend on what follows, so one row computes them, the other rows share them, and the
gradients of all rows flow back into that one computation: the same loss and gradients up to rounding, on a third fewer
tokens. On top, logits are computed only where a token is trained; with a vocabulary of 49,000 they are the largest
tensors of a step.

Limits: sequences must be padded at the right (then causality alone keeps padding out, and no mask is needed), and the
key-value cache excludes gradient checkpointing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache

from stage1_sft.dataset import IGNORED

CPU_ATTENTION = "causal_matmul"
_WORTH_SHARING = 16  # tokens


def token_loss(
    model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor, tokens: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Cross-entropy in nats over the trained tokens, a scalar: their mean, or their sum divided by `tokens`.

    `model` is a causal language model with a decoder and an output head; ids and labels have shape (batch, tokens).
    """
    shared = _shared_length(input_ids, labels)
    hidden = _hidden_states(model, input_ids, shared)  # (batch, tokens - shared, width)
    targets = labels[:, shared + 1 :]
    kept = targets != IGNORED
    logits = model.get_output_embeddings()(hidden[:, :-1][kept])
    total = cross_entropy(logits.float(), targets[kept], reduction="sum")
    return total / (kept.sum() if tokens is None else tokens)


def _shared_length(input_ids: torch.Tensor, labels: torch.Tensor) -> int:
    """Leading tokens that all rows share, ending early enough that each trained token is predicted after them."""
    differing = (input_ids != input_ids[:1]).any(0).nonzero()
    trained = (labels != IGNORED).any(0).nonzero()
    ends = [int(columns[0]) for columns in (differing, trained - 1) if len(columns)]
    shared = min([*ends, input_ids.shape[1] - 1])
    return shared if len(input_ids) > 1 and shared >= _WORTH_SHARING else 0


def _hidden_states(model: PreTrainedModel, input_ids: torch.Tensor, shared: int) -> torch.Tensor:
    decoder = model.get_decoder()
    if not shared:
        return decoder(input_ids=input_ids, use_cache=False).last_hidden_state
    prefix = decoder(input_ids=input_ids[:1, :shared], use_cache=True).past_key_values
    cache = DynamicCache()
    for i, layer in enumerate(prefix.layers):
        rows = [tensor.expand(len(input_ids), -1, -1, -1) for tensor in (layer.keys, layer.values)]
        cache.update(*rows, layer_idx=i)
    return decoder(input_ids=input_ids[:, shared:], past_key_values=cache, use_cache=True).last_hidden_state


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

    PyTorch's own kernel is written for inference: its backward pass takes five times as long as these products, which
    use the matrix units. Query heads that share a key head are stacked, so keys are never copied. The queries are the
    last ones of the keys; `attention_mask` is not needed and ignored."""
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
