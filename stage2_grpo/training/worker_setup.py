"""What every process of stage 2 does before it imports VERL: Ray calls `setup` in workers, the driver calls it itself.

The patches must be in place before the first import of verl.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from stage2_grpo.training import actor_engine, cpu_backend, import_hooks

HOOK = "stage2_grpo.training.worker_setup.setup"
_SYNC_SECONDS = 300.0  # for one bucket of weights; the slowest seen took under ten


def setup() -> None:
    """Prepare this process."""
    cpu_backend.activate()
    patches: dict[str, import_hooks.Patch] = {
        "agentlightning.verl.trainer": _guard_trainer,
        "verl.workers.engine.fsdp.transformer_impl": actor_engine.patch,
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": end_stuck_sync,
    }
    if importlib.util.find_spec("flash_attn") is None:
        patches["verl.utils.attention_utils"] = _unpad_without_flash_attn
    import_hooks.install(patches)
    from agentlightning.verl.per_rollout_loss import register_in_worker

    register_in_worker()


def _guard_trainer(module: Any) -> None:
    """Agent Lightning hard-codes its trainer class; ours adds the weight guard and drops unrewarded episodes."""
    from stage2_grpo.training.guarded_trainer import guarded

    trainer, adapter = guarded(module.AgentLightningRayPPOTrainer, module.RolloutAdapter)
    import_hooks.replace(module, "AgentLightningRayPPOTrainer", trainer)
    import_hooks.replace(module, "RolloutAdapter", adapter)  # the trainer looks it up in its module at every step


def end_stuck_sync(module: Any) -> None:
    """VERL's sender waits for ever for a vLLM worker that failed to take the weights; the run would hang with it."""
    sender, zmq = module.BucketedWeightSender, module.zmq

    def open_socket_with_timeout(self: Any) -> None:
        open_socket(self)
        for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):  # a worker that died before it connected takes no first message
            self.socket.setsockopt(option, int(1000 * _SYNC_SECONDS))
        self.socket.setsockopt(zmq.LINGER, 0)  # pending messages must not keep this process alive

    async def send_or_explain(self: Any, weights: Any) -> None:
        try:
            await send(self, weights)
        except zmq.Again as error:
            from stage2_grpo.training.weight_guard import WeightsOutOfSync

            raise WeightsOutOfSync(
                f"The rollout server did not take the trained weights within {_SYNC_SECONDS:.0f} s; its own error "
                "stands in the trainer's log. LoRA must run with strategy fsdp and lora.merge=True "
                "(stage2_grpo/training/verl_config.py)."
            ) from error

    open_socket = import_hooks.replace(sender, "_init_socket", open_socket_with_timeout)
    send = import_hooks.replace(sender, "async_send_weights", send_or_explain)


def _unpad_without_flash_attn(module: Any) -> None:
    """VERL imports flash_attn for its unpadding helpers on every device but NPUs; its copy for NPUs is plain torch."""

    def functions() -> tuple[Any, Any, Any, Any]:
        from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, rearrange, unpad_input

        return index_first_axis, pad_input, rearrange, unpad_input

    import_hooks.replace(module, "_get_attention_functions", functions)
