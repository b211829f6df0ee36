"""How many episodes to keep in flight: the real rollouts of a GRPO step, at several values of grpo.concurrency.

    SFT_MODEL_PATH=runs/main/sft/merged python -m tests.bench.rollout_concurrency --at 1 2 4 8 16

vLLM, gateway and controller are those of a run; only the trainer is missing. The same training questions are played
grpo.rollouts_per_question times each at every value, from an empty prefix cache, as after a weight sync. The columns
`running` (mean), `waiting` and `KV cache` (highest) are vLLM's own, read twice a second; `preempted` requests had to be computed
again because the cache was full. Sampled episodes differ in length, so tokens per second compare the values: the smallest one
within a twentieth of the most is suggested; more in flight would only make each episode longer. Lost episodes do not count.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from shared.cli.command_line import common_parser, resolve, run_main
from shared.config.schema import Config
from shared.errors import UserError
from shared.processes.owned_process import OwnedProcess, free_port
from shared.processes.vllm_server import server_argv, server_environment
from shared.records import Question, read_episodes, read_questions
from shared.runs.manifest import question_file
from stage2_grpo.inputs import starting_model
from stage2_grpo.services import Rollouts, gateway_and_controller, register

_ENOUGH = 0.95  # of the most tokens per second
_POLL_SECONDS = 0.5
_HEADER = (
    "in flight  episodes  lost  seconds  episodes/s  tokens/s  median episode  running  waiting  KV cache  preempted"
)
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache",
    "vllm:num_preemptions_total": "preempted",
}


@dataclass(frozen=True)
class Level:
    """What one value of grpo.concurrency brought."""

    in_flight: int
    episodes: int
    lost: int
    tokens: int  # that the model wrote in episodes that count
    seconds: float
    median_seconds: float  # of one episode
    running: float  # requests that vLLM decodes together, mean
    waiting: float  # requests in its queue, highest
    cache: float  # share of the KV cache in use, highest
    preempted: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.in_flight:>9} {self.episodes:>9} {self.lost:>5} {self.seconds:>8.1f} "
            f"{(self.episodes - self.lost) / self.seconds:>11.2f} {self.tokens_per_second:>9.0f} {self.median_seconds:>13.1f} s {self.running:>8.1f} {self.waiting:>8.0f} {self.cache:>9.0%} {self.preempted:>10.0f}"
        )


def main() -> None:
    """Measure each value on one server, print the table and the setting to use."""
    parser = common_parser("python -m tests.bench.rollout_concurrency", (__doc__ or "").split("\n")[0])
    parser.add_argument("--at", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="values of grpo.concurrency")
    parser.add_argument("--questions", type=int, default=4, help="each played grpo.rollouts_per_question times")
    args = parser.parse_args()
    config, run = resolve(args)
    model = starting_model(config, run)
    questions = list(read_questions(question_file(run, "train")))[: args.questions]
    with tempfile.TemporaryDirectory(prefix="firstcall-bench-") as name, served(model, config, Path(name)) as server:
        print(
            f"{model}: {len(questions)} questions x {config.grpo.rollouts_per_question} episodes\n{_HEADER}", flush=True
        )
        levels = []
        for in_flight in args.at:
            levels.append(measured(config, model, questions, in_flight, server, Path(name) / str(in_flight)))
            print(levels[-1], flush=True)
    step = config.grpo.train_batch_size * config.grpo.rollouts_per_question
    print(
        f"--set grpo.concurrency={suggested(levels)}   (a step has {step} episodes; more than that is never in flight)"
    )


def suggested(levels: Sequence[Level]) -> int:
    """The smallest value that is nearly as fast as the fastest."""
    best = max(level.tokens_per_second for level in levels)
    return min(level.in_flight for level in levels if level.tokens_per_second >= _ENOUGH * best)


@contextlib.contextmanager
def served(model: Path, config: Config, folder: Path) -> Iterator[str]:
    """vLLM under the name that VERL's servers have, the path; yields its address."""
    port = free_port()
    server = OwnedProcess(
        server_argv(model, config, port, served_as=str(model)),
        name="vLLM",
        log=folder / "vllm.log",
        env=server_environment(config) | {"VLLM_SERVER_DEV_MODE": "1"},  # lets the prefix cache be emptied
        health=f"http://127.0.0.1:{port}/health",
        start_timeout=config.vllm.start_timeout_seconds,
    )
    with server:
        yield f"http://127.0.0.1:{port}"


def measured(
    config: Config, model: Path, questions: Sequence[Question], in_flight: int, server: str, folder: Path
) -> Level:
    """Play all episodes with at most `in_flight` at a time; `folder` gets the logs and records."""
    folder.mkdir()
    grpo = replace(config.grpo, concurrency=in_flight, ray_address=None, gateway_url=None, job_template=None)
    httpx.post(f"{server}/reset_prefix_cache", trust_env=False).raise_for_status()
    with gateway_and_controller(replace(config, grpo=grpo), model, folder) as rollouts, rollouts.client(60) as http:
        register(http, str(model), f"{server}/v1")
        before, began = load(server), time.monotonic()
        count = queue(http, questions, config)
        seen = watched(http, server, count, rollouts)
        seconds, after = time.monotonic() - began, load(server)
    episodes = read_episodes(folder / "episodes.jsonl")
    judged = [episode for episode in episodes if episode.reward is not None]
    return Level(
        in_flight=in_flight,
        episodes=count,
        lost=count - len(judged),
        tokens=sum(turn.completion_tokens for episode in judged for turn in episode.turns),
        seconds=seconds,
        median_seconds=statistics.median(episode.seconds + episode.reward_seconds for episode in episodes),
        running=statistics.fmean(one["running"] for one in seen),
        waiting=max(one["waiting"] for one in seen),
        cache=max(one["cache"] for one in seen),
        preempted=after["preempted"] - before["preempted"],
    )


def queue(http: httpx.Client, questions: Sequence[Question], config: Config) -> int:
    """Queue the episodes as the trainer does, group by group; returns how many."""
    limits = {"timeout_seconds": config.grpo.episode_timeout_seconds}
    bodies = [
        {"input": dict(vars(question)), "is_train": True, "config": limits}
        for question in questions
        for _ in range(config.grpo.rollouts_per_question)
    ]
    http.post("/api/rollouts", json=bodies).raise_for_status()
    return len(bodies)


def watched(http: httpx.Client, server: str, count: int, rollouts: Rollouts) -> list[Mapping[str, float]]:
    """vLLM's figures until `count` episodes have ended."""
    seen: list[Mapping[str, float]] = []
    while http.get("/api/rollouts/terminal", params={"limit": 1}).json()["total_terminal"] < count:
        rollouts.check()
        seen.append(load(server))
        time.sleep(_POLL_SECONDS)
    return seen


def load(server: str) -> dict[str, float]:
    """vLLM's own figures of this moment: running, waiting, cache (a share) and preempted (since its start)."""
    from prometheus_client.parser import text_string_to_metric_families  # comes with vLLM

    text = httpx.get(f"{server}/metrics", timeout=60, trust_env=False).raise_for_status().text
    values: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _GAUGES:
                values[_GAUGES[sample.name]] += sample.value
    if len(values) < len(_GAUGES):
        raise UserError(
            f"vLLM at {server} reports only {sorted(values)} of {sorted(_GAUGES.values())}; its metrics changed."
        )
    return dict(values)


if __name__ == "__main__":
    run_main(main)
