"""Episodes per second: Agent Lightning's local controller against the pooled controller, in one run.

    python -m tests.bench.controller_speed

Both serve the same real gateway, the same agent (`stage2_grpo.rollouts.agent`), database and question; a scripted
endpoint answers at once, so that what is measured is the cost of running an episode and not the model. Each episode
makes four calls: search_schema, get_columns, execute_sql, final answer. CPU seconds are those of the controller and of
every process it starts, without gateway and endpoint. Exit status 1 unless ours plays 10 times as many episodes per
second for at most a fifth of the CPU seconds. The stock half takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from shared.config.load import load_config
from shared.models.tokenizer import Tokenizer
from shared.processes.owned_process import OwnedProcess, free_port, random_key
from shared.records import Question, ToolCall
from shared.tool_calls import render_turn
from stage2_grpo.rollouts.agent import AgentSettings
from tests.scripted_server import answer, scripted_server
from tests.shared.examples import insurance_file, tokenizer_folder

ROOT = Path(__file__).resolve().parents[2]
MODEL = "scripted"
WANTED_RATE = 10.0  # times the stock controller's
WANTED_CPU = 0.2  # of the stock controller's
EPISODE_TIMEOUT = 900  # seconds
SQL = "SELECT count(*) FROM claims WHERE amount > 100"
CALLS = [
    ToolCall("search_schema", {"query": "claims amount"}),
    ToolCall("get_columns", {"table": "claims"}),
    ToolCall("execute_sql", {"sql": SQL}),
]
FINAL_ANSWER = "There are 2 such claims."


@dataclass(frozen=True)
class Speed:
    """One measured controller."""

    name: str
    episodes: int
    at_once: int
    seconds: float
    cpu_seconds: float

    @property
    def per_second(self) -> float:
        return self.episodes / self.seconds

    @property
    def cpu_per_episode(self) -> float:
        return self.cpu_seconds / self.episodes

    def __str__(self) -> str:
        return (
            f"{self.name:<34} {self.episodes:>8} {self.at_once:>8} {self.seconds:>8.2f} "
            f"{self.per_second:>11.2f} {self.cpu_per_episode:>14.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.controller_speed", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--stock-size", type=int, default=8, help="processes at a time (local_runner.maximum_size)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        bench = Bench(Path(name), stack)
        stock, pooled = bench.stock(args.episodes, args.stock_size), bench.pooled(args.episodes)
    print(f"\n{'controller':<34} episodes  at once  seconds  episodes/s  CPU s/episode")
    print(stock, pooled, sep="\n")
    rate, cpu = pooled.per_second / stock.per_second, pooled.cpu_per_episode / stock.cpu_per_episode
    print(f"episodes per second: {rate:.1f} times the stock controller's, wanted at least {WANTED_RATE:g}")
    print(f"CPU seconds per episode: {cpu:.3f} of the stock controller's, wanted at most {WANTED_CPU:g}")
    sys.exit(rate < WANTED_RATE or cpu > WANTED_CPU)


class Bench:
    """Gateway, endpoint and files of one run; everything it starts ends with `stack`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._key = random_key()
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._config = load_config(ROOT / "pipeline.yaml", "cpu")
        question = "How many claims exceed 100?"
        self._question = vars(Question("q1", "insurance", question, SQL, str(insurance_file(folder))))
        self._settings = folder / "agents.json"
        AgentSettings(self._url, tokenizer_folder(folder), self._config, folder / "episodes.jsonl").save(self._settings)
        arguments = ("host=127.0.0.1", f"port={port}", f"default_proxy.model_name={MODEL}", "key=${oc.env:AGL_KEY}")
        stack.enter_context(self._owned("agentlightning.server", *arguments, health=f"{self._url}/healthz"))
        endpoint = stack.enter_context(scripted_server(script(Tokenizer.from_folder(folder))))
        headers = {"Authorization": f"Bearer {self._key}"}
        self._http = stack.enter_context(httpx.Client(base_url=self._url, headers=headers, timeout=60, trust_env=False))
        self._http.post("/api/models", json=[{"model": MODEL, "endpoint": endpoint}]).raise_for_status()

    def stock(self, episodes: int, size: int) -> Speed:
        """Agent Lightning's controller, polling far more often than its default of every 10 s."""
        settings = ("runner_type=local", f"agl_server.url={self._url}", "agl_server.key=${oc.env:AGL_KEY}")
        speed = ("local_runner.poll_interval=0.1", f"local_runner.maximum_size={size}")
        with self._watched(self._owned("agentlightning.controller", *settings, *speed)) as process:
            return self._measure("stock (one process per episode)", process, episodes, size)

    def pooled(self, episodes: int) -> Speed:
        """Ours, started as the pipeline starts it."""
        with self._watched(
            self._owned("stage2_grpo.rollouts.controller", "--settings", str(self._settings))
        ) as process:
            return self._measure("pooled (one process)", process, episodes, self._config.grpo.concurrency)

    def _owned(self, module: str, *arguments: str, health: str | None = None) -> OwnedProcess:
        hydra = (f"hydra.run.dir={self._folder / module}", "hydra.output_subdir=null")
        return OwnedProcess(
            [sys.executable, "-m", module, *arguments, *(hydra if module.startswith("agentlightning") else ())],
            name=module,
            log=self._folder / f"{module}.log",
            env={"AGL_KEY": self._key, "FIRSTCALL_SETTINGS": str(self._settings)},
            health=health,
        )

    @contextlib.contextmanager
    def _watched(self, owned: OwnedProcess) -> Iterator[psutil.Process]:
        """Run the process and yield it in a form that tells its CPU seconds."""
        others = psutil.Process().children()
        with owned:
            (process,) = (child for child in psutil.Process().children() if child not in others)
            yield process

    def _measure(self, name: str, process: psutil.Process, episodes: int, at_once: int) -> Speed:
        self._run_episodes(1)  # the controller is up, files are in the page cache
        print(f"{name}: {episodes} episodes ...", flush=True)
        cpu_before, began = cpu_seconds(process), time.perf_counter()
        self._run_episodes(episodes)
        return Speed(name, episodes, at_once, time.perf_counter() - began, cpu_seconds(process) - cpu_before)

    def _run_episodes(self, count: int) -> None:
        """Queue rollouts as the trainer does and wait until each has ended; all must have earned the full reward."""
        local = {"agent_class": "stage2_grpo.rollouts.agent.SqlAgent", "env_map": {"FIRSTCALL_QUESTION": "input"}}
        body = {"input": self._question, "config": {"timeout_seconds": EPISODE_TIMEOUT, "local": local}}
        before = self._ended()
        queued = self._http.post("/api/rollouts", json=[body] * count).raise_for_status().json()
        deadline = time.monotonic() + EPISODE_TIMEOUT
        while self._ended() < before + count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{count} episodes did not end within {EPISODE_TIMEOUT} s\n{self._logs()}")
            time.sleep(0.05)
        for rollout in queued:
            path = f"/api/rollouts/{rollout['rollout_id']}/events"
            rewards = [event["data"]["value"] for event in self._http.get(path, params={"event_type": "reward"}).json()]
            if rewards != [1.0]:
                raise SystemExit(f"an episode ended with rewards {rewards} instead of [1.0]\n{self._logs()}")

    def _ended(self) -> int:
        """Rollouts that have ended since the gateway started."""
        return int(self._http.get("/api/rollouts/terminal", params={"limit": 1}).json()["total_terminal"])

    def _logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in self._folder.glob("*.log"))


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process and all below it: those alive, and those that their parents have waited for."""
    alive = [process, *process.children(recursive=True)]
    total = 0.0
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile; its parent counts it when asked next
            total += sum(one.cpu_times()[:4])  # user, system, and both of its ended children
    return total


def script(tokenizer: Tokenizer) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A chat endpoint that plays CALLS and FINAL_ANSWER, one per turn, with token ids as vLLM sends them."""
    turns = [("", [call]) for call in CALLS] + [(FINAL_ANSWER, [])]
    token_ids = [tokenizer.encode(render_turn(content, calls)) for content, calls in turns]

    def play(request: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        prompt = [0] * (400 + 100 * turn)
        return answer(*turns[turn], token_ids=token_ids[turn], prompt_token_ids=prompt)

    return play


if __name__ == "__main__":
    main()
