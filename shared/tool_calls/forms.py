"""Calls that are not JSON objects: XML elements, Python calls, and names with their arguments behind or below them.

    <function=get_columns><parameter=table>claims</parameter></function>    and its relatives
    get_columns(table="claims")       [get_columns("claims"), ...]          literal arguments only
    get_columns {"table": "claims"}   Action: get_columns[claims]           also with ReAct's and Qwen-Agent's labels

Each reader says which calls it found, or why none, and where reading goes on. A value whose end is missing was cut, and
a cut call is no call.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from .context import sentence_behind
from .json_values import Reader, read_value, value_of
from .text import LINE_SPACE, NEWLINE, SPACE, Text, Unreadable
from .tools import NAMESPACE, ToolCall, Tools

CUT = "The tool call was cut off before it was complete; write it again in full."
CALL_TAGS = ("function", "invoke", "tool", "tool_call", "function_call", "call", "tool_use", "function-call")
_ARGUMENT_TAGS = ("arguments", "parameters", "args", "input", "params")
_PARAMETER_TAGS = ("parameter", "param", "arg", "argument")
_NAME_TAGS = ("name", "tool_name", "function_name")

# A quote ends an attribute only where the tag goes on behind it: JSON in it need not escape the tag's own quotes.
_QUOTED = "|".join(rf"{q}(?:[^{q}]|{q}(?!\s*/?>|\s+[\w.-]+\s*=))*+{q}" for q in "\"'")
_ATTRIBUTE = re.compile(rf"([\w.-]+)\s*=\s*({_QUOTED}|[^\s\"'<>/]+)")
_TAG = re.compile(
    rf"<([\w.-]+)(?:=\s*[\"']?([^\s\"'<>]*)[\"']?)?((?:\s+[\w.-]+\s*=\s*(?:{_QUOTED}|[^\s\"'<>/]+))*+)\s*(/?)>"
)
_TAG_PART = re.compile(r"<[\w.-]*(?:[\s=/][^<>]*|\s[^<>]*=\s*[\"'].*)?\Z", re.DOTALL)
_CLOSING = re.compile(r"</([\w.:-]+)>")
_CLOSING_PART = re.compile(r"</?[\w.:-]*\Z")
_CLOSERS_AT_END = re.compile(r"(?:\s*</[\w-]+>)+\s*\Z")
_STRUCTURE = r"</?(?:(?:\w+:)?(?:tool|func|call|invoke)[\w-]*|{})(?=[\s=/>])|<(?:{})(?=[\s=>])|</(?:{})>"
_MARKUP = re.compile(r"</?[A-Za-z]|\n\n")
_LESS_THAN = re.compile("<")

_NAME = re.compile(r"[\w.]*")
_LABEL_CHARACTERS = re.compile(r"[\w*#✿ \t]*")
_LIST_LABEL = re.compile(r"\s*(?:calling )?(?:tool|function)s?(?:[ _]calls?)?|\s*call(?:ing)?", re.IGNORECASE)
_NAME_LABEL = re.compile(r"[*_#✿ \t]*(action|(?:tool|function)(?:[ _]name)?)[\d*_✿ \t]*", re.IGNORECASE)
_INPUT_LABEL = re.compile(
    r"[*_#✿ \t]*(?:(?:action|tool)[ _]input|(?:function )?arguments|input|args|param(?:eter)?s)[\d*_✿ \t]*",
    re.IGNORECASE,
)
_EDGE = re.compile(r"[*#`:\"' \t\d]*")
_COLON = re.compile(r"[:*_ \t]*")
_MARK = re.compile(r"\[ARGS\]|<[|｜][^<>\s]*[|｜]>")
_MARK_PART = re.compile(r"(?:\[A?R?G?S?|<(?:[|｜][^<>\s]*)?)\Z")
_KEY_FIRST = re.compile(r"\w+\s*[=:]")
_ONE_WORD = re.compile(r"[\w.\"'-]+")
_SQL = re.compile(r"(?:SELECT|WITH|INSERT|UPDATE|DELETE|EXPLAIN|PRAGMA)\b", re.IGNORECASE)
_SQL_END = re.compile(
    r"\n[ \t]*(?:\n|```|</?[|\w]|[*_#✿]*(?:observation|thought|action|final answer|answer|result|return)[ \d*✿]*:)",
    re.IGNORECASE,
)
_FENCES = {"```": re.compile("```"), "`": re.compile("`")}
_INFO = re.compile(rf"\w*[ \t]*\n|(?!{_SQL.pattern})\w+ +(?=\{{|{_SQL.pattern})", re.IGNORECASE)


class Found(NamedTuple):
    """What was read from one place: the calls, or none and what is wrong, and where reading goes on."""

    calls: tuple[ToolCall, ...]
    end: int
    problem: str = ""
    family: str = ""


def read_xml(text: Text, at: int, tools: Tools, *, explicit: bool) -> Found:
    """The call whose element begins at the `<` here."""
    tag = text.token(_TAG, _TAG_PART, at)
    if tag is None:
        return Found((), at, CUT if _TAG_PART.match(text.known, at) else "")
    element, end = tag[1], tag.end()
    attributes = {
        key: html.unescape(value[1:-1] if value[0] in "\"'" else value)
        for key, value in _ATTRIBUTE.findall(tag[3] + ">")
    }
    name = element if element in tools else tag[2] or attributes.pop("name", "")
    if element in _NAME_TAGS and not attributes:
        closing = text.search(_LESS_THAN, end)
        if closing and text.holds(f"</{element}>", closing.start()):
            name, end = text.known[end : closing.start()].strip(), closing.start() + len(f"</{element}>")
    name = NAMESPACE.sub("", name, count=1)
    known = element in (*CALL_TAGS, *_NAME_TAGS) or element in tools
    if not name or (name not in tools and not (explicit and known)) or not (known or element in _PARAMETER_TAGS):
        return Found((), at)
    given: Any = next((attributes[key] for key in attributes if key in _ARGUMENT_TAGS), attributes)
    if not tag[4] and given is attributes:
        given, end = _xml_arguments(text, end, element, tools.parameters(name))
        if given is None:
            return Found((), end, CUT if element in CALL_TAGS else "")
        named = element in tools and isinstance(given, str)  # a sentence may name such a tag
        if named and (_MARKUP.search(given) or sentence_behind(text, end) == "same"):
            return Found((), end)
    call = tools.call(name, given, explicit=explicit, plain=True)
    return Found((), end, call) if isinstance(call, str) else Found((call,), end, family="xml")


def _xml_arguments(text: Text, at: int, element: str, parameters: Mapping[str, Any]) -> tuple[Any, int]:
    """What stands for the arguments in an element, from behind its opening tag on; None if it was cut."""
    structure = re.compile(_STRUCTURE.format(re.escape(element), "|".join(_PARAMETER_TAGS), "|".join(_ARGUMENT_TAGS)))
    arguments: dict[str, Any] = {}
    given: Any = arguments
    while True:
        start = text.run(SPACE, at)
        char = text.char(start)
        if char == "{" and not given:
            given, at = read_value(text, start)
            continue
        if char != "<":
            limit = text.search(structure, start)
            stop = limit.start() if limit else len(text.known)
            closed = limit is not None and limit[0].startswith("</")
            if not closed:
                return (given, at) if given else (None, stop)
            given = given or _trimmed(_CLOSERS_AT_END.sub("", text.known[at:stop]))  # text in place of parameters
            at = stop  # else stray text
            continue
        closing = text.token(_CLOSING, _CLOSING_PART, start)
        inner = None if closing else text.token(_TAG, _TAG_PART, start)
        if closing and closing[1] == element:
            return given, closing.end()
        if closing and closing[1] in _ARGUMENT_TAGS:
            at = closing.end()
            continue
        if closing or not inner or inner[1] in CALL_TAGS or given is not arguments:
            return given, at
        at = seek = inner.end()
        if inner[1] in _ARGUMENT_TAGS and inner[1] not in parameters:
            continue
        attribute = _ATTRIBUTE.search(inner[3] + ">")
        key = inner[2] or (attribute[2].strip("\"'") if attribute else "") if inner[1] in _PARAMETER_TAGS else inner[1]
        closer, value = f"</{inner[1]}>", None
        while value is None:  # up to the last closing tag before the next structural one, or to that one on a new line
            limit = text.search(structure, seek)
            stop = limit.start() if limit else len(text.known)
            end = text.known.rfind(closer, at, stop)
            if end >= 0:
                value, at = text.known[at:end], end + len(closer)
            elif limit is None:
                return None, stop
            elif text.known[stop - 1] == "\n" and limit[0] != "<tool_call":
                value, at = text.known[at:stop], stop
            else:
                seek = limit.end()
        arguments[key] = _trimmed(value)


def _trimmed(value: str) -> str:
    """Without the line breaks next to the tags, and without the indentation where the closing tag is indented too."""
    lines = value.split("\n")
    if len(lines) > 1 and not lines[0].strip():
        del lines[0]
    indented = len(lines) > 1 and not lines[-1].strip() and lines.pop()
    return textwrap.dedent("\n".join(lines)) if indented else "\n".join(lines)


def read_python(text: Text, at: int, tools: Tools, *, program: str = "") -> Found:
    """`name(...)`, also printed, or a list of such calls. Any argument but a literal makes the text a program.

    With `program` the calls fill a "fence", or a "paragraph" that a sentence may end; anything else makes it a program.
    """
    calls: list[ToolCall] = []
    reader = Reader(text)
    at = reader.skip(at) if program == "fence" else at
    many = text.char(at) == "["
    if many:
        end = text.run(_LABEL_CHARACTERS, at + 1)
        at = end + 1 if text.char(end) == ":" and _LIST_LABEL.fullmatch(text.known, at + 1, end) else at + 1
    while True:
        at = text.run(SPACE, at)
        end = text.run(_NAME, at)
        printed = text.known[at:end] == "print" and text.char(end) == "("
        if printed:
            at, end = end + 1, text.run(_NAME, end + 1)
        name = NAMESPACE.sub("", text.known[at:end], count=1)
        if name not in tools or text.char(end) != "(":
            return Found((), at)
        (positional, named), at = Reader(text).container(end)
        if len(positional) == 1 and not named and isinstance(positional[0], dict):
            named = positional.pop()
        names = list(tools.parameters(name))[: len(positional)]
        call = tools.call(name, {**dict(zip(names, positional, strict=False)), **named}, explicit=False)
        at = text.run(SPACE, at) if many or printed else at
        unfit = len(names) < len(positional) or named.keys() & {*names} or (printed and text.char(at) != ")")
        if unfit or isinstance(call, str):
            return Found((), at)
        calls.append(call)
        at += printed
        if many:
            at = text.run(SPACE, at + 1) if text.char(at) == "," else at
            if text.char(at) != "]":
                continue
            at, many = at + 1, False
        if not program:
            return Found(tuple(calls), at, family="python")
        end = text.run(LINE_SPACE, at)
        separated = text.char(end) in (",", ";")
        following = reader.skip(end + separated) if program == "fence" else text.run(SPACE, end + separated)
        char, lines = text.char(following), text.known.count("\n", at, following)
        ended = char in ("", "<") or (char == "`" if program == "fence" else lines > 1)
        if ended or (program != "fence" and sentence_behind(text, following) == "new"):
            return Found(tuple(calls), end + 1 if separated else at, family="python")
        if not separated and not lines:
            return Found((), following)
        at = following


def read_named(text: Text, at: int, tools: Tools, *, tagged: bool) -> Found:
    """A name with its arguments: JSON, a fenced block, or SQL or a word for an only argument; both may have labels."""
    end = text.run(_LABEL_CHARACTERS, at)
    label = _NAME_LABEL.fullmatch(text.known, at, end) if text.char(end) == ":" and not tagged else None
    action = label is not None and label[1].lower() == "action"
    start = text.run(_EDGE, end if label else at)
    end = text.run(_NAME, start)
    if tagged and text.known[start:end] == "function" and (mark := text.token(_MARK, _MARK_PART, end)):
        start, end = mark.end(), text.run(_NAME, mark.end())
    name = NAMESPACE.sub("", text.known[start:end], count=1)
    if name not in tools:
        return Found((), at)
    if action and text.char(end) in ("(", "["):
        newline = text.search(NEWLINE, end)
        stop = newline.start() if newline else len(text.known)
        given = text.known[end + 1 : stop].rstrip(" \t*_`")
        if text.known[end] == "(":
            found = read_python(text, start, tools)
            return found if text.run(SPACE, found.end) >= stop else Found((), stop)
        if given[-1:] != "]" or _KEY_FIRST.match(given) or given.count("[") + 1 != given.count("]"):
            return Found((), stop)
        argument: Any = _unquoted(given[:-1].strip())
    else:
        end = text.run(_EDGE, end)
        body = text.run(SPACE, end)
        while tagged and (mark := text.token(_MARK, _MARK_PART, body)):
            body = text.run(SPACE, mark.end())
        below = "\n" in text.known[end:body]
        if label:
            colon = text.run(_LABEL_CHARACTERS, body)
            if text.char(colon) != ":" or not _INPUT_LABEL.fullmatch(text.known, body, colon):
                return Found((), at)
            body = text.run(SPACE, text.run(_COLON, colon))
        if not (label or below or text.char(body) == "{"):
            return Found((), at)
        argument, stop = _read_input(text, body)
        bare = isinstance(argument, str) and text.char(body) != "`"
        if label and isinstance(argument, str) and (not action or _KEY_FIRST.match(argument)):
            return Found((), at)  # other labels also describe tools, and a name is no part of the value
        if bare and not (
            label or tagged or _SQL.match(argument) or (_ONE_WORD.fullmatch(argument) and argument not in tools)
        ):
            return Found((), at)
    call = tools.call(name, argument, explicit=False)
    return Found((), stop) if isinstance(call, str) else Found((call,), stop, family="react" if label else "")


def _read_input(text: Text, at: int) -> tuple[Any, int]:
    """A JSON object, a fenced text, or bare text: one line, or the lines of an SQL statement."""
    char = text.char(at)
    if char == "{":
        return read_value(text, at)
    if char == "`":
        ticks = "```" if text.holds("```", at) else "`"
        closing = text.search(_FENCES[ticks], at + len(ticks))
        if closing is None:
            raise Unreadable("a fence is not closed", len(text.known), cut=True)
        body = text.known[at + len(ticks) : closing.start()]
        info = _INFO.match(body)
        return body[info.end() if info else 0 :].strip(), closing.end()
    newline = text.search(NEWLINE, at)
    end = text.search(_SQL_END, at) if _SQL.match(text.known, at) else newline
    stop = end.start() if end else len(text.known)
    return _unquoted(text.known[at:stop].strip()), stop


def _unquoted(text: str) -> str:
    """A text without the quotes around it if no others of their kind are in it, or what JSON text in quotes says."""
    value = value_of(text) if text.startswith('"') else None
    if isinstance(value, str):
        return value
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]
    return text[1:-1] if quoted else text
