"""What stage 2 changes in VERL's FSDP engine, on GPU and CPU alike.

1. Log-probabilities and entropy are computed only where a token is trained. VERL computes logits, log-probabilities and
   entropy of the whole vocabulary for every token of prompt and observations, in bfloat16, and one token after the
   other where flash_attn is missing. Here the language-model head runs on the trained places alone. What follows runs
   in float32, chunk by chunk, with recomputation in the backward pass. The entropy has a gradient only if its
   coefficient is not 0.
2. The attention mask says which tokens are padding, also where none is. Without a mask transformers 4.57 looks for
   packed rows and makes a full one, which keeps attention from its fast causal path.
3. Rows without an advantage (a group with identical outcomes) are left out of the update, unless entropy is trained.
4. Merged weights are rounded stochastically for the rollout server (rounding.py), and the share of the update that
   arrives is reported in `weight_sync.json`, in the stage's folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from shared.runs.manifest import write_json
from stage2_grpo.rollouts.agent import SETTINGS_FILE, AgentSettings
from stage2_grpo.training.import_hooks import replace
from stage2_grpo.training.rounding import UpdateShare, round_stochastically

FOLDER = "FIRSTCALL_GRPO_FOLDER"  # environment variable: the stage's folder
SYNC_FILE = "weight_sync.json"
CHUNK = 512  # trained tokens whose logits are held in float32 at a time


def patch(module: Any) -> None:
    """Apply to `verl.workers.engine.fsdp.transformer_impl`."""
    replace(module.FSDPEngineWithLMHead, "forward_step", forward_step)
    for name, wrap in (("forward_backward_batch", _without_flat_rows), ("get_per_tensor_param", _rounded)):
        replace(module.FSDPEngine, name, wrap(module, getattr(module.FSDPEngine, name)))


def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[Any, dict[str, Any]]:
    """Loss and outputs of one micro batch; the outputs are 0 where no token is trained."""
    import torch
    from verl.utils.device import get_device_id, get_device_name

    micro_batch = micro_batch.to(get_device_id())
    mixed = nullcontext()
    if self._autocast_dtype != torch.float32:
        mixed = torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)
    train_entropy = loss_function is not None and loss_function.keywords["config"].entropy_coeff != 0
    with mixed:
        log_probs, entropy = trained_log_probs(self.module, micro_batch, train_entropy=train_entropy)
        output = {"log_probs": log_probs, "entropy": entropy}
        loss, metrics = torch.tensor(1.0, device=get_device_name()), {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=group)
    return loss, {"model_output": output, "loss": loss.detach().item(), "metrics": metrics}


def trained_log_probs(model: Any, batch: Any, *, train_entropy: bool) -> tuple[Any, Any]:
    """Log-probability of the next token and entropy, nested tensors [row, token], where the next token is trained."""
    import torch
    from torch.utils.checkpoint import checkpoint

    lengths = batch["input_ids"].offsets().diff().tolist()
    longest = max(lengths)
    tokens, places = (torch.nested.to_padded_tensor(batch[name], 0) for name in ("input_ids", "position_ids"))
    loss_mask = batch["loss_mask"]
    prompts = batch["attention_mask"].sum(-1) - batch["attention_mask"][:, -loss_mask.shape[-1] :].sum(-1)
    trained = torch.zeros_like(tokens, dtype=torch.bool)  # [row, token]: whether the next token is trained
    for row, prompt in enumerate(prompts.tolist()):
        mask = loss_mask[row, : lengths[row] - prompt].bool()
        trained[row, prompt - 1 : prompt - 1 + len(mask)] = mask
    kept = trained.any(0).nonzero()[:, 0]
    mask = torch.arange(longest, device=tokens.device)[None] < torch.tensor(lengths, device=tokens.device)[:, None]
    logits = model(
        input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=False, logits_to_keep=kept
    ).logits
    row_of, column_of = trained[:, kept].nonzero(as_tuple=True)
    labels = tokens[row_of, kept[column_of] + 1]
    temperature = torch.as_tensor(batch["temperature"], dtype=torch.float32, device=tokens.device).expand(len(lengths))

    def figures(logits: Any, labels: Any, temperature: Any) -> tuple[Any, Any]:
        all_log_probs = (logits.float() / temperature[:, None]).log_softmax(-1)
        source = all_log_probs if train_entropy else all_log_probs.detach()
        return all_log_probs.gather(-1, labels[:, None])[:, 0], -(source.exp() * source).sum(-1)

    needed = logits[0] if len(lengths) == 1 else logits[row_of, column_of]
    chunks = zip(*(values.split(CHUNK) for values in (needed, labels, temperature[row_of])), strict=True)
    parts = [checkpoint(figures, *chunk, use_reentrant=False) for chunk in chunks]
    where, offsets = (row_of, kept[column_of]), batch["input_ids"].offsets()
    nested = []
    for values in zip(*parts, strict=True):
        whole = torch.zeros(tokens.shape, device=tokens.device).index_put(where, torch.cat(values))
        flat = torch.cat([whole[row, :length] for row, length in enumerate(lengths)])
        nested.append(torch.nested.nested_tensor_from_jagged(flat, offsets))
    return nested[0], nested[1]


def _without_flat_rows(module: Any, original: Any) -> Any:
    """Leave rows whose advantages are all 0 out of an update; they have no gradient."""

    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if not forward_only and loss_function.keywords["config"].entropy_coeff == 0:
            torch, group = module.torch, self.get_data_parallel_group()
            learns = ((data["advantages"] * data["loss_mask"]) != 0).any(-1)
            micro = data["micro_batch_size_per_gpu"]
            count = torch.tensor(max(1, math.ceil(int(learns.sum()) / micro)) * micro, device=learns.device)
            # Every rank needs the same number of micro batches, else FSDP's collectives would wait for each other.
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=group)
            order = torch.argsort(learns.int(), descending=True, stable=True)[: int(count)]
            data = module.tu.index_select_tensor_dict(data, order.sort().values)
        return original(self, data, loss_function, forward_only)

    return forward_backward_batch


def _rounded(module: Any, original: Any) -> Any:
    """Send the merged weights in bfloat16, rounded stochastically from float32."""

    def get_per_tensor_param(self: Any, **options: Any) -> tuple[Any, Any]:
        if self._is_lora and not self.model_config.lora.get("merge", False):
            weights, adapter = original(self, **options)  # adapter mode, which stage 2 does not use
            return weights, adapter
        module.load_fsdp_model_to_gpu(self.module)
        merged = module.merged_lora_context(self.module, backup_adapters=True) if self._is_lora else nullcontext()
        with merged:
            weights = module.normalize_peft_param_name(self.module.state_dict())
        weights = module.convert_weight_keys(weights, getattr(self.module, "_fsdp_wrapped_module", self.module))
        if self._is_offload_param:
            module.offload_fsdp_model_to_cpu(self.module)
        return _send(module, weights, self.model_config.local_path, report=self.rank == 0), None

    return get_per_tensor_param


def _send(module: Any, weights: dict[str, Any], start_model: str, *, report: bool) -> Iterator[tuple[str, Any]]:
    folder, share = Path(os.environ[FOLDER]), UpdateShare(Path(start_model))
    seed = AgentSettings.load(folder / SETTINGS_FILE).config.seed
    for name, weight in weights.items():
        whole = weight.to(module.get_device_id()).full_tensor() if isinstance(weight, module.DTensor) else weight
        rounded = round_stochastically(whole, name, seed)
        if report:
            share.add(name, whole, rounded)
        yield name, rounded
    if report:
        write_json(folder / SYNC_FILE, {"arrived_share": share.value})
