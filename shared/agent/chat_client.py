"""One chat completion from an OpenAI-compatible endpoint: a vLLM server, an Agent Lightning gateway, or any other.

The client retries what can pass (lost connections, 5xx, a gateway that is paused for a weight update) and gives every
other failure a name: `ContextOverflow` is the episode's own doing, `InfrastructureError` is nobody's answer.
Answers are taken whole; the gateway refuses streams.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from shared.records import Message, ToolCall
from shared.tool_calls import is_encodable

API_KEY = "FIRSTCALL_API_KEY"  # environment variable with the key of an endpoint that a user names
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_RETRIED = (408, 409, 429)
_FIRST_DELAY_SECONDS = 0.5
_MAX_DELAY_SECONDS = 8.0
_MAX_RETRY_AFTER_SECONDS = 60.0
_CONTEXT = re.compile(r"context length|context window|maximum model length|max_model_len", re.IGNORECASE)


class InfrastructureError(Exception):
    """The endpoint failed for good; says how. Never the model's fault."""


class ContextOverflow(Exception):
    """The endpoint refused the prompt because it does not fit the model's context."""


@dataclass(frozen=True)
class Completion:
    """One assistant turn as the endpoint returned it. Token ids are None where it gives none."""

    content: str
    calls: tuple[ToolCall, ...]  # as parsed by the server
    call_errors: tuple[str, ...]  # one sentence for each server-parsed call whose arguments are no JSON object
    finish_reason: str  # "stop" | "length" | "tool_calls" | ...
    prompt_ids: list[int] | None
    token_ids: list[int] | None  # of the answer, end-of-turn token included
    prompt_tokens: int
    completion_tokens: int


class ChatClient(AsyncExitStack):
    """Async context manager around one endpoint; any number of `complete` calls may run at once.

    `base_url` ends in `/v1`. `model="auto"` suits gateways, which choose the model, and servers of a single model.
    `return_token_ids` is an extension of vLLM; an endpoint that refuses it by name is asked again without.
    `timeout_seconds` bounds one request, and likewise the wait for an endpoint that answers 429.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str = "",
        model: str = "auto",
        timeout_seconds: float = 300,
        max_retries: int = 3,
        *,
        return_token_ids: bool = True,
    ) -> None:
        super().__init__()
        self.base_url = base_url
        self._model = model
        self._timeout_seconds = timeout_seconds
        self._max_retries = max_retries
        self._return_token_ids = return_token_ids
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_seconds,
            limits=httpx.Limits(max_connections=None),
            trust_env=urlsplit(base_url).hostname not in LOOPBACK,  # a proxy from the environment can't reach loopback
            verify=base_url.startswith("https:"),  # loading certificates takes longer than many an episode's turn
        )
        self.push_async_callback(self._http.aclose)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]],
        max_tokens: int,
        temperature: float | None,
    ) -> Completion:
        """The next assistant turn. Raises ContextOverflow or InfrastructureError."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
        }
        if temperature is not None:
            body["temperature"] = temperature
        if tools:
            body["tools"] = list(tools)
        if self._return_token_ids:
            body["return_token_ids"] = True
        response = await self._post(body)
        try:
            return read_completion(response.json())
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise InfrastructureError(f"{self.base_url} sent no chat completion: {response.text[:200]}") from error

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """Send a request until it succeeds. A 429 before the deadline does not count as a failure."""
        failures, deadline = 0, time.monotonic() + self._timeout_seconds
        while failures <= self._max_retries:
            delay, is_paused = None, False
            try:
                async with asyncio.timeout(self._timeout_seconds):  # httpx would bound each read alone
                    response = await self._http.post("chat/completions", json=body, timeout=None)
            except TimeoutError:
                problem = f"no answer within {self._timeout_seconds:g} s"
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return response
                if await self._mend(body, response):
                    continue
                status = response.status_code
                problem = f"status {status}: {' '.join(response.text.split())[:300]}"
                if overflows_context(status, response.text):
                    raise ContextOverflow(problem)
                if status < 500 and status not in _RETRIED:
                    raise InfrastructureError(f"{self.base_url} refused the request: {problem}")
                is_paused = status == 429 and time.monotonic() < deadline
                wish = response.headers.get("Retry-After", "")
                if re.fullmatch(r"\d+(\.\d+)?", wish):  # in seconds; it may also be a date
                    delay = min(float(wish), _MAX_RETRY_AFTER_SECONDS)
            failures += not is_paused
            if delay is None:
                backoff = _FIRST_DELAY_SECONDS * 2 ** max(0, failures - 1)
                delay = min(backoff, _MAX_DELAY_SECONDS) * random.uniform(0.75, 1.25)
            await asyncio.sleep(delay)
        raise InfrastructureError(f"{self.base_url} failed {failures} times, last with {problem}")

    async def _mend(self, body: dict[str, Any], response: httpx.Response) -> bool:
        """Change a request that was refused for its form; True when it is worth sending again."""
        if response.status_code == 404 and body["model"] == "auto":  # a plain server; ask which model it serves
            try:
                models = await self._http.get("models")
                self._model = body["model"] = str(models.json()["data"][0]["id"])
            except (httpx.RequestError, ValueError, KeyError, IndexError, TypeError):
                return False
            return self._model != "auto"
        if response.status_code in (400, 422) and "return_token_ids" in body and "return_token_ids" in response.text:
            del body["return_token_ids"]
            self._return_token_ids = False
            return True
        return False


def overflows_context(status: int, text: str) -> bool:
    """Whether an endpoint refused a prompt because it does not fit the model's context."""
    return status == 400 and bool(_CONTEXT.search(text))


def read_completion(answer: Any) -> Completion:
    """A decoded response body; raises KeyError, IndexError, TypeError or AttributeError if it is no chat completion."""
    choice = answer["choices"][0]
    message = choice["message"]
    calls, errors = [], []
    for function in (item["function"] for item in message.get("tool_calls") or ()):
        name, arguments = function["name"], function.get("arguments") or {}
        problem = "not a JSON object of encodable text"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, strict=False)
            except (ValueError, RecursionError) as error:
                arguments, problem = None, f"not valid JSON ({error})"
        if isinstance(arguments, dict) and is_encodable(ToolCall(name, arguments)):
            calls.append(ToolCall(name, arguments))
        else:
            errors.append(f"The arguments of {name} are {problem}; send one JSON object.")
    prompt_ids, token_ids = answer.get("prompt_token_ids"), choice.get("token_ids")
    usage = answer.get("usage") or {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)}
    return Completion(
        content=(message.get("content") or "").encode(errors="ignore").decode(),  # half a surrogate pair is no text
        calls=tuple(calls),
        call_errors=tuple(errors),
        finish_reason=choice.get("finish_reason") or "stop",
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )
