"""The agent: one question, turns of model and tools, one named ending. The only loop over turns in the pipeline.

Everything that plays an episode (RL, evaluation, a teacher) calls `run_episode` with another endpoint. `TurnReader`,
`ending` and `submission` read a conversation; they also read those of an agent that somebody else wrote.
What the model says is never an error here: calls that cannot be read or run come back to it as tool messages. The
conversation only ever grows at its end, so each prompt starts with the previous prompt and answer, token for token, as
long as the model writes calls the way the chat template does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from shared.agent.chat_client import ChatClient, Completion, ContextOverflow, InfrastructureError
from shared.agent.prompts import prompts_of
from shared.agent.tools import Observation, Toolbox
from shared.config.schema import AgentConfig
from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from shared.records import Episode, Message, Question, StopReason, ToolCall, Turn
from shared.sql.database import SandboxError
from shared.tool_calls import parse, parse_hermes

_MIN_ROOM = 16  # tokens; a turn that could not even write this much is not started
_TEMPLATE_TOKENS = 128  # at most, of what a chat template says about the tool list
_MARKUP = (
    "\n<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"  # around a message
)
_END_OF_TURN = re.compile(r"(?:<\|\w+\|>|</s>)+\Z")
_SQL_BLOCK = re.compile(r"```sql\b\s*(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


async def run_episode(
    question: Question,
    *,
    toolbox: Toolbox,
    chat: ChatClient,
    tokenizer: Tokenizer,
    limits: AgentConfig,
    temperature: float | None,
    watch: Callable[[Message], None] = lambda message: None,
) -> Episode:
    """Play one episode; with `temperature` None the server chooses. `watch` gets each message as it comes about.

    A failing endpoint or a damaged database is an ending (`INFRASTRUCTURE`), not an exception.
    """
    start, error, stop = time.monotonic(), "", None
    prompts = prompts_of(limits)
    messages, turns, reader = prompts.opening(question.question), list[Turn](), TurnReader(tokenizer, prompts.tools)

    def most_tokens(new: Sequence[Message]) -> int:
        return sum(tokenizer.count(message["content"]) + tokenizer.count(_MARKUP) for message in new)

    prompt_tokens = (
        _TEMPLATE_TOKENS + tokenizer.count(json.dumps(prompts.tools)) + most_tokens(messages)
    )  # of the next prompt
    try:
        while stop is None:
            room = limits.context_tokens - prompt_tokens
            if room < _MIN_ROOM:
                raise ContextOverflow
            max_tokens = min(limits.max_turn_tokens, room)
            completion = await chat.complete(
                messages, tools=prompts.tools, max_tokens=max_tokens, temperature=temperature
            )
            turn = reader.read(completion)
            turns.append(turn)
            message: Message = {"role": "assistant", "content": turn.content}
            if turn.calls:
                message["tool_calls"] = [
                    encode_call(call, f"call_{len(turns)}_{i}") for i, call in enumerate(turn.calls)
                ]
            messages.append(message)
            watch(message)
            stop = ending(turn, completion.finish_reason, is_last=len(turns) >= limits.max_turns)
            if stop is StopReason.LENGTH and room < limits.max_turn_tokens:
                stop = StopReason.CONTEXT_LIMIT
            if stop is None:
                observations = [await asyncio.to_thread(toolbox.run, call) for call in turn.calls]
                for problem in turn.malformed:
                    text, _ = tokenizer.cut(f"Error: {problem}", limits.observation_tokens)
                    observations.append(Observation(text, ok=False))
                texts, ok = tuple(one.text for one in observations), tuple(one.ok for one in observations)
                turns[-1] = dataclasses.replace(turn, observations=texts, ok=ok)
                answers: list[Message] = [
                    {"role": "tool", "tool_call_id": f"call_{len(turns)}_{i}", "content": text}
                    for i, text in enumerate(texts)
                ]
                messages += answers
                for message in answers:
                    watch(message)
                prompt_tokens = turn.prompt_tokens + turn.completion_tokens + most_tokens(answers)
    except ContextOverflow:
        stop = StopReason.CONTEXT_LIMIT
    except (InfrastructureError, SandboxError, UserError, OSError) as failure:
        stop, error = StopReason.INFRASTRUCTURE, f"{type(failure).__name__}: {failure}"
    return Episode(
        question_id=question.id,
        turns=tuple(turns),
        stop=stop,
        submitted_sql=submission(stop, turns),
        messages=messages,
        error=error,
        seconds=time.monotonic() - start,
    )


def ending(turn: Turn, finish_reason: str, *, is_last: bool) -> StopReason | None:
    """How the episode ends with this turn; None when tools have to answer it."""
    if finish_reason == "length" and not turn.calls:
        return StopReason.LENGTH
    if turn.calls or turn.malformed:
        return StopReason.TURN_LIMIT if is_last else None
    return StopReason.ANSWERED if turn.content.strip() else StopReason.NO_ANSWER


def submission(stop: StopReason, turns: Sequence[Turn]) -> str | None:
    """The last ```sql block of a final answer, else the last query that ran."""
    if stop is StopReason.ANSWERED and (block := submitted_block(turns[-1].content)):
        return block
    ran = [call for turn in turns for call, ok in zip(turn.calls, turn.ok, strict=False) if ok]
    queries: list[str] = [call.arguments["sql"] for call in ran if call.name == "execute_sql"]
    return queries[-1] if queries else None


def submitted_block(answer: str) -> str | None:
    """The last ```sql block of a final answer, which is a submission; None if there is none."""
    written = [block.strip() for block in _SQL_BLOCK.findall(answer) if block.strip()]
    return written[-1] if written else None


def encode_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """A call as it stands in the `tool_calls` of an assistant message."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class TurnReader:
    """Reads the completions of one conversation with these tools (schemas), in order, as turns."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self._seen_ids: list[int] | None = None  # tokens of the last prompt and answer

    def read(self, completion: Completion) -> Turn:
        """What a completion says, without observations yet.

        The server's calls win; where it found none, ours count (plain endpoints, servers with the stock parser). Where
        both agree, our content is the exact one: stock parsers leave or drop white space next to a call.
        """
        text, prompt, answer, seen = None, completion.prompt_ids, completion.token_ids, self._seen_ids
        if answer is not None:
            # Special tokens stay, as `<tool_call>` is one in some vocabularies; only marks at the end are removed.
            text = _END_OF_TURN.sub("", self._tokenizer.decode(answer, skip_special=False))
        self._seen_ids = None if prompt is None or answer is None else [*prompt, *answer]
        own = parse(completion.content if text is None else text, self._tools)
        agreed = not completion.calls or own.calls == completion.calls
        return Turn(
            text=text,
            content=own.content if agreed else completion.content,
            calls=own.calls if agreed else completion.calls,
            malformed=own.malformed if agreed and text is not None else completion.call_errors + own.malformed,
            observations=(),
            ok=(),
            hermes_calls=None if text is None else len(parse_hermes(text).calls),
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            merged=None if seen is None or prompt is None else prompt[: len(seen)] == seen,
        )
