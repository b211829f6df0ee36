"""How fast stage 1 trains: one optimizer step's forward and backward, plain against as the stage does it.

    python bench/sft_throughput.py [--model FOLDER] [--batch 4] [--steps 3]

Sequences are random tokens shaped like the traces of the CPU profile: a common beginning, then turns of which a third is
trained. `plain` is what a trainer does by default: padded batch, PyTorch's attention, logits at every position, PEFT's
casts. Tokens per second count every token of the sequences, shared or not. On a busy machine look at the CPU seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import get_peft_model

from shared.config import load_config
from stage1_sft.base_model import BUILT_IN, resolve
from stage1_sft.dataset import IGNORED
from stage1_sft.train import batch_loss, load_base, lora_config

ROOT = Path(__file__).resolve().parents[1]
PREFIX, SHORTEST, LONGEST, TRAINED_SHARE = 320, 400, 560, 0.3  # tokens, tokens, tokens, of the tokens after the prefix

Batch = dict[str, torch.Tensor]


def main() -> None:
    """Measure both ways and print one line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=BUILT_IN, help="folder or hub id")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=["plain", "stage"], help="measure only one of the two")
    args = parser.parse_args()
    config = load_config(ROOT / "pipeline.yaml", "cpu")
    base = resolve(args.model, ROOT / "runs" / "models")
    inputs = batch(args.batch)
    tokens = int(inputs["attention_mask"].sum())
    for name, attention, step in [("plain", "sdpa", plain_step), ("stage", None, batch_loss)]:
        if args.only in (None, name):
            model = get_peft_model(load_base(base, config, attention), lora_config(config))
            seconds, cpu_seconds = measure(lambda model=model, step=step: step(model, inputs), args.steps)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"{name:6} {tokens / seconds:6.0f} tokens/s, {seconds:6.2f} s and {cpu_seconds:6.2f} CPU seconds a step, "
                  f"peak {peak:.1f} GiB", flush=True)  # fmt: skip


def batch(rows: int) -> Batch:
    """input_ids, labels and attention_mask of shape (rows, longest), padded at the right."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(SHORTEST, LONGEST, rows).long() + PREFIX
    ids = torch.randint(100, 40_000, (rows, int(lengths.max())), generator=generator)
    ids[:, :PREFIX] = ids[0, :PREFIX]
    trained = torch.rand(ids.shape, generator=generator) < TRAINED_SHARE
    trained[:, :PREFIX] = False
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    return {
        "input_ids": ids * real,
        "labels": torch.where(trained & real, ids, IGNORED),
        "attention_mask": real.long(),
    }


def plain_step(model: torch.nn.Module, inputs: Batch) -> None:
    """The model's own loss under autocast, and its gradients."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs, use_cache=False).loss
    loss.backward()


def measure(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Seconds and CPU seconds of the cheapest of `steps` steps after one to warm up."""
    taken = []
    for _ in range(steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        step()
        taken.append((time.perf_counter() - started, time.process_time() - cpu_started))
    return min(seconds for seconds, _ in taken[1:]), min(cpu for _, cpu in taken[1:])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
