"""A dress rehearsal: the real gateway, controller and vLLM server play one episode of the first training question.

It shows what no reading of settings can: a vLLM process knows the parser, the gateway finds the server under the name
that the trainer will use, the server's own rendering of the first prompt holds the tools, and an episode comes back
with a reward. Whatever the model's skill, the parser is tested: constrained decoding makes the server write a call.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from shared.agent.prompts import prompts_of
from shared.cli.machine import Drawback
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import percent, summarise
from shared.models.tokenizer import Tokenizer
from shared.processes.vllm_server import vllm_server
from shared.records import ToolCall, read_episodes
from shared.tool_calls import render_turn
from stage2_grpo.preflight.checks import Case, Finding, found
from stage2_grpo.services import Rollouts, gateway_and_controller
from stage2_grpo.training.verl_config import TrainerPaths, compose

_CALL = ToolCall("search_schema", {"query": "anything"})
_FORMS = {
    "<tool_call>": render_turn("", (_CALL,)),
    "fenced JSON": f"```json\n{json.dumps({'name': _CALL.name, 'arguments': _CALL.arguments})}\n```",
}
_SECONDS = 45.0  # that the episode may take
_TURNS = 3  # of the rehearsal episode: a call, its answer in the next prompt, and once more
_REQUEST_SECONDS = 120.0
_SET_UP = "install the project and the pinned vLLM again (`python run_pipeline.py setup`)"
_SLOW = "the machine is busy or slow, and a run would take very long: end other programs, or lower agent.max_turns"


def rehearse(case: Case) -> Iterator[Finding]:
    """Findings `server`, `model name`, `prompt`, `parser` and `episode`; without server or name no later ones."""
    agent = case.config.agent.model_copy(update={"max_turns": _TURNS})
    config = here(case.config).model_copy(update={"agent": agent})
    with tempfile.TemporaryDirectory(prefix="firstcall-doctor-") as name:
        folder = Path(name)
        try:
            with (
                gateway_and_controller(config, case.folder, folder) as rollouts,
                vllm_server(case.folder, config, folder, served_as=str(case.folder)) as endpoint,
            ):
                yield Finding("server", "ok", "gateway, controller and vLLM have started")
                yield from play(case, rollouts, trainer_model_name(case), endpoint)
        except (UserError, httpx.HTTPError) as problem:
            said = str(problem) or repr(problem)
            if isinstance(problem, httpx.TimeoutException):
                said = f"A request of a few dozen tokens took {_REQUEST_SECONDS:.0f} s; {_SLOW}."
            if "invalid tool call parser" in said:
                said = f"vLLM knows no tool parser {config.vllm.tool_call_parser!r} and does not start; {_SET_UP}."
            yield Finding("parser" if _SET_UP in said else "server", "error", said)


def here(config: Config) -> Config:
    """The settings with everything that a step's rollouts need on this machine."""
    local = {"ray_address": None, "gateway_url": None, "job_template": None, "nodes": 1}
    return config.model_copy(update={"grpo": config.grpo.model_copy(update=local)})


def trainer_model_name(case: Case) -> str:
    """The name under which the trainer registers its servers at the gateway."""
    paths = TrainerPaths(case.folder, case.run.grpo, "http://127.0.0.1:1")
    return str(compose(case.config, paths).actor_rollout_ref.model.path)


def play(case: Case, rollouts: Rollouts, model: str, endpoint: str) -> Iterator[Finding]:
    """Register the server as `model`, as the trainer would, dictate calls, await the controller's episode."""
    parser, prompts = case.config.vllm.tool_call_parser, prompts_of(case.config.agent)
    forms = _FORMS if parser == "qwen25_coder" else {"<tool_call>": _FORMS["<tool_call>"]}
    with rollouts.client(_REQUEST_SECONDS) as http:
        http.post("/api/models", json=[{"model": model, "endpoint": endpoint}]).raise_for_status()
        rollout = {"input": dict(vars(case.train[0])), "is_train": True, "config": {"timeout_seconds": 600}}
        rollout_id = http.post("/api/rollouts", json=[rollout]).raise_for_status().json()[0]["rollout_id"]
        path = f"/proxy/rollout/{rollout_id}/attempt/doctor/mode/train/openai/v1/chat/completions"
        request = {
            "model": "auto",
            "messages": prompts.opening(case.train[0].question),
            "tools": prompts.tools,
            "max_tokens": case.config.agent.max_turn_tokens,
        }
        answers = {
            form: http.post(path, json=request | {"structured_outputs": {"choice": [text]}})
            for form, text in forms.items()
        }
        if refused := [answer for answer in answers.values() if not answer.is_success]:
            said = f"{model!r} ({refused[0].status_code}: {refused[0].text[:300]})"
            yield Finding(
                "model name" if refused[0].status_code == 503 else "server",
                "error",
                f"Gateway or server refuse a chat completion with tools for the trainer's model name {said}; move the "
                "checkpoint to a folder with a plain name, and check vllm.tool_call_parser.",
            )
            return
        yield Finding("model name", "ok", f"the gateway found the server as {model}")
        bodies = {form: answer.json() for form, answer in answers.items()}
        yield from found("prompt", lambda: _prompt(case, bodies["<tool_call>"].get("prompt_token_ids") or []))
        yield from found("parser", lambda: _parser(case.config, bodies))
        yield from found("episode", lambda: _episode(case, http, rollout_id, rollouts.settings_file.parent))


def _prompt(case: Case, ids: list[int]) -> str:
    """The prompt that the server really gave the model holds the tools."""
    text = Tokenizer.from_folder(case.folder).decode(ids, skip_special=False)
    tools = prompts_of(case.config.agent).tools
    for function in (tool["function"] for tool in tools):
        if function["description"] not in text:  # the system prompt holds the names
            raise UserError(
                f"The first prompt as the server rendered it ({len(ids)} tokens) does not describe the tool "
                f"{function['name']}, so the model cannot call it; use the merged model of stage 1, which carries a "
                "tool-aware chat template."
            )
    return f"the server's first prompt has {len(ids)} tokens and holds all {len(tools)} tools"


def _parser(config: Config, bodies: Mapping[str, dict[str, Any]]) -> str:
    """The dictated calls came back as tool calls."""
    for form, body in bodies.items():
        if len(body["choices"][0]["message"].get("tool_calls") or []) != 1:
            raise UserError(
                f"With the parser {config.vllm.tool_call_parser} a call written as {form} came back as text, so no "
                f"call would be seen; {_SET_UP}."
            )
    return f"{config.vllm.tool_call_parser} is registered in vLLM and reads {' and '.join(bodies)}"


def _episode(case: Case, http: httpx.Client, rollout_id: str, folder: Path) -> str:
    """How the controller's own episode of the same rollout went."""
    subject, state, deadline = f"The episode of question {case.train[0].id}", "queuing", time.monotonic() + _SECONDS
    while state in ("queuing", "running") and time.monotonic() < deadline:
        time.sleep(0.25)
        state = http.get(f"/api/rollouts/{rollout_id}").json()["rollout"]["status"]["state"]
    if state in ("queuing", "running"):
        raise Drawback(f"{subject} is still {state} after {_SECONDS:.0f} s; {_SLOW}.")
    played = read_episodes(folder / "episodes.jsonl")
    reward = played[-1].reward if played else None
    if state != "succeeded" or not reward:
        said = played[-1].error if played else "no record of it"
        raise UserError(f"{subject} {state} ({said}); look at the database and gold SQL of this question.")
    summary = summarise(played[-1:])
    figures = (
        f"{summary.mean_turns:.0f} turns, {summary.tool_calls} calls, {percent(summary.merged_share)} of later turns "
        f"merged, reward {reward.total:.2f}, {played[-1].seconds:.0f} s"
    )
    if not summary.tool_calls:
        raise Drawback(f"{subject} made no tool call ({figures}), and GRPO learns from calls; train stage 1 longer.")
    return figures
