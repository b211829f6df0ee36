"""The loss of a batch whose sequences all begin alike, with that beginning computed once.

Every trace starts with the same system prompt and tool list, about 40 % of its tokens with the small model. In a causal
model their keys and values don't depend on what follows, so one row computes them, the other rows share them, and the
gradients of all rows flow back into that one computation: the same loss and gradients up to rounding, on a third fewer
tokens. On top, logits are computed only where a token is trained, chunk by chunk, and once more in the backward pass;
with a vocabulary of 49,000 they would be the largest tensors of a step.

Limits: sequences must be padded at the right (then causality alone keeps padding out, and no mask is needed), and the
key-value cache excludes gradient checkpointing.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from stage1_sft.dataset import IGNORED

_WORTH_SHARING = 16  # tokens
_CHUNK = 128  # trained tokens whose logits exist at a time


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
    head = model.get_output_embeddings()

    def chunk_loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(head(hidden).float(), targets, reduction="sum")

    chunks = zip(hidden[:, :-1][kept].split(_CHUNK), targets[kept].split(_CHUNK), strict=True)
    total = torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()
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
