"""From a VERL checkpoint to a plain Hugging Face folder, verified before it counts.

VERL 0.8.0 saves one shard per rank with PEFT's parameter names and has a merger of its own, which for LoRA writes the
base weights and leaves the adapter beside them. Here the adapter is added to the weights (W + alpha/r * B A, Hu et al.
2021, in float32) and the sum is rounded as for the rollout server (rounding.py). The result must differ from the start
model, give the probe text the log-probabilities that the trainer gave it at that step, and choose the tokens that the
rollout server then chose greedily.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import UserError
from shared.models.folder import publish
from stage2_grpo.training.rounding import UpdateShare, round_stochastically

if TYPE_CHECKING:
    import torch

_TOLERANCE = 0.08  # nats per token; bfloat16 rounding of the weights alone moves the 135M model by about 0.01
_NEAR_TIE = 0.25  # nats: the server rounds its logits to bfloat16, whose steps are 0.125 where logits lie above 16


def export(
    actor: Path, start_model: Path, target: Path, *, lora_rank: int, lora_alpha: int, seed: int, probe: Path
) -> dict[str, float]:
    """Write the trained policy to `target`; returns the figures of its verification, which raises UserError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = merge_lora(load_shards(actor), lora_alpha / lora_rank if lora_rank else 0.0)
    model = AutoModelForCausalLM.from_pretrained(start_model, dtype=torch.bfloat16)
    before = model.state_dict()
    if unknown := sorted(set(state) - set(before)):
        raise UserError(
            f"The checkpoint holds parameters that the start model lacks ({unknown[0]}); was it trained from "
            "another model?"
        )
    figures = {"largest_weight_change": max((state[name] - before[name].float()).abs().max().item() for name in state)}
    if not figures["largest_weight_change"] > 0.0:
        raise UserError(
            f"The exported weights of {actor} equal the start model's: nothing was trained; see the step lines."
        )
    share, rounded = UpdateShare(start_model), {}
    for name, weight in state.items():
        rounded[name] = round_stochastically(weight, name, seed)
        share.add(name, weight, rounded[name])
    figures["arrived_share"] = share.value or 0.0
    model.load_state_dict(rounded, strict=False)
    kept = f"the checkpoint {actor} is kept, do not use the export."
    with publish(target) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(start_model).save_pretrained(partial)
        figures |= _probe_figures(partial, probe)
        if not figures["probe_gap"] <= _TOLERANCE:  # also when it is NaN
            raise UserError(
                f"The exported model differs from the trained policy by {figures['probe_gap']:.3f} nats per token on "
                f"the probe text (limit {_TOLERANCE}); {kept}"
            )
        if not figures["greedy_regret"] <= _NEAR_TIE:
            raise UserError(
                "The rollout server's greedy tokens are not the exported model's: one of them lies "
                f"{figures['greedy_regret']:.3f} nats below its best (limit {_NEAR_TIE}, for ties that rounding "
                f"decides); {kept}"
            )
    return figures


def load_shards(actor: Path) -> dict[str, torch.Tensor]:
    """The full state dict of a VERL FSDP checkpoint: the ranks' shards, joined along the dimension of the split."""
    import torch
    from torch.distributed.tensor import DTensor

    files = sorted(actor.glob("model_world_size_*_rank_*.pt"), key=lambda file: int(file.stem.rsplit("_", 1)[1]))
    if not files:
        raise UserError(f"{actor} holds no model shards; the checkpoint is incomplete, train again.")
    shards: list[dict[str, Any]] = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
    state = {}
    for name, first in shards[0].items():
        if isinstance(first, DTensor):
            placement: Any = first.placements[-1]
            local = [shard[name].to_local() for shard in shards]
            state[name] = torch.cat(local, dim=placement.dim) if placement.is_shard() else local[0]
        else:
            state[name] = first  # one rank: VERL saved the whole tensor
    return state


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


def _probe_figures(model_folder: Path, probe: Path) -> dict[str, float]:
    """How the exported model compares with what was measured when the checkpoint was saved.

    `probe_gap`: mean absolute difference (nats per token) to the trainer's log-probabilities of the probe's response;
    `greedy_equal`: share of the rollout server's greedy tokens that are the model's own choice; `greedy_regret`: how
    far (nats) the others lie below it at most.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    saved = json.loads(probe.read_text(encoding="utf-8"))
    figures = {}
    for text in ("response", "greedy"):
        prompt, tokens = saved["prompt"], torch.tensor([saved["prompt"] + saved[text]])
        with torch.inference_mode():
            log_probs = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        chosen, best = log_probs.gather(-1, tokens[0, len(prompt) :, None])[:, 0], log_probs.max(-1).values
        if text == "response":
            figures["probe_gap"] = (chosen - torch.tensor(saved["log_probs"])).abs().mean().item()
        else:
            figures["greedy_equal"] = (chosen == best).float().mean().item()
            figures["greedy_regret"] = (best - chosen).max().item()
    return figures
