"""Sizes of a model, read from its config.json and the headers of its safetensors files; no weight is loaded."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shared.errors import UserError


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies."""

    file: Path
    dtype: str  # safetensors' own name, e.g. BF16
    shape: tuple[int, ...]
    start: int  # byte in the file
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self) -> bytes:
        """Its raw bytes."""
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            return stream.read(self.end - self.start)


@dataclass(frozen=True)
class ModelShape:
    """What memory, disk and context arithmetic needs to know of a model."""

    tensors: dict[str, Tensor]
    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int  # tokens the model was built for
    tied: bool  # input and output embedding are one tensor

    @cached_property
    def parameters(self) -> int:
        """Weights, a tied embedding counted once."""
        return sum(tensor.size for tensor in self.tensors.values())

    def adapter_parameters(self, rank: int) -> int:
        """Weights of a LoRA adapter of this rank on every linear layer but the output."""
        pairs = [t.shape for name, t in self.tensors.items() if len(t.shape) == 2 and _is_linear(name)]
        return sum(rank * (rows + columns) for rows, columns in pairs)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache for one token, at two bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`; raises UserError for a folder that is not in the usual Hugging Face form."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            tensors=read_tensors(folder),
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config.get("intermediate_size") or 4 * hidden),
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            max_positions=int(config.get("max_position_embeddings") or 2**31),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"The sizes of model {folder} cannot be read ({error!r}); is config.json complete?") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files by name; raises UserError when there is none or one is damaged."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= _header(file)
        except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error!r}); make or copy the model again.") from error
    if not tensors:
        raise UserError(f"Model folder {folder} holds no safetensors file; save the model in that form.")
    return tensors


def _header(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        entries: dict[str, Any] = json.loads(stream.read(length))
    data = 8 + length
    tensors = {
        name: Tensor(file, entry["dtype"], tuple(entry["shape"]), *(data + offset for offset in entry["data_offsets"]))
        for name, entry in entries.items()
        if name != "__metadata__"
    }
    if tensors and max(tensor.end for tensor in tensors.values()) > file.stat().st_size:
        raise ValueError("the file ends before its last tensor")
    return tensors


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and "embed" not in name and not name.startswith("lm_head")
