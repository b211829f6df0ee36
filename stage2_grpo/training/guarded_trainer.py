"""Six guarantees on top of Agent Lightning's trainer.

1. The weight guard. After every update the rollout server must sample the policy that was just trained. In some LoRA
   modes of VERL 0.8.0 it silently goes on sampling the start model (measured; see verl_config.py). So around each
   training step the server and the trainer are asked for the log-probabilities of one fixed probe text: the server's
   must have changed with the update, and must equal the trainer's within grpo.sync_tolerance, or the run stops. A policy
   whose probabilities are no numbers any more stops it, too, before it is saved.
2. An episode without a reward is no training row. The controller gives no reward to infrastructure failures; Agent
   Lightning would train them as reward 0.
3. A group of episodes that are all right or all wrong brings no update (grpo.binary_groups).
4. Each checkpoint carries the probe's log-probabilities and the server's greedy tokens, which the export must reproduce.
5. The last step is saved even when it made no update, and a run resumed at the end of an epoch goes on with the order of
   rows that the next one would have had.
6. The rollout servers are announced, so that stage.py notices when one dies, and every question names the step for which
   it is asked, so that the record of its episode tells it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from shared.agent.prompts import TOOLS, opening_messages
from stage2_grpo.checkpoints.files import PROBE_FILE, step_folder
from stage2_grpo.monitoring.server_watch import announce
from stage2_grpo.training.group_filter import gate_on_outcome

GAP = "guard/rollout_trainer_gap"
TRAINER_MOVED = "guard/trainer_moved"
SERVER_MOVED = "guard/server_moved"
_GREEDY_TOKENS = 32


class WeightsOutOfSync(RuntimeError):
    """The rollout server does not sample the policy that is trained."""


class PolicyNotFinite(RuntimeError):
    """The trained policy gives no numbers any more."""


@dataclass(frozen=True)
class Probe:
    """A fixed text: the agent's opening prompt on the first training question, then the gold SQL."""

    prompt: list[int]  # token ids
    response: list[int]

    def batch(self, rows: int) -> Any:
        """The probe as a VERL batch of `rows` equal rows (a micro batch per rank: VERL pads nothing), without padding."""
        import torch
        from verl import DataProto

        tokens = torch.tensor([self.prompt + self.response] * rows)
        ones = torch.ones_like(tokens)
        tensors = {
            "prompts": tokens[:, : len(self.prompt)],
            "responses": tokens[:, len(self.prompt) :],
            "input_ids": tokens,
            "attention_mask": ones,
            "position_ids": ones.cumsum(-1) - 1,
            "response_mask": ones[:, len(self.prompt) :],
        }
        lengths = [tokens.shape[-1]] * rows  # VERL derives the utilisation figure from it
        return DataProto.from_single_dict(tensors, meta_info={"temperature": 1.0, "global_token_num": lengths})


def guarded(trainer_class: type, adapter_class: type) -> type:
    """A subclass of Agent Lightning's trainer with these guarantees."""

    class RewardedOnlyAdapter(adapter_class):
        binary_groups = True

        def get_train_data_batch(self, completed_rollouts: list[Any], **options: Any) -> Any:
            rewarded = [rollout for rollout in completed_rollouts if rollout.final_reward is not None]
            if self.binary_groups:
                groups = [rollout.data_id for rollout in rewarded]
                gated = gate_on_outcome([rollout.final_reward for rollout in rewarded], groups)
                rewarded = [
                    rollout.model_copy(update={"final_reward": reward})
                    for rollout, reward in zip(rewarded, gated, strict=True)
                ]
            batch, metrics = super().get_train_data_batch(rewarded, **options)
            metrics["training/n_unrewarded_rollouts"] = len(completed_rollouts) - len(rewarded)
            return batch, metrics

    # The trainer looks the adapter up as a global of its module at every step.
    sys.modules[trainer_class.__module__].RolloutAdapter = RewardedOnlyAdapter  # type: ignore[attr-defined]

    class GuardedTrainer(trainer_class):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            RewardedOnlyAdapter.binary_groups = self.config.ray_kwargs.firstcall.binary_groups

        def init_workers(self) -> None:
            super().init_workers()
            announce(Path(self.config.trainer.default_local_dir).parent, self.llm_server_manager.get_addresses())

        def _make_rollout_manager(self, manager_cls: Any) -> Any:
            """With the gateway's key from the environment, which is not in the config, for that is printed and logged."""
            key = os.environ["AGL_KEY"]
            return super()._make_rollout_manager(lambda **settings: manager_cls(**settings | {"agl_key": key}))

        def _rollout(self, gen_batch: Any, is_train: bool) -> Any:
            gen_batch.non_tensor_batch["step"] = np.full(len(gen_batch), self.global_steps)
            return super()._rollout(gen_batch, is_train)

        @functools.cached_property
        def _weight_guard(self) -> WeightGuard:
            return WeightGuard(self)

        def _train_step(self, timing_raw: dict[str, float], curr_step_profile: bool) -> Any:
            self._weight_guard.before_step()
            result = super()._train_step(timing_raw, curr_step_profile)
            if result is not None:
                result[0].update(self._weight_guard.after_step())
            elif self.global_steps >= self.total_training_steps:
                self._save_checkpoint()  # the base class saves only steps that had an update
            return result

        def _load_checkpoint(self) -> None:
            super()._load_checkpoint()
            skip_epochs(self.train_dataloader, self.global_steps)

        def _save_checkpoint(self) -> None:
            # First, because the base class ends with the marker that makes the checkpoint count.
            self._weight_guard.save_probe(step_folder(Path(self.config.trainer.default_local_dir), self.global_steps))
            super()._save_checkpoint()

    return GuardedTrainer


def skip_epochs(dataloader: Any, steps: int) -> None:
    """Go on with the order of the rows where an epoch has ended; VERL restores it only in the middle of one.

    Its sampler draws one permutation of the rows for each epoch, so those of the `steps` made so far are drawn and left.
    """
    epochs, rest = divmod(steps, len(dataloader))
    for _ in range(0 if rest else epochs):
        iter(dataloader.sampler)


class WeightGuard:
    """Compares what trainer and rollout server make of the probe, before and after each step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tolerance = trainer.config.ray_kwargs.firstcall.sync_tolerance
        self._probe = _probe(trainer)
        self._last: tuple[Any, list[Any]] | None = None

    def before_step(self) -> None:
        self._last = self._last or self._measure()

    def after_step(self) -> dict[str, float]:
        """The guard's figures (nats per token); raises WeightsOutOfSync."""
        assert self._last is not None
        (trainer_before, servers_before), (trainer, servers) = self._last, self._measure()
        self._last = trainer, servers
        figures = {
            GAP: max(_distance(trainer, server) for server in servers),
            TRAINER_MOVED: _distance(trainer, trainer_before),
            SERVER_MOVED: min(_distance(*pair) for pair in zip(servers, servers_before, strict=True)),
        }
        judge(self._trainer.global_steps, figures, self._tolerance)
        return figures

    def save_probe(self, folder: Path) -> None:
        """What the export of this checkpoint must reproduce: the trainer's figures and the first server's greedy tokens."""
        assert self._last is not None
        saved = {
            "step": self._trainer.global_steps,
            "prompt": self._probe.prompt,
            "response": self._probe.response,
            "log_probs": self._last[0].tolist(),
            "greedy": self._greedy(self._trainer.llm_server_manager.get_addresses()[0]),
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROBE_FILE).write_text(json.dumps(saved), encoding="utf-8")

    def _measure(self) -> tuple[Any, list[Any]]:
        """Log-probabilities [response tokens] of the probe by the trainer and by each rollout server."""
        trainer = self._trainer
        per_rank = trainer.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        batch = self._probe.batch(trainer.resource_pool_manager.get_n_gpus() * per_rank)
        trained = trainer._compute_old_log_prob(batch)[0].batch["old_log_probs"].float()[0]
        trainer._resume_all_rollout_generation()  # a step ends with generation paused
        return trained, [self._ask(address) for address in trainer.llm_server_manager.get_addresses()]

    def _ask(self, address: str) -> Any:
        import torch

        probe = self._probe
        answer = self._complete(address, probe.prompt + probe.response, max_tokens=1, prompt_logprobs=0)
        entries = answer["prompt_logprobs"][len(probe.prompt) :]
        return torch.tensor(
            [entry[str(token)]["logprob"] for token, entry in zip(probe.response, entries, strict=True)]
        )

    def _greedy(self, address: str) -> list[int]:
        self._trainer._resume_all_rollout_generation()  # a validation ends with generation paused
        answer = self._complete(address, self._probe.prompt, max_tokens=_GREEDY_TOKENS, return_token_ids=True)
        return list(answer["token_ids"])

    def _complete(self, address: str, prompt: list[int], **options: Any) -> dict[str, Any]:
        model = self._trainer.config.actor_rollout_ref.model.path
        request = {"model": model, "prompt": prompt, "temperature": 0, **options}
        response = httpx.post(f"http://{address}/v1/completions", json=request, timeout=300)
        return dict(response.raise_for_status().json()["choices"][0])


def judge(step: int, figures: Mapping[str, float], tolerance: float) -> None:
    """Raise WeightsOutOfSync when a server kept its old weights or is further from the trainer than `tolerance`.

    Raises PolicyNotFinite when the trainer's own figures are no numbers.
    """
    if not math.isfinite(figures[TRAINER_MOVED]):
        raise PolicyNotFinite(
            f"After the update of step {step} the policy's log-probabilities are no numbers any more: the training diverged; "
            "lower grpo.learning_rate."
        )
    advice = (
        "the rollout server does not sample the trained policy. LoRA must run with strategy fsdp and lora.merge=True "
        "(stage2_grpo/training/verl_config.py)."
    )
    where = f"After the update of step {step} the server's log-probabilities of the probe text are"
    if figures[TRAINER_MOVED] > 0 and figures[SERVER_MOVED] == 0:
        raise WeightsOutOfSync(f"{where} unchanged: {advice}")
    if not figures[GAP] <= tolerance:  # also when it is NaN
        raise WeightsOutOfSync(
            f"{where} {figures[GAP]:.4f} nats per token away from the trainer's (grpo.sync_tolerance is {tolerance}): "
            f"{advice}"
        )


def _distance(one: Any, other: Any) -> float:
    """Mean absolute difference of two log-probability vectors, nats per token."""
    return float((one - other).abs().mean())


def _probe(trainer: Any) -> Probe:
    row, tokenizer = trainer.train_dataset[0], trainer.tokenizer
    prompt = tokenizer.apply_chat_template(
        opening_messages(row["question"]), tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    return Probe(encode(prompt), encode(row["gold_sql"]))
