"""Which parts of a model's text are tool calls.

A call is a JSON value in a place where a call can stand: behind an opening tag, as the first thing in a code fence, or
at the start of a line. Only in an explicit `<tool_call>` is it taken as it is; everywhere else it must name an offered
tool and its arguments must fit, so that JSON answers, echoed tool definitions and program text stay text. What clearly
was meant as a call but cannot be read stays in the content (the next prompt then repeats the model's own tokens) and is
explained in `Parsed.malformed`. A call whose text is cut is never a call.

Limits: calls written as XML, as Python or as ReAct text are not read yet, nor are unescaped quotes inside strings.
Time grows linearly with the text: what was read is not read again, and after `_MAX_REPAIRS` values that are no plain
JSON the rest is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.records import ToolCall
from shared.tool_calls import lenient
from shared.tool_calls.render import is_encodable

_MAX_REPAIRS = 200
_NAME_KEYS = ("name", "tool", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
_FORM = '{"name": ..., "arguments": {...}}'
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict
}  # fmt: skip

_TAG = r"<(?:tool_call|tool_calls|tools?|functions?|function[_-]calls?|json|response)>|\[TOOL_CALLS\]"
_OPENER = re.compile(
    rf"(?P<think><think>)"
    rf"|(?P<quoted>`(?:{_TAG}))"
    rf"|(?P<fence>^[ \t]*```[^\n`{{\[<]*+\s*+)(?:(?:{_TAG})\s*+)*+"
    rf"|(?P<tags>(?:(?:{_TAG})\s*+)++)"
    rf"|(?P<bare>(?:\A[\s\ufeff\u200b]*`?|^[ \t]*)(?=[{{\[]))",
    re.MULTILINE,
)
_TOOL_CALL_TAG = re.compile(r"</?tool_call>")
_FENCE_END = re.compile(r"^[ \t]*```", re.MULTILINE)
_TAG_END = re.compile(r"</\w|<tool_call>")
_SEPARATOR = re.compile(r"\s*+[,;]?\s*+")
_AFTER_BARE = re.compile(r"[ \t]*+(?:\Z|[\n,;{\[<`])")
_CLOSERS = re.compile(r"(?:\s*+(?:</[\w-]*>?|`(?!`)|<\|\w+\|>|\[/TOOL_CALLS\]|<tool_call>(?=\s*\Z)))*+")
_FENCE_CLOSERS = re.compile(r"(?:\s*+(?:</[\w-]*>?|```(?=\s*?(?:\n|\Z))|<\|\w+\|>))*+")
_NAMED_OBJECT = re.compile(r"""[\[\s]*\{\s*["']name["']\s*:\s*["'](\w+)["']""")
_DECODER = json.JSONDecoder(strict=False)  # models write raw newlines into SQL strings


@dataclass(frozen=True)
class Parsed:
    """What a model's text holds. `family` is the form of its first call: hermes, tools_tag, fenced, bare or ""."""

    content: str
    calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]  # one sentence the model can act on for each unreadable call
    family: str


def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """Split a model's text into content and calls; `tools` are the offered ones in OpenAI form. Never raises.

    `TEXT\\n<tool_call>…` has the content `TEXT`: exactly the newline that the chat template puts there is taken off.
    """
    return _Parser(text.removesuffix("<|im_end|>"), tools).run()


def parse_hermes(text: str) -> Parsed:
    """Exactly what vLLM's stock `hermes` parser finds: all `<tool_call>` blocks, or none if a single one is broken.

    One difference: arguments that are not an object are left out here, for no agent can use them.
    """
    bodies = [closed or cut for closed, cut in re.findall(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", text, re.S)]
    try:
        loaded = [json.loads(body) for body in bodies]
        pairs = [(call["name"], call["arguments"]) for call in loaded]
    except (ValueError, KeyError, TypeError, RecursionError):
        return Parsed(text, (), (), "")
    if not pairs or not all(isinstance(name, str) for name, _ in pairs):
        return Parsed(text, (), (), "")
    calls = tuple(ToolCall(name, arguments) for name, arguments in pairs if isinstance(arguments, dict))
    return Parsed(text[: text.find("<tool_call>")], calls, (), "hermes" if calls else "")


class _Parser:
    """One pass over one text. `kept` is where the content that is not collected yet begins."""

    def __init__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self.text = text
        self.offered = _schemas(tools)
        self.pieces: list[str] = []
        self.calls: list[ToolCall] = []
        self.malformed: list[str] = []
        self.family = ""
        self.kept = 0
        self.repairs = 0
        self.last_think_end = text.rfind("</think>")

    def run(self) -> Parsed:
        at = 0
        while self.repairs < _MAX_REPAIRS and (opener := _OPENER.search(self.text, at)):
            at = self._skip(opener) if opener["think"] or opener["quoted"] else self._block(opener)
        self.pieces.append(self.text[self.kept :])
        return Parsed(_join(self.pieces), tuple(self.calls), tuple(self.malformed), self.family)

    def _skip(self, opener: re.Match[str]) -> int:
        """Drafts in a closed think block and quotations are no calls; an unclosed think block ends with the first call."""
        if opener["quoted"]:
            end = self.text.find("`", opener.end())
            return end + 1 if end >= 0 else len(self.text)
        return self.text.find("</think>", opener.end()) if opener.end() <= self.last_think_end else opener.end()

    def _block(self, opener: re.Match[str]) -> int:
        """Take the calls behind one opener; returns where to go on."""
        at = resume = opener.end()
        end = None
        if not self.text.startswith(("{", "["), at):
            self._explain_words(opener)
        while self.text.startswith(("{", "["), at):
            found, problem, resume = self._value(at, opener)
            self.calls += found
            self.malformed += [problem] if problem else []
            if not found:
                break
            end, at = resume, _end(_SEPARATOR.match(self.text, resume))
        if end is not None:
            resume = max(resume, self._take(opener, end))
        in_fence = opener["fence"] and "```" not in self.text[end or resume : resume]
        return self._leave_fence(resume) if in_fence else resume

    def _explain_words(self, opener: re.Match[str]) -> None:
        """No JSON follows. Between explicit tags that was meant as a call, unless something else in there is one."""
        closing = _TOOL_CALL_TAG.search(self.text, opener.end()) if _explicit(opener) else None
        if closing and closing[0] != "<tool_call>" and not _OPENER.search(self.text, opener.end(), closing.start()):
            self.malformed.append(f"The text inside <tool_call> is not JSON; write {_FORM} there.")

    def _value(self, at: int, opener: re.Match[str]) -> tuple[list[ToolCall], str, int]:
        """The calls of one JSON value, what is wrong with it, and where to go on."""
        bare = opener["bare"] is not None
        try:
            value, stop = _DECODER.raw_decode(self.text, at)
        except (ValueError, RecursionError):
            self.repairs += 1
            limit = len(self.text) if bare else self._limit(at, opener)
            try:
                value, stop = lenient.read(self.text, at, limit)
            except lenient.Unreadable as error:
                return [], self._complaint(at, error, opener), max(at + 1, error.position) if bare else limit
        if bare and not _AFTER_BARE.match(self.text, stop):
            return [], "", stop
        read = [_as_call(item, self.offered, _explicit(opener)) for item in _items(value)]
        problem = next((item for item in read if isinstance(item, str)), None)
        return ([item for item in read if isinstance(item, ToolCall)] if problem is None else []), problem or "", stop

    def _limit(self, at: int, opener: re.Match[str]) -> int:
        """Where a repaired value has to end: at the next tag, in a fence also at its end."""
        ends = [_TAG_END.search(self.text, at), _FENCE_END.search(self.text, at) if opener["fence"] else None]
        return min((match.start() for match in ends if match), default=len(self.text))

    def _complaint(self, at: int, error: lenient.Unreadable, opener: re.Match[str]) -> str:
        named = _NAMED_OBJECT.match(self.text, at)
        if not _explicit(opener) and not (named and named[1] in self.offered):
            return ""
        if error.position >= len(self.text):
            return "The tool call was cut off before its JSON was complete; write it again in full."
        return f"The tool call is not valid JSON ({error}); write {_FORM}."

    def _take(self, opener: re.Match[str], end: int) -> int:
        """Close the content piece before a block and drop the block's markup; returns its end."""
        self.family = self.family or _family(opener)
        self.pieces.append(self.text[self.kept : opener.start()])
        self.kept = _end((_FENCE_CLOSERS if opener["fence"] else _CLOSERS).match(self.text, end))
        return self.kept

    def _leave_fence(self, at: int) -> int:
        closing = _FENCE_END.search(self.text, at)
        return closing.end() if closing else at


def _end(match: re.Match[str] | None) -> int:
    assert match is not None  # the pattern also matches nothing
    return match.end()


def _explicit(opener: re.Match[str]) -> bool:
    return "<tool_call>" in opener[0]


def _family(opener: re.Match[str]) -> str:
    if _explicit(opener):
        return "hermes"
    if opener["tags"] or "<" in opener[0]:
        return "tools_tag"
    return "fenced" if "`" in opener[0] else "bare"


def _join(pieces: Sequence[str]) -> str:
    """Content out of what stands around the calls: the first piece is exact, later ones are trimmed."""
    if len(pieces) == 1:
        return pieces[0]
    first, *others = pieces
    later = [piece.strip() for piece in others if piece.strip()]
    first = first.removesuffix("\n")
    return "\n".join(later if later and not first.strip() else [first, *later])


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions if function.get("name")}


def _items(value: Any) -> list[Any]:
    """A JSON value as a list of possible calls."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    return (value or [None]) if isinstance(value, list) else [value]


def _as_call(value: Any, offered: Mapping[str, Mapping[str, Any]], explicit: bool) -> ToolCall | str:
    """The call that a JSON value means, or what is wrong with it ("" when it is plain data)."""
    fields = value if isinstance(value, dict) else {}
    fields = next((fields[key] for key in ("function", "function_call") if isinstance(fields.get(key), dict)), fields)
    name = next((fields[key] for key in _NAME_KEYS if isinstance(fields.get(key), str)), None)
    if name is None:
        return f"The <tool_call> names no tool; write {_FORM}." if explicit else ""
    key = next((key for key in _ARGUMENT_KEYS if key in fields), None)
    if not explicit and (name not in offered or key is None):
        return ""
    given, schema = fields.get(key or ""), offered.get(name, {})
    if isinstance(given, dict) and "type" in given and "properties" in given:
        return f"The <tool_call> repeats the definition of {name}; write {_FORM}." if explicit else ""
    arguments = _arguments(given, schema)
    if arguments is None:
        return f"The arguments of {name} are not a JSON object; write {_FORM}."
    problem = "" if explicit else _misfit(name, arguments, schema)
    if problem:
        return problem
    call = ToolCall(name, arguments)
    return call if is_encodable(call) else f"The arguments of {name} hold half of a unicode surrogate pair."


def _arguments(given: Any, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments as an object: also from JSON text, encoded once or more, and from the bare value of an only argument."""
    text = ""
    while isinstance(given, str) and given.strip():
        text = given
        try:
            given = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            break
    if isinstance(given, dict):
        return given
    properties = schema.get("properties") or {}
    if text and len(properties) == 1 and not text.lstrip().startswith(("{", "[")):
        return {next(iter(properties)): text}
    return {} if not given else None


def _misfit(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties") or {}
    for key in schema.get("required") or ():
        if key not in arguments:
            return f'{name} needs the argument "{key}".'
    for key, value in arguments.items():
        if key not in properties:
            return f'{name} has no argument "{key}"; it takes {", ".join(properties) or "none"}.'
        kind = properties[key].get("type")
        expected = _JSON_TYPES.get(kind) if isinstance(kind, str) else None
        if expected and (not isinstance(value, expected) or (isinstance(value, bool) and kind != "boolean")):
            return f'The argument "{key}" of {name} must be of type {kind}.'
    return ""
