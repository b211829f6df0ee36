"""The two ways to use the grammar: on a whole text (`parse`) and on a text that comes in pieces (`Stream`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shared.records import ToolCall
from shared.tool_calls.canonical import read_turn
from shared.tool_calls.grammar import Grammar
from shared.tool_calls.offered import Offered
from shared.tool_calls.source import Source


class Parsed(NamedTuple):
    """What a model's text holds. `family` is the form of its first call: hermes, tools_tag, fenced, bare, xml, python, react or ""."""

    content: str
    calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]  # one sentence the model can act on for each unreadable call
    family: str


class Update(NamedTuple):
    """What has become certain with a piece of a streamed text."""

    content: str
    calls: tuple[ToolCall, ...]


_NOTHING = Update("", ())


class Stream:
    """Reads a text that comes in pieces. What its updates add up to is what `parse` says of the whole text.

    stream = Stream(tools)
    for delta in deltas:
        update = stream.feed(delta)
    update = stream.finish()
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._source = Source()
        self._grammar = Grammar(self._source, Offered(tools))
        self._reading = self._grammar.run()
        self._pieces = self._calls = 0  # how many of them were given out

    def feed(self, delta: str) -> Update:
        """Read on; returns the content and the calls that nothing behind can change any more."""
        self._source.append(delta)
        return self._update()

    def finish(self) -> Update:
        """The text has ended; returns the rest."""
        self._source.final = True
        return self._update()

    def parsed(self) -> Parsed:
        """All that is known so far."""
        return _parsed(self._grammar)

    def _update(self) -> Update:
        next(self._reading, None)
        pieces, calls = self._grammar.content.pieces, self._grammar.calls
        if len(pieces) == self._pieces and len(calls) == self._calls:
            return _NOTHING
        update = Update("".join(pieces[self._pieces :]), tuple(calls[self._calls :]))
        self._pieces, self._calls = len(pieces), len(calls)
        return update


def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """Split a model's text into content and calls; `tools` are the offered ones in OpenAI form. Never raises.

    `TEXT\\n<tool_call>…` has the content `TEXT`: exactly the newline that the chat template puts there is taken off.
    """
    offered = Offered(tools)
    turn = read_turn(text, offered)
    if turn:
        return Parsed(*turn, (), "hermes")
    grammar = Grammar(Source(text, final=True), offered)
    for _ in grammar.run():
        raise AssertionError("the grammar waits for text although there is no more")
    return _parsed(grammar)


def _parsed(found: Grammar) -> Parsed:
    return Parsed("".join(found.content.pieces), tuple(found.calls), tuple(found.malformed), found.family)
