"""A dress rehearsal: the real gateway, controller and vLLM server play one episode of the first training question.

It shows what no reading of settings can: the parser is registered inside a vLLM process, the gateway finds the server under
the name that the trainer will use, the server's own rendering of the first prompt holds the tools, and an episode comes
back with a reward. Whatever the model's skill, the parser is tested with fixed answers: the server is made to write a
call by constrained decoding.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from shared.agent.prompts import TOOLS, opening_messages
from shared.errors import UserError
from shared.evaluation.metrics import percent, summarise
from shared.models.tokenizer import Tokenizer
from shared.processes.owned_process import OwnedProcess, answers, free_port
from shared.processes.vllm_server import server_argv, server_environment
from shared.records import ToolCall, read_episodes
from shared.tool_calls import render_turn
from stage2_grpo.preflight.doctor.arithmetic import check_rewards
from stage2_grpo.preflight.doctor.findings import Case, Finding, error, ok, warning
from stage2_grpo.services import Rollouts, gateway_and_controller, register
from stage2_grpo.training.verl_config import TrainerPaths, compose

_CALL = ToolCall("search_schema", {"query": "anything"})
_EPISODE_SECONDS = 45.0
_TURNS = 3  # of the rehearsal episode: a call, its answer in the next prompt, and once more
_REQUEST_SECONDS = 120.0


def rehearse(case: Case) -> Iterator[Finding]:
    """Findings `rewards` (found while vLLM starts), then `server`, `model name`, `prompt`, `parser` and `episode`."""
    if case.model is None or not case.train:
        yield from check_rewards(case)
        return
    here = replace(case.config.grpo, ray_address=None, gateway_url=None, job_template=None, nodes=1)
    short = replace(case.config, agent=replace(case.config.agent, max_turns=_TURNS), grpo=here)
    with tempfile.TemporaryDirectory(prefix="firstcall-doctor-") as name:
        folder = Path(name)
        port = free_port()
        server = _server(case, folder, port)
        try:
            with server:
                yield from check_rewards(case)
                with gateway_and_controller(short, case.model, folder) as rollouts:
                    model = trainer_model_name(case)
                    yield _started(case, server, port)
                    yield from play(case, rollouts, model, port)
        except httpx.TimeoutException:
            yield warning(
                "server",
                f"A request of a few dozen tokens took the rollout server more than {_REQUEST_SECONDS:.0f} s.",
                why="the machine is busy or slow; the rest of the rehearsal was left out, and a run would take very long.",
                fix="end other programs and examine again.",
            )
        except (UserError, httpx.HTTPError) as problem:
            yield _not_started(case, str(problem) or repr(problem))


def trainer_model_name(case: Case) -> str:
    """The name under which the trainer registers its servers at the gateway."""
    assert case.model is not None
    paths = TrainerPaths(case.model, case.run.grpo, "http://127.0.0.1:1")
    return str(compose(case.config, paths).actor_rollout_ref.model.path)


def _server(case: Case, folder: Path, port: int) -> OwnedProcess:
    """vLLM under the name that VERL's servers have: the path."""
    assert case.model is not None
    argv = server_argv(case.model, case.config, port, served_as=str(case.model))
    return OwnedProcess(argv, name="vLLM", log=folder / "vllm.log", env=server_environment(case.config), grace=15)


def _started(case: Case, server: OwnedProcess, port: int) -> Finding:
    """Waits until the server answers; not its own health check, so that everything else starts meanwhile."""
    seconds = case.config.vllm.start_timeout_seconds
    deadline = time.monotonic() + seconds
    while not answers(f"http://127.0.0.1:{port}/health"):
        server.check()
        if time.monotonic() > deadline:
            raise UserError(f"vLLM was not ready after {seconds:.0f} s (vllm.start_timeout_seconds).")
        time.sleep(0.25)
    return ok("server", "gateway, controller and vLLM have started")


def _not_started(case: Case, problem: str) -> Finding:
    if "invalid tool call parser" in problem:
        return error(
            "parser",
            f"vLLM knows no tool parser {case.config.vllm.tool_call_parser!r}.",
            why="the rollout server would not start.",
            fix="install the project in this environment: `python run_pipeline.py setup`.",
        )
    return error(
        "server",
        problem,
        why="the rollouts of a run need these services.",
        fix="mend what the last lines name; memory, ports and versions have findings of their own.",
    )


def play(case: Case, rollouts: Rollouts, model: str, port: int) -> Iterator[Finding]:
    """Register the server on `port` as `model`, as the trainer would, dictate calls, await the controller's episode."""
    with rollouts.client(_REQUEST_SECONDS) as http:
        register(http, model, f"http://127.0.0.1:{port}/v1")
        rollout = {"input": dict(vars(case.train[0])), "is_train": True, "config": {"timeout_seconds": 600}}
        rollout_id = http.post("/api/rollouts", json=[rollout]).raise_for_status().json()[0]["rollout_id"]
        path = f"/proxy/rollout/{rollout_id}/attempt/doctor/mode/train/openai/v1/chat/completions"
        answer = http.post(path, json=_dictated(case, _stock_form()))
        if not answer.is_success:
            yield _refused(answer, model)
            return
        yield ok("model name", f"the gateway found the server as {model}")
        yield _prompt_finding(case, answer.json())
        yield _parser_finding(case, http, path, answer.json())
        yield _episode_finding(case, http, rollout_id, rollouts.settings_file.parent)


def _refused(answer: httpx.Response, model: str) -> Finding:
    said = answer.text[:300]
    if answer.status_code == 503:
        return error(
            "model name",
            f"The gateway finds no server under its own model name: {said}; the trainer registers {model!r}.",
            why="the two names must be equal byte for byte, or every rollout fails.",
            fix="move the checkpoint to a folder with a plain name (no quotes, backslashes or ${).",
        )
    return error(
        "server",
        f"The rollout server refused a chat completion with tools ({answer.status_code}: {said}).",
        why="each turn of an episode is such a request.",
        fix="check vllm.tool_call_parser and vllm.max_model_len.",
    )


def _prompt_finding(case: Case, answer: dict[str, Any]) -> Finding:
    """Whether the prompt that the server really gave the model holds the tools."""
    assert case.model is not None
    ids = answer.get("prompt_token_ids") or []
    text = Tokenizer.from_folder(case.model).decode(ids, skip_special=False)
    unseen = [tool["function"]["name"] for tool in TOOLS if tool["function"]["name"] not in text]
    if unseen:
        return error(
            "prompt",
            f"The first prompt as the server rendered it ({len(ids)} tokens) does not hold the tool {unseen[0]}.",
            why="the model cannot call what it does not see.",
            fix="use the merged model of stage 1, which carries a tool-aware chat template.",
        )
    return ok("prompt", f"the server's first prompt has {len(ids)} tokens and holds all {len(TOOLS)} tools")


def _parser_finding(case: Case, http: httpx.Client, path: str, stock: dict[str, Any]) -> Finding:
    """Whether dictated calls come back as tool calls: in the stock form, and for our parser in fenced JSON, too."""
    name, answers = case.config.vllm.tool_call_parser, {"<tool_call>": stock}
    if name == "qwen25_coder":
        answers["fenced JSON"] = http.post(path, json=_dictated(case, _fenced_form())).raise_for_status().json()
    for form, answer in answers.items():
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        if [call["function"]["name"] for call in calls] != [_CALL.name]:
            return error(
                "parser",
                f"The server runs with the parser {name}, but a call written as {form} did not come back as a tool call.",
                why="no call would be seen: every episode ends after its first turn.",
                fix="install the project and the pinned vLLM again (`python run_pipeline.py setup`).",
            )
    return ok("parser", f"{name} is registered in vLLM and reads {' and '.join(answers)}")


def _episode_finding(case: Case, http: httpx.Client, rollout_id: str, folder: Path) -> Finding:
    """How the controller's own episode of the same rollout went."""
    deadline, state = time.monotonic() + _EPISODE_SECONDS, "queuing"
    while state in ("queuing", "running") and time.monotonic() < deadline:
        time.sleep(0.25)
        state = http.get(f"/api/rollouts/{rollout_id}").json()["rollout"]["status"]["state"]
    if state in ("queuing", "running"):
        return warning(
            "episode",
            f"The rehearsal episode of question {case.train[0].id} is still {state} after {_EPISODE_SECONDS:.0f} s.",
            why="a step needs many of them; on this machine, or while it is busy, a run is slow.",
            fix="end other programs, or lower agent.max_turn_tokens and agent.max_turns.",
        )
    played = read_episodes(folder / "episodes.jsonl")
    reward = played[-1].reward if played else None
    if state != "succeeded" or not reward:
        return error(
            "episode",
            f"The rehearsal episode of question {case.train[0].id} {state}: {played[-1].error if played else 'no record of it'}.",
            why="gateway, controller and server must play an episode together.",
            fix="look at the database and gold SQL of this question.",
        )
    found = summarise(played[-1:])
    what = (
        f"{found.mean_turns:.0f} turns, {found.tool_calls} calls, {percent(found.merged_share)} of later turns merged, "
        f"reward {reward.total:.2f}, {played[-1].seconds:.0f} s"
    )
    if not found.tool_calls:
        return warning(
            "episode",
            f"The rehearsal episode made no tool call ({what}).",
            why="without calls there is nothing to learn from; the first step stops when no episode makes one.",
            fix="train stage 1 longer (sft.epochs, sft.max_traces).",
        )
    return ok("episode", what)


def _dictated(case: Case, text: str) -> dict[str, Any]:
    """A request whose answer can only be `text`."""
    return {
        "model": "auto",
        "messages": opening_messages(case.train[0].question),
        "tools": TOOLS,
        "max_tokens": case.config.agent.max_turn_tokens,
        "structured_outputs": {"choice": [text]},
    }


def _stock_form() -> str:
    return render_turn("", (_CALL,))


def _fenced_form() -> str:
    return f"```json\n{json.dumps({'name': _CALL.name, 'arguments': _CALL.arguments})}\n```"
