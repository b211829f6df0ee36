"""How fast stage 1 trains: one optimizer step's forward and backward, plain against as the stage does it.

    python tests/bench/sft_throughput.py [--model FOLDER] [--batch 4] [--steps 3]

Sequences are random tokens shaped like the traces of the CPU profile: a common beginning, then turns of which a third
is trained. `plain` is what a trainer does by default: padded batch, logits at every position, PEFT's casts. Tokens
per second count every token of the sequences, shared or not. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shared.config.load import load_config
from shared.runs.manifest import MODEL_CACHE
from stage1_sft.base_model import BUILT_IN, resolve
from stage1_sft.dataset import IGNORED
from stage1_sft.train import adapter_loss, load_model

ROOT = Path(__file__).resolve().parents[2]
PREFIX, SHORTEST, LONGEST, TRAINED_SHARE = 320, 400, 560, 0.3  # tokens, tokens, tokens, of the tokens after the prefix

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """Measure both ways and print one line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=BUILT_IN, help="folder or hub id")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=["plain", "stage"], help="measure only one of the two")
    args = parser.parse_args()
    config = load_config(ROOT / "pipeline.yaml", "cpu")
    base = resolve(args.model, ROOT / "runs" / MODEL_CACHE)
    ids, labels, tokens = batch(args.batch)
    for name, loss in [("plain", plain_loss), ("stage", adapter_loss)]:
        if args.only in (None, name):
            model = load_model(base, config)
            seconds = measure(lambda model=model, loss=loss: loss(model, ids, labels).backward(), args.steps)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(
                f"{name:6} {tokens / seconds:6.0f} tokens/s, {seconds:5.2f} s a step, peak {peak:.1f} GiB", flush=True
            )


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids and labels of shape (rows, longest), padded at the right, and the number of real tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(SHORTEST, LONGEST, rows).long() + PREFIX
    ids = torch.randint(100, 40_000, (rows, int(lengths.max())), generator=generator)
    ids[:, :PREFIX] = ids[0, :PREFIX]
    trained = torch.rand(ids.shape, generator=generator) < TRAINED_SHARE
    trained[:, :PREFIX] = False
    padding = torch.arange(ids.shape[1]) >= lengths[:, None]
    ids[padding] = 0
    return ids, torch.where(trained & ~padding, ids, IGNORED), int(lengths.sum())


def plain_loss(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The model's own loss under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels, use_cache=False).loss


def measure(step: Callable[[], None], steps: int) -> float:
    """Seconds of the fastest of `steps` steps after one to warm up."""
    best = float("inf")
    for _ in range(steps + 1):
        started = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
