"""From a LoRA adapter to a plain Hugging Face folder, verified before it counts.

The adapter is added to the weights in float32 and the sum saved in the base's own dtype, with tokenizer, chat template and
generation config. The folder must then load again, differ from the base, and decide as the adapter does: on texts that
the adapter model wrote greedily, the merged model's choice is compared token by token (same text before it, so one
difference does not hide the rest). Rounding the merged weights to bfloat16 moves logits by a few hundredths, so a different
choice is let pass where the adapter model itself saw a near-tie; how many there were is reported, not hidden.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from shared.errors import UserError
from shared.prompts import TOOLS, opening_messages
from shared.records import Message
from stage1_sft.dataset import prompt_text
from stage1_sft.model_folder import check_model_folder, publish

PROBES: list[list[Message]] = [
    opening_messages(question)
    for question in ("How many customers are there?", "List the names of all albums.", "Which ward has the most beds?")
]
_NEW_TOKENS = 32  # greedy tokens compared for each prompt
_NEAR_TIE = 0.5  # logits between the adapter model's two best tokens; bfloat16 rounding of a merge moves them by ~0.1
_MAX_TIES = 0.1  # share of tokens that may differ at near-ties


@dataclass(frozen=True)
class Comparison:
    """Greedy choices of the merged model against those of the adapter model on the same texts."""

    tokens: int
    equal: int
    near_ties: int  # differing choices between tokens that the adapter model rated almost alike

    @property
    def agrees(self) -> bool:
        return self.equal + self.near_ties == self.tokens and self.near_ties <= _MAX_TIES * self.tokens


def adapter_base(adapter: Path) -> str:
    """The base model that an adapter folder names. Raises UserError when the folder is no adapter."""
    try:
        settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"{adapter} has no readable adapter_config.json, so it is not a LoRA adapter folder."
        ) from error
    if not (adapter / "adapter_model.safetensors").exists():
        raise UserError(f"{adapter} has no adapter_model.safetensors; the training that made it did not finish.")
    return str(settings.get("base_model_name_or_path") or "")


def merge(base: Path, adapter: Path, target: Path, prompts: Sequence[list[Message]] = ()) -> dict[str, float]:
    """Write the merged model to `target` and return the verification figures.

    `prompts` are conversations that end before an assistant turn; the fixed PROBES are always compared too. Raises
    UserError when the result does not verify; `target` appears only when it does.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = [prompt_text(messages, TOOLS, tokenizer) for messages in [*PROBES, *prompts]]
    dtype = _saved_dtype(base)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    written = _greedy(adapted.to(device), tokenizer, texts)
    before = {name: value.to("cpu", dtype) for name, value in adapted.get_base_model().state_dict().items()}
    with publish(target) as partial:
        merged = adapted.merge_and_unload(safe_merge=True)
        merged.to(dtype).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        del merged, adapted
        check_model_folder(partial, "the merged model")
        reloaded = AutoModelForCausalLM.from_pretrained(partial, dtype=torch.float32)
        change = _largest_change(before, reloaded.state_dict())
        comparison = _compare(reloaded.to(device), written)
        _judge(change, comparison, adapter)
    return {
        "largest_weight_change": round(change, 6),
        "greedy_tokens": comparison.tokens,
        "greedy_equal": comparison.equal,
        "greedy_near_ties": comparison.near_ties,
    }


def _judge(change: float, comparison: Comparison, adapter: Path) -> None:
    if change == 0.0:
        raise UserError(
            f"Merging {adapter} changed no weight, so nothing was trained; raise sft.learning_rate or epochs."
        )
    if not comparison.agrees:
        raise UserError(
            f"The model merged from {adapter} does not decide as the adapter does ({comparison.equal} of "
            f"{comparison.tokens} greedy tokens equal, {comparison.near_ties} near-ties), so it is not kept; the adapter "
            "folder is intact: merge it again, or train again with another sft.learning_rate."
        )


def _saved_dtype(folder: Path) -> torch.dtype:
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    return getattr(torch, str(name).removeprefix("torch."))


Written = tuple[torch.Tensor, int, torch.Tensor]
"""Token ids (prompt + answer), number of prompt tokens, logits of each answer token with shape (answer, vocabulary)."""


def _greedy(model: Any, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Written]:
    written = []
    for text in texts:
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
        ids = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=_NEW_TOKENS, do_sample=False,
            temperature=None, top_p=None, top_k=None, repetition_penalty=1.0, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        written.append((ids, prompt.shape[1], _answer_logits(model, ids, prompt.shape[1])))
    return written


@torch.inference_mode()
def _answer_logits(model: Any, ids: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
    return model(input_ids=ids).logits[0, prompt_tokens - 1 : -1].float().cpu()


def _compare(merged: PreTrainedModel, written: Sequence[Written]) -> Comparison:
    tokens = equal = near_ties = 0
    for ids, prompt_tokens, logits in written:
        expected = logits.argmax(-1)
        chosen = _answer_logits(merged, ids, prompt_tokens).argmax(-1)
        gaps = logits.gather(-1, expected[:, None])[:, 0] - logits.gather(-1, chosen[:, None])[:, 0]
        tokens += len(expected)
        equal += int((chosen == expected).sum())
        near_ties += int(((chosen != expected) & (gaps < _NEAR_TIE)).sum())
    return Comparison(tokens, equal, near_ties)


def _largest_change(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all weights; names of wrapped layers are read as PEFT writes them."""
    plain = {name.replace(".base_layer.", "."): value for name, value in before.items() if ".lora_" not in name}
    return max((value.cpu().float() - plain[name].float()).abs().max().item() for name, value in after.items())
