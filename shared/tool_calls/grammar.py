"""Which parts of a model's text are tool calls.

A call stands behind an opening tag, first in a code fence, or at the start of a line. In an explicit `<tool_call>` it
is taken as it is; everywhere else it must name an offered tool and its arguments must fit. Thinking, code, block
quotes, tables and examples quote; what they quote is no call, unless the quotation never ends. What was meant as a call
but cannot be read stays in the content and is explained in `malformed`. A call whose text was cut is never a call.

The text is read in steps. A step changes nothing before it is decided, so one that has to wait for more text is simply
repeated, and a stream finds what the whole text holds. Time is linear: after `_PATIENCE` failed attempts the rest is
content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .context import ends_prose, is_announced, is_only_shown, sentence_behind
from .forms import CALL_TAGS, CUT, Found, read_named, read_python, read_xml
from .json_values import DECODER, Reader, read_value
from .text import LINE_SPACE, NEWLINE, SPACE, Text, Unreadable, Wait
from .tools import FORM, ToolCall, Tools

_PATIENCE = 1500
_HEADS = ("action", "tool", "function", "default_api.")  # what a line with a call may begin with, besides a tool's name
_FAR = 32  # characters that a failed attempt may read for the price of one
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")
_NO_JSON = f"The text inside <tool_call> is not JSON; write {FORM} there."

# A stream tries again where something may have closed, as often as its credit in characters allows.
_FIRST_CREDIT, _CREDIT, _SHORT = 20_000, 24, 64
_MAY_CLOSE = re.compile(r"[}\]`\n]|[\w|/]>")

_ANCHOR = re.compile(r"[<`{\[\n]")
_TICKS = re.compile("`*")
_INFO = re.compile(r"`*[^\n`{\[<]*")
_DOCUMENT = re.compile(r"`{3,}(?:md|markdown|mdx|rst)[ \t]*\n", re.IGNORECASE)
_LAST_FENCE = re.compile(r".*\n[ \t]*`{3,}", re.DOTALL)
_QUOTATION_ENDS = {"fence": re.compile(r"^[ \t]*`{3,}", re.MULTILINE), "inline": re.compile("`|\n\n")}
_QUOTING = re.compile(
    r"<(/?)(think|thinking|thought|reasoning|scratch_?pad|reflection|tool_response|example|pre|code|blockquote|tool_call)>",
    re.IGNORECASE,
)
_WRAPPER = (
    r"(?:(?![\w:▁-]*(?:respon|result|output|error|example|begin_of|name))"
    r"[\w:▁-]*(?:tool|func|call|json|invoke|action|plugin|python_tag)[\w:▁-]*|response|request)"
)
_OPENER = re.compile(
    rf"<[|｜]?({_WRAPPER})[|｜]?(?: (?![^<>\n]*\b(?:name|arguments)\s*=)[^<>\n{{]*)?>|\[({_WRAPPER})\]", re.IGNORECASE
)
_CLOSER = re.compile(  # closing tags, also cut ones; special tokens that open nothing; closing brackets with a name
    rf"</(?:{_WRAPPER}|s)>|</[\w:▁.-]*(?![\w:▁.>-])|<[|｜](?:(?=[^<>]*(?:end|/))|(?!{_WRAPPER}))[^<>\s]*[|｜]>"
    rf"|\[(?:/|END_){_WRAPPER}\]",
    re.IGNORECASE,
)
_PART = re.compile(r"(?:<(?:[/|｜]*[\w:|｜▁.-]+(?: [^<>\n]*)?|[/|｜][^<>\s]*)?|\[[/\w:▁-]*)\Z")
_TOOL_CALL = re.compile(r"<(/?)tool_call>")
_OPEN, _CLOSE = "<tool_call>\n", "\n</tool_call>"
_MARKUP = re.compile(r"[<`{\[|>*#✿_\x00-\x09\x0b-\x1f]|^\s|\n\s*$")
_ELEMENT = re.compile(r"<([\w-]+)([=>/\s])")
_EXAMPLE = re.compile(r"\b(?:example|format|schema|template|usage|syntax)", re.IGNORECASE)
_NAMED_OBJECT = re.compile(r"""[\[\s]*\{\s*["']name["']\s*:\s*["'](\w+)["']""")


class Parsed(NamedTuple):
    """What a model's text holds.

    `family` is the form of its first call: hermes, tools_tag, fenced, bare, xml, python, react or "".
    """

    content: str
    calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]  # one sentence the model can act on for each unreadable call
    family: str


class Update(NamedTuple):
    """What has become certain with a piece of a streamed text."""

    content: str
    calls: tuple[ToolCall, ...]


_NOTHING = Update("", ())


@dataclasses.dataclass
class _Block:
    """One or more calls with what stands around them: from `start` on, the next call may begin at `body`."""

    start: int
    body: int
    family: str = "bare"
    explicit: bool = False  # behind <tool_call>
    tags: bool = False
    fence: bool = False
    inline: bool = False  # in single backticks
    shown: bool = False  # its calls are only shown


class Stream:
    """Reads a text that comes in pieces. What its updates add up to is what `parse` says of the whole text.

    stream = Stream(tools)
    for delta in deltas:
        update = stream.feed(delta)
    update = stream.finish()
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._text = Text("\n")  # so that each line has one in front of it
        self._tools = Tools(tools)
        self._heads = tuple(name.lower() for name in (*self._tools, *_HEADS))
        self._failures = 0 if self._tools else _PATIENCE  # without tools all is text
        self._credit = _FIRST_CREDIT
        self._waiting = [""]  # deltas that are not yet part of the text
        self._undecided = 0  # characters behind `_at`
        self._pieces: list[str] = []  # of the content
        self._calls: list[ToolCall] = []
        self._malformed: list[str] = []
        self._family = ""
        self._at = 0  # where to read on
        self._kept = 1  # where the text begins that is not yet given to the content
        self._space = ""  # white space at the end of the content so far; it waits for what comes behind it
        self._blank = ""  # all there was before the first call, if that was only white space
        self._behind_call = False  # whether a call stood since the last piece of content
        self._block: _Block | None = None  # whose last call ends at `_at`
        self._block_end = 0  # behind the last block
        self._quotation = ("", 0, 0)  # its kind, where it begins, and how much was malformed before

    def feed(self, delta: str) -> Update:
        """Read on; returns the content and the calls that nothing behind can change any more."""
        text, pieces, calls = self._text, len(self._pieces), len(self._calls)
        closing = _MAY_CLOSE.search((self._waiting[-1] or text.known)[-1:] + delta)
        self._waiting.append(delta)
        self._credit += _CREDIT * len(delta)
        self._undecided += len(delta)
        if not text.final and (self._credit < self._undecided or (self._undecided > _SHORT and not closing)):
            return _NOTHING
        text.known += "".join(self._waiting)
        self._waiting = [""]
        self._credit -= self._undecided
        with contextlib.suppress(Wait):
            while self._step():
                pass
        self._undecided = len(text.known) - self._at
        return Update("".join(self._pieces[pieces:]), tuple(self._calls[calls:]))

    def finish(self) -> Update:
        """The text has ended; returns the rest."""
        self._text.final = True
        return self.feed("")

    def parsed(self) -> Parsed:
        """All that is known so far."""
        return Parsed("".join(self._pieces), tuple(self._calls), tuple(self._malformed), self._family)

    def _step(self) -> bool:
        """Decide what stands at the next place that matters; False at the end of the final text."""
        text = self._text
        if self._block:
            self._at = self._go_on(self._block)
            return True
        anchor = _ANCHOR.search(text.known, self._at) if self._failures < _PATIENCE else None
        self._at = anchor.start() if anchor else len(text.known)
        self._flow(self._at)
        if anchor:
            self._at = self._anchor(self._at, anchor[0])
            return True
        if not text.final:
            raise Wait
        self._pieces.append(self._blank if self._calls else self._space)
        self._blank = self._space = ""
        return False

    def _flow(self, to: int) -> None:
        """Give the text up to a place to the content. Behind a call it is trimmed and begins a new line."""
        piece, self._kept = self._text.known[self._kept : to], max(self._kept, to)
        if self._text.final and to == len(self._text.known):
            piece = piece.removesuffix(_END_TOKENS[0]).removesuffix(_END_TOKENS[1])
        body = piece.rstrip()
        if not body:
            self._space += piece
            return
        self._pieces.append("\n" * bool(self._pieces) + body.lstrip() if self._behind_call else self._space + body)
        self._space, self._behind_call, self._blank = piece[len(body) :], False, ""

    # Where a call can stand: each returns where to go on

    def _anchor(self, at: int, char: str) -> int:
        """A character that may begin something."""
        text, known = self._text, self._text.known
        if char == "\n":
            self._flow(at + 1)
            return self._line(at + 1)
        if char == "`":
            return self._ticks(at)
        if char == "{":
            announced = known[at - 1] in " :*\t" and not self._quotation[0] and is_announced(text, at)
            return self._begin(_Block(at, at)) if announced else at + 1
        for token in _END_TOKENS:
            if text.holds(token, at):
                text.char(at + len(token))  # waits: at the end of the text it is no content
        if char == "<" and known[at - 1] in "\"'“‘«" and known[max(0, at - 2)] in " \t\n(:":
            return at + 1  # a quoted tag
        element = _ELEMENT.match(known, at)
        named = element and (element[1] in self._tools or (element[1] in CALL_TAGS and element[2] in "= \n"))
        if named or text.token(_OPENER, _PART, at):
            return self._begin(_Block(at, at))
        tag = text.token(_QUOTING, _PART, at)
        if not tag:
            return at + 1
        kind, start, malformed = self._quotation
        if not tag[1]:
            self._quotation = (kind, start, malformed) if kind else (tag[2], tag.end(), len(self._malformed))
        elif tag[2] == kind:
            del self._malformed[malformed:]
            self._quotation = ("", 0, 0)
        elif tag[2] == "tool_call" and self._calls and not kind:  # it closes a call that text followed
            self._flow(at)
            self._kept = tag.end()
        return tag.end()

    def _line(self, start: int) -> int:
        """The start of a line. Indentation belongs to what stands behind it."""
        text, quotation = self._text, self._quotation[0]
        if quotation == "inline" and text.known.endswith("\n\n", 0, start):
            self._quotation, quotation = ("", 0, 0), ""
        at = text.run(LINE_SPACE, start)
        char = text.char(at)
        if char in ("|", ">"):
            newline = text.search(NEWLINE, at)
            return newline.start() if newline else len(text.known)
        if quotation in _QUOTATION_ENDS:
            return at
        block = _Block(start, at)
        if char in ("{", "["):
            return self._begin(block)
        head = text.known[at : at + 64].lstrip("*_#✿` ").lower()
        if not text.final and len(head) < 40 and any(known.startswith(head) for known in self._heads):
            raise Wait
        if not head.startswith(self._heads) or text.known.startswith("```", at):
            return at
        try:
            prose = at == start and ends_prose(text, self._block_end, at)
            found = read_python(text, at, self._tools, program="paragraph") if prose else Found((), at)
            if not found.calls:
                found = read_named(text, at, self._tools, tagged=False)
            if found.calls and (found.family or (prose and self._ends_line(found.end, block))):
                return self._begin(block, found)
            return max(at, found.end if found.family else at)
        except Unreadable as error:
            if error.cut and error.position >= len(text.known):
                self._malformed.append(CUT)
            return max(at, error.position)

    def _ticks(self, at: int) -> int:
        """Backticks: a fence if there are three, else inline code."""
        text, (kind, _, malformed) = self._text, self._quotation
        end = text.run(_TICKS, at)
        behind = text.char(text.run(LINE_SPACE, end))
        if kind in _QUOTATION_ENDS and (kind == "inline" or end - at >= 3):
            del self._malformed[malformed:]
            self._quotation = ("", 0, 0)
            if kind == "inline" or behind in ("", "\n"):
                return end
        if end - at < 3:
            whole = not text.known[:at].strip("\n \t\ufeff\u200b") and (behind == "{" or behind.isidentifier())
            if whole and not kind:  # perhaps the whole answer is a call
                return self._begin(_Block(1, end, "fenced", inline=True))
            self._quotation = self._quotation if kind else ("inline", end, len(self._malformed))
            return end
        if _DOCUMENT.match(text.known, at):
            if not text.final:
                raise Wait
            last = _LAST_FENCE.match(text.known, end)
            return last.end() if last else end
        start = text.known.rfind("\n", 0, at) + 1
        return self._begin(_Block(at if text.known[start:at].strip("\u200b\ufeff \t\r\xa0") else start, at))

    def _begin(self, block: _Block, found: Found | None = None) -> int:
        """Make the calls that stand here calls of the text, unless they are only shown or quoted."""
        text, known = self._text, self._text.known
        found = found or self._read_item(block)
        judged = found.calls or found.problem or block.explicit
        shown = judged and is_only_shown(text, self._block_end, block.start, explicit=block.explicit)
        if not found.calls:
            problem = found.problem
            begins_line = not known[known.rfind("\n", 0, block.start) + 1 : block.start].strip()
            if block.explicit and not problem and not shown:
                tag = text.search(_TOOL_CALL, block.body)
                twice = tag and not tag[1] and not self._quotation[0] and begins_line
                if tag and twice and not re.search("[<`]", known[block.body : tag.start()]):
                    twice = not is_only_shown(text, self._block_end, tag.start(), explicit=True)
                    if twice and self._read_item(_Block(tag.start(), tag.start())).calls:
                        self._flow(block.start)  # an opening tag too many
                        self._kept = block.body
                elif begins_line or (tag and tag[1]):
                    problem = _NO_JSON
            self._failures += 1 + (found.end - block.start) // _FAR
            if problem and not shown and (block.explicit or begins_line):
                self._malformed.append(problem)
            if (block.fence or block.inline) and not self._quotation[0]:
                self._quotation = ("fence" if block.fence else "inline", block.body, len(self._malformed))
            return max(found.end, block.body, block.start + 1)
        if shown == "in a sentence":
            shown = "yes" if sentence_behind(text, self._past_closers(block, found.end)[0]) == "same" else ""
        block.shown = bool(shown)
        kind, start, malformed = self._quotation
        if kind and not shown:
            match = text.search(_QUOTATION_ENDS.get(kind) or re.compile(f"</{kind}>"), start)
            end = match.end() if match and match[0] != "\n\n" else -1
            if end >= 0:
                del self._malformed[malformed:]
            self._quotation = ("", 0, 0)
            if end > block.start:
                return end
        self._commit(block, found)
        return found.end

    # Inside a block

    def _read_item(self, block: _Block) -> Found:
        """Add the openers from here on to a block, and read what stands behind them."""
        text, tools = self._text, self._tools
        while True:
            at = block.body = text.run(SPACE, block.body)
            opener = text.token(_OPENER, _PART, at) if text.char(at) in ("<", "[") else None
            if opener:
                block.body, block.tags = opener.end(), True
                block.explicit = block.explicit or (opener[1] or opener[2]).replace("▁", "_") == "tool_call"
                stock = block.family == "hermes" or opener[0].startswith("<tool_call")
                block.family = "hermes" if stock else "tools_tag"
            elif not block.fence and not block.inline and text.holds("```", at):
                block.body, block.fence = text.run(_INFO, at), True
                block.family = block.family if block.tags else "fenced"
            else:
                break
        wrapped = block.tags or block.fence
        try:
            at = Reader(text).skip(at) if wrapped else at
            if at > block.body and _EXAMPLE.search(
                text.known, block.body, at
            ):  # a comment says that an example follows
                return Found((), block.body)
            char = text.char(at)
            python = char.isidentifier() or (char == "[" and text.char(text.run(SPACE, at + 1)).isidentifier())
            if char == "{" or (char == "[" and not python):
                value, end = read_value(text, at)
                if not block.tags and not self._ends_line(end, block):
                    return Found((), end)
                calls, problem = tools.calls_in(value, explicit=block.explicit)
                return Found(tuple(calls), end, problem)
            if char == "<":
                return read_xml(text, at, tools, explicit=block.explicit)
            if not python:
                return Found((), block.body)
            found = read_python(text, at, tools, program="fence" if block.fence and not block.tags else "")
            if not found.calls and block.tags:
                return read_named(text, at, tools, tagged=True)
            return found if wrapped or self._ends_line(found.end, block) else Found((), found.end)
        except Unreadable as error:
            named = _NAMED_OBJECT.match(text.known, at)
            problem = ""
            if block.explicit or (named and named[1] in tools):
                cut = error.position >= len(text.known)
                problem = CUT if cut else f"The tool call is not valid JSON ({error.reason}); write {FORM}."
            return Found((), max(at + 1, error.position), problem)

    def _ends_line(self, at: int, block: _Block) -> bool:
        """Whether nothing but closers, further values or a sentence stands on the line behind a call without tags."""
        text = self._text
        at = text.run(LINE_SPACE, at)
        while text.char(at) in ("}", "]"):  # one bracket too many
            at = text.run(LINE_SPACE, at + 1)
        char = text.char(at)
        if block.inline:
            return char == "`" and text.char(text.run(LINE_SPACE, at + 1)) in ("", "\n", "<")
        if char in (",", ";"):
            return text.char(text.run(SPACE, at + 1)) in ("", "{", "[")
        return char in ("", "\n", "{", "[", "<", "`") or (not block.fence and sentence_behind(text, at) == "new")

    def _past_closers(self, block: _Block, at: int) -> tuple[int, bool]:
        """The position behind all closers, cut and wrong ones too, and whether the fence of the block is still open."""
        text, fence, inline = self._text, block.fence, block.inline
        while True:
            here = text.run(SPACE, at)
            char = text.char(here)
            closer = text.token(_CLOSER, _PART, here) if char in ("<", "[") else None
            if closer:
                at = closer.end()
            elif char == "<" and text.holds("<tool_call>", here) and not text.char(text.run(SPACE, here + 11)):
                at = here + 11  # the opening tag used as a closing one
            elif char == "`" and (inline or (fence and text.holds("```", here))):
                end = text.run(_TICKS, here)
                if fence and text.char(end).isalnum():
                    return at, fence
                at, fence, inline = end, False, False
            elif here == at and (char in ("}", "]", ")") or (char in (",", ";") and (block.tags or block.fence))):
                at = here + 1
            else:
                return at, fence

    def _commit(self, block: _Block, found: Found) -> None:
        self._block = block
        if block.shown:
            return
        self._flow(block.start)
        space = self._space.removesuffix("\n")  # the one that the chat template puts there
        if self._calls or not self._pieces:
            self._blank = self._blank if self._calls else space
        else:
            self._pieces.append(space)
        self._space, self._behind_call = "", True
        self._kept = found.end
        self._calls += found.calls
        self._family = self._family or found.family or block.family

    def _go_on(self, block: _Block) -> int:
        """Behind a call of a block: take the next one, or leave the block."""
        text = self._text
        end, fence_open = self._past_closers(block, self._at)
        closers = text.known[self._at : end].strip(" \t\r\n,;)}]")
        at = text.run(SPACE, end)
        if text.char(at) in (",", ";"):
            at = text.run(SPACE, at + 1)
        char = text.char(at)
        array = char == "[" and text.char(text.run(SPACE, at + 1)) in ("{", "[")
        if char == "{" or array or (block.tags and not closers and char.isidentifier()):
            more = _Block(at, at, shown=block.shown) if closers else dataclasses.replace(block, start=at, body=at)
            found = self._read_item(more)
            if found.calls:
                self._kept = self._kept if more.shown else at  # past a comma between two calls
                self._commit(more, found)
                return found.end
            if found.problem:
                self._malformed.append(found.problem)
            end, fence_open = max(end, found.end), block.fence
        if fence_open and not self._quotation[0]:
            self._quotation = ("fence", end, len(self._malformed))
        if not block.shown:
            self._kept = self._block_end = end
        self._block = None
        return end


def _canonical_turn(text: str, tools: Tools) -> Parsed | None:
    """The short way for words and calls exactly as the chat template writes them; None for anything else."""
    start, heads = text.find(_OPEN), tuple(name.lower() for name in (*tools, *_HEADS))
    content = text[:start].removesuffix("\n")
    plain = start >= 0 and text[start - 1 : start] in ("", "\n") and tools and not _MARKUP.search(content)
    if not plain or any(line.lower().startswith(heads) for line in content.split("\n")):
        return None
    if start and is_only_shown(Text(text), 0, start, explicit=True):
        return None
    calls = []
    while text.startswith(_OPEN, start):
        try:
            value, end = DECODER.raw_decode(text, start + len(_OPEN))
        except (ValueError, RecursionError):
            return None
        if type(value) is not dict or value.keys() != {"name", "arguments"} or not text.startswith(_CLOSE, end):
            return None
        name, arguments = value["name"], value["arguments"]
        if type(name) is not str or name not in tools or type(arguments) is not dict or "properties" in arguments:
            return None
        call = tools.call(name, arguments, explicit=True)
        if isinstance(call, str):
            return None
        calls.append(call)
        start = end + len(_CLOSE) + 1
    return Parsed(content, tuple(calls), (), "hermes") if calls and start == len(text) + 1 else None


def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """Split a model's text into content and calls; `tools` are the offered ones in OpenAI form. Never raises.

    `TEXT\\n<tool_call>…` has the content `TEXT`: exactly the newline that the chat template puts there is taken off.
    """
    if turn := _canonical_turn(text, Tools(tools)):
        return turn
    stream = Stream(tools)
    stream._text.final = True
    stream.feed(text)
    return stream.parsed()
