"""From a LoRA adapter to a plain Hugging Face folder, verified before it counts.

The adapter is added to the weights in float32; the sum is rounded to the base's own dtype and saved with tokenizer,
chat template and generation config. Three things must hold, or nothing is left behind:

1. before rounding, the merged model chooses the same tokens as the adapter model on texts that the adapter model wrote
   greedily (compared token by token with the same text before each, so one difference does not hide the rest);
2. the saved folder loads again and holds exactly the rounded weights, bit for bit;
3. the weights differ from the base's.

Rounding to bfloat16 itself moves logits, and where two tokens are rated almost alike it changes the choice. That is no
fault of the merge and fails it only when it is frequent; how often it happened is among the figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.agent.prompts import TOOLS, opening_messages
from shared.errors import UserError
from shared.models.folder import check_model_folder, publish
from shared.records import Message
from stage1_sft.dataset import render

PROBES: list[list[Message]] = [
    opening_messages(question) for question in ("How many customers are there?", "Which ward has the most beds?")
]
_NEW_TOKENS = 32  # greedy tokens compared for each prompt
_TIE = 0.01  # logits; float32 sums in another order differ by less than a thousandth
_MIN_SAME_ROUNDED = 0.8  # of the greedy choices, with the rounded weights
_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}

Weights = Mapping[str, torch.Tensor]
Written = tuple[torch.Tensor, torch.Tensor]
"""Token ids of a prompt and its answer, shape (1, tokens), and the logits of each answer token, (answer,
vocabulary)."""


def merge(base: Path, adapter: Path, target: Path, prompts: Sequence[list[Message]] = ()) -> dict[str, float]:
    """Write the merged model to `target` and return the verification figures.

    `prompts` are conversations that end before an assistant turn; the fixed PROBES are always compared too. Raises
    UserError when the result does not verify; `target` appears only when it does.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(base)
    start = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    adapted = PeftModel.from_pretrained(start, adapter).to(device)
    written: list[Written] = []
    for messages in [*PROBES, *prompts]:
        text = render(messages, TOOLS, tokenizer, prompt=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].to(device)
        ids = adapted.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            **_GREEDY,
        )
        written.append((ids, _answer_logits(adapted, ids, ids.shape[1] - prompt.shape[1])))
    merged = adapted.merge_and_unload(safe_merge=True)
    exact = _share_of_same_choices(merged, written, tie=_TIE)
    if exact < 1.0:
        raise UserError(
            f"The model merged from {adapter} does not choose the adapter's tokens ({exact:.1%} equal), so it is not "
            "kept; does the adapter belong to this base model?"
        )
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    with publish(target) as partial:
        rounded = merged.to("cpu", getattr(torch, dtype))
        for ends in (rounded.config, rounded.generation_config):  # a base model's end a document, not a turn
            known = ends.eos_token_id if isinstance(ends.eos_token_id, list) else [ends.eos_token_id]
            if tokenizer.eos_token_id not in known:
                ends.eos_token_id = tokenizer.eos_token_id
        rounded.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        check_model_folder(partial, "the merged model")
        saved = AutoModelForCausalLM.from_pretrained(partial, dtype="auto")
        change = check_weights(saved.state_dict(), rounded.state_dict(), before, adapter)
        same = _share_of_same_choices(saved.float().to(device), written, tie=0.0)
        if same < _MIN_SAME_ROUNDED:
            raise UserError(
                f"Rounding the model merged from {adapter} to {dtype} changes {1 - same:.0%} of its choices, so it "
                "is not kept; train with a lower sft.learning_rate."
            )
    return {"largest_weight_change": round(change, 6), "greedy_same_merged": exact, "greedy_same_saved": round(same, 4)}


def _answer_logits(model: Any, ids: torch.Tensor, answer_tokens: int) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids).logits[0, -answer_tokens - 1 : -1].float().cpu()


def _share_of_same_choices(model: Any, written: Sequence[Written], *, tie: float) -> float:
    """Share of the written tokens at which `model` prefers the same one, or one at most `tie` logits below it."""
    same: list[bool] = []
    for ids, logits in written:
        chosen = _answer_logits(model, ids, len(logits)).argmax(-1)
        same += (logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0] <= tie).tolist()
    return sum(same) / len(same)


def check_weights(saved: Weights, rounded: Weights, before: Weights, adapter: Path) -> float:
    """The largest absolute change from the base; raises UserError when it is 0 or the folder holds other weights."""
    if any(not torch.equal(value, rounded[name]) for name, value in saved.items()):
        raise UserError(f"The weights saved for {adapter} read back differently; check the disk and merge again.")
    change: float = max((value.float() - before[name].float()).abs().max().item() for name, value in saved.items())
    if change == 0.0:
        raise UserError(
            f"Merging {adapter} changed no weight: nothing was trained; raise sft.learning_rate or sft.epochs."
        )
    return change
