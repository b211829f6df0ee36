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
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from shared.agent.prompts import TOOLS, opening_messages
from shared.cli.machine import Problem
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.processes.owned_process import OwnedProcess, free_port
from shared.processes.vllm_server import server_argv, server_environment
from shared.records import JsonlTail, ToolCall
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
_SET_UP = "install the project and the pinned vLLM again (`python run_pipeline.py setup`)."


def rehearse(case: Case) -> Iterator[Finding]:
    """Findings `server`, `model name`, `prompt`, `parser` and `episode`, up to the first that fails."""
    here = replace(case.config.grpo, ray_address=None, gateway_url=None, job_template=None, nodes=1)
    short = replace(case.config, agent=replace(case.config.agent, max_turns=_TURNS), grpo=here)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="firstcall-doctor-") as name:
        server = OwnedProcess(
            server_argv(case.folder, case.config, port, served_as=str(case.folder)),  # the name that VERL's servers have
            name="vLLM",
            log=Path(name) / "vllm.log",
            env=server_environment(case.config),
            health=f"http://127.0.0.1:{port}/health",
            start_timeout=case.config.vllm.start_timeout_seconds,
            grace=15,
        )
        try:
            with gateway_and_controller(short, case.folder, Path(name)) as rollouts, server:
                yield Finding.of("server", "gateway, controller and vLLM have started")
                yield from play(case, rollouts, trainer_model_name(case), port)
        except httpx.TimeoutException:
            slow = Problem(
                f"A request of a few dozen tokens took the rollout server more than {_REQUEST_SECONDS:.0f} s.",
                "the machine is busy or slow; the rest of the rehearsal was left out, and a run would take very long.",
                "end other programs and examine again.",
                fatal=False,
            )
            yield Finding.of("server", slow)
        except (UserError, httpx.HTTPError) as problem:
            yield _failed(case, str(problem) or repr(problem))


def _failed(case: Case, problem: str) -> Finding:
    if "invalid tool call parser" in problem:
        unknown = f"vLLM knows no tool parser {case.config.vllm.tool_call_parser!r}."
        return Finding.of("parser", Problem(unknown, "the rollout server would not start.", _SET_UP))
    fix = "change what its last lines name; memory, ports and versions have findings of their own."
    return Finding.of("server", Problem(problem, "the rollouts of a run need these services.", fix))


def trainer_model_name(case: Case) -> str:
    """The name under which the trainer registers its servers at the gateway."""
    paths = TrainerPaths(case.folder, case.run.grpo, "http://127.0.0.1:1")
    return str(compose(case.config, paths).actor_rollout_ref.model.path)


def play(case: Case, rollouts: Rollouts, model: str, port: int) -> Iterator[Finding]:
    """Register the server on `port` as `model`, as the trainer would, dictate calls, await the controller's episode."""
    with rollouts.client(_REQUEST_SECONDS) as http:
        register(http, model, f"http://127.0.0.1:{port}/v1")
        rollout = {"input": dict(vars(case.train[0])), "is_train": True, "config": {"timeout_seconds": 600}}
        rollout_id = http.post("/api/rollouts", json=[rollout]).raise_for_status().json()[0]["rollout_id"]
        path = f"/proxy/rollout/{rollout_id}/attempt/doctor/mode/train/openai/v1/chat/completions"
        forms = _FORMS if case.config.vllm.tool_call_parser == "qwen25_coder" else {"<tool_call>": _FORMS["<tool_call>"]}
        answers: dict[str, dict[str, Any]] = {}
        for form, text in forms.items():
            answer = http.post(path, json=_dictated(case, text))
            if not answer.is_success:
                yield _refused(answer, model)
                return
            answers[form] = answer.json()
        yield Finding.of("model name", f"the gateway found the server as {model}")
        yield Finding.of("prompt", _prompt(case, answers["<tool_call>"]))
        yield Finding.of("parser", _parser(case, answers))
        yield Finding.of("episode", _episode(case, http, rollout_id, rollouts.settings_file.parent))


def _dictated(case: Case, text: str) -> dict[str, Any]:
    """A request whose answer can only be `text`."""
    return {
        "model": "auto",
        "messages": opening_messages(case.train[0].question),
        "tools": TOOLS,
        "max_tokens": case.config.agent.max_turn_tokens,
        "structured_outputs": {"choice": [text]},
    }


def _refused(answer: httpx.Response, model: str) -> Finding:
    said = answer.text[:300]
    if answer.status_code == 503:
        unknown = Problem(
            f"The gateway finds no server under its own model name: {said}; the trainer registers {model!r}.",
            "the two names must be equal byte for byte, or every rollout fails.",
            "move the checkpoint to a folder with a plain name (no quotes, backslashes or ${).",
        )
        return Finding.of("model name", unknown)
    refused = f"The rollout server refused a chat completion with tools ({answer.status_code}: {said})."
    fix = "check vllm.tool_call_parser and vllm.max_model_len."
    return Finding.of("server", Problem(refused, "each turn of an episode is such a request.", fix))


def _prompt(case: Case, answer: dict[str, Any]) -> str | Problem:
    """Whether the prompt that the server really gave the model holds the tools."""
    ids = answer.get("prompt_token_ids") or []
    text = Tokenizer.from_folder(case.folder).decode(ids, skip_special=False)
    for tool in TOOLS:
        if tool["function"]["name"] not in text:
            return Problem(
                f"The first prompt as the server rendered it ({len(ids)} tokens) does not hold the tool "
                f"{tool['function']['name']}.",
                "the model cannot call what it does not see.",
                "use the merged model of stage 1, which carries a tool-aware chat template.",
            )
    return f"the server's first prompt has {len(ids)} tokens and holds all {len(TOOLS)} tools"


def _parser(case: Case, answers: dict[str, dict[str, Any]]) -> str | Problem:
    """Whether dictated calls come back as tool calls: in the stock form, and for our parser in fenced JSON, too."""
    name = case.config.vllm.tool_call_parser
    for form, answer in answers.items():
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        if [call["function"]["name"] for call in calls] != [_CALL.name]:
            return Problem(
                f"The server runs with the parser {name}, but a call written as {form} did not come back as a tool call.",
                "no call would be seen: every episode ends after its first turn.",
                _SET_UP,
            )
    return f"{name} is registered in vLLM and reads {' and '.join(answers)}"


def _episode(case: Case, http: httpx.Client, rollout_id: str, folder: Path) -> str | Problem:
    """How the controller's own episode of the same rollout went."""
    deadline, state, name = time.monotonic() + _EPISODE_SECONDS, "queuing", case.train[0].id
    while state in ("queuing", "running") and time.monotonic() < deadline:
        time.sleep(0.25)
        state = http.get(f"/api/rollouts/{rollout_id}").json()["rollout"]["status"]["state"]
    if state in ("queuing", "running"):
        return Problem(
            f"The rehearsal episode of question {name} is still {state} after {_EPISODE_SECONDS:.0f} s.",
            "a step needs many of them; on this machine, or while it is busy, a run is slow.",
            "end other programs, or lower agent.max_turn_tokens and agent.max_turns.",
            fatal=False,
        )
    rows = JsonlTail(folder / "episodes.jsonl").new_rows()
    if state != "succeeded" or not rows:
        return Problem(
            f"The rehearsal episode of question {name} {state}: {rows[-1]['error'] if rows else 'no record of it'}.",
            "gateway, controller and server must play an episode together.",
            "look at the database and gold SQL of this question.",
        )
    row = rows[-1]
    played = (
        f"{row['turns']} turns, {row['calls']} calls, {row['merged_turns']} of {row['later_turns']} later turns merged, "
        f"reward {row['reward']['total']:.2f}, {row['seconds']:.0f} s"
    )
    if row["calls"]:
        return played
    return Problem(
        f"The rehearsal episode made no tool call ({played}).",
        "without calls there is nothing to learn from; the first step stops when no episode makes one.",
        "train stage 1 longer (sft.epochs, sft.max_traces).",
        fatal=False,
    )
