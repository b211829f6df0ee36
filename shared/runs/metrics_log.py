"""The log of a stage's figures: `metrics.jsonl`, and TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.errors import UserError

_Write = Callable[[int, Mapping[str, float]], None]  # step, figures


class MetricsLog(contextlib.ExitStack):
    """A context manager that appends figures to `<folder>/metrics.jsonl` and sends them to the wanted services.

    Raises UserError when a package or the key of a wanted service is missing.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, wandb: bool) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "metrics.jsonl"
        self._services: list[_Write] = []
        if tensorboard:
            self._services.append(_tensorboard(folder / "tensorboard", self))
        if wandb:
            self._services.append(_wandb(folder, self))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the figures of one step. Only the file gets texts and None; NaN and infinity become null there."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        row = {"step": step, "time": round(time.time(), 3), **finite}
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        figures = {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}
        for write in self._services:
            write(step, figures)


def _tensorboard(folder: Path, closing: contextlib.ExitStack) -> _Write:
    """A TensorBoard writer from the `tensorboard` package itself; torch's wrapper would import torch."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError(
            "logging.tensorboard is true but tensorboard is not installed; install it or switch it off."
        ) from error
    writer = EventFileWriter(str(folder))
    closing.callback(writer.close)

    def write(step: int, figures: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in figures.items()])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()

    return write


def _wandb(folder: Path, closing: contextlib.ExitStack) -> _Write:
    if not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") != "offline":
        raise UserError("logging.wandb is true but WANDB_API_KEY is not set; set it or switch logging.wandb off.")
    try:
        import wandb
    except ImportError as error:
        raise UserError("logging.wandb is true but wandb is not installed; install it or switch it off.") from error
    run = wandb.init(project="firstcall", name=folder.parent.name, dir=str(folder))
    closing.callback(run.finish)
    return lambda step, figures: run.log(dict(figures), step=step)
