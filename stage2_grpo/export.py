"""From a VERL checkpoint to a plain Hugging Face folder, verified before it counts.

VERL 0.8.0 saves one shard per rank with PEFT's parameter names and has a merger of its own, which for LoRA writes the
base weights and leaves the adapter beside them. Here the adapter is added to the weights (W + alpha/r * B A, Hu et al.
2021, in float32), and the result must reproduce the log-probabilities that the trainer gave the probe text of the last
step and must differ from the start model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import UserError
from shared.model_folder import publish

if TYPE_CHECKING:
    import torch

PROBE_FILE = "probe.json"
_TOLERANCE = 0.08  # nats per token; bfloat16 rounding of the weights alone moves the 135M model by about 0.01


def newest_checkpoint(checkpoints: Path) -> tuple[int, Path] | None:
    """(step, actor folder) of the last completely saved checkpoint; VERL writes the marker file last."""
    try:
        step = int((checkpoints / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return step, checkpoints / f"global_step_{step}" / "actor"


def export(
    actor: Path, start_model: Path, target: Path, *, lora_rank: int, lora_alpha: int, probe: Path
) -> dict[str, float]:
    """Write the trained policy to `target`; returns the verification figures. Raises UserError when it does not verify."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = merge_lora(load_shards(actor), lora_alpha / lora_rank if lora_rank else 0.0)
    model = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.bfloat16)
    changed = _largest_change(model.state_dict(), state)
    model.load_state_dict({name: value.to(torch.bfloat16) for name, value in state.items()}, strict=False)
    with publish(target) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(start_model).save_pretrained(partial)
        gap = _probe_gap(AutoModelForCausalLM.from_pretrained(partial, dtype=torch.float32), probe)
        _judge(actor, changed, gap)
    return {"largest_weight_change": changed, "probe_gap": gap}


def _judge(actor: Path, changed: float, gap: float) -> None:
    if not changed > 0.0:
        raise UserError(
            f"The exported weights of {actor} equal the start model's: nothing was trained; see the step lines."
        )
    if not gap <= _TOLERANCE:  # also when it is NaN
        raise UserError(
            f"The exported model differs from the trained policy by {gap:.3f} nats per token on the probe text "
            f"(limit {_TOLERANCE}); the checkpoint {actor} is kept, do not use the export."
        )


def load_shards(actor: Path) -> dict[str, torch.Tensor]:
    """The full state dict of a VERL FSDP checkpoint: rank shards joined along the dimension they were split."""
    import torch

    files = sorted(actor.glob("model_world_size_*_rank_*.pt"), key=lambda file: int(file.stem.rsplit("_", 1)[1]))
    if not files:
        raise UserError(f"{actor} holds no model shards; the checkpoint is incomplete, train again.")
    shards = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
    return {name: _join([shard[name] for shard in shards]) for name in shards[0]}


def _join(parts: list[Any]) -> Any:
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(parts[0], DTensor):
        return parts[0]  # one rank: VERL saved the whole tensor
    placement = parts[0].placements[-1]
    local = [part.to_local() for part in parts]
    return torch.cat(local, dim=placement.dim) if placement.is_shard() else local[0]


def merge_lora(state: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Plain parameter names and float32 weights, with every adapter added to its base weight."""
    merged = {}
    for name, value in state.items():
        if "lora_" in name:
            continue
        plain = re.sub(r"^(_fsdp_wrapped_module\.|base_model\.model\.)+", "", name).replace(".base_layer.", ".")
        weight = value.float()
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            a, b = (state[f"{stem}.lora_{side}.default.weight"].float() for side in "AB")
            weight = weight + scale * (b @ a)
        merged[plain] = weight
    return merged


def _largest_change(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    unknown = sorted(set(after) - set(before))
    if unknown:
        raise UserError(
            f"The checkpoint holds parameters that the start model lacks ({unknown[0]}); was it trained from another model?"
        )
    return max((after[name] - before[name].float()).abs().max().item() for name in after)


def _probe_gap(model: Any, probe: Path) -> float:
    """Mean absolute difference (nats per token) to the trainer's log-probabilities of the probe's response tokens."""
    import torch

    saved = json.loads(probe.read_text(encoding="utf-8"))
    tokens = torch.tensor([saved["prompt"] + saved["response"]])
    with torch.inference_mode():
        log_probs = model(tokens).logits[0, :-1].float().log_softmax(-1)
    chosen = log_probs.gather(-1, tokens[0, 1:, None])[-len(saved["response"]) :, 0]
    return (chosen - torch.tensor(saved["log_probs"])).abs().mean().item()
