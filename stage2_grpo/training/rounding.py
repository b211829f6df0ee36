"""Rounding trained weights to bfloat16 without losing small updates.

The start model lies on the bfloat16 grid. A LoRA update is often smaller than half a step of that grid, so rounding W +
BA to nearest returns W for most weights: 85 to 90 % of a small update never reaches the rollout server or the export.
Rounding up with a probability equal to the weight's distance from the lower grid point keeps the update on average
(stochastic rounding).

The random threshold of a weight depends only on its tensor's name, its place and the seed. So the same policy is always
rounded to the same weights, on any device: a server, its successor after a restart, and the export all agree.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 22  # weights at a time, to keep temporary memory small
_LOW_BITS = 0xFFFF  # what bfloat16 drops of a float32


def round_stochastically(weight: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    """The float32 `weight` in bfloat16, each element rounded up or down at its own fixed threshold."""
    import torch

    start = zlib.crc32(f"{seed} {name}".encode())
    bits = weight.contiguous().view(torch.int32).flatten()
    if not (bits & _LOW_BITS).any():  # already on the grid
        return weight.to(torch.bfloat16)
    rounded = torch.empty_like(bits)
    for offset in range(0, len(bits), _CHUNK):
        part = bits[offset : offset + _CHUNK]
        hashed = torch.arange(offset, offset + len(part), device=bits.device) + start  # int64
        for multiplier in (0x9E3779B1, 0x85EBCA6B):  # a counter-based hash; exact on every device
            hashed = hashed * multiplier & 0xFFFFFFFF
            hashed ^= hashed >> 15
        carried = (part & 0x7FFFFFFF) + (hashed >> 8 & _LOW_BITS).to(torch.int32)  # of the magnitude, without its sign
        finite = torch.isfinite(part.view(torch.float32))
        magnitude = torch.where(finite, carried & ~_LOW_BITS, part & 0x7FFFFFFF)
        rounded[offset : offset + _CHUNK] = magnitude | (part & -0x80000000)
    return rounded.view(torch.float32).reshape(weight.shape).to(torch.bfloat16)


class UpdateShare:
    """The share of the update since the start model that survives rounding, from 0.0 (nothing) to 1.0 (all of it).

    Over all weights: (rounded - start) projected onto (trained - start), as a multiple of the latter.
    """

    def __init__(self, start_model: Path) -> None:
        from safetensors import safe_open

        files: list[Any] = [safe_open(file, framework="pt") for file in sorted(start_model.glob("*.safetensors"))]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping
        self._arrived = self._wanted = 0.0

    def add(self, name: str, trained: torch.Tensor, rounded: torch.Tensor) -> None:
        """Count one tensor. One that the start model does not store, such as a tied head, does not count."""
        if name in self._file_of:
            start = self._file_of[name].get_tensor(name).to(trained.device).float().flatten()
            update = trained.float().flatten() - start
            self._arrived += float((update * (rounded.float().flatten() - start)).double().sum())
            self._wanted += float((update * update).double().sum())

    @property
    def value(self) -> float | None:
        """None while nothing has changed."""
        return self._arrived / self._wanted if self._wanted else None
