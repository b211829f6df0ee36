"""What stands around a call: tags, special tokens, code fences, backticks.

No model is faithful to one wrapper, so wrappers are known by what their names say, openers are taken in any sequence
(`<tool_call>` in a fence, a fence in `<tools>`), and any closer closes. What decides is the call inside.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from shared.tool_calls.quotations import TAGS
from shared.tool_calls.source import Reading, Source

END_TOKENS = ("<|im_end|>", "<|endoftext|>")
_MARKERS = ("[TOOL_CALLS]", "[TOOL_REQUEST]")
_MARKER_ENDS = ("[/TOOL_CALLS]", "[END_TOOL_REQUEST]")

_TAG_NAME = re.compile(r"[\w:|｜▁.-]*")
_WRAPPER = re.compile(
    r"(?!.*(?:respon|result|output|error|example|begin_of|name))"
    r"(?:[|｜]?[\w:▁-]*(?:tool|func|call|json|invoke|action|plugin|python_tag)[\w:▁-]*[|｜]?)|response|request",
    re.IGNORECASE,
)
_ATTRIBUTES = re.compile(r"[^\n<>{]*")
_NAME_ATTRIBUTE = re.compile(r"\b(?:name|arguments)\s*=")
_TICKS = re.compile("`*")
_INFO = re.compile(r"[^\n`{\[<]*")


@dataclass(frozen=True)
class Opening:
    """The openers of a block: from `start` up to `body`, where a call may begin."""

    start: int
    body: int
    explicit: bool = False  # one of them is <tool_call>
    tags: bool = False
    fence: bool = False
    inline: bool = False  # a single backtick
    bare: bool = False  # nothing but the start of a line

    @property
    def family(self) -> str:
        if self.explicit:
            return "hermes"
        if self.tags:
            return "tools_tag"
        return "fenced" if self.fence or self.inline else "bare"


def tag_name(source: Source, at: int) -> Reading[tuple[str, int]]:
    """The name of the tag that begins at the `<` here and the position behind it ("" if it is none)."""
    end = yield from source.run(_TAG_NAME, at + 1)
    return source.text[at + 1 : end], end


def is_wrapper(name: str) -> bool:
    return _WRAPPER.fullmatch(name) is not None


def opening(source: Source, at: int, found: Opening) -> Reading[Opening]:
    """Add all openers from here on to those that are `found`."""
    while True:
        at = yield from source.spaces(at)
        char = yield from source.char(at)
        if char == "<":
            name, end = yield from tag_name(source, at)
            end = (yield from _attributes_end(source, end)) if is_wrapper(name) else end
            if not is_wrapper(name) or (yield from source.char(end)) != ">":
                break
            explicit = found.explicit or name == "tool_call"
            at, found = end + 1, dataclasses.replace(found, tags=True, explicit=explicit)
        elif char == "[" and (marker := (yield from _marker(source, at, _MARKERS))):
            at, found = at + len(marker), dataclasses.replace(found, tags=True)
        elif char == "`" and not found.fence and (yield from source.holds("```", at)):
            at = yield from source.run(_INFO, (yield from source.run(_TICKS, at)))
            found = dataclasses.replace(found, fence=True)
        else:
            break
    return dataclasses.replace(found, body=at)


def _marker(source: Source, at: int, markers: tuple[str, ...]) -> Reading[str]:
    """Which of these stands here; "" if none does."""
    for marker in markers:
        if (yield from source.holds(marker, at)):
            return marker
    return ""


def _attributes_end(source: Source, at: int) -> Reading[int]:
    """Past the attributes of a tag, but not past a name, which belongs to a call written as XML."""
    if (yield from source.char(at)) != " ":
        return at
    end = yield from source.run(_ATTRIBUTES, at)
    return at if _NAME_ATTRIBUTE.search(source.text, at, end) else end


def closing(source: Source, at: int, found: Opening) -> Reading[tuple[int, bool]]:
    """The position behind all closers, also cut and wrong ones, that follow the calls of a block, and whether its
    fence is still open."""
    fence, inline = found.fence, found.inline
    while True:
        here = yield from source.spaces(at)
        char = yield from source.char(here)
        end = -1
        if char == "<":
            end = yield from _closing_tag_end(source, here)
        elif char == "`" and fence:
            end = yield from _closing_fence_end(source, here)
            fence = end < 0
        elif char == "`" and inline:
            end, inline = here + 1, False
        elif char and char in "}])" and here == at:
            end = here + 1
        elif char == "[" and (marker := (yield from _marker(source, here, _MARKER_ENDS))):
            end = here + len(marker)
        elif char and char in ",;" and here == at and (found.tags or found.fence):
            end = here + 1
        if end < 0:
            return at, fence
        at = end


def _closing_tag_end(source: Source, at: int) -> Reading[int]:
    token = (yield from source.char(at + 1)) == "|"
    slash = (yield from source.char(at + 1 + token)) == "/"
    name, end = yield from tag_name(source, at + (1 + token if slash else 0))
    if name in TAGS or not (slash or (len(name) > 2 and name[0] in "|｜" and name[-1] in "|｜")):
        return -1
    if not slash and is_wrapper(name) and "end" not in name.lower():
        return -1  # a special token that opens the next call
    closed = (yield from source.char(end)) == ">"
    if slash and closed and not is_wrapper(name) and name != "s":
        return -1  # it closes something else
    return end + closed


def _closing_fence_end(source: Source, at: int) -> Reading[int]:
    end = yield from source.run(_TICKS, at)
    char = yield from source.char(end)
    return end if end - at >= 3 and not char.isalnum() else -1
