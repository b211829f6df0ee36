"""Where a call is only quoted: thinking, code, documents.

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
_DOCUMENTS = {"md", "markdown", "mdx", "rst"}
_QUOTES = ('"', "'", "“", "‘", "«")
_TICKS = re.compile("`*")
_INFO = re.compile(r"[^\n`{\[<]*")


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


def is_in_quotes(text: str, at: int) -> bool:
    """Whether an opening quotation mark stands right before a place."""
    return text[max(0, at - 1) : at] in _QUOTES and (at < 2 or text[at - 2] in " \t\n(:")


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
