"""A model folder as one GGUF file, verified by loading it back.

The package `gguf` names tensors and keys, quantizes and writes; the format is specified in ggml's docs/gguf.md. Two
architectures are trained here: Llama (SmolLM2) and Qwen2. Vectors stay in float32, as llama.cpp expects them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from shared.errors import UserError

ARCHITECTURES = {"LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2}
FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
_TYPES = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
LEAST_AGREEMENT = {"f16": 0.98, "q8_0": 0.9}  # share of the checkpoint's greedy tokens; half precision decides ties


def write_gguf(model: Path, target: Path, precision: str) -> None:
    """Write the model in the folder `model` to `target` as "f16" or "q8_0".

    Raises UserError for an architecture, a tokenizer or a position scaling that is not supported.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    named = (config.get("architectures") or ["none"])[0]
    if named not in ARCHITECTURES or config.get("rope_scaling"):
        what = f"architecture {named}" if named not in ARCHITECTURES else "scaled rotary positions"
        raise UserError(
            f"{model} has {what}; a GGUF file can be made of {' and '.join(ARCHITECTURES)} with plain rotary "
            "positions: convert this one with llama.cpp's own script."
        )
    architecture = ARCHITECTURES[named]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_size = config.get("head_dim") or hidden // heads
    writer.add_name(model.name)
    writer.add_file_type(FILE_TYPES[precision])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, model, config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tied = config.get("tie_word_embeddings", False)
    for name, weight in _tensors(model):
        if tied and name == "lm_head.weight":
            continue
        if architecture == gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _adjacent_pairs(weight, head_size)
        kind = _TYPES[precision] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        if kind == gguf.GGMLQuantizationType.Q8_0 and weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = gguf.GGMLQuantizationType.F16  # its rows do not fill whole blocks
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise UserError(f"{model} holds the tensor {name}, which {named} does not have; make the model again.")
        writer.add_tensor(stored, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every weight of a model folder in float32, by name."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                yield name, weights.get_tensor(name).float().numpy()


def _adjacent_pairs(weight: NDArray[np.float32], head_size: int) -> NDArray[np.float32]:
    """The rows of a query or key projection in the order of GGUF's Llama.

    Hugging Face rotates row i of a head with row i + head_size / 2; GGUF's Llama rotates neighbours.
    """
    halves = weight.reshape(-1, 2, head_size // 2, weight.shape[1])  # head, half, pair, input
    return halves.transpose(0, 2, 1, 3).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, size: int) -> None:
    """Tokens, merges, special tokens and chat template; rows of the embedding without a token become unused ones."""
    tokenizer: dict[str, Any] = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    parts = tokenizer["pre_tokenizer"] or {}
    parts = parts.get("pretokenizers") or [parts]
    splitter = _splitter(parts)
    if tokenizer["model"]["type"] != "BPE" or splitter is None:
        raise UserError(
            f"{model} splits text in a way that has no known name in GGUF files; convert this model with llama.cpp's "
            "own script."
        )
    tokens = [f"[PAD{place}]" for place in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for token, place in tokenizer["model"]["vocab"].items():
        tokens[place], types[place] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_add_bos_token(False)  # the chat template writes every special token
    gguf.SpecialVocab(model, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def _splitter(parts: Sequence[dict[str, Any]]) -> str | None:
    """llama.cpp's name for how a tokenizer splits text before the merges, None when it has none.

    The greedy tokens of a prompt cannot show a wrong name: they are compared behind token ids.
    """
    *before, last = parts
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    splits = last.get("use_regex", True)
    if splits and not before:
        return "gpt-2"
    if splits and before == [{"type": "Digits", "individual_digits": True}]:
        return "smollm"
    if not splits and [part.get("pattern") for part in before] == [{"Regex": PRETOKENIZE_REGEX}]:
        return "qwen2"
    return None


def greedy_tokens(model: Path, prompts: Sequence[Sequence[int]], length: int = 32) -> list[list[int]]:
    """What the model folder writes greedily behind each prompt, at most `length` tokens."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    written = []
    for prompt in prompts:
        output = loaded.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, num_beams=1)
        written.append(output[0, len(prompt) :].tolist())
    return written


def agreement(file: Path, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]]) -> float:
    """Share of the tokens in `written` that the GGUF file, loaded back and dequantized, would choose greedily too."""
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    same = []
    for prompt, tokens in zip(prompts, written, strict=True):
        with torch.inference_mode():
            logits = loaded(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        same += (logits.argmax(-1) == torch.tensor(tokens)).tolist()
    return sum(same) / len(same)
