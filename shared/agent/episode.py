"""The agent: one question, turns of model and tools, one named ending. The only loop over turns in the pipeline.

Everything that plays an episode (RL, evaluation, serving) calls `run_episode` with another endpoint. `TurnReader`, `ending`
and `submission` say what a conversation amounts to; an agent that somebody else wrote is read by them, too.
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
from collections.abc import Iterable, Sequence
from typing import Any

from shared.agent.chat_client import ChatClient, Completion, ContextOverflow, InfrastructureError
from shared.agent.prompts import TOOLS, opening_messages
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
) -> Episode:
    """Play one episode; with `temperature` None the server chooses. A failing endpoint or a damaged database is an ending (`INFRASTRUCTURE`), not an exception."""
    start = time.monotonic()
    run = _Run(question, toolbox, chat, tokenizer, limits)
    error = ""
    try:
        stop = await run.play(temperature)
    except ContextOverflow:
        stop = StopReason.CONTEXT_LIMIT
    except (InfrastructureError, SandboxError, UserError, OSError) as failure:
        stop, error = StopReason.INFRASTRUCTURE, f"{type(failure).__name__}: {failure}"
    return Episode(
        question_id=question.id,
        turns=tuple(run.turns),
        stop=stop,
        submitted_sql=submission(stop, run.turns, run.last_sql),
        messages=run.messages,
        error=error,
        seconds=time.monotonic() - start,
    )


def submitted_block(answer: str) -> str | None:
    """The last ```sql block of a final answer, which is a submission; None if there is none."""
    written = [block.strip() for block in _SQL_BLOCK.findall(answer) if block.strip()]
    return written[-1] if written else None


def encode_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """A call as it stands in the `tool_calls` of an assistant message."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class _Run:
    """State of one episode: the conversation, the turns so far, and what the token limits need."""

    def __init__(
        self, question: Question, toolbox: Toolbox, chat: ChatClient, tokenizer: Tokenizer, limits: AgentConfig
    ) -> None:
        self.messages = opening_messages(question.question)
        self.turns: list[Turn] = []
        self._toolbox = toolbox
        self._chat = chat
        self._tokenizer = tokenizer
        self._limits = limits
        self.last_sql: str | None = None
        self._reader = TurnReader(tokenizer)
        self._markup_tokens = tokenizer.count(_MARKUP)
        self._next_prompt_tokens = (
            _TEMPLATE_TOKENS
            + tokenizer.count(json.dumps(TOOLS))
            + self._tokens(message["content"] for message in self.messages)
        )

    async def play(self, temperature: float | None) -> StopReason:
        """Turn after turn until one is the last."""
        while True:
            room = self._limits.context_tokens - self._next_prompt_tokens
            if room < _MIN_ROOM:
                return StopReason.CONTEXT_LIMIT
            max_tokens = min(self._limits.max_turn_tokens, room)
            completion = await self._chat.complete(
                self.messages, tools=TOOLS, max_tokens=max_tokens, temperature=temperature
            )
            turn = self._reader.read(completion)
            self.turns.append(turn)
            self.messages.append(_assistant_message(turn, len(self.turns)))
            stop = ending(turn, completion.finish_reason, is_last=len(self.turns) >= self._limits.max_turns)
            if stop is StopReason.LENGTH and room < self._limits.max_turn_tokens:
                return StopReason.CONTEXT_LIMIT
            if stop:
                return stop
            await self._observe(turn)

    async def _observe(self, turn: Turn) -> None:
        """Run the turn's calls in order and answer them, then each malformed one with what is wrong with it."""
        observations = []
        for call in turn.calls:
            observation = await asyncio.to_thread(self._toolbox.run, call)
            if call.name == "execute_sql" and observation.ok:
                self.last_sql = call.arguments["sql"]
            observations.append(observation)
        cut = self._limits.observation_tokens
        observations += [Observation(self._tokenizer.cut(f"Error: {p}", cut)[0], ok=False) for p in turn.malformed]
        texts = [observation.text for observation in observations]
        ok = tuple(observation.ok for observation in observations)
        self.turns[-1] = dataclasses.replace(turn, observations=tuple(texts), ok=ok)
        self.messages += [
            {"role": "tool", "tool_call_id": _call_id(len(self.turns), i), "content": text}
            for i, text in enumerate(texts)
        ]
        self._next_prompt_tokens = turn.prompt_tokens + turn.completion_tokens + self._tokens(texts)

    def _tokens(self, texts: Iterable[str]) -> int:
        """At most, of the messages with these texts."""
        return sum(self._tokenizer.count(text) + self._markup_tokens for text in texts)


class TurnReader:
    """Reads the completions of one conversation, in order, as turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._seen_ids: list[int] | None = None  # tokens of the last prompt and answer

    def read(self, completion: Completion) -> Turn:
        """What a completion says, without observations yet.

        The server's calls win; where it found none, ours count (plain endpoints, servers with the stock parser). Where
        both agree, our content is the exact one: stock parsers leave or drop white space next to a call.
        """
        text = None if completion.token_ids is None else self._text(completion.token_ids)
        own = parse(completion.content if text is None else text, TOOLS)
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
            merged=self._merged(completion),
        )

    def _text(self, token_ids: list[int]) -> str:
        """The model's own text; only marks at its end go, for in some vocabularies `<tool_call>` is special as well."""
        return _END_OF_TURN.sub("", self._tokenizer.decode(token_ids, skip_special=False))

    def _merged(self, completion: Completion) -> bool | None:
        """Whether this prompt continues the last prompt and answer token for token; remembers it for the next turn."""
        seen, prompt, answer = self._seen_ids, completion.prompt_ids, completion.token_ids
        self._seen_ids = None if prompt is None or answer is None else [*prompt, *answer]
        return None if seen is None or prompt is None else prompt[: len(seen)] == seen


def submission(stop: StopReason, turns: Sequence[Turn], last_sql: str | None) -> str | None:
    """The last ```sql block of a final answer, else the last query that ran."""
    block = submitted_block(turns[-1].content) if stop is StopReason.ANSWERED else None
    return block or last_sql


def ending(turn: Turn, finish_reason: str, *, is_last: bool) -> StopReason | None:
    """How the episode ends with this turn; None when tools have to answer it."""
    if finish_reason == "length" and not turn.calls:
        return StopReason.LENGTH
    if turn.calls or turn.malformed:
        return StopReason.TURN_LIMIT if is_last else None
    return StopReason.ANSWERED if turn.content.strip() else StopReason.NO_ANSWER


def _assistant_message(turn: Turn, number: int) -> Message:
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [encode_call(call, _call_id(number, i)) for i, call in enumerate(turn.calls)]
    return message


def _call_id(turn: int, index: int) -> str:
    return f"call_{turn}_{index}"
