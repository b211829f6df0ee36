"""`python -m stage2_grpo concurrency`: how many episodes to keep in flight, measured with the real rollouts of a step.

vLLM, gateway and controller are those of a run; only the trainer is missing. The same training questions are played
grpo.rollouts_per_question times at each value of grpo.concurrency, from an empty prefix cache, as after a weight sync.
Lost episodes do not count. More in flight than the suggested value only makes each episode longer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from shared.cli.command_line import common_parser, resolve
from shared.config.schema import Config
from shared.errors import UserError
from shared.processes.vllm_server import vllm_server
from shared.records import Question, read_episodes, read_questions
from shared.runs.manifest import question_file
from stage2_grpo.inputs import planned_model
from stage2_grpo.preflight.rehearsal import here
from stage2_grpo.services import gateway_and_controller, register

_ENOUGH = 0.95  # of the most tokens per second
_POLL_SECONDS = 0.5


def main(arguments: Sequence[str]) -> None:
    """Measure each value on one server, print the table and the setting to use."""
    parser = common_parser("python -m stage2_grpo concurrency", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("--at", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="values of grpo.concurrency")
    parser.add_argument("--questions", type=int, default=4, help="each played grpo.rollouts_per_question times")
    args = parser.parse_args(arguments)
    config, run = resolve(args)
    model, trained = planned_model(config, run)
    if not trained:
        raise UserError(
            f"{run.sft} holds no checkpoint of {config.model} yet, and an untrained model plays no real episodes; run "
            "`python -m stage1_sft`, or set SFT_MODEL_PATH."
        )
    questions = list(read_questions(question_file(run, "train")))[: args.questions]
    print(
        f"{model}: {len(questions)} questions x {config.grpo.rollouts_per_question} episodes at {args.at}", flush=True
    )
    if args.dry_run:
        return
    rows: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="firstcall-concurrency-") as name,
        # The development mode lets the prefix cache be emptied.
        vllm_server(model, config, Path(name), served_as=str(model), VLLM_SERVER_DEV_MODE="1") as endpoint,
    ):
        for in_flight in args.at:
            rows.append(measured(config, model, questions, in_flight, endpoint, Path(name) / str(in_flight)))
            if len(rows) == 1:
                print("".join(f"{column:>14}" for column in rows[0]))
            print("".join(f"{value:>14.4g}" for value in rows[-1].values()), flush=True)
    step = config.grpo.train_batch_size * config.grpo.rollouts_per_question
    print(f"--set grpo.concurrency={suggested(rows):.0f}   (a step has {step} episodes; more are never in flight)")


def suggested(rows: Sequence[Mapping[str, float]]) -> float:
    """The smallest value that is nearly as fast as the fastest."""
    best = max(row["tokens/s"] for row in rows)
    return min(row["in flight"] for row in rows if row["tokens/s"] >= _ENOUGH * best)


def measured(
    config: Config, model: Path, questions: Sequence[Question], in_flight: int, endpoint: str, folder: Path
) -> dict[str, float]:
    """Play all episodes with at most `in_flight` at a time; one row of the table. `folder` gets logs and records."""
    folder.mkdir()
    server, local = endpoint.removesuffix("/v1"), here(config)
    settings = local.model_copy(update={"grpo": local.grpo.model_copy(update={"concurrency": in_flight})})
    httpx.post(f"{server}/reset_prefix_cache", trust_env=False).raise_for_status()
    limits = {"timeout_seconds": config.grpo.episode_timeout_seconds}
    asked = [question for question in questions for _ in range(config.grpo.rollouts_per_question)]
    with gateway_and_controller(settings, model, folder) as rollouts, rollouts.client(60) as http:
        register(http, str(model), endpoint)
        began = time.monotonic()
        bodies = [{"input": dict(vars(question)), "is_train": True, "config": limits} for question in asked]
        http.post("/api/rollouts", json=bodies).raise_for_status()
        while http.get("/api/rollouts/terminal", params={"limit": 1}).json()["total_terminal"] < len(asked):
            rollouts.check()
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - began
    episodes = read_episodes(folder / "episodes.jsonl")
    judged = [episode for episode in episodes if episode.reward]
    tokens = sum(turn.completion_tokens for episode in judged for turn in episode.turns)
    return {
        "in flight": in_flight,
        "episodes": len(asked),
        "lost": len(asked) - len(judged),
        "seconds": seconds,
        "episodes/s": len(judged) / seconds,
        "tokens/s": tokens / seconds,
        "median s": statistics.median([episode.seconds + episode.reward_seconds for episode in episodes] or [0.0]),
    }
