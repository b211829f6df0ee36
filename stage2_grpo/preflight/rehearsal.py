"""A dress rehearsal: the real gateway, controller and vLLM server play one episode of the first training question.

It shows what no reading of settings can: a vLLM process knows the parser, the gateway finds the server under the name that
the trainer will use, the server's own rendering of the first prompt holds the tools, and an episode comes back with a
reward. Whatever the model's skill, the parser is tested: constrained decoding makes the server write a call.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from shared.agent.prompts import TOOLS, opening_messages
from shared.cli.machine import Problem
from shared.config.schema import Config
from shared.errors import UserError
from shared.evaluation.metrics import percent, summarise
from shared.models.tokenizer import Tokenizer
from shared.processes.vllm_server import vllm_server
from shared.records import ToolCall, read_episodes
from shared.tool_calls import render_turn
from stage2_grpo.preflight.findings import Case, Finding
from stage2_grpo.services import Rollouts, gateway_and_controller, register
from stage2_grpo.training.verl_config import TrainerPaths, compose

_CALL = ToolCall("search_schema", {"query": "anything"})
_FORMS = {
    "<tool_call>": render_turn("", (_CALL,)),
    "fenced JSON": f"```json\n{json.dumps({'name': _CALL.name, 'arguments': _CALL.arguments})}\n```",
}
_EPISODE_SECONDS = 45.0
_TURNS = 3  # of the rehearsal episode: a call, its answer in the next prompt, and once more
_REQUEST_SECONDS = 120.0
_WHY = "every episode of a run goes this way."
_FIXES = {
    "server": "change what the message names; memory and versions have findings of their own.",
    "model name": "move the checkpoint to a folder with a plain name (no quotes, backslashes or ${).",
    "prompt": "use the merged model of stage 1, which carries a tool-aware chat template.",
    "parser": "install the project and the pinned vLLM again (`python run_pipeline.py setup`).",
    "episode": "look at the database and gold SQL of this question.",
}
_SLOW = "end other programs, or lower agent.max_turn_tokens and agent.max_turns."


def rehearse(case: Case) -> Iterator[Finding]:
    """Findings `server`, `model name`, `prompt`, `parser` and `episode`, up to the first that fails."""
    agent = case.config.agent.model_copy(update={"max_turns": _TURNS})
    config = here(case.config).model_copy(update={"agent": agent})
    with tempfile.TemporaryDirectory(prefix="firstcall-doctor-") as name:
        folder = Path(name)
        try:
            with (
                gateway_and_controller(config, case.folder, folder) as rollouts,
                vllm_server(case.folder, config, folder, served_as=str(case.folder)) as endpoint,
            ):
                yield Finding.of("server", "gateway, controller and vLLM have started")
                yield from play(case, rollouts, trainer_model_name(case), endpoint)
        except httpx.TimeoutException:
            yield _failed("server", f"A request of a few dozen tokens took {_REQUEST_SECONDS:.0f} s.", _SLOW)
        except (UserError, httpx.HTTPError) as problem:
            said = str(problem) or repr(problem)
            yield _failed("parser" if "invalid tool call parser" in said else "server", said)


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
    parser = case.config.vllm.tool_call_parser
    forms = _FORMS if parser == "qwen25_coder" else {"<tool_call>": _FORMS["<tool_call>"]}
    with rollouts.client(_REQUEST_SECONDS) as http:
        register(http, model, endpoint)
        rollout = {"input": dict(vars(case.train[0])), "is_train": True, "config": {"timeout_seconds": 600}}
        rollout_id = http.post("/api/rollouts", json=[rollout]).raise_for_status().json()[0]["rollout_id"]
        path = f"/proxy/rollout/{rollout_id}/attempt/doctor/mode/train/openai/v1/chat/completions"
        request = {
            "model": "auto",
            "messages": opening_messages(case.train[0].question),
            "tools": TOOLS,
            "max_tokens": case.config.agent.max_turn_tokens,
        }
        answers = {
            form: http.post(path, json=request | {"structured_outputs": {"choice": [text]}})
            for form, text in forms.items()
        }
        refused = next((answer for answer in answers.values() if not answer.is_success), None)
        if refused is not None and refused.status_code == 503:
            said = f"The gateway finds no server under its own model name: {refused.text[:300]}; the trainer registers"
            yield _failed("model name", f"{said} {model!r}.")
        elif refused is not None:
            said = f"({refused.status_code}: {refused.text[:300]})"
            yield _failed("server", f"The rollout server refused a chat completion with tools {said}.")
        else:
            yield Finding.of("model name", f"the gateway found the server as {model}")
            yield _prompt(case, answers["<tool_call>"].json().get("prompt_token_ids") or [])
            messages = {form: answer.json()["choices"][0]["message"] for form, answer in answers.items()}
            unread = [form for form, message in messages.items() if len(message.get("tool_calls") or []) != 1]
            if unread:
                yield _failed("parser", f"With the parser {parser} a call written as {unread[0]} came back as text.")
            else:
                yield Finding.of("parser", f"{parser} is registered in vLLM and reads {' and '.join(forms)}")
            yield _episode(case, http, rollout_id, rollouts.settings_file.parent)


def _prompt(case: Case, ids: list[int]) -> Finding:
    """Whether the prompt that the server really gave the model holds the tools."""
    text = Tokenizer.from_folder(case.folder).decode(ids, skip_special=False)
    unseen = [tool["function"]["name"] for tool in TOOLS if tool["function"]["name"] not in text]
    said = f"first prompt, as the server rendered it, has {len(ids)} tokens and"
    if unseen:
        return _failed("prompt", f"The {said} does not hold the tool {unseen[0]}.")
    return Finding.of("prompt", f"the {said} holds all {len(TOOLS)} tools")


def _episode(case: Case, http: httpx.Client, rollout_id: str, folder: Path) -> Finding:
    """How the controller's own episode of the same rollout went."""
    deadline, state, subject = (
        time.monotonic() + _EPISODE_SECONDS,
        "queuing",
        f"The episode of question {case.train[0].id}",
    )
    while state in ("queuing", "running") and time.monotonic() < deadline:
        time.sleep(0.25)
        state = http.get(f"/api/rollouts/{rollout_id}").json()["rollout"]["status"]["state"]
    if state in ("queuing", "running"):
        return _failed("episode", f"{subject} is still {state} after {_EPISODE_SECONDS:.0f} s.", _SLOW)
    played = read_episodes(folder / "episodes.jsonl")
    reward = played[-1].reward if played else None
    if state != "succeeded" or not reward:
        return _failed("episode", f"{subject} {state}: {played[-1].error if played else 'no record of it'}.")
    found = summarise(played[-1:])
    figures = (
        f"{found.mean_turns:.0f} turns, {found.tool_calls} calls, {percent(found.merged_share)} of later turns merged, "
        f"reward {reward.total:.2f}, {played[-1].seconds:.0f} s"
    )
    if found.tool_calls:
        return Finding.of("episode", figures)
    return _failed("episode", f"{subject} made no tool call ({figures}).", "train stage 1 longer (sft.epochs).")


def _failed(check: str, what: str, doubt: str = "") -> Finding:
    """A failure; with `doubt`, the fix of what only makes a run worse, a warning."""
    return Finding.of(check, Problem(what, _WHY, doubt or _FIXES[check], fatal=not doubt))
