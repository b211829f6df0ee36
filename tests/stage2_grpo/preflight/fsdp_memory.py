"""A step and a weight sync of VERL's FSDP1 on a CPU, in a process of its own: prints the peak bytes of each.

The model is wrapped as VERL's engine does it, and the work is that of actor_engine.py.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HIDDEN, MLP, LAYERS, VOCABULARY, RANK = 256, 1024, 4, 8192, 16
TOKENS, TRAINED = 1024, 1020


def peak(work: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator holds for `work` at once, beyond what it held before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    results: Any = profiled.profiler
    events = [(e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for _, change in sorted(events):
        live += change
        most = max(most, live)
    return most


def lora_model(hidden: int, mlp: int, layers: int, vocabulary: int, dtype: Any) -> Any:
    """A random Qwen2 with an adapter and gradient checkpointing."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, attn_implementation="sdpa")).to(dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=32, target_modules="all-linear")
    return get_peft_model(model, lora).train()


def main(folder: Path) -> None:
    """Measure and print one JSON object."""
    os.environ["FIRSTCALL_CPU_BACKEND"] = "1"
    from stage2_grpo.training import cpu_backend

    cpu_backend.activate()
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy, merged_lora_context
    from verl.workers.engine.fsdp.utils import create_device_mesh

    from stage2_grpo.training.actor_engine import trained_log_probs

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=0, world_size=1)
    lora = lora_model(HIDDEN, MLP, LAYERS, VOCABULARY, torch.float32)
    weights = [sum(p.numel() for p in lora.parameters() if p.requires_grad is trained) for trained in (False, True)]
    model = FullyShardedDataParallel(
        lora,
        auto_wrap_policy=get_fsdp_wrap_policy(lora, config={}, is_lora=True),
        device_id=torch.cpu.current_device(),
        device_mesh=create_device_mesh(1, -1),
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
        ),
        use_orig_params=False,
    )
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    batch = {
        "input_ids": nested([torch.randint(10, 200, (TOKENS,))]),
        "position_ids": nested([torch.arange(TOKENS)]),
        "attention_mask": torch.ones(1, TOKENS, dtype=torch.long),
        "loss_mask": torch.ones(1, TRAINED, dtype=torch.long),
        "temperature": 1.0,
    }

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = trained_log_probs(model, batch, train_entropy=False)[0].values().sum()
        loss.backward()
        model.zero_grad()

    def sync() -> None:
        with torch.no_grad(), merged_lora_context(model, backup_adapters=True):
            model.state_dict()

    step()
    print(json.dumps({"step": peak(step), "sync": peak(sync), "frozen": weights[0], "trained": weights[1]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
