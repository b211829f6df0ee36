"""Time and memory of torch's two attentions in a GRPO update on this machine: `python -m tests.bench.attention MODEL`.

Each attention runs in its own process: forward and backward passes of a LoRA model over single rows of 700 to 1,500
tokens, of which the last 250 are trained, in bfloat16 autocast as VERL does. Prints seconds per row and peak memory.
"""

import argparse
import random
import resource
import subprocess
import sys
import time

ROWS, WARM_UP, TRAINED = 14, 4, 250  # rows in all; the first ones are not timed; trained tokens of a row


def measure(model: str, attention: str) -> None:
    """Run the rows with one attention and print its line of the table."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=attention)
    actor = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).train()
    draw, forward, backward = random.Random(0), 0.0, 0.0
    for row in range(ROWS):
        length = draw.randint(700, 1500)
        tokens, kept = torch.randint(100, 40_000, (1, length)), torch.arange(length - TRAINED, length)
        begun = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            logits = actor(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens, dtype=torch.bool),
                position_ids=torch.arange(length)[None],
                use_cache=False,
                logits_to_keep=kept,
            ).logits
        between = time.perf_counter()
        logits.float().log_softmax(-1)[..., 0].mean().backward()
        actor.zero_grad()
        if row >= WARM_UP:
            forward, backward = forward + between - begun, backward + time.perf_counter() - between
    timed, peak = ROWS - WARM_UP, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{attention:9}  {forward / timed:9.2f}  {backward / timed:10.2f}  {peak:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="model folder, e.g. runs/main/sft/merged")
    parser.add_argument("--only", choices=["eager", "sdpa"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments.model, arguments.only)
        return
    print("attention  forward s  backward s  peak GiB", flush=True)
    for attention in ("eager", "sdpa"):
        subprocess.run(
            [sys.executable, "-m", "tests.bench.attention", arguments.model, "--only", attention], check=True
        )


if __name__ == "__main__":
    main()
