"""Where a call is only quoted: thinking, code, documents, and examples that the words before announce.

A quotation counts only if it ends: models forget closing tags and fences, and then a call behind them is meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.tool_calls.source import Reading, Source

TAGS = {
    "think",
    "thinking",
    "thought",
    "reasoning",
    "scratchpad",
    "scratch_pad",
    "reflection",
    "tool_response",
    "example",
    "pre",
    "code",
    "blockquote",
}
_NEAR = 200  # characters before a call that can say what it is
_DOCUMENTS = {"md", "markdown", "mdx", "rst"}
_QUOTES = ('"', "'", "“", "‘", "«")
_TICKS = re.compile("`*")
_INFO = re.compile(r"[^\n`{\[<]*")
_EXAMPLE = re.compile(
    r"(?:\b(?:examples?|for instance|e\.g\.|how to|looks? like|like this|would (?:look|be|call|write)|"
    r"(?:the|this|following|expected) (?:\w+ ){0,3}(?:format|syntax|form) (?:is|would|looks?))\b[^\n]*|"
    r"^(?!.*\b(?:I|let)\b)(?:.*\b(?:please|should|must)\b|\W*(?:in|use)\b).*\b(?:this|the following) (?:\w+ )?(?:format|syntax)|"
    r"\b(?:previous|earlier|last|failed|wrong) (?:\w+ )?call was|"
    r"^\W*(?:usage|syntax|format|template)|(?:例如|比如|示例|例子))\W*[:：]\W{0,3}$",
    re.IGNORECASE,
)
_ANNOUNCED = re.compile(
    r"^\W{0,4}(?:(?:tool|function)s?(?:[ _]calls?)?|call|action|json)\W{0,4}:\W{0,3}$|"
    r"\b(?:here is|here's|this is) (?:the|my|a) (?:\w+ ){0,2}(?:call|request|query|JSON)\W{0,4}:\W{0,3}$|"
    r"\b(?:I'll|I will|I'm going to|let me|let's|calling)\b[^|`\"]*[.:!]\s+$",
    re.IGNORECASE,
)
_PROSE_END = re.compile(r"(?:[.:!?…)]\W{0,3}|```)$")


@dataclass(frozen=True)
class Quotation:
    """A quotation that has begun at `start`."""

    kind: str  # name of the tag, "fence" or "inline"
    start: int

    def end(self, source: Source) -> Reading[int]:
        """The position behind its end, or -1 if it never ends."""
        if self.kind == "fence":
            return (yield from _fence_end(source, self.start))
        if self.kind == "inline":
            return (yield from _inline_end(source, self.start))
        closer = f"</{self.kind}>"
        found = yield from source.find(closer, self.start)
        return found + len(closer) if found >= 0 else -1


def is_example(text: str, at: int) -> bool:
    """Whether the line before a call says that it is an example."""
    line = text[max(0, at - _NEAR) : at].rstrip().rpartition("\n")[2]
    return not {":", "："}.isdisjoint(line[-4:]) and _EXAMPLE.search(line) is not None


def is_in_quotes(text: str, at: int) -> bool:
    """Whether an opening quotation mark stands right before a place."""
    return text[max(0, at - 1) : at] in _QUOTES and (at < 2 or text[at - 2] in " \t\n(:")


def is_announced(text: str, at: int) -> bool:
    """Whether the words before it on its line say that a call comes."""
    _, newline, words = text[max(0, at - _NEAR) : at].rpartition("\n")
    return (
        (bool(newline) or at < _NEAR) and not words.lstrip().startswith(("- ", "* ")) and bool(_ANNOUNCED.search(words))
    )


def ends_prose(text: str, start: int, at: int) -> bool:
    """Whether the text between two places is empty or ends as a sentence does."""
    before = text[max(start, at - _NEAR) : at].rstrip()
    return not before or _PROSE_END.search(before) is not None


def _fence_end(source: Source, at: int) -> Reading[int]:
    """The position behind the next line that begins with a fence, or -1."""
    while True:
        ticks = yield from source.find("```", at)
        if ticks < 0:
            return -1
        at = yield from source.run(_TICKS, ticks)
        line = source.text[max(0, ticks - 80) : ticks].rpartition("\n")
        if line[1] and not line[2].strip():
            return at


def _inline_end(source: Source, at: int) -> Reading[int]:
    """The position behind the next backtick of the same paragraph, or -1."""
    tick = yield from source.find("`", at)
    blank = source.text.find("\n\n", at, tick if tick >= 0 else len(source.text))
    return -1 if blank >= 0 else tick + 1 if tick >= 0 else -1


def quoted_document_end(source: Source, at: int, ticks: int) -> Reading[int]:
    """The end of a fence of a Markdown text, or of one with more than three backticks around another fence; else -1."""
    end = yield from source.run(_INFO, at)
    document = source.text[at:end].strip().lower() in _DOCUMENTS and (yield from source.char(end)) == "\n"
    if ticks == 3 and not document:
        return -1
    depth, alone = 1, True
    while depth:
        start, end = end, (yield from _fence_end(source, end))
        if end < 0:
            return -1
        opens = ticks == 3 and (yield from source.char(end)).isalnum()
        depth += 1 if opens else -source.text.endswith("`" * ticks, start, end)
        alone = alone and not depth
    return end if document or not alone else -1
