"""Model folders on disk: what makes one complete, and how one appears all at once.

A folder under its final name is always finished: it is built beside its place as `<name>.partial` and renamed last, so
a killed process leaves nothing that could be taken for a model. Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from shared.errors import UserError

TEMPLATE_FILE = "chat_template.jinja"


def tool_template() -> str:
    """Our ChatML chat template, whose tool calls read exactly as `shared.tool_calls.render_turn` writes them."""
    return (Path(__file__).parent / "chatml_tools.jinja").read_text(encoding="utf-8")


@contextlib.contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `target` (replacing an older one) only when the block ends well."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


def local_path(named: str, setting: str = "model") -> Path:
    """The path that a setting names, `~` expanded; raises UserError for the home of an unknown user."""
    try:
        return Path(named).expanduser()
    except RuntimeError:
        raise UserError(
            f"{setting} {named!r} starts in the home of a user who does not exist; correct the path."
        ) from None


def is_adapter(folder: Path) -> bool:
    """True for a folder that holds a PEFT adapter instead of a whole model."""
    return (folder / "adapter_config.json").exists() and not _has_weights(folder)


def adapter_base(adapter: Path) -> str:
    """The base model that an adapter folder names, or "". Raises UserError when the folder is no adapter."""
    try:
        settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"{adapter} has no readable adapter_config.json, so it is not a LoRA adapter folder."
        ) from error
    if not (adapter / "adapter_model.safetensors").exists():
        raise UserError(f"{adapter} has no adapter_model.safetensors; the training that made it did not finish.")
    return str(settings.get("base_model_name_or_path") or "")


def check_model_folder(folder: Path, setting: str = "model") -> None:
    """Raise UserError unless `folder` is a whole Hugging Face model: config, weights and tokenizer.

    `setting` names where the path came from, for the message.
    """
    if is_adapter(folder):
        raise UserError(
            f"{setting} {folder} is a LoRA adapter, not a whole model; merge it first with "
            f"`python -m stage1_sft merge {folder} --out FOLDER` and give that FOLDER."
        )
    if not (folder / "config.json").exists():
        raise UserError(f"{setting} {folder} has no config.json, so it is not a Hugging Face model folder.")
    if not _has_weights(folder):
        raise UserError(
            f"{setting} {folder} has no complete weights (model.safetensors or its shards); the copy or "
            "training that made it did not finish: make it again."
        )
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"{setting} {folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json into it.")


def _has_weights(folder: Path) -> bool:
    for index in folder.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return bool(shards) and all((folder / shard).exists() for shard in shards)
        except (ValueError, TypeError, KeyError, AttributeError):
            return False  # a damaged index names no shards
    return any((folder / name).exists() for name in ("model.safetensors", "pytorch_model.bin"))
