"""Which parts of a model's text are tool calls.

A call stands where a call can stand: behind an opening tag, first in a code fence, or at the start of a line. In an explicit
`<tool_call>` it is taken as it is; everywhere else it must name an offered tool and its arguments must fit. Thinking, code
fences, inline code, block quotes, tables and announced examples quote; what they quote is no call, unless the quotation
never ends. What was meant as a call but cannot be read stays in the content and is explained in `malformed`. A call whose
text was cut is never a call.

The text is read in steps. A step changes nothing before it is decided, so one that has to wait for more text is simply
repeated, and a stream finds what the whole text holds. Time is linear: after `_PATIENCE` failed attempts the rest is content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .context import ends_prose, is_announced, is_in_sentence, is_only_shown, sentence_behind
from .forms import CALL_TAGS, CUT, Found, read_named, read_python, read_xml
from .json_values import Reader, read_value
from .text import LINE_SPACE, NEWLINE, SPACE, Text, Unreadable, Wait
from .tools import FORM, ToolCall, Tools

_PATIENCE = 4000
_FAR = 32  # characters that a failed attempt may read for the price of one
_WORDS_INSIDE = f"The text inside <tool_call> is not JSON; write {FORM} there."

# A stream tries again where something may have closed, as often as its credit in characters allows.
_FIRST_CREDIT = 20_000
_CREDIT = 24
_SHORT = 64
_MAY_CLOSE = re.compile(r"[}\]`\n]|[\w|/]>")

_ANCHOR = re.compile(r"[<`{\[\n]")
_TICKS = re.compile("`*")
_INFO = re.compile(r"`*[^\n`{\[<]*")
_DOCUMENT = re.compile(r"`{3,}(?:md|markdown|mdx|rst)[ \t]*\n", re.IGNORECASE)
_LAST_FENCE = re.compile(r".*\n[ \t]*`{3,}", re.DOTALL)
_QUOTATION_ENDS = {"fence": re.compile(r"^[ \t]*`{3,}", re.MULTILINE), "inline": re.compile("`|\n\n")}
_QUOTING_TAGS = set("think thinking thought reasoning scratchpad scratch_pad reflection".split()) | {
    "tool_response", "example", "pre", "code", "blockquote"
}  # fmt: skip
_WRAPPER = re.compile(
    r"(?!.*(?:respon|result|output|error|example|begin_of|name))"
    r"(?:[|｜]?[\w:▁-]*(?:tool|func|call|json|invoke|action|plugin|python_tag)[\w:▁-]*[|｜]?)|response|request",
    re.IGNORECASE,
)
_TOOL_CALL = re.compile(r"<(/?)tool_call>")
_OPENER = re.compile(r"<([\w:|｜▁.-]+)(?: (?![^<>\n]*\b(?:name|arguments)\s*=)[^<>\n{]*)?>|\[([A-Za-z_]+)\]")
_OPENER_PART = re.compile(r"(?:<(?:[\w:|｜▁.-]+(?: [^<>\n]*)?)?|\[[A-Za-z_]*)\Z")
_CLOSER = re.compile(r"<(/[\w:▁.-]*|[|｜][^<>\s]*)(>?)|\[(/|END_)?([A-Za-z_]+)\]")
_CLOSER_PART = re.compile(r"(?:<(?:/[\w:▁.-]*|[|｜][^<>\s]*)?|\[/?[A-Za-z_]*)\Z")
_ELEMENT = re.compile(r"<([\w-]+)([=>/\s])")
_EXAMPLE = re.compile(r"\b(?:example|format|schema|template|usage|syntax)", re.IGNORECASE)
_NAMED_OBJECT = re.compile(r"""[\[\s]*\{\s*["']name["']\s*:\s*["'](\w+)["']""")


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

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._text = Text("")
        self._tools = Tools(tools)
        self._heads = tuple(name.lower() for name in (*self._tools, "action", "tool", "function", "default_api."))
        self._failures = 0 if self._tools else _PATIENCE  # without tools all is text
        self._credit = _FIRST_CREDIT
        self._pieces: list[str] = []  # of the content
        self._calls: list[ToolCall] = []
        self._malformed: list[str] = []
        self._family = ""
        self._at = 0  # where to read on
        self._fresh = True  # whether a line begins there
        self._kept = 0  # where the text begins that is not yet given to the content
        self._space = ""  # white space at the end of the content so far; it waits for what comes behind it
        self._blank = ""  # all there was before the first call, if that was only white space
        self._behind_call = False  # whether a call stood since the last piece of content
        self._block: _Block | None = None  # whose last call ends at `_at`
        self._block_end = 0  # behind the last block
        self._quotation = ("", 0, 0)  # its kind, where it begins, and how much was malformed before
        self._wordy = -1  # where a <tool_call> begins in which no call was found so far

    def feed(self, delta: str) -> Update:
        """Read on; returns the content and the calls that nothing behind can change any more."""
        text, pieces, calls = self._text, len(self._pieces), len(self._calls)
        known, text.known = text.known, ""  # with a single reference CPython appends in place, without copying
        known += delta
        text.known = known
        del known
        self._credit += _CREDIT * len(delta)
        undecided = len(text.known) - self._at
        may_close = undecided < _SHORT or _MAY_CLOSE.search(text.known, len(text.known) - len(delta) - 1)
        if not text.final and not (may_close and self._credit >= undecided):
            return Update("", ())
        self._credit -= undecided
        with contextlib.suppress(Wait):
            while self._step():
                pass
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
        text, patient = self._text, self._failures < _PATIENCE
        if self._block:
            self._at = self._go_on(self._block)
            return True
        if self._fresh and patient:
            self._at, self._fresh = self._line(self._at), False
            return True
        anchor = _ANCHOR.search(text.known, self._at) if patient else None
        end = anchor.start() if anchor else len(text.known)
        self._flow(end)
        self._at = end
        if anchor:
            self._at = self._anchor(end, anchor[0])
        elif not text.final:
            raise Wait
        else:
            if self._wordy == 0 or (self._wordy > 0 and text.known[self._wordy - 1] == "\n"):
                self._malformed.append(_WORDS_INSIDE)
            self._pieces.append(self._blank if self._calls else self._space)
            self._blank, self._space, self._wordy = "", "", -1
        return anchor is not None

    def _flow(self, to: int) -> None:
        """Give the text up to a place to the content. Behind a call it is trimmed and begins a new line."""
        piece, self._kept = self._text.known[self._kept : to], max(self._kept, to)
        if self._text.final and to == len(self._text.known):
            piece = piece.removesuffix("<|im_end|>").removesuffix("<|endoftext|>")
        body = piece.rstrip()
        if not body:
            self._space += piece
            return
        if self._behind_call:
            self._pieces.append("\n" * bool(self._pieces) + body.lstrip())
        else:
            self._pieces.append(self._space + body)
        self._space, self._behind_call, self._blank = piece[len(body) :], False, ""

    # Where a call can stand: each returns where to go on

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
        if char in ("{", "["):
            return self._begin(_Block(start, at))
        head = text.known[at : at + 64].lstrip("*_#✿` ").lower()
        if not text.final and len(head) < 40 and any(known.startswith(head) for known in self._heads):
            raise Wait
        if not head.startswith(self._heads) or text.known.startswith("```", at):
            return at
        block, end = _Block(start, at), at
        try:
            prose = at == start and ends_prose(text, self._block_end, at)
            found = read_python(text, at, self._tools, program="paragraph") if prose else Found((), at)
            if not found.calls:
                found = read_named(text, at, self._tools, tagged=False)
                found = found if found.family or (prose and self._ends_line(found.end, block)) else Found((), at)
            if found.calls:
                return self._take(block, found)
            end = found.end
        except Unreadable as error:
            end = error.position
            if error.cut and end >= len(text.known):
                self._malformed.append(CUT)
        return max(at, end)

    def _anchor(self, at: int, char: str) -> int:
        """A character that may begin something."""
        text, known = self._text, self._text.known
        if char == "\n":
            self._flow(at + 1)
            self._fresh = True
            return at + 1
        if char == "`":
            return self._ticks(at)
        if char == "{":
            announced = not self._quotation[0] and is_announced(text, at)
            return self._begin(_Block(at, at)) if announced else at + 1
        if char == "<" and known[max(0, at - 1) : at] in {*"\"'“‘«"} and (at < 2 or known[at - 2] in " \t\n(:"):
            return at + 1  # a quoted tag
        opener = text.token(_OPENER, _OPENER_PART, at)
        name = (opener[1] or opener[2]) if opener else ""
        if opener and name.lower() in _QUOTING_TAGS and char == "<":
            self._quotation = self._quotation if self._quotation[0] else (name, opener.end(), len(self._malformed))
            return opener.end()
        element = _ELEMENT.match(known, at)
        call = element and (element[1] in CALL_TAGS and element[2] in "= \n") or (element and element[1] in self._tools)
        if call or (opener and _WRAPPER.fullmatch(name)):
            return self._begin(_Block(at, at))
        closer = text.token(_CLOSER, _CLOSER_PART, at)
        if not closer or not closer[1] or closer[1][0] != "/":
            return at + 1
        name = closer[1][1:]
        if name and name == self._quotation[0]:
            del self._malformed[self._quotation[2] :]
            self._quotation = ("", 0, 0)
        if name == "tool_call" and self._wordy >= 0:
            self._malformed.append(_WORDS_INSIDE)
            self._wordy = -1
        elif name == "tool_call" and self._calls and not self._quotation[0]:  # text followed the call in place of it
            self._flow(at)
            self._kept = closer.end()
        return closer.end()

    def _ticks(self, at: int) -> int:
        """Backticks: a fence if there are three, else inline code."""
        text, (quotation, _, malformed) = self._text, self._quotation
        end = text.run(_TICKS, at)
        start = text.known.rfind("\n", 0, at) + 1
        start = at if text.known[start:at].strip(" \t\r\xa0\u200b\ufeff") else start
        if quotation == "inline":
            self._quotation = ("", 0, 0)
            return end
        if end - at < 3:
            char = text.char(end)
            if (
                not quotation
                and not text.known[:at].strip("\n \t\ufeff\u200b")
                and (char == "{" or char.isidentifier())
            ):
                return self._begin(_Block(0, end, "fenced", inline=True))  # perhaps the whole answer is a call
            self._quotation = self._quotation if quotation else ("inline", end, len(self._malformed))
            return end
        if quotation == "fence":
            behind = text.char(text.run(LINE_SPACE, end))
            del self._malformed[malformed:]
            self._quotation = ("", 0, 0)
            if behind in ("", "\n"):
                return end
        if _DOCUMENT.match(text.known, at):
            if not text.final:
                raise Wait
            last = _LAST_FENCE.match(text.known, end)
            return last.end() if last else end
        return self._begin(_Block(start, at))

    def _begin(self, block: _Block) -> int:
        """A place where a block of calls may begin."""
        text = self._text
        found = self._read_item(block)
        if found.calls:
            return self._take(block, found)
        known = text.known
        if block.explicit and self._calls and not known[self._block_end : block.start].strip():
            if text.char(block.body) == "":  # the opening tag was used to close the call before it
                self._kept = block.body
                return block.body
        begins_line = not known[known.rfind("\n", 0, block.start) + 1 : block.start].strip()
        shown = is_only_shown(text, self._block_end, block.start, explicit=block.explicit)
        if block.explicit and not (found.problem or self._quotation[0] or shown):
            tag = text.search(_TOOL_CALL, block.body) if begins_line else None
            if tag and not tag[1] and self._read_item(_Block(tag.start(), tag.start())).calls:
                self._flow(block.start)  # an opening tag too many
                self._kept = block.body
            else:
                self._wordy = block.start
        self._failures += 1 + (found.end - block.start) // _FAR
        if found.problem and not shown and (block.explicit or begins_line):
            self._malformed.append(found.problem)
        if (block.fence or block.inline) and not self._quotation[0]:
            self._quotation = ("fence" if block.fence else "inline", block.body, len(self._malformed))
        return max(found.end, block.body, block.start + 1)

    def _take(self, block: _Block, found: Found) -> int:
        """Make the calls of an item calls of the text, unless they are only shown or quoted."""
        text, since = self._text, self._block_end
        block.shown = is_only_shown(text, since, block.start, explicit=block.explicit) or (
            is_in_sentence(text, since, block.start)
            and sentence_behind(text, self._past_closers(block, found.end)[0]) == "same"
        )
        kind, start, malformed = self._quotation
        if kind and not block.shown:
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
            opener = text.token(_OPENER, _OPENER_PART, at) if text.char(at) in ("<", "[") else None
            name = (opener[1] or opener[2]) if opener else ""
            if opener and _WRAPPER.fullmatch(name):
                block.body, block.tags = opener.end(), True
                block.explicit = block.explicit or name.strip("|｜").replace("▁", "_") == "tool_call"
                block.family = (
                    "hermes" if "hermes" in (block.family, opener[1] == "tool_call" and "hermes") else "tools_tag"
                )
            elif not block.fence and not block.inline and text.holds("```", at):
                block.body, block.fence = text.run(_INFO, at), True
                block.family = block.family if block.tags else "fenced"
            else:
                break
        try:
            return self._read_call(block)
        except Unreadable as error:
            named = _NAMED_OBJECT.match(text.known, at)
            problem = ""
            if block.explicit or (named and named[1] in tools):
                cut = error.position >= len(text.known)
                problem = CUT if cut else f"The tool call is not valid JSON ({error.reason}); write {FORM}."
            return Found((), max(at + 1, error.position), problem)

    def _read_call(self, block: _Block) -> Found:
        """What stands at the body of a block, also behind a comment, unless that says that an example follows."""
        text, tools, at = self._text, self._tools, block.body
        wrapped = block.tags or block.fence
        if wrapped:
            at = Reader(text).skip(at)
            if at > block.body and _EXAMPLE.search(text.known, block.body, at):
                return Found((), block.body)
        char = text.char(at)
        quoted = char == '"' and wrapped and text.char(at + 1) in ("{", "[")
        python = char == "[" and text.char(text.run(SPACE, at + 1)).isidentifier()
        if quoted or char == "{" or (char == "[" and not python) or (block.explicit and text.holds('"name"', at)):
            value, end = Reader(text).container(at, "{") if char == '"' and not quoted else read_value(text, at)
            if not block.tags and not self._ends_line(end, block):
                return Found((), end)
            calls, problem = tools.calls_in(value, explicit=block.explicit)
            return Found(tuple(calls), end, problem)
        if char == "<":
            return read_xml(text, at, tools, explicit=block.explicit)
        if not (char.isidentifier() or python):
            return Found((), block.body)
        if block.fence and not block.tags:
            return read_python(text, at, tools, program="fence")
        found = read_python(text, at, tools)
        if not found.calls and block.tags:
            return read_named(text, at, tools, tagged=True)
        return found if block.tags or self._ends_line(found.end, block) else Found((), found.end)

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
        """The position behind all closers, also cut and wrong ones, and whether the fence of the block is still open."""
        text, fence, inline = self._text, block.fence, block.inline
        while True:
            here = text.run(SPACE, at)
            char = text.char(here)
            closer = text.token(_CLOSER, _CLOSER_PART, here) if char in ("<", "[") else None
            name = (closer[1] or closer[4]).lstrip("/") if closer else ""
            wrapper = _WRAPPER.fullmatch(name)
            if closer and name not in _QUOTING_TAGS:
                if closer[4]:
                    ends = bool(closer[3] and wrapper)
                elif closer[1][0] == "/":
                    ends = not closer[2] or wrapper is not None or name == "s"
                else:
                    ends = not wrapper or "end" in name.lower() or "/" in name
                if not ends:
                    return at, fence
                at = closer.end()
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
        self._space, self._behind_call, self._wordy = "", True, -1
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


def parse(text: str, tools: Iterable[Mapping[str, Any]]) -> Parsed:
    """Split a model's text into content and calls; `tools` are the offered ones in OpenAI form. Never raises.

    `TEXT\\n<tool_call>…` has the content `TEXT`: exactly the newline that the chat template puts there is taken off.
    """
    stream = Stream(tools)
    stream._text.final = True
    stream.feed(text)
    return stream.parsed()
