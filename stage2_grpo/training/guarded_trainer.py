"""What stage 2 adds to Agent Lightning's trainer.

1. The weight guard (weight_guard.py) surrounds every training step. Each checkpoint carries the guard's probe, which
   the export must reproduce.
2. An episode without a reward is no training row. The controller gives no reward to infrastructure failures; Agent
   Lightning would train them as reward 0.
3. Groups with identical outcomes are excluded from the update (grpo.binary_groups). With grpo.oversample more questions
   are played than train, and mixed groups take the places (dynamic sampling, as in DAPO, arXiv 2503.14476).
4. The last step is saved even when it made no update, and a run resumed at the end of an epoch continues with the order
   of rows that the next epoch would have had.
5. The rollout servers are announced, so that stage.py notices when one dies, and every question names its step, so that
   the record of its episode does too.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from stage2_grpo.checkpoints.files import step_folder
from stage2_grpo.monitoring.server_watch import announce
from stage2_grpo.rollouts.agent import SETTINGS_FILE, AgentSettings
from stage2_grpo.training.weight_guard import WeightGuard


def gate_on_outcome(rewards: Sequence[float], correct: Sequence[bool], groups: Sequence[Hashable]) -> list[float]:
    """The rewards [episode]; a group that is all right or all wrong is flattened to its mean. Arguments are parallel.

    In such a group only the small dense terms differ. Normalised by their own tiny spread they would count as much as
    the difference between right and wrong. Equal rewards mean an advantage of exactly 0. VERL 0.8.0 declares a setting
    for this (`algorithm.filter_groups`), but neither its trainers nor Agent Lightning's read it.
    """
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        members[group].append(place)
    gated = list(rewards)
    for places in members.values():
        if len({correct[place] for place in places}) == 1:
            mean = fmean(rewards[place] for place in places)
            for place in places:
                gated[place] = mean
    return gated


def mixed_first(rewards: Sequence[float], groups: Sequence[Hashable], wanted: int) -> list[Hashable]:
    """The groups [at most `wanted`] that train: the first mixed ones, then the first flat ones if there are too few.

    `rewards` and `groups` are parallel, in the order of the questions; a group is mixed if its rewards differ.
    """
    members: defaultdict[Hashable, set[float]] = defaultdict(set)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].add(reward)
    return sorted(members, key=lambda group: len(members[group]) == 1)[:wanted]  # stable: else the order stays


def guarded(trainer_class: type, adapter_class: type) -> tuple[type, type]:
    """Subclasses of Agent Lightning's trainer and rollout adapter with these additions."""

    class RewardedOnlyAdapter(adapter_class):
        binary_groups, wanted_groups = True, 0

        def get_train_data_batch(self, completed_rollouts: list[Any], **options: Any) -> Any:
            rewarded = [rollout for rollout in completed_rollouts if rollout.final_reward is not None]
            unrewarded = len(completed_rollouts) - len(rewarded)
            if self.binary_groups:
                rewards = [rollout.final_reward for rollout in rewarded]
                correct = []
                for rollout in rewarded:
                    verdicts = [event["data"] for event in rollout.events if event["event_type"] == "reward"]
                    correct.append(verdicts[-1]["correct"])
                gated = gate_on_outcome(rewards, correct, [rollout.data_id for rollout in rewarded])
                rewarded = [
                    rollout.model_copy(update={"final_reward": reward})
                    for rollout, reward in zip(rewarded, gated, strict=True)
                ]
            rewarded.sort(key=lambda rollout: rollout.sample_idx_in_step)
            groups = [rollout.data_id for rollout in rewarded]
            kept = mixed_first([rollout.final_reward for rollout in rewarded], groups, self.wanted_groups)
            rewarded = [rollout for rollout in rewarded if rollout.data_id in kept]
            batch, metrics = super().get_train_data_batch(rewarded, **options)
            metrics["training/n_unrewarded_rollouts"] = unrewarded
            metrics["training/n_discarded_groups"] = len(set(groups)) - len(kept)
            return batch, metrics

    class GuardedTrainer(trainer_class):
        def init_workers(self) -> None:
            super().init_workers()
            self._checkpoints = Path(self.config.trainer.default_local_dir)
            grpo = AgentSettings.load(self._checkpoints.parent / SETTINGS_FILE).config.grpo
            RewardedOnlyAdapter.binary_groups = grpo.binary_groups
            RewardedOnlyAdapter.wanted_groups = grpo.train_batch_size
            self._rollout_log_probs = grpo.rollout_log_probs
            self._weight_guard = WeightGuard(self, grpo.sync_tolerance)
            announce(self._checkpoints.parent, self.llm_server_manager.get_addresses())

        def _make_rollout_manager(self, manager_cls: Any) -> Any:
            """Pass the gateway's key from the environment. It is not in the config, which is printed and logged."""
            key = os.environ["AGL_KEY"]
            return super()._make_rollout_manager(lambda **settings: manager_cls(**settings | {"agl_key": key}))

        def _rollout(self, gen_batch: Any, is_train: bool) -> Any:
            gen_batch.non_tensor_batch["step"] = np.full(len(gen_batch), self.global_steps)
            return super()._rollout(gen_batch, is_train)

        def _compute_old_log_prob(self, batch: Any) -> Any:
            """The rollout server's own log-probabilities where settings say so; the probe has none."""
            if self._rollout_log_probs and "rollout_log_probs" in batch.batch:
                old = batch.select(batch_keys=["rollout_log_probs"], non_tensor_batch_keys=[], deepcopy=True)
                return old.rename("rollout_log_probs", "old_log_probs"), 0.0
            return super()._compute_old_log_prob(batch)

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
            self._weight_guard.save_probe(step_folder(self._checkpoints, self.global_steps))
            super()._save_checkpoint()

    return GuardedTrainer, RewardedOnlyAdapter


def skip_epochs(dataloader: Any, steps: int) -> None:
    """Restore the order of the rows at the end of an epoch; VERL restores it only in the middle of one.

    The sampler draws one permutation of the rows per epoch, so those of the `steps` made so far are drawn and dropped.
    """
    epochs, rest = divmod(steps, len(dataloader))
    for _ in range(0 if rest else epochs):
        iter(dataloader.sampler)
