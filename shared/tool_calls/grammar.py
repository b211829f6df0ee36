"""Which parts of a model's text are tool calls.

A call stands where a call can stand: behind an opening tag, first in a code fence, or at the start of a line. In an explicit
`<tool_call>` it is taken as it is; everywhere else it must name an offered tool and its arguments must fit. Think blocks,
code fences, inline code, block quotes, tables and announced examples quote; what they quote is no call, unless the quotation
never ends. What clearly was meant as a call but cannot be read stays in the content (the next prompt then repeats
the model's own tokens) and is explained in `malformed`. A call whose text is cut is never a call.

The grammar is one coroutine over a text that may still grow (see `source`): the streamed result is the whole-text result by
construction. Time is linear: what was read is not read again, and after `_MAX_FAILURES` places that look like
a call and are none the rest of the text is content.
"""

from __future__ import annotations

import dataclasses
import re

from shared.records import ToolCall
from shared.tool_calls import labelled_calls, python_calls, xml_calls
from shared.tool_calls.announcements import ends_prose, goes_on, is_announced, is_specimen, stands_in_sentence
from shared.tool_calls.canonical import is_plain_line
from shared.tool_calls.content import Content
from shared.tool_calls.items import Item, next_item, python_lines, read_item
from shared.tool_calls.markup import END_TOKENS, Opening, closing, is_wrapper, opening, tag_name
from shared.tool_calls.offered import Offered
from shared.tool_calls.quotations import TAGS, Quotation, is_in_quotes, quoted_document_end
from shared.tool_calls.shapes import FORM
from shared.tool_calls.source import Reading, Source

_MAX_FAILURES = 4000
_FAR_FAILURE = 20  # what it counts when reading failed far from where it began
_TRIGGER = re.compile(r"[<`{\[\n]")
_NEWLINE = re.compile("\n")
_INDENT = re.compile(r"[ \t\xa0\ufeff\u200b]*")
_TICKS = re.compile("`*")


class _Quoted(Exception):
    """A block stands in a quotation that ends at `end`."""

    def __init__(self, end: int) -> None:
        self.end = end


class Grammar:
    """Reads one text; what it finds is in `content`, `calls`, `malformed` and `family`."""

    def __init__(self, source: Source, offered: Offered) -> None:
        self.source = source
        self.offered = offered
        self.content = Content()
        self.calls: list[ToolCall] = []
        self.malformed: list[str] = []
        self.family = ""
        self._kept = 0  # where the text begins that is not yet given to the content
        self._block_end = 0  # behind the last block of calls
        self._quotation: Quotation | None = None
        self._stray: Opening | None = None  # a lone <tool_call> without a call: markup if a call follows, else text
        self._tag_open = False  # whether text followed the calls of the last block in place of its closing tag
        self._wordy = False  # behind a <tool_call> that holds words and, so far, no call
        self._doubtful: list[str] = []  # what is malformed unless the quotation around it ends
        self._failures = 0 if self.offered.names() else _MAX_FAILURES + 1  # without tools all is text

    def run(self) -> Reading[None]:
        """The whole grammar. Ends when the text is final and read."""
        at = 0 if self._failures else (yield from self._line(0))
        while True:
            at = yield from self._flow_to(_TRIGGER, at)
            if at >= len(self.source.text):
                break
            try:
                at = yield from self._at_trigger(at)
            except _Quoted as quoted:
                self._end_quotation()
                at = quoted.end
        self._stray = None
        self.malformed += self._doubtful
        end_token = next((token for token in END_TOKENS if self.source.text.endswith(token)), "")
        self._flow(len(self.source.text) - len(end_token))
        self.content.end()

    # Content

    def _flow(self, to: int) -> None:
        if to > self._kept and not self._stray:
            self.content.text(self.source.text[self._kept : to])
            self._kept = to

    def _flow_to(self, pattern: re.Pattern[str], at: int) -> Reading[int]:
        """Give out text up to a character of `pattern`, or as far as there is any."""
        while True:
            match = pattern.search(self.source.text, at)
            at = match.start() if match else len(self.source.text)
            if match or self.source.final:
                return at
            match = None  # it would hold a second reference to the text
            self._flow(at)
            yield

    def _end_quotation(self) -> None:
        self._quotation, self._doubtful = None, []

    # Where a call can stand

    def _at_trigger(self, at: int) -> Reading[int]:
        """Decide what the character here begins; returns where to go on."""
        char = self.source.text[at]
        if char != "\n":
            self._flow(at)
        if self._failures > _MAX_FAILURES and char != "<":
            return at + 1
        if char == "\n":
            self._flow(at + 1)
            return (yield from self._line(at + 1))
        if char == "<":
            return (yield from self._tag(at))
        if char == "`":
            return (yield from self._ticks(at))
        if char == "[":
            return (yield from self._block(Opening(at, at))) if (yield from self.source.holds("[TOOL", at)) else at + 1
        follows_call = self._block_end > max(0, at - 8) and not self.source.text[self._block_end : at].strip()
        may_stand = follows_call or (not self._quotation and is_announced(self.source.text, at))
        return (yield from self._block(Opening(at, at, bare=True))) if may_stand else at + 1

    def _line(self, start: int) -> Reading[int]:
        """The start of a line. Indentation belongs to what stands behind it."""
        if self._quotation and self._quotation.kind == "inline" and self.source.text.endswith("\n\n", 0, start):
            self._end_quotation()
        if self.source.text.startswith("<", start) or is_plain_line(self.source, start, self.offered):
            return start
        at = yield from self.source.run(_INDENT, start)
        char = yield from self.source.char(at)
        if char and char in "|>":
            return (yield from self.source.search(_NEWLINE, at))
        if char == "`":
            return (yield from self._ticks(at, start))
        if self._quotation and self._quotation.kind in ("fence", "inline"):
            return at
        if char == "[" and (yield from self.source.holds("[TOOL", at)):
            return (yield from self._block(Opening(start, at)))
        if char and char in "{[":
            return (yield from self._block(Opening(start, at, bare=True)))
        if at == start and char.isidentifier() and (yield from python_calls.may_begin(self.source, at, self.offered)):
            return (yield from self._python_lines(at))
        if char and (char.isalpha() or char in "*✿"):
            call, end = yield from labelled_calls.read_call(self.source, at, self.offered)
            if call:
                return (yield from self._take(Opening(start, at, bare=True), Item((call,), end, family="react")))
            return max(at, end)
        return at

    def _python_lines(self, at: int) -> Reading[int]:
        """Python calls in running text, where the text before has come to an end."""
        item = yield from python_lines(self.source, at, self.offered)
        if item.calls and ends_prose(self.source.text, self._block_end, at):
            return (yield from self._take(Opening(at, at, bare=True), item))
        return item.end

    def _tag(self, at: int) -> Reading[int]:
        name, end = yield from tag_name(self.source, at)
        char = yield from self.source.char(end)
        if f"<{name}>" in END_TOKENS and char == ">" and (yield from self.source.char(end + 1)) == "":
            return end + 1
        if self._failures > _MAX_FAILURES or is_in_quotes(self.source.text, at):
            return at + 1
        if char == ">" and name.lower() in TAGS:
            self._quotation = self._quotation or Quotation(name, end)
            return end + 1
        if (char == ">" and is_wrapper(name)) or xml_calls.may_begin(name, char, self.offered):
            return (yield from self._block(Opening(at, at)))
        if char == "/" and end == at + 1:
            return (yield from self._closing_tag(at))
        return max(end, at + 1)

    def _closing_tag(self, at: int) -> Reading[int]:
        name, end = yield from tag_name(self.source, at + 1)
        if self._quotation and name == self._quotation.kind:
            self._end_quotation()
        if self._tag_open and is_wrapper(name) and (yield from self.source.char(end)) == ">":
            self._flow(at)
            self._kept = end = end + 1
            self._tag_open = False
        if name == "tool_call":
            if self._wordy:
                self.malformed.append(f"The text inside <tool_call> is not JSON; write {FORM} there.")
            self._wordy, self._stray = False, None
        return end

    def _ticks(self, at: int, line_start: int | None = None) -> Reading[int]:
        """Backticks: a fence if there are three, else inline code."""
        end = yield from self.source.run(_TICKS, at)
        quotation = self._quotation
        if quotation and quotation.kind == "inline":
            self._end_quotation()
            return end
        if end - at < 3:
            first = at < 64 and not self.source.text[:at].strip(" \t\n\ufeff\u200b")
            char = yield from self.source.char(end)
            if first and (char == "{" or char.isidentifier()):  # perhaps the whole answer is a call in backticks
                return (yield from self._block(Opening(0, end, inline=True, bare=True)))
            self._quotation = quotation or Quotation("inline", end)
            return end
        char = yield from self.source.char((yield from self.source.line_spaces(end)))
        if quotation and quotation.kind == "fence":
            self._end_quotation()
            if char in ("", "\n"):
                return end
        elif not quotation:
            document_end = yield from quoted_document_end(self.source, end, end - at)
            if document_end >= 0:
                return document_end
        return (yield from self._block(Opening(at if line_start is None else line_start, at)))

    # Blocks

    def _block(self, begun: Opening) -> Reading[int]:
        """Take the calls behind openers; returns where to go on."""
        found = begun if begun.bare else (yield from opening(self.source, begun.body, begun))
        if (yield from self._is_closer(found)):
            self._kept = found.body
            return found.body
        item = yield from read_item(self.source, found, self.offered)
        return (yield from self._take(found, item)) if item.calls else self._no_call(found, item)

    def _take(self, found: Opening, item: Item) -> Reading[int]:
        """Commit the calls of an item and of those that follow it; returns the end of the block."""
        quoted = yield from self._is_quoted(found, item.end)
        while item.calls:
            end = item.end
            if not quoted:
                yield from self._commit(found, item)
            start = yield from next_item(self.source, end, found, self.offered)
            if start < 0:
                break
            found = dataclasses.replace(found, start=start, body=start)
            item = yield from read_item(self.source, found, self.offered)
            if item.calls and not quoted:
                self._kept = start  # past a comma between two values
        if not item.calls:
            self._explain(item)
            end = max(end, item.end)
            fence_open = found.fence
        else:
            start = end
            end, fence_open = yield from closing(self.source, start, found)
            if not quoted:
                self._tag_open = found.tags and "<" not in self.source.text[start:end]
                self._kept = self._block_end = end
        if fence_open:
            self._quotation = self._quotation or Quotation("fence", end)
        return end

    def _is_quoted(self, found: Opening, end: int) -> Reading[bool]:
        """Whether the words around a block say that its calls are examples or only mentioned."""
        if is_specimen(self.source.text, found.start, explicit=found.explicit):
            return True
        if not stands_in_sentence(self.source.text, self._block_end, found.start):
            return False
        behind, _ = yield from closing(self.source, end, found)
        return (yield from goes_on(self.source, behind))

    def _commit(self, found: Opening, item: Item) -> Reading[None]:
        """Make the calls of an item calls of the text, unless a quotation around them ends."""
        if self._quotation:
            end = yield from self._quotation.end(self.source)
            if end > found.start:
                raise _Quoted(end)
            self._doubtful = [] if end >= 0 else self._doubtful
            self._quotation = None  # it ended within what was no call, or never does
        if self._stray and found.explicit:
            self._kept = max(self._kept, self._stray.body)
        self._stray = None
        self._flow(found.start)
        self.content.call()
        self._kept = item.end
        self.calls += item.calls
        self.family = self.family or item.family or found.family
        self._wordy = False

    def _no_call(self, found: Opening, item: Item) -> int:
        self._explain(item)
        self._failures += _FAR_FAILURE if item.far else 1
        if found.explicit and item.end == found.body and not self._quotation:
            self._wordy = True
            if self.source.text[max(0, found.start - 1) : found.start] in ("", "\n"):
                self._stray = self._stray or found
        if (found.fence or found.inline) and not self._quotation:
            self._quotation = Quotation("fence" if found.fence else "inline", found.body)
        return max(item.end, found.body, found.start + 1)

    def _explain(self, item: Item) -> None:
        if item.problem:
            (self._doubtful if self._quotation else self.malformed).append(item.problem)

    def _is_closer(self, found: Opening) -> Reading[bool]:
        """Whether a <tool_call> behind a call, at the end of the text, was used as its closing tag."""
        if not found.explicit or not self.calls or (yield from self.source.char(found.body)) != "":
            return False
        return not self.source.text[self._block_end : found.start].strip()
