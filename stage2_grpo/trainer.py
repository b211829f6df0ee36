"""Two guarantees on top of Agent Lightning's trainer.

1. The weight guard. After every update the rollout server must sample the policy that was just trained. In some LoRA
   modes of VERL 0.8.0 it silently goes on sampling the base model (measured; see verl_config.py), so after each weight
   sync the server's log-probabilities of a probe text are compared with the trainer's, and the run stops on a gap.
   The same figures show that the update moved the weights at all.
2. An episode without a reward is no training row. The controller gives no reward to infrastructure failures; Agent
   Lightning would train them as reward 0.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import httpx

GAP = "guard/rollout_trainer_gap"
MOVED = "guard/policy_moved"


class WeightsOutOfSync(RuntimeError):
    """The rollout server does not sample the policy that is trained."""


@dataclass(frozen=True)
class Probe:
    """The trained row whose log-probabilities are compared: one row per data-parallel rank, so VERL can split it."""

    batch: Any  # verl.DataProto
    before: Any  # float tensor [rows, response_length]: log-probabilities before the update

    def tokens(self) -> tuple[list[int], int]:
        """(prompt + response token ids of the first row without padding, number of prompt tokens)."""
        row = self.batch.batch[0]
        mask = row["attention_mask"].bool()
        prompt_length = row["prompts"].shape[-1]
        return row["input_ids"][mask].tolist(), int(mask[:prompt_length].sum())

    def trained(self) -> Any:
        """Bool tensor [response_length]: the positions of the first row that the policy wrote."""
        return self.batch.batch[0]["response_mask"].bool()


def guarded(trainer_class: type, adapter_class: type) -> type:
    """A subclass of Agent Lightning's trainer with both guarantees."""

    class RewardedOnlyAdapter(adapter_class):  # type: ignore[misc,valid-type]
        def get_train_data_batch(self, completed_rollouts: list[Any], **options: Any) -> Any:
            rewarded = [rollout for rollout in completed_rollouts if rollout.final_reward is not None]
            batch, metrics = super().get_train_data_batch(rewarded, **options)
            metrics["training/n_unrewarded_rollouts"] = len(completed_rollouts) - len(rewarded)
            return batch, metrics

    # The adapter is looked up as a global of the trainer's module at every step.
    sys.modules[trainer_class.__module__].RolloutAdapter = RewardedOnlyAdapter  # type: ignore[attr-defined]

    class GuardedTrainer(trainer_class):  # type: ignore[misc,valid-type]
        def _train_step(self, timing_raw: dict[str, float], curr_step_profile: bool) -> Any:
            result = super()._train_step(timing_raw, curr_step_profile)
            if result is not None:
                metrics, batch = result
                metrics.update(check_weights(self, batch))
            return result

    return GuardedTrainer


def check_weights(trainer: Any, batch: Any) -> dict[str, float]:
    """Compare trainer and rollout server on the first trained row of the step.

    Returns the mean absolute gap of the log-probabilities (nats per token) between server and trainer, and how far the
    trainer moved from before the update. Raises WeightsOutOfSync when the gap exceeds the tolerance.
    """
    settings = trainer.config.ray_kwargs.firstcall
    ranks = trainer.resource_pool_manager.get_n_gpus()
    probe = Probe(copy.deepcopy(batch[:ranks]), batch.batch["old_log_probs"][:ranks].float().clone())
    probe.batch.meta_info["temperature"] = 1.0
    after = trainer._compute_old_log_prob(probe.batch)[0].batch["old_log_probs"].float()[0]
    trained = probe.trained()
    server = server_log_probs(trainer, probe, len(trained))
    gap = (after - server)[trained].abs().mean().item()
    moved = (after - probe.before[0])[trained].abs().mean().item()
    if gap > settings.sync_tolerance:
        raise WeightsOutOfSync(
            f"After the update of step {trainer.global_steps} the rollout server's log-probabilities differ from the "
            f"trainer's by {gap:.4f} nats per token on the probe text (grpo.sync_tolerance {settings.sync_tolerance}): "
            "it does not sample the trained policy. LoRA must run with strategy fsdp and lora.merge=True; see "
            "stage2_grpo/verl_config.py."
        )
    return {GAP: gap, MOVED: moved}


def server_log_probs(trainer: Any, probe: Probe, length: int) -> Any:
    """Log-probabilities [length] that the rollout server gives the probe's response tokens (0 on padding)."""
    import torch

    trainer._resume_all_rollout_generation()
    tokens, prompt_length = probe.tokens()
    address = trainer._rollout_replicas and list(trainer.llm_server_manager.get_addresses())[0]
    response = httpx.post(
        f"http://{address}/v1/completions",
        json={
            "model": trainer.config.actor_rollout_ref.model.path,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        },
        timeout=300,
    )
    response.raise_for_status()
    entries = response.json()["choices"][0]["prompt_logprobs"]
    values = [
        entry[str(token)]["logprob"]
        for token, entry in zip(tokens[prompt_length:], entries[prompt_length:], strict=True)
    ]
    return torch.tensor(values + [0.0] * (length - len(values)))
