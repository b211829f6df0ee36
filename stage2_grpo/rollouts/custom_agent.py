"""Bring your own agent: `grpo.agent: module:function` plays the episodes instead of the built-in loop.

    async def function(task: Assignment) -> None:
        answer the question with `task.tools` and the OpenAI-compatible endpoint `task.base_url`

Nothing else has to be reported. Every request goes through Agent Lightning's gateway, which keeps it: the episode, with
its turns, tokens and records, is read from there, and the submission is what the built-in agent's would be (the last
```sql block of the final answer, else the last query that ran). An agent that raises is lost, not wrong. Only the
rollouts and validations of GRPO are its own: the readiness gate and every evaluation play the built-in agent.

Rules for the agent: it asks for whole answers (the gateway refuses streams), starts from `shared.agent.prompts`, whose
words stage 1 taught, runs SQL through `task.tools` alone, and keeps to `task.limits`. A prompt that outgrows the server
(agent.context_tokens) ends the episode, whatever the agent makes of the refusal.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from shared.agent.chat_client import Completion, InfrastructureError, overflows_context, read_completion
from shared.agent.episode import TurnReader, ending, submission
from shared.agent.prompts import prompts_of
from shared.agent.tools import Observation, Toolbox
from shared.config.schema import AgentConfig
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, Question, StopReason, ToolCall, Turn

_ROLLOUT = re.compile(r"(.*)/proxy/rollout/([^/]+)/")


@dataclass(frozen=True)
class RecordingTools:
    """The agent's tools on the question's database; `run` may be called from any thread."""

    toolbox: Toolbox = field(repr=False)
    ran: list[tuple[ToolCall, Observation]] = field(default_factory=list)

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """Run one call and return the text for the model; its mistakes come back as "Error: ..."."""
        call = ToolCall(name, arguments)
        observation = self.toolbox.run(call)
        self.ran.append((call, observation))
        return observation.text


@dataclass(frozen=True)
class Assignment:
    """What an agent needs for one episode."""

    question: Question
    tools: RecordingTools
    base_url: str  # ends in /v1; the gateway chooses model and temperature
    api_key: str = field(repr=False)
    limits: AgentConfig
    call_timeout_seconds: float  # of one request to the model


Agent = Callable[[Assignment], Coroutine[Any, Any, Any]]


async def play(agent: Agent, task: Assignment, tokenizer: Tokenizer) -> Episode:
    """Let the agent play, then read the episode from the gateway. A failing agent or gateway is an ending."""
    start, error = time.monotonic(), ""
    try:
        await agent(task)
    except Exception as failure:  # other people's code: what it raises ends this episode alone
        error = f"{type(failure).__name__}: {failure}"
    requests: list[dict[str, Any]] = []
    try:
        found = _ROLLOUT.match(task.base_url)
        if not found:
            raise ValueError(f"{task.base_url} is no rollout's endpoint")
        events = "{}/api/rollouts/{}/events".format(*found.groups())  # of the latest attempt, in order
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30, trust_env=False) as http:
            answer = await http.get(events, params={"event_type": "model_request"})
        requests = [event["data"] for event in answer.raise_for_status().json()]
    except (httpx.HTTPError, ValueError) as failure:
        error = error or f"the gateway's record cannot be read: {failure!r}"
    episode = read_episode(task, requests, tokenizer, error)
    return dataclasses.replace(episode, seconds=time.monotonic() - start)


def read_episode(
    task: Assignment, requests: Sequence[dict[str, Any]], tokenizer: Tokenizer, error: str = ""
) -> Episode:
    """The episode that these requests (`request`, `response`, `http_status` of each) and tool runs amount to.

    A call that the agent did not run through the tools counts as failed. `error` is what the agent raised, if anything.
    """
    # Clients repeat a request. Of equal conversations the last one counts, as for the trainer.
    last_tries = {json.dumps(entry["request"].get("messages")): entry for entry in requests}.values()
    answered = [entry for entry in last_tries if entry["http_status"] == 200]
    reader, left = TurnReader(tokenizer, prompts_of(task.limits).tools), list(task.tools.ran)
    turns: list[Turn] = []
    completion: Completion | None = None
    try:
        for entry in answered:
            completion = read_completion(entry["response"])
            turns.append(_with_observations(reader.read(completion), left))
    except (KeyError, IndexError, TypeError, AttributeError) as failure:
        error = f"{InfrastructureError.__name__}: no chat completion in the gateway's record: {failure!r}"
    if requests and overflows_context(requests[-1]["http_status"], json.dumps(requests[-1]["response"])):
        stop = StopReason.CONTEXT_LIMIT
    elif error or not turns or completion is None:
        stop = StopReason.INFRASTRUCTURE
    else:
        stop = ending(turns[-1], completion.finish_reason, is_last=True) or StopReason.TURN_LIMIT
    last = answered[len(turns) - 1] if turns else None
    return Episode(
        question_id=task.question.id,
        turns=tuple(turns),
        stop=stop,
        submitted_sql=submission(stop, turns),
        messages=[*last["request"].get("messages", []), last["response"]["choices"][0]["message"]] if last else [],
        error=(error or "the agent asked the model nothing") if stop is StopReason.INFRASTRUCTURE else "",
    )


def _with_observations(turn: Turn, left: list[tuple[ToolCall, Observation]]) -> Turn:
    """The turn with the observations of its calls; removes those runs from `left`."""
    observations = []
    for call in turn.calls:
        match = next((run for run in left if run[0] == call), None)
        if match:
            left.remove(match)
        observations.append(match[1] if match else Observation("", ok=False))
    texts, oks = [entry.text for entry in observations], [entry.ok for entry in observations]
    return dataclasses.replace(turn, observations=tuple(texts), ok=tuple(oks))
