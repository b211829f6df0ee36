"""The weight guard: after every update the rollout server must sample the policy that was just trained.

In some LoRA modes VERL 0.8.0 silently keeps sampling the start model (see verl_config.py). So around each training step
the server and the trainer are asked for the log-probabilities of one fixed probe text. The server's must have changed
with the update and must equal the trainer's within the tolerance, and the update must survive the rounding of the
weights, or the run stops. The tolerance is grpo.sync_tolerance, or three times the gap before the first step where that
is more: kernels of server and trainer differ by so much with equal weights. A policy whose log-probabilities are no
longer finite stops the run too, before it is saved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from shared.agent.prompts import TOOLS, opening_messages
from shared.runs.manifest import read_object
from stage2_grpo.checkpoints.files import PROBE_FILE
from stage2_grpo.training.actor_engine import SYNC_FILE

GAP = "guard/rollout_trainer_gap"
TRAINER_MOVED = "guard/trainer_moved"
SERVER_MOVED = "guard/server_moved"
ARRIVED = "guard/arrived_share"
_GREEDY_TOKENS = 32
_GAPS = 3.0  # times the gap of equal weights that is still no other policy
_LARGEST_START_GAP = 0.3  # nats per token that kernels alone may explain; random weights are several away
_ARRIVED_TOLERANCE = 0.5  # rounding to nearest delivers 5 to 15 % of a small update; chance alone stays within 5 %


class WeightsOutOfSync(RuntimeError):
    """The rollout server does not sample the policy that is trained."""


class PolicyNotFinite(RuntimeError):
    """The trained policy's log-probabilities are no longer finite."""


class WeightGuard:
    """Compares trainer and rollout servers on the probe, before and after each step.

    The probe is the agent's opening prompt on the first training question, followed by its gold SQL.
    """

    def __init__(self, trainer: Any, tolerance: float) -> None:
        row, tokenizer = trainer.train_dataset[0], trainer.tokenizer
        prompt = tokenizer.apply_chat_template(
            opening_messages(row["question"]), tools=TOOLS, add_generation_prompt=True, tokenize=False
        )
        self._trainer, self._tolerance = trainer, tolerance
        self._folder = Path(trainer.config.trainer.default_local_dir).parent
        self._prompt, self._response = (
            list(tokenizer.encode(text, add_special_tokens=False)) for text in (prompt, row["gold_sql"])
        )
        self._last: tuple[Any, list[Any]] | None = None

    def before_step(self) -> None:
        if self._last is None:
            self._last = trainer, servers = self._measure()
            self._tolerance = tolerance_for(max(_distance(trainer, server) for server in servers), self._tolerance)

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
        if (share := read_object(self._folder / SYNC_FILE).get("arrived_share")) is not None:
            figures[ARRIVED] = share
        judge(self._trainer.global_steps, figures, self._tolerance)
        return figures

    def save_probe(self, folder: Path) -> None:
        """Write what the export must reproduce: the trainer's log-probabilities, the first server's greedy tokens."""
        assert self._last is not None
        self._trainer._resume_all_rollout_generation()  # a validation ends with generation paused
        server = self._trainer.llm_server_manager.get_addresses()[0]
        greedy = self._complete(server, self._prompt, max_tokens=_GREEDY_TOKENS, return_token_ids=True)["token_ids"]
        saved = {
            "step": self._trainer.global_steps,
            "prompt": self._prompt,
            "response": self._response,
            "log_probs": self._last[0].tolist(),
            "greedy": greedy,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROBE_FILE).write_text(json.dumps(saved), encoding="utf-8")

    def _measure(self) -> tuple[Any, list[Any]]:
        """Log-probabilities [response tokens] of the probe by the trainer and by each rollout server."""
        import torch
        from verl import DataProto

        trainer = self._trainer
        # VERL pads nothing, so the batch holds the same row once for each place of a micro batch on each rank.
        per_rank = trainer.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        tokens = torch.tensor([self._prompt + self._response] * (trainer.resource_pool_manager.get_n_gpus() * per_rank))
        ones = torch.ones_like(tokens)
        tensors = {
            "prompts": tokens[:, : len(self._prompt)],
            "responses": tokens[:, len(self._prompt) :],
            "input_ids": tokens,
            "attention_mask": ones,
            "position_ids": ones.cumsum(-1) - 1,
            "response_mask": ones[:, len(self._prompt) :],
        }
        lengths = [tokens.shape[-1]] * len(tokens)  # VERL derives its utilisation figure from them
        batch = DataProto.from_single_dict(tensors, meta_info={"temperature": 1.0, "global_token_num": lengths})
        trained = trainer._compute_old_log_prob(batch)[0].batch["old_log_probs"].float()[0]
        trainer._resume_all_rollout_generation()  # a step ends with generation paused
        served = []
        for address in trainer.llm_server_manager.get_addresses():
            answer = self._complete(address, self._prompt + self._response, max_tokens=1, prompt_logprobs=0)
            entries = zip(self._response, answer["prompt_logprobs"][len(self._prompt) :], strict=True)
            served.append(torch.tensor([entry[str(token)]["logprob"] for token, entry in entries]))
        return trained, served

    def _complete(self, address: str, prompt: list[int], **options: Any) -> dict[str, Any]:
        model = self._trainer.config.actor_rollout_ref.model.path
        request = {"model": model, "prompt": prompt, "temperature": 0, **options}
        response = httpx.post(f"http://{address}/v1/completions", json=request, timeout=300)
        return dict(response.raise_for_status().json()["choices"][0])


def judge(step: int, figures: Mapping[str, float], tolerance: float) -> None:
    """Raise WeightsOutOfSync when a server kept its old weights or differs from the trainer by more than `tolerance`.

    Raises PolicyNotFinite when the trainer's own figures are not finite.
    """
    if not math.isfinite(figures[TRAINER_MOVED]):
        raise PolicyNotFinite(
            f"After the update of step {step} the policy's log-probabilities are no numbers any more: the training "
            "diverged; lower grpo.learning_rate."
        )
    advice = (
        "the rollout server does not sample the trained policy. LoRA must run with strategy fsdp and lora.merge=True "
        "(stage2_grpo/training/verl_config.py)."
    )
    where = f"After the update of step {step} the server's log-probabilities of the probe text are"
    if figures[TRAINER_MOVED] > 0 and figures[SERVER_MOVED] == 0:
        raise WeightsOutOfSync(f"{where} unchanged: {advice}")
    if not abs(figures.get(ARRIVED, 1.0) - 1.0) <= _ARRIVED_TOLERANCE:
        raise WeightsOutOfSync(
            f"After the update of step {step} {figures[ARRIVED]:.0%} of the update so far arrived at the server "
            "instead of all of it: rounding to bfloat16 swallows it (stage2_grpo/training/rounding.py)."
        )
    if not figures[GAP] <= tolerance:  # also when it is NaN
        raise WeightsOutOfSync(
            f"{where} {figures[GAP]:.4f} nats per token away from the trainer's (grpo.sync_tolerance is {tolerance}): "
            f"{advice}"
        )


def tolerance_for(start_gap: float, tolerance: float) -> float:
    """The tolerance (nats per token) of a run that begins with this gap between server and trainer.

    A gap that kernels alone do not explain widens nothing: the server has other weights.
    """
    return max(tolerance, _GAPS * start_gap) if start_gap <= _LARGEST_START_GAP else tolerance


def _distance(one: Any, other: Any) -> float:
    """Mean absolute difference of two log-probability vectors, nats per token."""
    return float((one - other).abs().mean())
